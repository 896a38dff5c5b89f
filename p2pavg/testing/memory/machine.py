"""The machine of one simulated peer: its tasks, its link to the network, and the protocols that it serves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio

from p2pavg.net.transport import PeerId, StreamHandler

UNSENT_BYTES = 64 * 1024
"""Bytes that a machine with a limited link buffers before senders of more have to wait. Direct lanes ask real systems
to buffer as little, and drop what they have not sent when a round begins anew."""
SMALL_BYTES = 4 * 1024
"""A smaller frame does not wait for room. Real links carry many connections side by side, and a message does not wait
until another connection has sent all that it has."""


class Machine:
    """Shared by a peer's transport and the connections of the peer.

    Args:
        nursery: runs the peer's tasks.
        bandwidth: bytes/s that the peer sends, over all its connections together; ``None`` is without limit.
        download: bytes/s that it receives, likewise.
        relaying: bytes/s that it relays for others, in both directions together.
    """

    def __init__(
        self,
        peer_id: PeerId,
        nursery: trio.Nursery,
        bandwidth: float | None,
        download: float | None = None,
        relaying: float | None = None,
    ) -> None:
        self.peer_id = peer_id
        self.nursery = nursery
        self.bandwidth = bandwidth
        self.download = download
        self.relaying = relaying
        self.bytes_relayed = 0
        self.handlers: dict[str, StreamHandler] = {}
        self.has_left = False
        self._sending_until = 0.0
        self._sending = trio.Lock()  # waiting senders take turns, frame by frame
        self._receiving_until = 0.0
        self._relaying_until = 0.0
        self._served: set[trio.CancelScope] = set()

    def time_to_send(self, size: int) -> float:
        """Return the moment at which ``size`` more bytes have left this peer."""
        start = max(self._sending_until, trio.current_time())
        self._sending_until = start + (size / self.bandwidth if self.bandwidth is not None else 0.0)
        return self._sending_until

    def time_to_relay(self, size: int, arrival: float) -> float:
        """Return the moment at which ``size`` bytes of others that arrive at a time have left this peer again."""
        self.bytes_relayed += size
        start = max(self._relaying_until, arrival)
        self._relaying_until = start + (size / self.relaying if self.relaying is not None else 0.0)
        return self._relaying_until

    @asynccontextmanager
    async def room_to_send(self, size: int) -> AsyncIterator[None]:
        """Wait until a frame of ``size`` bytes may be sent, in the block."""
        if self.bandwidth is None or size < SMALL_BYTES:
            yield
            return
        async with self._sending:
            await trio.sleep_until(self._sending_until - UNSENT_BYTES / self.bandwidth)
            yield

    async def receive(self, size: int) -> None:
        """Wait until ``size`` bytes that are at this peer's link have come through it.

        Frames come through in the order in which they arrive, whichever connection they belong to.
        """
        if self.download is not None:
            start = max(self._receiving_until, trio.current_time())
            self._receiving_until = start + size / self.download
            await trio.sleep_until(self._receiving_until)

    def start_soon(self, work: Callable[[], object]) -> None:
        """Start a task of this peer, unless the peer has left."""
        if not self.has_left:
            self.nursery.start_soon(work)  # type: ignore[arg-type]

    @contextmanager
    def among_served(self, scope: trio.CancelScope) -> Iterator[None]:
        """Let :meth:`stop_serving` cancel ``scope`` for as long as the block runs."""
        self._served.add(scope)
        try:
            yield
        finally:
            self._served.discard(scope)

    def stop_serving(self) -> None:
        """Cancel every handler that runs now."""
        for scope in self._served:
            scope.cancel()
