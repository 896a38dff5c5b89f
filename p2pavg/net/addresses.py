"""Multiaddresses: parsing, and the addresses at which a listener can be reached."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil
from multiaddr import Multiaddr

from p2pavg.base.errors import AddressError
from p2pavg_dht import PeerIdError, public_key_of

MAX_ADDRESS_CHARS = 256
EXAMPLE = "/ip4/203.0.113.7/tcp/4001"
CIRCUIT = "/p2p-circuit"


def parse_listen_address(text: str) -> Multiaddr:
    """Parse an address to listen on, such as ``/ip4/0.0.0.0/tcp/4001``. Port 0 stands for any free port.

    Raises:
        AddressError: the text is not such an address; the message says what is wrong with it.
    """
    address = _parse(text)
    names = [protocol.name for protocol in address.protocols()]
    if names not in (["ip4", "tcp"], ["ip6", "tcp"]):
        raise AddressError(
            f"listen address {text!r} is not of the form /ip4/ADDRESS/tcp/PORT or /ip6/ADDRESS/tcp/PORT"
        )
    return address


@dataclass(frozen=True, slots=True)
class CircuitAddress:
    """The address of a peer behind a relay: ``<address of the relay>/p2p-circuit/p2p/<peer id>``."""

    relay_address: str
    """The address at which the relay is dialled; it ends in the relay's id."""
    relay: str
    """The relay's peer id."""
    target: str
    """The id of the peer behind the relay."""

    def __str__(self) -> str:
        return f"{self.relay_address}{CIRCUIT}/p2p/{self.target}"


def is_circuit(text: str) -> bool:
    """Return whether an address leads through a relay. The text may be no valid address."""
    return CIRCUIT in text


def direct(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses without a relay."""
    return tuple(address for address in addresses if not is_circuit(address))


def parse_circuit_address(text: str) -> CircuitAddress:
    """Parse an address that leads through one relay.

    Raises:
        AddressError: the text is not such an address; the message says what is wrong with it.
    """
    _parse(text, f"{EXAMPLE}/p2p/RELAY_ID{CIRCUIT}/p2p/PEER_ID")
    before, found, after = text.partition(f"{CIRCUIT}/p2p/")
    if not found or "/" in after:
        raise AddressError(f"address {text!r} is not of the form {EXAMPLE}/p2p/RELAY_ID{CIRCUIT}/p2p/PEER_ID")
    _, relay = _parse_direct(before)
    _check_peer_id(text, after)
    if relay == after:
        raise AddressError(f"address {text!r} names one peer as relay and as the peer behind it")
    return CircuitAddress(before, relay, after)


def parse_peer_address(text: str) -> tuple[Multiaddr, str]:
    """Parse an address to dial, direct or through a relay. Return it with the peer id at its end.

    Raises:
        AddressError: the text is not such an address; the message says what is wrong with it.
    """
    if isinstance(text, str) and is_circuit(text):
        circuit = parse_circuit_address(text)
        return _parse(text), circuit.target
    return _parse_direct(text)


def _parse_direct(text: str) -> tuple[Multiaddr, str]:
    address = _parse(text, f"{EXAMPLE}/p2p/PEER_ID")
    names = [protocol.name for protocol in address.protocols()]
    if (
        len(names) != 3
        or names[0] not in ("ip4", "ip6", "dns", "dns4", "dns6")
        or names[1:] != ["tcp", "p2p"]
    ):
        raise AddressError(f"peer address {text!r} is not of the form {EXAMPLE}/p2p/PEER_ID")
    peer_id = str(address.value_for_protocol("p2p"))
    _check_peer_id(text, peer_id)
    return address, peer_id


def _check_peer_id(text: str, peer_id: str) -> None:
    try:
        public_key_of(peer_id)
    except PeerIdError as error:
        raise AddressError(f"peer address {text!r}: {error}") from None


def parse_address_of(peer_id: str, text: str) -> Multiaddr:
    """Parse an address to dial that must end in this peer's id.

    Raises:
        AddressError: the text is not such an address, or ends in another peer's id.
    """
    address, named = parse_peer_address(text)
    if named != peer_id:
        raise AddressError(f"{text!r} is not an address of {peer_id}")
    return address


def check_is_list(name: str, given: object) -> None:
    """Raise AddressError if a caller gave a single address, or no list at all, instead of a list."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise AddressError(f"{name} is a list of addresses such as [{EXAMPLE!r}], not {given!r}")


def _parse(text: str, example: str = EXAMPLE) -> Multiaddr:
    if not isinstance(text, str):
        raise AddressError(f"an address is text such as {EXAMPLE}, not {type(text).__name__}")
    if not text.startswith("/") or len(text) > MAX_ADDRESS_CHARS:
        raise AddressError(f"{text[:MAX_ADDRESS_CHARS]!r} is not an address; an address looks like {example}")
    try:
        return Multiaddr(text)
    except Exception as error:  # noqa: BLE001 - multiaddr raises a dozen unrelated types for bad text
        raise AddressError(f"{text!r} is not a multiaddress: {error}") from None


def reachable_hosts(bound: str) -> list[str]:
    """Return the hosts at which other peers can dial a listener that is bound to ``bound``.

    A wildcard (``0.0.0.0``, ``::``) stands for every interface of the machine. It must not be announced itself, because
    a peer that dials it connects to its own machine.
    """
    address = ipaddress.ip_address(bound)
    if not address.is_unspecified:
        return [bound]
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    found = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == family and "%" not in entry.address
    ]
    return sorted(set(found), key=_by_reach)


def _by_reach(host: str) -> tuple[int, str]:
    """Sort public addresses first and loopback last, because the first address of a list is tried first."""
    address = ipaddress.ip_address(host)
    return (2 if address.is_loopback else 1 if address.is_private else 0, host)


def with_peer_id(addresses: Iterable[str], peer_id: str) -> tuple[str, ...]:
    """Append ``/p2p/<peer id>`` to each address."""
    return tuple(f"{address}/p2p/{peer_id}" for address in addresses)
