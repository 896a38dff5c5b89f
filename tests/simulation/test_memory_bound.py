"""Limits of the memory that one remote peer can occupy in a round: real members, real streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import trio

from p2pavg.allreduce.attempt import Attempt
from p2pavg.allreduce.messages import MAX_WAITING_PARTS, PROTOCOL, Lane, LaneHeader
from p2pavg.allreduce.movers.lobby import MAX_WAITING_LANES, RestingStreams, StreamRouter
from p2pavg.base.errors import StreamBrokenError, UnreachableError
from p2pavg.consensus.votes import MAX_VOTE_BYTES, Gather
from p2pavg.group.roster import Roster
from p2pavg.net.transport import Buffer, Stream, Transport, send_message
from p2pavg.peer.peer import Peer
from p2pavg.round.control import MAX_UNSENT, VoteStreams
from p2pavg.testing import MemoryNetwork
from p2pavg.testing.simulation import run_on_loop
from tests.simulation.liars import SIZE, check_exact, honest, instead, name, play
from tests.simulation.swarm import LAN
from tests.unit.group.samples import SIGNERS, candidate
from tests.unit.round.hearing import Hearing


@pytest.fixture(autouse=True)
def many_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 16)


SLOW = 3


def slow_down(peer: Peer, index: int) -> None:
    """Slow down one member's encoder."""
    if index == SLOW:
        peer.context = replace(peer.context, run_in_thread=take_time)


async def take_time(function: Callable[..., Any], *args: object) -> Any:
    await trio.sleep(0.05)
    return await run_on_loop(function, *args)


async def test_reducer_buffers_few_parts_of_a_fast_member(monkeypatch: pytest.MonkeyPatch) -> None:
    reducer, most = 2, Counter[str]()

    class Watched(Attempt):
        """Records the buffered parts of each member whenever a part is complete."""

        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            note_owes = self.signals.note_owes

            def note(peer_id: str, yes: bool) -> None:
                note_owes(peer_id, yes)
                held = sum(peer_id in parts for parts in self.values._inputs._waiting)
                most[peer_id] = max(most[peer_id], held)

            vars(self.signals)["note_owes"] = note

    instead(monkeypatch, "Attempt", reducer, Watched)
    check_exact(await play(prepare=slow_down), range(SIZE))
    ahead = [most[name(index)] for index in honest(SLOW) if index != reducer]
    assert min(ahead) >= MAX_WAITING_PARTS, "no member was ahead"
    assert max(most.values()) <= MAX_WAITING_PARTS + 1


async def open_and_wait(transport: Transport, to: str, header: LaneHeader, opened: list[Stream]) -> None:
    """Open a lane without sending on it, and wait until the other end closes it."""
    try:
        stream = await transport.open_stream(to, PROTOCOL, timeout=5.0)
        await send_message(stream, header.encode())
        opened.append(stream)
        await stream.receive_some(1)
    except (UnreachableError, StreamBrokenError):
        pass
    else:
        await stream.reset()


@pytest.mark.parametrize("spread", [False, True], ids=["one attempt", "many attempts"])
async def test_few_lanes_of_a_peer_wait_for_future_attempts(spread: bool) -> None:
    seen: list[tuple[int, int]] = []

    async def intrude(stranger: Peer, group_id: bytes, peers: Sequence[Peer]) -> None:
        transport = stranger.context.transport
        opened: list[Stream] = []
        group = peers[0].lobby.groups[group_id]
        async with trio.open_nursery() as nursery:
            for index in range(100):
                header = LaneHeader(group_id, Lane.AVERAGES, 1000 + index * spread)
                nursery.start_soon(open_and_wait, transport, peers[0].id, header, opened)
            while True:
                await trio.sleep(0.002)
                if len(opened) == 100:
                    ahead = [lanes for number, lanes in group._attempts.items() if number >= 1000]
                    seen.append((len(ahead), sum(len(lanes._waiting) for lanes in ahead)))

    for result in check_exact(await play(prepare=slow_down, stranger=intrude), range(SIZE)):
        assert result.lost == {}
    attempts, waiting = max(seen)
    assert attempts == (MAX_WAITING_LANES if spread else 1)
    assert waiting == MAX_WAITING_LANES


