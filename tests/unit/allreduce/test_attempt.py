"""One member's side of one attempt, with streams made of lists in the place of the other members."""

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
from p2pavg.allreduce.lobby import InboundLane, Lanes
from p2pavg.allreduce.messages import (
    FRAME_BYTES,
    Lane,
    LaneHeader,
    members_digest,
    part_frame,
)
from p2pavg.consensus.votes import DIGEST_BYTES
from p2pavg.errors import StreamBrokenError
from p2pavg.group.milestones import Milestone
from p2pavg.group.roster import Roster
from p2pavg.net.transport import DirectLane, Stream
from p2pavg_compression import Fp32
from tests.unit.allreduce.attempts import AUX, GROUP, NUMBER, SHARE, A, B, C, Reaches, three
from tests.unit.allreduce.contexts import context_over
from tests.unit.allreduce.laid import Takes
from tests.unit.allreduce.streams import SaidBefore, Silent
from tests.unit.group.samples import SIGNERS, candidate, roster

STRANGER = SIGNERS[5].peer_id
CODEC = Fp32()


def with_auxiliary() -> Roster:
    members = [candidate(0, weight=1.0), candidate(1, weight=1.0), candidate(3, auxiliary=True)]
    return roster(members, [SHARE] * 3)


class Reports:
    """Keeps what is told of an attempt."""

    def __init__(self) -> None:
        self.results: list[tuple[bytes, ...]] = []
        self.troubles: list[tuple[str, bool]] = []
        self.broken: list[str] = []
        self.bytes = 0
        self.owing: set[str] = set()
        self.milestones: list[Milestone] = []

    def completed(self, attempt: Attempt, digests: tuple[bytes, ...]) -> None:
        self.results.append(digests)

    def troubled(self, attempt: Attempt, peer_id: str, reason: str, *, hostile: bool) -> None:
        self.troubles.append((peer_id, hostile))

    def lane_broke(self, attempt: Attempt, peer_id: str) -> None:
        self.broken.append(peer_id)

    def arrived(self, peer_id: str, count: int) -> None:
        self.bytes += count

    def owes(self, attempt: Attempt, peer_id: str, yes: bool) -> None:
        (self.owing.add if yes else self.owing.discard)(peer_id)

    def reached(self, milestone: Milestone) -> None:
        self.milestones.append(milestone)


class Broken(SaidBefore):
    """It breaks after what was said."""

    async def receive_some(self, max_bytes: int) -> bytes:
        chunk = await super().receive_some(max_bytes)
        if not chunk:
            raise StreamBrokenError("gone")
        return chunk


class Slow(SaidBefore):
    """What was said arrives when the test allows it."""

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
    """The attempt of one member, and what the others open to it."""

    def __init__(
        self, me: str = A, group: Roster | None = None, *, unreachable: Sequence[str] = (), value: float = 1.0
    ) -> None:
        group = three() if group is None else group
        self.members = members_digest(NUMBER, (member.peer_id for member in group.members))
        self.transport = Reaches(me, unreachable)
        self.transport.members = self.members
        self.reports = Reports()
        self.lanes = Lanes()
        positions = {member.peer_id: index for index, member in enumerate(group.members)}
        self.attempt = Attempt(
            number=NUMBER,
            context=context_over(self.transport, CODEC, 3 * SHARE),
            group_id=GROUP,
            roster=group,
            lanes=self.lanes,
            vector=None if me == AUX else torch.full((3 * SHARE,), value),
            reports=self.reports,
            position=positions.__getitem__,
        )

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
        """A member opens a lane and says something on it."""
        inbound = InboundLane(stream(said, peer_id), LaneHeader(GROUP, lane, NUMBER, reducer, self.members))
        self.lanes.arrived(inbound)
        await wait_all_tasks_blocked()
        return inbound


def part(value: float, index: int = 0, elements: int = SHARE) -> bytes:
    return part_frame(index) + bytes(CODEC.encode(torch.full((elements,), value)))


