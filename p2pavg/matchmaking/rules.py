"""The rules by which peers that are ready become a group: one peer's attempt, as a state machine.

It has no I/O, no clock and no random source. A :class:`Matchmaking` takes an event and returns the actions to carry
out, each with its reason. :mod:`p2pavg.matchmaking.matchmaker` carries them out. Times are wall-clock seconds.

Theory of operation
-------------------

**The problem.** Peers that are ready find each other through records, which arrive late and in any order. They must
agree on one roster without a coordinator. Peers crash, lose connections, and may lie. Some of them cannot be dialled.

**The guarantees.** A peer commits to one group at most in an attempt. It follows one leader at a time, and accepts
rosters from that leader only. A leader commits a roster only if every member has accepted it. Peers never wait for
each other in a circle. A peer that wants a result reports or gives up after each match timeout without a group.

**The order.** Candidates are ordered by (auxiliary, without an address, deadline, peer id), as each of them signed it.
A peer asks only candidates before it, and an asked peer declines a candidate that does not come after it. So waiting
has no cycles. A peer that follows no leader leads, so the first peer to announce leads and later peers join it. A
leader nudges later candidates, which may not have seen its record. A leader that joins an earlier one disbands its own
group, and names the new leader to its followers.

**The commit** has two phases. A group is complete at ``target`` members that want the result; auxiliaries do not count.
After the leader's deadline ``minimum`` of them are enough. At least one must have something to contribute.

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
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from p2pavg.group.candidate import Candidate
from p2pavg.group.limits import MAX_MEMBERS
from p2pavg.group.participation import silent_members
from p2pavg.group.roster import Roster
from p2pavg.matchmaking.actions import (
    Actions,
    Close,
    Expect,
    Formed,
    GaveUp,
    Open,
    Renew,
    Report,
    Send,
    Settings,
)
from p2pavg.matchmaking.known_peers import KnownPeers, may_lead, plausible
from p2pavg.matchmaking.memory import Memory
from p2pavg.matchmaking.messages import (
    Accept,
    Ask,
    Commit,
    Declined,
    Disband,
    Joined,
    Message,
    Nudge,
    Propose,
    Refuse,
    Status,
)
from p2pavg.matchmaking.reasons import (
    leader_wait,
    peers_of_other_states,
    refused_peers,
    refusing_peers,
    unreached_peers,
)
from p2pavg.matchmaking.roster_check import too_heavy, wrong_with

HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 3 * HEARTBEAT_SECONDS  # timeout after which a follower gives up a silent leader
ANSWER_SECONDS = 3.0  # timeout of a proposal: one round trip, and the pause of a busy machine
GRACE_SECONDS = 1.0  # a follower waits this much longer than its own deadline for its leader's status
ORPHAN_SECONDS = (
    1.0  # a member that accepted and then lost its leader waits so long for another member to begin
)
RETRY_SECONDS = 1.0  # delay before a candidate that declined is asked again
UNREACHABLE_SECONDS = 10.0  # delay before a candidate that could not be reached is asked again
DUE_SECONDS = 5.0
"""A follower leaves a leader that has been due for so long. Other peers may need a poll of the records, 4 s, to find
that leader."""
BACK_SECONDS = 2.0
"""A leader that was left before its deadline is asked again this long before the deadline. If it waits for a member
that has died, it goes ahead with the others at the deadline. So it is left only if it can be held off for at least as
long."""
MAX_PROPOSALS = 2
"""Number of proposals that give a due leader more time. An honest leader drops all silent members at once, so it needs
few."""
SETTLE_SECONDS = 2.0
"""If ``minimum`` members come together after the leader's deadline, it waits so long for more before it proposes. Peers
that leave another leader arrive within seconds of each other."""
RENEW_SECONDS = 60.0  # a leader begins a new attempt this long after its deadline
PROVEN_SECONDS = 1.0
"""If enough peers for a group have finished a round with each other, they have so long to form it before they ask
other peers. A group takes a few round trips."""
AUXILIARY_SECONDS = 0.25  # a complete group waits this long for auxiliaries that it has nudged


class Phase(enum.Enum):
    """Phase of a peer's attempt."""

    LEADING = "leading"  # follows no leader; may have followers
    ASKING = "asking"  # still leads, and has asked an earlier candidate
    FOLLOWING = "following"
    ACCEPTED = "accepted"  # follows, and has accepted a roster
    PROPOSING = "proposing"
    COMMITTED = "committed"
    OVER = "over"


