"""Plain values as canonical bytes: what a state holds besides tensors. No I/O, no clock.

Plain values are None, bool, int (64 bits), float, str, bytes, and lists, tuples and dicts of them. The keys of a dict
are str or int. Equal values give equal bytes in every process: a dict is written in the order of its keys.

The bytes are msgpack. A container is an array that begins with its kind: ``[0, item, ...]`` is a list,
``[1, item, ...]`` a tuple, and ``[2, key, value, ...]`` a dict. Bytes that :func:`pack_values` would not have written
are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack

from p2pavg.base.errors import StateError

MAX_VALUES_BYTES = 2**20  # of all values of a state; those of a stranger take 32 MiB of memory at most
MAX_CONTAINERS = 2**16  # lists, tuples and dicts of a state; an empty one has 2 bytes and takes 64 of memory
MAX_DEPTH = 32  # containers in each other; the state of an optimizer has 3
_LIST, _TUPLE, _DICT = range(3)
_INTEGERS = range(-(2**63), 2**64)


def pack_values(values: Mapping[str, Any]) -> bytes:
    """Return the canonical bytes of a mapping of plain values.

    Raises:
        StateError: a value is not plain, or they are too many; the message has the value's path.
    """
    packed: bytes = msgpack.packb(_Tagger().tagged(dict(values), "", 1))
    if len(packed) > MAX_VALUES_BYTES:
        raise StateError(
            f"the state's plain values have {len(packed)} bytes, {MAX_VALUES_BYTES} is the most; "
            "keep large data in tensors"
        )
    return packed


def unpack_values(packed: bytes) -> dict[str, Any]:
    """Return what :func:`pack_values` has packed.

    At most :data:`MAX_VALUES_BYTES` are decoded, into at most :data:`MAX_CONTAINERS` containers.

    Raises:
        StateError: the bytes are not the canonical ones of any values.
    """
    if len(packed) > MAX_VALUES_BYTES:
        raise StateError(f"its values have {len(packed)} bytes, {MAX_VALUES_BYTES} is the most")
    containers = _Containers()
    try:
        values = msgpack.unpackb(packed, list_hook=containers.made, max_map_len=0, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise StateError(f"its values cannot be decoded: {error!r}") from None
    if type(values) is not dict or any(type(key) is not str for key in values):
        raise StateError("its values are no mapping of names to values")
    if pack_values(values) != packed:
        raise StateError("its values are not in their canonical form")
    return values


class _Containers:
    """The containers that were decoded so far; each is checked at once, the inner ones first."""

    def __init__(self) -> None:
        self._made = 0

    def made(self, items: list[Any]) -> Any:
        """Return the container that an array stands for."""
        self._made += 1
        if self._made > MAX_CONTAINERS:
            raise StateError(f"its values have more than {MAX_CONTAINERS} lists, tuples and dicts")
        kind = items[0] if items else None
        if kind == _LIST:
            return items[1:]
        if kind == _TUPLE:
            return tuple(items[1:])
        if kind == _DICT and len(items) % 2:
            return dict(zip(items[1::2], items[2::2], strict=True))
        raise StateError("its values have an array that is no list, tuple or dict")


class _Tagger:
    """Turns values into what msgpack writes."""

    def __init__(self) -> None:
        self._containers = 0

    def tagged(self, value: Any, path: str, depth: int) -> Any:
        """Return a value as msgpack writes it. ``path`` names it in errors."""
        kind = type(value)
        if value is None or kind in (bool, float, bytes):
            return value
        if kind is int:
            if value not in _INTEGERS:
                raise StateError(f"the value {path!r} has more than 64 bits")
            return value
        if kind is str:
            return _checked_text(value, path)
        if kind not in (list, tuple, dict):
            raise StateError(f"the value {path!r} is {a_kind(value)}, which cannot be saved")
        return self._tagged_container(value, path, depth)

    def _tagged_container(self, value: Any, path: str, depth: int) -> list[Any]:
        self._containers += 1
        if self._containers > MAX_CONTAINERS:
            raise StateError(f"the state's values have more than {MAX_CONTAINERS} lists, tuples and dicts")
        if depth > MAX_DEPTH:
            raise StateError(f"the value {path!r} is nested more than {MAX_DEPTH} deep")
        if type(value) is dict:
            tagged: list[Any] = [_DICT]
            for key in _sorted_keys(value, path):
                tagged += (key, self.tagged(value[key], _join(path, key), depth + 1))
            return tagged
        items = (self.tagged(item, _join(path, index), depth + 1) for index, item in enumerate(value))
        return [_LIST if type(value) is list else _TUPLE, *items]


def _sorted_keys(value: dict[Any, Any], path: str) -> list[Any]:
    for key in value:
        if type(key) is str:
            _checked_text(key, path)
        elif type(key) is not int or key not in _INTEGERS:
            raise StateError(f"the dict {path!r} has the key {key!r}; keys are text or integers of 64 bits")
    return sorted(value, key=lambda key: (type(key) is str, key))


def _checked_text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise StateError(f"the value {path!r} has text that is no Unicode") from None
    return text


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def a_kind(value: object) -> str:
    """Return the name of a value's type with its article, as in ``a function``."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