async def everything_but(side: Side, missing: tuple[str, Lane]) -> None:
    """What B and C owe A in an attempt of three, where B contributes 2, C contributes 3, and A 1."""
    for peer_id, contribution, average in ((B, 2.0, 20.0), (C, 3.0, 30.0)):
        if missing != (peer_id, Lane.CONTRIBUTIONS):
            await side.comes(peer_id, Lane.CONTRIBUTIONS, part(contribution))
        if missing != (peer_id, Lane.AVERAGES):
            await side.comes(peer_id, Lane.AVERAGES, part(average))


NOTHING = ("nobody", Lane.AVERAGES)
RESULT = torch.tensor([2.0] * SHARE + [20.0] * SHARE + [30.0] * SHARE)


class TestResult:
    async def test_it_is_there_when_everything_has_come(self) -> None:
        side = Side()
        async with side.running():
            assert side.reports.owing == {B, C}
            await everything_but(side, NOTHING)
            assert torch.equal(side.attempt.averaged, RESULT)
            assert len(side.reports.results) == 1
        assert side.reports.troubles == []
        assert side.reports.owing == set()
        assert side.attempt.bytes_received == side.reports.bytes == 4 * (FRAME_BYTES + 4 * SHARE)
        assert side.attempt.bytes_sent == side.attempt.bytes_received

    @pytest.mark.parametrize("missing", [(B, Lane.CONTRIBUTIONS), (C, Lane.AVERAGES)])
    async def test_it_is_not_as_long_as_something_is_missing(self, missing: tuple[str, Lane]) -> None:
        side = Side()
        async with side.running():
            await everything_but(side, missing)
            assert side.reports.results == []
            assert side.reports.owing == ({B} if missing[1] is Lane.CONTRIBUTIONS else set())
            await side.comes(*missing, part(20.0))
            assert len(side.reports.results) == 1

    async def test_its_digests_are_of_each_share_in_the_order_of_the_roster(self) -> None:
        found = []
        for average in (30.0, 31.0):
            side = Side()
            async with side.running():
                await everything_but(side, (C, Lane.AVERAGES))
                await side.comes(C, Lane.AVERAGES, part(average))
            found.append(side.reports.results[0])
        assert {len(digest) for digest in found[0]} == {DIGEST_BYTES}
        assert len(found[0]) == 3
        assert found[0][:2] == found[1][:2]
        assert found[0][2] != found[1][2]
        assert len(set(found[0])) == 3

    async def test_everybody_is_sent_its_part_and_the_same_average(self) -> None:
        side = Side()
        async with side.running():
            await side.comes(B, Lane.CONTRIBUTIONS, part(2.0))
            assert [side.transport.sent(peer, Lane.CONTRIBUTIONS) for peer in (B, C)] == [part(1.0)] * 2
            assert [side.transport.sent(peer, Lane.AVERAGES) for peer in (B, C)] == [b""] * 2
            await side.comes(C, Lane.CONTRIBUTIONS, part(3.0))
            assert [side.transport.sent(peer, Lane.AVERAGES) for peer in (B, C)] == [part(2.0)] * 2
        assert all(stream.closed for stream in side.transport.opened)

    async def test_an_auxiliary_has_its_share_and_no_digests(self) -> None:
        side = Side(AUX, with_auxiliary())
        async with side.running():
            await side.comes(A, Lane.CONTRIBUTIONS, part(1.0))
            await side.comes(B, Lane.CONTRIBUTIONS, part(3.0))
            assert side.reports.results == [()]
            assert side.attempt.averaged.tolist() == [2.0] * SHARE
            assert side.transport.sent(A, Lane.AVERAGES) == part(2.0)
            assert side.transport.sent(A, Lane.CONTRIBUTIONS) is None

    async def test_what_comes_as_the_attempt_ends_completes_nothing(self) -> None:
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

    async def test_nothing_of_a_vectors_size_is_kept_when_it_is_let_go(self) -> None:
        side = Side()
        async with side.running():
            await everything_but(side, (B, Lane.CONTRIBUTIONS))
        side.attempt.let_go()
        assert side.attempt.averaged.numel() == 0
        assert side.attempt.values._vector is None
        assert not side.attempt.values._pending
        assert not side.attempt.values._encoded


