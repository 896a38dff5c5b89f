"""One peer's view of its run: publishes its progress, and surveys that of the other peers."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial

from p2pavg.blocking import Averager
from p2pavg.optim.base.lineage import Lineage
from p2pavg.optim.coordination.attendance import PAUSE_SECONDS, Attendance
from p2pavg.optim.coordination.news import tell_progress
from p2pavg.optim.coordination.progress import (
    MAX_BATCH_SECONDS,
    MAX_SAMPLES,
    Average,
    Behind,
    Decision,
    Progress,
    Survey,
    Wait,
    decide,
    encode_progress,
    read_all,
    survey,
)

TOPIC = "progress"
SPEED_WEIGHT = 0.2  # weight of the newest batch in the moving average of samples per second
BATCHES = 8  # in the median of batch times, which ignores a single batch delayed by an evaluation


class Pace:
    """The speed of one peer and the time that its batches take; calls are given ``now``.

    Args:
        now: seconds of the clock that all calls use.
    """

    def __init__(self, now: float) -> None:
        self.samples_per_second = 0.0
        """A moving average; 0 before the first batch."""
        self._batches: deque[float] = deque(maxlen=BATCHES)
        self._last = now

    @property
    def batch_seconds(self) -> float:
        """Median time of the last batches; 0 before the first one."""
        return statistics.median(self._batches) if self._batches else 0.0

    def computed(self, batch: float, now: float) -> None:
        """Note that a batch of this many samples was computed."""
        if now > self._last:
            self._batches.append(min(now - self._last, MAX_BATCH_SECONDS))
            speed = batch / (now - self._last)
            share = SPEED_WEIGHT if self.samples_per_second else 1.0
            self.samples_per_second = min((1 - share) * self.samples_per_second + share * speed, MAX_SAMPLES)
        self._last = now

    def rested(self, now: float) -> None:
        """Exclude the time up to now from the next batch's time."""
        self._last = now


