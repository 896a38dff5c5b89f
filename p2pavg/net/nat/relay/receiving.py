"""Receive the messages of the relay protocols."""

from __future__ import annotations

from p2pavg.base.errors import StreamBrokenError
from p2pavg.net.framing import receive_message
from p2pavg.net.nat.relay.messages import MAX_MESSAGE_BYTES, RelayMessage, decode
from p2pavg.net.transport import Stream


async def receive(stream: Stream) -> RelayMessage:
    """Return the next message of a stream.

    Raises:
        RemoteProtocolError: it is malformed or too long.
        StreamBrokenError: the stream broke, or was closed without a message.
    """
    data = await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)
    if data is None:
        raise StreamBrokenError(f"{stream.remote} closed the stream without an answer")
    return decode(data)
