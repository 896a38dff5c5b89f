"""Which part of the vector goes where: decided from numbers alone, the same for every member.

The flat vector of ``elements`` floats is cut into one contiguous *share* a reducer, and a share into *parts*, the unit
of transmission. Butterfly all-reduce: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009, section 3 (reduce-scatter, then all-gather).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

# 1 MiB of fp32. Small enough to overlap reducing with sending, large enough that a hop to a worker thread
# costs less than its decoding.
PART_ELEMENTS = 262_144


@dataclass(frozen=True, slots=True)
class Part:
    """Elements ``start`` to ``stop`` of the vector, the ``index``-th part of its reducer's share."""

    index: int
    start: int
    stop: int

    @property
    def elements(self) -> int:
        """How many elements the part has."""
        return self.stop - self.start


def shares_by_bandwidth(elements: int, bandwidths: Sequence[float], granularity: int) -> tuple[int, ...]:
    """Cut ``elements`` into one share a member, proportional to bandwidth, each but the last a whole number of blocks.

    Args:
        elements: length of the vector, 0 or more.
        bandwidths: Mbit/s of each member, above 0.
        granularity: the codec's block; a block is never split between reducers.

    Returns:
        The elements of each member's share, in the members' order; they sum to ``elements``.
    """
    blocks = -(-elements // granularity)
    # Not sum(), which rounds otherwise from Python 3.12 on: members may run different versions.
    total = math.fsum(bandwidths)
    # Cumulated and rounded, so that errors do not add up and the last cut is exactly `blocks`.
    cuts = [0]
    so_far = 0.0
    for bandwidth in bandwidths:
        so_far += bandwidth
        cuts.append(min(round(blocks * (so_far / total)), blocks))
    cuts[-1] = blocks
    edges = [min(cut * granularity, elements) for cut in cuts]
    return tuple(stop - start for start, stop in itertools.pairwise(edges))


def share_bounds(shares: Sequence[int], position: int) -> tuple[int, int]:
    """Where the share of the member at ``position`` starts and stops in the vector."""
    start = sum(shares[:position])
    return start, start + shares[position]


def cut_into_parts(
    start: int, stop: int, granularity: int, part_elements: int = PART_ELEMENTS
) -> tuple[Part, ...]:
    """The parts of the share from ``start`` to ``stop``, each but the last a whole number of blocks."""
    step = max(granularity, part_elements - part_elements % granularity)
    return tuple(
        Part(index, first, min(first + step, stop)) for index, first in enumerate(range(start, stop, step))
    )


def fp32_bytes(shares: Sequence[int], position: int, contributes: Sequence[bool]) -> int:
    """Bytes of values that the member at ``position`` sends and receives in one exchange when nothing is encoded.

    It sends the shares of all others and receives its own share from every other contributor; then it sends its
    averaged share to every other contributor and, if it is one itself, receives the shares of all others.
    """
    own, total = shares[position], sum(shares)
    others = sum(contributes) - contributes[position]
    elsewhere = (total - own) if contributes[position] else 0
    return 4 * (2 * elsewhere + 2 * own * others)
