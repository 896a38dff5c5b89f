"""The state that all peers of a run share: laid out for a snapshot, and replaced by another peer's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from p2pavg.base.errors import StateError
from p2pavg.optim.base.model import ModelParts
from p2pavg.optim.base.state import Lineage, lineage_of
from p2pavg.optim.catching_up.state_check import (
    after_first_step,
    checked_optimizer,
    checked_schedule,
    late_options,
    saved_by,
    settings_of,
)
from p2pavg.optim.coordination.training_run import DATA, TrainingRun
from p2pavg.optim.ranks.shards import local_of, spread_like
from p2pavg.state.average import pack_numbers
from p2pavg.state.checking import check
from p2pavg.state.layout import MAX_TENSORS, Spec, write_header
from p2pavg.state.nested import copied, flatten, unflatten
from p2pavg.state.snapshot import VALUES_KEY, Content, values_text

logger = logging.getLogger(__name__)

OPTIMIZER = "optimizer"
SCHEDULER = "scheduler"
STATE_FACTOR = 8
"""Limit of an optimizer's state in a received snapshot, in multiples of the parameters' bytes. Adam's has 2; 8 leave
room for states of another dtype. 64 MiB are allowed in any case."""
MIN_STATE_BYTES = 2**26
MAX_UPDATES = 2**40
"""The latest update of a state that is taken: centuries at the fastest pace. Numbers of updates stay far below the
largest that words may name."""
MANY_TENSORS = MAX_TENSORS // 32
"""With more parameters than these, an optimizer's first step is tried when it is made: its state may have too many."""
_REMEDY = (
    "Without that no other peer can join: make it a number, a text, a dtype, a tensor, or a list or dict of these, "
    "or keep it out of the optimizer and its schedule"
)