class TestTrouble:
    """Each is said of whom it is, and the lanes of the others go on."""

    async def others_go_on(self, side: Side) -> None:
        before = len(side.reports.troubles)
        await side.comes(B, Lane.AVERAGES, part(20.0))
        assert side.attempt.averaged[SHARE : 2 * SHARE].tolist() == [20.0] * SHARE
        assert len(side.reports.troubles) == before

    @pytest.mark.parametrize(
        ("lane", "said", "stream", "hostile"),
        [
            (Lane.AVERAGES, part(3.0)[:-1], SaidBefore, False),
            (Lane.AVERAGES, part(3.0)[:-1], Broken, False),
            (Lane.CONTRIBUTIONS, b"", SaidBefore, False),
            (Lane.AVERAGES, part(3.0, index=1), Silent, True),
            (Lane.CONTRIBUTIONS, part(3.0, index=1), Silent, True),
            (Lane.AVERAGES, part_frame(0) + b"\xff" * 4 * SHARE, Silent, True),
            (Lane.PASSED_ON, part(3.0, index=1), Silent, True),
            (Lane.PASSED_ON, part_frame(0) + b"\xff" * 4 * SHARE, Silent, True),
        ],
        ids=[
            "ends early",
            "breaks",
            "ends at once",
            "another part of its share",
            "another part of ours",
            "no numbers",
            "another part of who is gone",
            "no numbers of who is gone",
        ],
    )
    async def test_a_lane_that_is_not_what_it_should_be(
        self, lane: Lane, said: bytes, stream: Callable[[bytes, str], Stream], hostile: bool
    ) -> None:
        side = Side()
        async with side.running():
            side.attempt.take_from(C, [C])
            reducer = 2 if lane is Lane.PASSED_ON else 0
            inbound = await side.comes(C, lane, said, stream=stream, reducer=reducer)
            assert inbound.finished.is_set()
            assert side.reports.troubles == [(C, hostile)]
            await self.others_go_on(side)
        assert side.reports.results == []

    async def test_a_contribution_that_is_no_numbers_is_its_senders(self) -> None:
        side = Side()
        async with side.running():
            await side.comes(C, Lane.CONTRIBUTIONS, part_frame(0) + b"\xff" * 4 * SHARE)
            await side.comes(B, Lane.CONTRIBUTIONS, part(2.0))
            assert side.reports.troubles == [(C, True)]
            await self.others_go_on(side)

    @pytest.mark.parametrize("lane", [Lane.CONTRIBUTIONS, Lane.AVERAGES])
    async def test_a_lane_that_was_opened_before(self, lane: Lane) -> None:
        side = Side()
        async with side.running():
            first = await side.comes(C, lane, b"")
            second = await side.comes(C, lane, part(3.0))
            assert second.finished.is_set()
            assert not first.finished.is_set()
            assert side.reports.troubles == [(C, True)]
            await self.others_go_on(side)

    @pytest.mark.parametrize(
        ("lane", "reducer"),
        [(Lane.CONTRIBUTIONS, 0), (Lane.PASSED_ON, 1), (Lane.AVERAGES, 1)],
        ids=["an auxiliary contributes nothing", "and passes nothing on", "and has one share"],
    )
    async def test_a_lane_that_is_not_due(self, lane: Lane, reducer: int) -> None:
        side = Side(group=with_auxiliary())
        async with side.running():
            inbound = await side.comes(AUX, lane, part(3.0), reducer=reducer)
            assert inbound.finished.is_set()
            assert side.reports.troubles == [(AUX, True)]
            await self.others_go_on(side)

    async def test_a_share_of_nobody_in_the_attempt(self) -> None:
        side = Side()
        async with side.running():
            await side.comes(C, Lane.PASSED_ON, part(3.0), reducer=3)
            assert side.reports.troubles == [(C, True)]

    async def test_an_auxiliary_needs_no_share_of_others(self) -> None:
        side = Side(AUX, with_auxiliary())
        async with side.running():
            await side.comes(A, Lane.PASSED_ON, part(3.0), reducer=1)
            assert side.reports.troubles == [(A, True)]

    async def test_a_lane_of_a_stranger_is_let_go_and_nobody_is_blamed(self) -> None:
        side = Side()
        async with side.running():
            for lane in (Lane.CONTRIBUTIONS, Lane.AVERAGES, Lane.PASSED_ON):
                assert (await side.comes(STRANGER, lane, part(3.0))).finished.is_set()
            assert side.reports.troubles == []
            await self.others_go_on(side)

    async def test_one_that_cannot_be_reached(self) -> None:
        side = Side(unreachable=[C])
        async with side.running():
            await side.comes(B, Lane.CONTRIBUTIONS, part(2.0))
            assert set(side.reports.troubles) == {(C, False)}
            assert side.transport.sent(B, Lane.CONTRIBUTIONS) == part(1.0)
            await self.others_go_on(side)


