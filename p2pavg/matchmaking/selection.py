"""Which candidates a peer asks to lead it, and which it nudges. No I/O, no clock, no random source."""

from __future__ import annotations

from collections.abc import Collection

from p2pavg.base.limits import GLANCE_SECONDS, ROUND_TRIPS_SECONDS
from p2pavg.group.candidate import Candidate
from p2pavg.group.reach import Reach
from p2pavg.matchmaking.actions import Actions, Open
from p2pavg.matchmaking.attempt_state import AttemptState
from p2pavg.matchmaking.known_peers import may_lead
from p2pavg.matchmaking.messages import Nudge


def first_earlier(state: AttemptState, followers: Collection[str], now: float) -> Candidate | None:
    """Return the earlier candidate that this peer asks next, or ``None``."""
    me, memory = state.me, state.memory
    proven_only = _waits_for_proven(state, now)
    possible = [
        candidate
        for peer_id, candidate in state.peers.candidates.items()
        if candidate.order < me.order
        and state.peers[peer_id].avoided is None
        and peer_id not in followers
        and candidate.fits(me)
        and may_lead(candidate, now)
        and memory.held_until(peer_id, now) <= now
        and (memory.is_proven(peer_id) or not proven_only)
    ]

    # Candidates that were asked in vain come last, so silent peers and liars cannot block the others. Among the
    # rest, peers with which a round was finished come first.
    def preference(candidate: Candidate) -> tuple[int, bool, tuple[bool, Reach, bool, float, str]]:
        peer_id = candidate.peer_id
        return (state.peers[peer_id].fruitless, not memory.is_proven(peer_id), candidate.order)

    return min(possible, key=preference, default=None)


def _waits_for_proven(state: AttemptState, now: float) -> bool:
    """Return whether peers with which a round was finished are enough for a group and have time left to form it."""
    if now < state.strangers_from:
        return True
    # They have a few round trips to form a group before this peer asks others; a group takes no longer.
    if now >= state.begun + ROUND_TRIPS_SECONDS:
        return False
    proven = (
        state.memory.is_proven(candidate.peer_id) and candidate.fits(state.me)
        for candidate in state.peers.candidates.values()
        if not candidate.auxiliary
    )
    return 1 + sum(proven) >= state.settings.target


def times_to_ask(state: AttemptState) -> list[float]:
    """Return the times at which :func:`first_earlier` may return another candidate."""
    looked = state.looked
    held = (state.memory.held_until(peer_id, looked) for peer_id in state.peers.candidates)
    times = [until for until in held if until > looked]
    times += [time for time in (state.strangers_from, state.begun + ROUND_TRIPS_SECONDS) if looked < time]
    return times


def nudges(state: AttemptState, followers: Collection[str], now: float) -> Actions:
    """Tell later candidates that this peer leads. Two peers that announced at once may not see each other."""
    actions: Actions = []
    peers, me = state.peers, state.me
    nudged = peers.nudged
    for candidate in sorted(peers.candidates.values(), key=lambda c: c.order):
        between = peers[candidate.peer_id].nudges
        # A group waits for a nudged auxiliary, so each is nudged once: it could delay a complete group for ever.
        told = between.sent == candidate.deadline or (candidate.auxiliary and between.sent is not None)
        if told or candidate.order < me.order or candidate.peer_id in followers:
            continue
        if not candidate.fits(me) or nudged >= 4 * state.settings.target:
            continue
        nudged += between.sent is None
        between.sent = candidate.deadline
        if candidate.auxiliary:
            # A complete group waits so long for it.
            between.awaited_until = now + GLANCE_SECONDS
        actions.append(Open(candidate, Nudge(me), "it comes after this peer"))
    return actions
