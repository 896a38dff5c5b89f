"""The optimizers are optimizers of torch: schedulers, closures, hooks, states, scaled and accumulated gradients."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR

import p2pavg
from p2pavg.base.result import Success
from p2pavg.blocking import Averager, open_averager
from p2pavg.optim import AveragedOptimizer, StepReport, diloco
from p2pavg.optim.coordination.word import RecipeRecord
from p2pavg.peer.averager import DecentralizedAverager
from tests.unit.optim.fakes import Alone, Make, both, large_batch, local, parameter
from tests.unit.optim.loops import batch, plain, with_talk


def stepped(optimizer: Any, gradient: float, **given: Any) -> StepReport:
    """Step with the same gradient for every parameter."""
    for group in optimizer.param_groups:
        for weights in group["params"]:
            weights.grad = torch.full_like(weights, gradient)
    report = optimizer.step(**given)
    assert isinstance(report, StepReport)
    return report


class TestKind:
    @both
    def test_it_is_an_optimizer_with_the_groups_of_inner(self, make: Make) -> None:
        weights = parameter(1.0)
        inner = SGD([{"params": [weights], "lr": 0.5}], lr=0.1, momentum=0.9)
        optimizer = make(Alone(), inner)
        assert isinstance(optimizer, Optimizer)
        assert optimizer.param_groups is inner.param_groups
        assert optimizer.state is inner.state
        assert optimizer.defaults is inner.defaults
        inner.load_state_dict(inner.state_dict())  # torch makes a new list of groups
        assert optimizer.param_groups is inner.param_groups
        optimizer.param_groups[0]["lr"] = 0.25
        stepped(optimizer, 1.0, samples=4)
        assert weights.item() == 0.75
        assert "lr: 0.25" in repr(optimizer)

    @both
    def test_a_parameter_group_is_refused_with_advice(self, make: Make) -> None:
        optimizer = make(Alone(), SGD([parameter(1.0)], lr=0.1))
        with pytest.raises(RuntimeError, match=r"Add the group to `inner`.*on all peers"):
            optimizer.add_param_group({"params": [parameter(2.0)]})
        assert len(optimizer.param_groups) == 1

    @both
    def test_it_is_neither_pickled_nor_copied(self, make: Make) -> None:
        optimizer = make(Alone(), SGD([parameter(1.0)], lr=0.1))
        for act in (pickle.dumps, copy.deepcopy, copy.copy):
            with pytest.raises(TypeError, match=r"cannot be pickled or copied.*state_dict"):
                act(optimizer)

    @both
    def test_hooks_of_steps_are_called(self, make: Make) -> None:
        optimizer = make(Alone(), SGD([parameter(1.0)], lr=0.1))
        called: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        assert stepped(optimizer, 1.0, samples=4).updated
        assert called == ["before", "after"]


@both
@pytest.mark.parametrize(
    ("averager", "words"),
    [
        (object.__new__(DecentralizedAverager), r"p2pavg\.blocking\.open_averager"),
        (
            open_averager(p2pavg.AveragingConfig(run_id="x")),
            r"not open yet.*with p2pavg\.blocking\.open_averager",
        ),
        ("averager", r"got str.*p2pavg\.blocking"),
    ],
    ids=["for trio", "not open", "a text"],
)
def test_another_averager_is_refused(make: Make, averager: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        make(averager, SGD([parameter(1.0)], lr=0.1))


class TestClosure:
    @both
    def test_step_with_a_closure_returns_its_loss_and_keeps_the_report(self, make: Make) -> None:
        model = plain()
        optimizer = make(Alone(), SGD(model.parameters(), lr=0.1), batch_size=4)
        calls = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3)).square().mean()
            torch.autograd.backward(loss)
            calls.append(loss)
            return cast(torch.Tensor, loss)

        assert optimizer.report is None
        assert not optimizer.updated
        with torch.no_grad():
            loss = optimizer.step(closure)
        assert loss is calls[0]
        assert len(calls) == 1
        assert optimizer.updated
        assert optimizer.report is not None
        assert optimizer.report.epoch == 1

    @both
    def test_the_kept_report_has_no_tensors(self, make: Make) -> None:
        """They are as large as the model, and would live until the next step."""
        optimizer = make(Alone(), SGD([parameter(1.0)], lr=0.1))
        report = stepped(optimizer, 1.0, samples=4)
        assert isinstance(report.result, Success)
        assert len(report.result.averaged) == 1
        assert optimizer.report is not None
        assert isinstance(optimizer.report.result, Success)
        assert optimizer.report.result.averaged == []


class TestSamples:
    @both
    def test_a_call_without_samples_counts_batch_size(self, make: Make) -> None:
        averager = Alone()
        optimizer = make(averager, SGD([parameter(1.0)], lr=0.1), batch_size=6)
        assert weight_of(stepped(optimizer, 1.0)) == 6
        assert weight_of(stepped(optimizer, 1.0, samples=9)) == 9

    @both
    def test_a_call_without_samples_asks_the_hook(self, make: Make) -> None:
        counts = iter([7.0, 5.0])
        optimizer = make(Alone(), SGD([parameter(1.0)], lr=0.1), samples_of=lambda: next(counts))
        assert [weight_of(stepped(optimizer, 1.0)) for _ in range(2)] == [7, 5]

    @both
    def test_an_unknown_number_of_samples_is_an_error_with_advice(self, make: Make) -> None:
        optimizer = make(Alone(), SGD([parameter(1.0)], lr=0.1))
        with pytest.raises(TypeError, match=r"samples=len\(inputs\).*batch_size= or samples_of="):
            stepped(optimizer, 1.0)

    @both
    @pytest.mark.parametrize(
        ("given", "error", "named"),
        [
            ({"batch_size": 0}, ValueError, "batch_size"),
            ({"batch_size": 4, "samples_of": lambda: 4}, ValueError, "batch_size or samples_of"),
            ({"samples_of": 4}, TypeError, "samples_of"),
            ({"accumulate": 0}, ValueError, "accumulate"),
            ({"accumulate": 1.5}, ValueError, "accumulate"),
        ],
    )
    def test_wrong_arguments_are_named(
        self, make: Make, given: dict[str, Any], error: type[Exception], named: str
    ) -> None:
        with pytest.raises(error, match=named):
            make(Alone(), SGD([parameter(1.0)], lr=0.1), **given)


def weight_of(report: StepReport) -> float:
    assert isinstance(report.result, Success)
    return report.result.total_weight


class TestAccumulation:
    @both
    def test_passes_are_joined_as_in_a_loop_of_torch(self, make: Make) -> None:
        """The sum over k passes of loss / k, and the samples of all of them."""
        model, reference = plain(), plain()
        optimizer = (
            make(Alone(), SGD(model.parameters(), lr=0.1), accumulate=3, batch_size=2, target_batch_size=6)
            if make is large_batch
            else make(Alone(), SGD(model.parameters(), lr=0.1), accumulate=3, batch_size=2)
        )
        plain_optimizer = SGD(reference.parameters(), lr=0.1)
        inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
        reports = []
        for part in torch.split(inputs, 2):
            optimizer.zero_grad()  # changes nothing between the passes
            torch.autograd.backward(model(part).square().mean() / 3)
            reports.append(optimizer.step(metrics={"loss": float(part.sum())}))
            torch.autograd.backward(reference(part).square().mean() / 3)
        plain_optimizer.step()
        assert [report.updated for report in reports] == [False, False, True]
        assert weight_of(reports[-1]) == 6
        for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, expected)
        optimizer.zero_grad()
        assert all(weights.grad is None for weights in model.parameters())

    @both
    def test_all_ranks_report_a_pass_alike_while_the_round_of_one_goes_on(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise they take part in different collectives, and wait for each other for ever."""
        optimizer = make(Alone(), SGD([parameter(1.0)], lr=0.1), accumulate=2, batch_size=2)
        decided: list[object] = []

        def as_the_first(decide: Any) -> Any:
            decided.append(decide)
            return decide()

        monkeypatch.setattr(optimizer.ranks, "as_the_first", as_the_first)
        monkeypatch.setattr(optimizer.ranks, "all_agree", lambda _: False)  # a round runs on another rank
        stepped(optimizer, 1.0)
        assert optimizer._together.left_behind not in decided


