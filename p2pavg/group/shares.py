"""Division of the vector into shares and parts. Every member computes the same from the same numbers.

The flat vector of ``elements`` floats is cut into one contiguous *share* per reducer. A share is cut into *parts*, the
unit of transmission. Butterfly all-reduce: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009, section 3 (reduce-scatter, then all-gather).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from p2pavg.group.bandwidth import DEFAULT_MBPS

# 2 MiB of fp32. At this size the fixed cost of a part, in calls and wake-ups, is small. For a large vector, parts of
# half or a quarter of the size cost a tenth to a fourth more processor time, and parts of twice the size save nothing.
MAX_PART_ELEMENTS = 524_288
MIN_PART_ELEMENTS = 65_536
PARTS_OF_A_SHARE = 8
"""Parts per share, enough for reducing and sending to overlap. The last part of each lane overlaps with nothing."""

_HALF = Fraction(1, 2)


@dataclass(frozen=True, slots=True)
class Part:
    """Elements ``start`` to ``stop`` of the vector, the ``index``-th part of its reducer's share."""

    index: int
    start: int
    stop: int

    @property
    def elements(self) -> int:
        """Number of elements of the part."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class MemberLink:
    """A member's properties that decide its share.

    Args:
        bandwidth: Mbit/s in its slower direction; 0 if it is unknown, which :func:`levelled` replaces.
        contributes: True for a contributor or an observer, False for an auxiliary. An observer sends no contributions,
            so its traffic is a little overestimated.
        reachable: True if other members can dial it.
    """

    bandwidth: float
    contributes: bool = True
    reachable: bool = True


# A reducer reads the other members' contributions to its share and computes their average. With this limit, a reducer
# that lies about its bandwidth gains at most one more equal share. The limit has a price. If one of eight members has
# ten times the bandwidth of the others, a round takes up to two thirds longer than with the best shares. Among links
# within a factor of two, the price is small.
MOST_EQUAL_SHARES = 2
MOST_OF_VECTOR = Fraction(2, 3)
"""Limit for two or three reducers, where twice an equal share would be (nearly) the whole vector."""


def largest_fraction(members: Sequence[MemberLink]) -> Fraction:
    """Return the largest fraction of the vector that one member reduces, for any signed bandwidth.

    There is no limit for two members, which see each other's contributions in any case, or for a single reducer.
    """
    reducers = sum(member.reachable for member in members) or len(members)
    if len(members) <= 2 or reducers == 1:
        return Fraction(1)
    return min(Fraction(MOST_EQUAL_SHARES, reducers), MOST_OF_VECTOR)


def best_fractions(members: Sequence[MemberLink], most: Fraction = Fraction(1)) -> tuple[Fraction, ...]:
    """Share fractions that minimise the round's duration; exact, each from 0 to ``most``, and summing to 1.

    Of a vector of V bytes a member reduces the fraction x. With c contributors, a contributor sends V (1 - x) of
    contributions and V x (c - 1) of averages. It receives as much, so its traffic is V (1 + x (c - 2)) each way. An
    auxiliary receives c contributions and sends c averages: V x c each way. (Patarasuk and Yuan 2009, section 3, with
    shares of any size.) The member's time is that traffic divided by its bandwidth b. The round takes as long as its
    slowest member.

    In a time of T V, a contributor reduces max(0, (T b - 1) / (c - 2)), which is 0 up to T = 1/b. An auxiliary
    reduces T b / c. Neither reduces more than ``most``. All these fractions grow with T, so the shortest time is the T
    at which they sum to 1: *water-filling*. At that T, the time of a member that reduces less than ``most`` can be
    shortened only by lengthening that of another member that needs as long or longer. This is the objective of
    hivemind's load_balancing.py, which solves a linear program and rounds; here the solution is exact.

    With two contributors each of them sends V, for any x. They share in proportion to bandwidth. An auxiliary's
    bandwidth counts half, because it receives two contributions where a contributor receives one. So no auxiliary is
    the slowest. A member that cannot be dialled reduces nothing, unless no member can be dialled.

    Args:
        members: links of the members.
        most: the largest fraction of one member. The reducers' fractions must be able to sum to 1.
    """
    contributors = sum(member.contributes for member in members)
    any_reachable = any(member.reachable for member in members)
    reduces = [member.reachable or not any_reachable for member in members]
    pipes = [_pipe(member, contributors) for member in itertools.compress(members, reduces)]
    level = _level(pipes, most) if pipes else Fraction(0)
    found = iter([pipe.filled(level, most) for pipe in pipes])
    return tuple(next(found) if one_of_them else Fraction(0) for one_of_them in reduces)


@dataclass(frozen=True, slots=True)
class _Pipe:
    """The fraction that a member reduces in a time of T V: nothing until T is ``start``, then ``slope`` for each T."""

    start: Fraction
    slope: Fraction

    def filled(self, level: Fraction, most: Fraction) -> Fraction:
        return min(most, max(Fraction(0), (level - self.start) * self.slope))

    def full_at(self, most: Fraction) -> Fraction:
        return self.start + most / self.slope


def _pipe(link: MemberLink, contributors: int) -> _Pipe:
    bandwidth = Fraction(link.bandwidth)
    if not link.contributes:
        return _Pipe(Fraction(0), bandwidth / max(contributors, 1))
    return (
        _Pipe(Fraction(0), bandwidth)
        if contributors <= 2
        else _Pipe(1 / bandwidth, bandwidth / (contributors - 2))
    )


def _level(pipes: Sequence[_Pipe], most: Fraction) -> Fraction:
    """Return the least T, in units of V, at which the whole vector is reduced."""
    changes = sorted(
        [(pipe.start, pipe.slope) for pipe in pipes] + [(p.full_at(most), -p.slope) for p in pipes]
    )
    level, carried, slope = Fraction(0), Fraction(0), Fraction(0)
    for moment, change in changes:
        if carried + slope * (moment - level) >= 1:
            break
        carried += slope * (moment - level)
        level, slope = moment, slope + change
    return level + (1 - carried) / slope if slope else level


def levelled(members: Sequence[MemberLink]) -> list[MemberLink]:
    """Return the members with their bandwidths rounded to levels, a factor of 1.5 apart, starting at the median.

    Bandwidths are measured, and two measurements of equal links differ. Shares that are optimal for such numbers are
    worse than equal shares. For example, if one of four members seems a fifth slower than the others, its share is less
    than half of each of theirs.

    A member whose bandwidth is unknown counts as the median. A newcomer with more than an equal share would make the
    rounds of all members longer.
    """
    if not members:
        return []
    assumed = sorted(member.bandwidth or DEFAULT_MBPS for member in members)
    median = Fraction(assumed[len(members) // 2])
    return [replace(member, bandwidth=_level_of(member.bandwidth or median, median)) for member in members]


_STEP = Fraction(3, 2)
_NEAR = Fraction(60, 49)  # about the square root of the step
_MOST_STEPS = 16


def _level_of(bandwidth: float | Fraction, median: Fraction) -> float:
    found, level = Fraction(bandwidth), median
    for _ in range(_MOST_STEPS):
        if found >= level * _NEAR:
            level *= _STEP
        elif found < level / _NEAR:
            level /= _STEP
        else:
            return float(level)
    return float(bandwidth)  # hundreds of times more or less than the median: the exact value matters little


def fastest_shares(
    elements: int, members: Sequence[MemberLink], granularity: int, most: Fraction = Fraction(1)
) -> tuple[int, ...]:
    """Cut ``elements`` into one share per member, for the shortest round. Every cut is between two blocks.

    Args:
        elements: length of the vector, 0 or more.
        members: links of the members, in the roster's order.
        granularity: the codec's block; a block is never split between reducers.
        most: the largest fraction that one member reduces; see :func:`largest_fraction`.

    Returns:
        The number of elements of each member's share, in the members' order. They sum to ``elements``.
    """
    # Every member computes the shares itself, and all must get the same integers. Fractions are exact. Floats may be
    # rounded differently on other platforms or versions of Python (sum() of floats is, from 3.12 on).
    blocks = -(-elements // granularity)
    cuts = itertools.accumulate(best_fractions(members, most), initial=Fraction(0))
    # The sums are rounded, not the shares, so errors do not add up. Halves are rounded up. With round(), which rounds
    # half to even, a share of exactly one block could get no block or two, depending on its position.
    edges = [min(math.floor(blocks * cut + _HALF) * granularity, elements) for cut in cuts]
    return tuple(stop - start for start, stop in itertools.pairwise(edges))


def bound_seconds(payload_bytes: int, members: Sequence[MemberLink]) -> float:
    """Return the lower bound of a round's duration, in seconds, if only bandwidth costs time.

    Args:
        payload_bytes: bytes of one whole vector, as encoded for the wire.
        members: links of the members. The shares are the best ones, as exact fractions.
    """
    contributors = sum(member.contributes for member in members)
    seconds_a_megabit = max(
        _traffic(fraction, contributors, member) / Fraction(member.bandwidth)
        for fraction, member in zip(best_fractions(members), members, strict=True)
    )
    return float(seconds_a_megabit * Fraction(payload_bytes * 8, 10**6))


def _traffic(fraction: Fraction, contributors: int, member: MemberLink) -> Fraction:
    """Return the traffic of a member in each direction, in units of the vector's size."""
    return 1 + fraction * (contributors - 2) if member.contributes else fraction * contributors


