"""Decoding of untrusted msgpack, field by field."""

from __future__ import annotations

import math
import tracemalloc

import msgpack
import pytest

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import checked, pack, unpack


def test_the_bytes_never_change() -> None:
    packed = pack(1, -1, "ü", b"\0\xff", 0.5, True, (), (2, ("x",)))
    assert packed.hex() == "9801ffa2c3bcc40200ffcb3fe0000000000000c390920291a178"
    assert unpack(packed, int, int, str, bytes, float, bool, tuple, tuple) == (
        1,
        -1,
        "ü",
        b"\0\xff",
        0.5,
        True,
        (),
        (2, ("x",)),
    )


@pytest.mark.parametrize(
    ("fields", "types", "reason"),
    [
        ((1,), (str,), "field 0 is int, not str"),
        ((True,), (int,), "field 0 is bool, not int"),
        ((1,), (float,), "field 0 is int, not float"),
        (("x",), (bytes,), "field 0 is str, not bytes"),
        ((None,), (str,), "field 0 is NoneType, not str"),
        (("x", 1), (str, tuple), "field 1 is int, not tuple"),
        ((math.nan,), (float,), "field 0 is not finite"),
        ((math.inf,), (float,), "field 0 is not finite"),
        ((1,), (int, int), "a message of 2 fields was expected"),
        ((1, 2), (int,), "a message of 1 fields was expected"),
    ],
)
def test_a_field_of_another_type_is_refused(
    fields: tuple[object, ...], types: tuple[type, ...], reason: str
) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        unpack(pack(*fields), *types)


@pytest.mark.parametrize(
    ("message", "types"),
    [
        (b"", (int,)),
        (b"\x91", (int,)),
        (b"\x91\x01\x01", (int,)),
        (b"\x01", (int,)),
        (b"\xc1", (int,)),
        (b"\x91\xa2\xff\xfe", (str,)),
        (b"\x91\xa3\xed\xa0\x80", (str,)),
        (b"\x91" * 100_000, (tuple,)),
        (b"\x91\x81\xa1a\x02", (dict,)),
        (b"\x91\xd4\x01\x00", (bytes,)),
        (b"\x91\xd6\xff\x00\x00\x00\x00", (object,)),
        (msgpack.packb(["x" * 4097]), (str,)),
        (msgpack.packb([b"x" * 8193]), (bytes,)),
        (msgpack.packb([[0] * 257]), (tuple,)),
        (msgpack.packb([[[0] * 257]]), (tuple,)),
    ],
    ids=[
        "empty",
        "cut short",
        "bytes after the end",
        "no array",
        "a reserved byte",
        "no UTF-8",
        "a surrogate",
        "deeply nested",
        "a map",
        "an extension",
        "a timestamp",
        "a long text",
        "long bytes",
        "a long array",
        "a long array within",
    ],
)
def test_malformed_bytes_are_refused(message: bytes, types: tuple[type, ...]) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack(message, *types)


def test_the_longest_allowed_fields() -> None:
    fields = ("x" * 4096, b"x" * 8192, (0,) * 256)
    assert unpack(pack(*fields), str, bytes, tuple) == fields


@pytest.mark.parametrize(
    "head", [b"\xdd\xff\xff\xff\xff", b"\x91\xdd\x7f\xff\xff\xff", b"\x91\xc6\x7f\xff\xff\xff"]
)
def test_a_false_length_costs_no_memory(head: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            unpack(head + bytes(1000), tuple)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_checked_compares_the_number_of_fields() -> None:
    assert checked((1, 2), (int, int)) == (1, 2)
    with pytest.raises(RemoteProtocolError, match="2 fields were expected, not 3"):
        checked((1, 2, 3), (int, int))
