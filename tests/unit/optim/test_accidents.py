"""Users' accidents are detected: a forgotten zero_grad, a NaN, changing buffers. Also the memory of an optimizer."""

from __future__ import annotations

import gc
import math
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam

import p2pavg
from p2pavg.base.result import RoundResult
from p2pavg.blocking import Averager
from p2pavg.optim import ErrorFeedback, diloco
from tests.unit.optim.fakes import Alone, both, large_batch, local, parameter
from tests.unit.optim.loops import Either, Make, batch, plain, small


class TestZeroing:
    @both
    def test_a_forgotten_zero_grad_is_a_warning(self, make: Make, caplog: pytest.LogCaptureFixture) -> None:
        model = plain()
        optimizer = make(Alone(), SGD(model.parameters(), lr=0.1), **never(make))
        for _ in range(5):
            batch(model, optimizer, zero=False)
        assert caplog.text.count("were not zeroed") == 1

    @both
    @pytest.mark.parametrize("how", ["none", "zeros", "data", "two passes", "clipped"])
    def test_zeroed_gradients_cause_no_warning(
        self, make: Make, how: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = plain()
        optimizer = make(Alone(), SGD(model.parameters(), lr=0.1), **never(make))
        for _ in range(5):
            if how == "data":
                for weights in model.parameters():
                    if weights.grad is not None:
                        weights.grad.data.zero_()
            else:
                optimizer.zero_grad(set_to_none=how != "zeros")
            for _ in range(2 if how == "two passes" else 1):
                torch.autograd.backward(model(torch.ones(4, 3)).square().mean())
            if how == "clipped":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step(samples=4)
        assert "were not zeroed" not in caplog.text

    def test_refused_batch_causes_no_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        model = plain()
        optimizer = large_batch(Alone(), SGD(model.parameters(), lr=0.1), target_batch_size=1e9)
        with pytest.raises(p2pavg.AccumulateError):
            batch(model, optimizer, scale=math.inf)
        batch(model, optimizer)
        assert "were not zeroed" not in caplog.text

    @both
    def test_hooks_are_gone_after_a_few_steps(self, make: Make) -> None:
        model = plain()
        optimizer = make(Alone(), SGD(model.parameters(), lr=0.1), **never(make))
        assert any(weights._backward_hooks for weights in model.parameters())
        for _ in range(12):
            batch(model, optimizer)
        assert not any(weights._backward_hooks for weights in model.parameters())


def never(make: Make) -> dict[str, Any]:
    """Options with which no update happens, because an update removes the gradients."""
    return {"target_batch_size": 1e9} if make is large_batch else {"sync_every": 10**6}


class TestNotFinite:
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    @pytest.mark.parametrize("kind", [SGD, Adam, Adagrad])
    def test_a_step_that_destroys_the_parameters_goes_back_to_the_anchor(
        self, kind: Any, value: float, caplog: pytest.LogCaptureFixture
    ) -> None:
        weights = parameter(1.0, 2.0)
        averager = Alone()
        optimizer = local(averager, kind([weights], lr=0.1), sync_every=3)
        reports = []
        for step in range(4):
            weights.grad = torch.tensor([1.0, value if step == 1 else 1.0])
            reports.append(optimizer.step(samples=4))
        assert [report.restored is not None for report in reports] == [False, True, False, False]
        assert reports[1].restored is not None
        assert "back at the anchor, and 4 samples" in reports[1].restored
        assert "back at the anchor" in caplog.text
        assert reports[1].samples <= 4, "only the other peer's"
        assert reports[3].updated, "three steps were due, one of which came to nothing"
        assert isinstance(reports[3].result, p2pavg.Success)
        assert reports[3].result.total_weight == 8, "the samples before it are lost"
        assert bool(weights.isfinite().all())
        for _ in range(3):
            weights.grad = torch.ones(2)
            assert optimizer.step(samples=4).restored is None, "the inner optimizer is destroyed"

    def test_nan_at_the_last_step_delays_the_others_by_one_batch(self) -> None:
        weights, averager = parameter(1.0), Alone()
        optimizer = local(averager, SGD([weights], lr=0.1), sync_every=2)
        found = []
        for value in (1.0, math.nan, 1.0):
            weights.grad = torch.full((1,), value)
            found.append(optimizer.step(samples=4).updated)
        assert found == [False, False, True]
        assert weights.item() == pytest.approx(0.9)

    def test_peer_with_only_nan_steps_is_not_waited_for(self) -> None:
        weights, averager = parameter(1.0), Alone()
        optimizer = local(averager, SGD([weights], lr=0.1), sync_every=2)
        left = []
        for value in (math.nan, math.nan, math.nan, 1.0):
            weights.grad = torch.full((1,), value)
            optimizer.step(samples=4)
            left.append(averager.progress_board.withdrawn)
        assert left == [False, False, True, False]

    def test_nan_during_a_late_round_keeps_the_contribution_and_drops_later_steps(self) -> None:
        """A NaN comes while a late round runs: the average has this peer's steps, its parameters do not."""
        averager, weights = Alone(), parameter(1.0)
        averager.runs_for = 3
        optimizer = local(averager, SGD([weights], lr=0.1), sync_every=2, sync_timeout=1e-9)
        reports = []
        for value in (1.0, 1.0, 1.0, math.nan, 2.0, 0.0):
            weights.grad = torch.full((1,), value)
            reports.append(optimizer.step(samples=1))
            if reports[-1].updated:
                break
        assert reports[-1].updated
        assert reports[3].restored is not None
        # The anchor now includes the two steps of the round; of the later steps, only the one after the NaN is kept.
        assert optimizer.anchor[0].item() == pytest.approx(0.8)
        assert weights.item() == pytest.approx(0.6)
        assert optimizer._samples == 2

    def test_buffers_are_restored_too(self) -> None:
        model = small()
        optimizer = local(Alone(compression=None), SGD(model.parameters(), lr=0.1), sync_every=5, model=model)
        batch(model, optimizer)
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.full((4, 3), math.nan)).sum())
        assert optimizer.step(samples=4).restored is not None
        assert all(bool(buffer.isfinite().all()) for buffer in model.buffers() if buffer.is_floating_point())

    def test_a_nan_batch_of_a_large_batch_is_refused_and_costs_no_statistics(self) -> None:
        model = small()
        optimizer = large_batch(
            Alone(compression=None), SGD(model.parameters(), lr=0.1), target_batch_size=8, model=model
        )
        batch(model, optimizer)
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.full((4, 3), math.nan)).sum())
        with pytest.raises(p2pavg.AccumulateError, match="NaN"):
            optimizer.step(samples=4)
        assert batch(model, optimizer).updated


