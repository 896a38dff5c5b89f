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
(:mod:`p2pavg.matchmaking.places`). A peer whose reach changes while it is in no group begins a new attempt.

**The commit** has two phases. A group is complete at ``target`` members that want the result; auxiliaries do not count.
After the leader's deadline ``minimum`` of them are enough. At least one must have something to contribute. A leader
that knows with whom its group is to be (``expected``) keeps their places: other contributors come on top of the target,
so a newcomer displaces none of them.

* The leader proposes a roster (``Propose``). Each follower checks it and answers ``Accept`` or ``Refuse``.
* When all followers have accepted, the leader commits (``Commit``). It drops a follower that refuses or does not answer
  in time, and admits it again only after a backoff that doubles each time.
* A follower that accepted and then loses its leader waits a second for another member to begin the exchange, which
  proves the commit. Otherwise it is free again.

**Leaders that do not propose.** A follower considers its leader *due* when the leader could propose: ``target`` peers
are ready, or its deadline has passed and ``minimum`` are. A follower leaves a leader that has been due for a few
seconds, and backs off (:mod:`p2pavg.matchmaking.memory`). So a leader that never proposes costs seconds. Two peers may
aim at groups of different sizes. So before a leader's deadline a follower leaves it once in an attempt at most, and
never if the two have finished a round together.

**Why this way.** The order follows from signed records, so no election is needed. Only a peer's own observations count
in later attempts, so a lie about another peer has no lasting effect. The rules have no I/O, so a test can choose any
order of arrivals, losses and crashes (``tests/properties/test_matchmaking.py``).

