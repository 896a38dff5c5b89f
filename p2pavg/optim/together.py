"""One optimizer's place in its run: says how far it is, sees how far the others are, averages when it is time."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from p2pavg.blocking import Averager
from p2pavg.group.limits import MAX_GROUP_SIZE
from p2pavg.optim.attendance import PAUSE_SECONDS, Attendance
from p2pavg.optim.lineage import Lineage, first_lineage
from p2pavg.optim.progress import (
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
from p2pavg.optim.state import checked_amount, checked_count
from p2pavg.optim.waiting import GrowingPauses, Waiting
from p2pavg.result import EXCHANGES, Failed, InProgress, NoPeers, RoundResult, Success

logger = logging.getLogger(__name__)

TOPIC = "progress"
SPEED_WEIGHT = 0.2  # of the newest batch in the mean of samples per second
BATCHES = 8  # of which the median is what a batch takes: one that came after an evaluation does not count
LOOK_SECONDS = 1.0  # a waiting peer looks again at least as often, also while its group is being formed


class Together:
    """Used by the optimizers; in one thread.

    Args:
        averager: what averages; nothing else may step it.
        parameters: as this peer has them at the beginning.
        target: samples of all peers together that make a round due; infinite where every peer counts its own steps.
        peers_to_start: peers without which this peer's first round does not begin; ``config.min_group_size`` if
            ``None``.
        sync_timeout: seconds that this peer waits for the others before it begins a round without them, and for a round
            before it goes on alone.
        alone: a round of this peer alone is due like any other; else none is before ``config.min_group_size`` peers
            are there for it.
        recipe: digest of how this peer trains.

    Raises:
        ValueError: one of the last two is out of range.
    """

    def __init__(
        self,
        averager: Averager,
        parameters: Sequence[torch.Tensor],
        *,
        target: float,
        peers_to_start: int | None,
        sync_timeout: float,
        alone: bool = False,
        recipe: bytes = b"",
    ) -> None:
        self.averager = averager
        self.on_look: Callable[[], None] = lambda: None
        """Called at least once a second while this peer waits."""
        self.lineage = first_lineage(parameters, recipe)
        self._target = target
        self._peers_to_start = (
            averager.config.min_group_size
            if peers_to_start is None
            else checked_count("peers_to_start", peers_to_start)
        )
        self._patience = checked_amount("sync_timeout", sync_timeout)
        self._least = 1 if alone else averager.config.min_group_size
        self._not_ours = averager.round_state is not None  # a round that an optimizer before this one began
        self._board = averager.board(TOPIC)
        self.why: Callable[[], str] = lambda: ""
        """More reasons why this peer waits, in words, or an empty text; an optimizer may set another one."""
        self._behind, self._split = GrowingPauses(), GrowingPauses()
        self._speed = 0.0
        self._batches: deque[float] = deque(maxlen=BATCHES)
        self._last = time.monotonic()
        # A peer that goes on alone has no way back, so it is not made to by a pause of the others.
        self._attendance = Attendance(self._last, pause_seconds=sync_timeout if alone else PAUSE_SECONDS)
        self.waiting = Waiting()
        self._regroups = False
        self._stopped = False
        self._mine = self._progress(0.0, waiting=False)
        # The others are to know of this peer before its first batch: the first round is with all that are there.
        self._board.publish(encode_progress(self._mine), now=True)

    # ------------------------------------------------------------------ what is said

    def computed(self, batch: float) -> None:
        """A batch was computed, of so many samples."""
        now = time.monotonic()
        self.waiting.begin()
        if now > self._last:
            self._batches.append(min(now - self._last, MAX_BATCH_SECONDS))
            speed = batch / (now - self._last)
            share = SPEED_WEIGHT if self._speed else 1.0
            self._speed = min((1 - share) * self._speed + share * speed, MAX_SAMPLES)
        self._last = now

    def say(self, samples: float, *, waiting: bool) -> None:
        """How far this peer is now: ``samples`` since the last update; ``waiting``: no more will be until the next."""
        self._mine = self._progress(samples, waiting=waiting)
        urgent = isinstance(self.decide(), Average | Wait)
        self._board.publish(encode_progress(self._mine), now=urgent)

    def leave(self) -> None:
        """Take back what was said: nobody waits for this peer until it says something again."""
        self._board.withdraw()

    def _progress(self, samples: float, *, waiting: bool) -> Progress:
        return Progress(
            epoch=self.lineage.epoch,
            state=self.lineage.state,
            samples=samples,
            samples_per_second=self._speed,
            waiting=waiting,
            batch_seconds=statistics.median(self._batches) if self._batches else 0.0,
            started=self._attendance.started,
        )

    def _stand_by(self) -> None:
        """Say that this peer computes no more for now: it is in a call that waits for the others."""
        if not self._mine.waiting:
            self._mine = replace(self._mine, waiting=True)
            self._board.publish(encode_progress(self._mine))

    # ------------------------------------------------------------------ what is seen

    @property
    def samples_per_second(self) -> float:
        """Of this peer, a moving average."""
        return self._speed

    def survey(self) -> Survey:
        """The run as this peer sees it."""
        seen = self._attendance.hear(self._mine, self._words(), time.monotonic())
        return survey(self._mine, seen)

    def _words(self) -> dict[str, Progress]:
        return read_all({peer_id: word.value for peer_id, word in self._board.entries.items()})

    @property
    def is_called(self) -> bool:
        """Return whether this peer has come into a run whose other peers wait for nothing but its batch."""
        seen = self.survey()  # first: it is what the next line asks about
        return self._attendance.joins(self._mine) and seen.others_wait

    def decide(self) -> Decision:
        """What is to be done now."""
        return self._decide(self.survey())

    def _decide(self, seen: Survey) -> Decision:
        return decide(
            self._mine,
            seen,
            target=self._target,
            peers_to_start=self._peers_to_start,
            least=self._least,
            settled=self._attendance.is_settled(
                self._mine, seen.peers, self._peers_to_start, time.monotonic()
            ),
        )

    def decide_when_all_are_ready(self) -> Decision:
        """As :meth:`decide`, but for as long as there is nothing to do but wait, wait: for ``sync_timeout`` at most."""
        until = time.monotonic() + self._patience
        try:
            while True:
                version = self._board.version
                self.on_look()
                seen = self.survey()
                decision, left = self._decide(seen), until - time.monotonic()
                if not isinstance(decision, Wait):
                    return decision
                if left <= 0 and seen.peers < self._peers_to_start:
                    return decision
                if left <= 0:
                    return Average(seen.peers, f"waited {self._patience:g} s: {decision.reason}")
                self._stand_by()
                self._waits(decision.reason, seen.computing)
                self._board.wait(version, min(left, LOOK_SECONDS))
        finally:
            self._waits_no_more()

    def _waits(self, reason: str, peers: Sequence[str]) -> None:
        """Of peers that never meet, the user has to know why."""
        reason = "; ".join(part for part in (reason, self.why()) if part)
        warning = self.waiting.waits(reason, peers, time.monotonic())
        if warning is not None:
            logger.warning("this peer %s", warning)

    def _waits_no_more(self) -> None:
        self._last = time.monotonic()  # waiting is no part of the next batch's time
        self.waiting.ends(self._last)

    # ------------------------------------------------------------------ rounds

    def begin_round(self, peers: int) -> None:
        """In the background: what is accumulated from now on belongs to the next one."""
        logger.debug("epoch %d: averaging with %d peers", self.lineage.epoch, peers)
        self._step(0.0, peers, self.averager, self.lineage.state)

    def look(self) -> RoundResult:
        """The result of the round that was begun, if there is one yet."""
        return self._step(0.0, 2, self.averager, self.lineage.state)

    def average(
        self, peers: int, averager: Averager | None = None, state: bytes | None = None
    ) -> RoundResult:
        """A round with so many peers, or what came of the one that was begun: within ``sync_timeout``, or InProgress.

        Args:
            averager: another one than the optimizer's, which averages some of the tensors.
            state: of the tensors, where it is not the lineage's.
        """
        is_mine = averager is None
        try:
            while True:
                result = self._round(
                    peers, averager or self.averager, self.lineage.state if state is None else state, is_mine
                )
                if not self._regroups:
                    return result
                self._regroups = False
                decision = self.decide_when_all_are_ready()
                if not isinstance(decision, Average):
                    return result
                peers = decision.peers
        finally:
            self._waits_no_more()

    def _round(self, peers: int, averager: Averager, state: bytes, is_mine: bool) -> RoundResult:
        until = time.monotonic() + self._patience
        if is_mine:
            self._stand_by()
        while True:
            wait = min(max(until - time.monotonic(), 0.0), LOOK_SECONDS)
            result = self._step(wait, peers, averager, state)
            if not isinstance(result, InProgress) or time.monotonic() >= until:
                return result
            self.on_look()
            behind = self.left_behind()
            # No peer is coming any more to a group of parameters that the run has left behind.
            if behind is not None:
                self._stopped = averager.cancel_matchmaking(behind.reason)
                if not self._stopped:
                    return result
            elif result.reason != EXCHANGES:
                self._look_again(peers, averager, result.reason, is_mine)

    def _look_again(self, peers: int, averager: Averager, reason: str, is_mine: bool) -> None:
        """While a group is being formed: end that when it is to be another one than this peer has begun with."""
        seen = self.survey()
        self._waits(f"the round is to be among {peers} peers: {reason}", seen.computing)
        # Who comes to the start late, but in time, would be left out of a group of those that were there before.
        came = seen.peers > peers and not self._attendance.started
        went = self._target_of(seen.peers) < self._target_of(peers)
        if is_mine and (came or went):
            self._regroups = self._stopped = averager.cancel_matchmaking(
                "more peers have come to start" if came else "a peer is not waited for any longer"
            )

    def _step(self, wait: float, peers: int, averager: Averager, state: bytes) -> RoundResult:
        result = averager.step(wait=wait, state=state, group_size=self._target_of(peers))
        if isinstance(result, NoPeers) and not self._stopped:
            self._attendance.came_to_nothing(self._mine, self._words(), time.monotonic())
        if not isinstance(result, InProgress):
            self._stopped = False
        if not self._not_ours or averager is not self.averager or isinstance(result, InProgress):
            return result
        self._not_ours = False
        if isinstance(result, Success):
            return Failed(
                reason="the round was of parameters that were replaced meanwhile", contribution_used=True
            )
        return result

    def _target_of(self, peers: int) -> int:
        return min(max(peers, self.averager.config.min_group_size), MAX_GROUP_SIZE)

    def left_behind(self) -> Behind | None:
        """Whether the others have gone on without this peer while it waited."""
        seen = self.survey()
        decision = self._decide(seen)
        if not isinstance(decision, Behind):
            self._warn_of_a_split(seen)
            return None
        if self._behind.is_due(time.monotonic()):
            logger.warning(
                "this peer is left behind, and takes no part until it loads a newer state: %s",
                decision.reason,
            )
        return decision

    def _warn_of_a_split(self, seen: Survey) -> None:
        """Two parts of a run that have lost each other may each have enough peers to go on."""
        if seen.unmet_ahead is None or not self._attendance.started:
            return
        if self._split.is_due(time.monotonic()):
            epoch, peers = seen.unmet_ahead
            logger.warning(
                "%d peers that took none of the last updates with this one say that they are at epoch %d, with other"
                " parameters; this peer goes on with those that did. If they are yours, the run has split: let one"
                " part load the other's state",
                peers,
                epoch,
            )

    def took(self, success: Success, result: bytes = b"", numbers: bytes = b"") -> None:
        """The average was taken as an update; the last two as for :meth:`Lineage.after`."""
        companions = {*success.peers, *success.observers} - success.lost.keys() - {self.averager.peer_id}
        self._take(companions, self.lineage.after(success.group_id, result, numbers))
        self._peers_to_start = 1

    def _take(self, companions: set[str], after: Lineage) -> None:
        self._last = time.monotonic()
        self._attendance.took(companions, self._mine, self._words(), self._last)
        self.lineage = after
        self.waiting.updated()

    def took_alone(self) -> None:
        """An update of this peer alone was taken, since nobody else is there."""
        self._take(set(), self.lineage.after(self.averager.peer_id))

    def is_at(self, lineage: Lineage) -> None:
        """The parameters were replaced by those of another lineage, or by earlier ones of the same."""
        self.lineage = lineage
        self._attendance.begin(time.monotonic())
        self._behind.reset()
        self._not_ours = self.averager.round_state is not None
        self.say(0.0, waiting=False)
