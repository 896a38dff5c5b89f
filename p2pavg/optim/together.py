"""One optimizer's place in its run: says how far it is, sees how far the others are, averages when it is time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from p2pavg.blocking import Averager
from p2pavg.bulletin import Said
from p2pavg.config import MAX_GROUP_SIZE
from p2pavg.optim.lineage import Lineage, first_lineage
from p2pavg.optim.progress import (
    MAX_SAMPLES,
    Average,
    Behind,
    Decision,
    Progress,
    Survey,
    Wait,
    decide,
    encode_progress,
    following,
    read_all,
    survey,
)
from p2pavg.optim.state import checked_amount, checked_count
from p2pavg.result import Failed, InProgress, RoundResult, Success

logger = logging.getLogger(__name__)

TOPIC = "progress"
SPEED_WEIGHT = 0.2  # of the newest batch in the mean of samples per second
FOLLOW_SECONDS = 10.0  # that a peer of the last round may take to say so
LOOK_SECONDS = 1.0  # a waiting peer looks again at least as often, also while its group is being formed


@dataclass(frozen=True, slots=True)
class _Missed:
    """A peer that did not come to a round in which it was due."""

    times: int
    sequence: int
    """Of its word at that time."""
    until_epoch: int


class Together:
    """Used by the optimizers; in one thread.

    Args:
        averager: what averages; nothing else may step it.
        parameters: as this peer has them at the beginning.
        target: samples of all peers together that make a round due; infinite where every peer counts its own steps.
        peers_to_start: peers without which this peer's first round does not begin; ``config.min_group_size`` if
            ``None``.
        patience: seconds that this peer waits for the others before it begins a round without them, and for a round
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
        patience: float,
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
        self._patience = checked_amount("patience", patience)
        self._least = 1 if alone else averager.config.min_group_size
        self._not_ours = averager.round_state is not None  # a round that an optimizer before this one began
        self._bulletin = averager.bulletin(TOPIC)
        self._companions: frozenset[str] = frozenset()  # who took the last update too
        self._before = b""  # the state before it
        self._missed: dict[str, _Missed] = {}
        self._warned_at = -1
        self._waited_for = ""
        self._speed = 0.0
        self._last = time.monotonic()
        self._took_at = -math.inf
        self._mine = self._progress(0.0, waiting=False)

    # ------------------------------------------------------------------ what is said

    def computed(self, batch: float) -> None:
        """A batch was computed, of so many samples."""
        now = time.monotonic()
        if now > self._last:
            speed = batch / (now - self._last)
            share = SPEED_WEIGHT if self._speed else 1.0
            self._speed = min((1 - share) * self._speed + share * speed, MAX_SAMPLES)
        self._last = now

    def say(self, samples: float, *, waiting: bool) -> None:
        """How far this peer is now: ``samples`` since the last update; ``waiting``: no more will be until the next."""
        self._mine = self._progress(samples, waiting=waiting)
        urgent = isinstance(self.decide(), Average | Wait)
        self._bulletin.say(encode_progress(self._mine), now=urgent)

    def leave(self) -> None:
        """Take back what was said: nobody waits for this peer until it says something again."""
        self._bulletin.take_back()

    def _progress(self, samples: float, *, waiting: bool) -> Progress:
        return Progress(
            epoch=self.lineage.epoch,
            state=self.lineage.state,
            samples=samples,
            samples_per_second=self._speed,
            waiting=waiting,
        )

    # ------------------------------------------------------------------ what is seen

    @property
    def samples_per_second(self) -> float:
        """Of this peer, a moving average."""
        return self._speed

    def survey(self) -> Survey:
        """The run as this peer sees it."""
        said = self._bulletin.said
        progress = read_all({p: word.value for p, word in said.items() if not self._is_absent(p, word)})
        if time.monotonic() < self._took_at + FOLLOW_SECONDS:
            for peer_id in progress.keys() & self._companions:
                progress[peer_id] = following(progress[peer_id], self._before, self._mine)
        return survey(self._mine, progress.values())

    def _is_absent(self, peer_id: str, word: Said) -> bool:
        """Whether it says that it is there, and did not come to a round."""
        missed = self._missed.get(peer_id)
        return missed is not None and (
            word.sequence <= missed.sequence or self.lineage.epoch < missed.until_epoch
        )

    def decide(self) -> Decision:
        """What is to be done now."""
        return decide(
            self._mine,
            self.survey(),
            target=self._target,
            peers_to_start=self._peers_to_start,
            least=self._least,
        )

    def decide_when_all_are_ready(self) -> Decision:
        """As :meth:`decide`, but for as long as there is nothing to do but wait, wait: for ``patience`` at most."""
        until = time.monotonic() + self._patience
        while True:
            version = self._bulletin.version
            self.on_look()
            decision = self.decide()
            self._say_what_is_waited_for(decision)
            left = until - time.monotonic()
            if not isinstance(decision, Wait):
                return decision
            if left <= 0 and self.survey().peers < self._peers_to_start:
                return decision
            if left <= 0:
                return Average(self.survey().peers, f"waited {self._patience:g} s: {decision.reason}")
            self._bulletin.wait(version, min(left, LOOK_SECONDS))

    def _say_what_is_waited_for(self, decision: Decision) -> None:
        """Of peers that never meet, somebody should know why."""
        if isinstance(decision, Wait) and self._peers_to_start > 1 and decision.reason != self._waited_for:
            self._waited_for = decision.reason
            logger.info("waiting: %s", decision.reason)

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
        """A round with so many peers, or what came of the one that was begun: within ``patience``, or InProgress.

        Args:
            averager: another one than the optimizer's, which averages some of the tensors.
            state: of the tensors, where it is not the lineage's.
        """
        averager = averager or self.averager
        until = time.monotonic() + self._patience
        while True:
            wait = min(max(until - time.monotonic(), 0.0), LOOK_SECONDS)
            result = self._step(wait, peers, averager, self.lineage.state if state is None else state)
            if not isinstance(result, InProgress) or time.monotonic() >= until:
                return result
            self.on_look()
            behind = self.left_behind()
            # Nobody is coming any more to a group of parameters that the run has left behind.
            if behind is not None and not averager.stop_looking(behind.reason):
                return result

    def _step(self, wait: float, peers: int, averager: Averager, state: bytes) -> RoundResult:
        result = averager.step(wait=wait, state=state, group_size=self._target_of(peers))
        if not self._not_ours or averager is not self.averager or isinstance(result, InProgress):
            return result
        self._not_ours = False
        if isinstance(result, Success):
            return Failed(reason="the round was of parameters that were replaced meanwhile", used=True)
        return result

    def _target_of(self, peers: int) -> int:
        return min(max(peers, self.averager.config.min_group_size), MAX_GROUP_SIZE)

    def left_behind(self) -> Behind | None:
        """Whether the others have gone on without this peer while it waited."""
        decision = self.decide()
        if not isinstance(decision, Behind):
            return None
        if self._warned_at != self.lineage.epoch:
            self._warned_at = self.lineage.epoch
            logger.warning(
                "this peer is left behind, and takes no part until it loads a newer state: %s",
                decision.reason,
            )
        return decision

    def took(self, success: Success, result: bytes = b"", numbers: bytes = b"") -> None:
        """The average was taken as an update; the last two as for :meth:`Lineage.after`."""
        after = self.lineage.after(success.group_id, result, numbers)
        self._before, self.lineage = self.lineage.state, after
        self._peers_to_start = 1
        self._companions = frozenset((*success.peers, *success.listeners)) - success.lost.keys()
        said = self._bulletin.said
        progress = read_all({peer_id: word.value for peer_id, word in said.items()})
        for peer_id in progress:
            if peer_id in self._companions:
                self._missed.pop(peer_id, None)
            elif progress[peer_id].state == self._before:  # others were not due
                self._note_missed(peer_id, said[peer_id])
        self._took_at = self._last = time.monotonic()

    def _note_missed(self, peer_id: str, word: Said) -> None:
        """Not counted on until it says something new; who is absent again and again, for ever more updates."""
        times = self._missed[peer_id].times + 1 if peer_id in self._missed else 1
        updates = 2 ** min(times - 2, 8) if times > 2 else 0
        self._missed[peer_id] = _Missed(times, word.sequence, self.lineage.epoch + updates)

    def took_alone(self) -> None:
        """An update of this peer alone was taken, since nobody else is there."""
        self._before, self.lineage = self.lineage.state, self.lineage.after(self.averager.peer_id)
        self._companions = frozenset()
        self._last = time.monotonic()

    def is_at(self, lineage: Lineage) -> None:
        """The parameters were replaced by those of another lineage, or by earlier ones of the same."""
        self._before, self.lineage, self._companions = b"", lineage, frozenset()
        self._missed.clear()
        self._not_ours = self.averager.round_state is not None
        self.say(0.0, waiting=False)
