"""The leader that a peer has asked or follows: what it may say, and how long the peer waits for it. No I/O, no clock.

:class:`~p2pavg.matchmaking.rules.Matchmaking` decides when these steps are taken.
"""

from __future__ import annotations

import math

from p2pavg.base.limits import ASK_AGAIN_SECONDS, REPLY_SECONDS, ROUND_TRIPS_SECONDS
from p2pavg.group.candidate import Candidate
from p2pavg.group.roster import Roster
from p2pavg.matchmaking.actions import Actions, Close, Expect, Formed, Open, Report, Send
from p2pavg.matchmaking.attempt_state import AttemptPhase, AttemptState, not_admitted, wrong_with
from p2pavg.matchmaking.known_peers import may_lead
from p2pavg.matchmaking.messages import Accept, Declined, JoinRequest, LeaderStatus, Refuse
from p2pavg.matchmaking.timing import (
    DUE_SECONDS,
    LEADER_SILENCE_SECONDS,
    PROPOSAL_ANSWER_SECONDS,
    SETTLE_SECONDS,
)

MAX_PROPOSALS = 2
"""Number of proposals that give a due leader more time. An honest leader drops all silent members at once, so it needs
few."""


class FollowedLeader:
    """The conversation with the leader. Without one, it has no state of its own that matters."""

    def __init__(self, state: AttemptState) -> None:
        self._state = state
        self.heard = state.begun  # time of the leader's last message
        self.orphaned: float | None = None  # end of the wait for proof that the lost leader has committed
        self._begun_by: str | None = None  # a member of the accepted roster that has begun the exchange
        self._joined = state.begun  # time at which this peer began to follow
        self._status = LeaderStatus(1, False)
        self._due_since: float | None = None  # time since which the leader could have proposed
        self._proposals = 0
        self._answers_end = -math.inf  # until then, the leader may wait for answers to its proposal

    @property
    def ready_peers(self) -> int:
        """Number of contributors in the leader's group, as far as it has said."""
        return max(self._status.ready_peers, 2)

    @property
    def _leader(self) -> Candidate:
        leader = self._state.leader
        assert leader is not None
        return leader

    # ------------------------------------------------------------------ time

    def times(self) -> list[float]:
        """Return the times at which this peer acts on the leader's silence or delay."""
        state = self._state
        if state.phase is AttemptPhase.ASKING:
            return [self.heard + LEADER_SILENCE_SECONDS]
        if self.orphaned is not None:
            return [self.orphaned]
        if not state.follows:
            return []
        times = [self.heard + LEADER_SILENCE_SECONDS, self.patience_end()]
        if state.looked < self._leader.deadline:
            times.append(self._leader.deadline)
        if not state.me.auxiliary:
            # A little longer than the own deadline: the leader's word may be on its way.
            times.append(state.report_at + (0.0 if self._status.decided else ROUND_TRIPS_SECONDS))
        return times

    def patience_end(self) -> float:
        """Return the time at which this peer leaves a leader that forms no group. It may ask it again later."""
        if self._due_since is not None:
            return max(self._due_since + DUE_SECONDS, self._answers_end)
        me = self._state.me
        joined = self._joined if me.auxiliary else max(self._joined, me.deadline)
        return max(joined, self._leader.deadline) + self._state.settings.match_timeout + ROUND_TRIPS_SECONDS

    def check_due(self, now: float) -> None:
        """Note whether the leader is due."""
        self._state.looked = now
        if not self._state.follows:
            return
        if not _is_due(self._state, self._leader, self._due_since, now):
            self._due_since = None
        elif self._due_since is None:
            self._due_since = now

    def report(self, now: float) -> Actions:
        """Report to the caller, if a match timeout has passed without a group."""
        state = self._state
        if state.me.auxiliary or now < state.report_at:
            return []
        if not self._status.decided and now < state.report_at + ROUND_TRIPS_SECONDS:
            return []
        state.report_at = now + state.settings.match_timeout
        return [Report(self.ready_peers, "the group that this peer is in waits for more")]

    # ------------------------------------------------------------------ the beginning

    def ask(self, candidate: Candidate, now: float) -> Actions:
        """Ask an earlier candidate to lead this peer."""
        self._state.phase, self._state.leader, self.heard = AttemptPhase.ASKING, candidate, now
        return [Open(candidate, JoinRequest(self._state.me), "the first of those before this peer")]

    def stop_asking(self, reason: str) -> Actions:
        """Close the conversation with the leader or the asked peer, if there is one."""
        leader, self._state.leader = self._state.leader, None
        return [] if leader is None else [Close(leader.peer_id, reason, upward=True)]

    def may_follow(self, candidate: Candidate, now: float) -> bool:
        """Return whether this peer can follow the asked peer, in the attempt that its answer names."""
        me = self._state.me
        # The answer names the leader's present attempt, which may be later than the record that this peer has read.
        return (
            candidate.peer_id == self._leader.peer_id
            and candidate.order < me.order
            and candidate.record.key == me.record.key
            and candidate.fits(me)
            and may_lead(candidate, now)
            and not_admitted(candidate, self._state.settings, now) is None
        )

    def follow(self, leader: Candidate) -> None:
        """Follow the asked peer, which has agreed."""
        state = self._state
        state.phase, state.leader, self._joined = AttemptPhase.FOLLOWING, leader, self.heard
        self._due_since, self._proposals, self._answers_end = None, 0, -math.inf
        self.check_due(self.heard)
        state.peers[leader.peer_id].candidate = leader
        self._status = LeaderStatus(2, False)

    def declined(self, answer: Declined, now: float) -> None:
        """Remember that the asked peer declined."""
        asked = self._state.peers[self._leader.peer_id]
        if answer.over:  # believed for the asked peer only: about others it may lie
            asked.ended, asked.candidate = self._leader.deadline, None
            # Else a peer could begin one attempt after the other, and keep this one from all that it names.
            taken, asked.has_named = () if asked.has_named else answer.taken, True
        else:
            asked.fruitless += 1
            asked.declined, taken = answer.reason, answer.taken
        # First: what it names is not asked at once again if it is the asked peer itself.
        self._state.learn_leader(answer.leader, now)
        for peer_id in {asked.peer_id, *taken}:
            self._state.peers.avoid(peer_id, now + ASK_AGAIN_SECONDS)

    # ------------------------------------------------------------------ the proposal

    def told_status(self, status: LeaderStatus) -> Actions:
        """Take the leader's status, which withdraws its proposal."""
        self._status = status
        withdrawn = self._state.phase is AttemptPhase.ACCEPTED
        self._state.phase, self._state.roster = AttemptPhase.FOLLOWING, None
        return [Expect(None, "the leader withdrew its proposal")] if withdrawn else []

    def proposed(self, roster: Roster, now: float) -> Actions:
        """Accept a proposed roster, or refuse it and leave the leader."""
        state, leader = self._state, self._leader
        accept = Send(leader.peer_id, Accept(roster.group_id), "the roster is what was agreed")
        # The leader still waits for another member's answer. That gives it no more time than it had.
        if state.phase is AttemptPhase.ACCEPTED and state.roster == roster:
            return [accept]
        wrong = wrong_with(
            roster, me=state.me, leader=leader, settings=state.settings, peers=state.peers, now=now
        )
        if wrong is not None:
            refusal = Send(leader.peer_id, Refuse(roster.group_id, wrong), wrong)
            avoid = state.peers[leader.peer_id].hold_off(wrong, now)
            return [refusal, *self.leave(f"its roster was refused: {wrong}", now, avoid=avoid)]
        state.phase, state.roster, self._begun_by = AttemptPhase.ACCEPTED, roster, None
        self._proposals += 1
        # The leader gets the time that its other followers have for their answers, and a second to commit. It may be
        # due only later, when its deadline has passed. It waits for slow members from its first proposal on.
        if self._proposals <= MAX_PROPOSALS:
            answers = REPLY_SECONDS if self._proposals == 1 else PROPOSAL_ANSWER_SECONDS
            self._answers_end = max(self._answers_end, now + answers + ROUND_TRIPS_SECONDS)
        return [Expect(roster.group_id, "others may hear of the commit first"), accept]

    def began(self, peer_id: str) -> Actions:
        """Note that a member has begun the exchange of the accepted group, which proves that the leader committed."""
        self._begun_by = peer_id  # as long as the leader is there, this peer waits for its Commit
        return [] if self.orphaned is None else self.commit(f"{peer_id} has heard of the commit")

    def orphan(self, now: float) -> Actions:
        """Go on after the loss of a leader whose roster this peer has accepted.

        The leader may have committed and told other members. Then one of them opens a stream of the exchange.
        """
        if (proof := self.proof) is not None:
            return self.commit(proof)
        self.orphaned = now + ROUND_TRIPS_SECONDS
        return []

    @property
    def proof(self) -> str | None:
        """The proof that the leader has committed the accepted roster, as a sentence; ``None`` without one."""
        if self._state.phase is not AttemptPhase.ACCEPTED or self._begun_by is None:
            return None
        return f"{self._begun_by} has heard of the commit"

    def commit(self, reason: str) -> Actions:
        """Commit the accepted roster."""
        state = self._state
        assert state.roster is not None
        state.phase, self.orphaned = AttemptPhase.COMMITTED, None
        closing: Actions = []
        if state.leader is not None:
            closing = [Close(state.leader.peer_id, "committed", upward=True)]
        return [*closing, Formed(state.roster, reason)]

    # ------------------------------------------------------------------ the end

    def blame_delay(self, now: float) -> str:
        """Remember a leader that has formed no group in its time; return the reason for leaving it."""
        state, leader = self._state, self._leader
        if self._due_since is None:  # the leader rightly waits for more members: it wasted no time
            return "it has formed no group in its time and another match timeout"
        # Before its deadline the leader may wait for a member that has died, as an honest one would.
        # So this peer is back in time for its deadline.
        early = now < leader.deadline - SETTLE_SECONDS
        most = leader.deadline - SETTLE_SECONDS if early else float("inf")
        state.peers[leader.peer_id].doubted = True
        state.memory.wasted(leader.peer_id, now, most=most)
        return "it has formed no group in its time"

    def leave(self, reason: str, now: float, *, avoid: float = ASK_AGAIN_SECONDS) -> Actions:
        """Leave the leader, and do not ask it again for ``avoid`` seconds."""
        known = self._state.peers[self._leader.peer_id]
        known.avoid(now + avoid)
        known.fruitless += 1
        return [Close(known.peer_id, reason, upward=True), *self.free(reason)]

    def free(self, reason: str) -> Actions:
        """Follow no leader from now on."""
        state = self._state
        accepted = state.phase is AttemptPhase.ACCEPTED
        state.phase, state.leader, self.orphaned, self._due_since = AttemptPhase.LEADING, None, None, None
        if not accepted:
            return []
        state.roster = None
        return [Expect(None, reason)]


def _is_due(state: AttemptState, leader: Candidate, due_since: float | None, now: float) -> bool:
    """Return whether the leader could propose, to this peer's knowledge.

    Args:
        due_since: time since which it was due, or ``None``.
    """
    there = [leader] if state.me.auxiliary else [leader, state.me]
    there += state.peers.there(leader, now)
    # No leader may propose a group without a contributor.
    if len(state.observers_among(there)) == len(there):
        return False
    if now >= leader.deadline:
        return len(there) >= state.settings.minimum
    # A leader that is already due stays due although its deadline comes nearer.
    begins = now if due_since is None else due_since
    soon = leader.deadline < begins + DUE_SECONDS + 2 * SETTLE_SECONDS
    excused = soon or state.peers[leader.peer_id].doubted or state.memory.is_proven(leader.peer_id)
    contributors = sum(each.weight > 0 for each in there)
    complete = len(there) >= state.settings.target and contributors >= state.settings.contributors
    return complete and not excused
