"""The ranges of the vector that each member of a later attempt reduces. Pure: every member computes the same ones.

In the first attempt a member reduces one range, its share (:mod:`p2pavg.group.shares`). When members are lost, those
that are left keep their ranges, since contributions to them have come already. Only the ranges of the lost members are
divided anew.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TypeAlias

from p2pavg.group.shares import share_bounds

Range: TypeAlias = tuple[int, int]
"""First element of a range of the vector, and the element after its last."""

_HALF = Fraction(1, 2)


def whole_ranges(shares: Sequence[int]) -> tuple[tuple[Range, ...], ...]:
    """Return the ranges of the first attempt, in the members' order: one each, or none for a share of nothing."""
    bounds = [share_bounds(shares, position) for position in range(len(shares))]
    return tuple(((start, stop),) if start < stop else () for start, stop in bounds)


def ranges_after_loss(
    shares: Sequence[int], left: Sequence[int], wanted: Sequence[int], granularity: int
) -> tuple[tuple[Range, ...], ...]:
    """Divide the vector among the members that are left.

    Each keeps the range that it had in the first attempt. What the lost members had is divided in proportion to what
    each member that is left lacks of the share that it would have if the vector were cut among these members only. So
    no member gets more than the greater of that share and its first one.

    The ranges depend on nothing but the group and the members that are left. So a peer that knows these can check a
    signature of any attempt, without knowing the attempts before it.

    Args:
        shares: elements of each member of the group in the first attempt.
        left: positions of the members that are left, in ascending order.
        wanted: elements of each of them if the vector were cut among them only. They sum to the sum of ``shares``.
        granularity: the codec's block; a block is never split.

    Returns:
        Of each member that is left, its range in the first attempt and then further ones, in ascending order. A member
        may have none.
    """
    kept = whole_ranges(shares)
    free = [one for position, own in enumerate(kept) if position not in left for one in own]
    lacks = [max(0, want - shares[position]) for want, position in zip(wanted, left, strict=True)]
    blocks = -(-sum(stop - start for start, stop in free) // granularity)
    cuts = itertools.accumulate(lacks, initial=0)
    edges = [math.floor(Fraction(blocks * cut, max(sum(lacks), 1)) + _HALF) * granularity for cut in cuts]
    return tuple(
        kept[position] + tuple(_between(free, start, stop))
        for position, (start, stop) in zip(left, itertools.pairwise(edges), strict=True)
    )


def _between(ranges: Sequence[Range], first: int, last: int) -> Iterator[Range]:
    """Yield the pieces of ranges from their ``first`` to their ``last`` element, counted through all of them."""
    at = 0
    for start, stop in ranges:
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            yield start + low, start + high
        at += stop - start
