"""Detects a training loop that does not zero its gradients between steps, so that batches count repeatedly."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from functools import partial

import torch

logger = logging.getLogger(__name__)

STEPS = 10  # to check: a loop that forgets to zero shows it from the second step on


class ZeroingCheck:
    """Warns once if the next backward pass adds to a gradient that a step has already used.

    It checks the first and the last parameter, for ten steps. Zeroed gradients cause no false alarm: one that was set
    to ``None`` is a new tensor, and one that was zeroed in place has a new version or holds zeros. It misses loops in
    which neither parameter gets a gradient, or in which the gradients are changed in place after the step. It also
    misses gradients that autograd does not accumulate (FSDP).

    Args:
        parameters: the trained parameters.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        watched = {id(p): p for p in (parameters[0], parameters[-1]) if p.is_leaf}
        self._watched = list(watched.values())
        self._used: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._steps = 0
        self._forgotten = False
        # The hook has a weak reference to the check, because a hook lives as long as its parameter.
        this = weakref.ref(self)
        self._hooks = [
            p.register_hook(partial(_before_accumulation, this, weakref.ref(p)))  # type: ignore[no-untyped-call]
            for p in self._watched
        ]

    def stepped(self) -> None:
        """Note the gradients that a step has used."""
        if self._forgotten:
            logger.warning(
                "the gradients of the last step were not zeroed before this one's backward pass, so that its batch"
                " counts twice: call zero_grad() before each backward pass"
            )
        if self._forgotten or self._steps >= STEPS:
            self._end()
        self._used = {
            id(p): (weakref.ref(p.grad), p.grad._version) for p in self._watched if p.grad is not None
        }
        self._steps += bool(self._used)  # a step that left no gradient shows nothing

    def before_accumulation(self, parameter: torch.Tensor) -> None:
        """Check a parameter whose gradient autograd is about to add to."""
        used, version = self._used.pop(id(parameter), (None, 0))
        gradient = parameter.grad
        if used is None or gradient is None or used() is not gradient or gradient._version != version:
            return
        # A gradient that was zeroed through `.data` keeps its version.
        self._forgotten = self._forgotten or bool(gradient.detach().count_nonzero())

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._watched, self._used, self._forgotten = [], [], {}, False


def _before_accumulation(
    check: weakref.ref[ZeroingCheck], parameter: weakref.ref[torch.Tensor], _gradient: torch.Tensor
) -> None:
    """Check a parameter to whose gradient autograd is about to add another one; a hook of the parameter."""
    checks, watched = check(), parameter()
    if checks is not None and watched is not None:
        checks.before_accumulation(watched)