class Matchmaking:
    """One peer's attempt to be in one group.

    Args:
        memory: knowledge from earlier attempts; this one adds to it.
    """

    def __init__(self, me: Candidate, settings: Settings, now: float, memory: Memory | None = None) -> None:
        self.me = me
        self.settings = settings
        self._memory = Memory() if memory is None else memory
        self._begun = now
        self.phase = Phase.LEADING
        self._peers = KnownPeers()
        self.followers: dict[str, Candidate] = {}
        self.leader: Candidate | None = None  # asked, followed or accepted
        self.roster: Roster | None = None  # proposed or accepted
        self._window_end = me.deadline
        self._accepted: set[str] = set()
        self._answers_due = 0.0
        self._proposals = 0
        self._heard = now  # time of the leader's last message
        self._begun_by: str | None = None  # a member of the accepted roster that has begun the exchange
        self._orphaned: float | None = None  # end of the wait for proof that the lost leader has committed
        self._joined = now  # time at which this peer began to follow
        self._spoken = now  # time of the last message to the followers
        self._status = Status(1, False)  # the leader's last status
        self._due_since: float | None = None  # time since which the leader could have proposed
        self._looked = now  # time of the last check whether the leader is due
        self._heard_proposals = 0  # number of this leader's proposals
        self._enough_since: float | None = (
            None  # time since which this peer's own group has had enough members to go ahead
        )

    # ------------------------------------------------------------------ state

    @property
    def candidates(self) -> dict[str, Candidate]:
        """The latest attempt of each other peer that is ready."""
        return self._peers.candidates

    @property
    def holders(self) -> int:
        """Number of contributors and observers in this peer's own group, itself included."""
        return 1 + sum(not follower.auxiliary for follower in self.followers.values())

    @property
    def ready_peers(self) -> int:
        """Number of contributors known to be ready, this peer included."""
        if self.phase in (Phase.FOLLOWING, Phase.ACCEPTED):
            return max(self._status.ready_peers, 2)
        others = {
            known.peer_id
            for known in self._peers
            if known.candidate is not None
            and not known.candidate.auxiliary
            and known.candidate.fits(self.me)
            and not known.is_silent
        }
        others |= {p for p, c in self.followers.items() if not c.auxiliary}
        return 1 + len(others)

    @property
    def _full(self) -> bool:
        return self.holders >= self.settings.target

    @property
    def _somebody_contributes(self) -> bool:
        members = (self.me, *self.followers.values())
        holders = {member.peer_id for member in members if not member.auxiliary}
        return bool(holders - self._observers_among(members))

    def _is_missing(self, candidate: Candidate) -> bool:
        """Return whether the candidate would be the first contributor in a group of observers."""
        if candidate.auxiliary or self._somebody_contributes:
            return False
        return candidate.peer_id not in self._observers_among((self.me, *self.followers.values(), candidate))

    def _observers_among(self, members: Sequence[Candidate]) -> frozenset[str]:
        return (self.settings.choose_observers or silent_members)(members)

    def wake_at(self) -> float:
        """Return the latest time for the next call of :meth:`tick`."""
        if self.phase in (Phase.COMMITTED, Phase.OVER):
            return float("inf")
        times = self._peers.times()
        if self.phase in (Phase.LEADING, Phase.ASKING):
            times += self._own_times()
        if self.phase is Phase.ASKING:
            times.append(self._heard + SILENCE_SECONDS)
        if self._orphaned is not None:
            return min([self._orphaned, *times])
        if self.phase in (Phase.FOLLOWING, Phase.ACCEPTED):
            times += [self._heard + SILENCE_SECONDS, self._patience_end()]
            assert self.leader is not None
            if self._looked < self.leader.deadline:
                times.append(self.leader.deadline)
            if not self.me.auxiliary:
                times.append(self._window_end + (0.0 if self._status.decided else GRACE_SECONDS))
        elif self.phase is Phase.PROPOSING:
            times.append(self._answers_due)
        elif self.followers:
            times.append(self._spoken + HEARTBEAT_SECONDS)
        return min(times, default=float("inf"))

    def _own_times(self) -> list[float]:
        """Return the times at which a peer that follows no leader has to act."""
        times = []
        if not self.me.auxiliary:
            times += [self._window_end, self.me.deadline + RENEW_SECONDS]
            if self._enough_since is not None:
                times.append(max(self.me.deadline, self._enough_since + SETTLE_SECONDS))
        if self.phase is Phase.LEADING:
            if self._looked < self._begun + PROVEN_SECONDS:
                times.append(self._begun + PROVEN_SECONDS)
            held = (self._memory.held_until(peer_id, self._looked) for peer_id in self.candidates)
            times += [until for until in held if until > self._looked]
        return times

    def waits_for(self) -> str:
        """Return a sentence that says what this attempt waits for, and why it has no group."""
        if self.phase in (Phase.FOLLOWING, Phase.ACCEPTED) and self.leader is not None:
            waiting = leader_wait(self.leader, self._status.ready_peers, self.settings.target)
        elif self.holders > 1:
            waiting = f"{self.holders} of {self.settings.target} members have joined this peer"
        else:
            waiting = "no other peer has joined this one"
        return "; ".join([waiting, *self._why_apart()])

    def _why_apart(self) -> list[str]:
        """Return the reasons for which peers that were seen are not in this peer's group."""
        following = self.leader is not None and self.phase is not Phase.ASKING
        reached = self.followers.keys() | ({self.leader.peer_id} if self.leader and following else set())
        others = [known for known in self._peers if known.peer_id not in reached]
        unreached = [known.unreached for known in others if known.unreached is not None]
        declined = {
            known.peer_id: known.declined
            for known in others
            if known.declined is not None and known.unreached is None
        }
        refused = {known.peer_id: known.refused for known in self._peers if known.refused is not None}
        refused |= {known.peer_id: known.banned for known in self._peers if known.banned is not None}
        of_other_states = sum(
            candidate.codec == self.me.codec and not candidate.fits(self.me)
            for candidate in self.candidates.values()
        )
        found = [
            unreached_peers(unreached),
            refusing_peers(declined),
            refused_peers(refused),
            peers_of_other_states(of_other_states),
        ]
        return [sentence for sentence in found if sentence]

    # ------------------------------------------------------------------ events

    def tick(self, now: float) -> Actions:
        """Act on the time that has passed."""
        self._peers.pass_time(now)
        self._look_whether_due(now)
        if self._orphaned is not None:
            return (
                self._free("its leader was lost, and nobody knows of a commit", now)
                if now >= self._orphaned
                else []
            )
        if self.leader is not None and now >= self._heard + SILENCE_SECONDS:
            self._peers[self.leader.peer_id].not_answering()
            if self.phase is not Phase.ASKING:
                self._memory.wasted(self.leader.peer_id, now)
            return self._leave(f"silent for {SILENCE_SECONDS:.0f} s", now, avoid=UNREACHABLE_SECONDS)
        if self.phase in (Phase.FOLLOWING, Phase.ACCEPTED) and now >= self._patience_end():
            return self._leave_late(now)
        if self.phase is Phase.PROPOSING and now >= self._answers_due:
            return self._drop_silent(now)
        return self._advance(now)

    def _patience_end(self) -> float:
        """Return the time at which this peer leaves a leader that forms no group. It may ask it again later."""
        assert self.leader is not None
        if self._due_since is not None:
            return self._due_since + DUE_SECONDS
        joined = self._joined if self.me.auxiliary else max(self._joined, self.me.deadline)
        return max(joined, self.leader.deadline) + self.settings.match_timeout + GRACE_SECONDS

    def _look_whether_due(self, now: float) -> None:
        self._looked = now
        if self.phase not in (Phase.FOLLOWING, Phase.ACCEPTED):
            return
        if not self._is_due(now):
            self._due_since = None
        elif self._due_since is None:
            self._due_since = now

    def _is_due(self, now: float) -> bool:
        """Return whether the leader could propose, to this peer's knowledge."""
        leader = self.leader
        assert leader is not None
        there = [leader] if self.me.auxiliary else [leader, self.me]
        there += [
            known.candidate
            for known in self._peers
            if known.candidate is not None
            and known.peer_id != leader.peer_id
            and not known.candidate.auxiliary
            and known.candidate.fits(leader)
            and known.is_there(now)
        ]
        if len(self._observers_among(there)) == len(there):
            return False
        if now >= leader.deadline:
            return len(there) >= self.settings.minimum
        # A leader that is already due stays due although its deadline comes nearer.
        begins = now if self._due_since is None else self._due_since
        soon = leader.deadline < begins + DUE_SECONDS + 2 * BACK_SECONDS
        excused = soon or self._peers[leader.peer_id].doubted or self._memory.is_proven(leader.peer_id)
        return len(there) >= self.settings.target and not excused

    def _leave_late(self, now: float) -> Actions:
        assert self.leader is not None
        if self._due_since is None:  # the leader rightly waits for more members: it wasted no time
            return self._leave("it has formed no group in its time and another match timeout", now)
        early = now < self.leader.deadline - BACK_SECONDS
        most = self.leader.deadline - BACK_SECONDS if early else float("inf")
        self._peers[self.leader.peer_id].doubted = True
        self._memory.wasted(self.leader.peer_id, now, most=most)
        return self._leave("it has formed no group in its time", now)

    def discovered(self, candidates: Iterable[Candidate], now: float) -> Actions:
        """Take in candidates from their records, and act on them."""
        if self.phase in (Phase.COMMITTED, Phase.OVER):
            return []
        for candidate in candidates:
            self.learn(candidate, now)
        self._look_whether_due(now)
        return self._advance(now)

    def learn(self, candidate: Candidate, now: float) -> None:
        """Take in a candidate from its record without acting on it; :meth:`discovered` acts."""
        if candidate.peer_id == self.me.peer_id or not plausible(candidate, now):
            return
        known = self._peers[candidate.peer_id]
        if known.banned is not None or candidate.deadline <= known.ended:
            return
        if (wrong := too_heavy(candidate, self.settings)) is not None:
            known.refuse(wrong)
            return
        known.seen = now
        known.take(candidate)

    def nudged(self, candidate: Candidate, now: float) -> Actions:
        """Handle the nudge of an earlier candidate.

        The nudge proves that there is a connection. So this peer can now ask a candidate that it could not dial, e.g.
        one behind a router. It does so once for each of the candidate's attempts; otherwise the candidate could make
        this peer ask it without end.
        """
        known = self._peers[candidate.peer_id]
        if known.unreached is not None and known.came_back != candidate.deadline:
            known.came_back, known.avoided, known.silent = candidate.deadline, None, None
        return self.discovered([candidate], now)

    def asked(self, candidate: Candidate, now: float) -> Actions:
        """Handle the join stream of a peer that asks to join."""
        refusal = self._refusal(candidate, now)
        if refusal is not None:
            actions: Actions = [
                Send(candidate.peer_id, refusal, refusal.reason),
                Close(candidate.peer_id, "declined"),
            ]
            if candidate.order < self.me.order:
                actions += self.discovered([candidate], now)
            return actions
        self.followers[candidate.peer_id] = candidate
        self._peers[candidate.peer_id].awaited_until = None
        actions = [Send(candidate.peer_id, Joined(self.me), "it comes after this peer, and there is room")]
        return actions + self._tell_followers(now) + self._advance(now)

    def _refusal(self, candidate: Candidate, now: float) -> Declined | None:
        """Return the refusal for a candidate that cannot join, or ``None``."""
        if candidate.peer_id == self.me.peer_id:
            return Declined("it has the id of the peer that it asked", over=True)
        if not plausible(candidate, now):
            return Declined("its record has expired, or its clock is wrong")
        if self.phase in (Phase.COMMITTED, Phase.OVER):
            return Declined("already in a group", taken=tuple(self.followers), over=True)
        if self.me.auxiliary:
            return Declined("an auxiliary leads nobody", over=True)
        if candidate.order <= self.me.order:
            # The candidate knows an earlier attempt of this peer, which is over.
            return Declined("comes before the peer it asked", over=True)
        if self.phase in (Phase.FOLLOWING, Phase.ACCEPTED):
            return Declined("follows another leader", self.leader)
        if candidate.codec != self.me.codec:
            return Declined(f"codec {candidate.codec} does not fit {self.me.codec}")
        if not candidate.fits(self.me):
            return Declined("its vector belongs to another state")
        known = self._peers[candidate.peer_id]
        if known.banned is not None:
            return Declined(known.banned)
        if (wrong := too_heavy(candidate, self.settings)) is not None:
            known.refused = wrong
            return Declined(wrong)
        why, until = known.held_off or ("", now)
        if now < until:
            return Declined(f"{why}; held off for {until - now:.0f} s more")
        if self.phase is Phase.PROPOSING:
            return Declined("a roster is being agreed", taken=tuple(self.followers))
        auxiliaries = len(self.followers) + 1 - self.holders
        # A group of observers takes one contributor more than its target, and the roster must have room for it.
        most = min(self.settings.target, MAX_MEMBERS - self.settings.target - 1)
        has_no_use = auxiliaries >= most if candidate.auxiliary else self._full
        if has_no_use and not self._is_missing(candidate):
            return Declined("the group is full", taken=tuple(self.followers))
        return None

    def lost(self, peer_id: str, reason: str, now: float) -> Actions:
        """Handle the end of a follower's join stream."""
        if self.phase is Phase.COMMITTED or peer_id not in self.followers:
            return []
        known = self._peers[peer_id]
        known.broken, known.candidate = self.followers.pop(peer_id).deadline, None
        return self._member_lost(f"{peer_id} was lost: {reason}", now)

    def lost_leader(self, peer_id: str, reason: str, now: float, *, reachable: bool = True) -> Actions:
        """Handle the end of the join stream to the leader or the asked peer, or a failure to open it."""
        if not reachable:
            self._peers[peer_id].not_reached(reason)
        if self.phase is Phase.COMMITTED or self.leader is None or self.leader.peer_id != peer_id:
            return []
        known = self._peers[peer_id]
        known.broken = self.leader.deadline
        known.avoid(now + (RETRY_SECONDS if reachable else UNREACHABLE_SECONDS))
        known.fruitless += 1
        if self.phase is Phase.ACCEPTED:
            # The leader may have committed and told other members. Then one of them opens a stream of the exchange.
            if self._begun_by is not None:
                return self._commit(f"{self._begun_by} has heard of the commit")
            self._orphaned = now + ORPHAN_SECONDS
            return []
        return self._free(reason, now)

    def exchange_begun(self, group_id: bytes, peer_id: str) -> Actions:
        """Note that a member has begun the exchange of the accepted group, which proves that the leader committed."""
        if self.phase is not Phase.ACCEPTED or self.roster is None or self.roster.group_id != group_id:
            return []
        if not any(member.peer_id == peer_id for member in self.roster.members):
            return []
        self._begun_by = peer_id  # as long as the leader is there, this peer waits for its Commit
        return [] if self._orphaned is None else self._commit(f"{peer_id} has heard of the commit")

    def not_nudged(self, peer_id: str, reason: str, now: float) -> Actions:
        """Handle a nudge that could not be delivered."""
        known = self._peers[peer_id]
        known.not_reached(reason)
        if known.awaited_until is None:
            return []
        known.awaited_until = None
        return self._advance(now)

    def told(self, peer_id: str, message: Message, now: float) -> Actions:
        """Handle a message of a follower."""
        if peer_id not in self.followers:
            return []
        if isinstance(message, Accept | Refuse):
            return self._answered(peer_id, message, now)
        wrong = f"it sent {type(message).__name__}"
        return [Close(peer_id, wrong), *self.lost(peer_id, wrong, now)]

    def told_by_leader(self, peer_id: str, message: Message, now: float) -> Actions:
        """Handle a message of the leader or the asked peer. A message that does not fit ends the conversation."""
        if self.phase is Phase.COMMITTED or self.leader is None or self.leader.peer_id != peer_id:
            return []
        self._heard, self._orphaned = now, None
        self._peers[peer_id].unreached = None
        self._look_whether_due(now)
        match message, self.phase:
            case Joined(leader), Phase.ASKING if self._leads(leader, now):
                return self._follow(leader)
            case Declined(), Phase.ASKING:
                return self._declined(message, now)
            case Status(), Phase.FOLLOWING | Phase.ACCEPTED:
                self._status = message
                withdrawn = self.phase is Phase.ACCEPTED
                self.phase, self.roster = Phase.FOLLOWING, None
                off: Actions = [Expect(None, "the leader withdrew its proposal")] if withdrawn else []
                return off + self._advance(now)
            case Propose(roster), Phase.FOLLOWING | Phase.ACCEPTED:
                return self._proposed(roster, now)
            case Commit(group_id), Phase.ACCEPTED if self.roster and self.roster.group_id == group_id:
                return self._commit("the leader committed")
            case Disband(reason, leader), Phase.FOLLOWING | Phase.ACCEPTED:
                self._learn_leader(leader, now)
                return self._leave(f"the leader disbanded: {reason}", now)
            case _:
                return self._leave(
                    f"the leader sent {type(message).__name__} while this peer was {self.phase.value}", now
                )

    def ban(self, peer_id: str, reason: str) -> None:
        """Neither ask nor admit this peer in this attempt."""
        self._peers[peer_id].ban(reason)

    def expel(self, peer_id: str, reason: str, now: float) -> Actions:
        """Ban a peer, and drop it if it is the leader or a follower."""
        self.ban(peer_id, reason)
        actions: Actions = []
        if self.leader is not None and self.leader.peer_id == peer_id:
            self._orphaned = None
            actions += self._leave(reason, now)
        if peer_id in self.followers:
            actions += [Close(peer_id, reason), *self.lost(peer_id, reason, now)]
        return actions

    # ------------------------------------------------------------------ as a follower

    def _leads(self, candidate: Candidate, now: float) -> bool:
        """Return whether this peer can follow the asked peer, in the attempt that its answer names."""
        return (
            self.leader is not None
            and candidate.peer_id == self.leader.peer_id
            and candidate.order < self.me.order
            and candidate.record.key == self.me.record.key
            and candidate.fits(self.me)
            and may_lead(candidate, now)
            and too_heavy(candidate, self.settings) is None
        )

    def _follow(self, leader: Candidate) -> Actions:
        self.phase, self.leader, self._joined = Phase.FOLLOWING, leader, self._heard
        self._due_since, self._heard_proposals, self._enough_since = None, 0, None
        self._look_whether_due(self._heard)
        self._peers[leader.peer_id].candidate = leader
        self._status = Status(2, False)
        along = [
            action
            for peer_id in self.followers
            for action in (
                Send(
                    peer_id, Disband("its leader joined an earlier one", self.leader), "followers come along"
                ),
                Close(peer_id, "disbanded"),
            )
        ]
        self.followers.clear()
        return [*along]

    def _declined(self, answer: Declined, now: float) -> Actions:
        assert self.leader is not None
        asked = self._peers[self.leader.peer_id]
        if answer.over:  # believed for the asked peer only: about others it may lie
            asked.ended, asked.candidate = self.leader.deadline, None
        else:
            asked.fruitless += 1
            asked.declined = answer.reason
        for peer_id in {asked.peer_id, *answer.taken}:
            self._peers.avoid(peer_id, now + RETRY_SECONDS)
        self._learn_leader(answer.leader, now)
        reason = f"declined: {answer.reason}"
        return [Close(self.leader.peer_id, reason, upward=True), *self._free(reason, now)]

    def _learn_leader(self, leader: Candidate | None, now: float) -> None:
        if leader is None or not may_lead(leader, now) or too_heavy(leader, self.settings) is not None:
            return
        if leader.order < self.me.order and leader.record.key == self.me.record.key:
            known = self._peers[leader.peer_id]
            if (known.deadline or 0.0) <= leader.deadline and known.banned is None:
                known.candidate, known.seen, known.avoided = leader, now, None

    def _proposed(self, roster: Roster, now: float) -> Actions:
        assert self.leader is not None
        wrong = wrong_with(
            roster,
            me=self.me,
            leader=self.leader,
            settings=self.settings,
            banned=self._peers.why_banned,
            now=now,
        )
        if wrong is not None:
            refusal = Send(self.leader.peer_id, Refuse(roster.group_id, wrong), wrong)
            avoid = self._peers[self.leader.peer_id].hold_off(wrong, now)
            return [refusal, *self._leave(f"its roster was refused: {wrong}", now, avoid=avoid)]
        self.phase, self.roster, self._begun_by = Phase.ACCEPTED, roster, None
        self._heard_proposals += 1
        if self._due_since is not None and self._heard_proposals <= MAX_PROPOSALS:
            self._due_since = max(self._due_since, now + ANSWER_SECONDS + 1.0 - DUE_SECONDS)
        return [
            Expect(roster.group_id, "others may hear of the commit first"),
            Send(self.leader.peer_id, Accept(roster.group_id), "the roster is what was agreed"),
        ]

    def _leave(self, reason: str, now: float, *, avoid: float = RETRY_SECONDS) -> Actions:
        assert self.leader is not None
        peer_id = self.leader.peer_id
        self._peers[peer_id].avoid(now + avoid)
        self._peers[peer_id].fruitless += 1
        return [Close(peer_id, reason, upward=True), *self._free(reason, now)]

    def _free(self, reason: str, now: float) -> Actions:
        """Follow no leader from now on."""
        accepted = self.phase is Phase.ACCEPTED
        self.phase, self.leader, self._orphaned, self._due_since = Phase.LEADING, None, None, None
        off: Actions = []
        if accepted:
            self.roster = None
            off = [Expect(None, reason)]
        return off + self._advance(now)

    # ------------------------------------------------------------------ as a leader

    def _advance(self, now: float) -> Actions:
        """Return all actions that are due: propose, ask an earlier candidate, nudge later ones, report."""
        if self.phase in (Phase.FOLLOWING, Phase.ACCEPTED):
            return self._report_as_follower(now)
        if self.phase not in (Phase.LEADING, Phase.ASKING):
            return []
        if not self.me.auxiliary:
            if self._full and not self._peers.awaits_auxiliaries and self._somebody_contributes:
                return self._propose("the group is complete", now)
            if self._goes_ahead(now):
                return self._propose(
                    f"the deadline is over with {self.holders} of {self.settings.target}", now
                )
            if now >= self.me.deadline + RENEW_SECONDS:
                return self._renew()
            if now >= self._window_end:
                return self._window_over(now)
        actions: Actions = []
        if self.phase is Phase.LEADING and (earlier := self._first_earlier(now)) is not None:
            self.phase, self.leader, self._heard = Phase.ASKING, earlier, now
            actions.append(Open(earlier, Ask(self.me), "the first of those before this peer"))
        if not self.me.auxiliary:
            actions += self._nudge(now)
        if self.followers and now >= self._spoken + HEARTBEAT_SECONDS:
            actions += self._tell_followers(now)
        return actions

    def _goes_ahead(self, now: float) -> bool:
        """Return whether an incomplete group goes ahead.

        It does at the deadline if it has enough members by then, and otherwise :data:`SETTLE_SECONDS` after it has
        enough.
        """
        if self.holders < self.settings.minimum or not self._somebody_contributes:
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = now
        in_time = self._enough_since <= self.me.deadline
        return now >= (self.me.deadline if in_time else self._enough_since + SETTLE_SECONDS)

    def _waits_for_proven(self, now: float) -> bool:
        """Return whether peers with which a round was finished are enough for a group and have time left to form it."""
        if now >= self._begun + PROVEN_SECONDS:
            return False
        proven = (
            self._memory.is_proven(candidate.peer_id) and candidate.fits(self.me)
            for candidate in self.candidates.values()
            if not candidate.auxiliary
        )
        return 1 + sum(proven) >= self.settings.target

    def _first_earlier(self, now: float) -> Candidate | None:
        proven_only = self._waits_for_proven(now)
        possible = [
            candidate
            for peer_id, candidate in self.candidates.items()
            if candidate.order < self.me.order
            and self._peers[peer_id].avoided is None
            and peer_id not in self.followers
            and candidate.fits(self.me)
            and may_lead(candidate, now)
            and self._memory.held_until(peer_id, now) <= now
            and (self._memory.is_proven(peer_id) or not proven_only)
        ]
        # Candidates that were asked in vain come last, so silent peers and liars cannot block the others. Among the
        # rest, peers with which a round was finished come first.
        return min(possible, key=self._preference, default=None)

    def _preference(self, candidate: Candidate) -> tuple[int, bool, tuple[bool, bool, float, str]]:
        peer_id = candidate.peer_id
        return (self._peers[peer_id].fruitless, not self._memory.is_proven(peer_id), candidate.order)

    def _nudge(self, now: float) -> Actions:
        """Tell later candidates that this peer leads. Two peers that announced at once may not see each other."""
        actions: Actions = []
        nudged = self._peers.nudged
        for candidate in sorted(self.candidates.values(), key=lambda c: c.order):
            known = self._peers[candidate.peer_id]
            # A group waits for a nudged auxiliary, so each is nudged once: it could delay a complete group for ever.
            told = known.nudged == candidate.deadline or (candidate.auxiliary and known.nudged is not None)
            if told or candidate.order < self.me.order or candidate.peer_id in self.followers:
                continue
            if not candidate.fits(self.me) or nudged >= 4 * self.settings.target:
                continue
            nudged += known.nudged is None
            known.nudged = candidate.deadline
            if candidate.auxiliary:
                known.awaited_until = now + AUXILIARY_SECONDS
            actions.append(Open(candidate, Nudge(self.me), "it comes after this peer"))
        return actions

    def _window_over(self, now: float) -> Actions:
        if self.ready_peers == 1:
            apart = self._why_apart()
            return self._give_up("; ".join(apart) if apart else "no other peer was ready by the deadline")
        self._window_end = now + self.settings.match_timeout
        reason = f"{self.holders} joined, at least {self.settings.minimum} are needed"
        if self.holders >= self.settings.minimum:
            reason = f"{self.holders} joined, and none of them has anything to contribute"
        report = Report(self.ready_peers, "; ".join([reason, *self._why_apart()]))
        return [report, *self._tell_followers(now, decided=True), *self._advance(now)]

    def _renew(self) -> Actions:
        """End an attempt so long after its deadline that others may doubt it; the peer begins another one."""
        reason = "its deadline is long over"
        return [*self._give_up(reason)[:-1], Renew(reason)]

    def _report_as_follower(self, now: float) -> Actions:
        if self.me.auxiliary or now < self._window_end:
            return []
        if not self._status.decided and now < self._window_end + GRACE_SECONDS:
            return []
        self._window_end = now + self.settings.match_timeout
        return [Report(self.ready_peers, "the group that this peer is in waits for more")]

    def _give_up(self, reason: str) -> Actions:
        closing: Actions = []
        if self.leader is not None:
            closing.append(Close(self.leader.peer_id, reason, upward=True))
        for peer_id in self.followers:
            closing += [Send(peer_id, Disband(reason), reason), Close(peer_id, reason)]
        self.phase, self.leader = Phase.OVER, None
        self.followers.clear()
        return [*closing, GaveUp(reason)]

    def stop(self, reason: str) -> Actions:
        """End the attempt, and tell the peers that wait for this one."""
        if self.phase in (Phase.COMMITTED, Phase.OVER):
            return []
        return self._give_up(reason)[:-1]

    def _tell_followers(self, now: float, *, decided: bool = False) -> Actions:
        self._spoken = now
        status = Status(self.holders, decided)
        return [
            Send(peer_id, status, "its group has changed, or time has passed") for peer_id in self.followers
        ]

    def _propose(self, reason: str, now: float) -> Actions:
        actions: Actions = []
        if self.leader is not None:
            actions.append(Close(self.leader.peer_id, "this peer proposes a group of its own", upward=True))
            self.leader = None
        members = (self.me, *sorted(self.followers.values(), key=lambda follower: follower.order))
        self._proposals += 1
        self.roster = Roster(
            members=members,
            shares=self.settings.cut_shares(members),
            proposal=self._proposals,
            observers=self._observers_among(members),
        )
        self.phase, self._accepted, self._answers_due = Phase.PROPOSING, set(), now + ANSWER_SECONDS
        actions.append(Expect(self.roster.group_id, "members may hear of the commit first"))
        return actions + [Send(peer_id, Propose(self.roster), reason) for peer_id in self.followers]

    def _answered(self, peer_id: str, answer: Accept | Refuse, now: float) -> Actions:
        if (
            self.phase is not Phase.PROPOSING
            or self.roster is None
            or answer.group_id != self.roster.group_id
        ):
            return []  # an answer to a proposal that was withdrawn meanwhile
        if isinstance(answer, Refuse):
            del self.followers[peer_id]
            self._peers[peer_id].hold_off(f"refused: {answer.reason}", now)
            return [Close(peer_id, "refused"), *self._member_lost(f"{peer_id} refused: {answer.reason}", now)]
        self._accepted.add(peer_id)
        if self._accepted != self.followers.keys():
            return []
        return [Send(p, Commit(self.roster.group_id), "all accepted") for p in self.followers] + self._commit(
            "all accepted"
        )

    def _commit(self, reason: str) -> Actions:
        assert self.roster is not None
        self.phase, self._orphaned = Phase.COMMITTED, None
        closing: Actions = [Close(peer_id, "committed") for peer_id in self.followers]
        if self.leader is not None:
            closing = [Close(self.leader.peer_id, "committed", upward=True)]
        return [*closing, Formed(self.roster, reason)]

    def _member_lost(self, reason: str, now: float) -> Actions:
        """Continue without a lost follower: make the proposal again without it, or withdraw it."""
        if self.phase is Phase.PROPOSING:
            self.phase, self.roster = Phase.LEADING, None
            off: Actions = [Expect(None, reason)]
            enough = self.holders >= self.settings.minimum and self._somebody_contributes
            if enough and now >= self.me.deadline:
                return off + self._propose(reason, now)
            return off + self._tell_followers(now) + self._advance(now)
        if self.phase in (Phase.LEADING, Phase.ASKING):
            return self._tell_followers(now) + self._advance(now)
        return []

    def _drop_silent(self, now: float) -> Actions:
        silent = self.followers.keys() - self._accepted
        reason = f"no answer to the proposal within {ANSWER_SECONDS:.0f} s"
        actions: Actions = []
        for peer_id in sorted(silent):
            del self.followers[peer_id]
            self._peers[peer_id].hold_off(
                reason, now
            )  # otherwise it would rejoin at once, and delay the next roster too
            actions += [Send(peer_id, Disband(reason), reason), Close(peer_id, reason)]
        return actions + self._member_lost(reason, now)
