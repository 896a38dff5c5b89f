"""Any bytes are decoded to a checked message, or raise RemoteProtocolError and no other exception."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2pavg.allreduce.messages import MAX_HEADER_BYTES, Lane, LaneHeader
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import pack, unpack
from p2pavg.consensus.votes import MAX_BALLOT
from p2pavg.runs.records.run_entry import RunEntry, encode_entry, read_entry

TYPES: list[type] = [int, float, str, bytes, bool, tuple]

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40)
)
objects = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4), max_leaves=10)
fields = st.lists(
    st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=50)
    | st.binary(max_size=50)
    | st.booleans()
    | st.lists(st.integers(0, 2**64 - 1), max_size=5).map(tuple),
    max_size=6,
)

HEADER = LaneHeader(b"\x07" * 32, Lane.PASSED_ON, attempt=300, reducer=7)
headers = st.builds(
    LaneHeader,
    st.binary(min_size=32, max_size=32),
    st.sampled_from(Lane),
    st.integers(0, MAX_BALLOT),
    st.integers(0, 255),
)
ENTRY = RunEntry(
    schema_hash=b"\1" * 32,
    tensors=97,
    elements=1000,
    codec="int8:64",
    group_size=4,
    rule="fraction",
    aggregation="median",
)


@settings(deadline=None)
@given(fields)
def test_every_message_survives_the_wire(fields: list[Any]) -> None:
    assert unpack(pack(*fields), *map(type, fields)) == tuple(fields)


@settings(deadline=None)
@given(st.binary(max_size=200), st.lists(st.sampled_from(TYPES), max_size=4))
@example(b"\xc1", [int])
@example(b"\x91" * 5000, [tuple])
def test_arbitrary_bytes_against_any_schema(data: bytes, types: list[type]) -> None:
    try:
        found = unpack(data, *types)
    except RemoteProtocolError:
        return
    assert list(map(type, found)) == types


def fits(read: Callable[[bytes], object], again: Callable[[Any], bytes], data: bytes) -> None:
    """Check that a decoded message could have been encoded by an honest peer."""
    try:
        found = read(data)
    except RemoteProtocolError:
        return
    assert read(again(found)) == found


@settings(deadline=None)
@given(headers)
def test_every_lane_header_survives_the_wire_and_is_short(header: LaneHeader) -> None:
    message = header.encode()
    assert LaneHeader.decode(message) == header
    assert len(message) <= MAX_HEADER_BYTES


@settings(deadline=None)
@given(st.binary(max_size=100) | st.lists(objects, max_size=7).map(msgpack.packb))
def test_arbitrary_lane_headers_and_run_entries(data: bytes) -> None:
    fits(LaneHeader.decode, LaneHeader.encode, data)
    fits(read_entry, encode_entry, data)


@settings(deadline=None)
@given(st.integers(0, 5), objects)
def test_one_field_of_another_type(position: int, value: object) -> None:
    for valid, read, again in (
        (HEADER.encode(), LaneHeader.decode, LaneHeader.encode),
        (encode_entry(ENTRY), read_entry, encode_entry),
    ):
        parts = msgpack.unpackb(valid)
        parts[position % len(parts)] = value
        fits(read, again, msgpack.packb(parts))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 100)
)
def test_changed_bytes(changes: list[tuple[int, int]], length: int) -> None:
    for valid, read, again in (
        (HEADER.encode(), LaneHeader.decode, LaneHeader.encode),
        (encode_entry(ENTRY), read_entry, encode_entry),
    ):
        data = bytearray(valid)
        for position, value in changes:
            data[position % len(data)] = value
        fits(read, again, bytes(data))
        fits(read, again, bytes(data[:length]))
