"""Checks of another peer's optimizer state and schedule, before anything of this peer changes. No I/O, no clock.

torch loads almost anything: a wrong entry raises in the middle of the load, at some later step, or takes the place of a
method. So a state is checked in two ways:

1. Every entry is compared with this peer's own: names, kinds of values, shapes.
2. The load and one step are tried on a copy whose tensors have no data (torch's device ``meta``): it costs no memory.
   If the class of this peer's optimizer or schedule cannot be tried in this way with its own state either, the first
   check decides alone.
"""

from __future__ import annotations

import copy
import inspect
import math
import numbers
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from p2pavg.base.errors import StateError
from p2pavg.optim.base.joined import JoinedOptimizer
from p2pavg.optim.ranks.shards import local_of

SWITCHES = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that choose an implementation of the same arithmetic for a device. A peer keeps its own."""
MAX_COUNT = 2.0**53
"""The largest number of steps in a state: from there on, floating-point numbers do not count by one."""

MAX_POWER = 2**16
"""The largest repetition of a milestone: a whole number to such a power is computed in no time."""
MAX_WHOLE = 2**20
"""The largest whole number in place of a float of this peer: Python computes powers of whole numbers exactly, for
hours."""

_NAMES = frozenset({"params", "param_names"})


def checked_optimizer(optimizer: Optimizer, saved: object) -> dict[str, Any]:
    """Return the state that ``optimizer`` can load: ``saved`` with this peer's :data:`SWITCHES`.

    Args:
        saved: its tensors are not changed.

    Raises:
        StateError: it is not the state of such an optimizer of these parameters.
    """
    groups, states = _parts(saved)
    _check_numbers(optimizer, groups, states)
    if isinstance(optimizer, JoinedOptimizer):
        parts = optimizer.parts_of({"param_groups": groups, "state": states})
        checked = [
            checked_optimizer(one, part) for one, part in zip(optimizer.optimizers, parts, strict=True)
        ]
        return optimizer.whole_of(checked)
    merged = [
        _merged(own, group, index)
        for index, (own, group) in enumerate(zip(optimizer.param_groups, groups, strict=True))
    ]
    _check_options(optimizer, merged)
    for number, state in states.items():
        _check_state(number, state)
    _try_optimizer(optimizer, merged, states)
    return {"param_groups": merged, "state": states}


def checked_schedule(
    scheduler: LRScheduler, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], saved: object
) -> dict[str, Any]:
    """Return the schedule that ``scheduler`` can load.

    Args:
        optimizer: the scheduler's.
        groups: its parameter groups as they will be, from :func:`checked_optimizer`.

    Raises:
        StateError: it is not the state of such a schedule.
    """
    if type(saved) is not dict:
        raise StateError("the state's schedule is malformed")
    own = scheduler.state_dict()
    for name in saved.keys() - own.keys():
        if type(name) is not str or hasattr(scheduler, name):
            raise StateError(f"the state's schedule has an entry {name!r}, which this peer's cannot have")
    _check_like(own, {name: saved[name] for name in own if name in saved}, "schedule")
    if abs(_number(saved.get("last_epoch", 0))) > MAX_COUNT:
        raise StateError("the state's schedule counts too many updates")
    _try_schedule(scheduler, optimizer, groups, saved)
    return saved


# ---------------------------------------------------------------------- entries


def _parts(saved: object) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    groups = saved.get("param_groups") if type(saved) is dict else None
    states = saved.get("state") if type(saved) is dict else None
    if type(groups) is not list or type(states) is not dict or len(saved) != 2:  # type: ignore[arg-type]
        raise StateError("the optimizer's state is malformed")
    if not all(type(part) is dict for part in (*groups, *states.values())):
        raise StateError("the optimizer's state is malformed")
    return groups, states


def _check_numbers(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], states: Mapping[int, object]
) -> None:
    """Check that a state is about as many parameters as there are, in the same groups."""
    found = [group.get("params") for group in groups]
    counts = [len(numbers_) if type(numbers_) is list else -1 for numbers_ in found]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if counts != own:
        raise StateError(
            f"the state's optimizer has parameter groups of {counts} parameters, this one of {own}"
        )
    named = [number for group in groups for number in group["params"]]
    is_number = all(type(number) is int for number in (*named, *states))
    if not is_number or named != list(range(sum(own))) or set(states) - set(named):
        raise StateError("the optimizer's state names other parameters than it has")


def _merged(own: Mapping[str, Any], group: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the options of a group that is to be loaded.

    Options that only one of two versions of torch has are ``None`` or ``False``, or implied by the class.
    """
    place = f"option of group {index}"
    options = {name: value for name, value in own.items() if name not in _NAMES}
    for name, value in group.items():
        if name in SWITCHES or name in _NAMES:
            continue
        if name in options:
            _check_like(options[name], value, f"{place} {name!r}")
            options[name] = value
        elif value is not None and value is not False:
            raise StateError(f"the state has the {place} {name!r}, which this peer's optimizer lacks")
    for name in options.keys() - group.keys() - SWITCHES:
        if options[name] is not None and not isinstance(options[name], bool):
            raise StateError(f"the state lacks the {place} {name!r}")
    return {**options, "params": group["params"]}


