"""Record calls over streams of the transport.

A stream is kept for further calls to the same peer: opening one costs several messages more than a call does, and each
round begins with a call to each of the peers that are nearest to the run's key.
"""

from __future__ import annotations

from collections import OrderedDict

import trio

from p2pavg.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.net.framing import receive_message, send_message
from p2pavg.net.transport import PeerId, Stream, Transport
from p2pavg_dht import MAX_MESSAGE_BYTES, PROTOCOL, RPC_TIMEOUT, Contact, RpcError

RECORD_STREAM_SECONDS = 60.0  # that a stream without a call stays open
MAX_KEPT = 64  # streams; the one that was used longest ago gives way

# Calls to one peer at a time; a fifth waits. Lookups of several keys ask the same nearest peers.
MAX_CALLS_PER_PEER = 4

# Streams of one peer that are served at a time, over all its connections: those calls, the stream that is kept, and
# some that it has let go of a moment ago. With 120 streams two connections could hold 240 MB.
MAX_STREAMS_PER_PEER = 8


class RecordCalls:
    """The calls of one peer. Each waits for at most ``RPC_TIMEOUT``, as its caller sees to."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._kept: OrderedDict[PeerId, tuple[Stream, float]] = OrderedDict()
        self._turns: dict[PeerId, trio.CapacityLimiter] = {}

    async def call(self, contact: Contact, request: bytes) -> bytes:
        """The answer.

        Raises:
            RpcError: there is none, and why.
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
        """A stream that the other side has not let go of yet, as far as time tells."""
        stream, until = self._kept.pop(peer_id, (None, 0.0))
        if stream is not None and trio.current_time() >= until:
            await stream.aclose()
            return None
        return stream

    async def _try_kept(self, stream: Stream, request: bytes) -> bytes | None:
        """``None`` when the other side has closed it in the meantime, as it may: calls can be repeated."""
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
        # Half of the other side's sync_timeout: who is asked on a stream has not let go of it.
        before = self._kept.pop(stream.remote, None)  # of a call at the same time
        self._kept[stream.remote] = (stream, trio.current_time() + RECORD_STREAM_SECONDS / 2)
        if before is None and len(self._kept) > MAX_KEPT:
            _, before = self._kept.popitem(last=False)
        if before is not None:
            await before[0].aclose()
