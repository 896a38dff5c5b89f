"""Assignment of direct lanes to groups and attempts, and lanes that may be used again."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from p2pavg.allreduce.messages import MAX_HEADER_BYTES, Lane, LaneHeader
from p2pavg.allreduce.movers import lobby as lobby_module
from p2pavg.allreduce.movers.lobby import MAX_WAITING_LANES, Lanes, StreamRouter
from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError
from p2pavg.net.transport import DirectLane
from tests.unit.allreduce.laid import PairLane
from tests.unit.allreduce.streams import framed

GROUP, OTHER_GROUP = b"\x01" * 32, b"\x02" * 32
PARTS = [Lane.PARTS, Lane.PASSED_ON]
WATCHDOG_SECONDS = 120.0


def header(lane: Lane, attempt: int = 0, *, group_id: bytes = GROUP, reducer: int = 0) -> bytes:
    return framed(LaneHeader(group_id, lane, attempt, reducer).encode())


@contextmanager
def lane_with(said: bytes) -> Iterator[tuple[PairLane, socket.socket]]:
    """Yield a lane on which some bytes have arrived, and the sender's end of it."""
    near, far = socket.socketpair()
    with near, far:
        near.sendall(said)
        yield PairLane(far, "a member"), near


class Served:
    """A lane that the lobby serves."""

    def __init__(self, lane: PairLane, sender: socket.socket) -> None:
        self.lane = lane
        self.sender = sender
        self.ended = trio.Event()
        self.error: Exception | None = None

    @property
    def kept(self) -> bool:
        """True if the lane may be used again."""
        return self.ended.is_set() and self.error is None

    async def run(self, lobby: StreamRouter) -> None:
        try:
            await lobby.serve_lane(self.lane)
        except (RemoteProtocolError, StreamBrokenError) as error:
            self.error = error
        self.ended.set()


@asynccontextmanager
async def served(lobby: StreamRouter, said: bytes) -> AsyncIterator[Served]:
    with trio.fail_after(WATCHDOG_SECONDS), lane_with(said) as (lane, sender):
        async with trio.open_nursery() as nursery:
            found = Served(lane, sender)
            nursery.start_soon(found.run, lobby)
            yield found
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", PARTS)
async def test_a_lane_that_was_read_to_its_end_may_be_used_again(kind: Lane) -> None:
    lobby = StreamRouter()
    with lobby.expect(GROUP) as group:
        lanes = group.lanes(5)
        async with served(lobby, header(kind, 5, reducer=2)) as direct:
            lane = await lanes.receive()
            assert lane.stream is direct.lane
            assert lane.header == LaneHeader(GROUP, kind, 5, 2)
            await wait_all_tasks_blocked()
            assert not direct.ended.is_set()
            lane.clean = True
            lane.finished.set()
            await direct.ended.wait()
            assert direct.kept


async def test_a_lane_is_used_several_times() -> None:
    """The lobby reads nothing beyond a header: the following bytes belong to the task that takes the lane."""
    lobby = StreamRouter()
    with lobby.expect(GROUP) as group, lane_with(header(Lane.PASSED_ON, 1) + b"parts") as (direct, sender):
        for turn in range(3):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lobby.serve_lane, direct)
                lane = await group.lanes(1).receive()
                assert lane.header.lane is (Lane.PASSED_ON if turn == 0 else Lane.PARTS)
                came = bytearray(5)
                direct.receive_into(memoryview(came))
                assert came == b"parts"
                lane.clean = True
                lane.finished.set()
            sender.sendall(header(Lane.PARTS, 1) + b"parts")


async def test_a_lane_with_unread_data_is_not_kept() -> None:
    lobby = StreamRouter()
    with lobby.expect(GROUP) as group:
        async with served(lobby, header(Lane.PARTS)) as direct:
            lane = await group.lanes(0).receive()
            lane.finished.set()
            await direct.ended.wait()
            assert isinstance(direct.error, StreamBrokenError)


async def waits(lanes: Lanes) -> None:
    """Wait until a lane has come that no task has taken."""
    while not lanes._waiting:
        await trio.sleep(0.001)