class TestPassingOn:
    """C is gone, and has sent its averages to some."""

    async def test_who_has_them_sends_the_same_bytes(self) -> None:
        side = Side()
        async with side.running():
            await everything_but(side, NOTHING)
            side.attempt.pass_on([C], [B])
            await wait_all_tasks_blocked()
            assert side.transport.sent(B, Lane.PASSED_ON, reducer=2) == part(30.0)
            assert side.transport.sent(C, Lane.PASSED_ON, reducer=2) is None

    async def test_its_own_share_is_passed_on_like_any_other(self) -> None:
        side = Side()
        async with side.running():
            await everything_but(side, NOTHING)
            side.attempt.pass_on([A, B], [C])
            await wait_all_tasks_blocked()
            assert side.transport.sent(C, Lane.PASSED_ON, reducer=0) == part(2.0)
            assert side.transport.sent(C, Lane.PASSED_ON, reducer=1) == part(20.0)

    async def test_who_lacks_them_takes_them_from_the_one_that_the_leader_named(self) -> None:
        side = Side()
        async with side.running():
            await everything_but(side, (C, Lane.AVERAGES))
            side.attempt.take_from(B, [C])
            lane = await side.comes(B, Lane.PASSED_ON, part(30.0), reducer=2)
            assert lane.finished.is_set()
            assert torch.equal(side.attempt.averaged, RESULT)
            assert len(side.reports.results) == 1
        assert side.reports.troubles == []

    async def test_its_digests_are_the_same_as_if_the_reducer_had_lived(self) -> None:
        digests = []
        for lane, peer_id, reducer in ((Lane.AVERAGES, C, 0), (Lane.PASSED_ON, B, 2)):
            side = Side()
            async with side.running():
                await everything_but(side, (C, Lane.AVERAGES))
                side.attempt.take_from(B, [C])
                await side.comes(peer_id, lane, part(30.0), reducer=reducer)
            digests += side.reports.results
        assert digests[0] == digests[1]

    async def test_the_source_may_hear_of_it_first(self) -> None:
        side = Side()
        async with side.running():
            await everything_but(side, (C, Lane.AVERAGES))
            await side.comes(B, Lane.PASSED_ON, part(30.0), reducer=2)
            assert side.reports.results == []
            side.attempt.take_from(B, [C])
            await wait_all_tasks_blocked()
            assert len(side.reports.results) == 1

    async def test_nothing_is_taken_from_anybody_else(self) -> None:
        """A liar would have this member hold another result than the others, and an honest one be blamed for it."""
        side = Side()
        async with side.running():
            await everything_but(side, (C, Lane.AVERAGES))
            side.attempt.averaged[2 * SHARE :] = -1.0
            side.attempt.take_from(B, [C])
            await side.comes(C, Lane.PASSED_ON, part(99.0), reducer=2)
            await side.comes(B, Lane.PASSED_ON, part(99.0), reducer=0)
            await side.comes(C, Lane.PASSED_ON, part(99.0), reducer=1)
            assert side.reports.results == []
            assert torch.equal(side.attempt.averaged[: 2 * SHARE], RESULT[: 2 * SHARE])
            assert side.attempt.averaged[2 * SHARE :].tolist() == [-1.0] * SHARE

    async def test_a_source_that_dies_on_the_way_is_followed_by_another(self) -> None:
        side = Side(group=roster([candidate(index, weight=1.0) for index in (0, 1, 2, 4)], [3] * 4))
        fourth = SIGNERS[4].peer_id
        side.attempt.take_from(B, [fourth])
        async with side.running():
            await side.comes(B, Lane.PASSED_ON, part(30.0, elements=3)[:-2], reducer=3, stream=Broken)
            assert side.reports.troubles == [(B, False)]
            side.attempt.take_from(C, [fourth])
            await side.comes(C, Lane.PASSED_ON, part(30.0, elements=3), reducer=3)
            assert side.attempt.averaged[9:].tolist() == [30.0] * 3

    @pytest.mark.parametrize("before", [0, FRAME_BYTES + 3], ids=["all of it", "the rest of it"])
    async def test_what_the_reducer_itself_still_sends_is_no_offence(self, before: int) -> None:
        """The leader cannot reach it, and this member can."""
        side, words = Side(), part(30.0)
        async with side.running():
            await everything_but(side, (C, Lane.AVERAGES))
            side.attempt.take_from(B, [C])
            slow = Slow(words, C)
            lane = InboundLane(slow, LaneHeader(GROUP, Lane.AVERAGES, NUMBER, 0, side.members))
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
            assert torch.equal(side.attempt.averaged, RESULT)

    async def test_the_reducer_may_be_faster_than_the_source(self) -> None:
        """A later leader may reach it again: what it sends is not refused before the share is whole."""
        side = Side()
        async with side.running():
            await everything_but(side, (C, Lane.AVERAGES))
            side.attempt.take_from(B, [C])
            await side.comes(C, Lane.AVERAGES, part(30.0))
            assert len(side.reports.results) == 1
            await side.comes(B, Lane.PASSED_ON, part(99.0), reducer=2)
            assert torch.equal(side.attempt.averaged, RESULT)

    async def test_a_result_that_is_whole_is_not_changed_any_more(self) -> None:
        """It may have come between this member's answer and what its leader made of it; its digests were told."""
        side = Side()
        async with side.running():
            await everything_but(side, NOTHING)
            side.attempt.take_from(B, [C])
            await side.comes(B, Lane.PASSED_ON, part(99.0), reducer=2)
            assert torch.equal(side.attempt.averaged, RESULT)
            assert len(side.reports.results) == 1
            side.attempt.pass_on([C], [B])
            await wait_all_tasks_blocked()
            assert side.transport.sent(B, Lane.PASSED_ON, reducer=2) == part(30.0)


