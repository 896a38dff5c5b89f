"""Checks of another peer's optimizer state and schedule, before anything of this peer changes. No I/O, no clock.

torch loads almost anything: a wrong entry raises in the middle of the load, at some later step, or takes the place of a
method. So a state is checked in two ways:

1. Every entry is compared with this peer's own: names, kinds of values, shapes.
2. The load and one step are tried on a copy whose tensors have no data (torch's device ``meta``): it costs no memory.
   If the class of this peer's optimizer or schedule cannot be tried in this way with its own state either, the first
   check decides alone.

**Settings and counts.** A *setting* is what the program chose: an argument of the optimizer's class, or an option that
a group had when this peer's optimizer was made (:func:`settings_of`). All else in a group is a *count* that training
keeps there, such as the ``step`` of apex's FusedAdam, which appears with the first step.

* Counts are taken from a state.
* Of the settings, only numbers are taken, because rates change in the course of a run. The recipe and the lineage have
  them, so the next certificate shows if they are false. All others must be this peer's own.
* A member of a population takes no setting at all.
* The arguments of one of torch's schedules must be this peer's own too.
"""

from __future__ import annotations

import copy
import inspect
import math
import numbers
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from p2pavg.base.errors import StateError
from p2pavg.optim.base.joined import JoinedOptimizer, parts_of
from p2pavg.optim.ranks.shards import local_of
from p2pavg.state.nested import plain_number

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
_TORCH_SCHEDULES = LRScheduler.__module__
_OF_SCHEDULES = frozenset(
    {"initial_lr", "max_lr", "min_lr", "base_lr", "base_momentum", "max_momentum", "swa_lr"}
)
"""Options that torch's schedules add, on each peer that makes the same schedule."""
_PER_GROUP = frozenset({"base_lrs", "_last_lr", "lr_lambdas"})
"""Lists of a schedule that have one item for each parameter group, so that they do not grow."""

Settings: TypeAlias = tuple[frozenset[str], ...]
"""Names of the options of each parameter group that are settings."""


def settings_of(optimizer: Optimizer) -> Settings:
    """Return the names of the settings of each parameter group. Call it when a peer's optimizer is made.

    An option that is in the optimizer's defaults, and that no argument of its class sets, is a count: classes such as
    Prodigy's begin to count there.
    """
    return tuple(
        _arguments(type(part)) | {name for name in group if name not in part.defaults and name != "step"}
        for part in parts_of(optimizer)
        for group in part.param_groups
    )


def late_options(optimizer: Optimizer, settings: Settings) -> list[str]:
    """Return the options that the program has set since :func:`settings_of`, where no count can appear, as words."""
    groups = [(part, group) for part in parts_of(optimizer) for group in part.param_groups]
    return [
        f"option {name!r} of group {index}"
        # A group without trained parameters may have been added since.
        for index, ((part, group), names) in enumerate(zip(groups, settings, strict=False))
        if not _keeps_counts(part)
        for name, value in group.items()
        if name not in names | part.defaults.keys() | SWITCHES | _NAMES | _OF_SCHEDULES
        and value is not None
        and value is not False
    ]


def _keeps_counts(optimizer: Optimizer) -> bool:
    """Return whether an optimizer may count in its groups; those of torch and of this library do not."""
    return not type(optimizer).__module__.startswith(("torch.optim.", "p2pavg."))


def _arguments(kind: type) -> frozenset[str]:
    """Return the names of the arguments of a class, and of the classes that it is derived from."""
    makers = (vars(base).get("__init__") for base in kind.__mro__ if base not in (object, Optimizer))
    return frozenset(name for made in makers if made for name in inspect.signature(made).parameters)


