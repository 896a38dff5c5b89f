"""One member's side of one attempt, with streams made of lists in place of the other members."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
import trio
from trio.testing import wait_all_tasks_blocked

from p2pavg.allreduce.attempt import Attempt
from p2pavg.allreduce.events import (
    AttemptEvent,
    BytesArrived,
    ContributionOwed,
    DirectLaneBroke,
    LaneFailed,
    ResultComplete,
)
from p2pavg.allreduce.messages import FRAME_BYTES, Lane, LaneHeader, members_digest, part_frame
from p2pavg.allreduce.movers.lobby import InboundLane, Lanes
from p2pavg.base.errors import StreamBrokenError
from p2pavg.group.roster import Roster
from p2pavg.net.transport import DirectLane, Stream
from p2pavg_compression import Fp32
from tests.unit.allreduce.attempts import AUX, NUMBER, SHARE, A, B, C, Reaches, three
from tests.unit.allreduce.contexts import context_over
from tests.unit.allreduce.laid import Takes
from tests.unit.allreduce.streams import SaidBefore, Silent
from tests.unit.group.samples import SIGNERS, candidate, roster

CODEC = Fp32()


@pytest.fixture(autouse=True)
def unsigned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the members sign nothing: the streams of these tests are lists of parts."""
    monkeypatch.setattr("p2pavg.allreduce.attempt._proofs", lambda *_: None)


def with_auxiliary() -> Roster:
    members = [candidate(0, weight=1.0), candidate(1, weight=1.0), candidate(3, auxiliary=True)]
    return roster(members, [SHARE] * 3)


class Reports:
    """Keeps the reports of an attempt."""

    def __init__(self) -> None:
        self.results: list[tuple[bytes, ...]] = []
        self.troubles: list[tuple[str, bool]] = []
        self.broken: list[str] = []
        self.bytes = 0
        self.owing: set[str] = set()

    def happened(self, attempt: Attempt, event: AttemptEvent) -> None:
        match event:
            case ResultComplete(digests):
                self.results.append(digests)
            case LaneFailed(peer_id, _, hostile):
                self.troubles.append((peer_id, hostile))
            case DirectLaneBroke(peer_id):
                self.broken.append(peer_id)
            case BytesArrived(_, count):
                self.bytes += count
            case ContributionOwed(peer_id, owed):
                (self.owing.add if owed else self.owing.discard)(peer_id)


class Broken(SaidBefore):
    """A stream that breaks after its bytes."""

    async def receive_some(self, max_bytes: int) -> bytes:
        chunk = await super().receive_some(max_bytes)
        if not chunk:
            raise StreamBrokenError("gone")
        return chunk


class Slow(SaidBefore):
    """A stream whose bytes arrive when the test allows it."""

    def __init__(self, said: bytes, remote: str) -> None:
        super().__init__(said, remote)
        self.allowed = 0
        self._more = trio.Event()

    def allow(self, count: int) -> None:
        self.allowed = count
        self._more.set()
        self._more = trio.Event()

    async def receive_some(self, max_bytes: int) -> bytes:
        while self.allowed <= 0:
            await self._more.wait()
        chunk = await super().receive_some(min(max_bytes, self.allowed))
        self.allowed -= len(chunk)
        return chunk


class Side:
    """The attempt of one member, and the lanes that the others open to it."""

    def __init__(
        self, me: str = A, group: Roster | None = None, *, unreachable: Sequence[str] = (), value: float = 1.0
    ) -> None:
        group = three() if group is None else group
        self.members = members_digest(NUMBER, (member.peer_id for member in group.members))
        self.transport = Reaches(me, unreachable)
        self.transport.group_id, self.transport.members = group.group_id, self.members
        self.reports = Reports()
        self.lanes = Lanes()
        self.attempt = Attempt(
            number=NUMBER,
            context=context_over(self.transport, CODEC, 3 * SHARE),
            group=group,
            roster=group,
            lanes=self.lanes,
            vector=None if me == AUX else torch.full((3 * SHARE,), value),
            on_event=self.reports.happened,
        )

    def header(self, lane: Lane, reducer: int = 0) -> LaneHeader:
        return LaneHeader(self.transport.group_id, lane, NUMBER, reducer, self.members)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.attempt.run)
            await wait_all_tasks_blocked()
            yield
            self.attempt.scope.cancel()

    async def comes(
        self,
        peer_id: str,
        lane: Lane,
        said: bytes,
        *,
        reducer: int = 0,
        stream: Callable[[bytes, str], Stream | DirectLane] = Silent,
    ) -> InboundLane:
        """Let a member open a lane and send bytes on it."""
        inbound = InboundLane(stream(said, peer_id), self.header(lane, reducer))
        self.lanes.arrived(inbound)
        await wait_all_tasks_blocked()
        return inbound


