"""The acknowledgements of lanes: they cover exactly the bytes that the receiver has taken."""

import pytest
import trio
import trio.testing

from p2pavg.base.errors import StreamBrokenError
from p2pavg.net.lanes.tls_lane import TlsLane
from p2pavg.net.transport import DirectLane
from tests.integration.hosts import eventually, watched
from tests.integration.lanes.company import Serving, in_thread, keeper, lane_to, pair, post, read_message


class Receives:
    """A handler of lanes that reads a message, and acknowledges it when the test permits."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.lanes: list[TlsLane] = []
        self.read = trio.Semaphore(0)
        """A semaphore that is released for each message read."""
        self.acknowledge = trio.Semaphore(1000 if at_once else 0)
        self.word = b"\x06"

    async def __call__(self, lane: DirectLane) -> None:
        assert isinstance(lane, TlsLane)
        self.lanes.append(lane)
        await in_thread(read_message, lane)
        self.read.release()
        await self.acknowledge.acquire()
        if self.word == b"\x06":
            await in_thread(lane.acknowledge)
        else:
            await in_thread(lane.send, self.word)


async def cancelled_before_the_answer(lane: TlsLane) -> None:
    """Cancel a sender that waits for the acknowledgement, as the end of an attempt does."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lane.acknowledged)
        await eventually(lambda: lane.owed)
        await trio.testing.wait_all_tasks_blocked(0.01)
        nursery.cancel_scope.cancel()


@watched
async def test_no_acknowledgement_before_the_receiver_sends_it() -> None:
    async with pair() as (here, there):
        inbox = Receives(at_once=False)
        there.serve_lanes(Serving(inbox))
        lane = await lane_to(here, there)
        await post(lane, b"hello")
        done: list[bool] = []

        async def wait() -> None:
            await lane.acknowledged()
            done.append(True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await inbox.read.acquire()
            await eventually(lambda: lane.unsent() == 0)
            assert done == []
            inbox.acknowledge.release()
        assert done == [True]


@watched
async def test_an_early_acknowledgement_counts() -> None:
    """The receiver's acknowledgement may arrive before the last write has returned."""
    async with pair() as (here, there):
        inbox = Receives()
        there.serve_lanes(Serving(inbox))
        lane = await lane_to(here, there)
        for _ in range(3):
            await post(lane, b"hello")
            await eventually(lane.is_readable)
            await trio.testing.wait_all_tasks_blocked(0.01)
            await lane.acknowledged()


@pytest.mark.parametrize("waited", [True, False])
@watched
async def test_an_unacknowledged_lane_is_not_reused(waited: bool) -> None:
    """The next user would take the acknowledgement for its own, also if the last user was cancelled."""
    async with pair() as (here, there):
        inbox = Receives(at_once=False)
        there.serve_lanes(Serving(inbox))
        lane = await lane_to(here, there)
        await post(lane, b"first")
        if waited:
            await cancelled_before_the_answer(lane)
        here.keep_lane(lane)
        other = await lane_to(here, there)
        assert other is not lane
        assert not lane.aborted
        await inbox.read.acquire()
        inbox.acknowledge.release()
        await eventually(lambda: not lane.owed)
        assert await lane_to(here, there) is lane


@watched
async def test_a_kept_lane_is_reused_after_its_late_acknowledgement() -> None:
    """The acknowledgement of the last use does not acknowledge the next use."""
    async with pair() as (here, there):
        inbox = Receives(at_once=False)
        there.serve_lanes(Serving(inbox))
        lane = await lane_to(here, there)
        await post(lane, b"first")
        await cancelled_before_the_answer(lane)
        here.keep_lane(lane)
        inbox.acknowledge.release()
        await eventually(lambda: not lane.owed)
        assert await lane_to(here, there) is lane
        await post(lane, b"second")
        await inbox.read.acquire()
        await inbox.read.acquire()
        await cancelled_before_the_answer(lane)
        assert lane.owed, "the first acknowledgement was for the first use"
        inbox.acknowledge.release()
        await eventually(lambda: not lane.owed)
        assert not lane.aborted


@pytest.mark.parametrize("when", ["while it is waited for", "before"])
@watched
async def test_a_receiver_that_drops_the_lane_at_the_end_has_not_acknowledged(when: str) -> None:
    """Bytes that the operating system has taken are lost with the connection."""
    async with pair() as (here, there):
        inbox = Receives(at_once=False)
        there.serve_lanes(Serving(inbox))
        lane = await lane_to(here, there)
        await post(lane, b"hello")
        await inbox.read.acquire()
        async with trio.open_nursery() as nursery:
            if when == "before":
                inbox.lanes[0].abort()
                await eventually(lambda: lane.aborted)
            else:

                async def drop() -> None:
                    await eventually(lambda: lane.owed)
                    await trio.testing.wait_all_tasks_blocked(0.01)
                    inbox.lanes[0].abort()

                nursery.start_soon(drop)
            with pytest.raises(StreamBrokenError, match="unacknowledged") as found:
                await lane.acknowledged()
            assert there.peer_id in str(found.value)
        await eventually(lambda: lane not in keeper(here).lanes)
        assert lane.aborted


@watched
async def test_a_lane_that_this_process_drops_is_not_acknowledged() -> None:
    async with pair() as (here, there):
        inbox = Receives(at_once=False)
        there.serve_lanes(Serving(inbox))
        lane = await lane_to(here, there)
        await post(lane, b"hello")
        async with trio.open_nursery() as nursery:

            async def drop() -> None:
                await eventually(lambda: lane.owed)
                await in_thread(lane.abort)

            nursery.start_soon(drop)
            with pytest.raises(StreamBrokenError):
                await lane.acknowledged()
        assert await lane_to(here, there) is not lane


@pytest.mark.parametrize("word", [b"\x15", b"\x00", b"a long story" * 1000])
@watched
async def test_a_byte_other_than_the_acknowledgement_ends_the_lane(word: bytes) -> None:
    async with pair() as (here, there):
        inbox = Receives()
        inbox.word = word
        there.serve_lanes(Serving(inbox))
        lane = await lane_to(here, there)
        await post(lane, b"hello")
        with pytest.raises(StreamBrokenError):
            await lane.acknowledged()
        await eventually(lambda: lane.aborted)
        here.keep_lane(lane)
        await eventually(lambda: not keeper(here).lanes)
        inbox.word = b"\x06"
        again = await lane_to(here, there)
        assert again is not lane
        await post(again, b"hello")
        await again.acknowledged()


@watched
async def test_a_lane_with_a_surplus_acknowledgement_is_not_reused() -> None:
    """A second acknowledgement would acknowledge bytes that are not sent yet."""
    async with pair() as (here, there):
        inbox = Receives()
        there.serve_lanes(Serving(inbox))
        lane = await lane_to(here, there)
        await post(lane, b"hello")
        await lane.acknowledged()
        here.keep_lane(lane)
        await in_thread(inbox.lanes[0].acknowledge)
        await eventually(lane.is_readable)
        assert await lane_to(here, there) is not lane
        assert lane.aborted
