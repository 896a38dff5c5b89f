"""Local updates beyond the plain algorithms: observers, failed rounds, codecs, saved states; on virtual time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD

import p2pavg
from p2pavg.optim import ErrorFeedback, LocalUpdates, SyncError, diloco, fedavg, sync_parameters
from p2pavg.testing import SimulatedLoop
from tests.integration.optim.company import Batches, config, small_model, until, vector_of
from tests.simulation.training import one_step, train_together, wait_until
from tests.unit.optim.samples import residual_norm

SYNC_EVERY = 3
BATCH = 4


class Trainer:
    """One peer's loop, model, batches and optimizer."""

    def __init__(
        self, loop: SimulatedLoop, peers: int, make: Callable[..., LocalUpdates] = fedavg, **options: Any
    ) -> None:
        self.loop, self.model, self.batches = loop, small_model(), Batches(loop.index, BATCH)
        given: dict[str, Any] = {"sync_every": SYNC_EVERY, "peers_to_start": peers}
        inner = SGD(self.model.parameters(), lr=0.05)
        self.optimizer = make(inner, loop.averager, **(given | options))

    def step(self) -> p2pavg.RoundResult | None:
        """Take an inner step; return the result of a round, if there is one."""
        report = one_step(self.loop, self.model, self.batches, self.optimizer)
        assert report.behind is None
        return report.result

    def train(self, epoch: int) -> list[p2pavg.Success]:
        """Train until an outer step; return the results of the rounds."""
        results = [self.step() for _ in until(self.optimizer, epoch)]
        return [result for result in results if isinstance(result, p2pavg.Success)]

    def wait_for_another(self) -> None:
        """Wait until this peer has read another peer's progress."""
        wait_until(self.loop, lambda: self.optimizer._together.run.survey().peers >= 2)

    @property
    def anchor(self) -> torch.Tensor:
        """The anchor as one vector."""
        return torch.cat([tensor.reshape(-1) for tensor in self.optimizer.anchor])

    @property
    def away(self) -> float:
        """The distance of the parameters from the anchor."""
        return float((vector_of(self.model) - self.anchor).abs().max())


def test_some_peers_contribute_and_all_have_the_same_anchor() -> None:
    """An observer keeps its local steps for a later round."""
    peers, updates = 4, 4

    def work(loop: SimulatedLoop) -> tuple[torch.Tensor, list[p2pavg.Success], list[float]]:
        trainer, rounds, kept = Trainer(loop, peers), [], []
        for update in range(1, updates + 1):
            rounds += trainer.train(update)
            kept.append(trainer.away)
        return trainer.anchor, rounds, kept

    half = p2pavg.RandomFraction(0.5, seed=3)
    found = train_together(work, peers, config(peers, participation=half))
    assert all(torch.equal(anchor, found[0][0]) for anchor, _, _ in found)
    for results in zip(*(rounds for _, rounds, _ in found), strict=True):
        assert all(set(result.peers) == set(results[0].peers) for result in results)
        assert (len(results[0].peers), len(results[0].observers)) == (2, 2)
    weights = [max(result.weights.values()) for result in found[0][1]]
    assert max(weights) > BATCH * SYNC_EVERY, "samples of more than one round"
    assert any(away == 0 for _, _, kept in found for away in kept), "contributors go on from the anchor"
    assert any(away > 0 for _, _, kept in found for away in kept), "observers keep what they learned"


def test_next_round_includes_the_steps_of_a_failed_one() -> None:
    """The other peer does not come to a round. The pseudo-gradient grows, and so does its weight."""
    ended: list[bool] = []

    def work(loop: SimulatedLoop) -> None:
        trainer, averager = Trainer(loop, 1, sync_timeout=1.0), loop.averager
        start = trainer.anchor
        if loop.index:
            trainer.step()
            wait_until(loop, lambda: bool(ended))
            return
        trainer.wait_for_another()
        for round_ in (1, 2, 3):
            results = [trainer.step() for _ in range(SYNC_EVERY)]
            assert isinstance(results[-1], p2pavg.NoPeers)
            assert averager.weight == BATCH * SYNC_EVERY * round_
            assert isinstance(averager.accumulated, list)
            pseudo = torch.cat([tensor.reshape(-1) for tensor in averager.accumulated])
            assert torch.equal(pseudo, start - vector_of(trainer.model))
        assert torch.equal(trainer.anchor, start)
        assert trainer.optimizer.epoch == 0
        ended.append(True)

    train_together(work, 2, config(2, match_timeout=0.3))


