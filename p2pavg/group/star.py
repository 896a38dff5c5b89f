"""The reducer of a star. Pure: every member elects the same one, from what the members have signed.

With c members that hold the result, the reducer of a vector of V bytes receives V (c - 1) and sends as much; an
auxiliary, which has no vector of its own, V c each way. Every other member sends V and receives V, whichever member
reduces. So the round is shortest with the member that needs least time for its traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TypeAlias

from p2pavg.base.limits import MAX_AUXILIARY_ELEMENTS
from p2pavg.group.bandwidth import DEFAULT_MBPS
from p2pavg.group.candidate import Candidate
from p2pavg.group.reach import is_direct
from p2pavg.group.shares import RELAY_MBPS

MAX_AUXILIARY_INPUTS = 4 * MAX_AUXILIARY_ELEMENTS
"""Elements of all contributions together that an auxiliary may have to keep: 1 GiB of fp32. It helps strangers, and
must not run out of memory for them."""

_Rank: TypeAlias = tuple[Fraction, bool, Fraction, str]


def elect(members: Sequence[Candidate], elements: int) -> int:
    """Return the position of the member that reduces the whole vector.

    It is the member with which the round ends first, by the bandwidths that all have announced:

    * A member whose bandwidth is unknown counts as the slowest of those that are known, and comes after these.
    * Pairs of members that cannot connect directly share :data:`~p2pavg.group.shares.RELAY_MBPS` through relays. A
      member with such pairs counts as no faster than that.
    * An auxiliary is elected only for vectors that it may hold: see :data:`MAX_AUXILIARY_INPUTS`.
    * Of equal members the first peer id is elected.

    Args:
        members: of an attempt, in any order. At least one is no auxiliary.
        elements: length of the vector.
    """
    holders = sum(not member.auxiliary for member in members)
    fits = elements <= MAX_AUXILIARY_ELEMENTS and elements * holders <= MAX_AUXILIARY_INPUTS
    known = [member.bandwidth for member in members if member.bandwidth]
    unknown = Fraction(min(known, default=DEFAULT_MBPS))

    def rank(position: int) -> _Rank:
        member = members[position]
        traffic = holders - (not member.auxiliary)
        own = traffic / (Fraction(member.bandwidth) if member.bandwidth else unknown)
        relayed = 2 * _indirect(members, position) / Fraction(RELAY_MBPS)
        return max(own, relayed), not member.bandwidth, own, member.peer_id

    eligible = [position for position, member in enumerate(members) if fits or not member.auxiliary]
    return min(eligible, key=rank)


def _indirect(members: Sequence[Candidate], position: int) -> int:
    """Return the number of members with a vector that exchange with a member through relays only."""
    reducer = members[position]
    return sum(
        not (member.auxiliary or index == position or is_direct(reducer.reach, member.reach))
        for index, member in enumerate(members)
    )
