"""The answer to a candidate that asks to join. No I/O, no clock, no random source."""

from __future__ import annotations

from p2pavg.base.limits import ASK_AGAIN_SECONDS, MAX_GROUP_SIZE, MAX_MEMBERS
from p2pavg.group.candidate import Candidate
from p2pavg.group.reach import Reach, is_direct
from p2pavg.matchmaking.attempt_state import AttemptPhase, AttemptState, not_admitted
from p2pavg.matchmaking.known_peers import plausible
from p2pavg.matchmaking.messages import Declined
from p2pavg.matchmaking.own_group import OwnGroup
from p2pavg.matchmaking.timing import PUT_OFF_SECONDS

# The places in a group that a leader keeps for candidates that suit it better.
#
# A pair of members exchanges directly if one of them can be dialled or both can punch. All other pairs need a relay,
# which is slow. Members that can be dialled reduce, so the others need relays little (p2pavg.group.shares). So a
# leader puts two kinds of candidates off, if enough better ones are ready to fill its group:
#
# * a relayed candidate, while the better ones exchange with all members directly, and it does not;
# * a candidate that can be dialled, if the group has two of its kind, while relayed candidates are ready and the better
#   ones are peers that cannot be dialled. It can lead the relayed ones itself.
#
# **No candidate starves.** The claims of others cost a candidate little, because a leader puts a candidate off
#
# * for p2pavg.matchmaking.timing.PUT_OFF_SECONDS at most in an attempt,
# * in no further attempt, until the two have finished a round together (Memory.may_put_off),
# * and not at all near the leader's deadline, or while the group has room for all that are ready.

DIALABLE_WANTED = 2
"""A group goes on with the other one if a member that can be dialled is lost."""

WAITS_FOR_DIRECT = "others are ready that can exchange with all members directly"
WAITS_FOR_RELAYED = "the group has two members that can be dialled; relayed peers need the others"


def why_put_off(state: AttemptState, group: OwnGroup, candidate: Candidate, now: float) -> str | None:
    """Return the reason for putting a candidate off that the group could take, or ``None``."""
    # Put off near the deadline, it would have no time to ask again.
    if candidate.auxiliary or now >= state.me.deadline - PUT_OFF_SECONDS - ASK_AGAIN_SECONDS:
        return None
    members = [state.me, *group.followers.values()]
    ready = [  # the other candidates that could join this leader now
        other
        for other in state.peers.there(state.me, now)
        if other.peer_id not in {candidate.peer_id, *group.followers} and other.order > state.me.order
    ]
    match candidate.reach:
        case Reach.RELAYED:
            why = WAITS_FOR_DIRECT
            others = [other for other in ready if other.reach is not Reach.RELAYED]
            if all(is_direct(candidate.reach, other.reach) for other in [*members, *others]):
                return None
            better = sum(all(is_direct(other.reach, member.reach) for member in members) for other in others)
        case Reach.DIALABLE:
            why = WAITS_FOR_RELAYED
            there = sum(member.reach is Reach.DIALABLE for member in members)
            if there < DIALABLE_WANTED or all(other.reach is not Reach.RELAYED for other in ready):
                return None
            better = sum(other.reach is not Reach.DIALABLE for other in ready)
        case _:
            return None
    # The memory comes last: it notes that the candidate was put off.
    fills = group.holders + better >= state.settings.target
    if better and fills and state.memory.may_put_off(candidate.peer_id, state.me.deadline, now):
        return why
    return None


UNEXPECTED_OBSERVERS = 4  # as many newcomers as an optimizer takes into a small round


def refusal(state: AttemptState, group: OwnGroup, candidate: Candidate, now: float) -> Declined | None:
    """Return the refusal for a candidate that cannot join, or ``None``."""
    me, taken = state.me, state.others_in_roster or tuple(group.followers)
    if candidate.peer_id == me.peer_id:
        return Declined("it has the id of the peer that it asked", over=True)
    if not plausible(candidate, now):
        return Declined("its record has expired, or its clock is wrong")
    # A roster has candidates of one place only. A peer that has gone on to a smaller place keeps answering under both.
    if candidate.record.key != me.record.key:
        return Declined("looks for peers in another place")
    if state.has_ended:
        return Declined("already in a group", taken=taken, over=True)
    if me.auxiliary:
        return Declined("an auxiliary does not lead", over=True)
    if candidate.order <= me.order:
        # The candidate knows an earlier attempt of this peer, which is over.
        return Declined("comes before the peer it asked", over=True)
    if state.phase is AttemptPhase.ACCEPTED:
        return Declined("a roster is being agreed", taken=taken)
    if state.follows:
        return Declined("follows another leader", state.leader)
    if candidate.codec != me.codec:
        return Declined(f"codec {candidate.codec} does not fit {me.codec}")
    if not candidate.fits(me):
        return Declined("its vector belongs to another state")
    if (why := _not_trusted(state, candidate, now)) is not None:
        return Declined(why)
    if state.phase is AttemptPhase.PROPOSING:
        return Declined("a roster is being agreed", taken=taken)
    if not _has_room(state, group, candidate):
        return Declined("the group is full", taken=taken)
    if (why := why_put_off(state, group, candidate, now)) is not None:
        return Declined(why, taken=taken)
    return None


def _not_trusted(state: AttemptState, candidate: Candidate, now: float) -> str | None:
    """Return the reason for refusing a candidate because of its weight or of what it did before, or ``None``."""
    known = state.peers[candidate.peer_id]
    if known.banned is not None:
        return known.banned
    if (wrong := not_admitted(candidate, state.settings, now)) is not None:
        known.refused = wrong
        return wrong
    held_off = known.held_off
    if held_off is None or now >= held_off.until:
        return None
    return f"{held_off.reason}; held off for {held_off.until - now:.0f} s more"


def _has_room(state: AttemptState, group: OwnGroup, candidate: Candidate) -> bool:
    settings, target = state.settings, state.settings.target
    if candidate.auxiliary:
        auxiliaries = len(group.followers) + 1 - group.holders
        # A group of observers takes one contributor more than its target, and the roster must have room for it.
        return auxiliaries < min(target, MAX_MEMBERS - target - 1)
    if candidate.weight == 0 and settings.contributors:
        # A few observers may come unexpected. They take no contributor's place, and each costs the group the bytes of
        # one average.
        observers = group.holders - group.contributors
        places = max(target - settings.contributors, 0) + UNEXPECTED_OBSERVERS
        missing = max(settings.contributors - group.contributors, 0)
        return not group.is_full and observers < places and group.holders + missing < MAX_GROUP_SIZE
    # The expected members that have not joined may need all the places that the largest group has left.
    if settings.expected and candidate.peer_id not in settings.expected:
        missing = target - (group.holders - group.extra)
        if 0 < MAX_GROUP_SIZE - group.holders <= missing:
            return False
    if not group.is_full:
        return True
    # A full group of observers takes the first contributor all the same.
    if group.has_contributor:
        return False
    return candidate.peer_id not in state.observers_among((state.me, *group.followers.values(), candidate))
