"""Several torch optimizers, each of parameters of its own, that are stepped as one. No I/O, no clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast, overload

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

# Names of a model's parameters and buffers, the same on all peers, however each of them wraps its model.
#
# `torch.compile` puts `_orig_mod.` before every name, and `DistributedDataParallel` puts `module.`. Peers compare
# names, deal out fragments by them and keep them in checkpoints, so a peer that wraps its model must have those of
# one that does not.

# Torch's own names for the one module inside a wrapper: of torch.compile, checkpoint_wrapper and the first FSDP.
_INSIDE = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once, with its name without wrappers; the wrapper comes before what it wraps."""
    seen: set[int] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield name, module
        for part, child in module._modules.items():
            if child is not None:
                yield from walk(name if _is_wrapped(module, part) else _joined(name, part), child)

    return walk("", model)


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's parameters by their names without wrappers; of names for one parameter, the first."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for prefix, module in plain_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[_free(_joined(prefix, name), found)] = parameter
    return found


def plain_buffers(model: nn.Module, *, also: frozenset[str] = frozenset()) -> dict[str, torch.Tensor]:
    """Return the buffers that are part of a model's state, by their names without wrappers.

    A buffer that is not persistent is none: it is a cache, such as a mask that grows with the longest sequence.

    Args:
        also: names of buffers that are returned even if they are not persistent.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in plain_modules(model):
        for name, buffer in module._buffers.items():
            if buffer is None or id(buffer) in seen:
                continue
            whole = _free(_joined(prefix, name), found)
            if name not in module._non_persistent_buffers_set or whole in also:
                seen.add(id(buffer))
                found[whole] = buffer
    return found


def plain_name(model: nn.Module, name: str) -> str:
    """Return the name without wrappers of a parameter or buffer that has this name with them, or without."""
    kept: list[str] = []
    module: nn.Module | None = model
    for part in name.split("."):
        if module is None or not _is_wrapped(module, part):
            kept.append(part)
        # No child of this name: a buffer, or the name leaves a wrapper out, as plain names do.
        module = None if module is None else module._modules.get(part)
    return ".".join(kept)


def _is_wrapped(module: nn.Module, name: str) -> bool:
    """Return whether a module is a wrapper of its child of this name."""
    return name in _INSIDE or (
        name == "module" and isinstance(module, DataParallel | DistributedDataParallel)
    )


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _free(name: str, taken: Collection[str]) -> str:
    """Return a name that no other tensor has: a wrapper may have a tensor of its own beside the wrapped ones."""
    while name in taken:
        name += "'"
    return name


class JoinedOptimizer(Optimizer):
    """One optimizer made of several, such as Muon for the matrices and AdamW for the rest.

    Its parameter groups are theirs, one after the other, and its state dict is that of one optimizer with these groups.
    A schedule of it sets the rates of all. The optimizers of a run make one of ``inner=[muon, adamw]``.

    Args:
        optimizers: they have no parameter in common, and none needs a closure.
        model: its parameters' names are in the errors. All that require a gradient must have an optimizer.

    Raises:
        TypeError: one of them is no torch optimizer, or needs a closure.
        ValueError: there is none, two of them have the same parameter, or a parameter of ``model`` has none; the
            message names the parameter.
    """

    def __init__(self, optimizers: Sequence[Optimizer], model: nn.Module | None = None) -> None:
        self.optimizers = tuple(optimizers)
        """The joined optimizers."""
        if not self.optimizers:
            raise ValueError("inner must be an optimizer, or a list of at least one")
        for number, optimizer in enumerate(self.optimizers):
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"inner[{number}] must be a torch optimizer, got {type(optimizer).__name__}")
            if isinstance(optimizer, torch.optim.LBFGS):
                raise TypeError(f"inner[{number}] evaluates the loss several times per step: LBFGS")
        self._check_owners({} if model is None else plain_parameters(model))
        super().__setstate__({})

    def _check_owners(self, named: Mapping[str, torch.Tensor]) -> None:
        names = {id(parameter): repr(name) for name, parameter in named.items()}
        owners: dict[int, int] = {}
        for number, optimizer in enumerate(self.optimizers):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for place, parameter in enumerate(parameters):
                name = names.get(
                    id(parameter), f"{place} of inner[{number}], of shape {tuple(parameter.shape)},"
                )
                if id(parameter) in owners:
                    raise ValueError(
                        f"inner: parameter {name} has two optimizers, inner[{owners[id(parameter)]}] and"
                        f" inner[{number}]"
                    )
                owners[id(parameter)] = number
        for name, parameter in named.items():
            if parameter.requires_grad and id(parameter) not in owners:
                raise ValueError(
                    f"inner: parameter {name!r} has no optimizer; give it one, or set requires_grad=False"
                )

    # ------------------------------------------------------------------ as torch's optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all: the same dicts, so a rate that is set here is set there."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        for optimizer, its in zip(self.optimizers, self.split(groups), strict=True):
            optimizer.param_groups = its

    @property
    def state(self) -> Any:
        """The states of all, by parameter: a view, which can be cleared."""
        return _States(self.optimizers)

    @state.setter
    def state(self, state: Any) -> None:
        for optimizer in self.optimizers:
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            optimizer.state = defaultdict(dict, {p: kept for p, kept in state.items() if id(p) in own})

    @property
    def defaults(self) -> dict[str, Any]:
        """The default options of all; of options that several have, those of the first."""
        found: dict[str, Any] = {}
        for optimizer in reversed(self.optimizers):
            found |= optimizer.defaults
        return found

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        for optimizer in self.optimizers:
            optimizer.defaults = {
                name: value for name, value in defaults.items() if name in optimizer.defaults
            }

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:  # noqa: ARG002 - torch's signature
        """Refuse: it would not be known which of the optimizers is to have it.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("add the parameter group to one of the joined optimizers")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step all of them; ``closure`` is called once, before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of all parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all as that of one optimizer with all their groups."""
        return self.whole_of([optimizer.state_dict() for optimizer in self.optimizers])

    @staticmethod
    def whole_of(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state dict of all, made of those of each; the reverse of :meth:`parts_of`."""
        groups: list[dict[str, Any]] = []
        states: dict[int, Any] = {}
        first = 0
        for saved in parts:
            count = sum(len(group["params"]) for group in saved["param_groups"])
            groups += [
                {**group, "params": [first + number for number in group["params"]]}
                for group in saved["param_groups"]
            ]
            states |= {first + number: state for number, state in saved["state"].items()}
            first += count
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            ValueError: it has another number of groups, or torch refuses the part of one optimizer. The optimizers
                before that one are loaded then.
        """
        for optimizer, part in zip(self.optimizers, self.parts_of(state_dict), strict=True):
            optimizer.load_state_dict(part)

    def parts_of(self, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return each optimizer's part of a state dict of all.

        Raises:
            ValueError: it has another number of groups.
        """
        parts = []
        for groups in self.split(state_dict["param_groups"]):
            numbers = [number for group in groups for number in group["params"]]
            states = state_dict["state"]
            place = {number: index for index, number in enumerate(numbers)}
            parts.append(
                {
                    "state": {place[number]: states[number] for number in numbers if number in states},
                    "param_groups": [
                        {**group, "params": [place[number] for number in group["params"]]} for group in groups
                    ],
                }
            )
        return parts

    def split(self, groups: Sequence[Any]) -> list[list[Any]]:
        """Return each optimizer's part of the groups of all."""
        counts = [len(optimizer.param_groups) for optimizer in self.optimizers]
        if len(groups) != sum(counts):
            raise ValueError(
                f"the joined optimizers have {sum(counts)} parameter groups, the state {len(groups)}"
            )
        found, first = [], 0
        for count in counts:
            found.append(list(groups[first : first + count]))
            first += count
        return found


class _States(Mapping[Any, Any]):
    """The states of several optimizers, by parameter."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, parameter: Any) -> Any:
        for optimizer in self._optimizers:
            if parameter in optimizer.state:
                return optimizer.state[parameter]
        raise KeyError(parameter)

    def __iter__(self) -> Any:
        return (parameter for optimizer in self._optimizers for parameter in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def clear(self) -> None:
        """Forget all states."""
        for optimizer in self._optimizers:
            optimizer.state.clear()


def joined(inner: Optimizer | Sequence[Optimizer], model: nn.Module | None = None) -> Optimizer:
    """Return an optimizer as it is, and a list of several as a :class:`JoinedOptimizer`."""
    return JoinedOptimizer(inner, model) if isinstance(inner, list | tuple) else cast(Optimizer, inner)


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers of a joined one, and any other one alone."""
    return optimizer.optimizers if isinstance(optimizer, JoinedOptimizer) else (optimizer,)


def kind_of(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class; of a joined one, those of its parts."""
    return " and ".join(type(part).__qualname__ for part in parts_of(optimizer))
