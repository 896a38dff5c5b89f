"""The decoders of lanes with untrusted bytes: a valid message, or RemoteProtocolError."""

from __future__ import annotations

from typing import Any

import msgpack
from hypothesis import example, given
from hypothesis import strategies as st

from p2pavg.base.encoding import pack
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.net.lanes.acceptor import TICKET_BYTES
from p2pavg.net.lanes.certificates import OwnCertificate
from p2pavg.net.lanes.messages import (
    MAX_ADDRESSES,
    Back,
    LaneOffer,
    LaneRequest,
    LaneVerdict,
    Meet,
    decode_next_way,
)

DER = OwnCertificate("me").der
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-1, 5)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.sampled_from([DER, DER[:-1], bytes(TICKET_BYTES), "back", "meet"])
)
objects = st.recursive(scalars, lambda inner: st.lists(inner, max_size=8), max_leaves=10)
addresses = st.lists(st.text(max_size=5), max_size=8)
near_misses = (
    st.tuples(st.just("back"), st.binary(min_size=15, max_size=17), addresses)
    | st.tuples(st.just("meet"))
    | st.tuples(st.sampled_from(["", "no"]), st.just(DER), st.just(bytes(16)), addresses, st.booleans())
    | st.tuples(st.integers(-1, 5), st.text(max_size=5))
)


def read_by_all(message: bytes) -> None:
    for decode in (
        LaneRequest.decode,
        LaneOffer.decode,
        Back.decode,
        Meet.decode,
        LaneVerdict.decode,
        decode_next_way,
    ):
        try:
            found: Any = decode(message)
        except RemoteProtocolError:
            continue
        assert type(found).decode(found.encode()) == found
        if isinstance(found, Back):
            assert len(found.ticket) == TICKET_BYTES
        if isinstance(found, Back | LaneOffer):
            assert len(found.addresses) <= MAX_ADDRESSES


@given(st.binary(max_size=200))
@example(pack("meet"))
@example(pack("back", bytes(16), ["/ip4/203.0.113.1/tcp/4001"]))
@example(pack("", DER, bytes(16), (), True))
def test_any_bytes(message: bytes) -> None:
    read_by_all(message)


@given(st.lists(objects, max_size=5))
def test_any_fields(fields: list[Any]) -> None:
    read_by_all(msgpack.packb(fields))


@given(near_misses)
def test_messages_that_are_almost_right(fields: tuple[Any, ...]) -> None:
    read_by_all(msgpack.packb(fields))


@given(
    st.binary(min_size=16, max_size=16), st.lists(st.text(min_size=1, max_size=20), max_size=MAX_ADDRESSES)
)
def test_the_next_way_is_recognised(ticket: bytes, named: list[str]) -> None:
    back = Back(ticket, tuple(named))
    assert decode_next_way(back.encode()) == back
    assert decode_next_way(Meet().encode()) == Meet()
