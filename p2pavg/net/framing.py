"""Messages on a stream: a length of four bytes, big-endian, then that many bytes.

The length is checked against the caller's limit before anything is allocated. Bulk payloads follow a message without
framing, and are read directly into the caller's buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import trio

from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError
from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.net.transport import Buffer, Stream

LENGTH_BYTES = 4

# Control messages are small: a roster of 16 members with signed records of 4 KiB each is the largest. gRPC allows
# 4 MiB by default, libp2p's own protocols 64 KiB to 4 MiB.
MAX_CONTROL_BYTES = 256 * 1024


_READ_CHUNK = 256 * 1024  # the initial window of a stream; a read rarely finds more


async def send_message(stream: Stream, message: Buffer) -> None:
    """Send one message, preceded by its length."""
    await send_messages(stream, [message])


async def send_messages(stream: Stream, messages: Iterable[Buffer]) -> None:
    """Send messages one after the other, each preceded by its length, in one write."""
    await stream.send_all(
        b"".join(len(message).to_bytes(LENGTH_BYTES, "big") + bytes(message) for message in messages)
    )


async def receive_message(stream: Stream, *, max_bytes: int = MAX_CONTROL_BYTES) -> bytes | None:
    """Return the next message; ``None`` if the other side closed its half between two messages.

    Raises:
        RemoteProtocolError: the announced length is zero or above ``max_bytes``, or the message was not complete
            REPLY_SECONDS after its first byte.
        StreamBrokenError: the stream ended within a message, or was reset.
    """
    first = await stream.receive_some(LENGTH_BYTES)
    if not first:
        return None
    # From the first byte to the last one. A roster of 64 KiB takes 8 s on a link of 64 kbit/s, the slowest that is
    # supported without setting a bandwidth. A sender that takes longer occupies memory for nothing.
    with trio.move_on_after(REPLY_SECONDS):
        length = int.from_bytes(first + await _receive_exactly(stream, LENGTH_BYTES - len(first)), "big")
        if not 0 < length <= max_bytes:
            raise RemoteProtocolError(
                f"a message of {length} bytes was announced, 1 to {max_bytes} are allowed"
            )
        return bytes(await _receive_exactly(stream, length))
    raise RemoteProtocolError(f"a message was not complete {REPLY_SECONDS:.0f} s after its first byte")


async def _receive_exactly(stream: Stream, count: int) -> bytearray:
    """Return exactly ``count`` bytes.

    The buffer grows with the bytes that arrive, so a stranger cannot reserve memory by announcing a long message. The
    transport is told how many bytes the buffer holds.
    """
    received = bytearray()
    try:
        while len(received) < count:
            received += await _receive_some(stream, count - len(received))
            stream.hold(len(received))
    finally:
        stream.hold(0)
    return received


async def _receive_some(stream: Stream, wanted: int) -> bytes:
    chunk = await stream.receive_some(min(wanted, _READ_CHUNK))
    if not chunk:
        raise StreamBrokenError(f"stream of {stream.remote} ended {wanted} bytes early")
    return chunk


async def receive_exactly_into(
    stream: Stream, buffer: memoryview, on_chunk: Callable[[int], None] = lambda _count: None
) -> None:
    """Fill ``buffer`` from the stream.

    Args:
        on_chunk: is told the length of each chunk that has come into ``buffer``.

    Raises:
        StreamBrokenError: the stream ended or was reset before the buffer was full.
    """
    filled = 0
    while filled < len(buffer):
        chunk = await _receive_some(stream, len(buffer) - filled)
        buffer[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
        on_chunk(len(chunk))
