"""The small parts of an attempt over direct lanes: on the event loop, without a thread.

Starting a thread and waking it takes longer than a few kilobytes do. So where a whole lane carries no more than that,
its parts are moved here: the same bytes in the same order as in :mod:`p2pavg.allreduce.movers.lane_driver`, which the
other end may use. What is ready goes in one write. Nothing here blocks, whatever the other end does.

Between processes on one machine this holds for far more bytes: no link carries them, so no turns are needed either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import trio

from p2pavg.allreduce.context import RunContext
from p2pavg.allreduce.errors import BadContributionError
from p2pavg.allreduce.inputs import IncomingPart
from p2pavg.allreduce.messages import FRAME_BYTES, Lane, LaneHeader, part_frame
from p2pavg.allreduce.movers.lane_driver import COMING_BYTES, UNSENT_BYTES, DirectUse, LaneListener
from p2pavg.allreduce.movers.reuse import START, ResumeMark
from p2pavg.allreduce.part_schedule import Step
from p2pavg.allreduce.proofs import trailer_bytes
from p2pavg.allreduce.turns import Turns
from p2pavg.allreduce.values import AttemptData, check_index
from p2pavg.group.milestones import Milestone
from p2pavg.group.shares import SharePart
from p2pavg.net.framing import LENGTH_BYTES
from p2pavg.net.limits.rate import RateLimit
from p2pavg.net.transport import Buffer, DirectLane

SMALL_ELEMENTS = 4096
"""A lane that carries at most so many values needs no thread, and no turn: as fp32 they are half as long as a turn."""
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
        values, message = self._values, header.encode()
        self.lane.keep_unsent_below(UNSENT_BYTES)
        ready, sent = bytearray(len(message).to_bytes(LENGTH_BYTES, "big") + message), 0
        for position, step in enumerate(steps):
            if step.after is not None and not values.is_ready(step.after):
                await self._write(ready, steps[sent:position])
                ready, sent = bytearray(), position
                await self._on_loop.until_ready(step.after)
            ready += self._encoded(step, header.begin)
        await self._write(ready, steps[sent:])
        self.finished = True

    def _encoded(self, step: Step, begin: ResumeMark) -> bytes:
        """Return a part with its frame, and the trailer if it is the last one of its kind."""
        values, remote = self._values, self.lane.remote
        payload: Buffer
        if step.kind is Lane.CONTRIBUTIONS:
            own = (
                values.contribution(remote, step.part)
                if step.after is None
                else values.sum_of_site(step.after)
            )
            payload = begin.of(step.part, own)
        else:
            payload = values.encoded(step.reducer, step.part.index)
        trailer = b""
        if step.last:
            trailer = values.trailer(step.kind, remote if step.kind is Lane.CONTRIBUTIONS else step.reducer)
        self.moved += FRAME_BYTES + len(payload) + len(trailer)
        return b"".join((part_frame(step.part.index), payload, trailer))

    async def _write(self, data: bytearray, steps: Sequence[Step]) -> None:
        if data:
            await self.lane.send_from_loop(data)
        for step in steps:
            contributes = step.kind is Lane.CONTRIBUTIONS
            self._hears.reached(Milestone.CONTRIBUTION_SENT if contributes else Milestone.AVERAGE_SENT)

    async def receive_small(self, steps: Sequence[Step], begin: ResumeMark = START) -> None:
        """Receive what :meth:`receive_parts` receives.

        Raises:
            StreamBrokenError: the lane broke.
            RemoteProtocolError: the member sent what none sends.
        """
        for step in steps:
            check_index(int.from_bytes(await self.lane.receive_exactly(FRAME_BYTES), "big"), step.part)
            if step.kind is Lane.CONTRIBUTIONS:
                await self._take_contribution(step, begin)
            else:
                payload, trailer = await self._take(step, self._memory_of(step.part))
                self._values.receive_average(step.reducer, step.part, payload, trailer)
            self._hears.progressed()
            if step.part.elements > SMALL_ELEMENTS:
                await trio.lowlevel.checkpoint()  # other tasks have their turn

    async def _take_contribution(self, step: Step, begin: ResumeMark) -> None:
        remote, values = self.lane.remote, self._values
        if step.after is not None and not values.is_ready(step.after):
            self._hears.owes(remote, False)
            await self._on_loop.until_ready(step.after)
            self._hears.owes(remote, True)
        comes_again = values.has(remote, step.kind, step.part.index)
        payload, trailer = await self._take(step, values.carry.receive(remote, step.part, begin))
        complete = not comes_again and values.contributed(remote, step.part.index, payload, trailer)
        if step.last:
            self._hears.owes(remote, False)
        if complete:
            try:
                values.average(step.part.index)
            except BadContributionError as error:
                self._hears.blame(error.peer_id, error)

    async def _take(self, step: Step, coming: IncomingPart) -> tuple[Buffer, bytes]:
        """Return a part, and the bytes that follow it if it is the last one of its kind."""
        rest = coming.rest
        after = trailer_bytes(self._values.proofs, step.kind) if step.last else 0
        filled = 0
        while filled < len(rest):
            found = await self.lane.receive_some(min(len(rest) - filled, COMING_BYTES))
            rest[filled : filled + len(found)] = found
            filled += len(found)
            coming.add(len(found))
        trailer = await self.lane.receive_exactly(after)
        self.moved += FRAME_BYTES + len(rest) + after
        if step.ends:
            await self.lane.acknowledge_from_loop()
            self.finished = True  # not before: if this is cancelled, the sender waits for the acknowledgement
        return coming.payload, trailer
