"""The third way to make a lane: where neither peer can dial the other, both connect at once.

:mod:`p2pavg.net.nat.punch` makes the connection. The sender is the client of TLS, and the receiver the server, as if
the sender had dialled. Each end still trusts exactly the one certificate that the other one has named on the stream.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from typing import Annotated

from msgspec import Meta

from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.messages import Message, cut, decoded
from p2pavg.net.lanes.acceptor import TICKET_BYTES, TlsAcceptor
from p2pavg.net.lanes.certificates import check_certificate
from p2pavg.net.lanes.inbound import InboundLanes, Slot
from p2pavg.net.lanes.tls_connection import TlsConnection
from p2pavg.net.nat.punch.meeting import Puncher
from p2pavg.net.nat.punch.plan import PeerAddress, PunchProposal
from p2pavg.net.transport import PeerId, Stream, receive_message, send_message

# The messages with which two peers negotiate a direct lane, on a libp2p stream.
#
#     sender    Ask         the sender's certificate
#     receiver  Offer       the receiver's certificate, a ticket and its addresses, and whether a punch can lead to
#                           it; or a refusal with its reason
#     sender dials and shows the ticket
#     receiver  Verdict 1   the sender's dial has succeeded; or it has failed, with the reason
#     sender    Back        only after a failure: the sender's ticket and addresses
#     receiver dials and shows that ticket
#     receiver  Verdict 2   the receiver's dial has succeeded; or it has failed, with the reason
#     sender    Meet        only after failures: both shall connect at once
#     receiver  Verdict 3   the receiver is ready; or it is not, with the reason
#     both      the messages of a punch, see p2pavg.net.nat.punch.plan
#
# The sender skips a way that makes no sense: a dial without addresses, or a punch through a router that allows none.
# Then it sends the first message of the next way at once. The verdict of a skipped way may still arrive.
#
# The lane carries data from the sender to the receiver, whichever of the two has dialled.

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


# The negotiation of one lane, as its sender and its receiver read it from their stream.


class SkippedWayError(UnreachableError):
    """A way to make a lane makes no sense between the two peers now. No time was lost with it."""


class LaneSearch:
    """One attempt to make a lane: the reasons of its failures, and a note if another attempt would be futile."""

    def __init__(self, peer_id: PeerId, addresses: Sequence[str]) -> None:
        self.peer_id = peer_id
        self.addresses = addresses
        self.reasons: list[str] = []
        self.answered = False
        """True once the other peer has said how it can be reached."""
        self.futile = False
        self.costly = False
        """True if a way was tried and has failed. It may have taken seconds, and another search would too."""

    def failed(self, error: UnreachableError) -> None:
        """Note that one of the ways has failed, or was skipped."""
        self.reasons.append(str(error))
        self.costly |= not isinstance(error, SkippedWayError)


async def next_message(stream: Stream) -> bytes:
    """Return the next message. Raises StreamBrokenError if the other side has closed the stream instead."""
    message = await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)
    if message is None:
        raise StreamBrokenError(f"{stream.remote} closed the stream early")
    return message


async def expect_verdict(stream: Stream, attempt: int) -> None:
    """Wait for the verdict of an attempt, and skip the verdicts of earlier ones.

    Raises:
        UnreachableError: the attempt has failed; the message is the receiver's reason.
    """
    while (verdict := LaneVerdict.decode(await next_message(stream))).attempt != attempt:
        if verdict.attempt > attempt:
            raise RemoteProtocolError(f"a verdict of attempt {verdict.attempt} instead of {attempt}")
    if verdict.reason:
        raise UnreachableError(f"the peer reported: {verdict.reason}")


class Halfway:
    """Both sides of the third way.

    Args:
        puncher: shared with the punches of libp2p connections; ``None`` if this transport makes no punches.
        inbound: gets the lanes that other peers ask for.
    """

    def __init__(self, doorway: TlsAcceptor, puncher: Puncher | None, inbound: InboundLanes) -> None:
        self._inbound = inbound
        self._doorway = doorway
        self._puncher = puncher

    @property
    def refusal(self) -> str:
        """The reason for which this peer takes part in no punch; empty if it does."""
        return "its transport makes no punches" if self._puncher is None else self._puncher.refusal

    async def ask(self, stream: Stream, offer: LaneOffer) -> TlsConnection:
        """Meet the receiver, as the sender.

        Raises:
            SkippedWayError: one of the two peers takes part in no punch.
            UnreachableError: the punch has failed; the message has the reason of each try.
        """
        if self._puncher is None or self.refusal:
            raise SkippedWayError(f"this peer takes part in no punch: {self.refusal}")
        if not offer.punchable:
            raise SkippedWayError("the other peer takes part in no punch")
        await send_message(stream, Meet().encode())
        await expect_verdict(stream, 3)
        greet = partial(self._doorway.greet, offer.certificate, offer.ticket)
        return await self._puncher.ask(stream, greet)

    async def answer(self, stream: Stream, certificate: bytes, slot: Slot) -> None:
        """Meet the sender, as the receiver, after its Meet was read.

        Args:
            certificate: the sender's.
            slot: the place of the lane, unless an earlier way has made one already.
        """
        refusal = "an earlier way has made a lane" if slot.used else self.refusal
        await send_message(stream, LaneVerdict(3, refusal).encode())
        if self._puncher is None or refusal:
            return

        async def let_in(plain: socket.socket) -> None:
            # Adopted before the other peer hears of the success: it may use the lane at once.
            self._inbound.adopt(await self._doorway.welcome(certificate, plain), slot)

        propose = PunchProposal.decode(await next_message(stream))
        await self._puncher.take_part(stream, propose, let_in)
