"""A replica of a run's common state, which takes updates from its history without the program that trained.

A snapshot says what takes the updates: the names of the optimizer's class and of the recipe, and all options. Only
classes of torch and of this package are made, by name, and nothing is unpickled or imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from p2pavg.base.errors import StateError
from p2pavg.optim.base.joined import JoinedOptimizer
from p2pavg.optim.base.recipe import Settings, hyperparameters, numbers_digest, settings_in
from p2pavg.optim.base.state import Lineage, digest_of, lineage_from, lineage_of, origin_of, pack_lineage
from p2pavg.optim.catching_up.common_state import OPTIMIZER, SCHEDULER
from p2pavg.optim.catching_up.state_check import SWITCHES, checked_optimizer, saved_by
from p2pavg.optim.coordination.training_run import DATA
from p2pavg.optim.large_batch.averaged import clip
from p2pavg.optim.local import outer
from p2pavg.optim.local.anchor import Anchor
from p2pavg.optim.local.local_options import fragments_of, layout_digest
from p2pavg.optim.ranks.shards import total_norm
from p2pavg.state.checking import is_finite
from p2pavg.state.nested import copied, flatten, unflatten
from p2pavg.state.snapshot import Content

PARAMETER, ANCHOR, BUFFER = "parameter/", "anchor/", "buffer/"
_PLAIN = (bool, int, float, str, type(None))
_CLASSES: Mapping[str, type[Optimizer]] = {
    kind.__qualname__: kind
    for module in (torch.optim, outer)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and not kind.__name__.startswith("_")
    # It evaluates the loss several times, and is refused in training, too.
    if kind not in (Optimizer, torch.optim.LBFGS)
}


class Replica:
    """Parameters, averaged buffers and optimizer of a run, without a model.

    Args:
        content: of a snapshot. Its tensors are copied.
        names: of the parameters in the program's model. Fragments of local updates are cut by them.
        device: on which the updates are taken.

    Raises:
        StateError: the snapshot is malformed, or of an optimizer or a recipe that is not known here; the message says
            which.
    """

    def __init__(
        self, content: Content, names: Sequence[str] = (), device: torch.device | str = "cpu"
    ) -> None:
        values = content.values
        try:
            self.lineage = lineage_of(values)
            self.origin = origin = origin_of(values)
        except ValueError as error:
            raise StateError(str(error)) from None
        try:
            self._rules = settings_in(origin.settings, origin.recipe, origin.rules)
        except ValueError as error:
            raise StateError(
                f"the snapshot has no recipe that its updates could be replayed by: {error}"
            ) from None
        # From the recipe, whose digest is in the lineage that members sign, and not from a word beside it.
        kinds = {"AveragedOptimizer": PARAMETER, "LocalUpdates": ANCHOR}
        self._prefix = kinds.get(str(self._rules.get("optimizer")), "")
        if not self._prefix or values.get("kind") != self._prefix:
            raise StateError("the snapshot is of a kind of optimizer that this version cannot replay")
        numbered = _numbered(content, self._prefix)
        self.names = tuple(names) if len(names) == len(numbered) else tuple(numbered)
        """Of the parameters."""
        given = [content.tensors[f"{self._prefix}{name}"] for name in numbered]
        buffers = sorted(name for name in content.tensors if name.startswith(BUFFER))
        self.buffers = {name: content.tensors[name].to(device, copy=True) for name in buffers}
        self._values = {name: value for name, value in values.items() if name not in (OPTIMIZER, "lineage")}
        limit = self._rules.get("max_grad_norm")
        self._max_grad_norm = float(limit) if isinstance(limit, float) else None
        packed = values.get(OPTIMIZER)
        if type(packed) is not dict:
            raise StateError(f"the snapshot has no {OPTIMIZER}")
        saved = unflatten(content.tensors, packed, OPTIMIZER)
        self._anchor: Anchor | None = None
        if self._prefix == PARAMETER:
            self.parameters = [torch.nn.Parameter(tensor.to(device, copy=True)) for tensor in given]
            self.optimizer = _optimizer_of(str(self._rules.get("inner")), self.parameters, saved)
        else:
            self._anchor = self._anchor_of(given, saved, device)
            self.parameters = self._anchor.tensors  # type: ignore[assignment]
            self.optimizer = self._anchor.optimizer
        _load(self.optimizer, saved)
        self.unproven = f"the state of update {self.lineage.epoch}"
        """The part of the state that the snapshot's archivist alone vouches for, unless updates lead to it."""
        if self.lineage.epoch == 0:
            self._check_first()
            self.unproven = "the optimizer's state before the first update" if saved.get("state") else ""

    def _check_first(self) -> None:
        """Check that the run began with these parameters: with the recipe, they are in the lineage."""
        # An anchor is float32, and the parameters that it was taken from may have another dtype.
        dtypes = [None] if self._anchor is None else [None, torch.bfloat16, torch.float16, torch.float64]
        for dtype in dtypes:
            tensors = [each if dtype is None else each.to(dtype) for each in self.parameters]
            if lineage_from(digest_of(tensors), self.origin.recipe) == self.lineage:
                return
        raise StateError("the first parameters are not those with which the run began")

    def _anchor_of(
        self, given: Sequence[torch.Tensor], saved: Mapping[str, Any], device: torch.device | str
    ) -> Anchor:
        count = int(self._rules.get("fragments") or 1)
        # In the order of the program's names, which a snapshot has not.
        pieces = fragments_of(self.names, [tuple(tensor.shape) for tensor in given], count)
        # The recipe names the layout. With other names, averages would go to other places without a word.
        layout = self._rules.get("layout of fragments")
        if count > 1 and layout != layout_digest(self.names, pieces):
            raise StateError(
                "the run averages fragments, which are cut by the names of its model's parameters, and the history does"
                " not have these: let a peer that trains keep it, with RunState(model, history=...)"
            )
        tensors = [tensor.to(device, copy=True) for tensor in given]  # the anchor keeps them
        kind = str(self._rules.get("outer"))
        return Anchor(tensors, lambda pieces: _optimizer_of(kind, pieces, saved), pieces)

    @property
    def like(self) -> list[torch.Tensor]:
        """Tensors with the shapes and dtypes of what is averaged."""
        pseudo = self.parameters if self._anchor is None else self._anchor.like
        return [*pseudo, *self.buffers.values()]

    def take(self, averaged: Sequence[torch.Tensor], numbers: Settings, after: Lineage) -> None:
        """Take one update, as the members of the run did.

        Args:
            averaged: with the shapes of :attr:`like`.
            numbers: the hyperparameters of the update.
            after: the lineage after it.

        Raises:
            StateError: the average is not finite, or the hyperparameters are not those of such an optimizer.
        """
        if not all(map(is_finite, averaged)):
            raise StateError("an average has NaN or infinite values")
        self._set(numbers)
        self.apply(averaged)
        self.lineage = after

    def apply(self, averaged: Sequence[torch.Tensor]) -> None:
        """Take a step with the present hyperparameters; the lineage stays."""
        count = len(averaged) - len(self.buffers)
        self._step(list(averaged[:count]))
        for buffer, average in zip(self.buffers.values(), averaged[count:], strict=True):
            buffer.copy_(average)

    def _step(self, gradients: list[torch.Tensor]) -> None:
        if self._anchor is not None:
            fragment = self.lineage.epoch % self._anchor.fragments
            self._anchor.step(fragment, gradients, lambda _, optimizer: optimizer.step(), total_norm)
            return
        if self._max_grad_norm is not None:
            clip(gradients, self._max_grad_norm, total_norm(gradients))
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter.device)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _set(self, settings: Settings) -> None:
        """Set the hyperparameters of the next update."""
        groups = self.optimizer.param_groups
        for name, value in settings:
            option, _, index = name.partition(" of group ")
            number = int(index) if index.isdigit() else 0
            if number >= len(groups) or option not in groups[number]:
                raise StateError(f"hyperparameters with {name!r}, which the optimizer has not")
            held = groups[number][option]
            # Optimizers with `capturable` keep their rate in a tensor, and compute otherwise with a number.
            if isinstance(held, torch.Tensor):
                held.fill_(value)
            else:
                groups[number][option] = value
        if numbers_digest(hyperparameters(self.optimizer)) != numbers_digest(settings):
            raise StateError("hyperparameters that are not all of the optimizer's")

    def content(self) -> Content:
        """Return the present state as a snapshot. Its tensors are the replica's own.

        It has no schedule and no plan of the data: those are the program's.
        """
        tensors, told = flatten(saved_by(self.optimizer), OPTIMIZER)
        named = {
            f"{self._prefix}parameter {number}": tensor.detach()
            for number, tensor in enumerate(self.parameters)
        }
        values = {name: value for name, value in self._values.items() if name not in (SCHEDULER, DATA)}
        return Content(
            tensors={**named, **self.buffers, **tensors},
            values={**values, OPTIMIZER: told, "lineage": pack_lineage(self.lineage)},
        )

    def difference(self, content: Content) -> str:
        """Return the first tensor of a snapshot that is not this replica's, as a sentence; empty if all are."""
        here = self.content()
        for name in ("kind", "origin"):
            if here.values[name] != content.values.get(name):
                return f"it has another {name}"
        mine = here.tensors
        scheduled = f"{SCHEDULER}/"
        its = {name: tensor for name, tensor in content.tensors.items() if not name.startswith(scheduled)}
        if missing := sorted(mine.keys() ^ its.keys()):
            return f"only one of the two states has {missing[0]!r}"
        for name, tensor in its.items():
            own = mine[name].cpu()
            if own.shape != tensor.shape or own.dtype != tensor.dtype:
                return f"{name!r} has another shape or dtype"
            if not torch.equal(_bits(own), _bits(tensor)):
                gap = (own.double() - tensor.double()).abs().max().item()
                return f"{name!r} differs by up to {gap:.3g}"
        return ""

    def digest(self) -> bytes:
        """Return the digest of the parameters and averaged buffers, 32 bytes."""
        return digest_of([*self.parameters, *self.buffers.values()])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _numbered(content: Content, prefix: str) -> list[str]:
    """Return the names of the parameters in a snapshot, in the order of the optimizer."""
    found = [name.removeprefix(prefix) for name in content.tensors if name.startswith(prefix)]
    ordered = [f"parameter {number}" for number in range(len(found))]
    if not found or set(found) != set(ordered):
        raise StateError("the parameters of the snapshot are not numbered one by one")
    return ordered


