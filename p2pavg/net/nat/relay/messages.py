"""The messages between a relay and the peers that use it.

On a stream of ``PROTOCOL``, which a peer opens to the relay:

    peer     Reserve      it wants to be reachable through the relay, for as long as this stream lives
    relay    Reserved     with the addresses at which the relay can be dialled; or Refused, with the reason
    peer     Ping         every RELAY_PING_SECONDS; the relay answers with a Ping

    peer     Connect      it wants a circuit to another peer
    relay    Connected    and from then on the bytes of the circuit; or Refused, with the reason

On a stream of ``CIRCUIT_PROTOCOL``, which the relay opens to the peer behind it:

    relay    Incoming     the peer that wants the circuit
    peer     Connected    and from then on the bytes of the circuit; or Refused, with the reason

No I/O, no clock.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from p2pavg.base.messages import Message, cut, decoded
from p2pavg.net.addresses import MAX_ADDRESS_CHARS, is_circuit, parse_peer_address
from p2pavg_dht import public_key_of

PROTOCOL = "/p2pavg/relay/1"
CIRCUIT_PROTOCOL = "/p2pavg/relayed/1"
MAX_MESSAGE_BYTES = 2048
MAX_RELAY_ADDRESSES = 4
_MAX_REASON = 200
_Address = Annotated[str, Meta(max_length=MAX_ADDRESS_CHARS)]


class Reserve(Message, frozen=True, tag="reserve"):
    """The request to be reachable through the relay."""


class Reserved(Message, frozen=True, tag="reserved"):
    """The relay's consent, with the addresses at which it can be dialled."""

    addresses: Annotated[tuple[_Address, ...], Meta(max_length=MAX_RELAY_ADDRESSES)]

    def __post_init__(self) -> None:
        cut(self, addresses=MAX_RELAY_ADDRESSES)
        for address in self.addresses:
            if is_circuit(address):
                raise ValueError("a relay named an address that is no direct one")
            parse_peer_address(address)


class RelayPing(Message, frozen=True, tag="ping"):
    """A sign of life, which also keeps the routers' entries for the connection."""


class Connect(Message, frozen=True, tag="connect"):
    """The request for a circuit to a peer that has a reservation."""

    target: str

    def __post_init__(self) -> None:
        public_key_of(self.target)  # raises PeerIdError unless it is a peer's id


class Incoming(Message, frozen=True, tag="incoming"):
    """The announcement of a circuit from another peer."""

    source: str

    def __post_init__(self) -> None:
        public_key_of(self.source)


class Connected(Message, frozen=True, tag="connected"):
    """The consent to a circuit; what follows on the stream is the circuit's."""


class RelayRefusal(Message, frozen=True, tag="refused"):
    """The refusal of a reservation or a circuit."""

    reason: str

    def __post_init__(self) -> None:
        cut(self, reason=_MAX_REASON)


RelayMessage = Reserve | Reserved | RelayPing | Connect | Incoming | Connected | RelayRefusal


def decode(data: bytes) -> RelayMessage:
    """Read a message. Raises RemoteProtocolError if the bytes are no such message."""
    message: RelayMessage = decoded(data, RelayMessage)
    return message
