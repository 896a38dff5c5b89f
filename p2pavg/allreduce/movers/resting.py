"""Streams of votes that rest between two rounds, for the next round of the same two members.

To open a stream takes a negotiation, and to close one a frame each way; in a round of a small vector that is a third of
all work. The side that opened a stream keeps it here. The other side goes on serving it:
:mod:`p2pavg.allreduce.movers.lobby`.
"""

from __future__ import annotations

from collections import OrderedDict

import trio

from p2pavg.base.limits import IDLE_STREAM_SECONDS
from p2pavg.net.transport import PeerId, Stream

MAX_RESTING = 64  # streams; beyond that, the one that has rested longest is closed


class RestingStreams:
    """The streams that this peer opened and whose last round has ended on both sides.

    An old one is closed when another is taken or kept. Without a further round, the serving side resets it.
    """

    def __init__(self) -> None:
        self._resting: OrderedDict[PeerId, tuple[Stream, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._resting)

    async def take(self, peer_id: PeerId) -> Stream | None:
        """Return the stream to a peer, which belongs to the caller from now on; ``None`` if none rests."""
        await self._close_old()
        stream, _ = self._resting.pop(peer_id, (None, 0.0))
        return stream

    async def keep(self, stream: Stream) -> None:
        """Take a stream over. One through a relay is closed: the next may be direct."""
        if stream.relayed:
            await stream.aclose()
            return
        before, _ = self._resting.pop(stream.remote, (None, 0.0))
        # Half of the other side's time, so that the other side still serves the stream when it is used.
        # The serving side keeps it twice as long: this side must never write to a stream that is closed there.
        self._resting[stream.remote] = (stream, trio.current_time() + IDLE_STREAM_SECONDS / 2)
        if before is None and len(self._resting) > MAX_RESTING:
            _, (before, _) = self._resting.popitem(last=False)
        if before is not None:
            await before.aclose()
        await self._close_old()

    async def _close_old(self) -> None:
        now = trio.current_time()
        for peer_id in [peer_id for peer_id, (_, until) in self._resting.items() if until <= now]:
            # Another task may have closed it while this one closed an earlier one.
            stream, _ = self._resting.pop(peer_id, (None, 0.0))
            if stream is not None:
                await stream.aclose()
