"""Rounds over direct lanes, in one process: their threads, and lanes that break."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch
import trio

import p2pavg
from p2pavg.allreduce.carry import ResumeState
from p2pavg.allreduce.movers.reuse import START, ResumeMark
from p2pavg.base.threads.workers import in_own_thread
from p2pavg.consensus.votes import Vote
from p2pavg.net.limits.rate import RateLimit
from p2pavg.peer.peer import Peer
from p2pavg.round.control import VoteStreams
from p2pavg.testing import MemoryNetwork, simulated_peers
from p2pavg.testing.simulation import simulated_signer
from tests.unit.allreduce.laid import Laid, PairLane, lanes_among

ELEMENTS = 40_000
SIZE = 3
PARTS_OF = 1_024


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: PARTS_OF)


@pytest.fixture(params=["threads", "loop"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What moves the parts: threads, as with large vectors, or the event loop, as with small ones."""
    monkeypatch.setattr(
        "p2pavg.allreduce.movers.lane_driver.SMALL_ELEMENTS",
        0 if request.param == "threads" else 2 * ELEMENTS,
    )
    return str(request.param)


def values(index: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(index))


def mean(members: Sequence[int]) -> torch.Tensor:
    return torch.stack([values(index) for index in members]).double().mean(0).float()


def lane_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name in ("p2pavg-send", "p2pavg-receive")]


class Rounds:
    """Some peers with their averagers, and the lanes among them."""

    def __init__(self, peers: list[Peer], averagers: list[p2pavg.DecentralizedAverager], laid: Laid) -> None:
        self.peers = peers
        self.averagers = averagers
        self.laid = laid

    async def play(self) -> list[p2pavg.RoundResult]:
        """Run one step of each averager."""
        results: list[Any] = [None] * len(self.averagers)

        async def step(index: int) -> None:
            averager = self.averagers[index]
            averager.accumulate([values(index)])
            results[index] = await averager.step(wait=None)

        with trio.fail_after(120.0):
            async with trio.open_nursery() as nursery:
                for index in range(len(self.averagers)):
                    nursery.start_soon(step, index)
        return results

    def id(self, index: int) -> str:
        return self.peers[index].id


async def over_lanes(
    test: Callable[[Rounds], Any],
    *,
    size: int = SIZE,
    prepare: Callable[[PairLane, str], Any] = lambda _lane, _sender: None,
    **settings: Any,
) -> None:
    given: dict[str, Any] = {"run_id": "lanes", "group_size": size, "min_group_size": size}
    how = p2pavg.AveragingConfig(**given | {"exchange_timeout": 60.0} | settings)
    async with (
        simulated_peers(MemoryNetwork(), size) as peers,
        lanes_among(peers, prepare) as laid,
        AsyncExitStack() as stack,
    ):
        averagers = [await stack.enter_async_context(peer.averager(how)) for peer in peers]
        await test(Rounds(peers, averagers, laid))


def check(results: Sequence[p2pavg.RoundResult], members: Sequence[int]) -> list[p2pavg.Success]:
    found = [result for result in results if isinstance(result, p2pavg.Success)]
    assert len(found) == len(members), results
    first = found[0].averaged
    assert isinstance(first, list)
    for result in found:
        assert isinstance(result.averaged, list)
        assert torch.equal(result.averaged[0], first[0]), "they differ"
    error = (first[0] - mean(members)).norm() / mean(members).norm()
    assert error < 0.015
    return found


def streamed(result: p2pavg.Success) -> tuple[str, ...]:
    """Return the members whose parts went over streams."""
    return tuple(peer_id for peer_id, path in result.paths.items() if path == "stream")


