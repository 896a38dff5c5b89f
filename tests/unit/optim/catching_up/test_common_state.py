"""The common state: laid out, taken by another peer, and every hostile content refused before anything changes."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from p2pavg.base.errors import StateError
from p2pavg.optim.catching_up.common_state import MAX_UPDATES, CommonState
from p2pavg.optim.catching_up.state_check import checked_optimizer
from p2pavg.optim.local.outer import FedYogi
from p2pavg.state.nested import flatten, unflatten
from p2pavg.state.snapshot import Content, copy_of, read
from p2pavg.state.values import pack_values
from tests.unit.optim.fakes import Alone, large_batch
from tests.unit.optim.loops import batch, plain, small
from tests.unit.state.contents import same

Inner = Callable[[list[nn.Parameter]], Optimizer]
Schedule = Callable[[Optimizer], LRScheduler | None]


def _in_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:]}]


OPTIMIZERS: dict[str, Inner] = {
    "SGD": lambda parameters: SGD(parameters, 0.1),
    "SGD with momentum": lambda parameters: SGD(parameters, 0.1, momentum=0.9),
    "Adam": lambda parameters: Adam(parameters, 0.01),
    "AdamW": lambda parameters: AdamW(parameters, 0.01, amsgrad=True),
    "NAdam": lambda parameters: NAdam(parameters, 0.01),
    "FedYogi": lambda parameters: FedYogi(parameters, 0.01),
    "groups": lambda parameters: Adam(_in_groups(parameters), torch.tensor(0.01), foreach=False),
}
SCHEDULES: dict[str, Schedule] = {
    "none": lambda _optimizer: None,
    "StepLR": lambda optimizer: StepLR(optimizer, 2),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "MultiStepLR": lambda optimizer: MultiStepLR(optimizer, [1, 1, 3]),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, 10),
    "SequentialLR": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer), StepLR(optimizer, 2)], milestones=[2]
    ),
    "ChainedScheduler": lambda optimizer: ChainedScheduler(
        [LinearLR(optimizer), StepLR(optimizer, 2)], optimizer
    ),
}


class Peer:
    """One peer's model, optimizer and common state."""

    def __init__(self, inner: str, schedule: str = "none", *, steps: int = 0) -> None:
        self.model = small()
        made = OPTIMIZERS[inner](list(self.model.parameters()))
        scheduler = SCHEDULES[schedule](made)
        self.optimizer = large_batch(Alone(), made, scheduler=scheduler, model=self.model)
        self.common = CommonState(
            "parameter/",
            self.optimizer._parameters,
            self.optimizer._parts,
            made,
            scheduler,
            self.optimizer._training,
        )
        for _ in range(steps):
            batch(self.model, self.optimizer)

    def everything(self) -> list[Any]:
        """Return all that a state may change, copied."""
        scheduler = self.optimizer.scheduler
        return copy.deepcopy(
            [
                self.model.state_dict(),
                self.optimizer.inner.state_dict(),
                None if scheduler is None else scheduler.state_dict(),
                self.optimizer.lineage,
            ]
        )

    def sent(self) -> Content:
        """Return its state as another peer receives it."""
        return read(copy_of(self.common.content()))


def takes(peer: Peer, content: Content) -> None:
    peer.common.prepare(content)()


@pytest.mark.parametrize("knows", [True, False])
def test_snapshots_do_not_depend_on_whether_the_model_is_known(knows: bool) -> None:
    """Both peers offer the same bytes, and each takes the other's; a checkpoint has the model's names."""

    def common(model: nn.Module, *, known: bool) -> CommonState:
        inner = SGD(model.parameters(), 0.1, momentum=0.9)
        optimizer = large_batch(Alone(), inner, model=model if known else None)
        batch(model, optimizer)
        training = optimizer._training
        return CommonState("parameter/", optimizer._parameters, optimizer._parts, inner, None, training)

    donor, joiner = common(plain(), known=knows), common(plain(seed=9), known=not knows)
    assert bytes(copy_of(donor.content())) == bytes(copy_of(common(plain(), known=not knows).content()))
    joiner.prepare(read(copy_of(donor.content())))()
    assert same(joiner.content().tensors, donor.content().tensors)
    assert ("parameter/0.weight" in donor.content(named=True).tensors) == knows


