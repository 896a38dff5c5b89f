"""Plain values as canonical bytes."""

from __future__ import annotations

import math
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import StateError
from p2pavg.state import values as module
from p2pavg.state.values import MAX_DEPTH, MAX_SCATTERED, MAX_VALUES_BYTES, pack_values, unpack_values
from tests.unit.state import contents
from tests.unit.state.contents import same


@given(contents.values)
def test_values_come_back_with_their_types_and_bits(values: dict[str, Any]) -> None:
    assert same(unpack_values(pack_values(values)), values)


@given(contents.values)
def test_equal_values_give_equal_bytes_in_any_order(values: dict[str, Any]) -> None:
    def reversed_dicts(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: reversed_dicts(value[key]) for key in reversed(value)}
        if isinstance(value, list | tuple):
            return type(value)(map(reversed_dicts, value))
        return value

    assert pack_values(reversed_dicts(values)) == pack_values(values)


@given(st.binary(max_size=60))
def test_other_bytes_are_refused_or_are_the_canonical_ones(data: bytes) -> None:
    try:
        values = unpack_values(data)
    except StateError:
        return
    assert pack_values(values) == data


@pytest.mark.parametrize("bits", [0x7FF8000000000001, 0xFFF8000000000000, 0x8000000000000000, 1])
def test_floats_keep_their_bits(bits: int) -> None:
    [number] = struct.unpack("d", struct.pack("Q", bits))
    back = unpack_values(pack_values({"x": number}))["x"]
    assert struct.pack("d", back) == struct.pack("Q", bits)


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        ({"a": [0, {1: print}]}, "'a/1/1' is a builtin_function_or_method, which cannot be saved"),
        ({"a": {1, 2}}, "'a' is a set"),
        ({"a": (2**64,)}, "'a/0' has more than 64 bits"),
        ({"a": -(2**63) - 1}, "'a' has more than 64 bits"),
        ({"a": {2.5: 1}}, "'a' has the key 2.5"),
        ({"a": {True: 1}}, "'a' has the key True"),
        ({"a": "\ud800"}, "'a' has text that is no Unicode"),
        ({"a": {"\ud800": 1}}, "'a' has text that is no Unicode"),
        ({"a": bytes(MAX_VALUES_BYTES)}, "keep large data in tensors"),
        ({"a": [()] * 2**16}, "more than 65536 lists"),
    ],
)
def test_what_is_not_plain_is_refused_by_its_path(value: dict[str, Any], pattern: str) -> None:
    with pytest.raises(StateError, match=pattern):
        pack_values(value)


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"x": value}
    return value


