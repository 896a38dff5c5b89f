"""Record calls over streams of the transport.

A stream is kept for further calls to the same peer: opening one costs several messages more than a call does, and each
round begins with a call to each of the peers that are nearest to the run's key.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict

import trio

from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import IDLE_STREAM_SECONDS, REPLY_SECONDS
from p2pavg.net.limits.call_budget import CallBudget
from p2pavg.net.limits.first_messages import FirstMessages
from p2pavg.net.transport import PeerId, Stream, Transport, receive_message, send_message
from p2pavg_dht import MAX_MESSAGE_BYTES, PROTOCOL, RPC_TIMEOUT, Contact, MessageError, RecordNode, RpcError

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

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of this peer now."""
        return self._transport.addresses

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


logger = logging.getLogger(__name__)


# Answers the record calls of other peers, within their budgets.


class RecordService:
    """Serves the record protocol of one peer."""

    def __init__(self, records: RecordNode, budget: CallBudget | None = None) -> None:
        self._records = records
        self._messages = FirstMessages(budget)
        self._streams: Counter[str] = Counter()

    async def serve(self, stream: Stream) -> None:
        """Answer one call after the other, until the caller closes the stream or is idle for too long.

        Raises:
            RemoteProtocolError: the caller has too many streams, or makes calls faster than its budget allows.
        """
        if self._streams[stream.remote] >= MAX_STREAMS_PER_PEER:
            raise RemoteProtocolError(f"it has {MAX_STREAMS_PER_PEER} record streams already")
        self._streams[stream.remote] += 1
        try:
            while await self._answer_next(stream):
                pass
        finally:
            self._streams[stream.remote] -= 1
            self._streams += Counter()  # drops the peers without streams

    async def _answer_next(self, stream: Stream) -> bool:
        with trio.move_on_after(IDLE_STREAM_SECONDS) as scope:
            request = await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)
        if scope.cancelled_caught or request is None:
            return False
        await self._messages.admit(stream)
        try:
            with self._messages.charged(stream) as bill:
                answer = self._records.answer(stream.remote, request)
                bill.count = len(answer)
        except MessageError as error:
            raise RemoteProtocolError(str(error)) from None
        with trio.move_on_after(REPLY_SECONDS) as scope:
            await send_message(stream, answer)
        return not scope.cancelled_caught
