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
from p2pavg.group.reach import Reach, is_direct

# 2 MiB of fp32. At this size the fixed cost of a part, in calls and wake-ups, is small. For a large vector, parts of
# half or a quarter of the size cost a tenth to a fourth more processor time, and parts of twice the size save nothing.
MAX_PART_ELEMENTS = 524_288
MIN_PART_ELEMENTS = 65_536
PARTS_OF_A_SHARE = 8
"""Parts per share, enough for reducing and sending to overlap. The last part of each lane overlaps with nothing."""

_HALF = Fraction(1, 2)


@dataclass(frozen=True, slots=True)
class SharePart:
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
        reach: way in which other members connect to it.
    """

    bandwidth: float
    contributes: bool = True
    reach: Reach = Reach.DIALABLE


RELAY_MBPS = 10.0
"""Rate that relays are assumed to have for one group, in Mbit/s: all relayed bytes of the group together, in both
directions. It is what one relay gives by default. Members compute with the same number, whatever their relays allow."""


# A reducer reads the other members' contributions to its share and computes their average. With this limit, a reducer
# that lies about its bandwidth gains at most one more equal share. The limit has a price. If one of eight members has
# ten times the bandwidth of the others, a round takes up to two thirds longer than with the best shares. Among links
# within a factor of two, the price is small.
MOST_EQUAL_SHARES = 2
MOST_OF_VECTOR = Fraction(2, 3)
"""Limit for two or three reducers, where twice an equal share would be (nearly) the whole vector."""


def largest_fraction(members: Sequence[MemberLink]) -> Fraction:
    """Return the largest fraction of the vector that one member reduces, for any signed bandwidth.

    There is no limit for two members, which see each other's contributions in any case, or for a single reducer. In a
    group with contributors that can only be relayed, equal shares are those of the members that can be dialled, if
    there are any. Otherwise the limit would send through relays what these members can reduce.
    """
    able = list(itertools.compress(members, _reduces(members)))
    dialled = sum(member.reach is Reach.DIALABLE for member in able) if _relayed_contributors(members) else 0
    reducers = dialled or len(able)
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
    the slowest.

    **Relays.** Two members exchange directly if one of them can be dialled or both can punch. All other pairs exchange
    through relays, which carry R (:data:`RELAY_MBPS`) for the whole group. A member that can only be relayed reduces
    nothing, unless no member is better. So bytes go through relays between punchable reducers and relayed contributors
    only. If there are r of the latter and the punchable reducers together reduce y, each of the r sends V y and
    receives V y: 2 r V y in all. In a time of T V, this allows y up to T R / (2 r). The limit grows with T like the
    fractions, so the shortest time is the least T at which the others' fractions and the lesser of y and its limit sum
    to 1. If the limit binds, the punchable reducers are filled to a level below T, at which they sum to it. So relayed
    pairs get what relays carry in the time that the round takes anyway, and with enough reducers that can be dialled
    this is little. If all members can only be relayed, all pairs use relays, and shares follow bandwidths as above.

    Args:
        members: links of the members.
        most: the largest fraction of one member. The reducers' fractions must be able to sum to 1.
    """
    contributors = sum(member.contributes for member in members)
    reduces = _reduces(members)
    pipes = [_pipe(member, contributors, most) for member in itertools.compress(members, reduces)]
    punched = [member.reach is Reach.PUNCHABLE for member in itertools.compress(members, reduces)]
    if relayed := _relayed_contributors(members):
        found = iter(_fill_beside_relays(pipes, punched, Fraction(RELAY_MBPS) / (2 * relayed)))
    else:
        level = _level(pipes) if pipes else Fraction(0)
        found = iter([pipe.filled(level) for pipe in pipes])
    return tuple(next(found) if one_of_them else Fraction(0) for one_of_them in reduces)


def _reduces(members: Sequence[MemberLink]) -> list[bool]:
    """Return for each member whether it may reduce: it can be dialled or punched, or no member can."""
    any_better = any(member.reach is not Reach.RELAYED for member in members)
    return [member.reach is not Reach.RELAYED or not any_better for member in members]


def _relayed_contributors(members: Sequence[MemberLink]) -> int:
    """Return the number of contributors that punchable members reach through relays only."""
    return sum(member.contributes and member.reach is Reach.RELAYED for member in members)


@dataclass(frozen=True, slots=True)
class _Pipe:
    """The fraction that a member reduces in a time of T V: nothing until T is ``start``, then ``slope`` for each T."""

    start: Fraction
    slope: Fraction
    most: Fraction

    def filled(self, level: Fraction) -> Fraction:
        return min(self.most, max(Fraction(0), (level - self.start) * self.slope))

    @property
    def full_at(self) -> Fraction:
        return self.start + self.most / self.slope