every_pair = pytest.mark.parametrize(
    ("inner", "schedule"),
    [*((inner, "StepLR") for inner in OPTIMIZERS), *(("Adam", schedule) for schedule in SCHEDULES)],
)


@every_pair
@pytest.mark.parametrize(("steps", "own_steps"), [(0, 2), (2, 0), (2, 2)])
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_peer_that_takes_a_state_goes_on_like_its_donor(
    inner: str, schedule: str, steps: int, own_steps: int
) -> None:
    donor, joiner = Peer(inner, schedule, steps=steps), Peer(inner, schedule, steps=own_steps)
    takes(joiner, donor.sent())
    gc.collect()
    assert same(joiner.everything()[1:3], donor.everything()[1:3])
    assert joiner.optimizer.lineage == donor.optimizer.lineage
    for _ in range(2):
        for peer in (donor, joiner):
            batch(peer.model, peer.optimizer)
    assert same(joiner.common.content().tensors, donor.common.content().tensors)
    assert joiner.optimizer.lineage == donor.optimizer.lineage


def test_nothing_of_a_state_refers_to_the_bytes_that_it_came_as() -> None:
    donor, joiner = Peer("Adam", steps=2), Peer("Adam")
    data = copy_of(donor.common.content())
    takes(joiner, read(data))
    before = joiner.everything()
    data[:] = bytes(len(data))
    assert same(joiner.everything()[1], before[1])
    assert same(dict(joiner.model.state_dict()), dict(before[0]))


def test_a_peer_keeps_its_own_choice_of_an_implementation() -> None:
    donor, joiner = Peer("Adam", steps=1), Peer("Adam")
    donor.optimizer.param_groups[0] |= {"fused": True, "capturable": True, "foreach": True}
    takes(joiner, donor.sent())
    group = joiner.optimizer.param_groups[0]
    assert (group["fused"], group["capturable"], group["foreach"]) == (None, False, None)
    batch(joiner.model, joiner.optimizer)


def test_option_of_another_version_of_torch_is_left_out() -> None:
    donor, joiner = Peer("Adam", steps=1), Peer("Adam")
    donor.optimizer.param_groups[0]["invented"] = False
    del donor.optimizer.param_groups[0]["decoupled_weight_decay"]
    takes(joiner, donor.sent())
    assert joiner.optimizer.param_groups[0]["decoupled_weight_decay"] is False
    assert "invented" not in joiner.optimizer.param_groups[0]


# ---------------------------------------------------------------------- contents that are refused


