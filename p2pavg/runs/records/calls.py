"""Record calls over streams of the transport.

A stream is kept for further calls to the same peer: opening one costs several messages more than a call does, and each
round begins with a call to each of the peers that are nearest to the run's key.
"""

from __future__ import annotations

from collections import OrderedDict

import trio

from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import IDLE_STREAM_SECONDS
from p2pavg.net.framing import receive_message, send_message
from p2pavg.net.transport import PeerId, Stream, Transport
from p2pavg_dht import MAX_MESSAGE_BYTES, PROTOCOL, RPC_TIMEOUT, Contact, RpcError

MAX_KEPT = 64  # streams; beyond that, the least recently used one is closed

# Concurrent calls to one peer; a fifth waits. Lookups of several keys ask the same nearest peers.
MAX_CALLS_PER_PEER = 4

# Concurrently served streams of one peer, over all its connections. They are the streams of its calls, the one that it
# keeps, and some that it closed a moment ago. With 120 streams, two connections could hold 240 MB.
MAX_STREAMS_PER_PEER = 8


class RecordCalls:
    """Record calls from this peer to others. The caller limits each to ``RPC_TIMEOUT``."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._kept: OrderedDict[PeerId, tuple[Stream, float]] = OrderedDict()
        self._turns: dict[PeerId, trio.CapacityLimiter] = {}

    async def call(self, contact: Contact, request: bytes) -> bytes:
        """Send a request and return the answer.

        Raises:
            RpcError: no answer came; the message says why.
        """
        turns = self._turns.setdefault(contact.peer_id, trio.CapacityLimiter(MAX_CALLS_PER_PEER))
        try:
            async with turns:
                answer = await self._call(contact, request)
        finally:
            if turns.borrowed_tokens == 0 and turns.statistics().tasks_waiting == 0:
                self._turns.pop(contact.peer_id, None)
        self._transport.remember_peer(contact.peer_id)
        return answer

    async def _call(self, contact: Contact, request: bytes) -> bytes:
        kept = await self._take(contact.peer_id)
        if kept is not None:
            answer = await self._try_kept(kept, request)
            if answer is not None:
                return answer
        try:
            stream = await self._transport.open_stream(
                contact.peer_id, PROTOCOL, addresses=contact.addresses, timeout=RPC_TIMEOUT
            )
        except UnreachableError as error:
            raise RpcError(str(error)) from None
        try:
            return await self._ask(stream, request)
        except (StreamBrokenError, ClosedError, RemoteProtocolError) as error:
            raise RpcError(str(error)) from None

    async def _take(self, peer_id: PeerId) -> Stream | None:
        """Return a kept stream, unless by its age the other side has closed it."""
        stream, until = self._kept.pop(peer_id, (None, 0.0))
        if stream is not None and trio.current_time() >= until:
            await stream.aclose()
            return None
        return stream

    async def _try_kept(self, stream: Stream, request: bytes) -> bytes | None:
        """Ask on a kept stream; return ``None`` if the other side has closed it. The call can then be repeated."""
        try:
            return await self._ask(stream, request)
        except (StreamBrokenError, ClosedError):
            return None
        except RemoteProtocolError as error:
            raise RpcError(str(error)) from None

    async def _ask(self, stream: Stream, request: bytes) -> bytes:
        answer = None
        try:
            await send_message(stream, request)
            answer = await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)
        finally:
            if answer is None:
                await stream.reset()
        if answer is None:
            raise StreamBrokenError(f"{stream.remote} closed the stream without an answer")
        await self._keep(stream)
        return answer

    async def _keep(self, stream: Stream) -> None:
        # Half of the other side's timeout, so that the other side still has the stream open when it is used.
        before = self._kept.pop(stream.remote, None)  # kept by a concurrent call
        # The serving side keeps it twice as long: a call must never go into a stream that is closed there.
        self._kept[stream.remote] = (stream, trio.current_time() + IDLE_STREAM_SECONDS / 2)
        if before is None and len(self._kept) > MAX_KEPT:
            _, before = self._kept.popitem(last=False)
        if before is not None:
            await before[0].aclose()