def _check_state(number: int, state: Mapping[Any, Any]) -> None:
    for name, value in state.items():
        if type(name) is not str:
            raise StateError(f"the state of parameter {number} has an entry named {name!r}")
        if name != "step" or (isinstance(value, torch.Tensor) and value.numel() != 1):
            continue
        count = value.item() if isinstance(value, torch.Tensor) else value
        if not 0 <= _number(count) <= MAX_COUNT:
            raise StateError(f"the state of parameter {number} counts {count!r} steps")


def _check_like(own: Any, value: Any, place: str) -> None:
    """Raise StateError if a value is of another kind than this peer's own."""
    if isinstance(own, torch.Tensor):
        good = isinstance(value, torch.Tensor) and value.shape == own.shape
        good = good and value.is_floating_point() == own.is_floating_point()
    elif isinstance(own, Counter):
        good = isinstance(value, Counter) and all(
            type(key) is int and type(count) is int and 0 <= count <= MAX_POWER
            for key, count in value.items()
        )
    elif isinstance(own, dict):
        good = type(value) is dict and value.keys() == own.keys()
    elif isinstance(own, list | tuple):
        good = type(value) in (list, tuple) and len(value) == len(own)
    elif own is None or isinstance(own, bool):
        good = type(value) is type(own)
    elif isinstance(own, numbers.Real):
        most = MAX_WHOLE if isinstance(own, float) else MAX_COUNT
        good = math.isfinite(_number(value)) and (type(value) is not int or abs(value) <= most)
    else:  # texts choose between algorithms
        good = type(value) is type(own) and value == own
    if not good:
        raise StateError(f"the state's {place} is {_shown(value)}, this peer's {_shown(own)}")
    if isinstance(own, dict) and not isinstance(own, Counter):
        for name in own:
            _check_like(own[name], value[name], f"{place} {name!r}")
    elif isinstance(own, list | tuple):
        for mine, its in zip(own, value, strict=True):
            _check_like(mine, its, place)


def _number(value: object) -> float:
    """Return a number as a float, and NaN, which is in no range, for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value)


def _shown(value: object) -> str:
    is_short = isinstance(value, int | float | None) or (isinstance(value, str) and len(value) < 40)
    return repr(value) if is_short else f"of type {type(value).__name__}"


# ---------------------------------------------------------------------- trials


def _check_options(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise StateError if the optimizer's class would refuse the options of a group."""
    takes = inspect.signature(type(optimizer).__init__).parameters.keys() - SWITCHES - _NAMES

    def make(options: Mapping[str, Any]) -> None:
        given = {name: value for name, value in options.items() if name in takes}
        type(optimizer)([torch.zeros((1, 1), requires_grad=True)], **given)

    for own, group in zip(optimizer.param_groups, groups, strict=True):
        _try(lambda own=own: make(own), lambda group=group: make(group), "options")  # type: ignore[misc]


