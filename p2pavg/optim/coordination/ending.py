"""The end of a run: last words, the peers for which one that has finished stays, and whether a run has ended.

No I/O, no clock: calls are given ``now``.

Peers do not agree on an end. Each one that takes no further update says so, in a signed *last word*: "I stopped after
update 20, and these are my parameters" (the state of the lineage). It then stays until each member of its last groups
has that update too, or is gone, and hands over the averages that they lack.

For a peer that comes later, the run has ended if more than half of its own last group have said the same last word, of
a later update than its own, no peer is there from which it could go on, and more peers have said so than are there and
at its update. So one liar ends nothing in a group of three or more, a few end nothing while more peers train, and a
peer that merely leaves ends nothing for others: they are at its update, or later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from p2pavg.base.limits import LOOK_SECONDS, MAX_BACKOFF_SECONDS, QUICK_REPLY_SECONDS, WARN_WAIT_SECONDS
from p2pavg.base.messages import Hash, Message
from p2pavg.optim.coordination.progress import MAX_EPOCH, PeerProgress

# Waiting for other peers: its duration, and warnings to the user.

MAX_NAMED = 5  # peers; they fit on a line of a terminal
SHORT_ID = 6  # last characters of an id; the first ones are the same for all peers


def named(peers: Sequence[str]) -> str:
    """Name a few peers by the ends of their ids."""
    names = [f"…{peer[-SHORT_ID:]}" for peer in peers[:MAX_NAMED]]
    more = len(peers) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


class GrowingPauses:
    """Schedule of repeated warnings: the first at once, the next ones after doubling pauses."""

    def __init__(self) -> None:
        self._pause = 0.0
        self._quiet_until = 0.0

    def is_due(self, now: float) -> bool:
        """Return whether to warn now; if so, the next pause begins."""
        if self._pause and now < self._quiet_until:
            return False
        self._pause = min(2 * self._pause, MAX_BACKOFF_SECONDS) if self._pause else WARN_WAIT_SECONDS
        self._quiet_until = now + self._pause
        return True

    def reset(self) -> None:
        """Note that the cause has ended: the next warning is due at once."""
        self._pause = 0.0


class Waiting:
    """Waiting times of one optimizer's calls."""

    def __init__(self) -> None:
        self._warnings = GrowingPauses()
        self.begin()

    def begin(self) -> None:
        """Note that a call begins."""
        self.seconds = 0.0
        self.reason: str | None = None
        self.peers: tuple[str, ...] = ()
        self._since: float | None = None
        self._told_at = -LOOK_SECONDS

    def is_to_be_told(self, now: float) -> bool:
        """Return whether subscribers are to hear of the wait again; if so, the next time is later."""
        if now < self._told_at + LOOK_SECONDS:
            return False
        self._told_at = now
        return True

    def waits(self, reason: str, peers: Sequence[str], now: float) -> str | None:
        """Note that the call waits; return a warning if one is due.

        Args:
            reason: the reason, in words.
            peers: ids of the peers that it waits for, as far as they are known.
            now: seconds of any clock.
        """
        if self._since is None:
            self._since = now - self.seconds  # continues an earlier wait of this call
        self.seconds, self.reason = now - self._since, reason
        self.peers = tuple(peers) or self.peers
        if self.seconds < WARN_WAIT_SECONDS or not self._warnings.is_due(now):
            return None
        missing = f" (for {named(peers)})" if peers else ""
        return f"has waited {self.seconds:.0f} s for other peers{missing}: {reason}"

    def ends(self, now: float) -> None:
        """Note that the call has stopped waiting."""
        if self._since is not None:
            self.seconds, self._since = now - self._since, None

    def updated(self) -> None:
        """Note an update; after one without a long wait, the next long wait is warned of at once."""
        if self.seconds < WARN_WAIT_SECONDS:
            self._warnings.reset()


class LastWord(Message, frozen=True, tag=2):
    """The last update of a peer that takes no further one."""

    epoch: Annotated[int, Meta(ge=1, le=MAX_EPOCH)]
    state: Hash
    """State of the lineage after it."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of a run, as a peer learns it that has missed the last updates."""

    epoch: int
    reason: str


