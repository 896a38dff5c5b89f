"""The stream of votes from one member to another, between a round's end and the next round."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from p2pavg.allreduce.messages import LaneHeader
from p2pavg.allreduce.movers.lobby import RestingStreams, StreamRouter
from p2pavg.base.errors import RefusedError, StreamBrokenError
from p2pavg.base.limits import ASK_AGAIN_SECONDS, TAIL_SECONDS
from p2pavg.base.threads.processor import ProcessorWait, never_waits
from p2pavg.consensus.failure_detector import FIRST_CONTACT_SECONDS, MEMBER_PING_SECONDS
from p2pavg.consensus.votes import MemberPing, Rest, ResultCommit, StaleBallot, Unknown, Vote, decode_vote
from p2pavg.net.transport import Buffer, Stream
from p2pavg.round.control import VoteStreams
from p2pavg.round.quiet import QUIET_FOLLOWERS_SECONDS
from tests.unit.allreduce.attempts import A, B, C, Reaches, three
from tests.unit.allreduce.streams import SaidBefore
from tests.unit.round.hearing import Hearing, framed

GATHER = StaleBallot(1)


class Line(Stream):
    """One member's stream to another one, whose side the test plays."""

    def __init__(self, remote: str) -> None:
        self.remote = remote
        self.ended = ""
        """``"closed"`` or ``"reset"`` once this side has ended it."""
        self.received = bytearray()
        self.writes = 0
        self._said, self._unread = trio.open_memory_channel[bytes](20)
        self._rest = b""

    def say(self, vote: Vote) -> None:
        self._said.send_nowait(framed(vote.encode()))

    def close(self) -> None:
        """Close the other side's half."""
        self._said.send_nowait(b"")

    def break_off(self) -> None:
        """Reset the stream from the other side."""
        self._said.close()

    @property
    def heard(self) -> list[Vote]:
        """The votes that came from the member, after the header."""
        messages, rest = [], bytes(self.received)
        while rest:
            count = int.from_bytes(rest[:4], "big")
            messages.append(rest[4 : 4 + count])
            rest = rest[4 + count :]
        assert LaneHeader.decode(messages[0]).group_id == three().group_id
        return [decode_vote(message, 3) for message in messages[1:]]

    async def send_all(self, data: Buffer) -> None:
        await trio.lowlevel.checkpoint()
        self.received += bytes(data)
        self.writes += 1

    async def receive_some(self, max_bytes: int) -> bytes:
        if not self._rest:
            try:
                self._rest = await self._unread.receive()
            except trio.EndOfChannel:
                raise StreamBrokenError("the other side reset it") from None
        taken, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        return taken

    async def aclose(self) -> None:
        self.ended = self.ended or "closed"

    async def reset(self) -> None:
        self.ended = self.ended or "reset"


class Opens(Reaches):
    """A transport that opens one given stream to each peer."""

    def __init__(self, peer_id: str, streams: Sequence[Stream]) -> None:
        super().__init__(peer_id, unreachable=[])
        self.asked: list[str] = []
        self._streams = {stream.remote: stream for stream in streams}

    async def open_stream(self, peer_id: str, protocol: str, **_: object) -> Stream:
        await trio.lowlevel.checkpoint()
        self.asked.append(peer_id)
        return self._streams[peer_id]


class Side:
    """The second member of three: it opens a stream to the first one, and the third one is out of it."""

    def __init__(
        self, *streams: Stream, transport: Opens | None = None, processor_wait: ProcessorWait = never_waits
    ) -> None:
        self.resting = RestingStreams()
        self.member = Hearing()
        self.transport = transport or Opens(B, streams)
        self.control = VoteStreams(
            transport=self.transport,
            roster=three(),
            group=StreamRouter().expect(three().group_id),
            resting=self.resting,
            short=False,
            hears=self.member,
            part_bytes=100,
            max_silence=20.0,
            processor_wait=processor_wait,
        )
        self.control.drop(2)

    async def end_politely(self, line: Line) -> None:
        """End the round on both sides."""
        self.control.end()
        await wait_all_tasks_blocked()
        line.say(Rest())
        await wait_all_tasks_blocked()


