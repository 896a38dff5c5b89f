"""Streams of votes between two rounds, on the side that opened them."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from p2pavg.allreduce.movers.lobby import MAX_RESTING, RestingStreams
from p2pavg.base.limits import IDLE_STREAM_SECONDS
from tests.unit.allreduce.streams import Silent


class TestRestingStreams:
    async def test_a_stream_that_was_kept_is_taken_once(self) -> None:
        resting, stream = RestingStreams(), Silent(b"", "a peer")
        await resting.keep(stream)
        assert await resting.take("another peer") is None
        assert await resting.take("a peer") is stream
        assert await resting.take("a peer") is None
        assert not stream.closed

    async def test_a_stream_is_closed_long_before_the_other_side_closes_it(
        self, autojump_clock: MockClock
    ) -> None:
        resting, old, new = RestingStreams(), Silent(b"", "a peer"), Silent(b"", "another peer")
        await resting.keep(old)
        await trio.sleep(IDLE_STREAM_SECONDS / 2)
        await resting.keep(new)
        assert old.closed
        assert not new.closed
        assert await resting.take("a peer") is None
        assert await resting.take("another peer") is new

    async def test_only_the_newest_stream_to_a_peer_is_kept(self) -> None:
        resting, first, second = RestingStreams(), Silent(b"", "a peer"), Silent(b"", "a peer")
        await resting.keep(first)
        await resting.keep(second)
        assert first.closed
        assert len(resting) == 1
        assert await resting.take("a peer") is second

    async def test_of_too_many_the_one_that_has_rested_longest_is_closed(self) -> None:
        resting = RestingStreams()
        streams = [Silent(b"", f"peer {number}") for number in range(MAX_RESTING + 1)]
        for stream in streams:
            await resting.keep(stream)
        assert [stream.closed for stream in streams] == [True] + [False] * MAX_RESTING
        assert len(resting) == MAX_RESTING

    async def test_a_relayed_stream_is_closed(self) -> None:
        resting, stream = RestingStreams(), Silent(b"", "a peer")
        stream.relayed = True
        await resting.keep(stream)
        assert stream.closed
        assert len(resting) == 0
