"""Decoders of notices and evidence: a value that makes the same bytes, or RemoteProtocolError."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import first_text
from p2pavg.verification.evidence.accusation import Notice, read_accusation, read_notice
from tests.unit.verification.evidence.samples import KIND, contradiction, named, signer

PEERS = [signer(number).peer_id for number in range(3)]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from([*PEERS, KIND, "/ip4/1.2.3.4/tcp/5"])
    | st.binary(max_size=33)
    | st.sampled_from([bytes(32), b"x" * 32]),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=12,
)
MESSAGES = st.binary(max_size=99) | st.lists(VALUES, max_size=6).map(
    lambda fields: bytes(msgpack.packb(fields))
)
NOTICES = st.builds(
    Notice,
    st.lists(st.just("/ip4/1.2.3.4/tcp/5"), max_size=4).map(tuple),
    st.lists(
        st.builds(
            lambda peer_id, number, size: named(peer_id, number, size=size),
            st.sampled_from(PEERS),
            st.integers(0, 2**256 - 1),
            st.integers(1, 2**25),
        ),
        min_size=1,
        max_size=16,
    ).map(tuple),
)


@given(NOTICES)
def test_notices_survive_the_wire(notice: Notice) -> None:
    assert read_notice(notice.encode()) == notice


@given(NOTICES, st.integers(0, 10**6), st.integers(1, 255))
def test_damaged_notices_are_read_or_refused(notice: Notice, where: int, change: int) -> None:
    data = bytearray(notice.encode())
    data[where % len(data)] ^= change
    try:
        read_notice(bytes(data))
    except RemoteProtocolError:
        return


@given(MESSAGES)
def test_any_bytes_accuse_no_peer(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        read_accusation(data)


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_damaged_evidence_accuses_no_peer(where: int, change: int) -> None:
    data = bytearray(contradiction())
    data[where % len(data)] ^= change
    with pytest.raises(RemoteProtocolError):
        read_accusation(bytes(data))


@given(MESSAGES | st.text(max_size=80).map(lambda text: bytes(msgpack.packb([text, 1]))))
def test_the_first_text_of_any_bytes_is_short(data: bytes) -> None:
    try:
        text = first_text(data)
    except RemoteProtocolError:
        return
    assert len(text.encode()) <= 64