class SaysNothing(Takes):
    """A lane on which nothing comes until it is aborted."""

    def __init__(self, _said: bytes, remote: str) -> None:
        super().__init__(remote)
        self._ended = threading.Event()

    def receive_into(self, buffer: memoryview) -> None:
        self._ended.wait()
        raise StreamBrokenError("this process dropped it")

    def abort(self) -> None:
        super().abort()
        self._ended.set()


class TestTakingDirectLanes:
    """A direct lane carries contributions and then averages; a stream, one of them."""

    async def others_go_on(self, side: Side) -> None:
        before = len(side.reports.troubles)
        await side.comes(B, Lane.AVERAGES, part(20.0))
        assert side.attempt.averaged[SHARE : 2 * SHARE].tolist() == [20.0] * SHARE
        assert len(side.reports.troubles) == before

    async def test_a_stream_of_parts_is_not_due(self) -> None:
        side = Side()
        async with side.running():
            inbound = await side.comes(C, Lane.PARTS, part(3.0))
            assert inbound.finished.is_set()
            assert side.reports.troubles == [(C, True)]
            assert side.reports.bytes == 0
            await self.others_go_on(side)

    @pytest.mark.parametrize("kind", [Lane.CONTRIBUTIONS, Lane.AVERAGES])
    async def test_a_direct_lane_of_one_of_them_is_not_due(self, kind: Lane) -> None:
        side = Side()
        async with side.running():
            inbound = await side.comes(C, kind, b"", stream=SaysNothing)
            assert inbound.finished.is_set()
            assert side.reports.troubles == [(C, True)]
            await self.others_go_on(side)

    @pytest.mark.parametrize("kind", [Lane.CONTRIBUTIONS, Lane.AVERAGES])
    async def test_one_that_is_heard_of_after_the_stream_that_takes_its_place_is_let_go(
        self, kind: Lane
    ) -> None:
        """It broke earlier, and its sender has begun again; the stream goes on."""
        side, words = Side(), part(30.0)
        async with side.running():
            slow = Slow(words, C)
            stream = InboundLane(slow, LaneHeader(GROUP, kind, NUMBER, 0, side.members))
            side.lanes.arrived(stream)
            await wait_all_tasks_blocked()
            late = await side.comes(C, Lane.PARTS, b"", stream=SaysNothing)
            assert late.finished.is_set()
            assert not late.clean
            assert not stream.finished.is_set()
            slow.allow(len(words))
            await wait_all_tasks_blocked()
            assert stream.finished.is_set()
            assert side.attempt.bytes_received == len(words)
            await self.others_go_on(side)
            assert (await side.comes(C, Lane.PARTS, b"", stream=SaysNothing)).finished.is_set()
            assert side.reports.troubles == []
            assert side.reports.broken == []

    async def test_a_second_one_of_a_member_is_not_due(self) -> None:
        side = Side()
        async with side.running():
            first = await side.comes(C, Lane.PARTS, b"", stream=SaysNothing)
            assert side.reports.troubles == []
            second = await side.comes(C, Lane.PARTS, b"", stream=SaysNothing)
            assert second.finished.is_set()
            assert not first.finished.is_set()
            assert side.reports.troubles == [(C, True)]
            await self.others_go_on(side)
        assert first.finished.is_set()


