"""Accidents of a training loop: parameters that are changed between updates, and gradients that are not zeroed.

No I/O, no clock.

Peers hold the same bits because each of them changes its parameters by updates alone. A digest of all parameters finds
other changes, but only every few updates, since it reads them all. Torch counts the in-place changes of each tensor: to
compare these numbers costs less than a microsecond for a tensor, so it is done in every step. It does not see a change
through ``parameter.data``, which torch does not count.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

logger = logging.getLogger(__name__)


class TouchedCheck:
    """Notices changes of some tensors that are not noted by :meth:`note`; the first note begins it.

    Args:
        tensors: the parameters; none, to notice only updates that were interrupted.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._marks: list[tuple[int, int]] | None = None
        self._updates = False

    def begin_update(self) -> None:
        """Note that an update begins, which ends with :meth:`note`."""
        self._updates = True

    def note(self) -> None:
        """Note that the present values are those that the run's updates have made."""
        self._marks, self._updates = self._present(), False

    def forget(self) -> None:
        """Note that the parameters are about to be replaced: whatever they are next is right."""
        self._marks, self._updates = None, False

    @property
    def was_interrupted(self) -> bool:
        """True if the last update has not ended: its call was interrupted, or raised an error."""
        return self._updates

    def touched(self) -> int | None:
        """Return the position of the first tensor that was changed otherwise; ``None`` if there is none."""
        if self._marks is None:
            return None
        pairs = zip(self._marks, self._present(), strict=True)
        return next((position for position, (before, now) in enumerate(pairs) if before != now), None)

    def _present(self) -> list[tuple[int, int]]:
        return [(tensor._version, tensor.data_ptr()) for tensor in self._tensors]


# The modules to which an optimizer's parameters belong, as far as they can be found: an optimizer knows none of them.
#
# A parameter has no reference to its module. So the garbage collector is asked what refers to the parameters, once
# for an optimizer that was made without `model=`, and only for a warning.


def modules_around(parameters: Sequence[torch.Tensor]) -> list[nn.Module]:
    """Return the modules that have these parameters, and the modules that have those.

    Not ``gc.get_objects``: it also returns tuples that another thread is still making, and making them then fails.
    """
    found: dict[int, nn.Module] = {}
    inner: list[object] = list(parameters)
    while inner:
        outer = [module for module in _owners(inner) if id(module) not in found]
        found.update((id(module), module) for module in outer)
        inner = list(outer)
    return list(found.values())


def _owners(parts: Sequence[object]) -> list[nn.Module]:
    """Return the modules whose dicts of parameters or modules hold any of these."""
    holders: list[object] = [found for found in gc.get_referrers(*parts) if isinstance(found, dict)]
    if not holders:
        return []
    # A module's attributes are in a dict of their own, or in the module itself, as the interpreter has chosen.
    around = gc.get_referrers(*holders)
    direct = [found for found in around if issubclass(type(found), nn.Module)]
    if attributes := [found for found in around if type(found) is dict]:
        direct += [found for found in gc.get_referrers(*attributes) if issubclass(type(found), nn.Module)]
    return list({id(module): module for module in direct}.values())


def saved_buffers(trained: Iterable[torch.Tensor], modules: Iterable[nn.Module]) -> list[str]:
    """Return the buffers that go with trained parameters, as ``Class.name``, without those that no state has.

    They are the persistent floating-point buffers of the modules whose trained parameters all are among ``trained``. A
    module that has others' parameters too, such as one that holds both networks of a GAN, does not count.
    """
    known = {id(parameter) for parameter in trained}
    found: dict[str, None] = {}
    for module in modules:
        if "_parameters" not in vars(module):
            continue  # another thread is making it
        own = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        if not own or not own <= known:
            continue
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if buffer is None or name in part._non_persistent_buffers_set:
                    continue
                if buffer.is_floating_point():
                    found[f"{type(part).__name__}.{name}"] = None
    return list(found)


# Gradients that a loop does not zero between two steps, so that its batches count repeatedly.

STEPS = 10  # to check gradients in: a loop that forgets to zero shows it from the second step on


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
