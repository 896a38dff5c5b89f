"""State dicts of optimizers and schedulers as tensors and plain values, and back. No I/O, no clock.

A tensor's name is its path in the state dict, such as ``optimizer/state/0/exp_avg``. The values do not mention it: its
name tells its place. So the values do not grow with the number of tensors. Within the parts of a state dict, such as
``state``, a dict that holds tensors alone is not in the values either.

Some names do not tell the place: that of a tensor in a list, or under a key that is no plain name, such as one with a
slash. The values have a reference to such a tensor in its place. In states of version 0.2, all tensors have one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from p2pavg.base.errors import StateError
from p2pavg.state.values import MAX_DEPTH, MAX_SCATTERED, a_kind, scattered, shown_path

_TENSOR = "p2pavg/tensor"  # the only key of a dict that stands for a tensor; the value is the tensor's name
_COUNTER = "p2pavg/counter"  # the same for a Counter, which MultiStepLR has
_DTYPE = "p2pavg/dtype"  # the same for a dtype; the value is its name, such as "float32"
_MARKS = frozenset({_TENSOR, _COUNTER, _DTYPE})
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,18}")  # a part of a name that stands for a key that is an integer
_PLACED = object()  # in place of a value that its tensors' names tell


def flatten(
    state: Mapping[str, Any], prefix: str = "optimizer"
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a state dict by their names, and all else as plain values.

    The tensors are the state dict's own, not copies. numpy's numbers become plain numbers, also in an array without
    dimensions, and subclasses of plain types become these types.

    Args:
        prefix: the first part of every name; errors speak of ``the optimizer's state``.

    Raises:
        StateError: a value is neither a tensor nor plain; the message has its path.
    """
    flattening = _Flattening(prefix)
    values = flattening.flat(dict(state), (), told=True)
    return flattening.tensors, values


def unflatten(
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    prefix: str = "optimizer",
    *,
    copy: bool = True,
) -> dict[str, Any]:
    """Return the state dict of which :func:`flatten` has made these values.

    Each tensor has one place, so the state dict takes no more memory than the tensors have.

    Args:
        tensors: may have more tensors, of other prefixes.
        prefix: that of :func:`flatten`. All tensors with it are put in their places.
        copy: true if the state dict gets copies of its tensors: torch's optimizers keep the tensors that they load,
            and write to them. Copy what a stranger has sent after it was accepted (:func:`copied`).

    Raises:
        StateError: the values refer to a tensor that is not there, or twice to one, or were not made by
            :func:`flatten`.
    """
    whole = _Whole(tensors)
    state = whole.of(dict(values))
    if type(state) is not dict:
        raise StateError("the state is no dict")
    whole.place(state, prefix)
    return copied(state) if copy else state


def copied(value: Any) -> Any:
    """Return a value with tensors of its own: those of a snapshot go with its bytes."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Counter):
        return Counter(value)
    if isinstance(value, dict):
        return {name: copied(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(part) for part in value)
    return value


def plain_number(value: Any) -> Any:
    """Return a number of numpy, also one in an array without dimensions, as Python's; anything else as it is."""
    is_number = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)
    return value.item() if is_number else value