@pytest.mark.parametrize("compression", ["blockwise8", None])
async def test_all_members_end_with_the_same_mean_and_no_thread_is_left(
    compression: str | None, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    async def note(*args: Any, name: str, **kwargs: Any) -> None:
        started.append(name)
        await in_own_thread(*args, name=name, **kwargs)

    for end in ("sender", "receiver"):
        monkeypatch.setattr(f"p2pavg.allreduce.{end}.in_own_thread", note)

    async def test(rounds: Rounds) -> None:
        for result in check(await rounds.play(), range(SIZE)):
            assert set(result.paths.values()) == {"lane"}
            assert len(result.paths) == SIZE - 1
            assert result.lost == {}
            assert result.bytes_sent == result.bytes_received > ELEMENTS
        assert lane_threads() == []
        assert len(started) == (2 * SIZE * (SIZE - 1) if driver == "threads" else 0)
        assert sum(lane.acknowledgements for lane in rounds.laid.ends) == SIZE * (SIZE - 1)

    await over_lanes(test, compression=compression)


@pytest.mark.usefixtures("driver")
async def test_lanes_stay_for_the_next_round() -> None:
    async def test(rounds: Rounds) -> None:
        check(await rounds.play(), range(SIZE))
        opened = len(rounds.laid.opened)
        check(await rounds.play(), range(SIZE))
        assert len(rounds.laid.opened) == opened == SIZE * (SIZE - 1), "one for each direction of each pair"

    await over_lanes(test)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(("sender", "at"), [(0, 0), (2, 3_000), (0, 80_000)])
async def test_a_broken_lane_costs_no_member_its_round(sender: int, at: int) -> None:
    """The sender begins again on a stream, and parts that had come are not counted twice.

    It breaks at once, among the contributions or among the averages.
    """
    broken: list[str] = []

    def prepare(lane: PairLane, who: str) -> None:
        if who == simulated_signer(sender).peer_id and not broken:
            broken.append(who)
            lane.breaks_at = at

    async def test(rounds: Rounds) -> None:
        for result in check(await rounds.play(), range(SIZE)):
            assert result.lost == {}
            if streamed(result):
                seen.append(streamed(result))
        for result in check(await rounds.play(), range(SIZE)):
            assert streamed(result) == (), "the next round has direct lanes again"

    seen: list[tuple[str, ...]] = []
    await over_lanes(test, prepare=prepare, compression=None)
    assert broken
    assert len(seen) == 2, "both ends say that parts went over a stream"


async def test_a_member_that_cannot_be_reached_directly_gets_its_parts_over_streams() -> None:
    async def test(rounds: Rounds) -> None:
        rounds.laid.cannot |= {(rounds.id(0), rounds.id(2)), (rounds.id(2), rounds.id(0))}
        results = check(await rounds.play(), range(SIZE))
        assert [streamed(result) for result in results] == [(rounds.id(2),), (), (rounds.id(0),)]

    await over_lanes(test)


async def test_a_liar_on_a_lane_is_excluded_by_name(driver: str) -> None:
    async def test(rounds: Rounds) -> None:
        results = await rounds.play()
        liar = rounds.id(1)
        honest = [result for index, result in enumerate(results) if index != 1]
        for result in check(honest, [0, 2]):
            assert set(result.lost) == {liar}
            assert "came where part" in result.lost[liar]

    def prepare(lane: PairLane, who: str) -> None:
        writes = itertools.count()

        def lie(data: bytes) -> bytes:
            # A thread writes each frame alone. The event loop writes a header and contributions, and then averages.
            begins_a_part = len(data) == 4 if driver == "threads" else next(writes) > 0
            return (99).to_bytes(4, "big") + data[4:] if begins_a_part else data

        if who == simulated_signer(1).peer_id:
            lane.change = lie

    await over_lanes(test, prepare=prepare, min_group_size=2)


async def test_a_new_attempt_goes_on_where_the_contributions_were(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[ResumeMark] = []
    check_begin = ResumeState.check_begin

    def note(self: ResumeState, contributor: str, mark: ResumeMark) -> None:
        places.append(mark)
        check_begin(self, contributor, mark)

    async def test(rounds: Rounds) -> None:
        results = await rounds.play()
        liar = rounds.id(1)
        honest = [result for index, result in enumerate(results) if index != 1]
        for result in check(honest, [0, 2, 3]):
            assert set(result.lost) == {liar}
            # A lane that its receiver ended with the first attempt may be taken once more, and a stream in its place.
            assert "lane" in result.paths.values()
        assert any(mark > START for mark in places)
        assert lane_threads() == []

    def prepare(lane: PairLane, who: str) -> None:
        frames = itertools.count()

        def lie(data: bytes) -> bytes:
            return (99).to_bytes(4, "big") if len(data) == 4 and next(frames) > 7 else data

        if who == simulated_signer(1).peer_id:
            lane.change = lie

    monkeypatch.setattr(ResumeState, "check_begin", note)
    await over_lanes(test, size=4, prepare=prepare, min_group_size=2)


async def test_a_step_that_is_abandoned_leaves_no_thread_behind() -> None:
    """Its lanes wait for the rest of a part that never comes."""

    async def test(rounds: Rounds) -> None:
        with trio.move_on_after(1.0):
            await rounds.play()
        for averager in rounds.averagers:
            await averager.aclose()
        with trio.fail_after(5.0):
            while lane_threads():
                await trio.sleep(0.01)

    class Stuck(RateLimit):
        @property
        def unlimited(self) -> bool:
            return False

        def delay(self, count: int) -> float:
            return 3600.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("p2pavg.peer.contributing.RateLimit", Stuck)
        await over_lanes(test)


async def test_every_byte_of_a_part_asks_the_limit_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, list[int]] = {}

    class Counting(RateLimit):
        @property
        def unlimited(self) -> bool:
            return False

        def delay(self, count: int) -> float:
            asked.setdefault(id(self), []).append(count)
            return 0.0

    monkeypatch.setattr("p2pavg.peer.contributing.RateLimit", Counting)
    monkeypatch.setattr("p2pavg.net.limits.rate.MAX_PIECE_BYTES", 256)

    async def test(rounds: Rounds) -> None:
        found = check(await rounds.play(), range(SIZE))
        payload = sum(result.bytes_sent + result.bytes_received for result in found)
        counted = sum(map(sum, asked.values()))
        assert payload * 0.99 < counted <= payload
        assert max(map(max, asked.values())) <= 256

    await over_lanes(test)


async def test_ends_of_a_lane_that_broke_ask_whether_the_other_is_still_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a member dies before its stream of votes is open, only the broken lane shows it."""
    asked: set[tuple[str, str]] = set()
    broken: list[tuple[str, str]] = []
    ask = VoteStreams.ask

    async def note(control: VoteStreams, position: int) -> Vote | None:
        asked.add((control._transport.peer_id, control._roster.members[position].peer_id))
        return await ask(control, position)

    def prepare(lane: PairLane, who: str) -> None:
        if not broken:
            broken.append((who, lane.remote))
            lane.breaks_at = 3_000

    async def test(rounds: Rounds) -> None:
        check(await rounds.play(), range(SIZE))
        ((sender, receiver),) = broken
        # The receiver need not ask if the stream that replaces the lane reaches it before the end of the lane.
        assert {(sender, receiver)} <= asked <= {(sender, receiver), (receiver, sender)}

    monkeypatch.setattr(VoteStreams, "ask", note)
    # A busy machine may not hear a member for this long, and then it asks as well.
    monkeypatch.setattr("p2pavg.round.control.MISSING_SECONDS", 1e3)
    await over_lanes(test, prepare=prepare)
