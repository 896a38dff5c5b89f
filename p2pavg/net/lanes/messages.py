"""What two peers say to each other, on a libp2p stream, to get a direct lane.

    sender    Ask         my certificate
    receiver  Offer       no, because ...; or my certificate, a ticket, and where I listen
    sender dials, and shows the ticket
    receiver  Verdict 1   you are in; or you are not, because ...
    sender    Back        if that came to nothing: a ticket of mine, and where I listen
    receiver dials, and shows that ticket
    receiver  Verdict 2   I am in; or I am not, because ...

The lane carries data from the sender to the receiver, whoever dialled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from p2pavg.encoding import pack, unpack
from p2pavg.errors import RemoteProtocolError
from p2pavg.net.addresses import MAX_ADDRESS_CHARS
from p2pavg.net.lanes.acceptor import TICKET_BYTES
from p2pavg.net.lanes.certificates import check_certificate

PROTOCOL = "/p2pavg/lane/1.0.0"
MAX_MESSAGE_BYTES = 8192
MAX_ADDRESSES = 6
_MAX_REASON = 500


@dataclass(frozen=True)
class Ask:
    """The certificate of who wants a lane."""

    certificate: bytes

    def encode(self) -> bytes:
        """As sent."""
        return pack(self.certificate)

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """Raises RemoteProtocolError."""
        (certificate,) = unpack(message, bytes)
        check_certificate(certificate)
        return cls(certificate)


@dataclass(frozen=True)
class Offer:
    """How to reach who was asked; or ``refusal``, which says why not."""

    refusal: str = ""
    certificate: bytes = b""
    ticket: bytes = b""
    addresses: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """As sent."""
        return pack(self.refusal, self.certificate, self.ticket, self.addresses[:MAX_ADDRESSES])

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """Raises RemoteProtocolError."""
        refusal, certificate, ticket, addresses = unpack(message, str, bytes, bytes, tuple)
        if refusal:
            return cls(_checked_reason(refusal))
        check_certificate(certificate)
        return cls("", certificate, _checked_ticket(ticket), _checked_addresses(addresses))


@dataclass(frozen=True)
class Back:
    """How to reach who asked."""

    ticket: bytes
    addresses: tuple[str, ...]

    def encode(self) -> bytes:
        """As sent."""
        return pack(self.ticket, self.addresses[:MAX_ADDRESSES])

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """Raises RemoteProtocolError."""
        ticket, addresses = unpack(message, bytes, tuple)
        return cls(_checked_ticket(ticket), _checked_addresses(addresses))


@dataclass(frozen=True)
class Verdict:
    """Whether the first, or the second, way to a lane has led to one: if so, ``reason`` is empty."""

    attempt: int
    reason: str

    def encode(self) -> bytes:
        """As sent."""
        return pack(self.attempt, self.reason[:_MAX_REASON])

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """Raises RemoteProtocolError."""
        attempt, reason = unpack(message, int, str)
        if attempt not in (1, 2):
            raise RemoteProtocolError(f"a verdict of attempt {attempt}")
        return cls(attempt, _checked_reason(reason))


def _checked_reason(reason: str) -> str:
    """It is shown to people: one line that they can read."""
    if len(reason) > _MAX_REASON:
        raise RemoteProtocolError(f"a reason of {len(reason)} characters")
    return reason if reason.isprintable() else ascii(reason)


def _checked_ticket(ticket: bytes) -> bytes:
    if len(ticket) != TICKET_BYTES:
        raise RemoteProtocolError(f"a ticket of {len(ticket)} bytes")
    return ticket


def _checked_addresses(addresses: tuple[object, ...]) -> tuple[str, ...]:
    """Whether each is an address of the peer is checked when it is dialled."""
    if len(addresses) > MAX_ADDRESSES:
        raise RemoteProtocolError(f"{len(addresses)} addresses were named")
    for address in addresses:
        if not isinstance(address, str) or not 0 < len(address) <= MAX_ADDRESS_CHARS:
            raise RemoteProtocolError("a message names an address that is none")
    return tuple(str(address) for address in addresses)
