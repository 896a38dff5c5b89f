"""Which ranks of one peer hold the same parts of parameters. No I/O, no clock, no torch.

A parameter that tensor parallelism leaves whole is the same on all ranks, and so is a replica of a shard. Each rank
averages in a round of its own, whose result may differ in its last bits. So of all ranks that hold one part, the first
one's average counts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

Keys = Sequence[Hashable]
"""For each of a rank's parameters, the place of its part. Two ranks with the same place hold the same part."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """The parts that one rank has in common with other ranks of its peer."""

    is_first: tuple[bool, ...]
    """For each parameter, whether this rank is the first one that holds its part."""
    takes: tuple[tuple[int, int], ...] = ()
    """(parameter, rank) of each part that this rank takes from another one."""
    gives: tuple[tuple[int, int], ...] = ()
    """(parameter, rank) of each part that this rank gives to another one."""


def sharing_of(keys: Sequence[Keys], rank: int) -> Sharing:
    """Return the parts that a rank has in common with others.

    Args:
        keys: those of all ranks, in their order.
        rank: number of the rank.
    """
    is_first: list[bool] = []
    takes: list[tuple[int, int]] = []
    gives: list[tuple[int, int]] = []
    for index, ranks in _holders(keys):
        if rank == ranks[0]:
            gives += [(index, other) for other in ranks[1:]]
        elif rank in ranks:
            takes.append((index, ranks[0]))
        if rank in ranks:
            is_first.append(rank == ranks[0])
    return Sharing(tuple(is_first), tuple(takes), tuple(gives))


def are_common(keys: Sequence[Keys]) -> list[bool]:
    """Return for each number of a parameter whether any two ranks hold the same part of it."""
    found = [False] * max(map(len, keys), default=0)
    for index, ranks in _holders(keys):
        found[index] = found[index] or len(ranks) > 1
    return found


def first_difference(keys: Sequence[Keys], values: Sequence[Sequence[bytes]]) -> tuple[int, int, int] | None:
    """Return (parameter, rank, other rank) of the first part that two ranks hold with different values.

    Args:
        keys: those of all ranks.
        values: digests of the ranks' parts, parameter by parameter.
    """
    for index, ranks in _holders(keys):
        for other in ranks[1:]:
            if values[other][index] != values[ranks[0]][index]:
                return index, ranks[0], other
    return None


def _holders(keys: Sequence[Keys]) -> Iterator[tuple[int, list[int]]]:
    """Yield the number of each parameter, with the ranks that hold one part of it, in ascending order."""
    for index in range(max(map(len, keys), default=0)):
        found: dict[Hashable, list[int]] = {}
        for rank, mine in enumerate(keys):
            if index < len(mine):
                found.setdefault(mine[index], []).append(rank)
        for ranks in found.values():
            yield index, ranks