**The parts.** :class:`Matchmaking` takes the events. ``own_group.py`` has the group that the peer leads,
``admission.py`` who may join it, ``places.py`` for whom it
keeps its places, ``followed.py`` the leader that the peer asks or follows, ``selection.py`` the choice
of candidates, and ``attempt_state.py`` what they share.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pavg.group.candidate import Candidate
from p2pavg.matchmaking.actions import Actions, Close, GaveUp, Renew, Report, Send, Settings
from p2pavg.matchmaking.admission import refusal
from p2pavg.matchmaking.attempt_state import AttemptState, Phase
from p2pavg.matchmaking.followed import FollowedLeader
from p2pavg.matchmaking.known_peers import KnownPeers
from p2pavg.matchmaking.memory import Memory
from p2pavg.matchmaking.messages import (
    Accept,
    Commit,
    Declined,
    Disband,
    Joined,
    Message,
    Propose,
    Refuse,
    Status,
)
from p2pavg.matchmaking.own_group import OwnGroup
from p2pavg.matchmaking.reasons import code_apart, leader_wait, why_apart
from p2pavg.matchmaking.selection import first_earlier, nudges, times_to_ask
from p2pavg.matchmaking.timing import (
    ANSWER_SECONDS,
    LATER_SECONDS,
    MOVED_SECONDS,
    RENEW_SECONDS,
    RETRY_SECONDS,
    SILENCE_SECONDS,
    UNREACHABLE_SECONDS,
)


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
        others |= {p for p, c in self.group.followers.items() if not c.auxiliary}
        return 1 + len(others)

    def wake_at(self) -> float:
        """Return the latest time for the next call of :meth:`tick`."""
        state = self.state
        if state.has_ended:
            return float("inf")
        times = state.peers.times() + self._followed.times()
        if state.leads:
            times += self.group.times()
            if not state.me.auxiliary:
                times += [state.report_at, state.me.deadline + RENEW_SECONDS]
        if state.phase is Phase.LEADING:
            times += times_to_ask(state)
        elif state.phase is Phase.PROPOSING:
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

    def tick(self, now: float) -> Actions:
        """Act on the time that has passed."""
        state = self.state
        state.peers.pass_time(now)
        self._followed.look(now)
        if self._followed.orphaned is not None:
            if now < self._followed.orphaned:
                return []
            freed = self._followed.free("its leader was lost, and no member knows of a commit")
            return freed + self._advance(now)
        if state.leader is not None and now >= self._followed.heard + SILENCE_SECONDS:
            state.peers[state.leader.peer_id].not_answering()
            if state.phase is not Phase.ASKING:
                state.memory.wasted(state.leader.peer_id, now)
            reason = f"silent for {SILENCE_SECONDS:.0f} s"
            return self._followed.leave(reason, now, avoid=UNREACHABLE_SECONDS) + self._advance(now)
        if state.follows and now >= self._followed.patience_end():
            reason = self._followed.blame_delay(now)
            return self._followed.leave(reason, now) + self._advance(now)
        if state.phase is Phase.PROPOSING and now >= self.group.answers_due:
            reason = f"no answer to the proposal within {ANSWER_SECONDS:.0f} s"
            return self.group.drop_silent(reason, now) + self._member_lost(reason, now)
        return self._advance(now)

    def discovered(self, candidates: Iterable[Candidate], now: float) -> Actions:
        """Take in candidates from their records, and act on them."""
        if self.state.has_ended:
            return []
        for candidate in candidates:
            self.state.learn_record(candidate, now)
        self._followed.look(now)
        return self._advance(now)

    def _sent(self, candidate: Candidate, now: float) -> Actions:
        """Take in a candidate that its peer has sent itself, and act on it."""
        if self.state.has_ended:
            return []
        self.state.learn(candidate, now)
        return self.discovered((), now)

    def moved(self, now: float) -> Actions:
        """Begin a new attempt, because other peers reach this one in another way than it has signed.

        A peer that is in a group already keeps its attempt. The new deadline is nearly the old one, so the caller waits
        no longer. If it is near, it is put off a little, because others need some time to read the new record.
        """
        state = self.state
        if not state.leads or self.group.followers:
            return []
        reason = "this peer is reached in another way than it has signed"
        soon = now + min(state.settings.match_timeout, MOVED_SECONDS)
        return [*self._end(reason), Renew(reason, max(state.me.deadline + LATER_SECONDS, soon))]

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
        if candidate.order < self.state.me.order:
            actions += self._sent(candidate, now)
        return actions

    def told(self, peer_id: str, message: Message, now: float) -> Actions:
        """Handle a message of a follower."""
        if peer_id not in self.group.followers:
            return []
        if not isinstance(message, Accept | Refuse):
            wrong = f"it sent {type(message).__name__}"
            return [Close(peer_id, wrong), *self.lost(peer_id, wrong, now)]
        roster = self.state.roster
        if self.state.phase is not Phase.PROPOSING or roster is None or message.group_id != roster.group_id:
            return []  # an answer to a proposal that was withdrawn meanwhile
        if isinstance(message, Accept):
            return self.group.accepted(peer_id)
        closing = self.group.refused(peer_id, message.reason, now)
        return closing + self._member_lost(f"{peer_id} refused: {message.reason}", now)

    def lost(self, peer_id: str, reason: str, now: float) -> Actions:
        """Handle the end of a follower's join stream."""
        if self.state.phase is Phase.COMMITTED or peer_id not in self.group.followers:
            return []
        known = self.state.peers[peer_id]
        known.broken, known.candidate = self.group.followers.pop(peer_id).deadline, None
        return self._member_lost(f"{peer_id} was lost: {reason}", now)

    def _member_lost(self, reason: str, now: float) -> Actions:
        """Continue without a lost follower: make the proposal again without it, or withdraw it."""
        withdrawn = self.group.withdraw(reason)
        if not self.state.leads:
            return []
        if withdrawn and self.group.has_enough and now >= self.state.me.deadline:
            return withdrawn + self.group.propose(reason, now)
        return withdrawn + self.group.tell(now) + self._advance(now)

    def not_nudged(self, peer_id: str, reason: str, now: float) -> Actions:
        """Handle a nudge that could not be delivered."""
        known = self.state.peers[peer_id]
        known.not_reached(reason)
        if known.nudges.awaited_until is None:
            return []
        known.nudges.awaited_until = None
        return self._advance(now)

    # ------------------------------------------------------------------ the followed leader

    def told_by_leader(self, peer_id: str, message: Message, now: float) -> Actions:
        """Handle a message of the leader or the asked peer. A message that does not fit ends the conversation."""
        state, followed = self.state, self._followed
        if state.phase is Phase.COMMITTED or state.leader is None or state.leader.peer_id != peer_id:
            return []
        followed.heard, followed.orphaned = now, None
        state.peers[peer_id].unreached = None
        followed.look(now)
        match message, state.phase:
            case Joined(leader), Phase.ASKING if followed.may_follow(leader, now):
                followed.follow(leader)
                self.group.not_led()
                return self.group.disband(
                    "its leader joined an earlier one", "followers come along", leader=leader
                )
            case Declined(reason), Phase.ASKING:
                followed.declined(message, now)
                reason = f"declined: {reason}"
                closing = Close(peer_id, reason, upward=True)
                return [closing, *followed.free(reason), *self._advance(now)]
            case Status(), Phase.FOLLOWING | Phase.ACCEPTED:
                return followed.told_status(message) + self._advance(now)
            case Propose(roster), Phase.FOLLOWING | Phase.ACCEPTED:
                answer = followed.proposed(roster, now)
                return answer + self._advance(now) if state.leads else answer
            case Commit(group_id), Phase.ACCEPTED if state.roster and state.roster.group_id == group_id:
                return followed.commit("the leader committed")
            case Disband(reason, leader), Phase.FOLLOWING | Phase.ACCEPTED:
                state.learn_leader(leader, now)
                return followed.leave(f"the leader disbanded: {reason}", now) + self._advance(now)
            case _:
                reason = f"the leader sent {type(message).__name__} while this peer was {state.phase.value}"
                return followed.leave(reason, now) + self._advance(now)

    def lost_leader(self, peer_id: str, reason: str, now: float, *, reachable: bool = True) -> Actions:
        """Handle the end of the join stream to the leader or the asked peer, or a failure to open it."""
        state = self.state
        known = state.peers[peer_id]
        if not reachable:
            known.not_reached(reason)
        if state.phase is Phase.COMMITTED or state.leader is None or state.leader.peer_id != peer_id:
            return []
        known.broken = state.leader.deadline
        known.avoid(now + (RETRY_SECONDS if reachable else UNREACHABLE_SECONDS))
        known.fruitless += 1
        if state.phase is Phase.ACCEPTED:
            return self._followed.orphan(now)
        return self._followed.free(reason) + self._advance(now)

    def exchange_begun(self, group_id: bytes, peer_id: str) -> Actions:
        """Note that a member has begun the exchange of the accepted group, which proves that the leader committed."""
        roster = self.state.roster
        if self.state.phase is not Phase.ACCEPTED or roster is None or roster.group_id != group_id:
            return []
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
            state.phase is Phase.LEADING
            and (earlier := first_earlier(state, group.followers, now)) is not None
        ):
            actions += self._followed.ask(earlier, now)
        # A peer that asks an earlier candidate most likely follows it within a round trip, and then leads no group. If
        # each of a group that begins at once nudged all later ones, these would be as many streams as pairs.
        if state.phase is Phase.LEADING and not state.me.auxiliary:
            actions += nudges(state, group.followers, now)
        return actions + group.heartbeat(now)

    def _report_or_give_up(self, now: float) -> Actions:
        state, group = self.state, self.group
        apart = why_apart(state, group.followers)
        if self.ready_peers == 1 or state.own_refusal is not None:
            reason = "; ".join(apart) if apart else "no other peer was ready by the deadline"
            return [*self._end(reason), GaveUp(reason, code_apart(state, group.followers))]
        state.report_at = now + state.settings.match_timeout
        reason = f"{group.holders} joined, at least {state.settings.minimum} are needed"
        if group.holders >= state.settings.minimum:
            reason = f"{group.holders} joined, and none of them has anything to contribute"
        report = Report(self.ready_peers, "; ".join([reason, *apart]))
        return [report, *group.tell(now, decided=True), *self._advance(now)]

    def expel(self, peer_id: str, reason: str, now: float) -> Actions:
        """Ban a peer, and drop it if it is the leader or a follower."""
        self.state.peers.ban(peer_id, reason)
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
        self.state.phase = Phase.OVER
        return self._followed.stop_asking(reason) + self.group.disband(reason, reason)
