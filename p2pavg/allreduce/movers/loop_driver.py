"""The small parts of an attempt over direct lanes: on the event loop, without a thread.

Starting a thread and waking it takes longer than a few kilobytes do. So where a whole lane carries no more than that,
its parts are moved here: the same bytes in the same order as in :mod:`p2pavg.allreduce.movers.lane_driver`, which the
other end may use. What is ready goes in one write. Nothing here blocks, whatever the other end does.

Between processes on one machine this holds for far more bytes: no link carries them, so no turns are needed either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import trio

from p2pavg.allreduce.context import RunContext
from p2pavg.allreduce.inputs import IncomingPart
from p2pavg.allreduce.messages import FRAME_BYTES, LaneHeader, Step, part_frame
from p2pavg.allreduce.movers.lane_driver import COMING_BYTES, UNSENT_BYTES, DirectUse
from p2pavg.allreduce.movers.moves import (
    AwaitReady,
    LaneListener,
    Move,
    Moves,
    ReceiveIndex,
    ReceivePart,
    RunWork,
    SendPart,
    carry_out,
    sending,
)
from p2pavg.allreduce.turns import Turns
from p2pavg.allreduce.values import AttemptData
from p2pavg.group.milestones import Milestone
from p2pavg.group.shares import SharePart
from p2pavg.net.limits.rate import RateLimit
from p2pavg.net.transport import LENGTH_BYTES, DirectLane

SMALL_ELEMENTS = 4096
"""A lane that carries at most so many values needs no thread, and no turn: as fp32 they are half as long as a turn."""
SMALL_BYTES = 4 * SMALL_ELEMENTS
LOCAL_ELEMENTS = 262_144
"""The same between processes on one machine. As fp32 these are 1 MiB, half of it each way. To encrypt them takes less
than a millisecond."""
LOCAL_SUM = 2_097_152
"""The same for all members together, so that the average of a part takes about a millisecond. With a sparse codec or a
robust rule it would take longer."""


def is_small(
    lane: DirectLane, parts: Iterable[SharePart], members: int, context: RunContext, limit: RateLimit
) -> bool:
    """Return whether the event loop may move these parts of one lane.

    Args:
        members: of the attempt.
        limit: of the direction in which they go.
    """
    quick = not context.codec.is_sparse and context.aggregation.robust is None
    # Of a program's own event loop, torch may use more threads than this. They would compete with its training loop.
    local = lane.is_local and quick and torch.get_num_threads() == 1
    most = max(min(LOCAL_ELEMENTS, LOCAL_SUM // members), SMALL_ELEMENTS) if local else SMALL_ELEMENTS
    return limit.unlimited and sum(part.elements for part in parts) <= most


class HearsOnLoop(LaneListener, Protocol):
    """Listener of a lane that is used on the event loop."""

    async def until_ready(self, index: int) -> None:
        """Wait for what :meth:`~p2pavg.allreduce.values.AttemptData.is_ready` numbers so."""


class LoopUse(DirectUse):
    """One attempt's use of one direct lane by a task of the event loop. If the task is cancelled, drop the lane."""

    def __init__(
        self,
        lane: DirectLane,
        values: AttemptData,
        limit: RateLimit,
        hears: HearsOnLoop,
        turns: Turns | None = None,
        place: int = 0,
    ) -> None:
        super().__init__(lane, values, limit, hears, turns, place)
        self._on_loop = hears

    async def send_small(self, header: LaneHeader, steps: Sequence[Step]) -> None:
        """Send what :meth:`send_parts` sends.

        Raises:
            StreamBrokenError: the lane broke.
        """
        message = header.encode()
        self.lane.keep_unsent_below(UNSENT_BYTES)
        ready = bytearray(len(message).to_bytes(LENGTH_BYTES, "big") + message)
        sent: list[Milestone] = []

        async def write() -> None:
            """Send what is ready, in one write. A milestone is reached when its part has left."""
            nonlocal ready, sent
            data, ready = ready, bytearray()
            if data:
                await self.lane.send_from_loop(data)
            reached, sent = sent, []
            for milestone in reached:
                self._hears.reached(milestone)

        async def move_on(move: Move) -> Any:
            match move:
                case AwaitReady(index) if not self._values.is_ready(index):
                    await write()
                    await self._on_loop.until_ready(index)
                case SendPart(step, payload, trailer, milestone):
                    ready.extend(b"".join((part_frame(step.part.index), payload, trailer)))
                    self.moved += FRAME_BYTES + len(payload) + len(trailer)
                    if milestone is not None:
                        sent.append(milestone)
                case RunWork(work):
                    return work()
            return None

        await carry_out(sending(self._values, self.lane.remote, steps, header.begin), move_on)
        await write()
        self.finished = True

    async def receive_small(self, moves: Moves) -> None:
        """Carry out moves that receive parts.

        Raises:
            StreamBrokenError: the lane broke.
            RemoteProtocolError: the member sent what none sends.
        """
        await carry_out(moves, self._receive)

    async def _receive(self, move: Move) -> Any:
        match move:
            case ReceiveIndex():
                return int.from_bytes(await self.lane.receive_exactly(FRAME_BYTES), "big")
            case AwaitReady(index) if not self._values.is_ready(index):
                self._hears.owes(self.lane.remote, False)
                await self._on_loop.until_ready(index)
                self._hears.owes(self.lane.remote, True)
            case ReceivePart(coming, follow, ends):
                return await self._take(coming, follow, ends)
            case RunWork(work):
                return work()
        return None

    async def _take(self, coming: IncomingPart, follow: int, ends: bool) -> bytes:
        rest = coming.rest
        filled = 0
        while filled < len(rest):
            found = await self.lane.receive_some(min(len(rest) - filled, COMING_BYTES))
            rest[filled : filled + len(found)] = found
            filled += len(found)
            coming.add(len(found))
        trailer = await self.lane.receive_exactly(follow)
        self.moved += FRAME_BYTES + len(rest) + follow
        if ends:
            await self.lane.acknowledge_from_loop()
            self.finished = True  # not before: if this is cancelled, the sender waits for the acknowledgement
        if len(coming.payload) > SMALL_BYTES:
            await trio.lowlevel.checkpoint()  # other tasks have their turn
        return trailer