@asynccontextmanager
async def running(side: Side | Quiet, *, to_its_end: bool = False) -> AsyncIterator[None]:
    """Run a side's streams until the block is over, or until they end because the block has ended the round."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(side.control.run)
        await wait_all_tasks_blocked()
        yield
        if not to_its_end:
            nursery.cancel_scope.cancel()


async def test_a_stream_rests_when_both_sides_have_said_their_last_word() -> None:
    line = Line(A)
    side = Side(line)
    async with running(side, to_its_end=True):
        side.control.tell(0, GATHER)
        line.say(Unknown())
        await side.end_politely(line)
        assert line.heard == [GATHER, Rest()]
        assert side.member.votes == [Unknown()]
        assert await side.resting.take(A) is line
        assert line.ended == ""


async def test_votes_that_wait_and_the_last_word_go_in_one_write() -> None:
    line = Line(A)
    side = Side(line)
    async with running(side, to_its_end=True):
        before = line.writes
        side.control.tell(0, GATHER)
        side.control.tell(0, Unknown())
        await side.end_politely(line)
        assert line.heard == [GATHER, Unknown(), Rest()]
        assert line.writes == before + 1


async def test_a_last_word_that_does_not_come_closes_the_stream_so_that_votes_still_arrive() -> None:
    line = Line(A)
    side = Side(line)
    began = trio.current_time()
    async with running(side, to_its_end=True):
        side.control.tell(0, GATHER)
        side.control.end()
    assert trio.current_time() - began == pytest.approx(TAIL_SECONDS)
    assert line.heard == [GATHER, Rest()]
    assert line.ended == "closed"
    assert len(side.resting) == 0


async def test_the_end_is_bounded_from_its_first_call_on() -> None:
    """A member that goes on voting after the commit, and says no last word, does not delay the others."""
    line = Line(A)
    side = Side(line)
    async with running(side, to_its_end=True):
        began = trio.current_time()
        side.control.end()
        await trio.sleep(0.9 * TAIL_SECONDS)
        side.control.end()
    assert trio.current_time() - began == pytest.approx(TAIL_SECONDS)


async def test_a_stream_that_does_not_open_does_not_put_off_the_end() -> None:
    class Hangs(Opens):
        async def open_stream(self, *_args: object, **_options: object) -> Stream:
            await trio.sleep_forever()
            raise AssertionError

    side = Side()
    side.control._transport = Hangs(B, [])
    async with running(side, to_its_end=True):
        began = trio.current_time()
        side.control.end()
    assert trio.current_time() - began == pytest.approx(TAIL_SECONDS)


async def test_a_dropped_member_gets_its_stream_reset() -> None:
    line = Line(A)
    side = Side(line)
    async with running(side, to_its_end=True):
        side.control.drop(0)
    assert line.ended == "reset"
    assert len(side.resting) == 0


async def test_a_last_word_in_the_middle_of_a_round_loses_the_member() -> None:
    line = Line(A)
    side = Side(line)
    async with running(side, to_its_end=True):
        line.say(Rest())
        await wait_all_tasks_blocked()
        assert "ended the round" in side.member.lost_members[0][1]
        side.control.drop(0)


@pytest.mark.parametrize("how", ["close", "break_off"])
async def test_votes_on_a_stream_that_had_ended_are_sent_again_on_a_new_one(how: str) -> None:
    old, new = Line(A), Line(A)
    side = Side(new)
    await side.resting.keep(old)
    async with running(side, to_its_end=True):
        side.control.tell(0, GATHER)
        await wait_all_tasks_blocked()
        assert old.heard == [GATHER]
        assert side.transport.asked == []
        getattr(old, how)()
        await wait_all_tasks_blocked()
        assert old.ended
        assert new.heard == [GATHER]
        assert side.member.lost_members == []
        side.control.tell(0, Unknown())
        await side.end_politely(new)
        assert new.heard == [GATHER, Unknown(), Rest()]
        assert await side.resting.take(A) is new


class Gone(Opens):
    """A transport whose peers' processes have ended: dials are refused, and none of them connects."""

    async def open_stream(self, peer_id: str, protocol: str, **options: object) -> Stream:
        if options.get("wait_inbound"):
            await trio.sleep_forever()
        raise RefusedError(peer_id)


async def test_a_member_whose_process_ends_before_it_has_said_anything_is_lost_at_once() -> None:
    """Silence would tell only after some seconds."""
    old = Line(A)
    side = Side(transport=Gone(B, []))
    await side.resting.keep(old)
    async with running(side, to_its_end=True):
        began = trio.current_time()
        old.break_off()
        await wait_all_tasks_blocked()
        assert [position for position, _, _ in side.member.lost_members] == [0]
        assert trio.current_time() == began


@pytest.mark.parametrize("how", ["close", "break_off"])
async def test_a_used_stream_that_ends_after_it_was_heard_loses_the_member(how: str) -> None:
    line = Line(A)
    side = Side()
    await side.resting.keep(line)
    async with running(side, to_its_end=True):
        line.say(MemberPing())
        await wait_all_tasks_blocked()
        getattr(line, how)()
        await wait_all_tasks_blocked()
        assert [position for position, _, _ in side.member.lost_members] == [0]
        assert side.transport.asked == []


def waits_half_of_the_time() -> float:
    """Return the wait for a processor of a process that shares it with another one."""
    return trio.current_time() / 2


@pytest.mark.parametrize(("processor_wait", "share"), [(never_waits, 1.0), (waits_half_of_the_time, 0.5)])
async def test_silence_counts_only_while_this_process_had_a_processor(
    processor_wait: ProcessorWait, share: float
) -> None:
    """On a busy machine, a group of its processes would otherwise lose all of its members."""
    side = Side(Line(A), processor_wait=processor_wait)
    async with running(side):
        await trio.sleep(FIRST_CONTACT_SECONDS / share - MEMBER_PING_SECONDS)
        assert side.member.lost_members == []
        # It looks once in each ping's time, which may be just before the limit.
        await trio.sleep(2.5 * MEMBER_PING_SECONDS)
        assert {position for position, _, _ in side.member.lost_members} == {0}


