"""How a connection to a peer comes about: one dial a peer at a time, and an inbound connection is as good."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from p2pavg.errors import UnreachableError
from p2pavg.net.transport import PeerId

MAX_ADDRESSES_DIALLED = 6

Dial = Callable[[PeerId, Sequence[str]], Awaitable[list[str]]]
"""Try addresses of a peer; returns why each failed, and nothing when one answered."""


class _Attempt:
    def __init__(self, deadline: float) -> None:
        self.scope = trio.CancelScope(deadline=deadline)
        self.reasons: list[str] = []


class Dialler:
    """Waits for a connection, whoever makes it.

    A dial goes on when an inbound connection arrives before it is done: where two dial each other at once, and each
    gave up its own dial for the other's, both would lose both.
    """

    def __init__(self, nursery: trio.Nursery, is_connected: Callable[[PeerId], bool], dial: Dial) -> None:
        self._nursery = nursery
        self._is_connected = is_connected
        self._dial = dial
        self._attempts: dict[PeerId, _Attempt] = {}
        self._changed = trio.Event()

    def something_changed(self) -> None:
        """To be called when there is one more connection."""
        self._changed.set()
        self._changed = trio.Event()

    async def connect(self, peer_id: PeerId, addresses: Sequence[str], *, wait_inbound: bool = False) -> None:
        """Return once there is a connection.

        Raises:
            UnreachableError: no address answered, and ``wait_inbound`` is false; the message says why.
        """
        mine: _Attempt | None = None
        try:
            while not self._is_connected(peer_id):
                if peer_id not in self._attempts:
                    if mine is None:
                        mine = self._start(peer_id, addresses)
                    elif not wait_inbound:
                        raise UnreachableError(f"no connection to {peer_id}: {_why(mine.reasons)}")
                await self._changed.wait()
        except trio.Cancelled:
            if mine is not None:
                mine.scope.cancel()
            raise

    def _start(self, peer_id: PeerId, addresses: Sequence[str]) -> _Attempt:
        attempt = self._attempts[peer_id] = _Attempt(trio.current_effective_deadline())
        self._nursery.start_soon(self._run, attempt, peer_id, addresses)
        return attempt

    async def _run(self, attempt: _Attempt, peer_id: PeerId, addresses: Sequence[str]) -> None:
        try:
            with attempt.scope:
                attempt.reasons = await self._dial(peer_id, addresses[:MAX_ADDRESSES_DIALLED])
        finally:
            del self._attempts[peer_id]
            self.something_changed()


def _why(reasons: Sequence[str]) -> str:
    return "; ".join(reasons) if reasons else "no address is known"