def run_end(
    mine: PeerProgress,
    group: Collection[str],
    words: Mapping[str, PeerProgress],
    last_words: Mapping[str, LastWord],
    *,
    follows: bool,
) -> RunEnd | None:
    """Return the end of the run, if it has ended without this peer; ``None`` if not, or if nothing tells.

    Args:
        group: the other members of this peer's last group.
        words: the live words of all other peers.
        last_words: the last words of peers, which outlive them.
        follows: true if this peer can fetch the averages that it lacks from a peer that is there.
    """
    stopped = Counter(
        last for member in group if (last := _stopped(words.get(member), last_words.get(member))) is not None
    )
    later = {last: count for last, count in stopped.items() if last[0] > mine.epoch}
    if not later:
        return None
    (epoch, state), count = max(later.items(), key=lambda found: (found[1], found[0]))
    if 2 * count <= len(group):
        return None
    # In a large run, a group of two or three may be of liars. Those that go on outnumber them.
    stopped_anywhere = sum(
        _stopped(words.get(peer), last_words.get(peer)) == (epoch, state) for peer in {*words, *last_words}
    )
    if stopped_anywhere <= sum(word.epoch >= mine.epoch and not word.left for word in words.values()):
        return None
    for word in words.values():
        # It trains on, or stays to hand over what this peer lacks.
        if word.epoch > mine.epoch and (follows or not word.left):
            return None
    return RunEnd(
        epoch,
        f"the run has ended at update {epoch}: {count} of the {len(group)} other members of this peer's last group have"
        f" said so and left, and this peer is at update {mine.epoch}",
    )


def _stopped(word: PeerProgress | None, last: LastWord | None) -> tuple[int, bytes] | None:
    """Return the epoch and the state at which a peer has stopped; ``None`` if it has not, as far as it says.

    A live word counts more: a peer may take part again after its last word.
    """
    if word is not None:
        return (word.epoch, word.state) if word.left else None
    return None if last is None else (last.epoch, last.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """A member of this peer's last groups, as this peer sees it after its own last update."""

    peer_id: str
    word: PeerProgress | None
    """Its live word, if there is one."""
    connected: bool
    """True if there is a connection to it. A process that is stopped has no live word, and keeps its connections."""
    has_ended: bool
    """True if it has said a last word."""

    def lacks(self, epoch: int) -> bool:
        """Return whether it lacks an update, as far as is known, and may still come for it."""
        if self.word is not None:
            return self.word.epoch < epoch and not self.word.left
        return self.connected and not self.has_ended


@dataclass(frozen=True, slots=True)
class Stays:
    """A peer that has finished stays."""

    peers: tuple[str, ...]
    """Those that it waits for."""
    seconds: float
    """It stays for so long at most, if nothing changes."""
    reason: str


@dataclass(frozen=True, slots=True)
class Goes:
    """A peer that has finished goes."""

    reason: str


class Handover:
    """Decides for how long a peer stays after its last update.

    Args:
        now: the time of that update, in seconds of any clock.
        quiet: seconds for which it stays without any sign of progress of those that it waits for.
        most: seconds for which it stays at most.
    """

    def __init__(self, now: float, *, quiet: float, most: float) -> None:
        self._began, self._quiet, self._most = now, quiet, most
        self._signs: object = None
        self._sign_at = now

    def decide(
        self,
        epoch: int,
        members: Iterable[GroupMember],
        served_at: float,
        now: float,
        *,
        is_followed: bool = False,
    ) -> Stays | Goes:
        """Return whether to stay now.

        Args:
            epoch: this peer's last update.
            members: the members of its last groups.
            served_at: the time at which another peer last read a part of this peer's snapshot.
            now: the current time.
            is_followed: true if a peer that is in no round, such as an archivist, is about to read the last average.
        """
        lacking = sorted((m for m in members if m.lacks(epoch)), key=lambda member: member.peer_id)
        serves = served_at >= self._began and now < served_at + self._quiet
        if not lacking and not serves:
            if is_followed and now < self._began + QUICK_REPLY_SECONDS:
                return Stays((), self._began + QUICK_REPLY_SECONDS - now, "a peer follows the run")
            return Goes(f"each member of the last groups has update {epoch}, or is gone")
        signs = [(member.peer_id, member.word) for member in lacking]
        if signs != self._signs:
            self._signs, self._sign_at = signs, now
        until = min(max(self._sign_at, served_at) + self._quiet, self._began + self._most)
        if now >= until:
            return Goes(f"nothing has come any more from those that lack update {epoch}: {_where(lacking)}")
        return Stays(tuple(member.peer_id for member in lacking), until - now, _where(lacking))


def _where(lacking: Iterable[GroupMember]) -> str:
    """Return where the peers are that lack the last update."""
    told = []
    for member in lacking:
        at = (
            "does not answer"
            if member.word is None
            else f"is at update {member.word.epoch} and fetches the rest"
            if member.word.follows
            else f"is at update {member.word.epoch}"
        )
        told.append(f"{named([member.peer_id])} {at}")
    more = f" and {len(told) - MAX_NAMED} more" if len(told) > MAX_NAMED else ""
    return ", ".join(told[:MAX_NAMED]) + more if told else "another peer is fetching the state"
