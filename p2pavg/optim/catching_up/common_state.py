"""The state that all peers of a run share: laid out for a snapshot, and replaced by another peer's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from p2pavg.base.errors import StateError
from p2pavg.optim.base.lineage import Lineage
from p2pavg.optim.base.model import ModelParts
from p2pavg.optim.base.state import lineage_of
from p2pavg.optim.coordination.training_run import TrainingRun
from p2pavg.optim.ranks.shards import local_of, spread_like
from p2pavg.optim.state_check import checked_optimizer, checked_schedule
from p2pavg.state.checking import check
from p2pavg.state.layout import Spec
from p2pavg.state.nested import flatten, unflatten
from p2pavg.state.snapshot import Content

OPTIMIZER = "optimizer"
SCHEDULER = "scheduler"
EXTRA = "extra"
STATE_FACTOR = 8
"""Limit of an optimizer's state in a received snapshot, in multiples of the parameters' bytes. Adam's has 2; 8 leave
room for states of another dtype. 64 MiB are allowed in any case."""
MIN_STATE_BYTES = 2**26
MAX_UPDATES = 2**40
"""The latest update of a state that is taken: centuries at the fastest pace. Numbers of updates stay far below the
largest that words may name."""


class Extra(Protocol):
    """Plain values that all peers of a lineage share, besides those of the optimizer."""

    def kept(self) -> Any:
        """Return the present values, for a state."""

    def prepare(self, value: object) -> Callable[[], None]:
        """Check those of another state; return the function that takes them, which does not fail.

        Raises:
            StateError: they are malformed, or do not fit.
        """


class CommonState:
    """Tensors, optimizer and schedule of which all peers of a lineage hold the same bits.

    Args:
        prefix: of the tensors' names, ``parameter/`` or ``anchor/``.
        tensors: the parameters, or the anchor of local updates.
        parts: the model's buffers and names.
        optimizer: takes the common steps.
        scheduler: its schedule, if it has one.
        training: the lineage.
        extra: further values, if there are any.
    """

    def __init__(
        self,
        prefix: str,
        tensors: Sequence[torch.Tensor],
        parts: ModelParts,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        training: TrainingRun,
        extra: Extra | None = None,
    ) -> None:
        self._prefix = prefix
        self._tensors = tensors
        self._parts = parts
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._training = training
        self._extra = extra

    @property
    def lineage(self) -> Lineage:
        """The lineage of the present state."""
        return self._training.lineage

    @property
    def buffers(self) -> frozenset[str]:
        """Names of the averaged buffers."""
        return frozenset(self._parts.common)

    def _named(self) -> dict[str, torch.Tensor]:
        """Return the tensors that every snapshot of this run has, by name."""
        labels = self._parts.labels[: len(self._tensors)]
        named = {
            f"{self._prefix}{label}": local_of(tensor)
            for label, tensor in zip(labels, self._tensors, strict=True)
        }
        return named | {f"buffer/{name}": tensor for name, tensor in self._parts.common.items()}

    def content(self) -> Content:
        """Return the present state. Its tensors are the optimizer's own: copy them before the next update."""
        tensors, values = flatten(self._optimizer.state_dict(), OPTIMIZER)
        told: dict[str, Any] = {"kind": self._prefix, OPTIMIZER: values, **self._training.saved()}
        if self._scheduler is not None:
            more, told[SCHEDULER] = flatten(self._scheduler.state_dict(), SCHEDULER)
            tensors = {**tensors, **more}
        if self._extra is not None:
            told[EXTRA] = self._extra.kept()
        local = {name: local_of(tensor) for name, tensor in tensors.items()}
        return Content(tensors={**self._named(), **local}, values=told)

    @property
    def max_bytes(self) -> int:
        """Size of the largest snapshot that this peer accepts, in bytes."""
        nbytes = sum(tensor.nbytes for tensor in self._named().values())
        return (1 + STATE_FACTOR) * nbytes + MIN_STATE_BYTES

    def prepare(self, content: Content, expected: Lineage | None = None) -> Callable[[], None]:
        """Check another state in whole; return the function that takes it, which does not fail.

        Args:
            expected: the lineage that the state must have; ``None`` for any.

        Raises:
            StateError: the state does not fit this peer's model, optimizer or settings; the message says why.
        """
        named = self._named()
        values = content.values
        if values.get("kind") != self._prefix:
            raise StateError("the state is that of another kind of optimizer")
        if (SCHEDULER in values) != (self._scheduler is not None):
            raise StateError("only one of the state and this optimizer has a scheduler")
        if (EXTRA in values) != (self._extra is not None):
            raise StateError("only one of the state and this optimizer is of a team of a population")
        if unknown := sorted(values.keys() - {"kind", OPTIMIZER, SCHEDULER, EXTRA, "lineage", "origin"}):
            raise StateError(f"the state has the entry {unknown[0]!r}, which is unknown here")
        check(
            content,
            {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()},
            others=(f"{OPTIMIZER}/", f"{SCHEDULER}/"),
            others_bytes=self.max_bytes,
        )
        try:
            lineage = lineage_of(values)
            refusal = self._training.refusal(values)
        except ValueError as error:
            raise StateError(str(error)) from None
        if expected is not None and lineage != expected:
            raise StateError("the state is that of another update than its donors say")
        if refusal is not None:
            raise StateError(f"{refusal}; to join it, use its settings")
        if lineage.epoch > MAX_UPDATES:
            raise StateError(f"the state is of update {lineage.epoch}, which no run reaches")
        optimizer = checked_optimizer(self._optimizer, _state_dict(content, OPTIMIZER, copy=False))
        schedule = None
        if self._scheduler is not None:
            saved = _state_dict(content, SCHEDULER, copy=True)
            schedule = checked_schedule(self._scheduler, self._optimizer, optimizer["param_groups"], saved)
        run = {name: values[name] for name in ("lineage", "origin")}
        take_extra = None if self._extra is None else self._extra.prepare(values[EXTRA])

        def take() -> None:
            self._take(named, content, optimizer, schedule)
            if take_extra is not None:
                take_extra()
            self._training.load(run, lineage)
            self._training.begin()

        return take

    @torch.no_grad()
    def _take(
        self,
        named: Mapping[str, torch.Tensor],
        content: Content,
        optimizer: dict[str, Any],
        schedule: dict[str, Any] | None,
    ) -> None:
        for name, tensor in named.items():
            tensor.copy_(content.tensors[name])
        self._parts.restore()
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        states = {
            number: _into(parameters[number], self._optimizer.state.get(parameters[number], {}), state)
            for number, state in optimizer["state"].items()
        }
        self._optimizer.load_state_dict({**optimizer, "state": states})
        if self._scheduler is not None and schedule is not None:
            self._scheduler.load_state_dict(schedule)


def _state_dict(content: Content, name: str, *, copy: bool) -> object:
    """Return one state dict of a state; without ``copy`` its tensors are views of the state's bytes."""
    values = content.values.get(name)
    if not isinstance(values, dict):
        raise StateError(f"the state has no {name}")
    return unflatten(content.tensors, values, copy=copy)


def _into(parameter: torch.Tensor, existing: Mapping[Any, Any], saved: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a parameter's saved state in the memory that it has already, as far as it fits."""
    found = {}
    for name, value in saved.items():
        held = existing.get(name)
        if (
            isinstance(held, torch.Tensor)
            and isinstance(value, torch.Tensor)
            and _is_like(local_of(held), value)
        ):
            local_of(held).copy_(value)
            found[name] = held
        elif isinstance(value, torch.Tensor) and value.shape == local_of(parameter).shape:
            found[name] = spread_like(parameter, value.clone())
        else:
            found[name] = _copied(value)
    return found


def _is_like(held: torch.Tensor, value: torch.Tensor) -> bool:
    return held.shape == value.shape and held.dtype == value.dtype


def _copied(value: Any) -> Any:
    """Return a value with tensors of its own: those of a state go with its bytes."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _copied(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(part) for part in value)
    return value
