"""The third way to make a lane: where neither peer can dial the other, both connect at once.

:mod:`p2pavg.net.nat.punch` makes the connection. The sender is the client of TLS, and the receiver the server, as if
the sender had dialled. Each end still trusts exactly the one certificate that the other one has named on the stream.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.net.addresses import is_circuit
from p2pavg.net.framing import receive_message, send_message
from p2pavg.net.lanes.acceptor import TlsAcceptor
from p2pavg.net.lanes.messages import MAX_MESSAGE_BYTES, LaneOffer, LaneVerdict, Meet
from p2pavg.net.lanes.tls_connection import TlsConnection
from p2pavg.net.nat.punch.meeting import Puncher
from p2pavg.net.nat.punch.plan import PunchProposal
from p2pavg.net.transport import PeerId, Stream

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


def direct(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses without a relay. A lane through a relay would be slower than the stream beside it."""
    return tuple(address for address in addresses if not is_circuit(address))


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
    """

    def __init__(self, doorway: TlsAcceptor, puncher: Puncher | None) -> None:
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
        return await self._puncher.ask(stream, greet, TlsConnection.close)

    async def answer(
        self, stream: Stream, certificate: bytes, admit: Callable[[TlsConnection], None], *, made: bool
    ) -> None:
        """Meet the sender, as the receiver, after its Meet was read.

        Args:
            certificate: the sender's.
            admit: takes over the connection.
            made: true if an earlier way has made a lane already.
        """
        refusal = "an earlier way has made a lane" if made else self.refusal
        await send_message(stream, LaneVerdict(3, refusal).encode())
        if self._puncher is None or refusal:
            return

        async def let_in(plain: socket.socket) -> None:
            admit(await self._doorway.welcome(certificate, plain))

        propose = PunchProposal.decode(await next_message(stream))
        await self._puncher.take_part(stream, propose, let_in)