def content_of(peer: Peer, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Content:
    """Return a peer's state after a change of its values and tensors."""
    sent = peer.sent()
    told, tensors = copy.deepcopy(dict(sent.values)), dict(sent.tensors)
    change(told, tensors)
    return Content(tensors, told)


def group(told: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = told["optimizer"]["param_groups"][0]
    return found


def step_of(tensors: dict[str, torch.Tensor], value: torch.Tensor) -> None:
    tensors["optimizer/state/0/step"] = value


REFUSED: dict[str, Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]] = {
    "no group": lambda told, _: told["optimizer"].update(param_groups=[]),
    "a group of text": lambda told, _: told["optimizer"].update(param_groups=["params"]),
    "a group without parameters": lambda told, _: group(told).pop("params"),
    "parameters of another number": lambda told, _: group(told).update(params=[0]),
    "parameters that are numbers of another type": lambda told, _: group(told).update(
        params=[False, True, 2, 3, 4, 5]
    ),
    "no learning rate": lambda told, _: group(told).pop("lr"),
    "a learning rate of text": lambda told, _: group(told).update(lr="fast"),
    "a learning rate that is true": lambda told, _: group(told).update(lr=True),
    "a learning rate of nan": lambda told, _: group(told).update(lr=math.nan),
    "an infinite learning rate": lambda told, _: group(told).update(lr=math.inf),
    "a negative learning rate": lambda told, _: group(told).update(lr=-0.1),
    "a learning rate in a list": lambda told, _: group(told).update(lr=[0.1]),
    "three betas": lambda told, _: group(told).update(betas=(0.9, 0.9, 0.9)),
    "betas above one": lambda told, _: group(told).update(betas=(0.9, 1.5)),
    "betas of text": lambda told, _: group(told).update(betas="0.9"),
    "an option that no version has": lambda told, _: group(told).update(invented=1),
    "a switch that is text": lambda told, _: group(told).update(amsgrad="yes"),
    "a state of no parameter": lambda told, _: told["optimizer"]["state"].update({77: {}}),
    "a state of a parameter with a name": lambda told, _: told["optimizer"]["state"].update(zero={}),
    "a state of text": lambda told, _: told["optimizer"]["state"].update({0: "exp_avg"}),
    "a state without its step": lambda _, tensors: tensors.pop("optimizer/state/0/step"),
    "a state without an average": lambda _, tensors: tensors.pop("optimizer/state/0/exp_avg"),
    "an average of text": lambda told, tensors: (
        told["optimizer"]["state"].update({0: {"exp_avg": "0"}}) or tensors.pop("optimizer/state/0/exp_avg")
    ),
    "an average and a text in one place": lambda told, _: told["optimizer"]["state"].update(
        {0: {"exp_avg": "0"}}
    ),
    "an average within a number": lambda told, _: told["optimizer"]["state"].update({0: 1}),
    "a reference to a tensor that the state lacks": lambda told, _: told["optimizer"]["state"].update(
        {0: {"more": {"p2pavg/tensor": "optimizer/state/0/less"}}}
    ),
    "two references to one tensor": lambda told, _: told["optimizer"]["state"].update(
        {0: {name: {"p2pavg/tensor": "optimizer/state/0/exp_avg"} for name in ("exp_avg", "more")}}
    ),
    "the state of another optimizer": lambda _, tensors: tensors.update(
        {"optimizer/state/0/m": tensors.pop("optimizer/state/0/exp_avg")}
    ),
    "a state with a numbered entry": lambda told, _: told["optimizer"]["state"].update({0: {1: 2}}),
    "a tensor with a numbered place": lambda _, tensors: tensors.update(
        {"optimizer/state/0/1": torch.ones(1)}
    ),
    "a tensor beside the parts": lambda _, tensors: tensors.update({"optimizer/more": torch.ones(1)}),
    "a tensor in a list": lambda _, tensors: tensors.update({"optimizer/param_groups/0": torch.ones(1)}),
    "a tensor of no depth": lambda _, tensors: tensors.update({"optimizer/" + "x/" * 40: torch.ones(1)}),
    "a tensor within a tensor": lambda _, tensors: tensors.update(
        {"optimizer/state/0/exp_avg/more": torch.ones(1)}
    ),
    "an average of another shape": lambda _, tensors: tensors.update(
        {"optimizer/state/0/exp_avg": torch.zeros(7)}
    ),
    "an average of whole numbers": lambda _, tensors: tensors.update(
        {"optimizer/state/0/exp_avg": torch.zeros(4, 3, dtype=torch.int64)}
    ),
    "nan in an average": lambda _, tensors: tensors.update(
        {"optimizer/state/0/exp_avg": torch.full((4, 3), math.nan)}
    ),
    "a step before the first": lambda _, tensors: step_of(tensors, torch.tensor(-1.0)),
    "two steps": lambda _, tensors: step_of(tensors, torch.ones(2)),
    "too many steps": lambda _, tensors: step_of(tensors, torch.tensor(1e30)),
    "a third part of the optimizer": lambda told, _: told["optimizer"].update(hooks={}),
    "a tensor in place of the optimizer": lambda told, _: told.update(
        optimizer={"p2pavg/tensor": "optimizer/state/0/exp_avg"}
    ),
    "a counter in place of the optimizer": lambda told, _: told.update(
        optimizer={"p2pavg/counter": {"a": 1}}
    ),
    "no optimizer": lambda told, _: told.pop("optimizer"),
    "no schedule": lambda told, _: told.pop("scheduler"),
    "a tensor in place of the schedule": lambda told, _: told.update(
        scheduler={"p2pavg/tensor": "optimizer/state/0/exp_avg"}
    ),
    "a schedule that replaces a method": lambda told, _: told["scheduler"].update(step=3),
    "a schedule that replaces its optimizer": lambda told, _: told["scheduler"].update(optimizer=None),
    "a schedule without an entry": lambda told, _: told["scheduler"].pop("gamma"),
    "a schedule that counts in text": lambda told, _: told["scheduler"].update(last_epoch="3"),
    "a schedule that counts without end": lambda told, _: told["scheduler"].update(last_epoch=2**60),
    "a schedule with rates of more groups": lambda told, _: told["scheduler"].update(base_lrs=[0.1, 0.1]),
    "a schedule with a power of hours": lambda told, _: told["scheduler"].update(gamma=2**60),
    "a schedule that divides by zero": lambda told, _: told["scheduler"].update(step_size=0),
    "a schedule that makes rates infinite": lambda told, _: (
        told["scheduler"].update(gamma=1e308, last_epoch=1) or group(told).update(lr=1e308)
    ),
    "a lineage of text": lambda told, _: told.update(lineage="3"),
    "a lineage at half an update": lambda told, _: told["lineage"].update(epoch=1.5),
    "a lineage at an update that no run reaches": lambda told, _: told["lineage"].update(
        epoch=MAX_UPDATES + 1
    ),
    "a lineage with a short state": lambda told, _: told["lineage"].update(state="00"),
    "a lineage with a state of bytes": lambda told, _: told["lineage"].update(state=bytes(32)),
    "no lineage": lambda told, _: told.pop("lineage"),
    "no origin": lambda told, _: told.pop("origin"),
    "an origin of other rules": lambda told, _: told["origin"].update(rules="00" * 32),
    "an origin with a field of three": lambda told, _: told["origin"].update(fields=[["a", "b", "c"]]),
    "an origin with long fields": lambda told, _: told["origin"].update(fields=[["lr", "9" * 65]]),
    "an origin with a line break": lambda told, _: told["origin"].update(fields=[["lr", "1\n2"]]),
    "an origin with many fields": lambda told, _: told["origin"].update(fields=[["lr", "1"]] * 41),
    "a digest of other parameters": lambda told, _: told.update(parameters="00" * 32),
    "another kind": lambda told, _: told.update(kind="anchor/"),
    "another parameter": lambda _, tensors: tensors.update({"parameter/x": torch.zeros(1)}),
    "a parameter less": lambda _, tensors: tensors.pop("parameter/parameter 1"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_false_state_is_refused_and_changes_nothing(mistake: str) -> None:
    donor, joiner = Peer("Adam", "StepLR", steps=2), Peer("Adam", "StepLR", steps=1)
    content = content_of(donor, REFUSED[mistake])
    before = joiner.everything()
    with pytest.raises(StateError):
        joiner.common.prepare(content)
    assert same(joiner.everything(), before)
    takes(joiner, donor.sent())  # the same state without the change


def test_a_state_of_another_update_than_its_donors_say_is_refused() -> None:
    donor, joiner = Peer("Adam", steps=2), Peer("Adam")
    said = donor.optimizer.lineage
    joiner.common.prepare(donor.sent(), said)
    for other in (replace(said, epoch=said.epoch + 1), replace(said, state=bytes(32))):
        with pytest.raises(StateError, match="another update than its donors say"):
            joiner.common.prepare(donor.sent(), other)


@pytest.mark.parametrize("count", [2**60, -1, "1", 1.0])
def test_a_counter_of_milestones_counts_a_few(count: Any) -> None:
    """A rate is multiplied by a power of this number, which Python computes exactly for whole numbers."""
    donor, joiner = Peer("Adam", "MultiStepLR", steps=1), Peer("Adam", "MultiStepLR")
    counter = {"p2pavg/counter": {1: count}}
    content = content_of(donor, lambda told, _: told["scheduler"].update(milestones=counter, gamma=3))
    with pytest.raises(StateError):
        joiner.common.prepare(content)


def test_a_schedule_that_is_over_is_refused() -> None:
    """It would raise at the next step."""
    scheduler: Schedule = lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=5)  # noqa: E731
    SCHEDULES["OneCycleLR"] = scheduler
    try:
        donor, joiner = Peer("Adam", "OneCycleLR", steps=2), Peer("Adam", "OneCycleLR")
        content = content_of(donor, lambda told, _: told["scheduler"].update(last_epoch=9))
        with pytest.raises(StateError, match="schedule"):
            joiner.common.prepare(content)
    finally:
        del SCHEDULES["OneCycleLR"]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value within a value."""
    if path:
        yield path
    if isinstance(value, Mapping):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from places(value[index], (*path, index))


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.sampled_from(["", "lr", "00" * 32, b"", [], {}, (), [0.1], (0.9, 0.9), {"step": 1}, {0: {}}]),
    st.sampled_from(["optimizer/state/0/exp_avg", "parameter/0.bias", "nothing"]).map(
        lambda name: {"p2pavg/tensor": name}
    ),
    st.just({"p2pavg/counter": {1: 2}}),
)

added: st.SearchStrategy[Any] = st.sampled_from(["step", "optimizer", "lr", "foreach", 0, 1])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
@pytest.mark.filterwarnings("ignore")
def test_a_mutated_state_is_refused_or_trained_on(data: st.DataObject) -> None:
    inner = data.draw(st.sampled_from(["SGD with momentum", "Adam", "AdamW", "FedYogi"]))
    schedule = data.draw(st.sampled_from(["none", "StepLR", "MultiStepLR", "SequentialLR"]))
    donor, joiner = Peer(inner, schedule, steps=1), Peer(inner, schedule, steps=data.draw(st.integers(0, 1)))

    def change(told: dict[str, Any], _: object) -> None:
        for _ in range(data.draw(st.integers(1, 3))):
            path = data.draw(st.sampled_from(list(places(told))))
            within = told
            for key in path[:-1]:
                within = within[key]
            action = data.draw(st.sampled_from(["replace", "remove", "add"]))
            if action == "replace":
                within[path[-1]] = data.draw(junk)
            elif action == "remove" and isinstance(within, dict):
                del within[path[-1]]
            elif isinstance(within, dict):
                within[data.draw(added)] = data.draw(junk)

    content = content_of(donor, change)
    before = joiner.everything()
    try:
        take = joiner.common.prepare(content)
    except StateError:
        assert same(joiner.everything(), before)
        return
    assert same(joiner.everything(), before)
    take()
    batch(joiner.model, joiner.optimizer)


def test_a_state_of_another_class_with_the_same_names_is_refused_by_its_rules() -> None:
    donor, joiner = Peer("Adam", steps=1), Peer("SGD")
    with pytest.raises(StateError, match=r"inner Adam, this peer with SGD"):
        joiner.common.prepare(donor.sent())


class Untriable(SGD):
    """An optimizer that needs the values of its parameters to step, and an attribute that copies lack."""

    def step(self, closure: Any = None) -> Any:
        for parameters in self.param_groups:
            for parameter in parameters["params"]:
                self.state[parameter]["seen"] = torch.tensor(float(parameter.sum().item()))
        return super().step(closure)


def test_an_optimizer_that_cannot_be_tried_takes_states_of_its_own_kind() -> None:
    OPTIMIZERS["Untriable"] = lambda parameters: Untriable(parameters, 0.1, momentum=0.9)
    try:
        donor, joiner = Peer("Untriable", steps=2), Peer("Untriable")
        takes(joiner, donor.sent())
        batch(joiner.model, joiner.optimizer)
        with pytest.raises(StateError):
            takes(joiner, content_of(donor, lambda told, _: group(told).update(lr="fast")))
    finally:
        del OPTIMIZERS["Untriable"]


# ---------------------------------------------------------------------- settings and counts


@pytest.mark.parametrize(
    ("inner", "option", "value"),
    [
        ("Adam", "maximize", True),
        ("Adam", "amsgrad", True),
        ("Adam", "decoupled_weight_decay", True),
        ("Adam", "maximize", None),
        ("SGD with momentum", "nesterov", True),
        ("SGD with momentum", "maximize", True),
        ("FedYogi", "maximize", True),
    ],
)
def test_a_setting_that_is_no_number_is_this_peers_own(inner: str, option: str, value: Any) -> None:
    donor, joiner = Peer(inner, steps=1), Peer(inner, steps=1)
    before = joiner.everything()
    with pytest.raises(StateError, match=f"'{option}'"):
        takes(joiner, content_of(donor, lambda told, _: group(told).update({option: value})))
    assert same(joiner.everything(), before)


def test_numbers_change_in_the_course_of_a_run_and_are_taken() -> None:
    donor, joiner = Peer("Adam", steps=1), Peer("Adam")
    changed = {"lr": 0.03, "betas": (0.5, 0.6), "weight_decay": 0.25}
    donor.optimizer.inner.param_groups[0].update(changed)
    takes(joiner, donor.sent())
    group_ = joiner.optimizer.inner.param_groups[0]
    assert {name: group_[name] for name in changed} == changed


def test_a_schedules_copy_of_the_first_rate_is_not_taken() -> None:
    donor, joiner = Peer("Adam", "StepLR", steps=1), Peer("Adam", "StepLR")
    takes(joiner, content_of(donor, lambda told, _: group(told).update(initial_lr=7.0)))
    assert joiner.optimizer.inner.param_groups[0]["initial_lr"] == 0.01


@pytest.mark.parametrize(
    ("schedule", "entry", "value"),
    [
        ("StepLR", "gamma", 1000.0),
        ("StepLR", "step_size", 3),
        ("MultiStepLR", "gamma", 3.0),
        ("MultiStepLR", "milestones", {"p2pavg/counter": {1: 1}}),
        (
            "MultiStepLR",
            "milestones",
            {"p2pavg/counter": {1: 1, 3: 1}},
        ),  # the same places, one of them once less
        ("CosineAnnealingLR", "T_max", 11),
        ("CosineAnnealingLR", "eta_min", 5.0),
        ("SequentialLR", "_milestones", [3]),
    ],
)
def test_a_constant_of_a_schedule_is_this_peers_own(schedule: str, entry: str, value: Any) -> None:
    donor, joiner = Peer("Adam", schedule, steps=1), Peer("Adam", schedule)
    with pytest.raises(StateError, match=f"'{entry}'"):
        takes(joiner, content_of(donor, lambda told, _: told["scheduler"].update({entry: value})))
    takes(joiner, donor.sent())


def test_a_constant_of_a_schedule_within_another_is_this_peers_own() -> None:
    donor, joiner = Peer("Adam", "SequentialLR", steps=1), Peer("Adam", "SequentialLR")
    with pytest.raises(StateError, match="'gamma'"):
        takes(
            joiner, content_of(donor, lambda told, _: told["scheduler"]["_schedulers"][1].update(gamma=9.0))
        )


class Counting(Optimizer):
    """An optimizer that counts in its groups, from the first step on, as apex's FusedAdam does."""

    def __init__(self, params: Any, lr: float = 0.1, scale: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "scale": scale, "seen": 0})
        for group_ in self.param_groups:
            group_["compute_dtype"] = torch.float32

    def step(self, closure: Any = None) -> Any:
        for group_ in self.param_groups:
            group_["step"] = group_.get("step", 0) + 1
            group_["seen"] += 1
            group_["moment_dtype"] = torch.bfloat16
            for parameter in group_["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("momentum", torch.zeros_like(parameter)).mul_(0.9).add_(parameter.grad)
                    parameter.sub_(state["momentum"], alpha=group_["lr"] / group_["step"] * group_["scale"])


class Looking(Counting):
    """The same, which needs the values of its parameters to step: it cannot be tried without them."""

    def step(self, closure: Any = None) -> Any:
        for group_ in self.param_groups:
            assert all(math.isfinite(parameter.sum().item()) for parameter in group_["params"])
        return super().step(closure)


@pytest.fixture(params=[Counting, Looking])
def counting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(OPTIMIZERS, "counting", lambda parameters: request.param(parameters, 0.1))
    return "counting"


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("own_steps", [0, 2])
def test_counts_that_appear_with_the_first_step_are_taken(counting: str, steps: int, own_steps: int) -> None:
    donor, joiner = Peer(counting, steps=steps), Peer(counting, steps=own_steps)
    takes(joiner, donor.sent())
    assert same(joiner.everything()[1], donor.everything()[1])
    assert joiner.optimizer.inner.param_groups[0].get("step") == (steps or None)
    for _ in range(2):
        for peer in (donor, joiner):
            batch(peer.model, peer.optimizer)
    assert same(joiner.common.content().tensors, donor.common.content().tensors)
    assert joiner.optimizer.lineage == donor.optimizer.lineage
    assert joiner.optimizer.inner.param_groups[0]["moment_dtype"] is torch.bfloat16


@pytest.mark.parametrize("own_steps", [0, 2])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("step", math.nan),
        ("step", 2**60),
        ("seen", "3"),
        ("seen", math.inf),
        ("scale", "large"),
        ("compute_dtype", {"p2pavg/dtype": "float64"}),
        ("compute_dtype", {"p2pavg/dtype": "float65"}),
        ("compute_dtype", "float32"),
    ],
)
def test_counts_out_of_range_are_refused(counting: str, option: str, value: Any, own_steps: int) -> None:
    donor, joiner = Peer(counting, steps=2), Peer(counting, steps=own_steps)
    before = joiner.everything()
    with pytest.raises(StateError):
        takes(joiner, content_of(donor, lambda told, _: group(told).update({option: value})))
    assert same(joiner.everything(), before)


