"""The state of one attempt that both of its sides share: the group that the peer leads and the leader that it follows.

No I/O, no clock, no random source.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from p2pavg.base.limits import HOLD_OFF_SECONDS, MAX_BACKOFF_SECONDS, MAX_GROUP_SIZE
from p2pavg.group.candidate import Candidate
from p2pavg.group.participation import silent_members
from p2pavg.group.roster import Roster
from p2pavg.matchmaking.actions import Settings
from p2pavg.matchmaking.known_peers import KnownPeers, may_lead, plausible
from p2pavg.matchmaking.timing import PUT_OFF_SECONDS, backoff

# One peer's own observations of others, kept from attempt to attempt.
#
# A peer's statements about another peer are never stored here: a lie could shut out honest peers.

MAX_LATE = 512
"""Leaders that are remembered; each of them cost seconds of waiting, so none is pushed out quickly."""
MAX_PUT_OFF = 512  # candidates that are remembered as put off; a forgotten one may be put off again
MAX_PROVEN = 256  # peers that are remembered from finished rounds: four groups of the largest size
MAX_BANNED = 1024  # peers; a banned peer can take a new identity at no cost, so more bans would not help


@dataclass(slots=True)
class _Late:
    until: float
    times: int
    last: float
    most: float  # latest end of its backoff, even if the backoff of other leaders extends it


class Memory:
    """Leaders that formed no group, candidates that were put off, peers with which a round was finished, and bans.

    All lists are bounded.
    """

    def __init__(self) -> None:
        self._late: OrderedDict[str, _Late] = OrderedDict()
        # The attempt with which each of them was in the last finished round, named by its deadline.
        self._proven: OrderedDict[str, float] = OrderedDict()
        # The attempt in which a candidate was first put off, and the time.
        self._put_off: OrderedDict[str, tuple[float, float]] = OrderedDict()
        # The reason of each ban and its end.
        self._banned: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def ban(self, peer_id: str, reason: str, until: float) -> None:
        """Ban a peer from all attempts that begin before ``until``, on a clock that does not run backwards."""
        # A repeated ban goes to the end, so the one that is dropped below is the oldest.
        self._banned.pop(peer_id, None)
        self._banned[peer_id] = (reason, until)
        if len(self._banned) > MAX_BANNED:
            self._banned.popitem(last=False)

    def banned(self, now: float) -> Mapping[str, str]:
        """Return the reasons of the bans that hold, by peer id. Those that are over are dropped, and never pile up."""
        self._banned = OrderedDict((each, ban) for each, ban in self._banned.items() if now < ban[1])
        return {peer_id: reason for peer_id, (reason, _) in self._banned.items()}

    def wasted(self, peer_id: str, now: float, *, most: float = math.inf) -> float:
        """Note that a followed leader formed no group; return the end of its backoff, ``most`` at the latest."""
        self._proven.pop(peer_id, None)
        known = self._late.pop(peer_id, None)
        times = 0 if known is None else known.times >> int(max(0.0, now - known.last) / MAX_BACKOFF_SECONDS)
        until = min(now + backoff(times), most)
        # Leaders that are already held off stay so. Otherwise three of them, one after the other, would leave no time
        # in which this peer is free for other leaders.
        for late in self._late.values():
            if now < late.until <= now + MAX_BACKOFF_SECONDS:
                late.until = max(late.until, min(now + HOLD_OFF_SECONDS, late.most))
        self._late[peer_id] = _Late(until, times + 1, now, most)
        if len(self._late) > MAX_LATE:
            self._late.popitem(last=False)
        return until

    def held_until(self, peer_id: str, now: float) -> float:
        """Return the end of a peer's backoff. If it is not after ``now``, the peer may be asked."""
        late = self._late.get(peer_id)
        # If the clock was set back meanwhile, the backoff must not become longer.
        return now if late is None or late.until > now + MAX_BACKOFF_SECONDS else late.until

    def finished_with(self, members: Iterable[Candidate]) -> None:
        """Note that a round with these members was finished."""
        for member in members:
            peer_id = member.peer_id
            self._late.pop(peer_id, None)
            self._put_off.pop(peer_id, None)
            self._proven.pop(peer_id, None)
            self._proven[peer_id] = member.deadline
            if len(self._proven) > MAX_PROVEN:
                self._proven.popitem(last=False)

    def may_put_off(self, peer_id: str, attempt: float, now: float) -> bool:
        """Return whether a candidate may be put off for better ones, and remember that it was.

        It may for :data:`PUT_OFF_SECONDS` in one attempt, and in another one only after a round that was finished with
        it. So a candidate that is always ready together with better ones is in every second round at least.

        Args:
            attempt: deadline of this peer's attempt.
        """
        before = self._put_off.setdefault(peer_id, (attempt, now))
        if len(self._put_off) > MAX_PUT_OFF:
            self._put_off.popitem(last=False)
        return before[0] == attempt and before[1] <= now < before[1] + PUT_OFF_SECONDS

    def is_proven(self, peer_id: str) -> bool:
        """Return whether a round with this peer was finished and it has wasted no time since."""
        return peer_id in self._proven

    def is_spent(self, candidate: Candidate) -> bool:
        """Return whether a round was finished with this very attempt of a peer. Its record may still be read.

        An honest leader's group has only members that accepted it, and their attempts are over. A liar can put a peer
        into a roster that never heard of it. So only records are left out because of this, not what the peer itself
        sends.
        """
        return self._proven.get(candidate.peer_id) == candidate.deadline