TRAINED = nn.Linear(1, 1)
"""The module that the optimizers of `test_wrong_arguments_are_named` train."""


class TestBuffers:
    @both
    def test_running_statistics_are_averaged(self, make: Make) -> None:
        model = small()
        averager = Alone(compression=None)
        optimizer = make(averager, SGD(model.parameters(), lr=0.1), model=model)
        given = averager._accumulation.schema
        assert given is not None
        assert len(given.shapes) == len(list(model.parameters())) + 2
        expected = torch.full((4,), 0.25)

        def average() -> list[torch.Tensor]:
            averaged = Alone.taken(averager)
            return [*averaged[:-2], expected, 2 * expected]

        averager.taken = average  # type: ignore[method-assign]
        assert batch(model, optimizer).updated
        assert torch.equal(model[1].running_mean, expected)  # type: ignore[index]
        assert torch.equal(model[1].running_var, 2 * expected)  # type: ignore[index]
        assert model[1].num_batches_tracked == 1  # type: ignore[index]

    @both
    def test_buffer_shapes_are_part_of_the_recipe(self, make: Make) -> None:
        def made(size: int) -> Either:
            model = plain()
            model.register_buffer("mask", torch.zeros(size))
            return make(Alone(), SGD(model.parameters(), lr=0.1), model=model)

        assert made(3).lineage == made(3).lineage
        assert made(3).lineage != made(4).lineage

    @both
    def test_changing_buffer_that_is_not_averaged_is_refused(self, make: Make) -> None:
        model = plain()
        model.register_buffer("ema", torch.zeros(3))
        optimizer = make(Alone(), SGD(model.parameters(), lr=0.1), model=model)
        batch(model, optimizer)
        model.load_state_dict(model.state_dict())  # with the same values
        batch(model, optimizer)
        cast(torch.Tensor, model.ema).add_(1.0)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(ValueError, match=r"buffer 'ema' changes.*buffers=\['ema'"):
            batch(model, optimizer)
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))

    @both
    def test_buffers_can_be_named(self, make: Make) -> None:
        model = plain()
        model.register_buffer("ema", torch.zeros(3))
        optimizer = make(Alone(), SGD(model.parameters(), lr=0.1), model=model, buffers=["ema"])
        for _ in range(3):
            cast(torch.Tensor, model.ema).add_(1.0)
            assert batch(model, optimizer).updated

    @both
    def test_statistics_that_stand_still_are_not_averaged(self, make: Make) -> None:
        model = small().eval()
        averager = Alone()
        make(averager, SGD(model.parameters(), lr=0.1), model=model)
        assert averager._accumulation.schema is not None
        assert len(averager._accumulation.schema.shapes) == len(list(model.parameters()))

    @both
    def test_a_codec_that_makes_zeros_of_small_values_is_refused(self, make: Make) -> None:
        model = small()
        for codec in (None, "bf16", "fp16", "blockwise8"):
            make(Alone(compression=codec), SGD(model.parameters(), lr=0.1), model=model)
        with pytest.raises(ValueError, match=r"int8.* too coarse"):
            make(Alone(compression="int8"), SGD(model.parameters(), lr=0.1), model=model)
        model = plain()
        make(Alone(compression="int8"), SGD(model.parameters(), lr=0.1), model=model)

    @both
    @pytest.mark.parametrize(
        ("changes", "error", "named"),
        [
            ({"model": 3}, TypeError, "model must be a torch.nn.Module, got int"),
            ({"buffers": ["x"]}, ValueError, "give model= too"),
            ({"model": nn.Linear(1, 1)}, ValueError, "trains no parameter, such as a copy"),
            ({"model": TRAINED, "buffers": ["x"]}, ValueError, "buffers: 'x'"),
            ({"model": TRAINED, "buffers": "x"}, TypeError, "collection of names"),
            ({"check_every": -1}, ValueError, "check_every"),
            ({"check_every": 1.5}, ValueError, "check_every"),
            ({"check_every": True}, ValueError, "check_every"),
        ],
    )
    def test_wrong_arguments_are_named(
        self, make: Make, changes: dict[str, Any], error: type[Exception], named: str
    ) -> None:
        with pytest.raises(error, match=named):
            make(Alone(), SGD(TRAINED.parameters(), lr=0.1), **changes)

    def test_feedback_with_averaged_buffers_is_refused(self) -> None:
        model = small()
        with pytest.raises(ValueError, match="feedback cannot be combined"):
            local(Alone(), SGD(model.parameters(), lr=0.1), model=model, feedback=ErrorFeedback("blockwise8"))