def _pipe(link: MemberLink, contributors: int, most: Fraction) -> _Pipe:
    bandwidth = Fraction(link.bandwidth)
    if not link.contributes:
        return _Pipe(Fraction(0), bandwidth / max(contributors, 1), most)
    return (
        _Pipe(Fraction(0), bandwidth, most)
        if contributors <= 2
        else _Pipe(1 / bandwidth, bandwidth / (contributors - 2), most)
    )


def _level(pipes: Sequence[_Pipe], goal: Fraction = Fraction(1)) -> Fraction:
    """Return the least T, in units of V, at which ``goal`` of the vector is reduced."""
    changes = sorted(
        [(pipe.start, pipe.slope) for pipe in pipes] + [(pipe.full_at, -pipe.slope) for pipe in pipes]
    )
    level, carried, slope = Fraction(0), Fraction(0), Fraction(0)
    for moment, change in changes:
        if carried + slope * (moment - level) >= goal:
            break
        carried += slope * (moment - level)
        level, slope = moment, slope + change
    return level + (goal - carried) / slope if slope else level


def _fill_beside_relays(pipes: Sequence[_Pipe], punched: Sequence[bool], relays: Fraction) -> list[Fraction]:
    """Return the fractions if the punchable members reduce at most ``relays`` times T together."""
    if not any(punched):
        return [pipe.filled(_level(pipes)) for pipe in pipes]
    direct = [pipe for pipe, by_punching in zip(pipes, punched, strict=True) if not by_punching]
    others = list(itertools.compress(pipes, punched))
    # The fractions and the limit grow with T. So the least T that suffices with and without the limit is the answer.
    unlimited = _level(pipes)
    level = max(unlimited, _level([*direct, _Pipe(Fraction(0), relays, Fraction(1))]))
    lower = level
    if level > unlimited:
        lower = _level(others, 1 - sum((pipe.filled(level) for pipe in direct), start=Fraction(0)))
    return [
        pipe.filled(lower if by_punching else level) for pipe, by_punching in zip(pipes, punched, strict=True)
    ]


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


def bound_seconds(
    payload_bytes: int, members: Sequence[MemberLink], fractions: Sequence[Fraction] | None = None
) -> float:
    """Return the lower bound of a round's duration, in seconds, if only bandwidth costs time.

    Args:
        payload_bytes: bytes of one whole vector, as encoded for the wire.
        members: links of the members.
        fractions: exact fraction of the vector that each member reduces; ``None``: the best ones of a butterfly.
    """
    return float(max(_seconds_a_megabit(members, fractions)) * Fraction(payload_bytes * 8, 10**6))


def relays_are_slowest(members: Sequence[MemberLink], fractions: Sequence[Fraction] | None = None) -> bool:
    """Return whether relays need longer for their part of a round than any member for its traffic."""
    by_members, by_relays = _seconds_a_megabit(members, fractions)
    return by_relays > by_members


def _seconds_a_megabit(
    members: Sequence[MemberLink], fractions: Sequence[Fraction] | None
) -> tuple[Fraction, Fraction]:
    """Return the times of the slowest member and of the relays, for a vector of 1 Mbit."""
    contributors = sum(member.contributes for member in members)
    fractions = best_fractions(members) if fractions is None else fractions
    by_members = max(
        _traffic(fraction, contributors, member) / Fraction(member.bandwidth)
        for fraction, member in zip(fractions, members, strict=True)
    )
    return by_members, relayed_traffic(members, fractions) / Fraction(RELAY_MBPS)


def relayed_traffic(members: Sequence[MemberLink], fractions: Sequence[Fraction]) -> Fraction:
    """Return the traffic of all relayed pairs together, in units of the vector's size.

    Args:
        fractions: the fraction of the vector that each member reduces.
    """
    return sum(
        (
            2 * fraction  # a contribution there, and an average back
            for here, (reducer, fraction) in enumerate(zip(members, fractions, strict=True))
            for there, member in enumerate(members)
            if here != there and member.contributes and not is_direct(reducer.reach, member.reach)
        ),
        start=Fraction(0),
    )


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


def cut_into_parts(start: int, stop: int, granularity: int, part_elements: int) -> tuple[SharePart, ...]:
    """Return the parts of the share from ``start`` to ``stop``. Each but the last is a whole number of blocks."""
    step = max(granularity, part_elements - part_elements % granularity)
    return tuple(
        SharePart(index, first, min(first + step, stop))
        for index, first in enumerate(range(start, stop, step))
    )
