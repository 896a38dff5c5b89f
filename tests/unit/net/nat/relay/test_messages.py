"""The messages between a relay and its peers: hostile bytes give a message or a RemoteProtocolError."""

import pytest

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import pack
from p2pavg.net.nat.relay.messages import (
    MAX_MESSAGE_BYTES,
    MAX_RELAY_ADDRESSES,
    Connect,
    Connected,
    Incoming,
    RelayMessage,
    RelayPing,
    RelayRefusal,
    Reserve,
    Reserved,
    decode,
)
from p2pavg_dht import Ed25519Signer

PEER = Ed25519Signer(bytes(32)).peer_id
ADDRESS = f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER}"


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
def test_a_message_is_read_as_it_was_written(message: RelayMessage) -> None:
    assert decode(message.encode()) == message
    assert len(message.encode()) <= MAX_MESSAGE_BYTES


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
    message = decode(RelayRefusal("no\x1b[2Jplace\n").encode())
    assert message == RelayRefusal("no?[2Jplace?")
    with pytest.raises(RemoteProtocolError, match="another way"):
        decode(pack("refused", "no\x1b[2Jplace\n"))
    assert decode(RelayRefusal("long " * 100).encode()) == RelayRefusal(("long " * 100)[:200])
