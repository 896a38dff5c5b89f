"""Which donor sends which pieces of a blob next: the rules. No I/O, no clock: ``now`` is passed.

* First, one donor is asked for the manifest; if it has not answered within ``STALLED_SECONDS``, another one as well.
* A donor is asked for ranges of consecutive pieces, as many as it sends in :data:`RANGE_SECONDS`, and for two ranges at
  once, so that it has always something to send.
* **End game:** if no piece is free, a donor with nothing to do takes over pieces of another one that stalls, or that
  would finish them later than after twice the time that it needs itself, and half a second later. It begins with the
  piece that would come last.
* A donor that is silent, too slow or gone gives its pieces back. One that sent a wrong piece is never asked again.

Each piece that is missing is free, or at least one donor is asked for it. Nothing is asked of an excluded donor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from p2pavg.base.limits import ASK_AGAIN_SECONDS, REPLY_SECONDS, ROUND_TRIPS_SECONDS, STALL_SECONDS
from p2pavg.state.messages import MAX_RANGE

# The donors of one blob: how fast each one is, and when it may be tried again.
#
# A donor that fails is left alone for a pause, which doubles with each failure. While other donors are there the pause
# is longer, because they can do its work. A donor that sent a wrong piece is excluded for good.

AMONG_OTHERS = 8.0
"""A pause is so many times as long while other donors are there."""
STALLED_SECONDS = 3.0
"""The pieces of a donor that sends no byte for so long are taken over by any donor that has nothing to do. A rate is a
mean over about this time: what was measured so long ago counts 1/e."""
DONOR_PIECE_SECONDS = 120.0
"""A donor that completes no piece for so long has failed, even if bytes come: 70 kbit/s for a piece of 1 MiB."""
TRUSTED_FAILURES = 3
"""After so many failures in a row, a donor counts as usable only when it has sent something that was right."""


class Meter:
    """A rate in bytes per second, as a mean of the last seconds."""

    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0

    @property
    def rate(self) -> float:
        """Bytes per second; 0 if nothing was measured."""
        return self._bytes / self._seconds if self._seconds > 0.0 else 0.0

    def note(self, count: int, seconds: float) -> None:
        """Note bytes that came within some seconds."""
        keep = math.exp(-seconds / STALLED_SECONDS)
        self._bytes = self._bytes * keep + count
        self._seconds = self._seconds * keep + seconds


@dataclass(eq=False, slots=True)
class Range:
    """Consecutive pieces that one donor was asked for."""

    first: int
    count: int
    left: list[int]
    """Pieces that the donor has not sent yet, in the order in which it sends them."""


@dataclass(eq=False, slots=True)
class Donor:
    """One donor, as its joiner sees it."""

    peer_id: str
    active: bool = False
    """True while a session with it is used."""
    ranges: list[Range] = field(default_factory=list)
    asked_manifest: bool = False
    meter: Meter = field(default_factory=Meter)
    failures: int = 0
    """In a row."""
    failed_at: float = -math.inf
    reason: str = ""
    """Of its last failure, or of its exclusion."""
    excluded: bool = False
    received: int = 0
    """Bytes that its session had received when it was observed last."""
    observed_at: float = 0.0
    heard_at: float = 0.0
    """The last byte, or the moment in which something was asked of it."""
    useful_at: float = 0.0
    """The last piece, or the moment in which something was asked of it."""

    @property
    def is_busy(self) -> bool:
        """True if something is asked of it."""
        return bool(self.ranges) or self.asked_manifest

    @property
    def is_usable(self) -> bool:
        """True if it can be expected to send something soon."""
        return self.active and self.failures < TRUSTED_FAILURES

    def begin(self, received: int, now: float) -> None:
        """Begin to use a session of it, which has received so many bytes before."""
        self.active = True
        self.received = received
        self.observed_at = self.heard_at = self.useful_at = now

    def observe(self, received: int, now: float) -> None:
        """Note how many bytes its session has received in all."""
        count = received - self.received
        if self.is_busy:
            self.meter.note(count, max(0.0, now - self.observed_at))
        if count:
            self.heard_at = now
        self.received, self.observed_at = received, now

    def ask(self, now: float) -> None:
        """Note that something is asked of it."""
        if not self.is_busy:
            self.observed_at = self.heard_at = self.useful_at = now

    def was_useful(self, now: float) -> None:
        """Note that it sent something that was right."""
        self.failures = 0
        self.useful_at = self.heard_at = now

    def fail(self, now: float, reason: str) -> None:
        """Note that its session is of no use any more."""
        self.active, self.asked_manifest = False, False
        self.ranges.clear()
        self.failures += 1
        self.failed_at, self.reason = now, reason

    def pause(self, among_others: bool) -> float:
        """Return the seconds for which it is left alone after its last failure."""
        # A download whose donors are all of no use for STALL_SECONDS fails: each one is tried again before.
        doubled = ASK_AGAIN_SECONDS * 2.0 ** min(self.failures - 1, 16)
        return min(STALL_SECONDS, doubled) * (AMONG_OTHERS if among_others else 1.0)

    def is_stalled(self, now: float) -> bool:
        """Return whether its pieces are to be taken over."""
        return self.is_busy and now - self.heard_at > STALLED_SECONDS

    def too_slow(self, now: float) -> str:
        """Return the reason for which it has failed although its session lives; empty if it has not."""
        if not self.is_busy:
            return ""
        if now - self.heard_at >= REPLY_SECONDS:
            return f"it sent nothing for {REPLY_SECONDS:.0f} s"
        if now - self.useful_at >= DONOR_PIECE_SECONDS:
            return f"it completed no piece within {DONOR_PIECE_SECONDS:.0f} s"
        return ""


# The plan.

RANGE_SECONDS = 1.5
MAX_RANGES = 2
"""Ranges that one donor is asked for at once."""
MUCH_SLOWER = 2.0
LEAST_GAIN_SECONDS = 0.5
"""By which the piece must come sooner. For less, it is not worth sending it twice."""
MAX_HOLDERS = 2
"""Donors that are asked for the same piece at once, as long as they do not stall."""


@dataclass(frozen=True, slots=True)
class FetchManifest:
    """Ask the donor for the manifest."""


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Ask the donor for nothing now, but look again at this moment, or when something has changed."""

    until: float = math.inf


