"""The weights of one member: laid out for a snapshot, and replaced by another member's. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from p2pavg.base.errors import ConfigError, RemoteProtocolError, StateError
from p2pavg.optim.base.joined import plain_buffers, plain_parameters
from p2pavg.optim.catching_up.state_check import checked_optimizer, saved_by, settings_of
from p2pavg.population.history import Ancestor, pack_ancestors, read_ancestors
from p2pavg.population.settings import Value
from p2pavg.state.checking import check
from p2pavg.state.layout import Spec
from p2pavg.state.nested import copied, flatten, unflatten
from p2pavg.state.snapshot import Content

KIND = "population"
OPTIMIZER = "optimizer"
STATE_FACTOR = 8
"""Limit of an optimizer's state in another member's snapshot, in multiples of the parameters' bytes. Adam's has 2."""
MIN_STATE_BYTES = 2**26

Apply = Callable[[Mapping[str, Value]], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A state of another member that fits this one."""

    take: Callable[[], None]
    """Replaces this member's tensors and optimizer state. It does not fail."""
    ancestors: tuple[Ancestor, ...]
    """The generations in these weights, the oldest first."""


class Weights:
    """A model and its optimizer.

    Args:
        model: its parameters and buffers are copied from member to member.
        optimizer: its state goes with them.
        apply: sets hyperparameters; ``None`` sets the options of these names in all parameter groups of the optimizer.
        names: the hyperparameters.

    Raises:
        ConfigError: the optimizer lacks an option of such a name, and ``apply`` is not given.
        StateError: the optimizer has an option or a state that cannot be saved.
        TypeError: an argument is of another type.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, apply: Apply | None, names: Sequence[str]
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if apply is None:
            for name in names:
                if any(name not in group for group in optimizer.param_groups):
                    raise ConfigError(
                        f"{type(optimizer).__name__} has no option {name!r}:"
                        " give apply=, which sets the hyperparameters"
                    )
        self._model = model
        self._optimizer = optimizer
        self._apply = apply
        self._settings = settings_of(optimizer)
        flatten(saved_by(optimizer), OPTIMIZER)  # what cannot be saved is refused now, not after a generation

    def apply(self, hyperparameters: Mapping[str, Value]) -> None:
        """Set the hyperparameters for the training that follows."""
        if self._apply is not None:
            self._apply(dict(hyperparameters))
            return
        for group in self._optimizer.param_groups:
            group.update(hyperparameters)

    def content(self, ancestors: Sequence[Ancestor]) -> Content:
        """Return the present state. Its tensors are the model's own: copy them before the next step."""
        tensors, values = flatten(saved_by(self._optimizer), OPTIMIZER)
        told: dict[str, Any] = {"kind": KIND, OPTIMIZER: values, "ancestors": pack_ancestors(ancestors)}
        return Content(tensors={**self._named(), **tensors}, values=told)

    @property
    def max_bytes(self) -> int:
        """Size of the largest snapshot that this member accepts, in bytes."""
        return (1 + STATE_FACTOR) * sum(tensor.nbytes for tensor in self._named().values()) + MIN_STATE_BYTES

    def prepare(self, content: Content) -> Loaded:
        """Check another member's state in whole, before anything of this member changes.

        Raises:
            StateError: it does not fit this model and optimizer, or has values that are not finite; the message says
                which.
        """
        if content.values.keys() != {"kind", OPTIMIZER, "ancestors"} or content.values["kind"] != KIND:
            raise StateError("it is no state of a member of a population")
        named = self._named()
        check(
            content,
            {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()},
            others=(f"{OPTIMIZER}/",),
            others_bytes=self.max_bytes,
        )
        values = content.values[OPTIMIZER]
        if not isinstance(values, dict):
            raise StateError("the state has no optimizer")
        # This member's settings stay: those that the population explores come with the donor's signed word, not here.
        its = unflatten(content.tensors, values, OPTIMIZER, copy=False)
        state = checked_optimizer(self._optimizer, its, self._settings, keeps_settings=True)
        try:
            ancestors = read_ancestors(content.values["ancestors"])
        except RemoteProtocolError as error:
            raise StateError(str(error)) from None

        return Loaded(partial(self._take, content, state), ancestors)

    def restore(self, content: Content) -> None:
        """Take a state that this member has made itself: it is not checked."""
        self._take(content, unflatten(content.tensors, content.values[OPTIMIZER], OPTIMIZER, copy=False))

    @torch.no_grad()
    def _take(self, content: Content, state: dict[str, Any]) -> None:
        for name, tensor in self._named().items():
            tensor.copy_(content.tensors[name])
        # Copies: torch's optimizers keep the tensors that they load, and those of a snapshot go with its bytes.
        self._optimizer.load_state_dict(copied(state))

    def _named(self) -> dict[str, torch.Tensor]:
        parameters, buffers = plain_parameters(self._model), plain_buffers(self._model)
        return {f"parameter/{name}": tensor.detach() for name, tensor in parameters.items()} | {
            f"buffer/{name}": tensor for name, tensor in buffers.items()
        }