async def test_the_wait_for_a_processor_excuses_for_a_limited_time() -> None:
    """There has to be time for another attempt."""
    side = Side(Line(A), processor_wait=trio.current_time)  # it never has one
    async with running(side):
        await trio.sleep(20.0)  # the longest silence
        assert side.member.lost_members == []
        await trio.sleep(FIRST_CONTACT_SECONDS + 2 * MEMBER_PING_SECONDS)
        assert {position for position, _, _ in side.member.lost_members} == {0}


async def test_a_last_word_is_no_answer_to_a_question() -> None:
    side = Side(SaidBefore(framed(Rest().encode()), C))
    assert await side.control.ask(2) is None


class Quiet:
    """A member of three in a short round. A leads; of the two others, C opens their stream."""

    def __init__(self, me: str, *streams: Stream, processor_wait: ProcessorWait = never_waits) -> None:
        self.lobby = StreamRouter()
        self.group = self.lobby.expect(three().group_id)
        self.member = Asking()
        self.transport = Opens(me, streams)
        self.control = VoteStreams(
            transport=self.transport,
            roster=three(),
            group=self.group,
            resting=RestingStreams(),
            short=True,
            hears=self.member,
            part_bytes=100,
            max_silence=20.0,
            processor_wait=processor_wait,
        )


class Asking(Hearing):
    """Notes the members that it is to ask."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def missing(self, position: int) -> None:
        self.asked.append(position)


COMMIT = ResultCommit(0, frozenset({0, 1, 2}), b"", ())


class TestQuiet:
    async def test_a_follower_opens_its_stream_to_another_one_when_it_has_something_to_say(self) -> None:
        side = Quiet(C, Line(A), other := Line(B))
        async with running(side):
            side.control.tell(1, COMMIT)
            await wait_all_tasks_blocked()
            assert side.transport.asked == [A]
            side.control.tell(1, GATHER)
            await wait_all_tasks_blocked()
            assert side.transport.asked == [A, B]
            assert other.heard == [COMMIT, GATHER]

    @pytest.mark.parametrize(("processor_wait", "longer"), [(never_waits, 1), (waits_half_of_the_time, 2)])
    async def test_a_follower_opens_its_stream_after_a_second_in_any_case(
        self, processor_wait: ProcessorWait, longer: int
    ) -> None:
        """On a busy machine it is longer: the streams that all open at once are what it can bear least."""
        side = Quiet(C, Line(A), Line(B), processor_wait=processor_wait)
        async with running(side):
            await trio.sleep(longer * QUIET_FOLLOWERS_SECONDS - 0.1)
            assert side.transport.asked == [A]
            await trio.sleep(0.2)
            assert side.transport.asked == [A, B]

    async def test_a_follower_opens_its_stream_when_the_other_one_asks(self) -> None:
        side = Quiet(C, Line(A), Line(B))
        async with running(side):
            for peer_id in ("a stranger", A, B, B):
                side.group.on_asked(peer_id)
            await wait_all_tasks_blocked()
            assert side.transport.asked == [A, B]

    async def test_a_member_that_waits_for_a_stream_asks_the_one_that_is_to_open_it(self) -> None:
        side = Quiet(B, Line(A))
        async with running(side):
            side.control.tell(2, COMMIT)
            assert side.member.asked == []
            side.control.tell(2, GATHER)
            side.control.tell(2, GATHER)
            assert side.member.asked == [2]

    async def test_a_member_whose_stream_does_not_come_is_asked_though_its_parts_have_come(self) -> None:
        """It has ended the round, perhaps."""
        side = Quiet(B, Line(A))
        async with running(side):
            for peer_id in (A, C):
                side.control.arrived(peer_id, 100)
            await trio.sleep(QUIET_FOLLOWERS_SECONDS + MEMBER_PING_SECONDS - 0.1)
            assert side.member.asked == []
            await trio.sleep(0.2)
            assert side.member.asked == [2]
            await trio.sleep(ASK_AGAIN_SECONDS)
            assert side.member.asked == [2, 2]

    async def test_after_it_was_cancelled_no_stream_is_opened(self) -> None:
        side = Quiet(C, Line(A), Line(B))
        async with running(side, to_its_end=True):
            side.control.scope.cancel()
        side.control.tell(1, GATHER)
        assert side.transport.asked == [A]

    async def test_after_the_end_no_stream_is_opened(self) -> None:
        side = Quiet(C, line := Line(A), Line(B))
        async with running(side, to_its_end=True):
            side.control.end()
            line.say(Rest())
        side.control.tell(1, GATHER)
        side.group.on_asked(B)
        assert side.transport.asked == [A]