class RunView:
    """Publishes one peer's progress and decides from that of the others; not thread-safe.

    Args:
        averager: averager of the run.
        lineage: lineage of this peer's parameters at the beginning.
        target: number of samples, of all peers together, that make a round due; infinite if every peer counts its own
            steps.
        peers_to_start: number of peers that this peer's first round needs.
        least: number of peers that an update needs; 1 if this peer may take updates alone.
        pause_seconds: seconds, at least, after which a peer that computes nothing is not waited for.
        overlaps: true if each peer counts its own steps, and goes on with them while a round runs.
    """

    def __init__(
        self,
        averager: Averager,
        lineage: Lineage,
        *,
        target: float,
        peers_to_start: int,
        least: int,
        pause_seconds: float = PAUSE_SECONDS,
        overlaps: bool = False,
    ) -> None:
        self.lineage = lineage
        self.peers_to_start = peers_to_start
        self._remembered: frozenset[str] = frozenset()
        self._follows = False
        self._target = target
        self._least = least
        self._overlaps = overlaps
        self.hurries = False
        """True if the next round is to be without the peers that still compute."""
        self._board = averager.board(TOPIC)
        self._tell = partial(tell_progress, averager)
        now = time.monotonic()
        self._pace = Pace(now)
        self._attendance = Attendance(now, pause_seconds=pause_seconds, overlaps=overlaps)
        self._mine = self._progress(0.0, waiting=False)
        # The others learn of this peer before its first batch, because the first round includes all present peers.
        self._publish(now=True)

    # ------------------------------------------------------------------ publishing

    @property
    def samples_per_second(self) -> float:
        """Moving average of this peer's speed."""
        return self._pace.samples_per_second

    def computed(self, batch: float) -> None:
        """Note that a batch of this many samples was computed."""
        self._pace.computed(batch, time.monotonic())

    def rested(self, now: float) -> None:
        """Exclude the time up to now from the next batch's time."""
        self._pace.rested(now)

    def say(self, samples: float, *, waiting: bool) -> None:
        """Publish this peer's progress.

        Args:
            samples: samples accumulated since the last update.
            waiting: true if there will be no more until the next update.
        """
        before, self._mine = self._mine, self._progress(samples, waiting=waiting)
        if self._overlaps:  # the round goes on for many steps
            self._publish(now=waiting and not before.waiting)
        else:
            self._publish(now=isinstance(self.decide(), Average | Wait))

    def stand_by(self) -> None:
        """Publish that this peer has stopped computing, because it is in a call that waits for the others."""
        if not self._mine.waiting:
            self._mine = replace(self._mine, waiting=True)
            self._publish()

    def follow(self, follows: bool) -> None:
        """Publish whether this peer replays the run's last updates, and will observe the next round."""
        if follows != self._follows:
            self._follows = follows
            self._mine = self._progress(0.0, waiting=follows)
            self._publish(now=True)

    def _publish(self, *, now: bool = False) -> None:
        self._board.publish(encode_progress(self._mine), now=now)
        self._tell(self._mine)

    def leave(self) -> None:
        """Withdraw this peer's progress: no other peer waits for this one until it publishes again."""
        self._board.withdraw()

    def _progress(self, samples: float, *, waiting: bool) -> Progress:
        return Progress(
            epoch=self.lineage.epoch,
            state=self.lineage.state,
            samples=samples,
            samples_per_second=self._pace.samples_per_second,
            waiting=waiting or self._follows,
            batch_seconds=self._pace.batch_seconds,
            started=self._attendance.started,
            follows=self._follows,
        )

    # ------------------------------------------------------------------ the other peers

    @property
    def has_started(self) -> bool:
        """True if this peer has taken an update with others since it began, or since it loaded a state."""
        return self._attendance.started

    @property
    def is_start(self) -> bool:
        """True while no peer of the run has taken an update since it began, or began again."""
        self.survey()  # the next line depends on it
        return self._attendance.is_start(self._mine)

    @property
    def companions(self) -> frozenset[str]:
        """Ids of the peers that took one of the last updates with this one; after a start, the remembered ones."""
        return self._attendance.known or self._remembered

    def remember(self, companions: AbstractSet[str]) -> None:
        """Note the companions of an earlier process of this peer."""
        self._remembered = frozenset(companions)

    def is_behind(self) -> bool:
        """Return whether the run goes on with another state than this peer's."""
        return isinstance(self.decide(), Behind)

    @property
    def version(self) -> int:
        """A number that grows whenever a word of another peer changes."""
        return self._board.version

    def wait(self, version: int, timeout: float) -> None:
        """Block until :attr:`version` is above ``version``, for at most ``timeout`` seconds."""
        self._board.wait(version, timeout)

    def look(self) -> None:
        """Ask for the words of the other peers now, without waiting for the next regular look."""
        self._board.look()

    def survey(self) -> Survey:
        """Return the run as this peer sees it."""
        seen = self._attendance.hear(self._mine, self._words(), time.monotonic())
        return survey(self._mine, seen)

    def _words(self) -> dict[str, Progress]:
        return read_all({peer_id: word.value for peer_id, word in self._board.entries.items()})

    @property
    def is_called(self) -> bool:
        """True if this peer has joined a run in which all others wait for its batch alone."""
        seen = self.survey()  # first, because the next line depends on it
        return self._attendance.joins(self._mine) and seen.others_wait

    def decide(self, seen: Survey | None = None) -> Decision:
        """Decide what this peer does now; ``seen`` is a survey made just before, if there is one."""
        seen = self.survey() if seen is None else seen
        return decide(
            self._mine,
            seen,
            target=self._target,
            peers_to_start=self.peers_to_start,
            least=self._least,
            at_once=self._overlaps,
            hurries=self.hurries,
            settled=self._attendance.is_settled(
                self._mine, seen.peers, self.peers_to_start, time.monotonic()
            ),
        )

    # ------------------------------------------------------------------ updates

    def took(self, companions: AbstractSet[str], after: Lineage) -> None:
        """Note an update that this peer took with others.

        Args:
            companions: ids of the other peers.
            after: lineage after the update.
        """
        now = time.monotonic()
        self._follows = self.hurries = False
        self._pace.rested(now)
        self._attendance.took(companions, self._mine, self._words(), now)
        self.lineage = after

    def came_to_nothing(self) -> None:
        """Note a round to which no other peer came within the match timeout."""
        self._attendance.came_to_nothing(self._mine, self._words(), time.monotonic())

    def is_at(self, lineage: Lineage) -> None:
        """Note that the parameters were replaced by those of another lineage, or by earlier ones of the same."""
        self.lineage = lineage
        self._attendance.begin(time.monotonic())
