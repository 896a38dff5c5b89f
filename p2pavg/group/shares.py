"""Which part of the vector goes where: decided from numbers alone, the same for every member.

The flat vector of ``elements`` floats is cut into one contiguous *share* a reducer, and a share into *parts*, the unit
of transmission. Butterfly all-reduce: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", 2009, section 3 (reduce-scatter, then all-gather).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

# 2 MiB of fp32. What a part costs beside its bytes, in calls and wake-ups, is then little: half and a quarter of it
# cost a tenth to a fourth more processor for a large vector, twice as much saves nothing.
MAX_PART_ELEMENTS = 524_288
MIN_PART_ELEMENTS = 65_536
PARTS_OF_A_SHARE = 8
"""About as many as it takes until reducing and sending overlap: the last part of each lane overlaps with nothing."""

_HALF = Fraction(1, 2)


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


@dataclass(frozen=True, slots=True)
class MemberLink:
    """What counts of a member when the vector is cut.

    Args:
        bandwidth: Mbit/s in its slower direction, above 0.
        contributes: whether it has a contribution, or waits for the result; an auxiliary does neither. A observer
            counts as a contributor, though it sends no contributions: a little more than it carries.
        reachable: whether others can dial it.
    """

    bandwidth: float
    contributes: bool = True
    reachable: bool = True


# A reducer reads what the others contribute to its share, and says what its average is. One that lies about its
# bandwidth gains at most one more equal share by it. The price: where one of eight has ten times the bandwidth of the
# others, a round takes up to two thirds longer than with the best shares; among links within a factor of two, little.
MOST_EQUAL_SHARES = 2
MOST_OF_VECTOR = Fraction(2, 3)
"""With two or three reducers, twice an equal share would be the whole vector."""


def largest_fraction(members: Sequence[MemberLink]) -> Fraction:
    """Return the part of the vector that one member reduces at most, whatever bandwidth it has signed.

    Two members see each other's contributions in any case, and one reducer has no choice: there is no limit then.
    """
    reducers = sum(member.reachable for member in members) or len(members)
    if len(members) <= 2 or reducers == 1:
        return Fraction(1)
    return min(Fraction(MOST_EQUAL_SHARES, reducers), MOST_OF_VECTOR)


def best_fractions(members: Sequence[MemberLink], most: Fraction = Fraction(1)) -> tuple[Fraction, ...]:
    """Share fractions that minimise the round's duration; exact, each from 0 to ``most``, and summing to 1.

    Of a vector of V bytes member i reduces the fraction x. With c contributors, a contributor sends V (1 - x) of
    contributions and V x (c - 1) of averages, and receives as much: V (1 + x (c - 2)) each way. An auxiliary receives
    c contributions and sends c averages: V x c each way. (Patarasuk and Yuan 2009, section 3, with shares of any
    size.) Divided by the member's bandwidth b that is its time, and the round takes as long as the slowest.

    In a time of T V, a contributor reduces max(0, (T b - 1) / (c - 2)), which is nothing up to T = 1/b, and an
    auxiliary T b / c; neither reduces more than ``most``. All of it grows with T, so the shortest time is the T at
    which it adds up to 1: *water-filling*. Then the time of a member that reduces less than ``most`` cannot be made
    shorter without making another's time, as long or longer, still longer. That is the objective of hivemind's
    load_balancing.py, which solves a linear program and rounds; here it is exact.

    Of two contributors each sends V, whatever it reduces: they share in proportion to bandwidth, and an auxiliary's
    counts half, since it receives two contributions where a contributor receives one. That makes no auxiliary the
    slowest. A member that cannot be dialled reduces nothing, unless none can be dialled.

    Args:
        members: their links.
        most: the largest fraction of one member; with as many reducers as there are it has to suffice for all of it.
    """
    contributors = sum(member.contributes for member in members)
    anybody = any(member.reachable for member in members)
    reduces = [member.reachable or not anybody for member in members]
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
    """Return the least T, in units of V, in which the whole vector is reduced."""
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
    """The members with bandwidths of few levels, a factor of 1.5 apart; those near the median have the median's.

    What a link carries is measured, and two measurements of equal links differ. Shares that are best for such numbers
    are worse than equal ones: of four members, one that seems a fifth slower than the others gets less than half of
    what each of them gets.
    """
    if not members:
        return []
    median = Fraction(sorted(member.bandwidth for member in members)[len(members) // 2])
    return [replace(member, bandwidth=_level_of(member.bandwidth, median)) for member in members]


_STEP = Fraction(3, 2)
_NEAR = Fraction(60, 49)  # about the root of the step
_MOST_STEPS = 16


def _level_of(bandwidth: float, median: Fraction) -> float:
    found, level = Fraction(bandwidth), median
    for _ in range(_MOST_STEPS):
        if found >= level * _NEAR:
            level *= _STEP
        elif found < level / _NEAR:
            level /= _STEP
        else:
            return float(level)
    return bandwidth  # hundreds of times more, or less: then it matters little how much


def fastest_shares(
    elements: int, members: Sequence[MemberLink], granularity: int, most: Fraction = Fraction(1)
) -> tuple[int, ...]:
    """Cut ``elements`` into one share a member, for the shortest round, each cut between two blocks.

    Args:
        elements: length of the vector, 0 or more.
        members: their links, in the roster's order.
        granularity: the codec's block; a block is never split between reducers.
        most: the fraction that one member reduces at most; see :func:`largest_fraction`.

    Returns:
        The elements of each member's share, in the members' order; they sum to ``elements``.
    """
    # Every member computes this for itself, and all must come to the same integers. Fractions are exact: no rounding
    # that another platform or version of Python may do otherwise (sum() of floats does, from 3.12 on).
    blocks = -(-elements // granularity)
    cuts = itertools.accumulate(best_fractions(members, most), initial=Fraction(0))
    # The sums are rounded and not the shares, so that errors do not add up. Half goes up: with round()'s half to even
    # a share of exactly one block could become none or two, depending on where it lies.
    edges = [min(math.floor(blocks * cut + _HALF) * granularity, elements) for cut in cuts]
    return tuple(stop - start for start, stop in itertools.pairwise(edges))


def bound_seconds(payload_bytes: int, members: Sequence[MemberLink]) -> float:
    """The least time that a round takes, in seconds, when nothing but bandwidth costs time.

    Args:
        payload_bytes: of one whole vector, as encoded for the wire.
        members: their links; the best shares are taken, as exact fractions.
    """
    contributors = sum(member.contributes for member in members)
    seconds_a_megabit = max(
        _traffic(fraction, contributors, member) / Fraction(member.bandwidth)
        for fraction, member in zip(best_fractions(members), members, strict=True)
    )
    return float(seconds_a_megabit * Fraction(payload_bytes * 8, 10**6))


def _traffic(fraction: Fraction, contributors: int, member: MemberLink) -> Fraction:
    """What a member sends, and receives, in vectors."""
    return 1 + fraction * (contributors - 2) if member.contributes else fraction * contributors


def share_bounds(shares: Sequence[int], position: int) -> tuple[int, int]:
    """Where the share of the member at ``position`` starts and stops in the vector."""
    start = sum(shares[:position])
    return start, start + shares[position]


def part_size(elements: int, reducers: int) -> int:
    """Elements of a part, where a vector of so many is reduced by so many members; the same for all of them."""
    return min(max(elements // (reducers * PARTS_OF_A_SHARE), MIN_PART_ELEMENTS), MAX_PART_ELEMENTS)


def cut_into_parts(start: int, stop: int, granularity: int, part_elements: int) -> tuple[Part, ...]:
    """The parts of the share from ``start`` to ``stop``, each but the last a whole number of blocks."""
    step = max(granularity, part_elements - part_elements % granularity)
    return tuple(
        Part(index, first, min(first + step, stop)) for index, first in enumerate(range(start, stop, step))
    )


def fp32_bytes(shares: Sequence[int], position: int, members: Sequence[tuple[bool, bool]]) -> int:
    """Bytes of values that the member at ``position`` sends and receives in one exchange when nothing is encoded.

    A contributor sends the shares of all others, and every member receives its own share from every other contributor;
    then it sends its averaged share to every other holder and, if it is one itself, receives the shares of all others.

    Args:
        members: of each, whether it contributes and whether it holds the result.
    """
    own, total = shares[position], sum(shares)
    contributes, holds = members[position]
    others = sum(c for c, _ in members) - contributes + sum(h for _, h in members) - holds
    return 4 * ((total - own) * (contributes + holds) + own * others)
