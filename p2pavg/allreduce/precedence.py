"""On streams, contributions go before averages. On direct lanes, :mod:`p2pavg.allreduce.turns` sees to it.

Other members wait for contributions, and an average is worth nothing if a member that it counts is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

STUCK_SECONDS = 0.5
"""If no contribution moves for so long, a receiver does not read. The averages for the others wait no longer."""
PIECE_BYTES = 32 * 1024


class Precedence:
    """The contributions that one member sends over streams, and the averages that wait for them."""

    def __init__(self) -> None:
        self._left = 0
        self._moved = 0
        self._stuck = False
        self._ended = trio.Event()

    @contextmanager
    def contributing(self) -> Iterator[None]:
        """Let averages wait for as long as the block runs."""
        self._left += 1
        try:
            yield
        finally:
            self._left -= 1
            self._ended.set()
            self._ended = trio.Event()

    def moved(self) -> None:
        """Note that a piece of a contribution has gone."""
        self._moved += 1

    async def until_free(self) -> None:
        """Wait until no contribution is being sent, or one is stuck."""
        while self._left and not self._stuck:
            before = self._moved
            with trio.move_on_after(STUCK_SECONDS) as scope:
                await self._ended.wait()
            self._stuck = scope.cancelled_caught and self._moved == before
