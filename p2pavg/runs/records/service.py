"""Answers the record calls of other peers, within their budgets."""

from __future__ import annotations

import logging
from collections import Counter

import trio

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import IDLE_STREAM_SECONDS, REPLY_SECONDS
from p2pavg.net.framing import receive_message, send_message
from p2pavg.net.limits.call_budget import CallBudget
from p2pavg.net.limits.first_messages import FirstMessages
from p2pavg.net.transport import Stream
from p2pavg.runs.records.calls import MAX_STREAMS_PER_PEER
from p2pavg_dht import MAX_MESSAGE_BYTES, MessageError, RecordNode

logger = logging.getLogger(__name__)


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