class TestMemory:
    ELEMENTS = 30_011

    @pytest.mark.long
    def test_diloco_holds_two_vectors_beside_the_parameters_and_the_averagers(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The vectors are the anchor and the momentum; the contribution is kept neither during a round nor after it.

        Of the last average a sample is kept, of 2**20 values at most: of fewer here, so that it is not a vector.
        """
        monkeypatch.setattr("p2pavg.optim.local.outer.SAMPLE", 8)
        weights = parameter(*[0.0] * self.ELEMENTS)
        averager = Alone(compression=None)
        optimizer = diloco(SGD([weights], lr=0.1), cast(Averager, averager), sync_every=1, peers_to_start=2)
        during, after = [], []
        inner_step = averager.step

        def step(**arguments: Any) -> RoundResult:
            during.append(self._vectors())
            return inner_step(**arguments)

        averager.step = step  # type: ignore[method-assign]
        for _ in range(3):
            weights.grad = torch.ones_like(weights)
            assert optimizer.step(samples=1).updated
            optimizer.zero_grad()
            averager._taken = None
            after.append(self._vectors())
        # The parameters, the anchor, the momentum, and the averager's vector; during the round also the gradient.
        assert after == [4, 4, 4]
        assert during == [4, 5, 5], "there is no momentum before the first outer step"

    def _vectors(self) -> int:
        gc.collect()
        tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter)]
        held = [tensor for tensor in tensors if tensor.numel() == self.ELEMENTS]
        return len({tensor.untyped_storage().data_ptr() for tensor in held})
