"""The rules by which peers that are ready become a group. No I/O, no clock, no random source.

* Candidates are ordered by (auxiliary, without an address, deadline, peer id), as each signed it. A peer asks only
  candidates before it, and one that is asked checks that the asker comes after it: waiting has no cycles, so nothing
  can deadlock. Which of the candidates before it a peer asks first is its own affair.
* A peer that follows nobody leads. The first to announce therefore leads, and whoever comes later joins it. A leader
  that learns of an earlier one asks it, and takes its followers along.
* A group is complete at ``target`` members that want the result (auxiliaries do not count), or at the leader's deadline
  with at least ``minimum``; one of them at least has something to contribute. The leader then proposes a roster; when
  every member has accepted, it commits.
* A follower is in one group at most: it accepts from the leader it follows only, and follows one leader at a time.
* A leader is *due* when it could propose, as far as a follower sees: as many as ``target`` are ready, or its deadline
  is over and as many as ``minimum`` are. A follower leaves a leader that has been due for a few seconds, and does not
  ask it for a while (:mod:`p2pavg.matchmaking.memory`). So a leader that never proposes costs seconds. Before its
  deadline a leader is left once in an attempt, and not at all by a peer that has finished a round with it: the two may
  aim at groups of different sizes.

A :class:`Matchmaking` takes what happened and returns what is to be done, each with its reason;
:mod:`p2pavg.matchmaking.matchmaker` does it. Times are wall-clock seconds.
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
SILENCE_SECONDS = 3 * HEARTBEAT_SECONDS  # a leader that was silent for this long is given up
ANSWER_SECONDS = 3.0  # for an answer to a proposal; one round trip, and a busy machine's pause
GRACE_SECONDS = 1.0  # after its own deadline a follower still waits this long for its leader's word
ORPHAN_SECONDS = (
    1.0  # for word of a commit from another member, when the leader is lost after this one accepted
)
RETRY_SECONDS = 1.0  # a candidate that declined is asked again after this
UNREACHABLE_SECONDS = 10.0  # and one that could not be reached after this
DUE_SECONDS = 5.0
"""A follower leaves a leader that has been due for so long: others need a poll of the records, 4 s, to find it."""
BACK_SECONDS = 2.0
"""A leader that was left before its deadline is asked again so long before it: an honest one, whose missing member has
died, goes ahead with the others then. So it is left only when it can be held off for as long at least."""
MAX_PROPOSALS = 2
"""A leader that proposes again and again is due all the same: it drops all silent members at once."""
SETTLE_SECONDS = 2.0
"""After its deadline a leader proposes to as many as ``minimum`` when they have been together for so long: peers that
leave another leader come within seconds of each other."""
RENEW_SECONDS = 60.0  # a leader whose deadline is over for so long begins a new attempt
PROVEN_SECONDS = 1.0
"""Peers that have finished a round with each other, and are enough for a group, have so long to form it before they ask
one with which they have not. A group takes a few round trips."""
AUXILIARY_SECONDS = 0.25  # a complete group waits this long for auxiliaries that were nudged


class Phase(enum.Enum):
    """What a peer is doing."""

    LEADING = "leading"  # follows nobody; may have followers
    ASKING = "asking"  # still leads, and has asked an earlier candidate
    FOLLOWING = "following"
    ACCEPTED = "accepted"  # follows, and has accepted a roster
    PROPOSING = "proposing"
    COMMITTED = "committed"
    OVER = "over"


class Matchmaking:
    """One peer's attempt to be in one group.

    Args:
        memory: what earlier attempts have taught; this one adds to it.
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
        self._heard = now  # last word of the leader
        self._begun_by: str | None = None  # a member of the accepted roster that acts as if it were committed
        self._orphaned: float | None = None  # until when this peer waits for word of its lost leader's commit
        self._joined = now  # when this peer began to follow
        self._spoken = now  # last word to the followers
        self._status = Status(1, False)  # the leader's last
        self._due_since: float | None = None  # since when the leader could have proposed
        self._looked = now  # when this peer last looked whether its leader is due
        self._heard_proposals = 0  # of this leader
        self._enough_since: float | None = (
            None  # since when this peer's own group could go ahead after the deadline
        )

    # ------------------------------------------------------------------ what is known

    @property
    def candidates(self) -> dict[str, Candidate]:
        """The latest attempt of each other peer that is ready."""
        return self._peers.candidates

    @property
    def holders(self) -> int:
        """Contributors and observers in this peer's own group, itself included."""
        return 1 + sum(not follower.auxiliary for follower in self.followers.values())

    @property
    def ready_peers(self) -> int:
        """Contributors known to be ready, this peer included."""
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
        """Whether it has what nobody in a group of observers has."""
        if candidate.auxiliary or self._somebody_contributes:
            return False
        return candidate.peer_id not in self._observers_among((self.me, *self.followers.values(), candidate))

    def _observers_among(self, members: Sequence[Candidate]) -> frozenset[str]:
        return (self.settings.choose_observers or silent_members)(members)

    def wake_at(self) -> float:
        """When :meth:`tick` has to be called at the latest."""
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
        """When a peer that follows no leader has something to do."""
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
        """Say what this attempt waits for, and why it has no group."""
        if self.phase in (Phase.FOLLOWING, Phase.ACCEPTED) and self.leader is not None:
            waiting = leader_wait(self.leader, self._status.ready_peers, self.settings.target)
        elif self.holders > 1:
            waiting = f"{self.holders} of {self.settings.target} members have joined this peer"
        else:
            waiting = "no other peer has joined this one"
        return "; ".join([waiting, *self._why_apart()])

    def _why_apart(self) -> list[str]:
        """Say why peers that were seen are not in this peer's group."""
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

    # ------------------------------------------------------------------ what happens

    def tick(self, now: float) -> Actions:
        """Time has passed."""
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
        """Until when this peer follows a leader that forms no group; it may be asked again, behind the others."""
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
        """Return whether the leader could propose, as far as this peer sees."""
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
        # One that is already due stays so while this peer's sync_timeout runs out.
        begins = now if self._due_since is None else self._due_since
        soon = leader.deadline < begins + DUE_SECONDS + 2 * BACK_SECONDS
        excused = soon or self._peers[leader.peer_id].doubted or self._memory.is_proven(leader.peer_id)
        return len(there) >= self.settings.target and not excused

    def _leave_late(self, now: float) -> Actions:
        assert self.leader is not None
        if self._due_since is None:  # it waits for more, as this peer would: no waste of time
            return self._leave("it has formed no group in its time and another match timeout", now)
        early = now < self.leader.deadline - BACK_SECONDS
        most = self.leader.deadline - BACK_SECONDS if early else float("inf")
        self._peers[self.leader.peer_id].doubted = True
        self._memory.wasted(self.leader.peer_id, now, most=most)
        return self._leave("it has formed no group in its time", now)

    def discovered(self, candidates: Iterable[Candidate], now: float) -> Actions:
        """These are ready, say their records."""
        if self.phase in (Phase.COMMITTED, Phase.OVER):
            return []
        for candidate in candidates:
            self.learn(candidate, now)
        self._look_whether_due(now)
        return self._advance(now)

    def learn(self, candidate: Candidate, now: float) -> None:
        """Take in what one record says; :meth:`discovered` decides what follows from it."""
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
        """An earlier candidate has reached this peer.

        So there is a connection: one that this peer could not dial, since it is behind a router, can be asked now. Once
        for each of its attempts, or it could have itself asked without end.
        """
        known = self._peers[candidate.peer_id]
        if known.unreached is not None and known.came_back != candidate.deadline:
            known.came_back, known.avoided, known.silent = candidate.deadline, None, None
        return self.discovered([candidate], now)

    def asked(self, candidate: Candidate, now: float) -> Actions:
        """A peer has opened a join stream to this one."""
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
        """Why this candidate cannot join, or ``None``."""
        if candidate.peer_id == self.me.peer_id:
            return Declined("it has the id of the peer that it asked", over=True)
        if not plausible(candidate, now):
            return Declined("its record has expired, or its clock is wrong")
        if self.phase in (Phase.COMMITTED, Phase.OVER):
            return Declined("already in a group", taken=tuple(self.followers), over=True)
        if self.me.auxiliary:
            return Declined("an auxiliary leads nobody", over=True)
        if candidate.order <= self.me.order:
            # What it knows of this peer is of an attempt that is over: this one comes after it.
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
        # A group of observers takes one contributor more than its target: a roster has to hold that one as well.
        most = min(self.settings.target, MAX_MEMBERS - self.settings.target - 1)
        has_no_use = auxiliaries >= most if candidate.auxiliary else self._full
        if has_no_use and not self._is_missing(candidate):
            return Declined("the group is full", taken=tuple(self.followers))
        return None

    def lost(self, peer_id: str, reason: str, now: float) -> Actions:
        """The join stream of a follower ended."""
        if self.phase is Phase.COMMITTED or peer_id not in self.followers:
            return []
        known = self._peers[peer_id]
        known.broken, known.candidate = self.followers.pop(peer_id).deadline, None
        return self._member_lost(f"{peer_id} was lost: {reason}", now)

    def lost_leader(self, peer_id: str, reason: str, now: float, *, reachable: bool = True) -> Actions:
        """The join stream to the peer that was asked or followed ended, or could not be opened."""
        if not reachable:
            self._peers[peer_id].not_reached(reason)
        if self.phase is Phase.COMMITTED or self.leader is None or self.leader.peer_id != peer_id:
            return []
        known = self._peers[peer_id]
        known.broken = self.leader.deadline
        known.avoid(now + (RETRY_SECONDS if reachable else UNREACHABLE_SECONDS))
        known.fruitless += 1
        if self.phase is Phase.ACCEPTED:
            # It may have committed, and have told others: a stream of theirs says so.
            if self._begun_by is not None:
                return self._commit(f"{self._begun_by} has heard of the commit")
            self._orphaned = now + ORPHAN_SECONDS
            return []
        return self._free(reason, now)

    def exchange_begun(self, group_id: bytes, peer_id: str) -> Actions:
        """A member opened a stream of the exchange of a group that this peer has accepted: the leader has committed."""
        if self.phase is not Phase.ACCEPTED or self.roster is None or self.roster.group_id != group_id:
            return []
        if not any(member.peer_id == peer_id for member in self.roster.members):
            return []
        self._begun_by = peer_id  # the leader's own word is worth more, as long as it may still come
        return [] if self._orphaned is None else self._commit(f"{peer_id} has heard of the commit")

    def not_nudged(self, peer_id: str, reason: str, now: float) -> Actions:
        """A nudge could not be delivered."""
        known = self._peers[peer_id]
        known.not_reached(reason)
        if known.awaited_until is None:
            return []
        known.awaited_until = None
        return self._advance(now)

    def told(self, peer_id: str, message: Message, now: float) -> Actions:
        """A message of a follower."""
        if peer_id not in self.followers:
            return []
        if isinstance(message, Accept | Refuse):
            return self._answered(peer_id, message, now)
        wrong = f"it sent {type(message).__name__}"
        return [Close(peer_id, wrong), *self.lost(peer_id, wrong, now)]

    def told_by_leader(self, peer_id: str, message: Message, now: float) -> Actions:
        """A message of the peer that was asked or is followed; one that does not fit ends the conversation."""
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
        """Have nothing more to do with a peer in this attempt, whatever it is to this one."""
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
        """Whether what the asked peer says of itself makes it a leader for this one."""
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
        if answer.over:  # of the attempt that was asked; what it says of others may be a lie
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
        """Follow nobody any more."""
        accepted = self.phase is Phase.ACCEPTED
        self.phase, self.leader, self._orphaned, self._due_since = Phase.LEADING, None, None, None
        off: Actions = []
        if accepted:
            self.roster = None
            off = [Expect(None, reason)]
        return off + self._advance(now)

    # ------------------------------------------------------------------ as a leader

    def _advance(self, now: float) -> Actions:
        """Whatever is due: propose, ask an earlier candidate, nudge later ones, report."""
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
        """Whether a group that is not complete goes ahead: enough at the deadline, or enough that met after it."""
        if self.holders < self.settings.minimum or not self._somebody_contributes:
            self._enough_since = None
            return False
        if self._enough_since is None:
            self._enough_since = now
        in_time = self._enough_since <= self.me.deadline
        return now >= (self.me.deadline if in_time else self._enough_since + SETTLE_SECONDS)

    def _waits_for_proven(self, now: float) -> bool:
        """Whether enough for a group are peers with which a round was finished; they have a moment to form it."""
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
        # Those that came to nothing go behind: neither the silent nor liars can stand in the way of the others. Among
        # the rest those first with which a round was finished.
        return min(possible, key=self._preference, default=None)

    def _preference(self, candidate: Candidate) -> tuple[int, bool, tuple[bool, bool, float, str]]:
        peer_id = candidate.peer_id
        return (self._peers[peer_id].fruitless, not self._memory.is_proven(peer_id), candidate.order)

    def _nudge(self, now: float) -> Actions:
        """Tell later candidates that this peer leads; two that announced at once may not see each other."""
        actions: Actions = []
        nudged = self._peers.nudged
        for candidate in sorted(self.candidates.values(), key=lambda c: c.order):
            known = self._peers[candidate.peer_id]
            # An auxiliary is nudged, and waited for, once: it could put off a complete group for ever.
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
        """End an attempt whose deadline is so long over that others may doubt it; the peer begins another one."""
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
        """End the attempt; whoever waits for this peer is told."""
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
            return []  # to a proposal that was withdrawn meanwhile
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
        """What a lost follower changes: a proposal is made again without it, or withdrawn."""
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
            )  # it would come back at once, and hold up the next roster
            actions += [Send(peer_id, Disband(reason), reason), Close(peer_id, reason)]
        return actions + self._member_lost(reason, now)