def test_nesting_is_bounded() -> None:
    assert unpack_values(pack_values(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    with pytest.raises(StateError, match="nested more than 32 deep"):
        pack_values(nested(MAX_DEPTH + 1))
    itself: list[Any] = []
    itself += [itself, itself]
    with pytest.raises(StateError, match="nested more than 32 deep"):
        pack_values({"x": itself})


@pytest.mark.parametrize(
    ("packed", "pattern"),
    [
        (b"", "cannot be decoded"),
        (b"\x91\x02" * 2, "cannot be decoded"),
        (b"\x91" * 5000 + b"\x00", "cannot be decoded"),
        (msgpack.packb([2, "b", 1, "a", 2]), "canonical"),
        (msgpack.packb([2, "a", 1, "a", 1]), "canonical"),
        (msgpack.packb([2, "a", [2, 1, 1, 0, 0]]), "canonical"),
        (msgpack.packb([2.0, "a", 1]), "canonical"),
        (b"\x93\x02\xa1a\xca\x00\x00\x00\x00", "canonical"),
        (b"\x93\x02\xa1a\xcc\x00", "canonical"),
        (b"\x93\x02\xa1a\x80", "cannot be saved|canonical"),
        (b"\x93\x02\xa1a\xc7\x00\x05", "which cannot be saved"),
        (b"\x93\x02\xa1a\xd4\x05\x00", "cannot be decoded"),
        (b"\x93\x02\xa1a\xa1\xff", "cannot be decoded"),
        (b"\x93\x02\xa1a\xdd\xff\xff\xff\xff", "cannot be decoded"),
        (msgpack.packb([2, "a", []]), "no list, tuple or dict"),
        (msgpack.packb([2, "a", [7]]), "no list, tuple or dict"),
        (msgpack.packb([2, "a"]), "no list, tuple or dict"),
        (msgpack.packb([2, [0], 1]), "keys are no text or integers"),
        (msgpack.packb([2, "a", [2, [1, 5], 1]]), "keys are no text or integers"),
        (msgpack.packb([2, "a", [2, 1.5, 1]]), "keys are no text or integers"),
        (msgpack.packb([2, "a", [2, True, 1]]), "keys are no text or integers"),
        (msgpack.packb([2, "a", [2, None, 1]]), "keys are no text or integers"),
        (msgpack.packb([2, "a", [2, b"a", 1]]), "keys are no text or integers"),
        (msgpack.packb([2, "a", [2, "b", 1, 0, 1]]), "canonical order"),
        (msgpack.packb([2, "a", [2, 1, 1, 1, 1]]), "twice"),
        (msgpack.packb([2, 1, 1]), "no mapping of names"),
        (msgpack.packb([0]), "no mapping of names"),
        (msgpack.packb(7), "no mapping of names"),
        (bytes(MAX_VALUES_BYTES + 1), "is the most"),
    ],
)
def test_bytes_that_are_not_canonical_are_refused(packed: bytes, pattern: str) -> None:
    with pytest.raises(StateError, match=pattern):
        unpack_values(packed)


def test_a_strangers_containers_are_counted_before_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_CONTAINERS", 10)
    with pytest.raises(StateError, match="more than 10 lists"):
        unpack_values(msgpack.packb([2, "a", [0, *[[0]] * 10, [7]]]))


@pytest.mark.parametrize("item", [b"\x91\x00", b"\xa2ab", b"\xcd\xff\xff"])
def test_a_strangers_values_take_little_memory(item: bytes) -> None:
    count = (MAX_VALUES_BYTES - 9) // len(item)
    packed = b"\x93\x02\xa1a\xdd" + (count + 1).to_bytes(4, "big") + b"\x00" + item * count
    assert len(packed) <= MAX_VALUES_BYTES
    tracemalloc.start()
    try:
        with suppress(StateError):
            unpack_values(packed)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**25


def test_values_at_the_limit_are_read_back() -> None:
    room = MAX_VALUES_BYTES - len(pack_values({"x": bytes(2**16)})) + 2**16
    assert len(pack_values({"x": bytes(room)})) == MAX_VALUES_BYTES
    assert unpack_values(pack_values({"x": bytes(room)})) == {"x": bytes(room)}
    assert math.isnan(unpack_values(pack_values({"x": math.nan}))["x"])


# ---------------------------------------------------------------------- a stranger's keys


def one_by_one(key: Callable[[int], Any], count: int) -> bytes:
    """Return the bytes of a dict with these keys, as a stranger writes them."""
    packer = msgpack.Packer()
    items = b"".join(packer.pack(key(index)) + b"\xc0" for index in range(count))
    return b"\x93\x02\xa1a\xdd" + (2 * count + 1).to_bytes(4, "big") + b"\x02" + items


class Hashed:
    """Counts the keys that are hashed, in place of the dict that the decoder makes."""

    def __init__(self) -> None:
        self.keys = 0

    def __call__(self, pairs: Any) -> dict[Any, Any]:
        made = dict(pairs)
        self.keys += len(made)
        return made


@contextmanager
def hashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hashed]:
    counted = Hashed()
    with monkeypatch.context() as patched:
        patched.setattr(module, "dict", counted, raising=False)
        yield counted


COLLIDING: dict[str, Callable[[int], Any]] = {
    # The hashes of tuples and of integers are no secret, so a stranger can choose any number that collide.
    "tuples": lambda index: [1, index, -index],
    "tuples within tuples": lambda index: [1, [1, index]],
    "floats": lambda index: float(index) * (sys.hash_info.modulus + 1),
    "the same hash": lambda index: (index % 8) * sys.hash_info.modulus + index // 8,
    "steps of a power of two": lambda index: index << 40,
    "integers in each other's way": lambda index: index * 5 + 1,
    "negative integers": lambda index: index - 2**40,
    "two runs": lambda index: index if index < MAX_SCATTERED else index + 7,
}


@pytest.mark.parametrize("kind", COLLIDING)
def test_keys_that_a_stranger_may_have_chosen_to_collide_are_not_hashed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dict takes quadratic time if its keys collide, in one call that nothing interrupts."""
    count = 2 * MAX_SCATTERED
    keys = sorted(COLLIDING[kind](index) for index in range(count))
    packed = one_by_one(keys.__getitem__, count)
    assert len(packed) <= MAX_VALUES_BYTES
    with hashed(monkeypatch) as counted, pytest.raises(StateError, match=r"no text or integers|integer keys"):
        unpack_values(packed)
    assert counted.keys == 0


def test_all_dicts_of_a_state_share_the_room_for_integer_keys_that_may_collide() -> None:
    def state(count: int) -> dict[str, Any]:
        return {str(name): {2 * key: 0 for key in range(count)} for name in range(16)}

    fits = state(MAX_SCATTERED // 16)
    assert same(unpack_values(pack_values(fits)), fits)
    too_many = state(MAX_SCATTERED // 16 + 1)
    with pytest.raises(StateError, match=f"at most {MAX_SCATTERED} in dicts"):
        pack_values(too_many)
    # Before the dicts are made, and not when they are packed again.
    with pytest.raises(StateError, match=f"its values have more than {MAX_SCATTERED} integer keys"):
        unpack_values(packed_of(too_many))


def packed_of(state: dict[str, Any]) -> bytes:
    """Return the canonical bytes of dicts of dicts, also of those that are refused."""
    items: list[Any] = [2]
    for name in sorted(state):
        items += (name, [2, *(part for pair in state[name].items() for part in pair)])
    return bytes(msgpack.packb(items))


def test_any_number_of_keys_that_count_up_one_by_one_is_read() -> None:
    values = {"state": dict.fromkeys(range(100000)), "later": dict.fromkeys(range(7, 50000), 1)}
    assert same(unpack_values(pack_values(values)), values)


def test_no_path_is_made_for_a_value_without_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text with all keys that lead to an item, for each item, takes quadratic time."""

    def shown(_path: Any) -> str:
        raise AssertionError("a path is made")

    monkeypatch.setattr(module, "shown_path", shown)
    values = {"a": {"b": [0] * 1000, 7: (1, "x", b"y", None, 0.5)}}
    assert same(unpack_values(pack_values(values)), values)


def test_the_path_in_an_error_has_a_bounded_length() -> None:
    with pytest.raises(StateError, match="which cannot be saved") as caught:
        pack_values({"k" * 10**6: [print]})
    assert len(str(caught.value)) < 400
