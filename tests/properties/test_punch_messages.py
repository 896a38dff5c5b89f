"""The decoders of punches with untrusted bytes: a valid message, or RemoteProtocolError."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.net.limits.sources import parse_host
from p2pavg.net.nat.punch.messages import (
    DialMe,
    PunchAnswer,
    PunchProposal,
    PunchVerdict,
    Sync,
    decode_request,
)
from p2pavg.net.nat.punch.plan import LOWEST_PORT, TRIES, Endpoint

KINDS = (PunchProposal, PunchAnswer, Sync, PunchVerdict, DialMe)

hosts = st.ip_addresses().map(str) | st.sampled_from(
    ["example.org", "127.0.0.1", "::1", "fe80::1%lo", "١.1.1.1"]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(-1, 70_000)
    | st.floats()
    | hosts
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.sampled_from(["propose", "answer", "sync", "verdict", "dial me"])
)
objects = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4), max_leaves=10)
pairs = st.tuples(hosts, st.integers(-1, 70_000))
near_misses = (
    st.tuples(st.just("propose"), st.integers(-1, 5), st.lists(pairs, max_size=3))
    | st.tuples(st.just("answer"), st.text(max_size=5), pairs | st.just(()), st.floats())
    | st.tuples(st.just("dial me"), st.lists(st.text(max_size=5), max_size=8))
)


def assert_sound(endpoint: Endpoint) -> None:
    assert str(parse_host(endpoint.host)) == endpoint.host
    assert LOWEST_PORT <= endpoint.port < 65536


def read_by_all(message: bytes) -> None:
    for kind in KINDS:
        try:
            found: Any = kind.decode(message)
        except RemoteProtocolError:
            continue
        assert kind.decode(found.encode()) == found
        if isinstance(found, PunchProposal):
            assert 1 <= found.attempt <= TRIES
            for endpoint in found.endpoints:
                assert_sound(endpoint)
        if isinstance(found, PunchAnswer):
            assert bool(found.refusal) != bool(found.endpoint)
            if found.endpoint is not None:
                assert_sound(found.endpoint)
    with suppress(RemoteProtocolError):
        assert isinstance(decode_request(message), PunchProposal | DialMe)


@given(st.binary(max_size=200))
def test_any_bytes(message: bytes) -> None:
    read_by_all(message)


@given(st.lists(objects, max_size=5))
def test_any_fields(fields: list[Any]) -> None:
    read_by_all(msgpack.packb(fields))


@given(near_misses)
def test_messages_that_are_almost_right(fields: tuple[Any, ...]) -> None:
    read_by_all(msgpack.packb(fields))


endpoints = st.builds(
    Endpoint,
    st.ip_addresses().map(str).filter(lambda host: str(parse_host(host)) == host),
    st.integers(1024, 65535),
)


@given(
    st.integers(1, TRIES), st.lists(endpoints, min_size=1, max_size=2, unique_by=lambda found: found.version)
)
def test_every_proposal_survives_the_wire(attempt: int, found: list[Endpoint]) -> None:
    message = PunchProposal(attempt, tuple(found))
    assert decode_request(message.encode()) == message


@given(endpoints, st.floats(0.0, 10.0))
def test_every_answer_survives_the_wire(endpoint: Endpoint, busy: float) -> None:
    assert PunchAnswer.decode(PunchAnswer("", endpoint, busy).encode()) == PunchAnswer("", endpoint, busy)
