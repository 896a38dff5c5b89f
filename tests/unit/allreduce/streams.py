"""Streams made of lists: what the other side says is fixed, and what is said to it is kept."""

from __future__ import annotations

import trio

from p2pavg.net.transport import Buffer, Stream


class SaidBefore(Stream):
    """Everything has been said, and the other side has closed its half; sending takes no time."""

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
    """The other side says no more, and is not gone."""

    async def receive_some(self, max_bytes: int) -> bytes:
        return await super().receive_some(max_bytes) or await trio.sleep_forever()
