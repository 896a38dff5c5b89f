"""The places in a group that a leader keeps for candidates that suit it better. No I/O, no clock, no random source.

A pair of members exchanges directly if one of them can be dialled or both can punch. All other pairs need a relay,
which is slow. Members that can be dialled reduce, so the others need relays little (:mod:`p2pavg.group.shares`).
So a leader puts two kinds of candidates off, if enough better ones are ready to fill its group:

* a relayed candidate, while the better ones exchange with all members directly, and it does not;
* a candidate that can be dialled, if the group has two of its kind, while relayed candidates are ready and the better
  ones are peers that cannot be dialled. It can lead the relayed ones itself.

**No candidate starves.** The claims of others cost a candidate little, because a leader puts a candidate off

* for :data:`~p2pavg.matchmaking.timing.PUT_OFF_SECONDS` at most in an attempt,
* in no further attempt, until the two have finished a round together (:meth:`Memory.may_put_off`),
* and not at all near the leader's deadline, or while the group has room for all that are ready.
"""

from __future__ import annotations

from p2pavg.base.limits import ASK_AGAIN_SECONDS
from p2pavg.group.candidate import Candidate
from p2pavg.group.reach import Reach, is_direct
from p2pavg.matchmaking.attempt_state import AttemptState
from p2pavg.matchmaking.own_group import OwnGroup
from p2pavg.matchmaking.timing import PUT_OFF_SECONDS

DIALABLE_WANTED = 2
"""A group goes on with the other one if a member that can be dialled is lost."""

WAITS_FOR_DIRECT = "others are ready that can exchange with all members directly"
WAITS_FOR_RELAYED = "the group has two members that can be dialled; relayed peers need the others"


def why_put_off(state: AttemptState, group: OwnGroup, candidate: Candidate, now: float) -> str | None:
    """Return the reason for putting a candidate off that the group could take, or ``None``."""
    near = state.me.deadline - PUT_OFF_SECONDS - ASK_AGAIN_SECONDS
    if candidate.auxiliary or now >= near:
        return None
    members = [state.me, *group.followers.values()]
    ready = _ready(state, group, candidate, now)
    if candidate.reach is Reach.RELAYED:
        better, why = _for_relayed(candidate, members, ready), WAITS_FOR_DIRECT
    elif candidate.reach is Reach.DIALABLE:
        better, why = _for_dialable(members, ready), WAITS_FOR_RELAYED
    else:
        return None
    fills = group.holders + better >= state.settings.target
    if better and fills and state.memory.may_put_off(candidate.peer_id, state.me.deadline, now):
        return why
    return None


def _ready(state: AttemptState, group: OwnGroup, candidate: Candidate, now: float) -> list[Candidate]:
    """Return the other candidates that could join this leader now."""
    return [
        known.candidate
        for known in state.peers
        if known.candidate is not None
        and known.peer_id != candidate.peer_id
        and known.peer_id not in group.followers
        and known.candidate.order > state.me.order
        and not known.candidate.auxiliary
        and known.candidate.fits(state.me)
        and known.is_there(now)
    ]


def _for_relayed(candidate: Candidate, members: list[Candidate], ready: list[Candidate]) -> int:
    """Return the number of candidates that suit the group better than a relayed one."""
    better = [other for other in ready if other.reach is not Reach.RELAYED]
    if all(is_direct(candidate.reach, other.reach) for other in [*members, *better]):
        return 0
    return sum(all(is_direct(other.reach, member.reach) for member in members) for other in better)


def _for_dialable(members: list[Candidate], ready: list[Candidate]) -> int:
    """Return the number of candidates that need a place in the group more than one that can be dialled."""
    there = sum(member.reach is Reach.DIALABLE for member in members)
    if there < DIALABLE_WANTED or all(other.reach is not Reach.RELAYED for other in ready):
        return 0
    return sum(other.reach is not Reach.DIALABLE for other in ready)
