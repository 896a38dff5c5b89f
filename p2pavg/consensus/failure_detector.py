"""Failure detector: it gives a member up after too long a silence. No I/O, no clock: the caller passes the time.

A live member sends a ping every :data:`MEMBER_PING_SECONDS` when it has nothing else to send. Over a slow link a ping
waits behind data, but then the data shows that the member is alive. The silence between two arrivals depends on the
link's pace. So the timeout is several times the duration of a part at the pace measured in this round.

A process that ends closes its connections, so a silent member is slow, or its machine or link has failed. The system of
a slow one still acknowledges what is sent to it, while its program holds Python's lock or waits for a processor. So a
member whose system answers may be silent for as long as the limit says. A dead one may not, unless a proxy between the
two answers for it: that costs the limit.

Through a relay, nothing tells the two apart, so the first silence gives a member up. If it is there in a later round,
that was a false alarm, and its timeout grows (:class:`Silences`). What a member says about itself does not count, and
no timeout is longer than a slow link's may be.

Members of one group often share a machine, or begin while each of them has much else to do. Then most of them give
their first sign late, and the last one much later than most. So all timeouts grow with the time that most first signs
took (:func:`lag`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from statistics import median

from p2pavg.base.limits import MAX_BACKOFF_SECONDS

MEMBER_PING_SECONDS = 0.5
FLOOR_SECONDS = 1.5
PARTS = 4.0
"""Silence that gives a member up, in durations of a part."""
STALLS = 3.0
"""Such timeouts during which a live member may send none of the data that it owes."""
FIRST_CONTACT_SECONDS = 4.0
"""Least timeout until the pace is known, i.e. until as many bytes as a part has have arrived.

