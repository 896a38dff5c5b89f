"""A peer that begins late, or that missed updates, gets the run's state from the others, bit for bit; virtual time."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from p2pavg.base.result import Success
from p2pavg.optim import RunState, StepReport
from p2pavg.testing import SimulatedLoop
from tests.integration.optim.company import Batches, config, loss_of
from tests.integration.optim.joiners import (
    BATCH,
    AnyOptimizer,
    Maker,
    adamw,
    by_fragments,
    common_tensors,
    common_values,
    normalised_model,
)
from tests.simulation.training import train_together, wait_until

PEERS = 3
ODD = 2
"""The peer that comes late or pauses."""
MORE_UPDATES = 6
"""Updates that all peers take together after that."""


@dataclass
class Seen:
    """The updates of one peer, and its state at the end."""

    replayed: list[int] = field(default_factory=list)
    """Updates that came from the log."""
    together: list[int] = field(default_factory=list)
    """Updates in whose rounds this peer was."""
    final: dict[str, torch.Tensor] = field(default_factory=dict)
    """All tensors that the peers of one lineage share."""
    plain: dict[str, Any] = field(default_factory=dict)
    """The plain values that they share."""
    schedule: int = 0
    """Steps of the schedule."""

    def note(self, report: StepReport) -> None:
        """Note an update; called as ``on_update``."""
        assert isinstance(report.result, Success)
        replayed = report.result.bytes_sent == 0 and report.result.duration == 0.0
        (self.replayed if replayed else self.together).append(report.epoch)


class Story:
    """A run of three peers, of which the last one is late if ``late``, or else pauses at an update.

    Args:
        at: number of the update at which it comes, or pauses.
        missed: number of updates during its pause.
    """

    def __init__(self, make: Maker, *, at: int, missed: int = 0) -> None:
        self.seen = [Seen() for _ in range(PEERS)]
        self.epochs = [0] * PEERS
        self._make = make
        self._at = at
        self._missed = missed
        self._end: int | None = None
        train_together(self._train, PEERS, config(PEERS, compression="blockwise8"))

    def _train(self, loop: SimulatedLoop) -> None:
        odd, seen = loop.index == ODD, self.seen[loop.index]
        is_late = odd and not self._missed
        if is_late:
            wait_until(loop, lambda: self.epochs[0] >= self._at)
        model, batches = normalised_model(6 if is_late else 5), Batches(loop.index, BATCH)
        options = {"on_update": seen.note, "check_every": 5, "peers_to_start": 3 if self._missed else 2}
        optimizer = self._make(model, loop.averager, RunState(model), options)
        left = 0
        while self._end is None or optimizer.epoch < self._end:
            if odd and self._missed and not left and optimizer.epoch >= self._at:
                left = self._pause(loop, optimizer)
            loop.sleep(0.5)
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, batches.next()))
            report = optimizer.step(samples=BATCH)
            assert report.behind is None, report.behind
            assert report.drifted is None, report.drifted
            assert optimizer.epoch < 200, "the last peer does not come"
            self.epochs[loop.index] = optimizer.epoch
            has_joined = is_late or (left and seen.together[-1] > left)
            if odd and self._end is None and has_joined and seen.together:
                self._end = optimizer.epoch + MORE_UPDATES
        seen.schedule = 0 if optimizer.scheduler is None else optimizer.scheduler.last_epoch
        seen.final, seen.plain = common_tensors(optimizer, model), common_values(optimizer)
        loop.sleep(20.0)  # a peer that hears of the last update late may need another one

    def _pause(self, loop: SimulatedLoop, optimizer: AnyOptimizer) -> int:
        """Leave the run until the others have taken some updates; return the number of this peer's last one."""
        optimizer.leave()
        last = optimizer.epoch
        wait_until(loop, lambda: self.epochs[0] >= last + self._missed)
        return last

    def check_same(self) -> None:
        """Check that all peers ended with the same bits."""
        first = self.seen[0]
        assert len(first.final) > 4
        for other in self.seen[1:]:
            assert other.plain == first.plain
            assert other.final.keys() == first.final.keys()
            for name, tensor in first.final.items():
                assert other.final[name].dtype == tensor.dtype
                assert torch.equal(other.final[name], tensor), name


def test_a_peer_that_joins_in_the_middle_ends_with_the_same_bits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "p2pavg.optim")
    story = Story(by_fragments, at=10)
    story.check_same()
    joiner = story.seen[ODD]
    assert "has loaded the state of update" in caplog.text, "it came by a snapshot"
    assert joiner.replayed, "and by at least one average of the log"
    assert joiner.replayed[0] > 10
    assert len(joiner.together) >= MORE_UPDATES
    distance = abs(joiner.schedule - story.seen[0].schedule)
    assert distance <= 2 * len(joiner.replayed), "its schedule is where the run's is"


def test_a_peer_that_missed_a_few_updates_comes_back_by_the_log_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "p2pavg.optim")
    story = Story(adamw, at=4, missed=5)
    story.check_same()
    assert len(story.seen[ODD].replayed) >= 4
    assert "has loaded the state" not in caplog.text, "no snapshot was needed"
    assert "has caught up with its run" in caplog.text
