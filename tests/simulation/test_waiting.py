"""Costs for the others when a peer pauses, comes late, dies, differs or lies; on virtual time."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from p2pavg.base.result import Success
from p2pavg.optim import AveragedOptimizer, LocalUpdates, StepReport, diloco
from p2pavg.optim.coordination.progress import PeerProgress
from p2pavg.runs.records.board import Entry
from tests.simulation.stage import Player, Stage

BATCH_SECONDS = 0.5
STEPS = 10
Stages = Callable[..., Stage]


def model(value: float = 1.0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((2,), value))


def local(player: Player, weights: torch.nn.Parameter) -> LocalUpdates:
    return diloco(torch.optim.SGD([weights], lr=0.1), player.averager, sync_every=STEPS, state=False)


def large_batch(player: Player, weights: torch.nn.Parameter) -> AveragedOptimizer:
    inner = torch.optim.SGD([weights], lr=0.1)
    return AveragedOptimizer(inner, player.averager, target_batch_size=160, state=False)


Optimizer = LocalUpdates | AveragedOptimizer
Make = Callable[[Player, torch.nn.Parameter], Optimizer]
both = pytest.mark.parametrize("make", [local, large_batch])


class Trainer:
    """One peer's training loop and its records."""

    def __init__(self, player: Player, make: Make, *, weights: float = 1.0) -> None:
        self.player = player
        self.weights = model(weights)
        self.optimizer = make(player, self.weights)
        self.reports: list[StepReport] = []
        self.took: list[tuple[float, float]] = []
        """Start and duration of each call of ``step``."""

    def batch(self) -> StepReport:
        self.player.sleep(BATCH_SECONDS)
        self.weights.grad = torch.ones(2)
        began = self.player.stage.now
        report = self.optimizer.step(samples=8)
        self.took.append((began, self.player.stage.now - began))
        self.reports.append(report)
        return report

    def train(self, updates: int) -> Trainer:
        while self.optimizer.epoch < updates and not self.batch().behind:
            pass
        return self

    @property
    def longest(self) -> float:
        """Return the longest call after the first update, in seconds; the start is excluded because it is slow."""
        first = next(i for i, report in enumerate(self.reports) if report.updated)
        return max(seconds for _, seconds in self.took[first + 1 :])

    def saved(self) -> dict[str, Any]:
        return copy.deepcopy({"model": self.weights.detach(), "optimizer": self.optimizer.state_dict()})


@both
def test_a_peer_that_pauses_costs_the_others_seconds_once(stages: Stages, make: Make) -> None:
    """It evaluates for a minute without ``leave()``. The report has the wait and the peer's id."""
    stage = stages()

    def pauses(player: Player) -> Trainer:
        trainer = Trainer(player, make).train(2)
        player.sleep(60.0)
        return trainer.train(30)

    for name in "ab":
        stage.enter(name, 0.0, lambda player: Trainer(player, make).train(30))
    stage.enter("c", 0.0, pauses)
    a, b, c = stage.play()
    for trainer in (a, b):
        assert trainer.optimizer.epoch == 30
        assert trainer.longest < 15.0
        assert sum(seconds > 3.0 for _, seconds in trainer.took[1:]) <= 2, "the start, and once for the pause"
        waits = [report for report in trainer.reports if report.waited_seconds > 3.0 and report.epoch > 1]
        assert [report.waited_for for report in waits] == [("c",)]
    assert a.optimizer.lineage == b.optimizer.lineage
    assert c.reports[-1].behind is not None