class CommonState:
    """Tensors, optimizer and schedule of which all peers of a lineage hold the same bits.

    Args:
        prefix: of the tensors' names, ``parameter/`` or ``anchor/``.
        tensors: the parameters, or the anchor of local updates.
        parts: the model's buffers and names.
        optimizer: takes the common steps.
        scheduler: its schedule, if it has one.
        training: the lineage.

    Raises:
        StateError: the optimizer's or the schedule's state cannot be saved, or has too many tensors. It is raised here,
            when the optimizer is made, and not when another peer asks for the state.
    """

    def __init__(
        self,
        prefix: str,
        tensors: Sequence[torch.Tensor],
        parts: ModelParts,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        training: TrainingRun,
    ) -> None:
        self._prefix = prefix
        self._tensors = tensors
        self._parts = parts
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._training = training
        # Now, because training may add counts to the groups, which would be taken for settings later.
        self._settings = settings_of(optimizer)
        self._has_warned = self._is_numberless = False
        self.check_saves()
        self._check_size()

    def check_saves(self) -> None:
        """Check that the options and the schedule can be saved, as they are now. It takes no time worth mentioning.

        Raises:
            StateError: they cannot; the message names the value.
        """
        late = [] if self._has_warned else late_options(self._optimizer, self._settings)
        if late:
            self._has_warned = True
            logger.warning(
                "the optimizer's %s came after this optimizer was made: a peer that begins later lacks it, this one's"
                " next start included, and cannot take the state. Set it before, on all peers",
                late[0],
            )
        # Only the options are in question here. Parameters are tensors that every snapshot has anyway.
        groups = [{**group, "params": [], "param_names": []} for group in self._optimizer.param_groups]
        try:
            values_text(flatten({"param_groups": groups}, OPTIMIZER)[1])
            if self._scheduler is not None:
                values_text(flatten(self._scheduler.state_dict(), SCHEDULER)[1])
        except StateError as error:
            raise StateError(f"{error}. {_REMEDY}") from None

    def _check_size(self) -> None:
        """Check that a snapshot holds what the optimizer keeps after its first step."""
        if len(self._tensors) <= MANY_TENSORS:
            return
        # Optimizers make their tensors at the first step, and a snapshot of later than that has to hold them all.
        tensors, values = flatten(after_first_step(self._optimizer), OPTIMIZER)
        named = self._tensors_as(self._names)
        specs = {name: Spec.of(tensor) for name, tensor in {**named, **tensors}.items()}
        try:
            write_header(specs, {VALUES_KEY: values_text({OPTIMIZER: values})})
        except StateError as error:
            raise StateError(
                f"an optimizer of {len(self._tensors)} tensors cannot share its state with other peers: {error}"
            ) from None

    @property
    def lineage(self) -> Lineage:
        """The lineage of the present state."""
        return self._training.lineage

    @property
    def numbers(self) -> bytes:
        """The hyperparameters of the last update, packed; empty if one of them is no plain value."""
        try:
            return pack_numbers(self._training.last_numbers)
        except StateError as error:
            if not self._is_numberless:
                self._is_numberless = True
                logger.warning("a history of this run cannot be replayed: %s", error)
            return b""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(self._parts.labels[: len(self._tensors)])

    @property
    def buffers(self) -> frozenset[str]:
        """Names of the averaged buffers."""
        return frozenset(self._parts.common)

    @property
    def _names(self) -> list[str]:
        return [f"{self._prefix}{label}" for label in self._parts.labels[: len(self._tensors)]]

    @property
    def _numbers(self) -> list[str]:
        return [f"{self._prefix}{number}" for number in self._parts.numbers]

    def _tensors_as(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the tensors that every state of this run has; ``names`` are those of the parameters."""
        named = {name: local_of(tensor) for name, tensor in zip(names, self._tensors, strict=True)}
        return named | {f"buffer/{name}": tensor for name, tensor in self._parts.common.items()}

    def content(self, *, named: bool = False) -> Content:
        """Return the present state. Its tensors are the optimizer's own: copy them before the next update.

        Args:
            named: true for the names of the parameters in the model, as in a checkpoint. Else they are numbers, as in
                snapshots: peers that were given the model and peers that were not offer the same bytes.
        """
        names = self._names if named else self._numbers
        tensors, values = flatten(saved_by(self._optimizer), OPTIMIZER)
        told: dict[str, Any] = {"kind": self._prefix, OPTIMIZER: values, **self._training.saved()}
        if self._scheduler is not None:
            more, told[SCHEDULER] = flatten(self._scheduler.state_dict(), SCHEDULER)
            tensors = {**tensors, **more}
        local = {name: local_of(tensor) for name, tensor in tensors.items()}
        return Content(tensors={**self._tensors_as(names), **local}, values=told)

    @property
    def max_bytes(self) -> int:
        """Size of the largest snapshot that this peer accepts, in bytes."""
        nbytes = sum(tensor.nbytes for tensor in self._tensors_as(self._names).values())
        return (1 + STATE_FACTOR) * nbytes + MIN_STATE_BYTES

    def prepare(self, content: Content, expected: Lineage | None = None) -> Callable[[], None]:
        """Check another state in whole; return the function that takes it, which does not fail.

        Args:
            expected: the lineage that the state must have; ``None`` for any, as of this peer's own checkpoint.

        Raises:
            StateError: the state does not fit this peer's model, optimizer or settings; the message says why.
        """
        named = self._tensors_as(self._names)
        # With the names of this peer's model in place of numbers: errors are about names.
        names = dict(zip(self._numbers, self._names, strict=True))
        tensors = {names.get(name, name): tensor for name, tensor in content.tensors.items()}
        content = Content(tensors=tensors, values=content.values)
        values = content.values
        if values.get("kind") != self._prefix:
            raise StateError("the state is that of another kind of optimizer")
        if (SCHEDULER in values) != (self._scheduler is not None):
            raise StateError("only one of the state and this optimizer has a scheduler")
        if unknown := sorted(values.keys() - {"kind", OPTIMIZER, SCHEDULER, DATA, "lineage", "origin"}):
            raise StateError(f"the state has the entry {unknown[0]!r}, which is unknown here")
        # Names, shapes and finite numbers come before the trial of the optimizer, which takes much longer.
        check(
            content,
            {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()},
            others=(f"{OPTIMIZER}/", f"{SCHEDULER}/"),
            others_bytes=self.max_bytes,
        )
        try:
            lineage = lineage_of(values)
            refusal = self._training.refusal(values, is_own=expected is None)
        except ValueError as error:
            raise StateError(str(error)) from None
        # The voters have decided for the lineage in the donors' records.
        # What the state says of itself has to be the same.
        if expected is not None and lineage != expected:
            raise StateError("the state is that of another update than its donors say")
        if refusal is not None:
            raise StateError(f"{refusal}; to join it, use its settings")
        if lineage.epoch > MAX_UPDATES:
            raise StateError(f"the state is of update {lineage.epoch}, which no run reaches")
        optimizer = checked_optimizer(self._optimizer, _state_dict(content, OPTIMIZER), self._settings)
        try:
            self._training.plan_in(values)
        except ValueError as error:
            raise StateError(str(error)) from None
        schedule = None
        if self._scheduler is not None:
            saved = _state_dict(content, SCHEDULER)
            schedule = checked_schedule(self._scheduler, self._optimizer, optimizer["param_groups"], saved)
        run = {name: values[name] for name in ("lineage", "origin", DATA) if name in values}

        # Everything was checked above, so that this cannot fail in the middle and leave half of a state.
        def take() -> None:
            self._take(named, content, optimizer, schedule)
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
            # In place, because the model and the optimizer refer to these very tensors.
            tensor.copy_(content.tensors[name])
        # The averaged buffers among them are this peer's own copies. The model gets its values from there.
        self._parts.restore()
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        states = {
            number: _into(parameters[number], self._optimizer.state.get(parameters[number], {}), state)
            for number, state in optimizer["state"].items()
        }
        # The optimizer keeps what it loads, and the snapshot's bytes are given back after this.
        groups = copied(optimizer["param_groups"])
        self._optimizer.load_state_dict({"param_groups": groups, "state": states})
        if self._scheduler is not None and schedule is not None:
            self._scheduler.load_state_dict(copied(schedule))


def _state_dict(content: Content, name: str) -> object:
    """Return one state dict of a state. Its tensors are views of the state's bytes."""
    values = content.values.get(name)
    if not isinstance(values, dict):
        raise StateError(f"the state has no {name}")
    # Nothing of a state is copied before it is accepted: a stranger may have sent it.
    return unflatten(content.tensors, values, name, copy=False)


def _into(parameter: torch.Tensor, existing: Mapping[Any, Any], saved: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a parameter's saved state in the memory that it has already, as far as it fits."""
    found = {}
    for name, value in saved.items():
        held = existing.get(name)
        if (
            isinstance(held, torch.Tensor)
            and isinstance(value, torch.Tensor)
            and (local_of(held).shape, local_of(held).dtype) == (value.shape, value.dtype)
        ):
            # No second set of tensors is needed for a peer that has trained already.
            local_of(held).copy_(value)
            found[name] = held
        elif isinstance(value, torch.Tensor) and value.shape == local_of(parameter).shape:
            # Values of the parameter's shape, such as its moments, are divided over the ranks as the parameter is.
            found[name] = spread_like(parameter, value.clone())
        else:
            found[name] = copied(value)
    return found