class TestSchedulers:
    @both
    def test_a_scheduler_can_wrap_it(self, make: Make) -> None:
        weights = parameter(0.0)
        optimizer = make(Alone(), SGD([weights], lr=1.0), batch_size=4)
        scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
        moved = []
        for _ in range(3):
            before = weights.item()
            report = stepped(optimizer, 1.0)
            moved.append(before - weights.item())
            assert report.learning_rates == (moved[-1],)
            if optimizer.updated:
                scheduler.step()
        assert moved == [1.0, 0.5, 0.25]
        assert scheduler.get_last_lr() == [0.125]

    def test_a_rate_that_is_set_by_hand_is_told_to_the_other_peers(self) -> None:
        averager, talk = with_talk()
        optimizer = large_batch(averager, SGD([parameter(0.0)], lr=1.0), batch_size=4)
        stepped(optimizer, 1.0)
        optimizer.param_groups[0]["lr"] = 0.125
        assert stepped(optimizer, 1.0).learning_rates == (0.125,)
        for _ in range(10):
            stepped(optimizer, 1.0)
        told = [rate.text for rate in RecipeRecord.decode(talk.mine).rates]
        assert told == ["lr 1", "lr 0.125"]


def through_a_file(state: Mapping[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(dict(state), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, dict)
    return loaded


class TestStates:
    @pytest.mark.parametrize("kind", ["averaged", "diloco"])
    def test_a_state_goes_through_a_file_that_holds_weights_alone(self, kind: str) -> None:
        def made(model: nn.Module) -> Any:
            inner = AdamW(model.parameters(), lr=0.1)
            scheduler = LambdaLR(inner, lambda step: 1 / (1 + step))
            averager = cast(Averager, Alone())
            if kind == "averaged":
                return AveragedOptimizer(
                    inner, averager, target_batch_size=4, peers_to_start=2, scheduler=scheduler
                )
            return diloco(inner, averager, sync_every=1, peers_to_start=2, scheduler=scheduler)

        model, other = plain(), plain(seed=9)
        optimizer, loaded = made(model), made(other)
        for _ in range(3):
            batch(model, optimizer)
        saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        other.load_state_dict(saved["model"])
        loaded.load_state_dict(saved["optimizer"])
        assert loaded.lineage == optimizer.lineage
        for _ in range(2):
            batch(model, optimizer)
            batch(other, loaded)
        assert loaded.lineage == optimizer.lineage
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))

    @both
    def test_hooks_of_states_are_called(self, make: Make) -> None:
        optimizer = make(Alone(), SGD([parameter(1.0)], lr=0.1))
        called: list[str] = []
        optimizer.register_state_dict_pre_hook(lambda _: called.append("saves"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state: {name: kept for name, kept in state.items() if name != "more"}
        )
        optimizer.register_load_state_dict_post_hook(lambda _: called.append("loaded"))
        state = optimizer.state_dict()
        assert state["more"] == 1
        optimizer.load_state_dict(state)
        assert called == ["saves", "loaded"]

    @both
    def test_a_state_without_an_update_belongs_to_no_parameters(self, make: Make) -> None:
        """Frameworks load a new optimizer's own state into it, before the program loads its model."""
        model = plain()
        optimizer = make(Alone(), SGD(model.parameters(), lr=0.1))
        optimizer.load_state_dict(optimizer.state_dict())
        model.load_state_dict(plain(seed=8).state_dict())
        other = plain(seed=8)
        expected = make(Alone(), SGD(other.parameters(), lr=0.1))
        batch(model, optimizer)
        batch(other, expected)
        assert optimizer.lineage == expected.lineage
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))


