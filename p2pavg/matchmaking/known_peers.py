"""One attempt's knowledge of other peers, one :class:`KnownPeer` each. No I/O, no clock, no random source.

A peer's attempt is named by its deadline, which a peer never uses twice. Knowledge about one attempt of a peer is
stored with that deadline. It does not apply to the peer's next attempt, which is a new candidate.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from p2pavg.base.limits import MAX_TIMEOUT_SECONDS, ROUND_TRIPS_SECONDS
from p2pavg.group.candidate import Candidate
from p2pavg.matchmaking.timing import POLL_SECONDS, RECORD_TTL_SECONDS, RENEW_SECONDS, backoff


def plausible(candidate: Candidate, now: float) -> bool:
    """Return whether a record is still valid and its deadline is one that an honest peer would sign."""
    return candidate.record.expiration_time > now and abs(candidate.deadline - now) <= 2 * MAX_TIMEOUT_SECONDS


def may_lead(candidate: Candidate, now: float) -> bool:
    """Return whether a peer may be asked: its deadline is not long over."""
    # An honest leader has begun another attempt by then, even if its clock is half a minute slow.
    return plausible(candidate, now) and candidate.deadline >= now - 1.5 * RENEW_SECONDS


@dataclass(slots=True)
class Nudges:
    """Nudges between this peer and another one."""

    sent: float | None = None
    """Deadline of the other's attempt that this peer nudged."""
    awaited_until: float | None = None
    """A complete group waits until then for this auxiliary, which was nudged."""


@dataclass(frozen=True, slots=True)
class HeldOff:
    """A backoff from a follower that spoiled a proposal."""

    reason: str
    until: float
    times: int
    """Number of times that it was held off, this one included."""


@dataclass(slots=True)
class KnownPeer:
    """One attempt's knowledge of one other peer. Times are wall-clock seconds."""

    peer_id: str
    candidate: Candidate | None = None
    """Its latest attempt, while records name it."""
    seen: float | None = None
    """Time at which a record or message last named it."""
    avoided: tuple[float, float] | None = None
    """Deadline of an attempt that is not asked for now, and the end of that pause."""
    broken: float | None = None
    """Deadline of the attempt with which a conversation broke off."""
    silent: float | None = None
    """Deadline of the attempt that does not answer."""
    ended: float = -1.0
    """Deadline of the latest attempt that is known to be over."""
    nudges: Nudges = field(default_factory=Nudges)
    fruitless: int = 0
    """Number of times that asking it led to no group."""
    doubted: bool = False
    """True if this peer has left it as a leader before its deadline."""
    banned: str | None = None
    """Reason for which it is neither asked nor admitted in this attempt."""
    refused: str | None = None
    """Reason for which its candidates are not taken."""
    declined: str | None = None
    """Reason for which it declined this peer."""
    has_named: bool = False
    """True if it has said that its attempt is over, and which peers were with it: that counts once."""
    unreached: tuple[Candidate, str] | None = None
    """The attempt that could not be reached, and the reason."""
    reached_again: float | None = None
    """Deadline of the attempt that was to be asked again at once, because there was a connection all the same."""
    held_off: HeldOff | None = None
    """The last backoff from it as a follower."""

    @property
    def deadline(self) -> float | None:
        """Deadline of its latest attempt."""
        return None if self.candidate is None else self.candidate.deadline

    @property
    def is_silent(self) -> bool:
        """True if its latest attempt does not answer."""
        return self.silent is not None and self.silent == self.deadline

    def is_there(self, now: float) -> bool:
        """Return whether a record named its latest attempt recently and no conversation with it has failed."""
        gone = self.deadline in (self.silent, self.broken)
        # One poll and a look-up ago.
        recently = now - POLL_SECONDS - 2 * ROUND_TRIPS_SECONDS
        return not gone and (self.seen is None or self.seen >= recently)

    def take(self, candidate: Candidate) -> None:
        """Take the record of an attempt, unless a later attempt is known."""
        if self.candidate is None or self.candidate.deadline <= candidate.deadline:
            self.candidate = candidate
            if self.avoided is not None and self.avoided[0] != candidate.deadline:
                self.avoided = None  # it applied to another attempt

    def avoid(self, until: float) -> None:
        """Do not ask its latest attempt until then."""
        if self.candidate is not None:
            self.avoided = (self.candidate.deadline, until)

    def not_answering(self) -> None:
        """Note that its latest attempt does not answer."""
        if self.candidate is not None:
            self.silent = self.candidate.deadline

    def not_reached(self, reason: str) -> None:
        """Note that its latest attempt could not be reached."""
        if self.candidate is not None:
            self.unreached = (self.candidate, reason)
        self.not_answering()

    def came_back(self, deadline: float) -> bool:
        """Note a connection with a peer that could not be reached; return whether its attempt is to be asked again.

        It is once for each attempt. Otherwise the peer could make this one ask it without end.
        """
        if self.unreached is None or self.reached_again == deadline:
            return False
        self.reached_again, self.avoided, self.silent = deadline, None, None
        return True

    def hold_off(self, reason: str, now: float) -> float:
        """Back off from a follower that spoiled a proposal; return the seconds for which it is not admitted.

        The backoff ends, because the peer may have been slow once and be the only other peer. It grows each time,
        because the peer may spoil every proposal on purpose.
        """
        times = 0 if self.held_off is None else self.held_off.times
        # A follower that spoils proposals again and again costs the others less and less.
        seconds = backoff(times)
        self.held_off = HeldOff(reason, now + seconds, times + 1)
        return seconds

    def ban(self, reason: str) -> None:
        """Neither ask nor admit it in this attempt."""
        self.banned, self.candidate = reason, None

    def refuse(self, reason: str) -> None:
        """Take no candidate of it, and remember why."""
        self.refused, self.candidate = reason, None


