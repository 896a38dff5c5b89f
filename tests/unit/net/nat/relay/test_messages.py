"""The messages between a relay and its peers: hostile bytes give a message or a RemoteProtocolError."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.encoding import pack
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.net.nat.relay.messages import (
    MAX_MESSAGE_BYTES,
    MAX_RELAY_ADDRESSES,
    Connect,
    Connected,
    Incoming,
    Message,
    RelayPing,
    RelayRefusal,
    Reserve,
    Reserved,
    decode,
    encode,
)
from p2pavg_dht import Ed25519Signer

PEER = Ed25519Signer(bytes(32)).peer_id
ADDRESS = f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER}"

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=12,
)
kinds = st.sampled_from(
    ["reserve", "reserved", "ping", "connect", "incoming", "connected", "refused", "other"]
)


@pytest.mark.parametrize(
    "message",
    [
        Reserve(),
        Reserved((ADDRESS,)),
        Reserved(()),
        RelayPing(),
        Connect(PEER),
        Incoming(PEER),
        Connected(),
        RelayRefusal("no place is left"),
    ],
)
def test_a_message_is_read_as_it_was_written(message: Message) -> None:
    assert decode(encode(message)) == message
    assert len(encode(message)) <= MAX_MESSAGE_BYTES


@given(st.binary(max_size=MAX_MESSAGE_BYTES))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        message = decode(data)
    except RemoteProtocolError:
        return
    assert decode(encode(message)) == message


@given(kinds, st.lists(values, max_size=3))
def test_any_fields_are_a_message_or_refused(kind: str, fields: list[object]) -> None:
    try:
        message = decode(pack(kind, *fields))
    except RemoteProtocolError:
        return
    if not isinstance(message, RelayRefusal):  # a reason may be made printable
        assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "fields",
    [
        ("connect", "nonsense"),
        ("connect", ""),
        ("connect", PEER, PEER),
        ("incoming", 7),
        ("reserve", 1),
        ("reserved", ADDRESS),
        ("reserved", [ADDRESS] * (MAX_RELAY_ADDRESSES + 1)),
        ("reserved", [7]),
        ("reserved", [""]),
        ("reserved", ["/ip4/203.0.113.7/tcp/4001"]),
        ("reserved", [f"{ADDRESS}/p2p-circuit/p2p/{PEER}"]),
        ("reserved", [ADDRESS.replace("4001", "x" * 300)]),
        ("refused", "x" * 201),
        ("unknown",),
        (),
    ],
)
def test_a_wrong_message_is_refused(fields: tuple[object, ...]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(pack(*fields))


def test_a_reason_is_one_printable_line() -> None:
    message = decode(pack("refused", "no\x1b[2Jplace\n"))
    assert isinstance(message, RelayRefusal)
    assert message.reason.isprintable()
    assert decode(encode(RelayRefusal("long " * 100))) == RelayRefusal(("long " * 100)[:200])