def checked_optimizer(
    optimizer: Optimizer, saved: object, settings: Settings | None = None, *, keeps_settings: bool = False
) -> dict[str, Any]:
    """Return the state that ``optimizer`` can load: ``saved`` with this peer's :data:`SWITCHES`.

    Args:
        saved: its tensors are neither changed nor copied.
        settings: from :func:`settings_of` when the optimizer was made; ``None`` for those of now.
        keeps_settings: true if no setting is taken from the state. This peer's stay.

    Raises:
        StateError: it is not the state of such an optimizer of these parameters.
    """
    groups, states = _parts(saved)
    # First, since the steps below use the numbers of parameters as indexes.
    _check_numbers(optimizer, groups, states)
    chosen = settings_of(optimizer) if settings is None else settings
    if isinstance(optimizer, JoinedOptimizer):
        # Each optimizer checks its own part, because its class decides which options it takes and what a step makes.
        parts = optimizer.parts_of({"param_groups": groups, "state": states})
        checked = []
        for one, part in zip(optimizer.optimizers, parts, strict=True):
            count = len(one.param_groups)
            checked.append(checked_optimizer(one, part, chosen[:count], keeps_settings=keeps_settings))
            chosen = chosen[count:]
        return optimizer.whole_of(checked)
    # From here on the merged groups count: they have this peer's switches, and its own settings where those stay.
    merged = [
        _Group(optimizer, index, names, keeps=keeps_settings).merged(group)
        for index, (group, names) in enumerate(zip(groups, chosen, strict=True))
    ]
    _check_options(optimizer, merged)
    for number, state in states.items():
        _check_state(number, state)
    # The trial comes last: it is the most expensive check, and relies on entries that the others have bounded.
    _try_optimizer(optimizer, merged, states)
    return {"param_groups": merged, "state": states}