# Checks of a follower before it accepts a roster, as pure functions.


def not_admitted(candidate: Candidate, settings: Settings, now: float) -> str | None:
    """Return the reason for refusing a candidate because of its weight or membership, or ``None``."""
    if settings.refuses is not None and (why := settings.refuses(candidate, now)) is not None:
        return why
    if candidate.weight <= settings.max_weight:
        return None
    return f"its weight of {candidate.weight:g} is above max_weight {settings.max_weight:g}"


def wrong_with(
    roster: Roster, *, me: Candidate, leader: Candidate, settings: Settings, peers: KnownPeers, now: float
) -> str | None:
    """Return the reason for refusing a roster, or ``None``.

    Args:
        me: the follower's own signed candidate.
        leader: the leader that it follows, in the attempt that it joined.
        peers: that this peer knows, with those that it has banned.
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
    if roster.shares != settings.cutter.cut(roster.members):
        return "a roster whose shares do not follow from its members' bandwidths"
    own = roster.shares[roster.position(me.peer_id)]
    if settings.max_share is not None and own > settings.max_share:
        return f"a share of {own} elements is more than this peer takes"
    expired = [member.peer_id for member in roster.members if member.record.expiration_time <= now]
    if expired:
        return f"a roster with the expired record of {expired[0]}"
    for member in roster.members:
        if (why := peers.why_banned(member.peer_id)) is not None:
            return f"a roster with {member.peer_id}: {why}"
    # The leader is first and auxiliaries are last: the order decides which member leads if the first one is lost.
    if list(roster.members) != sorted(roster.members, key=lambda member: member.order):
        return "a roster whose members are out of order"
    if not settings.minimum <= len(roster.holders) <= MAX_GROUP_SIZE + 1:
        return f"a roster of {len(roster.holders)}; this peer takes part in {settings.minimum} or more"
    for member in roster.members:
        if (why := not_admitted(member, settings, now)) is not None:
            return f"a roster with {member.peer_id}: {why}"
    return None


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
                known.seen = now
                known.take(leader)

    def observers_among(self, members: Sequence[Candidate]) -> frozenset[str]:
        """Return the ids of the members that would only observe in a group of these."""
        return (self.settings.choose_observers or silent_members)(members)
