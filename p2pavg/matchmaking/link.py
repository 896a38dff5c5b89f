"""One join stream: sending queues a message without waiting, and received messages go to the link's owner."""

from __future__ import annotations

import logging
from typing import Protocol

import trio

from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError
from p2pavg.base.limits import TAIL_SECONDS
from p2pavg.matchmaking.messages import (
    OF_FOLLOWERS,
    OF_LEADERS,
    Message,
    check_signature,
    decode,
    encode,
    records_in,
)
from p2pavg.net.blame import guarded
from p2pavg.net.limits.first_messages import FirstMessages
from p2pavg.net.transport import Stream, receive_message, send_message

logger = logging.getLogger(__name__)

# A conversation has a few messages in flight at most. A peer that does not read them is dropped.
_OUTBOX_MESSAGES = 32
VERIFIED_IN_A_TURN = 16
"""Signatures that are verified without a pause: 2 to 3 ms."""


class LinkOwner(Protocol):
    """The attempt that a link belongs to: it is told of everything on the link."""

    def heard(self, link: JoinLink, message: Message) -> None:
        """Handle a message of the other end."""
        ...

    def broke(self, link: JoinLink, reason: str) -> None:
        """Handle the end of a link that this side has not closed."""
        ...

    def blame(self, peer_id: str, error: Exception) -> None:
        """Drop a peer whose message raised an exception that none should."""
        ...


class JoinLink:
    """A join stream's queue of outgoing messages, and its reader. It owns ``stream`` while :meth:`run` runs.

    Args:
        upward: true if this peer asked to join, and the other end is the leader. A leader and a follower may send
            different messages. One of another kind is not read, and ends the conversation.
        messages: the budget of the processor time that reading them takes.
    """

    def __init__(self, stream: Stream, owner: LinkOwner, messages: FirstMessages, *, upward: bool) -> None:
        self.peer_id = stream.remote
        self.upward = upward
        self._stream = stream
        self._owner = owner
        self._kinds = OF_LEADERS if upward else OF_FOLLOWERS
        self._messages = messages
        self._outbox, self._to_send = trio.open_memory_channel[Message](_OUTBOX_MESSAGES)
        self._closed = False
        self._scope = trio.CancelScope()

    def send(self, message: Message) -> None:
        """Queue a message. A peer that does not read loses the stream."""
        if self._closed:
            return
        try:
            self._outbox.send_nowait(message)
        except trio.WouldBlock:
            logger.debug("%s does not read its messages", self._stream.remote)
            self._scope.cancel()

    def close(self) -> None:
        """Stop sending and receiving; queued messages are still sent."""
        self._closed = True
        self._outbox.close()

    async def run(self) -> None:
        """Carry messages until either side closes."""
        reason = "it does not read its messages"
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    reason = await self._read()
                    nursery.cancel_scope.cancel()
        finally:
            # After a cancellation from outside, the owner is not told: it is gone too.
            broke, self._closed = not self._closed, True
            await self._stream.reset()
        if broke:
            self._owner.broke(self, reason)

    async def _read(self) -> str:
        """Read until the other end closes; return the reason for which it has ended."""
        while True:
            message: Message | None = None
            try:
                data = await receive_message(self._stream)
                if data is None:
                    return "it closed the stream"
                if self._closed:
                    continue  # until the writer has sent the rest
                await self._messages.admit(self._stream)
                with guarded(self.peer_id, self._owner.blame, expected=(RemoteProtocolError,)):
                    message = await self._decode(data)
            except (StreamBrokenError, ClosedError, RemoteProtocolError) as error:
                return str(error)
            if message is None:
                return "its message could not be read"
            if not self._closed:
                self._owner.heard(self, message)

    async def _decode(self, data: bytes) -> Message:
        """Return a message. The loop has its turn between the signatures of a roster, of which it may have 128."""
        with self._messages.charged(self._stream):
            records = records_in(data, self._kinds)
        for start in range(0, len(records), VERIFIED_IN_A_TURN):
            with self._messages.charged(self._stream):
                for record in records[start : start + VERIFIED_IN_A_TURN]:
                    check_signature(record)
            await trio.lowlevel.checkpoint()
        with self._messages.charged(self._stream):
            # It finds the signatures among those that were verified lately.
            return decode(data, self._kinds)

    async def _write(self) -> None:
        try:
            async for message in self._to_send:
                await send_message(self._stream, encode(message))
            with trio.move_on_after(TAIL_SECONDS):
                await self._stream.aclose()
        except (StreamBrokenError, ClosedError) as error:
            logger.debug("writing to %s: %s", self._stream.remote, error)
        self._scope.cancel()