def test_a_count_of_a_parameter_of_this_peers_class_is_not_left_out(counting: str) -> None:
    donor, joiner = Peer(counting, steps=2), Peer(counting, steps=1)
    with pytest.raises(StateError, match="lacks the option of group 0 'seen'"):
        takes(joiner, content_of(donor, lambda told, _: group(told).pop("seen")))


@pytest.mark.parametrize("rate", [np.array(0.05), np.float32(0.05), torch.tensor(0.05), torch.tensor([0.05])])
@pytest.mark.parametrize("donors", [True, False], ids=["the donor's", "this peer's"])
def test_a_rate_may_be_a_number_of_any_library(rate: Any, donors: bool) -> None:
    donor, joiner = Peer("SGD", steps=1), Peer("SGD")
    (donor if donors else joiner).optimizer.inner.param_groups[0]["lr"] = rate
    takes(joiner, donor.sent())
    taken = joiner.optimizer.inner.param_groups[0]["lr"]
    assert float(taken) == pytest.approx(0.05 if donors else 0.1)
    assert type(taken) is float or not donors, "a class may take no tensor in its place"
    batch(joiner.model, joiner.optimizer)
    batch(donor.model, donor.optimizer)
    assert joiner.optimizer.lineage == donor.optimizer.lineage


class Growing(LRScheduler):
    """A schedule of a program, whose state changes in all the ways that are usual."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.factor = 1.0
        self.history: list[float] = []
        self.pairs: list[tuple[int, float]] = []
        self.best: float | None = None
        self.lowest = math.inf
        self.changed: int | None = None
        self.seen: dict[str, int] = {}
        self.kept: torch.Tensor | None = None
        super().__init__(optimizer)

    later: float | None = None

    def get_lr(self) -> list[float | torch.Tensor]:
        self.factor *= 0.9
        self.history.append(self.factor)
        self.pairs.append((self.last_epoch, self.factor))
        self.seen[f"update {self.last_epoch}"] = self.last_epoch
        if self.last_epoch:
            self.best = self.later = self.lowest = self.factor
            self.changed = self.last_epoch
            self.kept = torch.tensor([self.factor])
        return [rate * self.factor for rate in self.base_lrs]


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(SCHEDULES, "growing", Growing)
    return "growing"


@pytest.mark.parametrize("own_steps", [0, 3])
def test_a_schedule_whose_state_grows_is_taken(growing: str, own_steps: int) -> None:
    donor, joiner = Peer("Adam", growing, steps=4), Peer("Adam", growing, steps=own_steps)
    takes(joiner, donor.sent())
    assert same(joiner.everything()[2], donor.everything()[2])
    for peer in (donor, joiner):
        batch(peer.model, peer.optimizer)
    assert same(joiner.everything()[2], donor.everything()[2])
    assert joiner.optimizer.lineage == donor.optimizer.lineage


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("history", 3),
        ("history", ["x"]),
        ("history", [2**60]),
        ("pairs", [[1, 2**60]]),
        ("seen", [1]),
        ("seen", {"x": 2**60}),
        ("best", 2**60),
        ("factor", None),
        ("factor", "1"),
        ("factor", math.nan),
        ("get_lr", 1),
        ("step", None),
        ("optimizer", {}),
        ("base_lrs", [0.1, 0.1]),
        ("last_epoch", 2**60),
        ("last_epoch", None),
    ],
)
def test_a_schedule_that_has_not_grown_is_refused(growing: str, entry: str, value: Any, steps: int) -> None:
    donor, joiner = Peer("Adam", growing, steps=3), Peer("Adam", growing, steps=steps)
    before = joiner.everything()
    with pytest.raises(StateError):
        takes(joiner, content_of(donor, lambda told, _: told["scheduler"].update({entry: value})))
    assert same(joiner.everything(), before)


# ---------------------------------------------------------------------- what cannot be saved


def test_an_option_that_cannot_be_saved_is_refused_when_the_optimizer_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_a_function(parameters: list[nn.Parameter]) -> Optimizer:
        optimizer = SGD(parameters, 0.1)
        optimizer.param_groups[0]["filter"] = print
        return optimizer

    monkeypatch.setitem(OPTIMIZERS, "function", with_a_function)
    with pytest.raises(StateError, match=r"'param_groups/0/filter' is .*no other peer can join.*make it"):
        Peer("function")


def test_an_option_that_cannot_be_saved_is_found_when_it_is_set() -> None:
    peer = Peer("SGD", steps=1)
    peer.common.check_saves()
    peer.optimizer.inner.param_groups[0]["lr"] = np.array([0.1, 0.2])
    with pytest.raises(StateError, match=r"'param_groups/0/lr' is an? ndarray"):
        peer.common.check_saves()


def many(count: int) -> CommonState:
    """Return the common state of an optimizer of many small tensors."""
    tensors = [torch.zeros(1, requires_grad=True) for _ in range(count)]
    names = [f"p{index}" for index in range(count)]
    parts = type("Parts", (), {"labels": names, "numbers": names, "common": {}})()
    return CommonState("parameter/", tensors, parts, Adam(tensors), None, Peer("SGD").optimizer._training)


def test_the_plain_values_of_a_state_do_not_grow_with_the_number_of_tensors() -> None:
    """With 6,500 or 10,000 tensors, references to them took more room than values have."""
    common = many(10_000)
    tensors = common._optimizer.param_groups[0]["params"]
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    common._optimizer.step()
    content = common.content()
    assert len(content.tensors) == 40_000
    assert len(pack_values(content.values)) < 50_000
    joiner = many(10_000)
    taken = checked_optimizer(joiner._optimizer, unflatten(content.tensors, content.values["optimizer"]))
    assert len(taken["state"]) == 10_000


def test_an_optimizer_with_too_many_tensors_is_refused_when_it_is_made() -> None:
    with pytest.raises(
        StateError, match=r"an optimizer of 40000 tensors .* 160000 tensors, 131072 is the most"
    ):
        many(40_000)


def test_nothing_is_copied_before_a_state_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    donor, joiner = Peer("Adam", "StepLR", steps=2), Peer("Adam", "StepLR")
    sent = donor.sent()
    copies: list[int] = []
    clone = torch.Tensor.clone

    def counted(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        copies.append(tensor.numel())
        return clone(tensor, **options)

    monkeypatch.setattr(torch.Tensor, "clone", counted)
    take = joiner.common.prepare(sent)
    assert max(copies, default=0) <= 1, "only counts of steps are copied for the trial"
    assert len(copies) <= len(sent.tensors)
    take()
    assert max(copies) > 1


def test_the_largest_snapshot_has_room_for_an_optimizer_and_not_for_more() -> None:
    peer = Peer("Adam", steps=1)
    assert len(copy_of(peer.common.content())) <= peer.common.max_bytes < 2**27
    tensors, _ = flatten(peer.optimizer.inner.state_dict())
    sent = peer.sent()
    large = {f"optimizer/more/{index}": torch.zeros(2**20) for index in range(20)}
    with pytest.raises(StateError, match="bytes besides"):
        peer.common.prepare(replace(sent, tensors={**sent.tensors, **tensors, **large}))


def test_a_tensor_in_a_schedules_numbers_is_a_reason_and_no_other_error() -> None:
    """Its comparison with this peer's own number has no truth value."""
    donor, joiner = Peer("Adam", "MultiStepLR", steps=2), Peer("Adam", "MultiStepLR")
    content, lineage = donor.common.content(), donor.optimizer.lineage
    schedule = unflatten(content.tensors, content.values["scheduler"], "scheduler")
    schedule["milestones"] = {**schedule["milestones"], 3: torch.tensor([1.0, 2.0])}
    tensors, values = flatten(schedule, "scheduler")
    data = copy_of(Content({**content.tensors, **tensors}, {**content.values, "scheduler": values}))
    with pytest.raises(StateError):
        joiner.common.prepare(read(data), lineage)


def test_a_peer_that_follows_the_log_knows_whose_updates_it_takes() -> None:
    run = Peer("SGD").optimizer._together.run
    run.was_in({"b", "c"})
    assert run.companions == {"b", "c"}