def _try_optimizer(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], states: Mapping[int, Mapping[str, Any]]
) -> None:
    """Raise StateError if a state cannot be loaded, or no step can be taken with it."""
    made: list[dict[str, Any]] = []

    def fresh(options: Sequence[Mapping[str, Any]]) -> Optimizer:
        hollow = _hollow(optimizer, options)
        _step(hollow)
        return hollow

    def keep() -> None:
        made.extend(dict(hollow_state) for hollow_state in _states(fresh(groups)))

    def load(its_groups: Sequence[Mapping[str, Any]], its_states: Mapping[int, Mapping[str, Any]]) -> None:
        hollow = _hollow(optimizer, its_groups)
        without = {number: _without_data(state) for number, state in its_states.items()}
        hollow.load_state_dict({"param_groups": _switched_off(its_groups), "state": without})
        _step(hollow)

    own = [dict(group) for group in groups]
    for mine, group in zip(own, optimizer.param_groups, strict=True):
        mine.update({name: value for name, value in group.items() if name not in _NAMES})
    if not _try(lambda: fresh(own), keep, "hyperparameters"):
        return
    _check_shapes(made, states)
    _try(lambda: load(groups, dict(enumerate(made))), lambda: load(groups, states), "state")


def _check_shapes(made: Sequence[Mapping[str, Any]], states: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise StateError if an entry that the optimizer makes at its first step is not there, or of another kind."""
    for number, state in states.items():
        for name, own in made[number].items() if state else ():
            if name not in state:
                raise StateError(f"the state of parameter {number} has no {name!r}")
            if own is not None:  # it may be filled later
                _check_like(own, state[name], f"{name!r} of parameter {number}")


def _try_schedule(
    scheduler: LRScheduler,
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    saved: dict[str, Any],
) -> None:
    def step(its_groups: Sequence[Mapping[str, Any]], schedule: dict[str, Any] | None) -> None:
        hollow = _hollow(optimizer, its_groups)
        double = copy.deepcopy(scheduler, {id(optimizer): hollow})
        if schedule is not None:
            double.load_state_dict(copy.deepcopy(schedule))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no step was taken before the schedule's
            double.step()
        if not all(math.isfinite(float(group["lr"])) for group in hollow.param_groups):
            raise ValueError("a learning rate that is not finite")

    _try(lambda: step(groups, None), lambda: step(groups, saved), "schedule")


def _try(own: Callable[[], object], its: Callable[[], object], what: str) -> bool:
    """Raise StateError if ``its`` raises anything although ``own`` does not; return whether ``own`` does not."""
    try:
        own()
    except Exception:  # noqa: BLE001 - any error of any optimizer: it cannot be tried in this way
        return False
    try:
        its()
    except Exception as error:  # noqa: BLE001 - torch's optimizers raise errors of any kind
        raise StateError(f"the state's {what} cannot be used: {type(error).__name__}: {error}") from None
    return True


def _hollow(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """Return an optimizer of the same class, without a state, whose parameters have no data."""
    if isinstance(optimizer, JoinedOptimizer):
        parts = zip(optimizer.optimizers, optimizer.split(groups), strict=True)
        return JoinedOptimizer([_hollow(one, its) for one, its in parts])
    double: Optimizer = object.__new__(type(optimizer))
    filled = [
        {**copy.deepcopy(dict(options)), "params": [_hollow_parameter(p) for p in own["params"]]}
        for own, options in zip(optimizer.param_groups, _switched_off(groups), strict=True)
    ]
    double.__setstate__(
        {"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": filled}
    )
    return double


def _hollow_parameter(parameter: torch.Tensor) -> torch.Tensor:
    local = local_of(parameter)
    hollow = torch.empty(local.shape, dtype=local.dtype, device="meta", requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        hollow.grad = torch.empty_like(hollow, requires_grad=False)
    return hollow


def _switched_off(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: False if name in SWITCHES else value for name, value in group.items()} for group in groups]


def _step(hollow: Optimizer) -> None:
    with torch.no_grad():
        hollow.step()


def _states(hollow: Optimizer) -> list[Mapping[str, Any]]:
    return [hollow.state.get(p, {}) for group in hollow.param_groups for p in group["params"]]


def _without_data(value: Any) -> Any:
    """Return a value whose tensors have no data, except single numbers, which are copied."""
    if isinstance(value, torch.Tensor):
        return (
            value.clone()
            if value.numel() == 1 and not value.is_meta
            else torch.empty_like(value, device="meta")
        )
    if isinstance(value, dict):
        return {name: _without_data(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_data(part) for part in value)
    return value
