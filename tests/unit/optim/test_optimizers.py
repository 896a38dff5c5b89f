"""The optimizers with rounds whose results the test sets, without a network."""

from __future__ import annotations

from typing import Any, Protocol, cast

import pytest
import torch
from torch.optim import SGD, lr_scheduler

from p2pavg.allreduce.vector.accumulation import Accumulation
from p2pavg.base.errors import ClosedError
from p2pavg.base.result import InProgress, NoPeers, RoundResult, Success
from p2pavg.blocking import Averager
from p2pavg.optim import LocalUpdates
from p2pavg.optim.base.recipe import hyperparameters, numbers_digest
from p2pavg.optim.base.state import digest_of
from p2pavg.optim.coordination.progress import PeerProgress
from tests.unit.optim.fakes import GROUP, Alone, Make, both, large_batch, local, parameter


class TestNorm:
    """Gradients so large that the sum of their squares overflows their dtype."""

    @pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 300.0), (torch.float32, 1e20)])
    def test_without_a_limit_nothing_is_clipped(self, dtype: torch.dtype, value: float) -> None:
        weights = torch.nn.Parameter(torch.zeros(100_000, dtype=dtype))
        optimizer = large_batch(Alone(), SGD([weights], lr=1e-4))
        weights.grad = torch.full_like(weights, value)
        assert optimizer.step(samples=4).updated
        assert torch.equal(weights, torch.full_like(weights, -1e-4 * value))

    def test_norm_of_large_float16_gradients_is_finite(self) -> None:
        weights = torch.nn.Parameter(torch.zeros(10_000, dtype=torch.float16))
        optimizer = large_batch(Alone(), SGD([weights], lr=1.0), max_grad_norm=3.0)
        weights.grad = torch.full_like(weights, 1000.0)
        report = optimizer.step(samples=4)
        assert report.grad_norm == pytest.approx(1e5, rel=1e-4)
        assert weights.detach().float().norm() == pytest.approx(3.0, rel=1e-3)


class TestParameters:
    @both
    @pytest.mark.parametrize("how", ["added", "thawed", "frozen", "exchanged"])
    def test_replaced_parameters_are_refused(self, make: Make, how: str) -> None:
        """Each peer would step them by its own gradients, and the peers would diverge."""
        first, second = parameter(1.0), parameter(2.0)
        second.requires_grad_(how not in ("thawed", "exchanged"))
        inner = SGD([first] if how == "added" else [first, second], lr=0.1)
        optimizer = make(Alone(), inner)
        if how == "added":
            inner.add_param_group({"params": [second]})
        second.requires_grad_(how != "frozen")
        first.requires_grad_(how != "exchanged")
        first.grad = torch.ones(1)
        with pytest.raises(ValueError, match="other parameters"):
            optimizer.step(samples=4)
        assert first.item() == 1.0
        assert optimizer.epoch == 0

    @both
    def test_contributions_of_an_earlier_optimizer_are_discarded(self, make: Make) -> None:
        averager = Alone()
        averager.accumulate([torch.ones(1)], 3.0)
        make(averager, SGD([parameter(1.0)], lr=0.1))
        assert averager.weight == 0

    def test_outer_optimizer_of_other_tensors_is_refused(self) -> None:
        """This holds for tensors of the same values, and for additional ones."""
        with pytest.raises(ValueError, match="exactly the tensors"):
            LocalUpdates(
                SGD([parameter(1.0), parameter(2.0, 3.0)], lr=0.1),
                lambda anchor: SGD([tensor.clone() for tensor in anchor], lr=1.0),
                cast(Averager, Alone()),
                sync_every=1,
            )


class TestSchedule:
    def test_an_update_counts_before_its_schedule_is_stepped(self) -> None:
        """A schedule raises after its last step, when the parameters have already changed."""
        weights = parameter(1.0)
        inner = SGD([weights], lr=0.1)
        optimizer = large_batch(Alone(), inner, scheduler=lr_scheduler.OneCycleLR(inner, 1.0, total_steps=1))
        weights.grad = torch.ones(1)
        optimizer.step(samples=4)
        before = weights.item()
        weights.grad = torch.ones(1)
        with pytest.raises(ValueError, match="total"):
            optimizer.step(samples=4)
        assert optimizer.epoch == 2
        assert weights.item() != before


class TestMetrics:
    @both
    def test_own_metric_of_the_optimizer_is_reserved(self, make: Make) -> None:
        weights = parameter(1.0)
        optimizer = make(Alone(), SGD([weights], lr=0.1))
        weights.grad = torch.ones(1)
        with pytest.raises(ValueError, match="samples_per_second"):
            optimizer.step(samples=4, metrics={"samples_per_second": 1.0})
        assert weights.item() == 1.0


