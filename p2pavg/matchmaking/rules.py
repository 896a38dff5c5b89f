"""The rules by which peers that are ready become a group: one peer's attempt, as a state machine.

It has no I/O, no clock and no random source. A :class:`Matchmaking` takes an event and returns the actions to carry
out, each with its reason. :mod:`p2pavg.matchmaking.attempt_runner` carries them out. Times are wall-clock seconds.

Theory of operation
-------------------

**The problem.** Peers that are ready find each other through records, which arrive late and in any order. They must
agree on one roster without a coordinator. Peers crash, lose connections, and may lie. Some of them cannot be dialled.

**The guarantees.** A peer commits to one group at most in an attempt. It follows one leader at a time, and accepts
rosters from that leader only. A leader commits a roster only if every member has accepted it. Peers never wait for
each other in a circle. A peer that wants a result reports or gives up after each match timeout without a group.

**The order.** Candidates are ordered by (auxiliary, reach, without an address, deadline, peer id), as each of them
signed it. The reach is dialable, punchable or relayed, in this order. A peer asks only candidates before it, and an
asked peer declines a candidate that does not come after it. All parts of the order are fixed for an attempt, so waiting
has no cycles. A peer that follows no leader leads, so the first peer to announce leads and later peers join it. A
leader nudges later candidates, which may not have seen its record. A leader that joins an earlier one disbands its own
group, and names the new leader to its followers. A peer whose roster is agreed names its members when it declines, so
that the asker goes on to the next group, and not to each of them. The record of an attempt with which this peer has
finished a round does not count: it is read until the peer has announced its next attempt. In a group that may meet
again, only the peer that led it announces itself at once (:mod:`p2pavg.matchmaking.reunion`).

**Places.** Among many candidates, those that exchange directly come first. A leader puts a relayed candidate off while
enough others are ready to fill the group, and one that can be dialled while relayed ones need it more. It does so for
1.5 s at most, and in no second attempt before the two have finished a round together, so no candidate starves
(:mod:`p2pavg.matchmaking.admission`). A peer whose reach changes while it is in no group begins a new attempt.

**The commit** has two phases. A group is complete at ``target`` members that want the result; auxiliaries do not count.
After the leader's deadline ``minimum`` of them are enough. At least one must have something to contribute. A leader
that knows with whom its group is to be (``expected``) keeps their places: other contributors come on top of the target,
so a newcomer displaces none of them.

* The leader proposes a roster (``GroupProposal``). Each follower checks it and answers ``Accept`` or ``Refuse``.
* When all followers have accepted, the leader commits (``GroupCommit``). It drops a follower that refuses or does not
  answer in time, and admits it again only after a backoff that doubles each time. A follower whose system acknowledges
  the proposal is slow, and not gone: it has more time (:func:`~p2pavg.matchmaking.timing.patience`).
* A follower that accepted and then loses its leader waits a second for another member to begin the exchange, which
  proves the commit. Otherwise it is free again.

**Leaders that do not propose.** A follower considers its leader *due* when the leader could propose: ``target`` peers
are ready, or its deadline has passed and ``minimum`` are. A follower leaves a leader that has been due for a few
seconds, and backs off (:mod:`p2pavg.matchmaking.attempt_state`). So a leader that never proposes costs seconds. Two
peers may aim at groups of different sizes. So before a leader's deadline a follower leaves it once in an attempt at
most, and never if the two have finished a round together.

**Why this way.** The order follows from signed records, so no election is needed. Only a peer's own observations count
in later attempts, so a lie about another peer has no lasting effect. The rules have no I/O, so a test can choose any
order of arrivals, losses and crashes (``tests/properties/test_matchmaking.py``).

**The parts.** :class:`Matchmaking` takes the events. ``own_group.py`` has the group that the peer leads,
``admission.py`` who may join it and for whom it keeps its places, ``followed.py`` the leader that the peer asks or
follows, ``selection.py`` the choice of candidates, and ``attempt_state.py`` what they share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from p2pavg.base.limits import ASK_AGAIN_SECONDS, HOLD_OFF_SECONDS
from p2pavg.group.candidate import Candidate
from p2pavg.matchmaking.actions import Actions, Close, Expect, GaveUp, Renew, Report, Send, Settings
from p2pavg.matchmaking.admission import refusal
from p2pavg.matchmaking.attempt_state import AttemptPhase, AttemptState, Memory
from p2pavg.matchmaking.followed import FollowedLeader
from p2pavg.matchmaking.known_peers import KnownPeers
from p2pavg.matchmaking.messages import (
    Accept,
    Declined,
    Disband,
    GroupCommit,
    GroupProposal,
    Joined,
    LeaderStatus,
    Message,
    Refuse,
)
from p2pavg.matchmaking.own_group import OwnGroup
from p2pavg.matchmaking.reasons import code_apart, leader_wait, why_apart
from p2pavg.matchmaking.selection import first_earlier, nudges, times_to_ask
from p2pavg.matchmaking.timing import DUE_SECONDS, LEADER_SILENCE_SECONDS, RENEW_SECONDS


class Matchmaking:
    """One peer's attempt to be in one group.

    It passes each event to the side that it concerns: the peer's own group, or the leader that it follows.

    Args:
        memory: knowledge from earlier attempts; this one adds to it.
        companions: ids of the members of the last group, if this peer hopes to be in it again.
        hold_back: seconds for which it waits for that group's leader, and asks no stranger
            (:mod:`p2pavg.matchmaking.reunion`).
    """

    def __init__(
        self,
        me: Candidate,
        settings: Settings,
        now: float,
        memory: Memory | None = None,
        *,
        companions: frozenset[str] = frozenset(),
        hold_back: float = 0.0,
    ) -> None:
        self.state = AttemptState(
            me=me,
            settings=settings,
            memory=Memory() if memory is None else memory,
            peers=KnownPeers(),
            begun=now,
            looked=now,
            report_at=me.deadline,
            companions=companions,
            strangers_from=now + hold_back,
        )
        self.group = OwnGroup(self.state)
        self._followed = FollowedLeader(self.state)

    # ------------------------------------------------------------------ state

    @property
    def ready_peers(self) -> int:
        """Number of contributors known to be ready, this peer included."""
        state = self.state
        # The leader knows who has joined. This peer sees only records, of which some belong to other groups.
        if state.follows:
            return self._followed.ready_peers
        others = {
            known.peer_id
            for known in state.peers
            if known.candidate is not None
            and not known.candidate.auxiliary
            and known.candidate.fits(state.me)
            and not known.is_silent
        }
        # A follower counts even if its record has not arrived, or has expired since it joined.
        others |= {p for p, c in self.group.followers.items() if not c.auxiliary}
        return 1 + len(others)

    def wake_at(self) -> float:
        """Return the latest time for the next call of :meth:`tick`."""
        state = self.state
        if state.has_ended:
            return float("inf")
        # Each wait that :meth:`tick` ends has its time here. Otherwise it would
        # last until the next message or record.
        times = state.peers.times() + self._followed.times()
        if state.leads:
            times += self.group.times()
            # An auxiliary has no caller that waits for a report, and helps at any time.
            if not state.me.auxiliary:
                times += [state.report_at, state.me.deadline + RENEW_SECONDS]
        if state.phase is AttemptPhase.LEADING:
            times += times_to_ask(state)
        elif state.phase is AttemptPhase.PROPOSING:
            times.append(self.group.answers_due)
        return min(times, default=float("inf"))

    def waits_for(self) -> str:
        """Return a sentence that says what this attempt waits for, and why it has no group."""
        state = self.state
        if state.follows and state.leader is not None:
            waiting = leader_wait(state.leader, self._followed.ready_peers, state.settings.target)
        elif self.group.holders > 1:
            waiting = f"{self.group.holders} of {state.settings.target} members have joined this peer"
        else:
            waiting = "no other peer has joined this one"
        return "; ".join([waiting, *why_apart(state, self.group.followers)])

    # ------------------------------------------------------------------ time and records

    def tick(self, now: float, answering: Collection[str] = ()) -> Actions:
        """Act on the time that has passed.

        Args:
            answering: ids of peers whose systems have acknowledged what this one sent them lately.
        """
        state = self.state
        # Pauses that are over end first, so that the peers concerned can be asked below.
        state.peers.pass_time(now)
        self._followed.check_due(now)
        # The lost leader may have committed. Until the wait for proof is over,
        # this peer must not be in any other group.
        if self._followed.orphaned is not None:
            if now < self._followed.orphaned:
                return []
            freed = self._followed.free("its leader was lost, and no member knows of a commit")
            return freed + self._advance(now)
        is_silent = state.leader is not None and now >= self._followed.heard + LEADER_SILENCE_SECONDS
        is_late = state.follows and now >= self._followed.patience_end()
        if (is_silent or is_late) and (proof := self._followed.proof) is not None:
            return self._followed.commit(proof)
        if state.leader is not None and is_silent:
            state.peers[state.leader.peer_id].not_answering()
            # A candidate that has not answered yet may be unreachable. Only a
            # leader that let this peer join has wasted its time.
            if state.phase is not AttemptPhase.ASKING:
                state.memory.wasted(state.leader.peer_id, now)
            reason = f"silent for {LEADER_SILENCE_SECONDS:.0f} s"
            return self._followed.leave(reason, now, avoid=HOLD_OFF_SECONDS) + self._advance(now)
        if is_late:
            # Before it is left: the next call forgets which leader it was.
            reason = self._followed.blame_delay(now)
            return self._followed.leave(reason, now) + self._advance(now)
        # All silent followers go at once. If each cost a timeout of its own, a few
        # liars could use up the patience of the others.
        if state.phase is AttemptPhase.PROPOSING and now >= self.group.answers_due:
            if self.group.silent.issubset(answering) and (again := self.group.ask_again(now)):
                return again
            reason = "no answer to the proposal in time"
            return self.group.drop_silent(reason, now) + self._member_lost(reason, now)
        return self._advance(now)

    def discovered(self, candidates: Iterable[Candidate], now: float) -> Actions:
        """Take in candidates from their records, and act on them."""
        if self.state.has_ended:
            return []
        # All are taken in before the peer acts, so it asks the first of them in
        # the order, and not the first that was read.
        for candidate in candidates:
            self.state.learn_record(candidate, now)
        self._followed.check_due(now)
        return self._advance(now)

    def _sent(self, candidate: Candidate, now: float) -> Actions:
        """Take in a candidate that its peer has sent itself, and act on it."""
        if self.state.has_ended:
            return []
        # The peer speaks itself, so this is its present attempt, even if a round seems to have been finished with it.
        # What a peer sends itself is signed for the common place of its search.
        if candidate.record.key == self.state.me.record.key:
            self.state.learn(candidate, now)
        return self.discovered((), now)

    def moved(self, now: float) -> Actions:
        """Begin a new attempt, because other peers reach this one in another way than it has signed.

        A peer that is in a group already keeps its attempt. The new deadline is nearly the old one, so the caller waits
        no longer. If it is near, it is put off a little, because others need some time to read the new record.
        """
        state = self.state
        # If the peer is in a group, a new attempt would break that group up.
        if not state.leads or self.group.followers:
            return []
        reason = "this peer is reached in another way than it has signed"
        # Others have two polls to find the new record. Another deadline, if only by a millisecond, names a new attempt.
        soon = now + min(state.settings.match_timeout, 2 * DUE_SECONDS)
        return [*self._end(reason), Renew(reason, max(state.me.deadline + 0.001, soon))]

    def nudged(self, candidate: Candidate, now: float) -> Actions:
        """Handle the nudge of an earlier candidate.

        The nudge proves that there is a connection. So this peer can now ask a candidate that it could not dial, e.g.
        one behind a router. It does so once for each of the candidate's attempts; otherwise the candidate could make
        this peer ask it without end.
        """
        self.state.peers[candidate.peer_id].came_back(candidate.deadline)
        return self._sent(candidate, now)

    def connected(self, peer_id: str, now: float) -> Actions:
        """Handle a new connection with a peer: a candidate that could not be reached before can be asked now.

        A hole was punched, or a router that had forgotten a connection let another one through.
        """
        # Connections of any peer arrive here. Those of peers that could be reached
        # before, or are no candidates, change nothing.
        candidate = self.state.peers.candidates.get(peer_id)
        if candidate is None or not self.state.peers[peer_id].came_back(candidate.deadline):
            return []
        return self._advance(now)

    # ------------------------------------------------------------------ the own group's followers

    def asked(self, candidate: Candidate, now: float) -> Actions:
        """Handle the join stream of a peer that asks to join."""
        declined = refusal(self.state, self.group, candidate, now)
        if declined is None:
            return self.group.admit(candidate, now) + self._advance(now)
        actions: Actions = [
            Send(candidate.peer_id, declined, declined.reason),
            Close(candidate.peer_id, "declined"),
        ]
        # The two see each other one way only: the candidate should lead this peer, whose records may not show it yet.
        if candidate.order < self.state.me.order:
            actions += self._sent(candidate, now)
        return actions

    def told(self, peer_id: str, message: Message, now: float) -> Actions:
        """Handle a message of a follower."""
        if peer_id not in self.group.followers:
            return []
        # A follower has nothing else to say, so it breaks the protocol and goes.
        if not isinstance(message, Accept | Refuse):
            wrong = f"it sent {type(message).__name__}"
            return [Close(peer_id, wrong), *self.lost(peer_id, wrong, now)]
        roster = self.state.roster
        if (
            self.state.phase is not AttemptPhase.PROPOSING
            or roster is None
            or message.group_id != roster.group_id
        ):
            return []  # an answer to a proposal that was withdrawn meanwhile
        if isinstance(message, Accept):
            return self.group.accepted(peer_id)
        closing = self.group.refused(peer_id, message.reason, now)
        return closing + self._member_lost(f"{peer_id} refused: {message.reason}", now)

    def lost(self, peer_id: str, reason: str, now: float) -> Actions:
        """Handle the end of a follower's join stream."""
        # After the commit, the exchange decides which members are lost.
        if self.state.phase is AttemptPhase.COMMITTED or peer_id not in self.group.followers:
            return []
        known = self.state.peers[peer_id]
        # That attempt is not counted as ready any more, until a record or the peer itself names it again.
        known.broken, known.candidate = self.group.followers.pop(peer_id).deadline, None
        return self._member_lost(f"{peer_id} was lost: {reason}", now)

    def _member_lost(self, reason: str, now: float) -> Actions:
        """Continue without a lost follower: make the proposal again without it, or withdraw it."""
        state, withdrawn = self.state, Actions()
        # A roster cannot lose a member: its hash names the group. The others have to accept another one.
        if state.phase is AttemptPhase.PROPOSING:
            state.phase, state.roster = AttemptPhase.LEADING, None
            withdrawn.append(Expect(None, reason))
        if not state.leads:
            return []
        # After the deadline no new member is waited for. Before it, another one may take the place of the lost one.
        if withdrawn and self.group.has_enough and now >= state.me.deadline:
            return withdrawn + self.group.propose(reason, now)
        # The status also withdraws the proposal at the followers.
        return withdrawn + self.group.tell(now) + self._advance(now)

    def not_nudged(self, peer_id: str, reason: str, now: float) -> Actions:
        """Handle a nudge that could not be delivered."""
        known = self.state.peers[peer_id]
        known.not_reached(reason)
        if known.nudges.awaited_until is None:
            return []
        # A complete group may wait for this auxiliary, which cannot come.
        known.nudges.awaited_until = None
        return self._advance(now)

    # ------------------------------------------------------------------ the followed leader

    def told_by_leader(self, peer_id: str, message: Message, now: float) -> Actions:
        """Handle a message of the leader or the asked peer. A message that does not fit ends the conversation."""
        state, followed = self.state, self._followed
        # This peer may have left the sender while the message was on its way.
        if state.phase is AttemptPhase.COMMITTED or state.leader is None or state.leader.peer_id != peer_id:
            return []
        followed.heard, followed.orphaned = now, None
        state.peers[peer_id].unreached = None
        followed.check_due(now)
        match message, state.phase:
            # The answer names the attempt that was joined. It may be later than that of the
            # record, and then has another place in the order.
            case Joined(leader), AttemptPhase.ASKING if followed.may_follow(leader, now):
                followed.follow(leader)
                return self.group.disband(
                    "its leader joined an earlier one", "followers come along", leader=leader
                )
            # A refusal may name a better leader, or say that the attempt is over.
            # Both are noted before the next one is asked.
            case Declined(reason), AttemptPhase.ASKING:
                followed.declined(message, now)
                reason = f"declined: {reason}"
                closing = Close(peer_id, reason, upward=True)
                return [closing, *followed.free(reason), *self._advance(now)]
            # After a roster was accepted, a status withdraws it: another member refused it, or was lost.
            case LeaderStatus(), AttemptPhase.FOLLOWING | AttemptPhase.ACCEPTED:
                return followed.told_status(message) + self._advance(now)
            # The leader may propose again without a member that was lost. The later
            # roster replaces the one that was accepted.
            case GroupProposal(roster), AttemptPhase.FOLLOWING | AttemptPhase.ACCEPTED:
                answer = followed.proposed(roster, now)
                return answer + self._advance(now) if state.leads else answer
            case GroupCommit(group_id), AttemptPhase.ACCEPTED if (
                state.roster and state.roster.group_id == group_id
            ):
                return followed.commit("the leader committed")
            # The leader follows an earlier one now, and names it: its followers
            # come along without waiting for a record.
            case Disband(reason, leader), AttemptPhase.FOLLOWING | AttemptPhase.ACCEPTED:
                state.learn_leader(leader, now)
                return followed.leave(f"the leader disbanded: {reason}", now) + self._advance(now)
            # Anything else is a liar's word or a bug: an invalid answer, or a
            # commit of a roster that was not accepted.
            case _:
                reason = f"the leader sent {type(message).__name__} while this peer was {state.phase.value}"
                return followed.leave(reason, now) + self._advance(now)

    def lost_leader(self, peer_id: str, reason: str, now: float, *, reachable: bool = True) -> Actions:
        """Handle the end of the join stream to the leader or the asked peer, or a failure to open it."""
        state = self.state
        known = state.peers[peer_id]
        if not reachable:
            known.not_reached(reason)
        if state.phase is AttemptPhase.COMMITTED or state.leader is None or state.leader.peer_id != peer_id:
            return []
        # The pause keeps this peer from asking in a loop, and the count puts
        # the candidate behind those not tried yet.
        known.broken = state.leader.deadline
        known.avoid(now + (ASK_AGAIN_SECONDS if reachable else HOLD_OFF_SECONDS))
        known.fruitless += 1
        # The leader may have committed before it was lost, and told others.
        if state.phase is AttemptPhase.ACCEPTED:
            return self._followed.orphan(now)
        return self._followed.free(reason) + self._advance(now)

    def exchange_begun(self, group_id: bytes, peer_id: str) -> Actions:
        """Note that a member has begun the exchange of the accepted group, which proves that the leader committed."""
        roster = self.state.roster
        if self.state.phase is not AttemptPhase.ACCEPTED or roster is None or roster.group_id != group_id:
            return []
        # Only a member can have heard the commit. The group id alone proves nothing.
        if not any(member.peer_id == peer_id for member in roster.members):
            return []
        return self._followed.began(peer_id)

    # ------------------------------------------------------------------ both sides

    def _advance(self, now: float) -> Actions:
        """Return all actions that are due: propose, ask an earlier candidate, nudge later ones, report."""
        state, group = self.state, self.group
        if state.follows:
            return self._followed.report(now)
        if not state.leads:
            return []
        if not state.me.auxiliary:
            # A group that can be proposed goes first: if this peer followed another
            # one now, its members would begin again.
            reason = group.why_propose(now)
            if reason is not None:
                alone = self._followed.stop_asking("this peer proposes a group of its own")
                return alone + group.propose(reason, now)
            if now >= state.me.deadline + RENEW_SECONDS:
                # Others may doubt an attempt so long after its deadline. The peer begins another one.
                reason = "its deadline is long over"
                return [*self._end(reason), Renew(reason)]
            if now >= state.report_at:
                return self._report_or_give_up(now)
        actions: Actions = []
        if (
            # One candidate at a time: a peer that waited for two answers could be in two groups.
            state.phase is AttemptPhase.LEADING
            and (earlier := first_earlier(state, group.followers, now)) is not None
        ):
            actions += self._followed.ask(earlier, now)
        # A peer that asks an earlier candidate most likely follows it within a round trip, and then leads no group. If
        # each of a group that begins at once nudged all later ones, these would be as many streams as pairs.
        if state.phase is AttemptPhase.LEADING and not state.me.auxiliary:
            actions += nudges(state, group.followers, now)
        return actions + group.heartbeat(now)

    def _report_or_give_up(self, now: float) -> Actions:
        state, group = self.state, self.group
        apart = why_apart(state, group.followers)
        # Without other peers there is nothing to wait for. A peer whose own
        # certificate does not hold is refused by all of them.
        if self.ready_peers == 1 or state.own_refusal is not None:
            reason = "; ".join(apart) if apart else "no other peer was ready by the deadline"
            return [*self._end(reason), GaveUp(reason, code_apart(state, group.followers))]
        state.report_at = now + state.settings.match_timeout
        reason = f"{group.holders} joined, at least {state.settings.minimum} are needed"
        if group.holders >= state.settings.minimum:
            reason = f"{group.holders} joined, and none of them has anything to contribute"
        report = Report(self.ready_peers, "; ".join([reason, *apart]))
        # The followers' callers learn of it at the same time, so that all peers
        # of the group decide alike how to go on.
        return [report, *group.tell(now, decided=True), *self._advance(now)]

    def expel(self, peer_id: str, reason: str, now: float) -> Actions:
        """Ban a peer, and drop it if it is the leader or a follower."""
        # Banned first: what follows asks the next candidate, and must not choose this one.
        self.state.peers.ban(peer_id, reason)
        if self.state.has_ended:  # the round itself excludes a member of a group that stands
            return []
        actions: Actions = []
        if self.state.leader is not None and self.state.leader.peer_id == peer_id:
            actions += self._followed.leave(reason, now) + self._advance(now)
        if peer_id in self.group.followers:
            actions += [Close(peer_id, reason), *self.lost(peer_id, reason, now)]
        return actions

    def stop(self, reason: str) -> Actions:
        """End the attempt, and tell the peers that wait for this one."""
        return [] if self.state.has_ended else self._end(reason)

    def _end(self, reason: str) -> Actions:
        self.state.phase = AttemptPhase.OVER
        return self._followed.stop_asking(reason) + self.group.disband(reason, reason)