Decision = FetchManifest | Range | WaitUntil
"""The next request to a donor: a range is asked for."""


class Pieces:
    """The plan of one blob's download.

    Args:
        patience: seconds for which no donor may be usable before :meth:`hopeless` says so.
        slow: donors that have let this plan, or an earlier one, wait for a manifest. Plans change it.
    """

    def __init__(self, *, patience: float = STALL_SECONDS, slow: set[str] | None = None) -> None:
        self._slow = set() if slow is None else slow
        self.donors: dict[str, Donor] = {}
        self.sizes: Sequence[int] | None = None
        """Bytes of each piece; ``None`` until the manifest is here."""
        self.total_bytes = 0
        self.done_bytes = 0
        self.twice_bytes = 0
        """Bytes of pieces that came more than once."""
        self._patience = patience
        self._usable_at = -math.inf
        self._has_manifest = False
        self._manifest_asked_at = -math.inf
        self._done = bytearray()
        self._missing = 0
        self._free: list[tuple[int, int]] = []  # [first, end), in order, apart from each other

    # ------------------------------------------------------------------ the blob

    def start(self, now: float) -> None:
        """Begin to count the time without a usable donor."""
        self._usable_at = now

    def begin(self, sizes: Sequence[int], have: Iterable[int] = ()) -> None:
        """Note the sizes of the pieces, and those that are here already. All donors have the same ones."""
        self.sizes = sizes
        self.total_bytes = sum(sizes)
        self._done = bytearray(len(sizes))
        for index in have:
            self._done[index] = 1
            self.done_bytes += sizes[index]
        self._missing = self._done.count(0)
        self._free = _intervals(index for index, done in enumerate(self._done) if not done)

    @property
    def complete(self) -> bool:
        """True when every piece has come."""
        return self.sizes is not None and self._missing == 0

    def hopeless(self, now: float) -> str | None:
        """Return the reason for which the blob cannot be had, or ``None``."""
        # The patience counts from the last moment with a usable donor, so a pause of all of them is not the end.
        if any(donor.is_usable for donor in self.donors.values()):
            self._usable_at = now
        if now - self._usable_at < self._patience:
            return None
        reasons = [f"{donor.peer_id}: {donor.reason or 'no answer'}" for donor in self.donors.values()]
        return f"no donor is left: {'; '.join(reasons) or 'none was named'}"

    # ------------------------------------------------------------------ the donors

    def add(self, peer_id: str) -> None:
        """Count on a donor from now on."""
        self.donors.setdefault(peer_id, Donor(peer_id))

    def may_use_at(self, peer_id: str) -> float:
        """Return the moment from which a session with a donor may be opened."""
        donor = self.donors[peer_id]
        if donor.excluded:
            return math.inf
        if not donor.failures:
            return -math.inf
        # As the only donor, one that failed is tried again much sooner.
        others = any(other.is_usable for other in self.donors.values() if other is not donor)
        return donor.failed_at + donor.pause(others)

    def opened(self, peer_id: str, received: int, now: float) -> None:
        """Note that a session with a donor is open, and has received so many bytes before."""
        self.donors[peer_id].begin(received, now)

    def observe(self, peer_id: str, received: int, now: float) -> None:
        """Note how many bytes a donor's session has received in all."""
        self.donors[peer_id].observe(received, now)

    def failed(self, peer_id: str, now: float, reason: str) -> None:
        """Note that a donor's session has ended, or that the donor does not give what was asked."""
        donor = self.donors[peer_id]
        # Copied first: the next line forgets them.
        ranges = [*donor.ranges]
        donor.fail(now, reason)
        # No donor is asked for the manifest now, so the next one need not wait for the hedge.
        if all(not other.asked_manifest for other in self.donors.values()):
            self._manifest_asked_at = -math.inf
        self._set_free(ranges)

    def exclude(self, peer_id: str, now: float, reason: str) -> None:
        """Never ask a donor again."""
        self.failed(peer_id, now, reason)
        self.donors[peer_id].excluded = True

    def too_slow(self, now: float) -> list[tuple[str, str]]:
        """Return the donors whose sessions are to be given up, each with the reason. Call it a few times a second."""
        found = [(donor.peer_id, donor.too_slow(now)) for donor in self.donors.values()]
        return [(peer_id, reason) for peer_id, reason in found if reason]

    def _set_free(self, ranges: Iterable[Range]) -> None:
        """Free the pieces of ranges that are off, unless another donor is asked for them too."""
        lost = {index for range_ in ranges for index in range_.left if not self._done[index]}
        if lost:
            lost -= {
                index for donor in self.donors.values() for range_ in donor.ranges for index in range_.left
            }
            self._free = _merged(sorted([*self._free, *_intervals(sorted(lost))]))

    # ------------------------------------------------------------------ decisions

    def next(self, peer_id: str, now: float) -> Decision:
        """Return what to ask an active donor for next. What is returned counts as asked."""
        donor = self.donors[peer_id]
        if not donor.active:
            return WaitUntil()
        if self.sizes is None:
            return self._manifest(donor, now)
        # One range is on its way while the next one is already asked for, so the donor's link never idles.
        if len(donor.ranges) >= MAX_RANGES:
            return WaitUntil()
        # The next pieces that no donor is asked for.
        if self._free:
            return self._ask(donor, self._take(donor), now)
        # A donor with something to do takes nothing over: the piece would come behind its own ones.
        if donor.ranges:
            return WaitUntil()
        return self._take_over(donor, now)

    def _manifest(self, donor: Donor, now: float) -> Decision:
        # With the manifest, the pieces of an earlier download are verified before any is asked for.
        if self._has_manifest or donor.asked_manifest:
            return WaitUntil()
        # A manifest can be large, and one is enough.
        if now < (until := self._manifest_asked_at + STALLED_SECONDS):
            return WaitUntil(until)
        # An update of the log is a download of its own: a donor that never answers would hold up each of them. While
        # another one is there, which is asked at once, that donor waits in its place.
        others = any(other.active and other.peer_id not in self._slow for other in self.donors.values())
        if others and donor.peer_id in self._slow:
            return WaitUntil(now + STALLED_SECONDS)
        self._slow.update(other.peer_id for other in self.donors.values() if other.asked_manifest)
        donor.ask(now)
        donor.asked_manifest = True
        self._manifest_asked_at = now
        return FetchManifest()

    def _ask(self, donor: Donor, range_: Range, now: float) -> Range:
        donor.ask(now)
        donor.ranges.append(range_)
        return range_

    def _most(self, donor: Donor, size: int) -> int:
        """Return how many pieces of this size one range of a donor has."""
        return max(1, min(MAX_RANGE, int(RANGE_SECONDS * donor.meter.rate / max(size, 1))))

    def _take(self, donor: Donor) -> Range:
        assert self.sizes is not None
        first, end = self._free[0]
        active = sum(other.active for other in self.donors.values())
        # Towards the end a fast donor leaves some pieces to the others, so that
        # all of them end at about the same time.
        fair = -(-sum(end - first for first, end in self._free) // active)  # of the last pieces
        count = min(self._most(donor, self.sizes[first]), end - first, fair)
        self._free[:1] = [(first + count, end)] if first + count < end else []
        return Range(first, count, [*range(first, first + count)])

    def _take_over(self, donor: Donor, now: float) -> Decision:
        """Let a donor that has nothing to do help another one that needs much longer."""
        due = self._due(donor, now)
        if not due:
            return WaitUntil()
        assert self.sizes is not None
        # From the end backwards: the slow donor comes to these pieces last.
        last = max(due, key=lambda index: (due[index], index))
        rate = donor.meter.rate
        one = self.sizes[last] / rate if rate else ROUND_TRIPS_SECONDS
        chosen: list[int] = []
        # Each piece that is taken delays the next one, so the gain is counted anew for each.
        while (
            (own := one * (len(chosen) + 1))
            and (index := last - len(chosen)) in due
            and len(chosen) < self._most(donor, self.sizes[last])
            and due[index] > max(MUCH_SLOWER * own, own + LEAST_GAIN_SECONDS)
        ):
            chosen.append(index)
        if not chosen:
            # Looked at again soon: a donor may stall at any time.
            return WaitUntil(now + LEAST_GAIN_SECONDS)
        return self._ask(donor, Range(chosen[-1], len(chosen), chosen[::-1]), now)

    def _due(self, donor: Donor, now: float) -> dict[int, float]:
        """Return the pieces that a donor may take over, each with the seconds until it is expected."""
        assert self.sizes is not None
        due: dict[int, float] = {}
        holders: dict[int, int] = {}
        for other in self.donors.values():
            if other is donor:
                continue
            # The rate of a donor that has stalled is that of its better days.
            rate = 0.0 if other.is_stalled(now) else other.meter.rate
            # As long as its rate is not known, a donor is given the time that a new one is expected to need.
            guessed = math.inf if other.is_stalled(now) else ROUND_TRIPS_SECONDS
            total = 0
            for index in (index for range_ in other.ranges for index in range_.left):
                total += self.sizes[index]
                expected = total / rate if rate else guessed
                due[index] = min(due.get(index, math.inf), expected)
                # A stalled donor does not count among those that hold a piece: otherwise two of these could keep it.
                holders[index] = holders.get(index, 0) + (expected != math.inf)
        return {
            index: seconds
            for index, seconds in due.items()
            if not self._done[index] and holders[index] < MAX_HOLDERS
        }

    # ------------------------------------------------------------------ arrivals

    def manifest_came(self, peer_id: str, now: float) -> None:
        """Note that a donor sent the manifest, and that it is the blob's. :meth:`begin` follows."""
        self._has_manifest = True
        self._slow.discard(peer_id)
        self.donors[peer_id].was_useful(now)
        for donor in self.donors.values():
            donor.asked_manifest = False

    def came(self, peer_id: str, range_: Range, index: int, now: float) -> tuple[Range, ...]:
        """Note a piece that came from a donor and is right.

        Return the ranges, of any donor, of which every piece that is still to come is here already: they can be
        cancelled.
        """
        assert self.sizes is not None
        donor, size = self.donors[peer_id], self.sizes[index]
        range_.left.remove(index)
        donor.was_useful(now)
        # A piece that was taken over may come from both donors.
        if not self._done[index]:
            self._done[index] = 1
            self._missing -= 1
            self.done_bytes += size
            self._forget_free(index)
        else:
            self.twice_bytes += size
        return tuple(
            other
            for donor in self.donors.values()
            for other in donor.ranges
            if other.left and all(self._done[piece] for piece in other.left)
        )

    def ended(self, peer_id: str, range_: Range, now: float) -> None:
        """Note that the answer to a range has ended. Pieces that did not come are free again."""
        donor = self.donors[peer_id]
        if range_ in donor.ranges:
            donor.ranges.remove(range_)
            # The time for its next piece begins now.
            donor.useful_at = now
        self._set_free([range_])

    def _forget_free(self, index: int) -> None:
        """Take a piece out of those that are free: its donor failed just before the piece was noted."""
        for position, (first, end) in enumerate(self._free):
            if first <= index < end:
                parts = [(first, index), (index + 1, end)]
                self._free[position : position + 1] = [part for part in parts if part[0] < part[1]]
                return


def _intervals(indices: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as intervals."""
    return _merged((index, index + 1) for index in indices)


def _merged(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join intervals that touch. They are in ascending order."""
    found: list[tuple[int, int]] = []
    for first, end in intervals:
        if found and found[-1][1] >= first:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return found
