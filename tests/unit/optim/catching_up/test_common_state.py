"""The common state: laid out, taken by another peer, and every hostile content refused before anything changes."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

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
from p2pavg.optim.catching_up.common_state import MAX_UPDATES, CommonState, Extra
from p2pavg.optim.local.outer import FedYogi
from p2pavg.state.nested import flatten
from p2pavg.state.snapshot import Content, copy_of, read
from tests.unit.optim.fakes import Alone, large_batch
from tests.unit.optim.loops import batch, small
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

    def __init__(
        self, inner: str, schedule: str = "none", *, steps: int = 0, extra: Extra | None = None
    ) -> None:
        self.model = small()
        made = OPTIMIZERS[inner](list(self.model.parameters()))
        scheduler = SCHEDULES[schedule](made)
        self.optimizer = large_batch(Alone(), made, scheduler=scheduler, model=self.model)
        for _ in range(steps):
            batch(self.model, self.optimizer)
        self.common = CommonState(
            "parameter/",
            self.optimizer._parameters,
            self.optimizer._parts,
            made,
            scheduler,
            self.optimizer._training,
            extra,
        )

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


every_pair = pytest.mark.parametrize(
    ("inner", "schedule"),
    [*((inner, "StepLR") for inner in OPTIMIZERS), *(("Adam", schedule) for schedule in SCHEDULES)],
)


@every_pair
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("own_steps", [0, 2])
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


class Count:
    """Further values of a state: a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def kept(self) -> Any:
        return self.number

    def prepare(self, value: object) -> Callable[[], None]:
        if type(value) is not int:
            raise StateError("it is no number")

        def take() -> None:
            self.number = value

        return take


def test_further_values_go_with_a_state() -> None:
    donor, joiner = Peer("Adam", steps=2, extra=Count(7)), Peer("Adam", extra=(count := Count(0)))
    content = donor.sent()
    take = joiner.common.prepare(content)
    assert count.number == 0, "nothing changes before the whole state is checked"
    take()
    assert count.number == 7
    with pytest.raises(StateError, match="it is no number"):
        joiner.common.prepare(replace(content, values={**content.values, "extra": "7"}))


def test_only_peers_that_both_have_further_values_take_each_others_states() -> None:
    one, other = Peer("Adam", steps=2, extra=Count(7)), Peer("Adam", steps=2)
    for giver, taker in ((one, other), (other, one)):
        with pytest.raises(StateError, match="of a team of a population"):
            taker.common.prepare(giver.sent())


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
    "a state without its step": lambda told, _: told["optimizer"]["state"][0].pop("step"),
    "a state without an average": lambda told, _: told["optimizer"]["state"][0].pop("exp_avg"),
    "an average of text": lambda told, _: told["optimizer"]["state"][0].update(exp_avg="0"),
    "the state of another optimizer": lambda told, _: told["optimizer"]["state"].update(
        {0: {"m": told["optimizer"]["state"][0]["exp_avg"]}}
    ),
    "a state with a numbered entry": lambda told, _: told["optimizer"]["state"][0].update({1: 2}),
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
    "a parameter less": lambda _, tensors: tensors.pop("parameter/0.bias"),
}


@pytest.mark.parametrize("mistake", REFUSED)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_false_state_is_refused_and_changes_nothing(mistake: str, steps: int) -> None:
    donor, joiner = Peer("Adam", "StepLR", steps=2), Peer("Adam", "StepLR", steps=steps)
    content = content_of(donor, REFUSED[mistake])
    before = joiner.everything()
    with pytest.raises(StateError):
        joiner.common.prepare(content)
    assert same(joiner.everything(), before)
    takes(joiner, donor.sent())  # the same state without the change


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


def test_the_largest_snapshot_has_room_for_an_optimizer_and_not_for_more() -> None:
    peer = Peer("Adam", steps=1)
    assert len(copy_of(peer.common.content())) <= peer.common.max_bytes < 2**27
    tensors, _ = flatten(peer.optimizer.inner.state_dict())
    sent = peer.sent()
    large = {f"optimizer/more/{index}": torch.zeros(2**20) for index in range(20)}
    with pytest.raises(StateError, match="bytes besides"):
        peer.common.prepare(replace(sent, tensors={**sent.tensors, **tensors, **large}))
