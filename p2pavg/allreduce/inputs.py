"""The contributions to one member's share: those that wait for others, and those that are kept. No I/O, no clock.

Its owner guards it: :class:`~p2pavg.allreduce.values.AttemptData`.
"""

from __future__ import annotations

from collections.abc import Mapping

from p2pavg.allreduce.movers.reuse import Received, ResumeMark
from p2pavg.net.transport import Buffer


class IncomingPart:
    """A part that is being received into memory of its own.

    Args:
        at: bytes that need not come, because they are there.
    """

    def __init__(self, index: int, payload: memoryview, at: int = 0) -> None:
        self.index = index
        self.payload = payload
        self.filled = at
        """Bytes from the beginning that are there. It never decreases, also if a sender begins the part again."""
        self._at = at

    def begin_again(self, at: int) -> None:
        """Receive the part again, from so many bytes on."""
        self._at = at

    @property
    def rest(self) -> memoryview:
        """The memory of the bytes that are still to come."""
        return self.payload[self._at :]

    def add(self, count: int) -> None:
        """Note that so many more bytes have come."""
        self._at += count
        self.filled = max(self.filled, self._at)


class Inputs:
    """The contributions to a share of so many parts.

    Args:
        keeps: whether contributions are kept when their part has been averaged.
    """

    def __init__(self, parts: int, *, keeps: bool) -> None:
        self.keeps = keeps
        self._waiting: list[dict[str, Buffer]] = [{} for _ in range(parts)]
        self._averaged: list[dict[str, Buffer]] = [{} for _ in range(parts)]
        self._coming: dict[str, IncomingPart] = {}

    def let_go(self) -> None:
        """Release everything that has the size of a vector."""
        self._waiting.clear()
        self._averaged.clear()
        self._coming.clear()

    def begin(self, contributor: str, coming: IncomingPart) -> None:
        """Note that the next part of a contributor is being received."""
        self._coming[contributor] = coming

    def begun(self, contributor: str, index: int) -> IncomingPart | None:
        """Return the beginning of a part that came in an earlier attempt, or in this one."""
        coming = self._coming.get(contributor)
        return coming if coming is not None and coming.index == index else None

    def take(self, contributor: str, index: int, payload: Buffer) -> None:
        """Let a part wait for those of the other contributors."""
        self._waiting[index][contributor] = payload

    def waiting(self, index: int) -> Mapping[str, Buffer]:
        """Return what waits for the other contributors, or is complete and is being averaged."""
        return self._waiting[index]

    def averaged(self, index: int) -> None:
        """Note that a part has been averaged."""
        if self.keeps:
            self._averaged[index] = dict(self._waiting[index])
        self._waiting[index].clear()

    def kept(self, index: int) -> dict[str, Buffer]:
        """Return the contributions of which a part was averaged, by peer id; none unless they are kept."""
        return self._averaged[index]

    def mark(self, contributor: str, parts: int) -> ResumeMark:
        """Return how far a contribution has come, of which so many parts are whole."""
        coming = self.begun(contributor, parts)
        return ResumeMark(parts, 0 if coming is None else coming.filled)

    def came(self, contributor: str, mark: ResumeMark, digests: list[bytes]) -> Received:
        """Return a contribution up to a mark."""
        whole = [
            self._waiting[index].get(contributor, self._averaged[index].get(contributor, b""))
            for index in range(mark.parts)
        ]
        coming = self.begun(contributor, mark.parts)
        # A copy: a thread of the attempt that ends may still write into that memory.
        begun = b"" if coming is None else bytes(coming.payload[: mark.nbytes])
        return Received(whole, begun, digests[: mark.parts])