class TestScaledGradients:
    @both
    @pytest.mark.parametrize("unscaled", [True, False], ids=["unscaled", "scaled"])
    def test_a_scaler_steps_it(self, make: Make, unscaled: bool) -> None:
        model, reference = plain(), plain()
        optimizer = make(Alone(), SGD(model.parameters(), lr=0.1), batch_size=4)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        torch.autograd.backward(scaler.scale(model(torch.ones(4, 3)).square().mean()))
        if unscaled:
            scaler.unscale_(optimizer)
        report = scaler.step(optimizer)
        scaler.update()
        assert isinstance(report, StepReport)
        assert report.updated
        assert report.skipped is None
        plain_optimizer = SGD(reference.parameters(), lr=0.1)
        torch.autograd.backward(reference(torch.ones(4, 3)).square().mean())
        plain_optimizer.step()
        for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, expected)

    @both
    @pytest.mark.parametrize("unscaled", [True, False], ids=["unscaled", "scaled"])
    def test_a_batch_that_overflows_is_left_out_and_reported(self, make: Make, unscaled: bool) -> None:
        averager, weights = Alone(), parameter(1.0)
        optimizer = make(averager, SGD([weights], lr=0.1), batch_size=4)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        torch.autograd.backward(scaler.scale((weights * float("inf")).sum()))
        if unscaled:
            scaler.unscale_(optimizer)
        report = scaler.step(optimizer)
        scaler.update()
        assert isinstance(report, StepReport)
        assert report.skipped is not None
        assert "GradScaler" in report.skipped
        assert not report.updated
        assert (weights.item(), averager.weight, optimizer.epoch) == (1.0, 0.0, 0)
        assert scaler.get_scale() == 512.0
        assert stepped(optimizer, 1.0).updated

    @both
    def test_accumulated_passes_cannot_be_scaled_one_by_one(self, make: Make) -> None:
        weights = parameter(1.0)
        optimizer = make(Alone(), SGD([weights], lr=0.1), batch_size=4, accumulate=2)
        scaler = torch.amp.GradScaler("cpu")
        torch.autograd.backward(scaler.scale(weights.sum()))
        with pytest.raises(ValueError, match=r"scaler\.step once"):
            scaler.step(optimizer)


