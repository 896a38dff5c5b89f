"""Parts that the event loop moves over direct lanes itself, without a thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import trio
from trio.testing import wait_all_tasks_blocked

from p2pavg.allreduce.carry import IncomingPart
from p2pavg.allreduce.context import RunContext
from p2pavg.allreduce.movers.lane_driver import LOCAL_ELEMENTS, LOCAL_SUM, SMALL_ELEMENTS, DirectUse, is_small
from p2pavg.allreduce.movers.moves import ReceivePart
from p2pavg.group.aggregation import Aggregation, Median
from p2pavg.group.shares import SharePart
from p2pavg.net.limits.rate import RateLimit
from p2pavg_compression import resolve_codec
from tests.unit.allreduce.laid import Takes


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The event loops of this library have one thread of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Context:
    """The parts of a run's context that decide."""

    def __init__(self, codec: str = "fp32", aggregation: Aggregation | None = None) -> None:
        self.codec = resolve_codec(codec)
        self.aggregation = aggregation or Aggregation()


def moves(
    lane: Takes,
    elements: int,
    context: Context | None = None,
    limit: RateLimit | None = None,
    members: int = 4,
) -> bool:
    parts = [SharePart(0, 0, elements // 2), SharePart(0, 0, elements - elements // 2)]
    chosen = cast(RunContext, context or Context())
    return is_small(lane, parts, members, chosen, RateLimit(None) if limit is None else limit)


class TestIsSmall:
    def test_a_lane_to_another_machine_carries_a_few_kilobytes(self) -> None:
        lane = Takes("b")
        assert moves(lane, SMALL_ELEMENTS)
        assert not moves(lane, SMALL_ELEMENTS + 1)

    def test_a_lane_to_the_same_machine_carries_more(self) -> None:
        lane = Takes("b")
        lane.is_local = True
        assert moves(lane, LOCAL_ELEMENTS)
        assert not moves(lane, LOCAL_ELEMENTS + 1)

    def test_in_a_large_group_it_carries_less_so_that_no_sum_takes_long(self) -> None:
        lane = Takes("b")
        lane.is_local = True
        assert moves(lane, LOCAL_SUM // 64, members=64)
        assert not moves(lane, LOCAL_SUM // 64 + 1, members=64)

    def test_an_event_loop_with_several_threads_of_torch_leaves_it_to_threads_with_one(self) -> None:
        lane = Takes("b")
        lane.is_local = True
        torch.set_num_threads(2)
        assert moves(lane, SMALL_ELEMENTS)
        assert not moves(lane, LOCAL_ELEMENTS)

    @pytest.mark.parametrize("context", [Context("topk"), Context(aggregation=Aggregation(robust=Median()))])
    def test_what_takes_long_to_combine_does_not_occupy_the_event_loop(self, context: Context) -> None:
        lane = Takes("b")
        lane.is_local = True
        assert moves(lane, SMALL_ELEMENTS, context)
        assert not moves(lane, SMALL_ELEMENTS + 1, context)

    def test_a_limited_rate_needs_a_thread_that_may_wait(self) -> None:
        assert not moves(Takes("b"), 1, limit=RateLimit(1.0))


class Halfway(Takes):
    """A lane on which half of a part comes."""

    def __init__(self, data: bytes) -> None:
        super().__init__("b")
        self._data = data

    async def receive_some(self, count: int) -> bytes:
        await trio.lowlevel.checkpoint()
        if not self._data:
            await trio.sleep_forever()
        found, self._data = self._data[:count], self._data[count:]
        return found


async def test_an_attempt_that_ends_in_the_middle_of_a_part_keeps_what_has_come() -> None:
    """The next attempt goes on there, to the byte."""
    payload, half = bytearray(300_000), bytes(range(200)) * 750
    coming = IncomingPart(0, memoryview(payload))
    use = DirectUse(Halfway(half), cast(Any, None), RateLimit(None), cast(Any, None))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(use.move, ReceivePart(coming, follow=0, ends=False))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert coming.filled == len(half)
    assert payload[: len(half)] == half
