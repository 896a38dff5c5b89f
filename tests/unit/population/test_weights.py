"""A member takes another one's state in whole, or not at all."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from p2pavg.base.errors import ConfigError, StateError
from p2pavg.population.history import Ancestor
from p2pavg.population.weights import Weights
from p2pavg.state.snapshot import Content, copy_of, read

GENERATIONS = (Ancestor("a", 1, 10, 0.5, {"lr": 0.1}),)


def member(seed: int, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, Weights]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.randn(8, 3)).square().mean())
        optimizer.step()
    return model, optimizer, Weights(model, optimizer, options.get("apply"), ["lr", "weight_decay"])


def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [each[name] for each in optimizer.state.values() for name in sorted(each)]
    return [tensor.detach().clone() for tensor in (*model.state_dict().values(), *moments)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_parameters_buffers_and_moments_come_over_to_the_bit() -> None:
    model, optimizer, weights = member(0)
    its_model, its_optimizer, its = member(1)
    data = copy_of(its.content(GENERATIONS))
    loaded = weights.prepare(read(data))
    assert not same(state(model, optimizer), state(its_model, its_optimizer))
    loaded.take()
    assert same(state(model, optimizer), state(its_model, its_optimizer))
    assert loaded.ancestors == GENERATIONS


def test_a_copy_does_not_change_with_its_donor() -> None:
    model, optimizer, weights = member(0)
    _, its_optimizer, its = member(1)
    weights.prepare(its.content(GENERATIONS)).take()
    before = state(model, optimizer)
    for group in its_optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.zero_()
    for moments in its_optimizer.state.values():
        moments["exp_avg"].zero_()
    assert same(before, state(model, optimizer))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: replace(c, values={**c.values, "kind": "parameter/"}), "no state of a member"),
        (lambda c: replace(c, values={**c.values, "more": 1}), "no state of a member"),
        (lambda c: replace(c, values={**c.values, "optimizer": 1}), "no optimizer"),
        (lambda c: replace(c, values={**c.values, "ancestors": [1]}), "a generation that is malformed"),
        (lambda c: replace(c, tensors=_without(c, "parameter/0.bias")), "'0.bias'"),
        (lambda c: replace(c, tensors={**c.tensors, "parameter/9": torch.ones(1)}), "lacks"),
        (lambda c: replace(c, tensors={**c.tensors, "parameter/0.bias": torch.ones(5)}), "has the shape"),
        (lambda c: replace(c, tensors={**c.tensors, "parameter/0.bias": torch.full((4,), math.nan)}), "NaN"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(spoil: Any, message: str) -> None:
    model, optimizer, weights = member(0)
    _, _, its = member(1)
    before = state(model, optimizer)
    with pytest.raises(StateError, match=message):
        weights.prepare(spoil(its.content(GENERATIONS)))
    assert same(before, state(model, optimizer))


def _without(content: Content, name: str) -> dict[str, torch.Tensor]:
    return {each: tensor for each, tensor in content.tensors.items() if each != name}


OPTIONS = {"maximize": True, "weight_decay": 1e3, "betas": (0.0, 0.0), "eps": 1e3, "amsgrad": True, "lr": 1e3}


@pytest.mark.parametrize(
    "changed", [OPTIONS, {"lr": "fast"}, {"betas": None}], ids=["numbers", "text", "none"]
)
def test_no_option_of_the_optimizer_is_taken_from_another_member(changed: dict[str, Any]) -> None:
    """Those that the population explores come with the donor's signed word, inside their ranges."""
    _, optimizer, weights = member(0)
    _, its_optimizer, its = member(1)
    own = [{**group, "params": []} for group in optimizer.param_groups]
    content = its.content(GENERATIONS)
    told = copy.deepcopy(dict(content.values))
    told["optimizer"]["param_groups"][0].update(changed)
    weights.prepare(replace(content, values=told)).take()
    assert [{**group, "params": []} for group in optimizer.param_groups] == own
    assert all(
        torch.equal(mine["exp_avg"], theirs["exp_avg"])
        for mine, theirs in zip(optimizer.state.values(), its_optimizer.state.values(), strict=True)
    )


def test_counts_in_the_groups_come_with_the_moments() -> None:
    model, _, weights = member(0)
    other = member(1)[2].content(GENERATIONS)
    told = copy.deepcopy(dict(other.values))
    told["optimizer"]["param_groups"][0]["step"] = 3
    with pytest.raises(StateError, match="'step'"):  # torch's classes count elsewhere
        weights.prepare(replace(other, values=told))

    class Counting(torch.optim.AdamW):
        pass

    own = Counting(model.parameters(), lr=0.1)
    counting = Weights(model, own, None, ["lr"])
    counting.prepare(replace(other, values=told)).take()
    assert own.param_groups[0]["step"] == 3
    assert own.param_groups[0]["lr"] == 0.1


def test_a_tensor_of_another_member_is_not_copied_again_and_again() -> None:
    model, optimizer, weights = member(0)
    content = member(1)[2].content(GENERATIONS)
    told = copy.deepcopy(dict(content.values))
    reference = {"p2pavg/tensor": "optimizer/state/0/exp_avg"}
    told["optimizer"]["state"] = {0: {"more": [dict(reference) for _ in range(1000)]}}
    before = state(model, optimizer)
    with pytest.raises(StateError, match="refers twice"):
        weights.prepare(replace(content, values=told))
    assert same(before, state(model, optimizer))


def test_nothing_is_copied_before_a_state_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, content = member(0)[2], member(1)[2].content(GENERATIONS)
    copied: list[int] = []
    clone = torch.Tensor.clone

    def counted(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        copied.append(tensor.numel())
        return clone(tensor, **options)

    monkeypatch.setattr(torch.Tensor, "clone", counted)
    loaded = weights.prepare(content)
    assert max(copied, default=0) <= 1, "only counts of steps are copied for the trial"
    loaded.take()
    assert max(copied) > 1


def test_the_own_state_comes_back_also_if_it_is_not_finite() -> None:
    model, optimizer, weights = member(0)
    with torch.no_grad():
        next(model.parameters()).fill_(math.inf)
    own = copy_of(weights.content(GENERATIONS))
    before = state(model, optimizer)
    weights.prepare(member(1)[2].content(GENERATIONS)).take()
    weights.restore(read(own))
    assert same(before, state(model, optimizer))


def test_hyperparameters_are_set_in_all_groups_or_by_the_caller() -> None:
    _, optimizer, weights = member(0)
    weights.apply({"lr": 0.5, "weight_decay": 0.25})
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0.25)]
    taken: dict[str, Any] = {}
    model = torch.nn.Linear(1, 1)
    own = Weights(model, torch.optim.SGD(model.parameters(), lr=0.1), taken.update, ["dropout"])
    own.apply({"dropout": 0.3})
    assert taken == {"dropout": 0.3}


def test_what_cannot_be_copied_is_refused_when_the_member_begins() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrong: list[tuple[Any, Any, str, type[Exception], str]] = [
        (model, optimizer, "dropout", ConfigError, "SGD has no option 'dropout': give apply="),
        (optimizer, optimizer, "lr", TypeError, r"model must be a torch\.nn\.Module"),
        (model, model, "lr", TypeError, r"optimizer must be a torch\.optim\.Optimizer"),
    ]
    for its_model, its_optimizer, name, kind, message in wrong:
        with pytest.raises(kind, match=message):
            Weights(its_model, its_optimizer, None, [name])
    optimizer.param_groups[0]["filter"] = print
    with pytest.raises(StateError, match="'param_groups/0/filter'"):
        Weights(model, optimizer, None, ["lr"])