class TestLateRounds:
    """A call ended before its round, by its sync_timeout or by Ctrl-C."""

    def test_a_peer_that_takes_its_round_late_is_not_behind(self) -> None:
        """The other peer has long taken and published the update."""
        averager, weights = Alone(), parameter(1.0)
        averager.runs_for = 2
        optimizer = local(averager, SGD([weights], lr=0.1), sync_every=2, sync_timeout=1e-9)
        reports = []
        for _ in range(4):
            weights.grad = torch.ones(1)
            reports.append(optimizer.step(samples=1))
            if reports[-1].result is not None:
                averager.progress_board.other = averager.progress_board.other or after(optimizer, averager)
        assert [type(report.result) for report in reports] == [type(None), InProgress, InProgress, Success]
        assert not any(report.behind for report in reports)
        assert optimizer.epoch == 1
        assert weights.item() == pytest.approx(0.6), "what was learned meanwhile is kept"

    def test_result_is_not_taken_for_a_state_loaded_meanwhile(self) -> None:
        """This holds even for a state of the same epoch and the same number of samples."""
        averager, weights = Alone(), parameter(1.0)
        averager.runs_for = 1
        optimizer = local(averager, SGD([weights], lr=0.1), sync_timeout=1e-9)
        weights.grad = torch.ones(1)
        assert isinstance(optimizer.step(samples=4).result, InProgress)
        saved = optimizer.state_dict()
        with torch.no_grad():
            weights.fill_(1.0)
        optimizer.load_state_dict(saved)
        weights.grad = torch.full((1,), 2.0)
        report = optimizer.step(samples=4)
        assert not report.updated, "the round was of another run of the loop"
        assert weights.item() == pytest.approx(0.8)
        assert report.samples > 0


class TestRounding:
    def test_rounding_of_the_anchor_is_not_progress(self) -> None:
        """Otherwise peers that learn nothing would pull an anchor between two bfloat16 numbers to one of them."""
        weights = parameter(1.0, dtype=torch.bfloat16)
        optimizer = LocalUpdates(
            SGD([weights], lr=0.1),
            lambda anchor: SGD(anchor, lr=0.7),
            cast(Averager, Alone()),
            sync_every=1,
            peers_to_start=2,
        )
        state = optimizer.state_dict()
        state["anchor"] = [torch.tensor([1.0015])]
        state["peer_id"] = "another"
        optimizer.load_state_dict(state)
        for _ in range(3):
            weights.grad = torch.zeros_like(weights)
            report = optimizer.step(samples=1)
            assert report.updated
            assert report.grad_norm == 0
        assert optimizer.anchor[0].item() == pytest.approx(1.0015, abs=1e-7)


class TestStates:
    def test_a_state_that_is_refused_leaves_the_anchor_as_it_was(self) -> None:
        optimizer = local(Alone(), SGD([parameter(1.0)], lr=0.1))
        state = optimizer.state_dict()
        state["anchor"] = [torch.tensor([5.0])]
        state["outer"] = {"state": {}, "param_groups": []}
        with pytest.raises(ValueError, match="parameter group"):
            optimizer.load_state_dict(state)
        assert optimizer.anchor[0].item() == 1.0


class TestLeaving:
    @both
    def test_peer_that_leaves_publishes_nothing_until_its_next_step(self, make: Make) -> None:
        averager, weights = Alone(), parameter(1.0)
        optimizer = make(averager, SGD([weights], lr=0.1))
        for _ in range(2):
            weights.grad = torch.ones(1)
            optimizer.step(samples=4)
            assert not averager.progress_board.withdrawn
            optimizer.leave()
            assert averager.progress_board.withdrawn


class Missed(Alone):
    """An averager that meets no other peer in its first rounds, of a run that bounds weights."""

    def __init__(self, missed: int) -> None:
        super().__init__(max_weight=6.0)
        self._accumulation = Accumulation(max_weight=6.0)
        self._missed = missed
        self.words: list[Ending] = []

    def on_end(self, ending: object) -> None:
        self.words.append(cast(Ending, ending))

    def step(self, *, state: bytes, **options: Any) -> RoundResult:
        self._missed -= 1
        return NoPeers(reason="no other peer") if self._missed >= 0 else super().step(state=state, **options)


def test_more_samples_than_a_weight_may_have_count_as_much_as_one_may() -> None:
    """A peer that met no other one for some outer steps could never average again: every step raised."""
    averager, weights = Missed(2), parameter(1.0)
    optimizer = local(averager, SGD([weights], lr=0.1))
    for _ in range(3):
        weights.grad = torch.ones(1)
        report = optimizer.step(samples=4)
    assert isinstance(report.result, Success)
    assert report.result.total_weight == 6.0


class Ending(Protocol):
    """The end of an optimizer, which an averager calls when its block ends."""

    def begin(self) -> bool: ...


def test_an_averager_that_is_closed_in_its_own_block_ends_it_without_an_error() -> None:
    class Closed(Missed):
        def cancel_matchmaking(self, reason: str) -> bool:
            raise ClosedError("the averager is closed")

    averager, weights = Closed(0), parameter(1.0)
    optimizer = large_batch(averager, SGD([weights], lr=0.1))
    weights.grad = torch.ones(1)
    assert optimizer.step(samples=4).updated
    assert not any(ending.begin() for ending in averager.words)


@both
def test_an_update_whose_callback_raises_is_noted_all_the_same(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it is in no log, and peers that lack it need a whole state."""

    def fail(_: object) -> None:
        raise RuntimeError("the log's server is gone")

    weights = parameter(1.0)
    optimizer = make(Alone(), SGD([weights], lr=0.1), on_update=fail)
    noted: list[object] = []
    monkeypatch.setattr(optimizer, "_took", noted.append)
    weights.grad = torch.ones(1)
    with pytest.raises(RuntimeError, match="server is gone"):
        optimizer.step(samples=4)
    assert optimizer.epoch == 1
    assert len(noted) == 1


def after(optimizer: LocalUpdates, averager: Alone) -> bytes:
    """Return the word of a peer that has taken the running round's update."""
    result = digest_of(averager.taken())
    taken = optimizer.lineage.after(GROUP, result, numbers_digest(hyperparameters(optimizer.outer)))
    return PeerProgress(
        epoch=taken.epoch, state=taken.state, samples=0.0, samples_per_second=1.0, waiting=False
    ).encode()
