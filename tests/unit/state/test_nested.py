"""State dicts of optimizers and schedulers as tensors and plain values."""

from __future__ import annotations

from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import optim
from torch.optim import lr_scheduler as schedulers

from p2pavg.base.errors import StateError
from p2pavg.optim.local.outer import FedAdagrad, FedAdam, FedYogi
from p2pavg.state.nested import flatten, unflatten
from p2pavg.state.snapshot import Content, copy_of, read
from p2pavg.state.values import MAX_SCATTERED, pack_values
from tests.unit.state import contents
from tests.unit.state.contents import same

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda params: optim.SGD(params, lr=0.1),
    "SGD with momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda params: optim.Adam(params, lr=0.1),
    "Adam with a tensor's rate": lambda params: optim.Adam(params, lr=torch.tensor(0.1)),
    "AdamW with amsgrad": lambda params: optim.AdamW(params, lr=0.1, amsgrad=True),
    "Adafactor": lambda params: optim.Adafactor(params, lr=0.1),
    "RMSprop": lambda params: optim.RMSprop(params, lr=0.1, momentum=0.5, centered=True),
    "NAdam": lambda params: optim.NAdam(params, lr=0.1),
    "FedAdam": lambda params: FedAdam(params, lr=0.1),
    "FedYogi": lambda params: FedYogi(params, lr=0.1),
    "FedAdagrad": lambda params: FedAdagrad(params, lr=0.1),
}
SCHEDULERS: dict[str, Callable[[optim.Optimizer], schedulers.LRScheduler]] = {
    "StepLR": lambda optimizer: schedulers.StepLR(optimizer, 2),
    "MultiStepLR": lambda optimizer: schedulers.MultiStepLR(optimizer, [1, 3, 3]),
    "CosineAnnealingLR": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 10),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.5, 10),
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 0.9**step),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 2),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, 0.1, total_iters=2), schedulers.CosineAnnealingLR(optimizer, 10)],
        [2],
    ),
}


class Training:
    """A small model with an optimizer and a scheduler."""

    def __init__(
        self,
        make: Callable[[Any], optim.Optimizer],
        schedule: Callable[[optim.Optimizer], schedulers.LRScheduler] = SCHEDULERS["StepLR"],
    ) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        first, second = self.model
        self.optimizer = make([{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.2}])
        self.scheduler = schedule(self.optimizer)

    def train(self, steps: int = 3) -> None:
        for step in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.full((5, 4), float(step))).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()

    def take(self, other: Training) -> None:
        """Take the state of another training by way of a snapshot."""
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(by_snapshot(other.optimizer.state_dict()))
        self.scheduler.load_state_dict(by_snapshot(other.scheduler.state_dict()))