def _optimizer_of(kinds: str, parameters: Sequence[torch.Tensor], saved: Mapping[str, Any]) -> Optimizer:
    """Make the optimizer of a snapshot; ``kinds`` are the names of its classes, as in the recipe."""
    classes: list[Any] = []  # each is made of groups of parameters, and has defaults
    for kind in kinds.split(" and "):
        if kind not in _CLASSES:
            raise StateError(
                f"the optimizer {kind or 'of this run'!r} is none of torch's and none of p2pavg's: its updates can be"
                " checked, and not be replayed"
            )
        classes.append(_CLASSES[kind])
    groups = saved.get("param_groups")
    if type(groups) is not list or any(
        type(group) is not dict
        or type(group.get("params")) is not list
        or any(type(name) is not str for name in group)
        for group in groups
    ):
        raise StateError("the snapshot's optimizer has no groups of options and parameters")
    numbers = [number for group in groups for number in group["params"]]
    if numbers != list(range(len(parameters))):
        raise StateError("the snapshot's optimizer is of other parameters")
    try:
        made = []
        for one, part in zip(classes, _divided(classes, groups), strict=True):
            taken = inspect.signature(one).parameters
            own = []
            for group in part:
                # Which implementation takes the step is this machine's choice.
                names = [name for name in group if name in taken and name not in SWITCHES]
                options = {name: group[name] for name in names if _is_plain(group[name])}
                own.append(options | {"params": [parameters[number] for number in group["params"]]})
            made.append(one(own))
    except (ValueError, TypeError, RuntimeError) as error:
        raise StateError(f"the snapshot's optimizer cannot be made: {error}") from None
    optimizer = made[0] if len(made) == 1 else JoinedOptimizer(made)
    # A schedule, or the program, may have added options that are no arguments, such as `initial_lr`.
    for held, group in zip(optimizer.param_groups, groups, strict=True):
        for name, value in group.items():
            if name not in held and name not in SWITCHES and _is_plain(value):
                held[name] = value
    return optimizer


def _divided(classes: Sequence[Any], groups: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return each class's groups: the first ones that have all of its options, and at least one."""
    found: list[list[dict[str, Any]]] = []
    at = 0
    for position, kind in enumerate(classes):
        parameter = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.float32, device="cpu"))
        options = kind([parameter]).defaults.keys()
        later = len(classes) - position - 1
        end = at + 1
        while end < len(groups) - later and (not later or options <= groups[end].keys()):
            end += 1
        found.append(list(groups[at:end]))
        at = end
    return found


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _load(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    # The groups' options are those that it was made with, so they pass this check; its states are the snapshot's claim.
    checked = checked_optimizer(optimizer, dict(saved))
    try:
        optimizer.load_state_dict(
            {"param_groups": copied(checked["param_groups"]), "state": checked["state"]}
        )
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        raise StateError(f"the snapshot's optimizer cannot be loaded: {error}") from None