def after_first_step(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state that an optimizer will have after its first step, with tensors that have no data.

    If its class cannot step without data, it is the present state.
    """
    if isinstance(optimizer, JoinedOptimizer):
        return optimizer.whole_of([after_first_step(one) for one in optimizer.optimizers])
    options = _without_parameters(optimizer.param_groups)
    present = saved_by(optimizer)
    alike = _alike(optimizer, {})
    found: list[dict[int, Any]] = []

    def step() -> None:
        hollow = _hollow(optimizer, options, chosen := sorted({*alike}))
        _step(hollow)
        # Only one parameter of each kind took the step. The others of its kind get the same entries.
        made = dict(zip(chosen, _states(hollow), strict=True))
        found.append({number: dict(made[first]) for number, first in enumerate(alike)})

    _try(step, lambda: None, "first step")
    return {**present, "state": found[0]} if found else present


def _without_parameters(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name not in _NAMES} for group in groups]


def saved_by(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict for other peers: without the parameters' names, which theirs may differ from."""
    state = optimizer.state_dict()
    groups = [
        {name: value for name, value in group.items() if name != "param_names"}
        for group in state["param_groups"]
    ]
    return {**state, "param_groups": groups}


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
    _check_schedule(scheduler, saved)
    # A count may come as a float, and the check above bounds whole numbers only.
    if abs(_number(saved.get("last_epoch", 0))) > MAX_COUNT:
        raise StateError("the state's schedule counts too many updates")
    _try_schedule(scheduler, optimizer, groups, saved)
    return saved


def _check_schedule(scheduler: Any, saved: Mapping[Any, Any]) -> None:
    """Compare the entries of a schedule with this peer's own.

    Those of torch's classes are known: only counts and rates change. A class of the program's may have lists that grow,
    and ``None`` that becomes a number.
    """
    own = scheduler.state_dict()
    # torch writes the entries into the schedule's ``__dict__``.
    # There an entry named ``step`` would replace the method.
    for name, value in saved.items():
        if name not in own:
            if type(name) is not str or _is_in_use(scheduler, name):
                raise StateError(f"the state's schedule has an entry {name!r}, which this peer's cannot have")
            _check_free(value, f"schedule {name!r}", of_schedule=True)
    is_torchs = type(scheduler).__module__ == _TORCH_SCHEDULES
    arguments = _arguments(type(scheduler)) - {"last_epoch"} if is_torchs else frozenset()
    # torch's schedules have all their entries from the start,
    # and one that is missing would leave this peer's value beside the run's.
    if is_torchs and (missing := sorted(own.keys() - saved.keys())):
        raise StateError(f"the state's schedule lacks the entry {missing[0]!r}")
    # SequentialLR and ChainedScheduler hold other schedules. Their entries need the rules of their own classes.
    inner = getattr(scheduler, "_schedulers", None)
    for name in own.keys() & saved.keys():
        place = f"schedule {name!r}"
        if name == "_schedulers" and isinstance(inner, list) and isinstance(own[name], list):
            _check_schedules(inner, saved[name], place)
        # torch keeps an argument under its own name or behind an underscore, such as ``_milestones``.
        elif name.lstrip("_") in arguments:
            _check(own[name], saved[name], place, _Rule.SAME)
        elif is_torchs or name in _PER_GROUP:
            _check(own[name], saved[name], place, _Rule.LIKE)
        else:
            _check(own[name], saved[name], place, _Rule.GROWN_SCHEDULE)


def _check_schedules(own: Sequence[Any], saved: object, place: str) -> None:
    if type(saved) is not list or len(saved) != len(own) or not all(type(each) is dict for each in saved):
        raise StateError(f"the state's {place} is {_shown(saved)}, this peer's has {len(own)} schedules")
    for scheduler, its in zip(own, saved, strict=True):
        _check_schedule(scheduler, its)


def _is_in_use(scheduler: object, name: str) -> bool:
    """Return whether an entry of this name would replace an attribute that is no plain value of the class."""
    missing = object()
    # An attribute that the schedule does not save, such as its optimizer. A load must not replace it.
    if name in vars(scheduler):
        return True
    found = inspect.getattr_static(type(scheduler), name, missing)
    return found is not missing and not (
        found is None or isinstance(found, bool | int | float | str | list | tuple)
    )


# ---------------------------------------------------------------------- entries


def _parts(saved: object) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    groups = saved.get("param_groups") if type(saved) is dict else None
    states = saved.get("state") if type(saved) is dict else None
    # Not isinstance: a Counter is a dict too, and a state can name one in any place.
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
    # True equals 1, so the comparison with the range would accept it as a number.
    is_number = all(type(number) is int for number in (*named, *states))
    if not is_number or named != list(range(sum(own))) or set(states) - set(named):
        raise StateError("the optimizer's state names other parameters than it has")


class _Group:
    """One parameter group of a state that is compared with this peer's own.

    Args:
        optimizer: this peer's, or the joined one to which the group belongs.
        index: of the group, for errors.
        settings: names of its options that are settings.
        keeps: true if this peer's settings stay.
    """

    def __init__(self, optimizer: Optimizer, index: int, settings: frozenset[str], *, keeps: bool) -> None:
        self._own = optimizer.param_groups[index]
        self._defaults = optimizer.defaults
        self._counts = _keeps_counts(optimizer)
        self._settings = settings
        self._keeps = keeps
        self._place = f"option of group {index}"

    def merged(self, group: Mapping[Any, Any]) -> dict[str, Any]:
        """Return the options of the group that is to be loaded.

        Options that only one of two versions of torch has are ``None`` or ``False``, or implied by the class.
        """
        # Start with this peer's own options, so that what the rules below do not take stays.
        options = {name: value for name, value in self._own.items() if name not in _NAMES}
        for name, value in group.items():
            if name not in SWITCHES and name not in _NAMES:
                self._take(options, name, value)
        for name in options.keys() - group.keys() - SWITCHES:
            self._lacks(options, name)
        return {**options, "params": group["params"]}

    def _take(self, options: dict[str, Any], name: Any, value: Any) -> None:
        place = f"{self._place} {name!r}"
        if name in self._settings:
            # The run's numbers are taken, because rates change in the course of a run.
            if not self._keeps and name in options:
                options[name] = _setting(options[name], value, place, name)
                return
            # A member of a population ignores the setting. For other peers, one that is off is as good as absent.
            if self._keeps or value is None or value is False:
                return
        elif name in options:
            # A count that both peers have.
            options[name] = _fitted(options[name], value)
            _check(self._own[name], options[name], place, _Rule.GROWN)
            return
        elif value is None or value is False:
            return
        # A count that this peer's optimizer does not have before its first step.
        elif self._counts and type(name) is str:
            _check_free(value, place, of_schedule=False)
            options[name] = value
            return
        raise StateError(f"the state has the {place}, which this peer's optimizer lacks")

    def _lacks(self, options: dict[str, Any], name: str) -> None:
        if name not in self._settings and name not in self._defaults:
            del options[name]  # the count begins with the next step
        # The donor's torch may be older, and lack a switch that the class implies,
        # such as AdamW's ``decoupled_weight_decay``. A number is implied by nothing.
        elif not self._keeps and options[name] is not None and not isinstance(options[name], bool):
            raise StateError(f"the state lacks the {self._place} {name!r}")


def _setting(own: Any, value: Any, place: str, name: str) -> Any:
    """Return a setting for the updates that follow: numbers change in the course of a run, and nothing else does."""
    if name == "initial_lr":  # the recipe leaves it out: a schedule's copy of the first rate
        return own
    # Another value here would be another algorithm, such as ``maximize`` or ``nesterov``.
    if isinstance(own, bool | None | str | torch.dtype):
        _check(own, value, place, _Rule.SAME)
        return own
    if isinstance(own, torch.Tensor) and own.numel() == 1 and not isinstance(value, torch.Tensor):
        # The state's is taken as it is: in fewer bits it would be another rate than the run's.
        own = own.item()
    fitted = _fitted(own, value)
    _check(own, fitted, place, _Rule.LIKE)
    return fitted


def _fitted(own: Any, value: Any) -> Any:
    """Return a number that a state has as a tensor as a number, if this peer's own is one; anything else as it is."""
    is_number = isinstance(plain_number(own), int | float)
    if is_number and isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return value


def _check_state(number: int, state: Mapping[Any, Any]) -> None:
    for name, value in state.items():
        if type(name) is not str:
            raise StateError(f"the state of parameter {number} has an entry named {name!r}")
        if name != "step" or (isinstance(value, torch.Tensor) and value.numel() != 1):
            continue
        count = value.item() if isinstance(value, torch.Tensor) else value
        # In this form NaN is refused as well. It stands for a value that is no number.
        if not 0 <= _number(count) <= MAX_COUNT:
            raise StateError(f"the state of parameter {number} counts {count!r} steps")


class _Rule(Enum):
    """The difference that a value of a state may have from this peer's own."""

    SAME = auto()
    """It is this peer's own. A list and a tuple of the same values are the same."""
    LIKE = auto()
    """Numbers differ; kinds, keys, lengths and shapes do not. A tensor of one number is a number."""
    GROWN = auto()
    """Training has made it of this peer's own: a list may have become longer, a dict may have other entries, and
    ``None`` may have become anything plain."""
    GROWN_SCHEDULE = auto()
    """The same, of a schedule: see :func:`_check_free`."""


def _check(own: Any, value: Any, place: str, rule: _Rule) -> None:
    """Raise StateError if a value differs from this peer's own by more than a rule allows."""
    own, grows = plain_number(own), rule in (_Rule.GROWN, _Rule.GROWN_SCHEDULE)
    if own is None and grows:
        _check_free(value, place, of_schedule=rule is _Rule.GROWN_SCHEDULE)
        return
    is_counter = isinstance(own, Counter)
    has_entries = isinstance(own, dict) and (rule is _Rule.SAME or not is_counter)
    if isinstance(own, list | tuple):
        good = type(value) in (list, tuple) and (grows or len(value) == len(own))
    elif has_entries:
        good = type(value) is (Counter if is_counter else dict) and (grows or value.keys() == own.keys())
    else:
        good = _fits(own, value, rule)
    if not good:
        advice = "; start this peer with the run's" if rule is _Rule.SAME else ""
        raise StateError(f"the state's {place} is {_shown(value)}, this peer's {_shown(own)}{advice}")
    if isinstance(own, list | tuple):
        for index, its in enumerate(value):
            # A new item of a list has nothing to be compared with, so its numbers alone are bounded.
            _check(own[index] if index < len(own) else None, its, place, rule)
    elif has_entries:
        for name, its in value.items():
            _check(own.get(name), its, f"{place} {_shown(name)}", rule)


def _fits(own: Any, value: Any, rule: _Rule) -> bool:
    """Return whether a value without parts, or a Counter, is what a rule allows; see :func:`_check`."""
    if rule is _Rule.SAME:
        own, value = (each.tolist() if isinstance(each, torch.Tensor) else each for each in (own, value))
        # True equals 1 in Python, and an argument may treat the two differently.
        return isinstance(own, bool) == isinstance(value, bool) and bool(own == value)
    if isinstance(own, torch.Tensor):
        good = isinstance(value, torch.Tensor) and value.is_floating_point() == own.is_floating_point()
        return good and (rule is not _Rule.LIKE or value.shape == own.shape)
    if isinstance(own, Counter):
        # The milestones of MultiStepLR: a rate is multiplied by gamma to the power of a count.
        return isinstance(value, Counter) and all(
            type(key) is int and type(count) is int and 0 <= count <= MAX_POWER
            for key, count in value.items()
        )
    # Before the numbers: a bool is a numbers.Real, and would accept any number in its place.
    if own is None or isinstance(own, bool):
        return type(value) is type(own)
    if isinstance(own, numbers.Real):
        if rule is _Rule.GROWN_SCHEDULE and isinstance(own, float) and isinstance(value, float):
            return True
        most = MAX_WHOLE if isinstance(own, float) else MAX_COUNT
        return math.isfinite(_number(value)) and (type(value) is not int or abs(value) <= most)
    if rule is not _Rule.LIKE and isinstance(own, torch.dtype | str | bytes):
        return isinstance(value, type(own))
    return type(value) is type(own) and bool(value == own)  # texts choose between algorithms


def _check_free(value: Any, place: str, *, of_schedule: bool) -> None:
    """Raise StateError if a value has a number that is out of range. Its kind is any that a state may have.

    Args:
        of_schedule: a number may be infinite, such as the best loss before the first; the trial shows whether the rates
            are finite. Whole numbers are small: a schedule may compute powers of them.
    """
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            _check_free(part, place, of_schedule=of_schedule)
    elif isinstance(value, int):
        good = abs(value) <= (MAX_WHOLE if of_schedule else MAX_COUNT)
        if not good:
            raise StateError(f"the state's {place} is {_shown(value)}, which is too large")
    elif isinstance(value, float) and not of_schedule and not math.isfinite(value):
        raise StateError(f"the state's {place} is {_shown(value)}")


def _number(value: object) -> float:
    """Return a number as a float, and NaN, which is in no range, for anything else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
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
        # torch's optimizers check the range of an option in ``__init__`` only:
        # ``load_state_dict`` takes a negative rate.
        given = {name: value for name, value in options.items() if name in takes}
        type(optimizer)([torch.zeros((1, 1), requires_grad=True, dtype=torch.float32, device="cpu")], **given)

    for own, group in zip(optimizer.param_groups, groups, strict=True):
        _try(lambda own=own: make(own), lambda group=group: make(group), "options")  # type: ignore[misc]


def _try_optimizer(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], states: Mapping[int, Mapping[str, Any]]
) -> None:
    """Raise StateError if a state cannot be loaded, or no step can be taken with it."""
    made: dict[int, dict[str, Any]] = {}
    chosen = sorted({*_alike(optimizer, states)})
    numbers_ = {number: index for index, number in enumerate(chosen)}  # in the copies, which have no others

    def fresh(options: Sequence[Mapping[str, Any]]) -> Optimizer:
        hollow = _hollow(optimizer, options, chosen)
        _step(hollow)
        return hollow

    def keep() -> None:
        found = _states(fresh(groups))
        made.update((number, dict(each)) for number, each in zip(chosen, found, strict=True))

    def load(its_groups: Sequence[Mapping[str, Any]], its_states: Mapping[int, Mapping[str, Any]]) -> None:
        hollow = _hollow(optimizer, its_groups, chosen)
        few = [
            {**group, "params": [numbers_[number] for number in group["params"] if number in numbers_]}
            for group in _switched_off(its_groups)
        ]
        without = {numbers_[n]: _without_data(its_states[n]) for n in chosen if n in its_states}
        hollow.load_state_dict({"param_groups": few, "state": without})
        _step(hollow)

    # The first trial takes a step with this peer's own options, and one with the state's.
    # If its own fail, this class cannot be tried without data, and the comparisons above decide alone.
    own = [dict(group) for group in groups]
    for mine, group in zip(own, optimizer.param_groups, strict=True):
        mine.update({name: value for name, value in group.items() if name not in _NAMES})
    if not _try(lambda: fresh(own), keep, "hyperparameters"):
        return
    # The second trial loads the state and steps. It decides only if loading what the first trial made works.
    _check_shapes(made, states)
    _try(lambda: load(groups, made), lambda: load(groups, states), "state")


def _alike(optimizer: Optimizer, states: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return for each parameter the number of the first one that a trial cannot tell from it.

    They are of one group and shape, and their states have entries of the same kinds. A step without data takes
    milliseconds for each parameter, so one of ten thousand norms is tried for all.
    """
    firsts: dict[str, int] = {}  # by text: the values of a stranger may have been chosen to collide
    found: list[int] = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            local, number = local_of(parameter), len(found)
            spec = _spec(states[number], local) if number in states else "no state"
            key = f"{index} {tuple(local.shape)} {local.dtype} {parameter.requires_grad} {spec}"
            found.append(firsts.setdefault(key, number))
    return found


def _spec(value: Any, parameter: torch.Tensor) -> str:
    """Return all that a trial sees of a value in a parameter's state."""
    if isinstance(value, torch.Tensor):
        is_seen = value.numel() == 1 and value.shape != parameter.shape  # a count of steps, for example
        return f"{value.dtype} {tuple(value.shape)} {value.item() if is_seen else ''}"
    if isinstance(value, dict):
        parts = sorted(f"{name!r}: {_spec(part, parameter)}" for name, part in value.items())
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, list | tuple):
        return f"({', '.join(_spec(part, parameter) for part in value)})"
    return repr(value)