A new connection takes four round trips, and longer on a busy machine. Over a slow link, a piece of 32 KiB takes
seconds too.
"""

MARGIN = 2.0
"""A member may be silent for so many times its longest silence before."""
MAX_SILENT = 1024  # members that are remembered; each of them has cost seconds, so none is pushed out quickly


def lag(contacts: Sequence[float]) -> float:
    """Return how many times as long as usual this round's members may be silent; at least 1.

    Most members of an idle group give their first sign before they would send a ping, over links of 100 ms too. The
    median, so that a few members cannot put off the loss of another one.

    Args:
        contacts: seconds to the first sign of each member that has given one.
    """
    return max(1.0, median(contacts) / MEMBER_PING_SECONDS) if contacts else 1.0


class Silences:
    """The longest silence of each member that was there again later, from round to round.

    Only what this peer has seen itself counts.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Of each member, the longest silence and the time at which it was noted."""

    def note(self, peer_id: str, now: float, seconds: float) -> None:
        """Note that a member was silent for so long."""
        longest = max(seconds, self._longest(peer_id, now))
        if MARGIN * longest <= FLOOR_SECONDS:
            return  # each member has as much time
        self._seen.pop(peer_id, None)
        self._seen[peer_id] = (longest, now)
        if len(self._seen) > MAX_SILENT:
            self._seen.popitem(last=False)

    def patience(self, peer_id: str, now: float) -> float:
        """Return the seconds for which a member may be silent at least."""
        return MARGIN * self._longest(peer_id, now)

    def _longest(self, peer_id: str, now: float) -> float:
        seconds, noted = self._seen.get(peer_id, (0.0, now))
        return math.ldexp(seconds, -int((now - noted) / MAX_BACKOFF_SECONDS))


class ArrivalPace:
    """The rate at which one member's bytes arrive, and the timeout that follows from it.

    Args:
        now: time of the first wait for the member, in seconds of a monotonic clock.
        part_bytes: size of the largest part.
        limit: the longest timeout, in seconds.
        prior: expected seconds per part, until a part has been measured.
        patience: seconds for which the member may be silent at least, since it was before, and came back.
    """

    def __init__(
        self, now: float, part_bytes: int, limit: float, prior: float = 0.0, patience: float = 0.0
    ) -> None:
        self._part_bytes = part_bytes
        self._limit = limit
        self._prior = prior
        self._patience = patience
        self.longest = 0.0
        """The longest silence that has ended, in seconds; that before the first arrival does not count."""
        self.contact: float | None = None
        """Seconds to the first arrival, without those in which this process was held up; ``None`` before it."""
        self._last = now
        self._owed: float | None = None
        self._forgiven = 0.0
        """Seconds of silence that do not count for owed data. With the limit, pings buy a liar no more than that."""
        self._doubted = False
        self._voted = False
        self._bytes = 0
        self._seconds = 0.0

    def arrived(self, now: float, count: int, *, data: bool) -> None:
        """Note that ``count`` bytes have arrived. ``data`` says that they belong to a part: only those measure pace."""
        silence = now - self._last  # after an excuse the last arrival may lie in the future
        late = 0.0
        if self.contact is None:
            self.contact = max(0.0, silence)
        else:
            self.longest = max(self.longest, silence)
            late = min(max(silence - FLOOR_SECONDS, 0.0), self._limit - self._forgiven)
            if data:
                # Pauses in which nothing was sent would make a fast link look slow: each counts up to a limit.
                self._seconds += max(0.0, min(silence, FLOOR_SECONDS))
                self._bytes += count
        if self._owed is not None and data:
            self._owed = now
        elif self._owed is not None:
            # A slow member that was waited for is back, and its parts come after its ping.
            self._owed += late
            self._forgiven += late
        self._voted |= not data
        self._last = now

    def owes(self, now: float, yes: bool) -> None:
        """Note that from now on the member owes data and does not depend on other members, or that it owes none."""
        self._owed = now if yes else None

    def doubt(self) -> None:
        """Halve the time for owed data, and end the patience: another member has given this one up.

        Its place in this round is most likely lost. A member that went on waiting for it would keep the others from
        their next attempt.
        """
        self._doubted = True
        self._patience = 0.0

    def part_seconds(self) -> float:
        """Return the estimated duration of a part, in seconds."""
        measured = self._seconds * self._part_bytes / self._bytes if self._bytes else 0.0
        return measured if self._bytes >= self._part_bytes else max(measured, self._prior)

    def is_silent(self, now: float, lag: float = 1.0, *, answers: bool = False) -> bool:
        """Return whether nothing has come for too long, not even a vote.

        Args:
            lag: of this round's members (:func:`lag`).
            answers: whether the member's system acknowledges what is sent to it. After a doubt that counts no more.
        """
        # The first vote may come late, because its stream is opened while both sides already send parts.
        known = self._voted and self._bytes >= self._part_bytes
        # A doubted one has most likely lost its place, and is not waited for on other members' account.
        floor = FLOOR_SECONDS if known or self._doubted else FIRST_CONTACT_SECONDS
        pace = max(lag * floor, PARTS * self.part_seconds(), self._patience)
        if answers and not self._doubted:
            pace = self._limit
        return now - self._last >= min(pace, self._limit)

    def overdue(self, now: float, lag: float = 1.0, *, answers: bool = False) -> str | None:
        """Return the reason to give the member up, or ``None``. The arguments are those of :meth:`is_silent`."""
        if self.is_silent(now, lag, answers=answers):
            return f"silent for {now - self._last:.1f} s"
        if self.is_silent(now, lag):
            return None  # it is slow, and that it sends no part says nothing more about it
        stall = STALLS * max(lag * FLOOR_SECONDS, PARTS * self.part_seconds())
        stall = min(stall, self._limit) / (1 + self._doubted)
        if self._owed is not None and now - self._owed >= min(stall + self._patience, self._limit):
            return f"sent no part of its contribution for {now - self._owed:.1f} s"
        return None

    def silence_of_lost(self, now: float) -> float:
        """Return for how long a member that is given up now counts as silent.

        It is not known when it comes back. So it has as much time as a stranger, before its next round's margin.
        """
        return max(now - self._last, FIRST_CONTACT_SECONDS)

    def excuse(self, seconds: float) -> None:
        """Extend the timeouts: this process itself was held up for ``seconds``, and may have read nothing meanwhile."""
        self._last += seconds
        if self._owed is not None:
            self._owed += seconds
