"""The messages with which two peers negotiate a direct lane, on a libp2p stream.

    sender    Ask         the sender's certificate
    receiver  Offer       the receiver's certificate, a ticket and its addresses, and whether a punch can lead to it; or
                          a refusal with its reason
    sender dials and shows the ticket
    receiver  Verdict 1   the sender's dial has succeeded; or it has failed, with the reason
    sender    Back        only after a failure: the sender's ticket and addresses
    receiver dials and shows that ticket
    receiver  Verdict 2   the receiver's dial has succeeded; or it has failed, with the reason
    sender    Meet        only after failures: both shall connect at once
    receiver  Verdict 3   the receiver is ready; or it is not, with the reason
    both      the messages of a punch, see p2pavg.net.nat.punch.messages

The sender skips a way that makes no sense: a dial without addresses, or a punch through a router that allows none. Then
it sends the first message of the next way at once. The verdict of a skipped way may still arrive.

The lane carries data from the sender to the receiver, whichever of the two has dialled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from p2pavg.base.encoding import first_text, pack, unpack
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.peer_text import PeerText
from p2pavg.net.addresses import MAX_ADDRESS_CHARS
from p2pavg.net.lanes.acceptor import TICKET_BYTES
from p2pavg.net.lanes.certificates import check_certificate

PROTOCOL = "/p2pavg/lane/1.1.0"
MAX_MESSAGE_BYTES = 8192
MAX_ADDRESSES = 6
_MAX_REASON = 500
_BACK, _MEET = "back", "meet"


@dataclass(frozen=True)
class LaneRequest:
    """The request for a lane, with the sender's certificate."""

    certificate: bytes

    def encode(self) -> bytes:
        """Return the message as bytes."""
        return pack(self.certificate)

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """Read a message. Raises RemoteProtocolError if it is malformed."""
        (certificate,) = unpack(message, bytes)
        check_certificate(certificate)
        return cls(certificate)


@dataclass(frozen=True)
class LaneOffer:
    """The receiver's certificate, ticket and addresses; or a ``refusal``, which is the reason.

    ``punchable`` is true if the receiver takes part in punches.
    """

    refusal: str = ""
    certificate: bytes = b""
    ticket: bytes = b""
    addresses: tuple[str, ...] = ()
    punchable: bool = False

    def encode(self) -> bytes:
        """Return the message as bytes."""
        addresses = self.addresses[:MAX_ADDRESSES]
        return pack(self.refusal, self.certificate, self.ticket, addresses, self.punchable)

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """Read a message. Raises RemoteProtocolError if it is malformed."""
        refusal, certificate, ticket, addresses, punchable = unpack(message, str, bytes, bytes, tuple, bool)
        if refusal:
            return cls(_checked_reason(refusal))
        check_certificate(certificate)
        return cls("", certificate, _checked_ticket(ticket), _checked_addresses(addresses), punchable)


@dataclass(frozen=True)
class Back:
    """The sender's ticket and addresses, for a dial in the other direction."""

    ticket: bytes
    addresses: tuple[str, ...]

    def encode(self) -> bytes:
        """Return the message as bytes."""
        return pack(_BACK, self.ticket, self.addresses[:MAX_ADDRESSES])

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """Read a message. Raises RemoteProtocolError if it is malformed."""
        kind, ticket, addresses = unpack(message, str, bytes, tuple)
        if kind != _BACK:
            raise RemoteProtocolError(f"a message of the kind {kind[:64]!r} came instead of {_BACK!r}")
        return cls(_checked_ticket(ticket), _checked_addresses(addresses))


@dataclass(frozen=True)
class Meet:
    """The request that both peers connect at once."""

    def encode(self) -> bytes:
        """Return the message as bytes."""
        return pack(_MEET)

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """Read a message. Raises RemoteProtocolError if it is malformed."""
        (kind,) = unpack(message, str)
        if kind != _MEET:
            raise RemoteProtocolError(f"a message of the kind {kind[:64]!r} came instead of {_MEET!r}")
        return cls()


def decode_next_way(message: bytes) -> Back | Meet:
    """Read the message with which the sender begins its second or its third way.

    Raises:
        RemoteProtocolError: it is malformed, or of another kind.
    """
    return Meet.decode(message) if first_text(message) == _MEET else Back.decode(message)


@dataclass(frozen=True)
class LaneVerdict:
    """The result of a way: ``reason`` is empty if the dial has made a lane, or if the receiver is ready to punch."""

    attempt: int
    reason: str

    def encode(self) -> bytes:
        """Return the message as bytes."""
        return pack(self.attempt, self.reason[:_MAX_REASON])

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """Read a message. Raises RemoteProtocolError if it is malformed."""
        attempt, reason = unpack(message, int, str)
        if attempt not in (1, 2, 3):
            raise RemoteProtocolError(f"a verdict of attempt {attempt}")
        return cls(attempt, _checked_reason(reason))


def _checked_reason(reason: str) -> PeerText:
    if len(reason) > _MAX_REASON:
        raise RemoteProtocolError(f"a reason of {len(reason)} characters")
    return PeerText(reason)


def _checked_ticket(ticket: bytes) -> bytes:
    if len(ticket) != TICKET_BYTES:
        raise RemoteProtocolError(f"a ticket of {len(ticket)} bytes")
    return ticket


def _checked_addresses(addresses: tuple[object, ...]) -> tuple[str, ...]:
    """Check the number and size of addresses. The dial checks that an address belongs to the peer."""
    if len(addresses) > MAX_ADDRESSES:
        raise RemoteProtocolError(f"{len(addresses)} addresses were named")
    for address in addresses:
        if not isinstance(address, str) or not 0 < len(address) <= MAX_ADDRESS_CHARS:
            raise RemoteProtocolError("a message holds an address that is empty, too long or not text")
    return tuple(str(address) for address in addresses)