class _Flattening:
    """The tensors of one state dict that were found so far."""

    def __init__(self, prefix: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._prefix = prefix

    def flat(self, value: Any, path: tuple[Any, ...], *, told: bool) -> Any:
        """Return a value with references in place of tensors, or ``_PLACED`` if nothing has to stand in its place.

        Args:
            told: true if the name of a tensor with this path tells the path.
        """
        if len(path) >= MAX_DEPTH:
            raise self._error(path, f"is nested more than {MAX_DEPTH} deep")
        if isinstance(value, torch.Tensor):
            return self._add(value, path, told)
        # First: most of numpy's numbers are no subclass of Python's, and would be refused below.
        value = plain_number(value)
        if value is None or type(value) in (bool, int, float, str, bytes):
            return value
        if isinstance(value, torch.dtype):
            return {_DTYPE: str(value).removeprefix("torch.")}
        if isinstance(value, Counter):
            return {_COUNTER: self._flat_dict(value, path, told=False)}
        if isinstance(value, dict):
            return self._flat_dict(value, path, told=told)
        if isinstance(value, list | tuple):
            items = [self.flat(item, (*path, index), told=False) for index, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        for kind, plain in ((int, int), (float, float), (str, str.__str__)):
            if isinstance(value, kind):  # a member of an enumeration, for example
                return plain(value)
        raise self._error(path, f"is {a_kind(value)}, which cannot be saved")

    def _flat_dict(self, value: dict[Any, Any], path: tuple[Any, ...], *, told: bool) -> Any:
        for key in value:
            # Not `isinstance`: True is an int, and would come back as 1.
            if type(key) not in (str, int) or key in _MARKS:
                raise self._error(path, f"has the key {key!r}, which cannot be saved")
        # In the order of the keys, so that the names of tensors do not depend on the order in which a dict was filled.
        ordered = sorted(value, key=lambda key: (type(key) is str, key))
        found = {}
        for key in ordered:
            item = self.flat(value[key], (*path, key), told=told and _tells(key))
            if item is not _PLACED:
                found[key] = item
        is_told = bool(ordered) and not found and len(path) > 1  # the parts of a state are named in any case
        return _PLACED if is_told else found

    def _add(self, tensor: torch.Tensor, path: tuple[Any, ...], told: bool) -> Any:
        name = "/".join(map(str, (self._prefix, *path)))
        if told and name not in self.tensors:
            self.tensors[name] = tensor.detach()
            return _PLACED
        while name in self.tensors:  # the keys 0 and "0" in one dict
            name += "~"
        self.tensors[name] = tensor.detach()
        return {_TENSOR: name}

    def _error(self, path: tuple[Any, ...], what: str) -> StateError:
        return StateError(f"the {self._prefix}'s state {shown_path(path)!r} {what}")


def _tells(key: Any) -> bool:
    """Return whether a part of a name tells that this key is meant."""
    if type(key) is int:
        return _NUMBER.fullmatch(str(key)) is not None
    return bool(key) and "/" not in key and key[-1] != "~" and _NUMBER.fullmatch(key) is None


class _Whole:
    """A state dict that is put together from its values and tensors. No tensor is copied."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._used: set[str] = set()

    def of(self, value: Any) -> Any:
        """Return a value with tensors in place of references."""
        if type(value) in (list, tuple):
            return type(value)(self.of(item) for item in value)
        if type(value) is not dict:
            return value
        if _TENSOR in value:
            return self._referred(value)
        if _COUNTER in value:
            counts = value[_COUNTER]
            if (
                len(value) != 1
                or type(counts) is not dict
                or any(type(count) is not int for count in counts.values())
            ):
                raise StateError("the state has a counter that counts nothing")
            return Counter(counts)
        if _DTYPE in value:
            name = value[_DTYPE]
            if len(value) != 1 or type(name) is not str or name not in _DTYPES:
                raise StateError("the state has a dtype that is unknown here")
            return _DTYPES[name]
        return {key: self.of(item) for key, item in value.items()}

    def _referred(self, value: dict[Any, Any]) -> torch.Tensor:
        name = value[_TENSOR]
        if len(value) != 1 or type(name) is not str or name not in self._tensors:
            raise StateError(f"the state refers to the tensor {_short(name)}, which it lacks")
        if name in self._used:  # copies of it would take any amount of memory
            raise StateError(f"the state refers twice to the tensor {_short(name)}")
        self._used.add(name)
        return self._tensors[name]

    def place(self, state: dict[Any, Any], prefix: str) -> None:
        """Put all tensors to which no value refers in the places that their names tell."""
        tree: dict[str, Any] = {}
        for name, tensor in self._tensors.items():
            first, *parts = name.split("/")
            if first != prefix or name in self._used:
                continue
            # A name of a stranger may have any number of slashes, and each of them is a dict here.
            if not 0 < len(parts) < MAX_DEPTH:
                raise StateError(f"the tensor {_short(name)} has no place in the state")
            within = tree
            for part in parts[:-1]:
                within = within.setdefault(part, {})
                # One tensor's name is the beginning of another one's.
                if type(within) is not dict:
                    raise StateError(f"the tensor {_short(name)} has no place in the state")
            if parts[-1] in within:
                raise StateError(f"the tensor {_short(name)} has no place in the state")
            within[parts[-1]] = tensor
        _merge(state, tree, [MAX_SCATTERED])


def _merge(state: dict[Any, Any], tree: dict[str, Any], left: list[int]) -> None:
    """Add a tree of tensors to a dict.

    Args:
        tree: by parts of names.
        left: integer keys that may still be added to dicts in which they do not count up one by one.
    """
    if not tree:
        return
    added = {
        part: int(part) if _NUMBER.fullmatch(part) else part for part in tree
    }  # texts are the keys: integers may have been chosen to collide
    left[0] -= scattered(_united([*filter(_is_number, state), *filter(_is_number, added.values())]))
    if left[0] < 0:
        raise StateError(
            f"the state has more than {MAX_SCATTERED} integer keys in dicts whose integer keys do not count up "
            "one by one"
        )
    for part, child in tree.items():
        key = added[part]
        if type(child) is not dict:
            if key in state:
                raise StateError(f"the state has a tensor and another value at {_short(part)}")
            state[key] = child
            continue
        within = state.setdefault(key, {})
        if type(within) is not dict:
            raise StateError(f"the state has a tensor within a value at {_short(part)}")
        _merge(within, child, left)
    for key in sorted(
        state, key=lambda key: (type(key) is str, key)
    ):  # the order in which they were flattened
        state[key] = state.pop(key)


def _is_number(key: object) -> bool:
    return type(key) is int


def _united(numbers: list[Any]) -> list[int]:
    """Return the different ones of some integers, in ascending order, without hashing them."""
    ordered = sorted(numbers)
    return [number for index, number in enumerate(ordered) if not index or number != ordered[index - 1]]


def _short(name: object) -> str:
    return repr(name)[:100]
