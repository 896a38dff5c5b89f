"""Any bytes are decoded to a checked message, or raise RemoteProtocolError and no other exception."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2pavg.allreduce.messages import MAX_HEADER_BYTES, Lane, LaneHeader
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import pack, unpack
from p2pavg.consensus.votes import MAX_BALLOT

TYPES: list[type] = [int, float, str, bytes, bool, tuple]

fields = st.lists(
    st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=50)
    | st.binary(max_size=50)
    | st.booleans()
    | st.lists(st.integers(0, 2**64 - 1), max_size=5).map(tuple),
    max_size=6,
)

headers = st.builds(
    LaneHeader,
    st.binary(min_size=32, max_size=32),
    st.sampled_from(Lane),
    st.integers(0, MAX_BALLOT),
    st.integers(0, 255),
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


@settings(deadline=None)
@given(headers)
def test_every_lane_header_survives_the_wire_and_is_short(header: LaneHeader) -> None:
    message = header.encode()
    assert LaneHeader.decode(message) == header
    assert len(message) <= MAX_HEADER_BYTES
