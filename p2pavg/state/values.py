"""Plain values as canonical bytes: what a state holds besides tensors. No I/O, no clock.

Plain values are None, bool, int (64 bits), float, str, bytes, and lists, tuples and dicts of them. The keys of a dict
are str or int. Equal values give equal bytes in every process: a dict is written in the order of its keys.

The bytes are msgpack. A container is an array that begins with its kind: ``[0, item, ...]`` is a list,
``[1, item, ...]`` a tuple, and ``[2, key, value, ...]`` a dict. Bytes that :func:`pack_values` would not have written
are refused.

**A stranger's keys.** A dict costs time in proportion to its length only if few of its keys have the same hash. Python
hashes text with a secret of the process, so a stranger cannot choose texts that collide, unless the user has set
``PYTHONHASHSEED``. The hash of a tuple or of a float is no secret, so these are refused before they become keys. Nor is
that of an integer: multiples of 2**61 - 1 have the same hash, and other integers can be chosen to stand in each other's
way. Integers that count up one by one never do. Of all others, a state has few (:data:`MAX_SCATTERED`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import msgpack

from p2pavg.base.errors import StateError

MAX_VALUES_BYTES = 2**20  # of all values of a state; those of a stranger take 32 MiB of memory at most
MAX_CONTAINERS = 2**16  # lists, tuples and dicts of a state; an empty one has 2 bytes and takes 64 of memory
MAX_DEPTH = 32  # containers in each other; the state of an optimizer has 3
MAX_SCATTERED = 2**13
"""Integer keys in dicts whose integer keys do not count up one by one, in all dicts of a state. The worst choice of so
many costs tens of milliseconds, see the test; optimizers number their parameters one by one."""
_SHOWN_CHARS = 200  # of a path in an error: a stranger's may have a megabyte
_LIST, _TUPLE, _DICT = range(3)
_INTEGERS = range(-(2**63), 2**64)


def pack_values(values: Mapping[str, Any]) -> bytes:
    """Return the canonical bytes of a mapping of plain values.

    Raises:
        StateError: a value is not plain, or they are too many; the message has the value's path.
    """
    packed: bytes = msgpack.packb(_Tagger().tagged(dict(values)))
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
    except StateError:  # of a container
        raise
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
        self._scattered = 0

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
            keys = items[1::2]
            self._check_keys(keys)
            return dict(zip(keys, items[2::2], strict=True))
        raise StateError("its values have an array that is no list, tuple or dict")

    def _check_keys(self, keys: list[Any]) -> None:
        """Check the keys of a dict before one is hashed: their kinds, and that they stand in the canonical order."""
        count = sum(type(key) is int for key in keys)
        numbers, texts = keys[:count], keys[count:]
        if any(type(key) is not int for key in numbers) or any(type(key) is not str for key in texts):
            raise StateError(
                "its values have a dict whose keys are no text or integers, or not in their canonical order"
            )
        if not (_ascend(numbers) and _ascend(texts)):
            raise StateError(
                "its values have a dict whose keys are twice there, or not in their canonical order"
            )
        self._scattered += scattered(numbers)
        if self._scattered > MAX_SCATTERED:
            raise StateError(f"its values have more than {MAX_SCATTERED} integer keys {_NOT_COUNTING}")


_NOT_COUNTING = "in dicts whose integer keys do not count up one by one"


def _ascend(keys: Sequence[Any]) -> bool:
    return all(map(operator.lt, keys, islice(keys, 1, None)))


def scattered(numbers: Sequence[int]) -> int:
    """Return how many of a dict's integer keys, in ascending order, may have been chosen to collide."""
    if not numbers or (
        numbers[0] >= 0 and numbers[-1] - numbers[0] == len(numbers) - 1 and numbers[-1] < 2**60
    ):
        return 0  # their lowest bits differ in a table of any size that has room for them
    return len(numbers)


class _Tagger:
    """Turns values into what msgpack writes."""

    def __init__(self) -> None:
        self._containers = 0
        self._scattered = 0
        self._path: list[Any] = []
        """Keys that lead to the present value. Only an error makes text of them: long keys cost quadratic time."""

    def tagged(self, value: Any) -> Any:
        """Return a value as msgpack writes it."""
        kind = type(value)
        if value is None or kind in (bool, float, bytes):
            return value
        if kind is int:
            if value not in _INTEGERS:
                raise self._error("value", "has more than 64 bits")
            return value
        if kind is str:
            return self._checked_text(value)
        if kind not in (list, tuple, dict):
            raise self._error("value", f"is {a_kind(value)}, which cannot be saved")
        return self._tagged_container(value)

    def _tagged_container(self, value: Any) -> list[Any]:
        self._containers += 1
        if self._containers > MAX_CONTAINERS:
            raise StateError(f"the state's values have more than {MAX_CONTAINERS} lists, tuples and dicts")
        if len(self._path) >= MAX_DEPTH:
            raise self._error("value", f"is nested more than {MAX_DEPTH} deep")
        if type(value) is dict:
            tagged: list[Any] = [_DICT]
            for key in self._sorted_keys(value):
                tagged += (key, self._at(key, value[key]))
            return tagged
        return [_LIST if type(value) is list else _TUPLE, *map(self._at, range(len(value)), value)]

    def _at(self, key: Any, value: Any) -> Any:
        """Return the value of a key or an index as msgpack writes it."""
        self._path.append(key)
        tagged = self.tagged(value)
        self._path.pop()
        return tagged

    def _sorted_keys(self, value: dict[Any, Any]) -> list[Any]:
        for key in value:
            if type(key) is str:
                self._checked_text(key)
            elif type(key) is not int or key not in _INTEGERS:
                raise self._error("dict", f"has the key {key!r}; keys are text or integers of 64 bits")
        numbers = sorted(key for key in value if type(key) is int)
        self._scattered += scattered(numbers)
        if self._scattered > MAX_SCATTERED:
            raise self._error(
                "dict",
                f"has {len(numbers)} integer keys; a state has at most {MAX_SCATTERED} {_NOT_COUNTING}. "
                "Use text as keys, or keep them in a tensor",
            )
        return [*numbers, *sorted(key for key in value if type(key) is str)]

    def _checked_text(self, text: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise self._error("value", "has text that is no Unicode") from None
        return text

    def _error(self, kind: str, what: str) -> StateError:
        return StateError(f"the {kind} {shown_path(self._path)!r} {what}")


def shown_path(path: Sequence[object]) -> str:
    """Return the keys that lead to a value as one text, of bounded length."""
    text = "/".join(map(str, path))
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def a_kind(value: object) -> str:
    """Return the name of a value's type with its article, as in ``a function``."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
