"""The third way to make a lane: where neither peer can dial the other, both connect at once.

:mod:`p2pavg.net.nat.punch` makes the connection. The sender is the client of TLS, and the receiver the server, as if
the sender had dialled. Each end still trusts exactly the one certificate that the other one has named on the stream.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

from p2pavg.net.framing import send_message
from p2pavg.net.lanes.acceptor import TlsAcceptor
from p2pavg.net.lanes.conversation import SkippedWayError, expect_verdict, next_message
from p2pavg.net.lanes.messages import LaneOffer, LaneVerdict, Meet
from p2pavg.net.lanes.tls_connection import TlsConnection
from p2pavg.net.nat.punch.meeting import Puncher
from p2pavg.net.nat.punch.messages import PunchProposal
from p2pavg.net.transport import Stream


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