def _check_shapes(made: Mapping[int, Mapping[str, Any]], states: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise StateError if an entry that the optimizer makes at its first step is not there, or of another kind."""
    for number in made.keys() & states.keys():
        state = states[number]
        # torch's optimizers fill an empty state at the next step, so nothing is missing in it.
        for name, own in made[number].items() if state else ():
            if name not in state:
                raise StateError(f"the state of parameter {number} has no {name!r}")
            if own is not None:  # it may be filled later
                _check(own, state[name], f"{name!r} of parameter {number}", _Rule.LIKE)


def _try_schedule(
    scheduler: LRScheduler, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], saved: dict[str, Any]
) -> None:
    def step(its_groups: Sequence[Mapping[str, Any]], schedule: dict[str, Any] | None) -> None:
        hollow = _hollow(optimizer, its_groups)
        # The memo makes the copy refer to the hollow optimizer.
        # Else the real one would be copied, with all its tensors.
        double = copy.deepcopy(scheduler, {id(optimizer): hollow})
        if schedule is not None:
            # The schedule keeps the lists that it loads,
            # and its step may change them, while this state is still to be taken.
            double.load_state_dict(copy.deepcopy(schedule))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no step was taken before the schedule's
            double.step()
        # The step of a schedule refuses no rate. The next update would write NaN to all parameters.
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


def _hollow(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], chosen: Sequence[int] | None = None
) -> Optimizer:
    """Return an optimizer of the same class, without a state, whose parameters have no data.

    Args:
        groups: options of its parameter groups.
        chosen: numbers of the parameters that it has; ``None`` for all. It is not for joined optimizers.
    """
    if isinstance(optimizer, JoinedOptimizer):
        parts = zip(optimizer.optimizers, optimizer.split(groups), strict=True)
        return JoinedOptimizer([_hollow(one, its) for one, its in parts])
    # ``__init__`` may need arguments that are unknown here, so the copy is made as pickle makes one.
    double: Optimizer = object.__new__(type(optimizer))
    wanted = None if chosen is None else frozenset(chosen)
    first, filled = 0, []
    for own, options in zip(optimizer.param_groups, _switched_off(_without_parameters(groups)), strict=True):
        numbered = enumerate(own["params"], first)
        parameters = [_hollow_parameter(p) for number, p in numbered if wanted is None or number in wanted]
        filled.append({**copy.deepcopy(options), "params": parameters})
        # The numbers go on from group to group, as in a state dict.
        first += len(own["params"])
    double.__setstate__(
        {"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": filled}
    )
    return double


def _hollow_parameter(parameter: torch.Tensor) -> torch.Tensor:
    local = local_of(parameter)
    hollow = torch.empty(local.shape, dtype=local.dtype, device="meta", requires_grad=parameter.requires_grad)
    # Steps skip parameters without a gradient, so a frozen one gets no state, as in training.
    if parameter.requires_grad:
        hollow.grad = torch.empty_like(hollow, requires_grad=False)
    return hollow


def _switched_off(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    # Fused and capturable steps refuse the device ``meta``.
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