def part(value: float, index: int = 0, elements: int = SHARE) -> bytes:
    return part_frame(index) + bytes(CODEC.encode(torch.full((elements,), value)))


async def everything_but(side: Side, missing: tuple[str, Lane]) -> None:
    """Send all parts that B and C owe A, except one lane. The contributions are A: 1, B: 2 and C: 3."""
    for peer_id, contribution, average in ((B, 2.0, 20.0), (C, 3.0, 30.0)):
        if missing != (peer_id, Lane.CONTRIBUTIONS):
            await side.comes(peer_id, Lane.CONTRIBUTIONS, part(contribution))
        if missing != (peer_id, Lane.AVERAGES):
            await side.comes(peer_id, Lane.AVERAGES, part(average))


NOTHING = ("no member", Lane.AVERAGES)
RESULT = torch.tensor([2.0] * SHARE + [20.0] * SHARE + [30.0] * SHARE)


@pytest.mark.parametrize("taken_twice", [False, True])
async def test_an_attempt_that_is_cancelled_lets_go_of_each_lane_that_it_took(
    taken_twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second lane waits for the end of the first one, whose place it takes, when the attempt ends."""

    async def never_ends(_taken: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr("p2pavg.allreduce.receiver._Taken.end", never_ends)
    side = Side()
    async with side.running():
        lanes = [await side.comes(B, Lane.PASSED_ON, b"", reducer=2) for _ in range(1 + taken_twice)]
        assert [lane.taken for lane in lanes] == [True] * len(lanes)
        assert not any(lane.finished.is_set() for lane in lanes)
    assert all(lane.finished.is_set() for lane in lanes)


class Unread(Takes):
    """A lane that has brought everything, and whose acknowledgement is not accepted."""

    def __init__(self, said: bytes, remote: str) -> None:
        super().__init__(remote)
        self._said = said

    async def receive_some(self, count: int) -> bytes:
        await trio.lowlevel.checkpoint()
        found, self._said = self._said[:count], self._said[count:]
        return found

    async def acknowledge_from_loop(self) -> None:
        self.awaited = True
        await trio.sleep_forever()


async def test_a_lane_that_was_not_acknowledged_is_not_kept() -> None:
    """Its sender takes another one for the next attempt."""
    side = Side()
    async with side.running():
        inbound = await side.comes(B, Lane.PARTS, part(2.0) + part(20.0), stream=Unread)
        assert isinstance(inbound.stream, Unread)
        assert inbound.stream.awaited
    assert inbound.finished.is_set()
    assert not inbound.clean


class TestResult:
    async def test_the_result_is_complete_when_all_parts_have_come(self) -> None:
        side = Side()
        async with side.running():
            assert side.reports.owing == {B, C}
            await everything_but(side, NOTHING)
            assert torch.equal(side.attempt.values.averages.values, RESULT)
            assert len(side.reports.results) == 1
        assert side.reports.troubles == []
        assert side.reports.owing == set()
        moved = 4 * (FRAME_BYTES + 4 * SHARE)
        assert sum(side.attempt.receiver.bytes_by_way.values()) == side.reports.bytes == moved
        assert side.attempt.sender.bytes_by_way == side.attempt.receiver.bytes_by_way

    @pytest.mark.parametrize("missing", [(B, Lane.CONTRIBUTIONS), (C, Lane.AVERAGES)])
    async def test_the_result_is_incomplete_while_a_part_is_missing(self, missing: tuple[str, Lane]) -> None:
        side = Side()
        async with side.running():
            await everything_but(side, missing)
            assert side.reports.results == []
            assert side.reports.owing == ({B} if missing[1] is Lane.CONTRIBUTIONS else set())
            await side.comes(*missing, part(20.0))
            assert len(side.reports.results) == 1

    async def test_every_member_is_sent_its_part_and_the_same_average(self) -> None:
        side = Side()
        async with side.running():
            await side.comes(B, Lane.CONTRIBUTIONS, part(2.0))
            assert [side.transport.sent(peer, Lane.CONTRIBUTIONS) for peer in (B, C)] == [part(1.0)] * 2
            assert [side.transport.sent(peer, Lane.AVERAGES) for peer in (B, C)] == [b""] * 2
            await side.comes(C, Lane.CONTRIBUTIONS, part(3.0))
            assert [side.transport.sent(peer, Lane.AVERAGES) for peer in (B, C)] == [part(2.0)] * 2
        assert all(stream.closed for stream in side.transport.opened)

    async def test_a_part_that_comes_as_the_attempt_ends_completes_nothing(self) -> None:
        side = Side()

        class Ending(SaidBefore):
            async def receive_some(self, max_bytes: int) -> bytes:
                side.attempt.scope.cancel()
                chunk, self._said = self._said[:max_bytes], self._said[max_bytes:]
                return chunk

        async with side.running():
            await everything_but(side, (C, Lane.AVERAGES))
            lane = await side.comes(C, Lane.AVERAGES, part(30.0), stream=Ending)
        assert lane.finished.is_set()
        assert side.reports.results == []
        assert side.reports.troubles == []


async def others_go_on(side: Side) -> None:
    """Check that the lanes of a member that caused no trouble go on."""
    before = len(side.reports.troubles)
    await side.comes(B, Lane.AVERAGES, part(20.0))
    assert side.attempt.values.averages.values[SHARE : 2 * SHARE].tolist() == [20.0] * SHARE
    assert len(side.reports.troubles) == before


class TestTrouble:
    """Each trouble is reported with the member that caused it, and the lanes of the others go on."""

    @pytest.mark.parametrize(
        ("lane", "said", "stream", "hostile"),
        [
            (Lane.AVERAGES, part(3.0)[:-1], SaidBefore, False),
            (Lane.AVERAGES, part(3.0)[:-1], Broken, False),
            (Lane.CONTRIBUTIONS, b"", SaidBefore, False),
            (Lane.PASSED_ON, part(3.0, index=1), Silent, True),
            (Lane.PASSED_ON, part_frame(0) + b"\xff" * 4 * SHARE, Silent, True),
        ],
        ids=[
            "ends early",
            "breaks",
            "ends at once",
            "another part of who is gone",
            "no numbers of who is gone",
        ],
    )
    async def test_a_lane_with_invalid_content_is_trouble_with_its_sender(
        self, lane: Lane, said: bytes, stream: Callable[[bytes, str], Stream], hostile: bool
    ) -> None:
        side = Side()
        async with side.running():
            side.attempt.receiver.take_from(C, [C])
            reducer = 2 if lane is Lane.PASSED_ON else 0
            inbound = await side.comes(C, lane, said, stream=stream, reducer=reducer)
            assert inbound.finished.is_set()
            assert side.reports.troubles == [(C, hostile)]
            await others_go_on(side)
        assert side.reports.results == []

    @pytest.mark.parametrize(
        ("me", "auxiliary", "sender", "lane", "reducer"),
        [
            (A, True, AUX, Lane.CONTRIBUTIONS, 0),
            (A, True, AUX, Lane.PASSED_ON, 1),
            (A, True, AUX, Lane.AVERAGES, 1),
            (AUX, True, A, Lane.PASSED_ON, 1),
            (A, False, C, Lane.PASSED_ON, 3),
            (A, False, C, Lane.PARTS, 0),
        ],
        ids=[
            "an auxiliary contributes nothing",
            "and passes nothing on",
            "and has one share",
            "and needs no share of others",
            "a share of a peer outside the attempt",
            "both kinds on a stream",
        ],
    )
    async def test_a_lane_that_is_not_due_is_refused(
        self, me: str, auxiliary: bool, sender: str, lane: Lane, reducer: int
    ) -> None:
        side = Side(me, with_auxiliary() if auxiliary else three())
        async with side.running():
            inbound = await side.comes(sender, lane, part(3.0), reducer=reducer)
            assert inbound.finished.is_set()
            assert side.reports.troubles == [(sender, True)]
            assert side.reports.bytes == 0
            if me == A:
                await others_go_on(side)

    async def test_a_member_that_cannot_be_reached_is_trouble(self) -> None:
        side = Side(unreachable=[C])
        async with side.running():
            await side.comes(B, Lane.CONTRIBUTIONS, part(2.0))
            assert set(side.reports.troubles) == {(C, False)}
            assert side.transport.sent(B, Lane.CONTRIBUTIONS) == part(1.0)
            await others_go_on(side)


class TestPassingOn:
    """C is gone, and has sent its averages to some members only."""

    async def test_a_source_passes_on_the_same_bytes(self) -> None:
        side = Side()
        async with side.running():
            await everything_but(side, NOTHING)
            side.attempt.sender.pass_on([C], [B])
            await wait_all_tasks_blocked()
            assert side.transport.sent(B, Lane.PASSED_ON, reducer=2) == part(30.0)
            assert side.transport.sent(C, Lane.PASSED_ON, reducer=2) is None
            side.attempt.sender.pass_on([A, B], [C])  # its own share is passed on like any other
            await wait_all_tasks_blocked()
            assert side.transport.sent(C, Lane.PASSED_ON, reducer=0) == part(2.0)
            assert side.transport.sent(C, Lane.PASSED_ON, reducer=1) == part(20.0)

    async def test_a_source_may_send_before_the_member_knows_of_it(self) -> None:
        side = Side()
        async with side.running():
            await everything_but(side, (C, Lane.AVERAGES))
            await side.comes(B, Lane.PASSED_ON, part(30.0), reducer=2)
            assert side.reports.results == []
            side.attempt.receiver.take_from(B, [C])
            await wait_all_tasks_blocked()
            assert len(side.reports.results) == 1
            assert torch.equal(side.attempt.values.averages.values, RESULT)

    async def test_a_share_is_taken_from_the_named_source_only(self) -> None:
        """Otherwise a liar could give this member another result, for which an honest member would be blamed."""
        side = Side()
        async with side.running():
            await everything_but(side, (C, Lane.AVERAGES))
            side.attempt.values.averages.values[2 * SHARE :] = -1.0
            side.attempt.receiver.take_from(B, [C])
            await side.comes(C, Lane.PASSED_ON, part(99.0), reducer=2)
            await side.comes(B, Lane.PASSED_ON, part(99.0), reducer=0)
            await side.comes(C, Lane.PASSED_ON, part(99.0), reducer=1)
            assert side.reports.results == []
            assert torch.equal(side.attempt.values.averages.values[: 2 * SHARE], RESULT[: 2 * SHARE])
            assert side.attempt.values.averages.values[2 * SHARE :].tolist() == [-1.0] * SHARE

    async def test_another_source_may_follow_one_that_died(self) -> None:
        side = Side(group=roster([candidate(index, weight=1.0) for index in (0, 1, 2, 4)], [3] * 4))
        fourth = SIGNERS[4].peer_id
        side.attempt.receiver.take_from(B, [fourth])
        async with side.running():
            await side.comes(B, Lane.PASSED_ON, part(30.0, elements=3)[:-2], reducer=3, stream=Broken)
            assert side.reports.troubles == [(B, False)]
            side.attempt.receiver.take_from(C, [fourth])
            await side.comes(C, Lane.PASSED_ON, part(30.0, elements=3), reducer=3)
            assert side.attempt.values.averages.values[9:].tolist() == [30.0] * 3

    @pytest.mark.parametrize("before", [0, FRAME_BYTES + 3], ids=["all of it", "the rest of it"])
    async def test_late_parts_of_the_reducer_itself_are_no_offence(self, before: int) -> None:
        """The leader cannot reach the reducer, but this member can."""
        side, words = Side(), part(30.0)
        async with side.running():
            await everything_but(side, (C, Lane.AVERAGES))
            side.attempt.receiver.take_from(B, [C])
            slow = Slow(words, C)
            lane = InboundLane(slow, side.header(Lane.AVERAGES))
            side.lanes.arrived(lane)
            slow.allow(before)
            await wait_all_tasks_blocked()
            await side.comes(B, Lane.PASSED_ON, words, reducer=2)
            assert len(side.reports.results) == 1
            slow.allow(len(words))
            await wait_all_tasks_blocked()
            assert lane.finished.is_set()
            assert side.reports.troubles == []
            assert len(side.reports.results) == 1
            assert torch.equal(side.attempt.values.averages.values, RESULT)


class SaysNothing(Takes):
    """A lane on which nothing arrives until it is aborted."""

    def __init__(self, _said: bytes, remote: str) -> None:
        super().__init__(remote)
        self._ended = threading.Event()

    def receive_into(self, buffer: memoryview) -> None:
        self._ended.wait()
        raise StreamBrokenError("this process dropped it")

    def abort(self) -> None:
        super().abort()
        self._ended.set()


class Breaks(Takes):
    """A lane that breaks before anything arrives."""

    def __init__(self, _said: bytes, remote: str) -> None:
        super().__init__(remote)

    def receive_into(self, buffer: memoryview) -> None:
        raise StreamBrokenError("gone")

    async def receive_some(self, count: int) -> bytes:
        raise StreamBrokenError("gone")


class TestTakingDirectLanes:
    """A direct lane carries contributions and then averages. A stream carries one of the two."""

    async def test_a_lane_that_breaks_is_reported_before_its_sender_is_blamed(self) -> None:
        """So the round asks at once whether the sender is still there."""
        side = Side()
        async with side.running():
            await side.comes(C, Lane.PARTS, b"", stream=Breaks)
            with trio.fail_after(60.0):
                while not side.reports.broken:
                    await trio.sleep(0.001)
            assert side.reports.broken == [C]
            assert side.reports.troubles == []

    @pytest.mark.parametrize("kind", [Lane.CONTRIBUTIONS, Lane.AVERAGES])
    async def test_a_direct_lane_of_a_streams_kind_is_not_due(self, kind: Lane) -> None:
        side = Side()
        async with side.running():
            inbound = await side.comes(C, kind, b"", stream=SaysNothing)
            assert inbound.finished.is_set()
            assert side.reports.troubles == [(C, True)]
            await others_go_on(side)

    @pytest.mark.parametrize("kind", [Lane.CONTRIBUTIONS, Lane.AVERAGES])
    async def test_a_direct_lane_that_arrives_after_its_replacement_stream_is_closed(
        self, kind: Lane
    ) -> None:
        """The direct lane broke earlier, and its sender began again on the stream, which goes on."""
        side, words = Side(), part(30.0)
        async with side.running():
            slow = Slow(words, C)
            stream = InboundLane(slow, side.header(kind))
            side.lanes.arrived(stream)
            await wait_all_tasks_blocked()
            late = await side.comes(C, Lane.PARTS, b"", stream=SaysNothing)
            assert late.finished.is_set()
            assert not late.clean
            assert not stream.finished.is_set()
            slow.allow(len(words))
            await wait_all_tasks_blocked()
            assert stream.finished.is_set()
            assert sum(side.attempt.receiver.bytes_by_way.values()) == len(words)
            await others_go_on(side)
            assert (await side.comes(C, Lane.PARTS, b"", stream=SaysNothing)).finished.is_set()
            assert side.reports.troubles == []
            assert side.reports.broken == []

    async def test_a_second_direct_lane_of_a_member_is_not_due(self) -> None:
        side = Side()
        async with side.running():
            first = await side.comes(C, Lane.PARTS, b"", stream=SaysNothing)
            assert side.reports.troubles == []
            second = await side.comes(C, Lane.PARTS, b"", stream=SaysNothing)
            assert second.finished.is_set()
            assert not first.finished.is_set()
            assert side.reports.troubles == [(C, True)]
            await others_go_on(side)
        assert first.finished.is_set()


class TestKeepingDirectLanes:
    """A lane on which all parts were sent is kept when its attempt ends, and still waits for an acknowledgement."""

    async def kept(self, side: Side, monkeypatch: pytest.MonkeyPatch, *, in_the_thread: bool) -> list[Takes]:
        """Return the kept lanes of an attempt that ends after all parts were sent.

        ``in_the_thread``: it ends before the sending thread reports that.
        """
        lanes: list[Takes] = []
        kept: list[DirectLane] = []
        averaged = trio.Event()

        async def open_lane(peer_id: str, *, addresses: Sequence[str] = (), timeout: float) -> DirectLane:
            await trio.lowlevel.checkpoint()
            lanes.append(Takes(peer_id))
            return lanes[-1]

        async def run(work: Any, *, stop: Callable[[], None], name: str) -> None:
            use, header = work.func.__self__, work.args[0]
            assert header.lane is Lane.PARTS
            if use.lane.remote == C:
                await trio.sleep_forever()
            await averaged.wait()
            work()
            if in_the_thread:
                try:
                    await trio.sleep_forever()
                finally:
                    stop()

        monkeypatch.setattr(side.transport, "open_lane", open_lane)
        monkeypatch.setattr(side.transport, "keep_lane", kept.append)
        monkeypatch.setattr("p2pavg.allreduce.sender.in_own_thread", run)
        monkeypatch.setattr("p2pavg.allreduce.movers.lane_driver.SMALL_ELEMENTS", 0)
        async with side.running():
            await side.comes(B, Lane.CONTRIBUTIONS, part(2.0))
            await side.comes(C, Lane.CONTRIBUTIONS, part(3.0))
            averaged.set()
            await wait_all_tasks_blocked()
            sent = [lane for lane in lanes if lane.bytes_sent]
            assert [lane.remote for lane in sent] == [B]
        assert [lane.remote for lane in lanes if lane.aborted] == [C]
        return [lane for lane in sent if lane in kept and not lane.aborted]

    async def test_an_attempt_that_ends_while_it_waits_for_the_acknowledgement(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = await self.kept(Side(), monkeypatch, in_the_thread=False)
        assert [lane.awaited for lane in found] == [True]

    async def test_an_attempt_that_ends_before_its_thread_reports_the_end(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The transport waits for the acknowledgement, as ``keep_lane`` documents."""
        assert len(await self.kept(Side(), monkeypatch, in_the_thread=True)) == 1