@pytest.mark.parametrize("lane", [Lane.AVERAGES, Lane.CONTROL])
async def test_refused_lanes_leave_no_memory(lane: Lane) -> None:
    """This holds for any number of consecutive lanes of a peer."""
    seen: list[int] = []

    async def intrude(stranger: Peer, group_id: bytes, peers: Sequence[Peer]) -> None:
        transport = stranger.context.transport
        group = peers[0].lobby.groups[group_id]
        lanes = group.controls if lane is Lane.CONTROL else group.lanes(0)
        while True:
            await open_and_wait(transport, peers[0].id, LaneHeader(group_id, lane), [])
            seen.append(sum(waiting.stream.remote == stranger.id for waiting in lanes._waiting))

    check_exact(await play(prepare=slow_down, stranger=intrude), range(SIZE))
    assert len(seen) > 100
    assert max(seen) <= 1


# ---------------------------------------------------------------------- votes


class Counting(Stream):
    """Sends the given messages, and counts the requests."""

    def __init__(self, remote: str, said: bytes) -> None:
        self.remote = remote
        self.said = said
        self.asked: list[int] = []

    async def send_all(self, data: Buffer) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int) -> bytes:
        await trio.lowlevel.checkpoint()
        self.asked.append(max_bytes)
        chunk, self.said = self.said[:max_bytes], self.said[max_bytes:]
        return chunk

    async def aclose(self) -> None:
        pass

    async def reset(self) -> None:
        pass


ROSTER = Roster(members=tuple(candidate(index) for index in range(3)), shares=(1, 1, 1), proposal=0)


def control(transport: Transport, hears: Hearing) -> VoteStreams:
    return VoteStreams(
        transport=transport,
        roster=ROSTER,
        group=StreamRouter().expect(ROSTER.group_id),
        resting=RestingStreams(),
        short=False,
        hears=hears,
        part_bytes=1024,
        max_silence=10.0,
    )


async def test_member_that_reads_no_votes_is_lost_after_few_votes() -> None:
    hears, network = Hearing(), MemoryNetwork(latency=LAN)
    async with network.transport(SIGNERS[0]) as transport:
        speaking = control(transport, hears)
        for ballot in range(MAX_UNSENT):
            speaking.tell(1, Gather(ballot))
        assert hears.lost_members == []
        for ballot in range(1000):
            speaking.tell(1, Gather(ballot))
        assert len(speaking._lines[1].unsent) == MAX_UNSENT
        assert {(position, hostile) for position, _, hostile in hears.lost_members} == {(1, False)}
        assert "it no longer takes votes" in hears.lost_members[0][1]


@pytest.mark.parametrize("length", [MAX_VOTE_BYTES + 1, 2**32 - 1])
async def test_a_length_above_the_limit_allocates_nothing(length: int) -> None:
    hears, network = Hearing(), MemoryNetwork(latency=LAN)
    async with network.transport(SIGNERS[0]) as transport:
        stream = Counting(candidate(1).peer_id, length.to_bytes(4, "big") + bytes(100))
        await control(transport, hears)._talk(1, stream)
    assert sum(stream.asked) == 4
    assert [(position, hostile) for position, _, hostile in hears.lost_members] == [(1, True)]
    assert f"a message of {length} bytes was announced" in hears.lost_members[0][1]


async def test_a_length_within_the_limit_reserves_nothing_before_it_arrives() -> None:
    hears, network = Hearing(), MemoryNetwork(latency=LAN)
    async with network.transport(SIGNERS[0]) as transport:
        stream = Counting(candidate(1).peer_id, MAX_VOTE_BYTES.to_bytes(4, "big") + bytes(10))
        await control(transport, hears)._talk(1, stream)
    assert max(stream.asked) <= MAX_VOTE_BYTES
    assert [position for position, _, _ in hears.lost_members] == [1]