class KnownPeers:
    """The other peers that one attempt knows, by their ids."""

    def __init__(self) -> None:
        self._peers: dict[str, KnownPeer] = {}

    def __getitem__(self, peer_id: str) -> KnownPeer:
        known = self._peers.get(peer_id)
        if known is None:
            known = self._peers[peer_id] = KnownPeer(peer_id)
        return known

    def avoid(self, peer_id: str, until: float) -> None:
        """Do not ask a peer's latest attempt until then, if the peer is known. Strangers may name any id."""
        if peer_id in self._peers:
            self._peers[peer_id].avoid(until)

    def ban(self, peer_id: str, reason: str) -> None:
        """Neither ask nor admit a peer in this attempt."""
        self[peer_id].ban(reason)

    def why_banned(self, peer_id: str) -> str | None:
        """Return the reason for which a peer is banned, or ``None``. Strangers may name any id."""
        known = self._peers.get(peer_id)
        return None if known is None else known.banned

    def __iter__(self) -> Iterator[KnownPeer]:
        return iter(self._peers.values())

    @property
    def candidates(self) -> dict[str, Candidate]:
        """The latest attempt of each peer that is ready."""
        return {known.peer_id: known.candidate for known in self if known.candidate is not None}

    def there(self, like: Candidate, now: float) -> list[Candidate]:
        """Return the other candidates that could be in a group with one, and want its result, as far as is seen."""
        return [
            known.candidate
            for known in self
            if known.candidate is not None
            and not known.candidate.auxiliary
            and known.candidate.peer_id != like.peer_id
            and known.candidate.fits(like)
            and known.is_there(now)
        ]

    @property
    def nudged(self) -> int:
        """Number of peers that were nudged."""
        return sum(known.nudges.sent is not None for known in self)

    @property
    def awaits_auxiliaries(self) -> bool:
        """True while an auxiliary that was nudged may still join."""
        return any(known.nudges.awaited_until is not None for known in self)

    def pass_time(self, now: float) -> None:
        """Forget everything that has expired."""
        for known in self:
            if known.avoided is not None and known.avoided[1] <= now:
                known.avoided = None
            if known.nudges.awaited_until is not None and known.nudges.awaited_until <= now:
                known.nudges.awaited_until = None
            if known.seen is not None and known.seen + 2 * RECORD_TTL_SECONDS <= now:
                known.candidate = None

    def times(self) -> list[float]:
        """Return the times at which :meth:`pass_time` ends a pause or a wait."""
        avoided = [known.avoided[1] for known in self if known.avoided is not None]
        return avoided + [
            known.nudges.awaited_until for known in self if known.nudges.awaited_until is not None
        ]
