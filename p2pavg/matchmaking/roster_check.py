"""Checks of a follower before it accepts a roster, as pure functions. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable

from p2pavg.base.limits import MAX_GROUP_SIZE
from p2pavg.group.candidate import Candidate
from p2pavg.group.roster import Roster
from p2pavg.matchmaking.actions import Settings


def not_admitted(candidate: Candidate, settings: Settings, now: float) -> str | None:
    """Return the reason for refusing a candidate because of its weight or membership, or ``None``."""
    if settings.refuses is not None and (why := settings.refuses(candidate, now)) is not None:
        return why
    if candidate.weight <= settings.max_weight:
        return None
    return f"its weight of {candidate.weight:g} is above max_weight {settings.max_weight:g}"


def wrong_with(
    roster: Roster,
    *,
    me: Candidate,
    leader: Candidate,
    settings: Settings,
    banned: Callable[[str], str | None],
    now: float,
) -> str | None:
    """Return the reason for refusing a roster, or ``None``.

    Args:
        me: the follower's own signed candidate.
        leader: the leader that it follows, in the attempt that it joined.
        banned: returns the reason for which a peer is banned, or ``None``.
        now: wall clock, seconds.
    """
    first = roster.members[0]
    if (first.peer_id, first.deadline) != (leader.peer_id, leader.deadline):
        return "a roster that another peer leads"
    if me not in roster.members:
        return "a roster without this peer, or with another weight or share of it"
    if first.record.key != me.record.key or not first.fits(me):
        return "a roster of another run, schema, codec or state"
    choose = settings.choose_observers
    if choose is not None and roster.observers != choose(roster.members):
        return "a roster whose observers do not follow from what its members signed"
    if roster.shares != settings.cut_shares(roster.members):
        return "a roster whose shares do not follow from its members' bandwidths"
    own = roster.shares[roster.position(me.peer_id)]
    if settings.max_share is not None and own > settings.max_share:
        return f"a share of {own} elements is more than this peer takes"
    expired = [member.peer_id for member in roster.members if member.record.expiration_time <= now]
    if expired:
        return f"a roster with the expired record of {expired[0]}"
    for member in roster.members:
        if (why := banned(member.peer_id)) is not None:
            return f"a roster with {member.peer_id}: {why}"
    return _beyond_limits(roster, settings, now)


def _beyond_limits(roster: Roster, settings: Settings, now: float) -> str | None:
    """Return the reason if a roster breaks the rules of all rosters or the follower's own limits, else ``None``."""
    # The leader is first and auxiliaries are last: the order decides which member leads if the first one is lost.
    if list(roster.members) != sorted(roster.members, key=lambda member: member.order):
        return "a roster whose members are out of order"
    if not settings.minimum <= len(roster.holders) <= MAX_GROUP_SIZE + 1:
        return f"a roster of {len(roster.holders)}; this peer takes part in {settings.minimum} or more"
    for member in roster.members:
        if (why := not_admitted(member, settings, now)) is not None:
            return f"a roster with {member.peer_id}: {why}"
    return None