class TestMeasurements:
    def test_a_gradient_that_is_not_finite_is_named(self) -> None:
        model = plain()
        optimizer = large_batch(Alone(), SGD(model.parameters(), lr=0.1), model=model, batch_size=4)
        batch(model, optimizer)
        torch.autograd.backward(model(torch.ones(4, 3)).sum())
        cast(torch.Tensor, model[1].bias.grad).fill_(float("nan"))  # type: ignore[index]
        with pytest.raises(p2pavg.AccumulateError, match=r"^the gradient of 1\.bias holds NaN or Inf"):
            optimizer.step()

    def test_a_parameter_that_an_inner_step_destroys_is_named(self) -> None:
        model = plain()
        optimizer = local(Alone(), SGD(model.parameters(), lr=0.1), model=model, batch_size=4)
        batch(model, optimizer)
        torch.autograd.backward(model(torch.ones(4, 3)).sum())
        cast(torch.Tensor, model[1].bias.grad).fill_(float("inf"))  # type: ignore[index]
        restored = optimizer.step().restored
        assert restored is not None
        assert restored.startswith("1.bias was NaN or infinite")

    @both
    def test_the_size_of_an_update_is_measured_if_asked_for(self, make: Make) -> None:
        for asked, norm in ((False, None), (True, 0.5)):
            optimizer = make(Alone(), SGD([parameter(1.0, 1.0)], lr=0.1), measure_updates=asked)
            for weights in optimizer.param_groups[0]["params"]:
                weights.grad = torch.tensor([3.0, 4.0])
            report = optimizer.step(samples=4)
            assert report.update_norm == (None if norm is None else pytest.approx(norm))

    @both
    def test_noted_measurements_travel_with_the_next_step(self, make: Make) -> None:
        averager = Alone()
        optimizer = make(averager, SGD([parameter(1.0)], lr=0.1), batch_size=4)
        optimizer.note({"held_out": 2.0, "loss": 9.0})
        stepped(optimizer, 1.0, metrics={"loss": 3.0})
        assert averager._taken.metrics.means | {"samples_per_second": 0} == {
            "held_out": 2.0,
            "loss": 3.0,
            "samples_per_second": 0,
        }
        stepped(optimizer, 1.0, metrics={"loss": 4.0})
        assert "held_out" not in averager._taken.metrics.means

    @both
    def test_a_noted_measurement_that_is_not_finite_is_left_out_with_a_warning(
        self, make: Make, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It was measured on other data, so it says nothing of the batch."""
        averager = Alone()
        optimizer = make(averager, SGD([parameter(1.0)], lr=0.1), batch_size=4)
        optimizer.note({"held_out": float("nan"), "other": 1.0})
        assert "'held_out' is nan" in caplog.text
        assert stepped(optimizer, 1.0).updated
        assert averager._taken.metrics.means.keys() == {"other", "samples_per_second"}
