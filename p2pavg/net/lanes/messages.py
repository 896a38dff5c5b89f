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
    both      the messages of a punch, see p2pavg.net.nat.punch.plan

The sender skips a way that makes no sense: a dial without addresses, or a punch through a router that allows none. Then
it sends the first message of the next way at once. The verdict of a skipped way may still arrive.

The lane carries data from the sender to the receiver, whichever of the two has dialled.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from p2pavg.base.messages import Message, cut, decoded
from p2pavg.net.lanes.acceptor import TICKET_BYTES
from p2pavg.net.lanes.certificates import check_certificate
from p2pavg.net.nat.punch.plan import PeerAddress

PROTOCOL = "/p2pavg/lane/2.0.0"
MAX_MESSAGE_BYTES = 8192
MAX_ADDRESSES = 6
_MAX_REASON = 500
_Addresses = Annotated[tuple[PeerAddress, ...], Meta(max_length=MAX_ADDRESSES)]


class LaneRequest(Message, frozen=True, tag="lane"):
    """The request for a lane, with the sender's certificate."""

    certificate: bytes

    def __post_init__(self) -> None:
        check_certificate(self.certificate)


class LaneOffer(Message, frozen=True, tag="offer"):
    """The receiver's certificate, ticket and addresses; or a ``refusal``, which is the reason.

    ``punchable`` is true if the receiver takes part in punches.
    """

    refusal: str = ""
    certificate: bytes = b""
    ticket: bytes = b""
    addresses: _Addresses = ()
    punchable: bool = False

    def __post_init__(self) -> None:
        cut(self, refusal=_MAX_REASON, addresses=MAX_ADDRESSES)
        if self.refusal:
            if self.certificate or self.ticket or self.addresses or self.punchable:
                raise ValueError("a refusal with an offer")
            return
        check_certificate(self.certificate)
        _check_ticket(self.ticket)


class Back(Message, frozen=True, tag="back"):
    """The sender's ticket and addresses, for a dial in the other direction."""

    ticket: bytes
    addresses: _Addresses

    def __post_init__(self) -> None:
        cut(self, addresses=MAX_ADDRESSES)
        _check_ticket(self.ticket)


class Meet(Message, frozen=True, tag="meet"):
    """The request that both peers connect at once."""


class LaneVerdict(Message, frozen=True, tag="verdict"):
    """The result of a way: ``reason`` is empty if the dial has made a lane, or if the receiver is ready to punch."""

    attempt: Annotated[int, Meta(ge=1, le=3)]
    reason: str

    def __post_init__(self) -> None:
        cut(self, reason=_MAX_REASON)


def decode_next_way(message: bytes) -> Back | Meet:
    """Read the message with which the sender begins its second or its third way.

    Raises:
        RemoteProtocolError: it is malformed, or of another kind.
    """
    way: Back | Meet = decoded(message, Back | Meet)
    return way


def _check_ticket(ticket: bytes) -> None:
    if len(ticket) != TICKET_BYTES:
        raise ValueError(f"a ticket of {len(ticket)} bytes")