class TestKeepingDirectLanes:
    """A lane on which everything was sent is kept although its attempt has ended, and is owed an acknowledgement."""

    async def kept(self, side: Side, monkeypatch: pytest.MonkeyPatch, *, in_the_thread: bool) -> list[Takes]:
        """The lanes of an attempt that ended when all was sent, before the task heard of it or after."""
        lanes: list[Takes] = []
        kept: list[DirectLane] = []
        averaged = trio.Event()

        async def open_lane(peer_id: str, *, addresses: Sequence[str] = (), timeout: float) -> DirectLane:
            await trio.lowlevel.checkpoint()
            lanes.append(Takes(peer_id))
            return lanes[-1]

        async def run(work: Any, *, stop: Callable[[], None], name: str) -> None:
            use, header = work.args
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
        monkeypatch.setattr("p2pavg.allreduce.attempt.in_own_thread", run)
        async with side.running():
            await side.comes(B, Lane.CONTRIBUTIONS, part(2.0))
            await side.comes(C, Lane.CONTRIBUTIONS, part(3.0))
            averaged.set()
            await wait_all_tasks_blocked()
            sent = [lane for lane in lanes if lane.bytes_sent]
            assert [lane.remote for lane in sent] == [B]
        assert [lane.remote for lane in lanes if lane.aborted] == [C]
        return [lane for lane in sent if lane in kept and not lane.aborted]

    async def test_an_attempt_that_ends_while_it_waits_for_the_word(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = await self.kept(Side(), monkeypatch, in_the_thread=False)
        assert [lane.awaited for lane in found] == [True]

    async def test_an_attempt_that_ends_before_it_has_heard_that_all_is_sent(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The transport waits for the word: ``keep_lane`` says so."""
        assert len(await self.kept(Side(), monkeypatch, in_the_thread=True)) == 1
