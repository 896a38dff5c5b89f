"""libp2p connections through two routers: the protocol ``/p2pavg/punch/2``, and both of its sides.

The stream may be relayed. :mod:`p2pavg.net.nat.punch.meeting` coordinates the punch on it, and says what an attacker
can do. This module adds which peers may ask, and turns the punched connection into a libp2p connection. The peer that
asked is the initiator of Noise.

A peer that can be dialled asks a peer behind a router to dial it, with ``DialMe``. That dial passes the dial gate and
its budget of failed dials, as any other. A private address is dialled for an asker in that network only, and the answer
to a dial that failed is one fixed word: this peer is no means to find out what its network answers.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import trio

from p2pavg.base.errors import AddressError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.net.addresses import is_circuit
from p2pavg.net.limits.dial_policy import NOT_REACHED
from p2pavg.net.nat.punch.meeting import Puncher, RefusedPunchError, receive_bounded
from p2pavg.net.nat.punch.plan import (
    MAX_ADDRESSES,
    PROTOCOL,
    DialMe,
    PunchAnswer,
    PunchVerdict,
    decode_request,
)
from p2pavg.net.nat.reach.watcher import Connecting
from p2pavg.net.transport import PeerId, Stream, Transport, send_message

logger = logging.getLogger(__name__)

# All tries of a punch, at either peer. Each wait within them has a bound of its own.
ALL_TRIES_SECONDS = 30.0


class PunchService:
    """The punches of one transport, for libp2p connections.

    Args:
        connections: the connections of the transport. A peer without one is refused.
        puncher: shared with the lanes of the transport, so that both keep to one set of limits.
    """

    def __init__(self, transport: Transport, connections: Connecting, puncher: Puncher) -> None:
        self._transport = transport
        self._connections = connections
        self._puncher = puncher
        self._asking: set[PeerId] = set()
        transport.serve(PROTOCOL, self._serve)

    # -- the peer that asks

    async def connect(self, peer_id: PeerId, *, timeout: float) -> None:
        """Make a direct connection to a peer by a punch, coordinated over the connection that exists.

        Raises:
            RefusedPunchError: one of the two peers takes part in no punch, or has begun one already.
            UnreachableError: no direct connection within ``timeout`` seconds; the message says why.
        """
        if refusal := self._puncher.refusal:
            raise RefusedPunchError(f"this peer takes part in no punch: {refusal}")
        if peer_id in self._asking:
            raise RefusedPunchError(f"a punch with {peer_id} is under way")
        self._asking.add(peer_id)
        try:
            use = partial(self._connections.adopt_socket, peer_id=peer_id, initiator=True)
            async with self._stream_to(peer_id, timeout) as stream:
                await self._puncher.ask(stream, use)
        finally:
            self._asking.remove(peer_id)

    async def ask_to_dial(self, peer_id: PeerId, addresses: Sequence[str], *, timeout: float) -> None:
        """Ask a peer to dial this one, which can be dialled at ``addresses``.

        Raises:
            UnreachableError: the peer did not connect within ``timeout`` seconds; the message has its reason.
        """
        async with self._stream_to(peer_id, timeout) as stream:
            await send_message(stream, DialMe(tuple(addresses[:MAX_ADDRESSES])).encode())
            message = await receive_bounded(stream, timeout)
            if message is None:
                raise StreamBrokenError(f"{peer_id} closed the stream early")
            if reason := PunchVerdict.decode(message).reason:
                raise UnreachableError(f"{peer_id} reported: {reason}")

    @asynccontextmanager
    async def _stream_to(self, peer_id: PeerId, timeout: float) -> AsyncIterator[Stream]:
        """Open a stream for the block, which has ``timeout`` seconds in all.

        Raises:
            UnreachableError: there is no stream, or it broke, or the time is over.
        """
        with trio.move_on_after(timeout) as scope:
            stream = await self._transport.open_stream(peer_id, PROTOCOL, timeout=timeout)
            try:
                yield stream
                await stream.aclose()
            except (StreamBrokenError, RemoteProtocolError) as error:
                raise UnreachableError(f"no direct connection to {peer_id}: {error}") from None
            finally:
                await stream.reset()
        if scope.cancelled_caught:
            raise UnreachableError(f"no direct connection to {peer_id} within {timeout:.1f} s")

    # -- the peer that is asked

    async def _serve(self, stream: Stream) -> None:
        with trio.move_on_after(ALL_TRIES_SECONDS):
            message = await receive_bounded(stream)
            if message is None:
                return
            request = decode_request(message)
            if isinstance(request, DialMe):
                await self._dial_asker(stream, request)
            elif refusal := self._refusal(stream.remote):
                await send_message(stream, PunchAnswer(refusal).encode())
            else:
                use = partial(self._connections.adopt_socket, peer_id=stream.remote, initiator=False)
                if await self._puncher.take_part(stream, request, use):
                    logger.debug("a punch with %s succeeded", stream.remote)
            await stream.aclose()

    def _refusal(self, peer_id: PeerId) -> str:
        """Return the reason for which a peer that asks gets no punch; empty if it gets one."""
        if not self._transport.is_connected(peer_id):
            return "the two peers have nothing to do with each other"
        if peer_id in self._asking and self._transport.peer_id < peer_id:
            return "a punch that this peer asked for is under way"  # of two punches at once, one goes on
        return ""

    async def _dial_asker(self, stream: Stream, request: DialMe) -> None:
        peer_id = stream.remote
        reason = (
            ""
            if self._transport.is_connected(peer_id)
            else "the two peers have nothing to do with each other"
        )
        if not reason:
            try:
                with self._puncher.counted(peer_id):
                    asker = "" if stream.relayed else stream.remote_host
                    addresses = self._puncher.gate.askable(request.addresses, asker)
                    reason = "" if await self._dial_first(peer_id, addresses) else NOT_REACHED
            except RefusedPunchError as error:
                reason = str(error)
        await send_message(stream, PunchVerdict(reason).encode())

    async def _dial_first(self, peer_id: PeerId, addresses: Sequence[str]) -> bool:
        """Dial the addresses in turn until one answers. Return whether one did; the reasons go to this peer's log."""
        with trio.move_on_after(REPLY_SECONDS):
            for address in addresses:
                try:
                    if is_circuit(address):
                        raise UnreachableError("it leads through a relay")  # noqa: TRY301 - as any other reason
                    await self._connections.dial_one(peer_id, address)
                except (AddressError, UnreachableError) as error:
                    logger.debug("%s asked to be dialled at %s: %s", peer_id, address, error)
                else:
                    return True
        return False