def share_bounds(shares: Sequence[int], position: int) -> tuple[int, int]:
    """Return the first element of the share of the member at ``position``, and the element after its last."""
    start = sum(shares[:position])
    return start, start + shares[position]


def part_size(elements: int, reducers: int) -> int:
    """Return the number of elements of a part, for a vector of ``elements`` and a number of reducers."""
    return min(max(elements // (reducers * PARTS_OF_A_SHARE), MIN_PART_ELEMENTS), MAX_PART_ELEMENTS)


def cut_into_parts(start: int, stop: int, granularity: int, part_elements: int) -> tuple[Part, ...]:
    """Return the parts of the share from ``start`` to ``stop``. Each but the last is a whole number of blocks."""
    step = max(granularity, part_elements - part_elements % granularity)
    return tuple(
        Part(index, first, min(first + step, stop)) for index, first in enumerate(range(start, stop, step))
    )


def fp32_bytes(shares: Sequence[int], position: int, members: Sequence[tuple[bool, bool]]) -> int:
    """Return the bytes of values that the member at ``position`` sends and receives in one exchange without a codec.

    A contributor sends the shares of all others, and every member receives its own share from every other contributor.
    Then each member sends its averaged share to every other holder. A holder receives the shares of all others.

    Args:
        members: for each member, True if it contributes, and True if it holds the result.
    """
    own, total = shares[position], sum(shares)
    contributes, holds = members[position]
    others = sum(c for c, _ in members) - contributes + sum(h for _, h in members) - holds
    return 4 * ((total - own) * (contributes + holds) + own * others)
