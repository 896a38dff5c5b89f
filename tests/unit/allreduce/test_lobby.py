"""Assignment of inbound streams to groups and attempts, and answers about ended rounds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from p2pavg.allreduce.messages import MAX_HEADER_BYTES, Lane, LaneHeader
from p2pavg.allreduce.movers.lobby import (
    MAX_REMEMBERED,
    MAX_RESTING_INBOUND,
    MAX_WAITING_LANES,
    HowItEnded,
    InboundLane,
    Lanes,
    StreamRouter,
)
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import IDLE_STREAM_SECONDS, REPLY_SECONDS
from p2pavg.consensus.votes import MemberPing, ResultCommit, Unknown, Vote, decode_vote
from p2pavg.net.transport import Buffer, DirectLane, Stream, receive_message
from tests.unit.allreduce.streams import SaidBefore, Silent, framed

GROUP, OTHER_GROUP = b"\x01" * 32, b"\x02" * 32
MOST_LANES = 128
COMMIT = ResultCommit(3, frozenset({0, 1}))


def opened(
    lane: Lane, attempt: int = 0, *, group_id: bytes = GROUP, remote: str = "a member", reducer: int = 0
) -> Stream:
    """Return an inbound stream on which a peer has sent its header."""
    return Silent(framed(LaneHeader(group_id, lane, attempt, reducer).encode()), remote)


class Inbound:
    """Streams that are served, each in its own task, until the lobby releases them."""

    def __init__(self, lobby: StreamRouter, nursery: trio.Nursery) -> None:
        self.lobby = lobby
        self.refused: list[Stream] = []
        """Streams that broke the protocol."""
        self._nursery = nursery
        self._open: list[Stream] = []

    async def come(self, *streams: Stream) -> None:
        """Serve the streams, and return when each is assigned or closed."""
        for stream in streams:
            self._open.append(stream)
            self._nursery.start_soon(self._serve, stream)
            await wait_all_tasks_blocked()

    async def _serve(self, stream: Stream) -> None:
        try:
            await self.lobby.serve(stream)
        except RemoteProtocolError:
            self.refused.append(stream)
        self._open.remove(stream)

    async def kept(self) -> list[Stream]:
        """Return the streams that are still open."""
        await wait_all_tasks_blocked()
        return list(self._open)


@asynccontextmanager
async def inbound(lobby: StreamRouter) -> AsyncIterator[Inbound]:
    async with trio.open_nursery() as nursery:
        yield Inbound(lobby, nursery)
        nursery.cancel_scope.cancel()


async def taken(lanes: Lanes) -> list[InboundLane]:
    """Return all lanes that have come, in order."""
    found: list[InboundLane] = []

    async def take() -> None:
        while True:
            found.append(await lanes.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return found


async def streams_of(lanes: Lanes) -> list[Stream | DirectLane]:
    return [lane.stream for lane in await taken(lanes)]


class TestLanes:
    async def test_a_stream_of_an_unexpected_group_is_closed_at_once(self) -> None:
        lobby = StreamRouter()
        with lobby.expect(GROUP) as group:
            async with inbound(lobby) as streams:
                await streams.come(
                    opened(Lane.CONTRIBUTIONS, group_id=OTHER_GROUP),
                    opened(Lane.CONTROL, group_id=OTHER_GROUP),
                )
                assert await streams.kept() == streams.refused == []
            assert await streams_of(group.lanes(0)) == await streams_of(group.controls) == []

    async def test_a_lane_is_kept_for_as_long_as_it_is_used(self) -> None:
        lobby = StreamRouter()
        with lobby.expect(GROUP) as group:
            async with inbound(lobby) as streams:
                stream = opened(Lane.PASSED_ON, 0, reducer=3)
                await streams.come(stream)
                [lane] = await taken(group.lanes(0))
                assert lane.stream is stream
                assert lane.header == LaneHeader(GROUP, Lane.PASSED_ON, 0, 3)
                assert await streams.kept() == [stream]
                lane.finished.set()
                assert await streams.kept() == []

    async def test_a_lane_waits_for_its_attempt(self) -> None:
        """The first lane of an attempt may arrive before the member hears of the attempt."""
        lobby = StreamRouter()
        with lobby.expect(GROUP) as group:
            async with inbound(lobby) as streams:
                early, now = opened(Lane.CONTRIBUTIONS, 5), opened(Lane.CONTRIBUTIONS, 0)
                await streams.come(early, now)
                assert await streams_of(group.lanes(0)) == [now]
                assert await streams.kept() == [early, now]
                assert await streams_of(group.lanes(5)) == [early]
                assert early in await streams.kept()

    async def test_lanes_of_an_older_attempt_are_refused(self) -> None:
        lobby = StreamRouter()
        with lobby.expect(GROUP) as group:
            group.lanes(0)
            lanes = group.lanes(5)
            async with inbound(lobby) as streams:
                await streams.come(opened(Lane.CONTRIBUTIONS, 0), opened(Lane.AVERAGES, 4))
                assert await streams.kept() == []
                assert streams.refused == [], "its member may not have heard of the newer one"
            assert await streams_of(lanes) == []

    async def test_lanes_of_an_older_attempt_are_closed_in_use_or_waiting(self) -> None:
        lobby = StreamRouter()
        with lobby.expect(GROUP) as group:
            async with inbound(lobby) as streams:
                used, waiting = opened(Lane.AVERAGES, 0), opened(Lane.AVERAGES, 3)
                newest, next_one = opened(Lane.AVERAGES, 5), opened(Lane.AVERAGES, 8)
                await streams.come(used, waiting, newest, next_one)
                assert await streams_of(group.lanes(0)) == [used]
                lanes = group.lanes(5)
                assert await streams.kept() == [newest, next_one]
                assert await streams_of(lanes) == [newest]

    @pytest.mark.parametrize("clean", [True, False])
    async def test_a_lane_of_an_older_attempt_that_was_taken_is_let_go_by_its_task(self, clean: bool) -> None:
        """If it was read to its end, its sender may use it for the next attempt."""
        lobby, outcome = StreamRouter(), list[bool]()
        with lobby.expect(GROUP) as group:
            lanes = group.lanes(0)

            async def serve() -> None:
                header = LaneHeader(GROUP, Lane.PARTS, 0)
                outcome.append(await group.arrived(opened(Lane.PARTS, 0), header))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve)
                [lane] = await taken(lanes)
                lane.taken = True
                group.lanes(5)
                await wait_all_tasks_blocked()
                assert outcome == []
                lane.clean = clean
                lane.finished.set()
            assert outcome == [clean]

    async def test_a_control_stream_belongs_to_no_attempt(self) -> None:
        lobby = StreamRouter()
        with lobby.expect(GROUP) as group:
            async with inbound(lobby) as streams:
                before, after = opened(Lane.CONTROL), opened(Lane.CONTROL)
                await streams.come(before)
                assert await streams_of(group.lanes(5)) == []
                await streams.come(after)
                assert await streams_of(group.controls) == [before, after]
                assert await streams.kept() == [before, after]

    async def test_each_arriving_stream_is_reported(self) -> None:
        lobby, came = StreamRouter(), []
        listener = SimpleNamespace(exchange_begun=lambda group_id, peer_id: came.append((group_id, peer_id)))
        with lobby.expect(GROUP, listener):
            async with inbound(lobby) as streams:
                await streams.come(
                    opened(Lane.CONTROL, remote="one"), opened(Lane.AVERAGES, 5, remote="other")
                )
                await streams.come(opened(Lane.ASK, remote="one that asks"))
        assert came == [(GROUP, "one"), (GROUP, "other")]


class TestClosing:
    async def test_closing_a_group_closes_its_streams(self) -> None:
        lobby = StreamRouter()
        group = lobby.expect(GROUP)
        async with inbound(lobby) as streams:
            every = [
                opened(Lane.CONTROL),
                opened(Lane.CONTRIBUTIONS, 0),
                opened(Lane.AVERAGES, 5),
                opened(Lane.AVERAGES, 9),
            ]
            await streams.come(*every)
            assert await streams_of(group.lanes(5)) == [every[2]]
            assert await streams_of(group.controls) == [every[0]]
            group.close()
            assert await streams.kept() == []

    async def test_a_group_that_is_expected_again_is_not_closed_by_the_first(self) -> None:
        lobby = StreamRouter()
        first = lobby.expect(GROUP)
        second = lobby.expect(GROUP)
        first.close()
        async with inbound(lobby) as streams:
            stream = opened(Lane.CONTROL)
            await streams.come(stream)
            assert await streams_of(second.controls) == [stream]
        second.close()
        assert lobby.groups == {}


class TestBounds:
    async def ahead(self, streams: Inbound, remote: str = "a member") -> list[Stream]:
        """Open as many lanes as a member may open ahead of time."""
        lanes = [opened(Lane.CONTRIBUTIONS, 5, remote=remote) for _ in range(MAX_WAITING_LANES)]
        await streams.come(*lanes)
        return lanes

    async def test_the_waiting_lanes_of_one_member_are_bounded(self) -> None:
        lobby = StreamRouter()
        with lobby.expect(GROUP) as group:
            group.lanes(0)
            async with inbound(lobby) as streams:
                waiting = await self.ahead(streams)
                attempts = len(group._attempts)
                one_more, later = opened(Lane.CONTRIBUTIONS, 5), opened(Lane.AVERAGES, 6)
                await streams.come(one_more, later)
                assert streams.refused == [one_more, later]
                assert len(group._attempts) == attempts, "a refused lane leaves nothing behind"
                others = await self.ahead(streams, "another")
                assert streams.refused == [one_more, later]
                assert await streams.kept() == waiting + others

    async def test_lanes_that_were_let_go_do_not_count(self) -> None:
        lobby = StreamRouter()
        with lobby.expect(GROUP) as group:
            async with inbound(lobby) as streams:
                for attempt in range(0, 60, 5):
                    waiting = [opened(Lane.AVERAGES, attempt + 1) for _ in range(MAX_WAITING_LANES)]
                    await streams.come(*waiting)
                    assert streams.refused == []
                    for lane in await taken(group.lanes(attempt + 1)):
                        lane.finished.set()
                    assert await streams.kept() == []
                    await streams.come(*(opened(Lane.AVERAGES, attempt + 3) for _ in waiting))
                    group.lanes(attempt + 4)
                    assert await streams.kept() == []
                assert streams.refused == []

    async def test_lanes_of_the_attempt_that_runs_do_not_wait(self) -> None:
        """A member passes on the shares of lost members, each on its own lane."""
        lobby = StreamRouter()
        with lobby.expect(GROUP) as group:
            group.lanes(5)
            async with inbound(lobby) as streams:
                lanes = await self.ahead(streams)
                more = [
                    opened(Lane.PASSED_ON, 5, reducer=reducer) for reducer in range(2 * MAX_WAITING_LANES)
                ]
                await streams.come(*more)
                assert streams.refused == []
                assert await streams_of(group.lanes(5)) == lanes + more

    @pytest.mark.parametrize("lane", [Lane.AVERAGES, Lane.CONTROL])
    async def test_the_open_lanes_of_one_member_are_bounded(self, lane: Lane) -> None:
        lobby = StreamRouter()
        with lobby.expect(GROUP) as group:
            group.lanes(5)
            async with inbound(lobby) as streams:
                await streams.come(*(opened(lane, 5) for _ in range(MOST_LANES)))
                assert streams.refused == []
                one_more = opened(lane, 5)
                await streams.come(one_more)
                assert streams.refused == [one_more]
                assert len(await streams.kept()) == MOST_LANES


class TestHeaders:
    async def test_a_stream_without_a_header_is_closed(self, autojump_clock: MockClock) -> None:
        began = trio.current_time()
        await StreamRouter().serve(Silent(b""))
        await StreamRouter().serve(Silent(framed(LaneHeader(GROUP, Lane.CONTROL).encode())[:20]))
        assert trio.current_time() - began == pytest.approx(2 * REPLY_SECONDS)

    async def test_a_stream_that_closes_at_once_is_closed(self) -> None:
        await StreamRouter().serve(SaidBefore(b""))

    @pytest.mark.parametrize(
        "said",
        [
            framed(b"hello"),
            framed(LaneHeader(GROUP, Lane.CONTROL).encode() + b"\0"),
            framed(LaneHeader(GROUP[1:], Lane.CONTROL).encode()),
            framed(b"x" * (MAX_HEADER_BYTES + 1)),
            framed(b""),
        ],
        ids=["words", "more after it", "a short id", "too long", "empty"],
    )
    async def test_a_malformed_header_breaks_the_protocol(self, said: bytes) -> None:
        lobby = StreamRouter()
        with lobby.expect(GROUP), pytest.raises(RemoteProtocolError):
            await lobby.serve(SaidBefore(said))


async def answer(lobby: StreamRouter, remote: str = "a member", group_id: bytes = GROUP) -> Vote:
    """Return the answer to a peer that asks how a round ended."""
    stream = opened(Lane.ASK, group_id=group_id, remote=remote)
    assert isinstance(stream, SaidBefore)
    await lobby.serve(stream)
    assert stream.closed
    back = SaidBefore(bytes(stream.sent))
    message = await receive_message(back)
    assert message is not None
    assert await receive_message(back) is None, "one vote, and no more"
    return decode_vote(message, 4)


def ended(vote: Vote, members: tuple[str, ...] = ("a member", "another")) -> HowItEnded:
    return lambda peer_id: vote if peer_id in members else Unknown()


class TestAsking:
    async def test_the_answer_about_an_unknown_group_is_unknown(self) -> None:
        lobby = StreamRouter()
        with lobby.expect(OTHER_GROUP):
            assert await answer(lobby) == Unknown()

    async def test_the_answer_about_a_running_group_is_a_ping(self) -> None:
        lobby = StreamRouter()
        with lobby.expect(GROUP):
            assert await answer(lobby) == MemberPing()
        assert await answer(lobby) == Unknown(), "it was closed, and its end was never told"

    async def test_the_outcome_is_told_to_the_groups_members(self) -> None:
        lobby = StreamRouter()
        with lobby.expect(GROUP):
            lobby.remember(GROUP, ended(COMMIT))
        assert await answer(lobby, "a member") == COMMIT
        assert await answer(lobby, "another") == COMMIT
        assert await answer(lobby, "a stranger") == Unknown()
        assert await answer(lobby, group_id=OTHER_GROUP) == Unknown()

    async def test_a_later_outcome_replaces_the_earlier_answer(self) -> None:
        lobby = StreamRouter()
        lobby.remember(GROUP, ended(Unknown()))
        lobby.remember(GROUP, ended(COMMIT))
        assert await answer(lobby) == COMMIT

    async def test_a_bounded_number_of_rounds_is_remembered(self) -> None:
        lobby = StreamRouter()
        groups = [number.to_bytes(32, "big") for number in range(MAX_REMEMBERED + 3)]
        for group_id in groups:
            lobby.remember(group_id, ended(COMMIT))
            lobby.remember(group_id, ended(COMMIT))
        known = [await answer(lobby, group_id=group_id) == COMMIT for group_id in groups]
        assert known == [False] * 3 + [True] * MAX_REMEMBERED

    async def test_a_peer_that_asks_and_does_not_read_is_not_waited_for(
        self, autojump_clock: MockClock
    ) -> None:
        class Deaf(Silent):
            async def send_all(self, data: Buffer) -> None:
                await trio.sleep_forever()

        began = trio.current_time()
        await StreamRouter().serve(Deaf(framed(LaneHeader(GROUP, Lane.ASK).encode())))
        assert trio.current_time() - began == pytest.approx(REPLY_SECONDS)

    async def test_the_group_is_told_who_asks(self) -> None:
        lobby, asked = StreamRouter(), list[str]()
        with lobby.expect(GROUP) as group:
            group.on_asked = asked.append
            await answer(lobby)
            await answer(lobby, group_id=OTHER_GROUP)
        assert asked == ["a member"]

    async def test_a_stream_of_votes_that_comes_after_the_end_is_told_of_it(self) -> None:
        lobby = StreamRouter()
        lobby.remember(GROUP, ended(COMMIT))
        said = []
        for lane, remote in [
            (Lane.CONTROL, "a member"),
            (Lane.CONTROL, "a stranger"),
            (Lane.AVERAGES, "a member"),
        ]:
            stream = opened(lane, remote=remote)
            assert isinstance(stream, SaidBefore)
            await lobby.serve(stream)
            message = await receive_message(SaidBefore(bytes(stream.sent)))
            said.append(None if message is None else decode_vote(message, 4))
        assert said == [COMMIT, Unknown(), None]

    async def test_a_stream_of_votes_of_a_round_that_has_just_ended_is_told_of_it(self) -> None:
        """The group is still expected, and its streams of votes may be read by no task any more."""
        lobby = StreamRouter()
        with lobby.expect(GROUP) as group:
            lobby.remember(GROUP, ended(COMMIT))
            stream = opened(Lane.CONTROL)
            assert isinstance(stream, SaidBefore)
            with trio.fail_after(5.0):
                await lobby.serve(stream)
            assert await streams_of(group.controls) == []
            message = await receive_message(SaidBefore(bytes(stream.sent)))
            assert message is not None
            assert decode_vote(message, 4) == COMMIT


class Dialogue(Silent):
    """An inbound stream on which a peer sends one header after another."""

    def __init__(self, remote: str = "a member") -> None:
        super().__init__(b"", remote)
        self._sent, self._to_read = trio.open_memory_channel[bytes](10)

    def say(self, lane: Lane, group_id: bytes = GROUP) -> None:
        """Send a header."""
        self._sent.send_nowait(framed(LaneHeader(group_id, lane).encode()))

    async def receive_some(self, max_bytes: int) -> bytes:
        if not self._said:
            self._said = await self._to_read.receive()
        return await SaidBefore.receive_some(self, max_bytes)


async def after_a_round(lobby: StreamRouter, served: Inbound, stream: Dialogue) -> None:
    """Let a stream serve a round of votes to its end."""
    with lobby.expect(GROUP) as group:
        stream.say(Lane.CONTROL)
        await served.come(stream)
        [lane] = await taken(group.controls)
        lane.clean = True
        lane.finished.set()
        await wait_all_tasks_blocked()


class TestResting:
    async def test_a_stream_of_votes_serves_one_round_after_another(self) -> None:
        lobby, stream = StreamRouter(), Dialogue()
        async with inbound(lobby) as served:
            await after_a_round(lobby, served, stream)
            with lobby.expect(OTHER_GROUP) as group:
                stream.say(Lane.CONTROL, OTHER_GROUP)
                assert await streams_of(group.controls) == [stream]
                assert await served.kept() == [stream]
            assert await served.kept() == []  # the second round did not end with a last word

    async def test_a_stream_of_parts_serves_one_attempt(self) -> None:
        lobby, stream = StreamRouter(), Dialogue()
        async with inbound(lobby) as served:
            with lobby.expect(GROUP) as group:
                stream.say(Lane.PARTS)
                await served.come(stream)
                [lane] = await taken(group.lanes(0))
                lane.clean = True
                lane.finished.set()
            assert await served.kept() == []

    async def test_a_stream_rests_for_a_bounded_time(self, autojump_clock: MockClock) -> None:
        lobby, stream = StreamRouter(), Dialogue()
        async with inbound(lobby) as served:
            await after_a_round(lobby, served, stream)
            await trio.sleep(IDLE_STREAM_SECONDS - 1.0)
            assert await served.kept() == [stream]
            await trio.sleep(2.0)
            assert await served.kept() == []

    async def test_votes_of_an_unexpected_group_close_the_stream(self) -> None:
        lobby, stream = StreamRouter(), Dialogue()
        async with inbound(lobby) as served:
            await after_a_round(lobby, served, stream)
            stream.say(Lane.CONTROL, OTHER_GROUP)
            assert await served.kept() == []
            assert served.refused == []

    @pytest.mark.parametrize("lane", [lane for lane in Lane if lane is not Lane.CONTROL])
    async def test_anything_but_votes_on_a_resting_stream_breaks_the_protocol(self, lane: Lane) -> None:
        lobby, stream = StreamRouter(), Dialogue()
        async with inbound(lobby) as served:
            await after_a_round(lobby, served, stream)
            stream.say(lane)
            assert await served.kept() == []
            assert served.refused == [stream]

    async def test_one_peer_has_few_resting_streams(self, autojump_clock: MockClock) -> None:
        lobby, others = StreamRouter(), Dialogue("another")
        streams = [Dialogue() for _ in range(MAX_RESTING_INBOUND + 1)]
        async with inbound(lobby) as served:
            for stream in [*streams, others]:
                await after_a_round(lobby, served, stream)
            assert await served.kept() == [*streams[:-1], others]
            await trio.sleep(IDLE_STREAM_SECONDS + 1.0)
            again = Dialogue()
            await after_a_round(lobby, served, again)
            assert await served.kept() == [again]