def test_a_joiner_holds_up_no_outer_step(stages: Stages) -> None:
    """It loads the state when the others have computed most of their steps; it takes part with the steps it has."""
    stage = stages()
    state: dict[str, Any] = {}

    def saves(player: Player) -> Trainer:
        trainer = Trainer(player, local).train(2)
        state.update(trainer.saved())
        return trainer.train(6)

    def joins(player: Player) -> Trainer:
        while not state:
            player.sleep(0.1)
        player.sleep(0.85 * STEPS * BATCH_SECONDS)
        trainer = Trainer(player, local)
        with torch.no_grad():
            trainer.weights.copy_(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        return trainer.train(6)

    stage.enter("a", 0.0, saves)
    stage.enter("b", 0.0, lambda player: Trainer(player, local).train(6))
    stage.enter("c", 0.0, joins)
    a, b, c = stage.play()
    assert len({trainer.optimizer.lineage for trainer in (a, b, c)}) == 1
    assert [len(group) for group in stage.groups] == [2, 2, 3, 3, 3, 3]
    assert max(a.longest, b.longest) < 4 * BATCH_SECONDS + 2.0, "a batch of the joiner, and the words' delays"


def test_peers_that_load_one_state_together_compute_all_their_steps(stages: Stages) -> None:
    """No peer counts as a joiner: all start again and compute all their steps."""
    stage = stages(round_seconds=0.0)
    state = {}

    def saves(player: Player) -> Trainer:
        return Trainer(player, local).train(2)

    stage.enter("a", 0.0, saves)
    stage.enter("b", 0.0, saves)
    a, _ = stage.play()
    state.update(a.saved())
    again = stages(round_seconds=0.0)

    def goes_on(player: Player) -> Trainer:
        trainer = Trainer(player, local)
        with torch.no_grad():
            trainer.weights.copy_(state["model"])
        trainer.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        return trainer.train(4)

    for name, at in (("d", 0.0), ("e", 1.5), ("f", 3.0)):
        again.enter(name, at, goes_on)
    found = again.play()
    assert len({trainer.optimizer.lineage for trainer in found}) == 1
    for trainer in found:
        updates = [report.result for report in trainer.reports if isinstance(report.result, Success)]
        assert [result.weights for result in updates] == [dict.fromkeys(updates[0].weights, 8.0 * STEPS)] * 2


class TestReasons:
    """The reasons why peers do not meet are given within seconds, as a warning and in the report."""

    @both
    def test_missing_peers_are_reported(
        self, stages: Stages, make: Make, caplog: pytest.LogCaptureFixture
    ) -> None:
        stage = stages()

        def works(player: Player) -> float:
            trainer = Trainer(player, make)
            while not trainer.batch().waited_seconds:
                pass
            return trainer.took[-1][1]

        stage.enter("a", 0.0, works)
        (seconds,) = stage.play()
        assert seconds == pytest.approx(600.0)
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert "no other peer of this run is seen" in warnings[0]
        assert 3 <= len(warnings) <= 8, "with growing pauses"


def invented(state: bytes, epoch: int, *, samples: float, waiting: bool, started: bool) -> bytes:
    return PeerProgress(
        epoch=epoch,
        state=state,
        samples=samples,
        samples_per_second=1e9,
        waiting=waiting,
        batch_seconds=600.0,
        started=started,
    ).encode()


class TestInventedWords:
    """One identity that stores the run's records can store 64 words of publishers that it invented."""

    @both
    def test_invented_words_of_a_state_far_ahead_stop_no_run(self, stages: Stages, make: Make) -> None:
        stage = stages()

        def lies(player: Player) -> None:
            word = invented(b"x" * 32, 10**6, samples=1e9, waiting=True, started=True)
            for number in range(64):
                for other in stage.players:
                    other.hears(stage.now, f"x{number}", Entry(word, number, 1e12))

        for name in "abc":
            stage.enter(name, 0.0, lambda player: Trainer(player, make).train(10))
        stage.enter("liar", 15.0, lies)
        *honest, _ = stage.play()
        for trainer in honest:
            assert trainer.optimizer.epoch == 10
            assert not any(report.behind for report in trainer.reports)
            assert trainer.longest < 3.0

    @pytest.mark.parametrize(("make", "waiting"), [(local, True), (large_batch, False)])
    def test_invented_words_of_the_runs_state_cause_no_round_and_only_a_short_delay(
        self, stages: Stages, make: Make, waiting: bool
    ) -> None:
        """The invented words always have the run's current state."""
        stage = stages()
        trainers: list[Trainer] = []

        def works(player: Player) -> Trainer:
            trainers.append(Trainer(player, make))
            return trainers[-1].train(15)

        def lies(player: Player) -> None:
            sequence = 0
            while stage.now < 200.0:
                lineage = trainers[0].optimizer.lineage
                word = invented(lineage.state, lineage.epoch, samples=1e9, waiting=waiting, started=True)
                for number in range(64):
                    sequence += 1
                    for other in stage.players:
                        other.hears(stage.now, f"x{number}", Entry(word, sequence, 1e12))
                player.sleep(1.0)

        for name in "abc":
            stage.enter(name, 0.0, works)
        stage.enter("liar", 20.0, lies)
        *honest, _ = stage.play()
        for trainer in honest:
            assert trainer.optimizer.epoch == 15
            assert not any(report.behind for report in trainer.reports)
            assert trainer.longest < 35.0, "a match timeout"
            assert sum(seconds > 5.0 for _, seconds in trainer.took[1:]) <= 8
            weights = [r.result.total_weight for r in trainer.reports if isinstance(r.result, Success)]
            assert min(weights) >= 80.0, "at least half of the target was computed"
        assert len({trainer.optimizer.lineage for trainer in honest}) == 1
