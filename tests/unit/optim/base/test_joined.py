"""Several inner optimizers as one: disjoint parameters, steps, states, schedules, and both optimizers of a run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from p2pavg.base.errors import StateError
from p2pavg.optim import JoinedOptimizer
from p2pavg.optim.base.recipe import hyperparameters
from p2pavg.optim.catching_up.state_check import checked_optimizer, checked_schedule
from tests.unit.optim.fakes import Alone, Make, both, local, parameter
from tests.unit.optim.loops import batch, plain


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    matrices = [weights for weights in model.parameters() if weights.ndim == 2]
    others = [weights for weights in model.parameters() if weights.ndim != 2]
    return [Muon(matrices, lr=0.02), AdamW(others, lr=0.01)]


def step_of(model: nn.Module, optimizers: list[Optimizer], seed: int) -> None:
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    torch.autograd.backward(model(inputs).square().mean())
    for optimizer in optimizers:
        optimizer.step()


class TestJoined:
    def test_steps_are_those_of_the_parts(self) -> None:
        one, other = plain(), plain()
        together = [JoinedOptimizer(muon_and_adamw(one))]
        apart = muon_and_adamw(other)
        for seed in range(3):
            step_of(one, list(together), seed)
            step_of(other, apart, seed)
        assert all(map(torch.equal, one.parameters(), other.parameters()))

    def test_state_dict_is_that_of_one_optimizer_and_continues_identically(self) -> None:
        model = plain()
        joined = JoinedOptimizer(muon_and_adamw(model))
        step_of(model, [joined], 0)
        saved = copy.deepcopy({"model": model.state_dict(), "inner": joined.state_dict()})
        assert [group["params"] for group in saved["inner"]["param_groups"]] == [[0, 1], [2, 3]]
        assert set(saved["inner"]["state"][0]) == {"momentum_buffer"}
        assert set(saved["inner"]["state"][3]) == {"step", "exp_avg", "exp_avg_sq"}
        step_of(model, [joined], 1)
        again = plain()
        loaded = JoinedOptimizer(muon_and_adamw(again))
        again.load_state_dict(saved["model"])
        loaded.load_state_dict(saved["inner"])
        step_of(again, [loaded], 1)
        assert all(map(torch.equal, model.parameters(), again.parameters()))

    def test_a_state_of_another_number_of_groups_is_refused(self) -> None:
        model = plain()
        joined = JoinedOptimizer(muon_and_adamw(model))
        with pytest.raises(ValueError, match="2 parameter groups, the state 1"):
            joined.load_state_dict(SGD(model.parameters(), lr=0.1).state_dict())

    def test_a_schedule_sets_the_rates_of_all(self) -> None:
        parts = muon_and_adamw(plain())
        scheduler = LambdaLR(JoinedOptimizer(parts), lambda step: 0.5**step)
        scheduler.optimizer.step()
        scheduler.step()
        assert [part.param_groups[0]["lr"] for part in parts] == [0.01, 0.005]

    def test_states_can_be_read_and_cleared(self) -> None:
        model = plain()
        joined = JoinedOptimizer(muon_and_adamw(model))
        assert not joined.state
        step_of(model, [joined], 0)
        assert len(joined.state) == 4
        assert all(weights in joined.state for weights in model.parameters())
        joined.state.clear()
        assert not joined.state

    def test_hyperparameters_are_those_of_each(self) -> None:
        names = dict(hyperparameters(JoinedOptimizer(muon_and_adamw(plain()))))
        assert names["lr of group 0"] == 0.02
        assert names["lr of group 1"] == 0.01
        assert "ns_steps of group 0" in names
        assert "decoupled_weight_decay of group 1" not in names, "implied by AdamW"

    def test_a_group_cannot_be_added(self) -> None:
        with pytest.raises(RuntimeError, match="one of the joined optimizers"):
            JoinedOptimizer([SGD([parameter(1.0)])]).add_param_group({"params": [parameter(1.0)]})


class TestWrongParts:
    def test_a_parameter_of_two_optimizers_is_named(self) -> None:
        model = plain()
        inner = [SGD(model.parameters(), lr=0.1), AdamW([model[0].weight])]  # type: ignore[index]
        with pytest.raises(
            ValueError, match=r"parameter '0\.weight' has two optimizers, inner\[0\] and inner\[1\]"
        ):
            JoinedOptimizer(inner, model)
        with pytest.raises(
            ValueError, match=r"parameter 0 of inner\[1\], of shape \(4, 3\), has two optimizers"
        ):
            JoinedOptimizer(inner)

    @both
    def test_a_parameter_without_an_optimizer_is_named(self, make: Make) -> None:
        model = plain()
        inner = muon_and_adamw(model)
        del inner[1].param_groups[0]["params"][0]
        with pytest.raises(ValueError, match=r"parameter '0\.bias' has no optimizer"):
            make(Alone(), inner, model=model)
        model[0].bias.requires_grad_(False)  # type: ignore[index]
        make(Alone(), inner, model=model)

    @both
    @pytest.mark.parametrize(
        ("inner", "named"),
        [
            ([], "at least one"),
            ([3], r"inner\[0\] must be a torch optimizer, got int"),
            ([torch.optim.LBFGS([parameter(1.0)])], r"inner\[0\] .* LBFGS"),
        ],
    )
    def test_other_things_are_refused(self, make: Make, inner: list[Any], named: str) -> None:
        with pytest.raises((TypeError, ValueError), match=named):
            make(Alone(), inner)


class TestRuns:
    @both
    def test_a_run_steps_them_and_saves_their_states(self, make: Make) -> None:
        def trained(updates: int, saved: dict[str, Any] | None = None) -> tuple[Any, nn.Module]:
            model = plain()
            optimizer = make(Alone(compression=None), muon_and_adamw(model), model=model)
            if saved is not None:
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
            while optimizer.epoch < updates:
                batch(model, optimizer)
            return optimizer, model

        first, model = trained(2)
        saved = {"model": model.state_dict(), "optimizer": first.state_dict()}
        stopped, at_once = trained(4, saved), trained(4)
        assert all(map(torch.equal, stopped[1].parameters(), at_once[1].parameters()))
        assert not any(map(torch.equal, at_once[1].parameters(), plain().parameters()))

    @both
    def test_other_parts_are_another_recipe(self, make: Make) -> None:
        def lineage(rate: float, *, reverse: bool = False) -> object:
            inner = muon_and_adamw(plain())
            inner[1].param_groups[0]["lr"] = rate
            return make(Alone(), inner[:: -1 if reverse else 1]).lineage

        assert lineage(0.01) == lineage(0.01)
        assert len({lineage(0.01), lineage(0.02), lineage(0.01, reverse=True)}) == 3

    def test_a_nan_step_mends_the_states_of_all(self) -> None:
        model = plain()
        inner = [SGD([model[0].weight], lr=0.1, momentum=0.9), Adagrad(list(model.parameters())[1:])]  # type: ignore[index]
        optimizer = local(Alone(compression=None), inner, sync_every=3, model=model)
        batch(model, optimizer)
        optimizer.zero_grad()
        for weights in model.parameters():
            weights.grad = torch.full_like(weights, float("nan"))
        assert optimizer.step(samples=4).restored is not None
        for state in optimizer.inner.state.values():
            assert all(bool(value.isfinite().all()) for value in state.values() if torch.is_tensor(value))
        assert batch(model, optimizer).restored is None


class TestFetchedStates:
    def test_a_state_of_all_is_checked_part_by_part(self) -> None:
        model = plain()
        joined = JoinedOptimizer(muon_and_adamw(model))
        step_of(model, [joined], 0)
        saved = joined.state_dict()
        fresh = JoinedOptimizer(muon_and_adamw(plain()))
        checked = checked_optimizer(fresh, copy.deepcopy(saved))
        fresh.load_state_dict(checked)
        assert torch.equal(
            fresh.state_dict()["state"][0]["momentum_buffer"], saved["state"][0]["momentum_buffer"]
        )
        for wrong in ("momentum_buffer", "exp_avg"):
            bad = copy.deepcopy(saved)
            number = 0 if wrong == "momentum_buffer" else 2
            bad["state"][number][wrong] = torch.zeros(7)
            with pytest.raises(StateError, match=wrong):
                checked_optimizer(fresh, bad)

    def test_a_schedule_of_all_is_tried(self) -> None:
        joined = JoinedOptimizer(muon_and_adamw(plain()))
        scheduler = LambdaLR(joined, lambda step: 1.0 / (1 + step))
        saved = scheduler.state_dict()
        checked_schedule(scheduler, joined, joined.state_dict()["param_groups"], copy.deepcopy(saved))
        bad = {**copy.deepcopy(saved), "base_lrs": [0.1]}
        with pytest.raises(StateError):
            checked_schedule(scheduler, joined, joined.state_dict()["param_groups"], bad)