def test_steps_during_a_late_round_count_in_the_next_one() -> None:
    """The first peer's `sync_timeout` ends before the second peer comes; it trains on and loses no step."""
    late: list[bool] = []

    def work(loop: SimulatedLoop) -> tuple[list[torch.Tensor], list[float], list[float]]:
        trainer = Trainer(loop, 1, sync_timeout=60.0 if loop.index else 0.5)
        if loop.index:
            trainer.step()
            wait_until(loop, lambda: bool(late))
        else:
            trainer.wait_for_another()
        anchors, away, weights = [], [], []
        for _ in until(trainer.optimizer, 2):
            result = trainer.step()
            if isinstance(result, p2pavg.InProgress):
                late.append(True)
            if isinstance(result, p2pavg.Success):
                anchors.append(trainer.anchor)
                away.append(trainer.away)
                weights.append(result.weights[loop.averager.peer_id])
        return anchors, away, weights

    (one, away, weights), (other, nothing, _) = train_together(work, 2, config(2, match_timeout=20.0))
    assert all(map(torch.equal, one, other))
    assert weights[0] == BATCH * SYNC_EVERY, "what the round began with"
    assert weights[1] > BATCH * SYNC_EVERY, "and the rest with the next one"
    assert away[0] > 0, "the steps since are lost"
    assert nothing == [0, 0]


@pytest.mark.parametrize("with_feedback", [False, True])
def test_error_feedback_of_lossy_codecs(with_feedback: bool) -> None:
    def work(loop: SimulatedLoop) -> tuple[torch.Tensor, float]:
        feedback = ErrorFeedback("int8") if with_feedback else None
        trainer = Trainer(loop, 2, feedback=feedback)
        trainer.train(4)
        return vector_of(trainer.model), 0.0 if feedback is None else residual_norm(feedback)

    (one, first), (other, second) = train_together(work, 2, config(2, compression="int8"))
    assert torch.equal(one, other)
    # So short a vector is one peer's share, and that peer averages its own contribution unencoded.
    assert (max(first, second) > 0) == with_feedback


def test_sparse_values_are_averaged_and_the_others_kept() -> None:
    def work(loop: SimulatedLoop) -> tuple[torch.Tensor, list[float], list[int]]:
        trainer = Trainer(loop, 3)
        residuals, sent = [], []
        for update in range(1, 5):
            start = trainer.anchor
            assert not any(result.lost for result in trainer.train(update))
            residuals.append(float(trainer.optimizer.state_dict()["feedback"]["residual"].norm()))
            sent.append(int((trainer.anchor != start).sum()))
        return vector_of(trainer.model), residuals, sent

    found = train_together(work, 3, config(3, compression="topk:64:4", audit="before:1"))
    for vector, residuals, sent in found:
        assert torch.equal(vector, found[0][0])
        assert min(residuals) > 0
        chunks = -(-len(vector) // 64)
        assert all(0 < each <= 8 * chunks for each in sent), "averages have twice as many values"


def test_saved_state_continues_identically() -> None:
    saved: list[dict[str, Any]] = [{}, {}]

    def train(begin: int, end: int) -> list[torch.Tensor]:
        def work(loop: SimulatedLoop) -> torch.Tensor:
            trainer = Trainer(loop, 2, diloco, lr=0.7)
            for _ in range(begin * SYNC_EVERY):
                trainer.batches.next()
            if begin:
                state = copy.deepcopy(
                    saved[loop.index]
                )  # torch loads without copying, and these share a process
                trainer.model.load_state_dict(state["model"])
                trainer.optimizer.load_state_dict(state["optimizer"])
            trainer.train(end)
            kept = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
            saved[loop.index] = kept
            return vector_of(trainer.model)

        return train_together(work, 2)

    train(0, 2)
    stopped, at_once = train(2, 5), train(0, 5)
    assert torch.equal(stopped[0], stopped[1])
    assert torch.equal(stopped[0], at_once[0])


def test_two_sources_are_an_error() -> None:
    def work(loop: SimulatedLoop) -> None:
        with pytest.raises(SyncError, match="2 peers claim to be the source"):
            sync_parameters(loop.averager, small_model().parameters(), source=True, peers=2)

    train_together(work, 2)


def test_sync_times_out_without_a_source() -> None:
    def work(loop: SimulatedLoop) -> None:
        model = small_model()
        before, source = vector_of(model), bool(loop.index)
        with pytest.raises(SyncError, match=r"did not arrive within 1 s"):
            sync_parameters(loop.averager, model.parameters(), source=source, peers=3, timeout=1.0)
        assert torch.equal(vector_of(model), before)

    train_together(work, 2, config(2, match_timeout=0.4))
