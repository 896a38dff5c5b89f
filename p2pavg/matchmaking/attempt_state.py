"""The state of one attempt that both of its sides share: the group that the peer leads and the leader that it follows.

No I/O, no clock, no random source.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from p2pavg.group.candidate import Candidate
from p2pavg.group.participation import silent_members
from p2pavg.group.roster import Roster
from p2pavg.matchmaking.actions import Settings
from p2pavg.matchmaking.known_peers import KnownPeers, may_lead, plausible
from p2pavg.matchmaking.memory import Memory
from p2pavg.matchmaking.roster_check import not_admitted


class AttemptPhase(enum.Enum):
    """Phase of a peer's attempt."""

    LEADING = "leading"  # follows no leader; may have followers
    ASKING = "asking"  # still leads, and has asked an earlier candidate
    FOLLOWING = "following"
    ACCEPTED = "accepted"  # follows, and has accepted a roster
    PROPOSING = "proposing"
    COMMITTED = "committed"
    OVER = "over"


@dataclass(slots=True, kw_only=True)
class AttemptState:
    """One peer's attempt to be in one group. Times are wall-clock seconds."""

    me: Candidate
    settings: Settings
    memory: Memory
    """Knowledge from earlier attempts, to which this one adds."""
    peers: KnownPeers
    begun: float
    looked: float
    """Time of the last tick, discovery or message of the leader."""
    report_at: float
    """Time of the next report to the caller, unless there is a group by then."""
    companions: frozenset[str]
    """Ids of the members of the last group, if this peer hopes to be in it again."""
    strangers_from: float
    """Until then it waits for that group's leader. It does not, once it sees a peer that was not in the group."""
    phase: AttemptPhase = AttemptPhase.LEADING
    leader: Candidate | None = None
    """The candidate that was asked, or is followed."""
    roster: Roster | None = None
    """The roster that this peer has proposed or accepted."""

    @property
    def leads(self) -> bool:
        """True while this peer follows no leader and its group has not been proposed."""
        return self.phase in (AttemptPhase.LEADING, AttemptPhase.ASKING)

    @property
    def follows(self) -> bool:
        """True while this peer follows a leader."""
        return self.phase in (AttemptPhase.FOLLOWING, AttemptPhase.ACCEPTED)

    @property
    def has_ended(self) -> bool:
        """True once the attempt has a group, or has been given up."""
        return self.phase in (AttemptPhase.COMMITTED, AttemptPhase.OVER)

    @property
    def others_in_roster(self) -> tuple[str, ...]:
        """Ids of the other members of the roster that is proposed, accepted or committed; else nothing."""
        members = () if self.roster is None else self.roster.members
        return tuple(member.peer_id for member in members if member.peer_id != self.me.peer_id)

    @property
    def own_refusal(self) -> str | None:
        """The reason for which other peers refuse this one as a member of the run, or ``None``."""
        return None if self.settings.refuses is None else self.settings.refuses(self.me, self.looked)

    def others_there(self, now: float) -> int:
        """Return the number of other peers that could be in a group with this one, as far as it sees."""
        return sum(
            known.candidate is not None
            and not known.candidate.auxiliary
            and known.candidate.fits(self.me)
            and known.is_there(now)
            for known in self.peers
        )

    def learn_record(self, candidate: Candidate, now: float) -> None:
        """Take in a candidate from its record, which may be left over from a round that was finished with it.

        The record was read in one of this peer's places, whose keys differ from that of the common one.
        """
        if not self.memory.is_spent(candidate):
            self.learn(candidate, now)

    def learn(self, candidate: Candidate, now: float) -> None:
        """Take in a candidate that its peer has sent itself, or whose record is a new one."""
        if candidate.peer_id == self.me.peer_id or not plausible(candidate, now):
            return
        known = self.peers[candidate.peer_id]
        if known.banned is not None or candidate.deadline <= known.ended:
            return
        if (wrong := not_admitted(candidate, self.settings, now)) is not None:
            known.refuse(wrong)
            return
        known.seen = now
        known.take(candidate)
        is_other = candidate.peer_id not in self.companions and not candidate.auxiliary
        if is_other and candidate.fits(self.me):
            self.strangers_from = min(self.strangers_from, now)

    def learn_leader(self, leader: Candidate | None, now: float) -> None:
        """Take in a leader that another peer has named, if this peer may ask it."""
        if (
            leader is None
            or not may_lead(leader, now)
            or not_admitted(leader, self.settings, now) is not None
        ):
            return
        if leader.peer_id == self.me.peer_id or leader.record.key != self.me.record.key:
            return
        if leader.order < self.me.order:
            known = self.peers[leader.peer_id]
            is_over = known.banned is not None or leader.deadline <= known.ended
            if (known.deadline or 0.0) <= leader.deadline and not is_over:
                known.candidate, known.seen, known.avoided = leader, now, None

    def observers_among(self, members: Sequence[Candidate]) -> frozenset[str]:
        """Return the ids of the members that would only observe in a group of these."""
        return (self.settings.choose_observers or silent_members)(members)
