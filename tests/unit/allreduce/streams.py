"""Streams made of lists: the received bytes are fixed in advance, and the sent bytes are kept."""

from __future__ import annotations

import trio

from p2pavg.net.transport import Buffer, Stream


def framed(message: bytes) -> bytes:
    """Return a message with its length before it."""
    return len(message).to_bytes(4, "big") + message


class SaidBefore(Stream):
    """A stream whose other side has sent all bytes and closed its half. Sending takes no time."""

    def __init__(self, said: bytes, remote: str = "someone") -> None:
        self.remote = remote
        self.sent = bytearray()
        self.closed = False
        self._said = said

    async def send_all(self, data: Buffer) -> None:
        await trio.lowlevel.checkpoint()
        self.sent += bytes(data)

    async def receive_some(self, max_bytes: int) -> bytes:
        await trio.lowlevel.checkpoint()
        chunk, self._said = self._said[:max_bytes], self._said[max_bytes:]
        return chunk

    async def aclose(self) -> None:
        self.closed = True

    async def reset(self) -> None:
        self.closed = True


class Silent(SaidBefore):
    """A stream whose other side sends no more, but keeps its half open."""

    async def receive_some(self, max_bytes: int) -> bytes:
        return await super().receive_some(max_bytes) or await trio.sleep_forever()
