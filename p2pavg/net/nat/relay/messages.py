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

from dataclasses import dataclass

from p2pavg.base.encoding import first_text, pack, unpack
from p2pavg.base.errors import AddressError, RemoteProtocolError
from p2pavg.base.peer_text import PeerText
from p2pavg.net.addresses import MAX_ADDRESS_CHARS, is_circuit, parse_peer_address
from p2pavg_dht import PeerIdError, public_key_of

PROTOCOL = "/p2pavg/relay/1"
CIRCUIT_PROTOCOL = "/p2pavg/relayed/1"
MAX_MESSAGE_BYTES = 2048
MAX_RELAY_ADDRESSES = 4
_MAX_REASON = 200


@dataclass(frozen=True, slots=True)
class Reserve:
    """The request to be reachable through the relay."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """The relay's consent, with the addresses at which it can be dialled."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RelayPing:
    """A sign of life, which also keeps the routers' entries for the connection."""


@dataclass(frozen=True, slots=True)
class Connect:
    """The request for a circuit to a peer that has a reservation."""

    target: str


@dataclass(frozen=True, slots=True)
class Incoming:
    """The announcement of a circuit from another peer."""

    source: str


@dataclass(frozen=True, slots=True)
class Connected:
    """The consent to a circuit; what follows on the stream is the circuit's."""


@dataclass(frozen=True, slots=True)
class RelayRefusal:
    """The refusal of a reservation or a circuit."""

    reason: str


Message = Reserve | Reserved | RelayPing | Connect | Incoming | Connected | RelayRefusal

_PLAIN: dict[str, type[Reserve | RelayPing | Connected]] = {
    "reserve": Reserve,
    "ping": RelayPing,
    "connected": Connected,
}


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    match message:
        case Reserve():
            return pack("reserve")
        case Reserved(addresses):
            return pack("reserved", addresses[:MAX_RELAY_ADDRESSES])
        case RelayPing():
            return pack("ping")
        case Connect(target):
            return pack("connect", target)
        case Incoming(source):
            return pack("incoming", source)
        case Connected():
            return pack("connected")
        case RelayRefusal(reason):
            return pack("refused", reason[:_MAX_REASON])


def decode(data: bytes) -> Message:
    """Read a message.

    Raises:
        RemoteProtocolError: the bytes are no such message.
    """
    kind = first_text(data)
    if kind in _PLAIN:
        unpack(data, str)
        return _PLAIN[kind]()
    if kind == "reserved":
        _, addresses = unpack(data, str, tuple)
        return Reserved(_checked_addresses(addresses))
    if kind not in ("connect", "incoming", "refused"):
        raise RemoteProtocolError(f"no message of a relay is called {kind!r}")
    _, text = unpack(data, str, str)
    if kind == "refused":
        return RelayRefusal(_checked_reason(text))
    try:
        public_key_of(text)
    except PeerIdError as error:
        raise RemoteProtocolError(f"a message about a circuit names no peer: {error}") from None
    return Connect(text) if kind == "connect" else Incoming(text)


def _checked_reason(reason: str) -> PeerText:
    if len(reason) > _MAX_REASON:
        raise RemoteProtocolError(f"a reason of {len(reason)} characters")
    return PeerText(reason)


def _checked_addresses(addresses: tuple[object, ...]) -> tuple[str, ...]:
    if len(addresses) > MAX_RELAY_ADDRESSES:
        raise RemoteProtocolError(f"a relay named {len(addresses)} addresses")
    for address in addresses:
        if type(address) is not str or not 0 < len(address) <= MAX_ADDRESS_CHARS or is_circuit(address):
            raise RemoteProtocolError("a relay named an address that is no direct one")
        try:
            parse_peer_address(address)
        except AddressError as error:
            raise RemoteProtocolError(f"a relay named a wrong address: {error}") from None
    return tuple(str(address) for address in addresses)