def by_snapshot(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict that was in a snapshot whose bytes cannot be written to."""
    tensors, values = flatten(state)
    content = read(bytes(copy_of(Content(tensors, values))))
    return unflatten(content.tensors, content.values)


def plainly(value: Any) -> Any:
    """Return a value with plain numbers in place of numpy's."""
    if isinstance(value, dict):
        return type(value)({key: plainly(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(map(plainly, value))
    return value.item() if isinstance(value, np.generic) else value


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_state_of_an_optimizer_comes_back(make: Callable[[Any], optim.Optimizer]) -> None:
    one, other = Training(make), Training(make)
    one.train()
    assert same(by_snapshot(one.optimizer.state_dict()), one.optimizer.state_dict())
    other.take(one)
    for training in (one, other):
        training.train()
    assert same(other.optimizer.state_dict(), one.optimizer.state_dict())
    assert all(map(torch.equal, one.model.parameters(), other.model.parameters()))


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR's own call
@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS)
def test_the_state_of_a_scheduler_comes_back(
    schedule: Callable[[optim.Optimizer], schedulers.LRScheduler],
) -> None:
    one, other = (Training(OPTIMIZERS["SGD with momentum"], schedule) for _ in range(2))
    one.train()
    state = one.scheduler.state_dict()
    assert same(by_snapshot(state), plainly(state))
    other.take(one)
    for training in (one, other):
        training.train()
    assert same(plainly(other.scheduler.state_dict()), plainly(one.scheduler.state_dict()))
    assert all(map(torch.equal, one.model.parameters(), other.model.parameters()))


def test_a_restored_state_shares_no_memory_with_the_snapshot() -> None:
    training = Training(OPTIMIZERS["Adam"])
    training.train()
    tensors, values = flatten(training.optimizer.state_dict())
    buffer = copy_of(Content(tensors, values))
    before = bytes(buffer)
    content = read(buffer)
    training.optimizer.load_state_dict(unflatten(content.tensors, content.values))
    training.train()
    assert buffer == before


def test_tensors_are_named_by_their_path() -> None:
    training = Training(OPTIMIZERS["SGD with momentum"])
    training.train()
    tensors, _ = flatten(training.optimizer.state_dict(), "inner")
    assert sorted(tensors) == [f"inner/state/{number}/momentum_buffer" for number in range(4)]


def test_a_value_that_is_not_plain_is_refused_by_its_path() -> None:
    state = {"state": {}, "param_groups": [{"lr": 0.1, "hook": test_tensors_are_named_by_their_path}]}
    with pytest.raises(StateError) as caught:
        flatten(state)
    assert str(caught.value) == (
        "the optimizer's state 'param_groups/0/hook' is a function, which cannot be saved"
    )
    for value, pattern in [
        (np.zeros(3), "'x' is a ndarray|'x' is an ndarray"),
        (np.longdouble(1), "'x' is a longdouble"),
        ({2.5: 1}, "'x' has the key 2.5"),
        ({"p2pavg/tensor": 1}, "'x' has the key 'p2pavg/tensor'"),
        (object(), "'x' is an object"),
    ]:
        with pytest.raises(StateError, match=pattern):
            flatten({"x": value}, "scheduler")


def test_dicts_become_plain_and_counters_stay() -> None:
    values = {"a": OrderedDict(x=1), "b": Counter([2, 2]), "c": torch.Size([1, 2])}
    assert same(by_snapshot(values), {"a": {"x": 1}, "b": Counter({2: 2}), "c": (1, 2)})


def test_keys_that_look_alike_name_different_tensors() -> None:
    inner = {0: torch.ones(1), "0": torch.ones(2), "0/y": torch.ones(3)}
    state = {"x": inner, "x/0": {"y": torch.ones(4)}}
    assert same(by_snapshot(state), state)
    backwards = {"x/0": {"y": torch.ones(4)}, "x": {key: inner[key] for key in reversed(inner)}}
    assert copy_of(Content(*flatten(backwards))) == copy_of(Content(*flatten(state)))


@given(contents.values, st.dictionaries(contents.names, contents.tensor(), max_size=3))
def test_any_state_comes_back(values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    state = {"values": values, "tensors": tensors, "list": [tensors, (values, *tensors.values())]}
    assert same(by_snapshot(state), state)


@pytest.mark.parametrize(
    "values",
    [
        {"x": {"p2pavg/tensor": "missing"}},
        {"x": {"p2pavg/tensor": ["t"]}},
        {"x": {"p2pavg/tensor": "t", "y": 1}},
        {"p2pavg/tensor": 3},
        {"x": {"p2pavg/counter": 3}},
        {"x": {"p2pavg/counter": {"a": "b"}}},
        {"x": {"p2pavg/counter": {"a": 1}, "y": 1}},
    ],
)
def test_strangers_references_are_checked(values: dict[str, Any]) -> None:
    with pytest.raises(StateError):
        unflatten({"t": torch.ones(1)}, values)


def test_the_values_do_not_grow_with_the_number_of_tensors() -> None:
    def packed(count: int) -> int:
        moments = {"step": torch.zeros(()), "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
        state = {"state": dict.fromkeys(range(count), moments), "param_groups": [{"lr": 0.1}]}
        tensors, values = flatten(state)
        assert len(tensors) == 3 * count
        assert same(unflatten(tensors, values), state)
        return len(pack_values(values))

    assert packed(2_000) == packed(1)


def test_a_tensor_and_a_value_of_one_parameter_come_back_together() -> None:
    state = {"state": {0: {"step": 3, "x": torch.ones(2), "empty": {}, "both": {"y": torch.ones(1), "n": 1}}}}
    tensors, values = flatten(state)
    assert values == {"state": {0: {"both": {"n": 1}, "empty": {}, "step": 3}}}
    back = unflatten(tensors, values)
    assert same(back, state)
    assert list(back["state"][0]) == ["both", "empty", "step", "x"]


@pytest.mark.parametrize("name", ["SGD with momentum", "Adam with a tensor's rate", "Adafactor"])
def test_a_state_in_the_form_of_version_0_2_is_read(name: str) -> None:
    training = Training(OPTIMIZERS[name])
    training.train()
    for state in (training.optimizer.state_dict(), training.scheduler.state_dict()):
        assert same(unflatten(*former(state)), plainly(state))


def former(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a state as version 0.2 wrote it: the values refer to every tensor."""
    tensors: dict[str, torch.Tensor] = {}

    def flat(value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            name = "/".join(map(str, ("optimizer", *path)))
            tensors[name] = value
            return {"p2pavg/tensor": name}
        if isinstance(value, Counter):
            return {"p2pavg/counter": dict(value)}
        if isinstance(value, dict):
            return {key: flat(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(flat(item, (*path, index)) for index, item in enumerate(value))
        return plainly(value)

    return tensors, flat(state, ())


class Kind(IntEnum):
    FIRST = 1


class Name(str, Enum):  # noqa: UP042 - as programs write it
    FIRST = "first"


Pair = namedtuple("Pair", ["low", "high"])


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.array(0.1), 0.1),
        (np.array(3), 3),
        (np.array(True), True),
        (np.float32(0.5), 0.5),
        (np.bool_(False), False),
        (np.float64(0.1), 0.1),
        (np.int64(-3), -3),
        (np.str_("x"), "x"),
        (Kind.FIRST, 1),
        (Name.FIRST, "first"),
        (Pair(0.9, 0.99), (0.9, 0.99)),
        (torch.bfloat16, torch.bfloat16),
        ([torch.float32, {"x": torch.int64}], [torch.float32, {"x": torch.int64}]),
    ],
    ids=str,
)
def test_numbers_of_any_library_and_dtypes_are_values(value: Any, plain: Any) -> None:
    back = by_snapshot({"param_groups": [{"x": value}]})["param_groups"][0]["x"]
    assert type(back) is type(plain)
    assert back == plain


@pytest.mark.parametrize(
    "places",
    [
        {"state": [{"p2pavg/tensor": "optimizer/t"}] * 2},
        {"state": {"a": {"p2pavg/tensor": "optimizer/t"}, "b": {"p2pavg/tensor": "optimizer/t"}}},
        {"state": {number: {"x": {"p2pavg/tensor": "optimizer/t"}} for number in range(1000)}},
    ],
)
@pytest.mark.parametrize("copy", [False, True])
def test_a_tensor_has_one_place(places: dict[str, Any], copy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def clone(_self: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a tensor is copied before the state is accepted")

    monkeypatch.setattr(torch.Tensor, "clone", clone)
    with pytest.raises(StateError, match="refers twice to the tensor 'optimizer/t'"):
        unflatten({"optimizer/t": torch.ones(1)}, places, copy=copy)


@pytest.mark.parametrize(
    ("names", "values", "pattern"),
    [
        (["optimizer"], {}, "has no place"),
        (["optimizer/" + "x/" * 32 + "x"], {}, "has no place"),
        (["optimizer/a", "optimizer/a/b"], {}, "has no place"),
        (["optimizer/a/b", "optimizer/a"], {}, "has no place"),
        (["optimizer/a"], {"a": 1}, "a tensor and another value"),
        (["optimizer/a/b"], {"a": 1}, "within a value"),
        (["optimizer/a/0"], {"a": [1]}, "within a value"),
        (["optimizer/a/b"], {"a": {"p2pavg/counter": {"x": 1}}}, "within a value"),
        ([f"optimizer/state/{2 * number}" for number in range(MAX_SCATTERED + 1)], {}, "integer keys"),
    ],
)
def test_strangers_names_of_places_are_checked(names: list[str], values: Any, pattern: str) -> None:
    with pytest.raises(StateError, match=pattern):
        unflatten({name: torch.ones(1) for name in names}, values)


def test_keys_that_tensors_add_to_those_of_the_values_are_counted_together() -> None:
    values = {"state": {number: {"n": 1} for number in range(100)}}
    more = {f"optimizer/state/{number}/x": torch.ones(1) for number in range(100, MAX_SCATTERED + 100)}
    assert len(unflatten(more, values)["state"]) == MAX_SCATTERED + 100
    del more["optimizer/state/150/x"]
    with pytest.raises(StateError, match="integer keys"):
        unflatten(more, values)


def test_nesting_is_bounded() -> None:
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(StateError, match="nested more than 32 deep"):
        flatten({"x": itself})