ENDS: dict[str, Callable[[StreamRouter], object]] = {
    "the group": lambda lobby: lobby.groups[GROUP].close(),
    "the group, with votes to say": lambda lobby: lobby.groups[GROUP].end(),
    "the attempt": lambda lobby: lobby.groups[GROUP].lanes(6),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
async def test_a_lane_whose_attempt_ends_before_it_was_read_is_not_kept(
    end: Callable[[StreamRouter], object],
) -> None:
    """The sender has put parts on the lane, and the next use would read them as a header."""
    lobby = StreamRouter()
    group = lobby.expect(GROUP)
    lanes = group.lanes(5)
    async with served(lobby, header(Lane.PARTS, 5)) as direct:
        await waits(lanes)
        end(lobby)
        await direct.ended.wait()
        assert isinstance(direct.error, StreamBrokenError)
        assert lanes._waiting == []


@pytest.mark.parametrize("said", [header(Lane.PARTS, 5, group_id=OTHER_GROUP), header(Lane.PARTS, 4)])
async def test_a_lane_of_another_group_or_of_an_attempt_that_is_over_is_refused(said: bytes) -> None:
    """Its member may not have heard of the newer attempt, so that it breaks no protocol."""
    lobby = StreamRouter()
    with lobby.expect(GROUP) as group:
        group.lanes(5)
        async with served(lobby, said) as direct:
            await direct.ended.wait()
            assert isinstance(direct.error, StreamBrokenError)
            assert group._attempts.keys() == {5}


@pytest.mark.parametrize("holder", ["a member", "another peer", None])
async def test_a_lane_with_a_ticket_is_taken_only_from_the_peer_to_which_it_was_given(
    holder: str | None,
) -> None:
    lobby, read = StreamRouter(), []

    async def take(lane: DirectLane) -> bool:
        read.append(await lane.receive_exactly(2))
        return True

    if holder is not None:
        lobby.tickets[OTHER_GROUP] = (holder, take)
    assert lobby.wants_lane("a member") == (holder == "a member")
    async with served(lobby, header(Lane.STATE, group_id=OTHER_GROUP) + b"ok") as direct:
        await direct.ended.wait()
        assert direct.kept == (holder == "a member")
        assert read == ([b"ok"] if holder == "a member" else [])


async def test_a_lane_with_a_ticket_that_was_not_read_to_its_end_is_not_kept() -> None:
    lobby = StreamRouter()

    async def take(_lane: DirectLane) -> bool:
        await trio.lowlevel.checkpoint()
        return False

    lobby.tickets[OTHER_GROUP] = ("a member", take)
    async with served(lobby, header(Lane.STATE, group_id=OTHER_GROUP)) as direct:
        await direct.ended.wait()
        assert not direct.kept


@pytest.mark.parametrize("kind", sorted(set(Lane) - {*PARTS, Lane.STATE}))
async def test_a_direct_lane_carries_parts_and_nothing_else(kind: Lane) -> None:
    lobby = StreamRouter()
    with lobby.expect(GROUP) as group:
        async with served(lobby, header(kind)) as direct:
            await direct.ended.wait()
            assert isinstance(direct.error, RemoteProtocolError)
            assert group.controls._waiting == []


@pytest.mark.parametrize(
    "said",
    [framed(b"hello"), framed(b"x" * (MAX_HEADER_BYTES + 1)), b"\xff\xff\xff\xff"],
    ids=["words", "too long", "much too long"],
)
async def test_a_malformed_header_breaks_the_protocol(said: bytes) -> None:
    lobby = StreamRouter()
    with lobby.expect(GROUP):
        async with served(lobby, said) as direct:
            await direct.ended.wait()
            assert isinstance(direct.error, RemoteProtocolError)


@pytest.mark.parametrize("length", [2, 20])
async def test_a_header_that_ends_half_way_is_a_broken_lane(length: int) -> None:
    async with served(StreamRouter(), header(Lane.PARTS)[:length]) as direct:
        direct.sender.shutdown(socket.SHUT_WR)
        await direct.ended.wait()
        assert isinstance(direct.error, StreamBrokenError)


@pytest.mark.parametrize("length", [0, 2, 20])
async def test_a_header_that_never_comes_is_not_waited_for(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lobby_module, "REPLY_SECONDS", 0.05)
    async with served(StreamRouter(), header(Lane.PARTS)[:length]) as direct:
        await direct.ended.wait()
        assert isinstance(direct.error, StreamBrokenError)
        assert "sent no header within" in str(direct.error)
        assert direct.sender.recv(1) == b"", "the lane was dropped"


async def test_a_cancellation_during_a_header_drops_the_lane() -> None:
    with trio.fail_after(WATCHDOG_SECONDS), lane_with(header(Lane.PARTS)[:20]) as (direct, sender):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(StreamRouter().serve_lane, direct)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert sender.recv(1) == b""


async def test_direct_lanes_count_as_any_other() -> None:
    lobby = StreamRouter()
    with lobby.expect(GROUP) as group:
        group.lanes(0)
        group._lanes_of["a member"] = MAX_WAITING_LANES
        async with served(lobby, header(Lane.PARTS, 5)) as direct:
            await direct.ended.wait()
            assert isinstance(direct.error, RemoteProtocolError)
