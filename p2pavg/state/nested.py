"""State dicts of optimizers and schedulers as tensors and plain values, and back. No I/O, no clock.

A tensor anywhere in a state dict is replaced by a reference to its name. The name is the tensor's path, such as
``optimizer/state/0/exp_avg``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from p2pavg.base.errors import StateError
from p2pavg.state.values import MAX_DEPTH, a_kind

_TENSOR = "p2pavg/tensor"  # the only key of a dict that stands for a tensor; the value is the tensor's name
_COUNTER = "p2pavg/counter"  # the same for a Counter, which MultiStepLR has
_PLAIN = (bool, int, float, str, bytes)


def flatten(
    state: Mapping[str, Any], prefix: str = "optimizer"
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a state dict by their names, and all else as plain values.

    The tensors are the state dict's own, not copies. numpy's scalars become plain numbers.

    Args:
        prefix: the first part of every name; errors speak of ``the optimizer's state``.

    Raises:
        StateError: a value is neither a tensor nor plain; the message has its path.
    """
    flattening = _Flattening(prefix)
    return flattening.tensors, flattening.flat(dict(state), ())


def unflatten(
    tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any], *, copy: bool = True
) -> dict[str, Any]:
    """Return the state dict of which :func:`flatten` has made these values.

    Args:
        tensors: may have more tensors than the values refer to.
        copy: true if the state dict gets copies of its tensors: torch's optimizers keep the tensors that they load,
            and write to them.

    Raises:
        StateError: the values refer to a tensor that is not there, or were not made by :func:`flatten`.
    """
    state: dict[str, Any] = _whole(tensors, dict(values), copy)
    return state


class _Flattening:
    """The tensors of one state dict that were found so far."""

    def __init__(self, prefix: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._prefix = prefix

    def flat(self, value: Any, path: tuple[Any, ...]) -> Any:
        """Return a value with references in place of tensors."""
        if len(path) >= MAX_DEPTH:
            raise self._error(path, f"is nested more than {MAX_DEPTH} deep")
        if isinstance(value, torch.Tensor):
            return {_TENSOR: self._add(value, path)}
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or type(value) in _PLAIN:
            return value
        if isinstance(value, Counter):
            return {_COUNTER: self._flat_dict(value, path)}
        if isinstance(value, dict):
            return self._flat_dict(value, path)
        if type(value) in (list, tuple, torch.Size):
            items = [self.flat(item, (*path, index)) for index, item in enumerate(value)]
            return items if type(value) is list else tuple(items)
        raise self._error(path, f"is {a_kind(value)}, which cannot be saved")

    def _flat_dict(self, value: dict[Any, Any], path: tuple[Any, ...]) -> dict[Any, Any]:
        for key in value:
            if type(key) not in (str, int) or key in (_TENSOR, _COUNTER):
                raise self._error(path, f"has the key {key!r}, which cannot be saved")
        # In the order of the keys, so that the names of tensors do not depend on the order in which a dict was filled.
        ordered = sorted(value, key=lambda key: (type(key) is str, key))
        return {key: self.flat(value[key], (*path, key)) for key in ordered}

    def _add(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        name = "/".join(map(str, (self._prefix, *path)))
        while name in self.tensors:  # the keys 0 and "0" in one dict
            name += "~"
        self.tensors[name] = tensor.detach()
        return name

    def _error(self, path: tuple[Any, ...], what: str) -> StateError:
        place = "/".join(map(str, path))
        return StateError(f"the {self._prefix}'s state {place!r} {what}")


def _whole(tensors: Mapping[str, torch.Tensor], value: Any, copy: bool) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_whole(tensors, item, copy) for item in value)
    if type(value) is not dict:
        return value
    if _TENSOR in value:
        name = value[_TENSOR]
        if len(value) != 1 or type(name) is not str or name not in tensors:
            raise StateError(f"the state refers to the tensor {name!r}, which it lacks")
        return tensors[name].clone() if copy else tensors[name]
    if _COUNTER in value:
        counts = value[_COUNTER]
        if (
            len(value) != 1
            or type(counts) is not dict
            or any(type(count) is not int for count in counts.values())
        ):
            raise StateError("the state has a counter that counts nothing")
        return Counter(counts)
    return {key: _whole(tensors, item, copy) for key, item in value.items()}
