"""States are fetched from real peers: over direct lanes where there are any, and over streams otherwise."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
import trio

import p2pavg
from p2pavg.base.errors import UnreachableError
from p2pavg.net.libp2p.transport import Libp2pTransport
from p2pavg.net.limits.rate import RateLimit
from p2pavg.net.transport import DirectLane
from p2pavg.peer.peer import Peer
from p2pavg.state.donor import serving
from p2pavg.state.donor.service import stored_key
from p2pavg.state.donor.serving import Offered
from p2pavg.state.joiner.answers import RequestOwner
from p2pavg.state.joiner.sessions import Sessions, open_sessions
from p2pavg.testing import LocalSwarm
from tests.integration.hosts import LOOPBACK, eventually, watched
from tests.integration.state_work import donate_or_join
from tests.simulation.test_state import check_fetch, fetch_of, when_sent
from tests.unit.state.blobs import KIND, Blob, Held

pytestmark = pytest.mark.processes

RUN = "states"
KEY = stored_key(RUN, None)
UNLIMITED = RateLimit(None)


@asynccontextmanager
async def company(
    donors: int, *blobs: Blob, upload: RateLimit = UNLIMITED, download: RateLimit = UNLIMITED
) -> AsyncIterator[tuple[list[Peer], list[Held], Sessions]]:
    async with AsyncExitStack() as stack:
        peers: list[Peer] = []
        for _ in range(donors + 1):
            bootstrap = peers[0].addresses if peers else []
            peers.append(
                await stack.enter_async_context(p2pavg.open_peer(listen=[LOOPBACK], bootstrap=bootstrap))
            )
        held = [Held(*blobs) for _ in range(donors)]
        for peer, holdings in zip(peers[1:], held, strict=True):
            peer.state.join(RUN, None, Offered(holdings, upload))
        sessions = await stack.enter_async_context(
            open_sessions(peers[0].context, peers[0].lobby, key=KEY, download=download)
        )
        yield peers, held, sessions


def transport_of(peer: Peer) -> Libp2pTransport:
    assert isinstance(peer.context.transport, Libp2pTransport)
    return peer.context.transport


def idle_lanes(peers: Sequence[Peer]) -> list[int]:
    """Return the number of direct lanes that each peer keeps for another use."""
    return [len(transport_of(peer)._lanes._idle._lanes) for peer in peers]


def state_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("p2pavg-state")]


@watched
async def test_pieces_go_over_direct_lanes_which_are_kept_for_rounds() -> None:
    first, second = Blob(0, 12, 1 << 20, 99), Blob(1, 3, 2 << 20)
    async with company(2, first, second) as (peers, _held, sessions):
        for blob in (first, second):
            await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
        used = [*sessions._open.values()]
        assert len(used) == 2
        assert all(session.over_lane for session in used)
        lanes = [session._lane.received for session in used if session._lane is not None]
        assert sum(lanes) > len(first.data) + len(second.data)
        assert sum(session._streamed for session in used) < 10_000
        assert peers[0].lobby.wants_lane(peers[1].id)
        sessions.close()
        await eventually(lambda: idle_lanes(peers[1:]) == [1, 1])
        await eventually(lambda: peers[0].lobby.tickets == {})
        await eventually(lambda: not state_threads())
        await check_fetch(fetch_of(sessions, second, peers[1:]), second)
        await eventually(lambda: idle_lanes(peers[1:]) == [0, 0])
        assert [len(transport_of(peer)._lanes.lanes) for peer in peers[1:]] == [1, 1], (
            "the kept lanes are used"
        )


@watched
async def test_bytes_over_direct_lanes_are_counted() -> None:
    blob, sent = Blob(0, 3, 1 << 20, 99), Counter[str]()
    async with company(1, blob) as (peers, [held], sessions):
        donor = peers[1].state
        donor.leave(RUN, None, held)
        donor.join(RUN, None, Offered(held, on_sent=lambda peer_id, count: sent.update({peer_id: count})))
        await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
        assert all(session.over_lane for session in sessions._open.values())
    assert len(blob.data) <= sent.pop(peers[0].id) < len(blob.data) + 10_000
    assert not sent


@watched
async def test_pieces_go_over_streams_where_no_lane_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> DirectLane:
        raise UnreachableError("there is a wall")

    monkeypatch.setattr(Libp2pTransport, "open_lane", refuse)
    blob = Blob(0, 6, 1 << 20, 99)
    async with company(2, blob) as (peers, _held, sessions):
        await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
        assert not any(session.over_lane for session in sessions._open.values())


@watched
async def test_sessions_whose_lanes_break_twice_are_replaced_by_one_over_a_stream() -> None:
    blob = Blob(0, 10, 1 << 20)
    async with company(1, blob) as (peers, held, sessions):

        def change(_index: int, piece: bytes) -> bytes:
            if len(held[0].sent) in (4, 8):
                for lane in transport_of(peers[1])._lanes.lanes:
                    lane.abort()
            return piece

        held[0].change = change
        await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
        (session,) = sessions._open.values()
        assert not session.over_lane
        assert not sessions.excluded


@watched
async def test_a_joiner_that_reads_nothing_from_its_lane_loses_its_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "STALL_SECONDS", 0.5)
    blob = Blob(0, 60, 1 << 20)
    async with company(1, blob) as (peers, held, sessions):
        session = await sessions.get(peers[1].id, peers[1].addresses)

        async def hold(_lane: DirectLane) -> bool:
            await trio.sleep_forever()
            return False

        peers[0].lobby.tickets[session._ticket] = (peers[1].id, hold)
        for first in range(0, 56, 8):
            session.ask_pieces(Mock(RequestOwner), KIND, blob.id, first, [1 << 20] * 8)
        await session.ended.wait()
        assert len(held[0].sent) < 40
        await eventually(lambda: not state_threads())
        await eventually(lambda: not peers[1].state._served)


@pytest.mark.parametrize("over_lanes", [True, False], ids=["direct lanes", "streams"])
@watched
async def test_rate_limits_are_kept(monkeypatch: pytest.MonkeyPatch, over_lanes: bool) -> None:
    """The clock of the limits counts the seconds that they ask for, however fast the machine is."""
    asked = {"up": 0.0, "down": 0.0}

    class Counting(RateLimit):
        def __init__(self, name: str) -> None:
            super().__init__(100.0, clock=lambda: 0.0)
            self._name = name

        def delay(self, count: int) -> float:
            asked[self._name] = max(asked[self._name], super().delay(count))
            return 0.0

    if not over_lanes:

        async def refuse(*_: object, **__: object) -> DirectLane:
            raise UnreachableError("there is a wall")

        monkeypatch.setattr(Libp2pTransport, "open_lane", refuse)
    blob = Blob(0, 10, 1 << 20)
    async with company(1, blob, upload=Counting("up"), download=Counting("down")) as (peers, _, sessions):
        await check_fetch(fetch_of(sessions, blob, peers[1:]), blob)
    least = 0.95 * len(blob.data) * 8 / 100e6
    assert asked["up"] >= least
    assert asked["down"] >= least


@watched
async def test_a_joiner_that_is_cancelled_leaves_no_thread_and_no_ticket() -> None:
    blob = Blob(0, 60, 1 << 20)
    upload = RateLimit(100.0)
    async with company(2, blob, upload=upload) as (peers, held, _sessions):
        with trio.CancelScope() as scope:
            when_sent(held[0], 5, lambda: token.run_sync_soon(scope.cancel))
            token = trio.lowlevel.current_trio_token()
            async with open_sessions(peers[0].context, peers[0].lobby, key=KEY) as sessions:
                await fetch_of(sessions, blob, peers[1:]).run()
        assert scope.cancelled_caught
        await eventually(lambda: peers[0].lobby.tickets == {})
        await eventually(lambda: not state_threads())
        await eventually(lambda: not any(peer.state._served for peer in peers))


def test_a_joiner_that_is_killed_fetches_little_again(tmp_path: Path) -> None:
    """The donor and the joiner are processes of their own. With one donor, no piece is asked for twice on purpose."""
    pieces = 256
    work = {"pieces": pieces, "mbps": 600.0}
    with LocalSwarm(donate_or_join, peers=1, arguments=work) as swarm:
        swarm.start()
        joiner = swarm.add(arguments={"folder": str(tmp_path)})
        done = 0
        while done < 0.4 * pieces * (1 << 20):
            done = joiner.event(30.0).get("done", 0)
        again = swarm.restart(joiner.index)
        reports = [*again.events(60.0)]
        assert reports[-1]["right"]
        assert reports[-1]["lanes"]
        found = next(event["done"] for event in reports if event.get("total"))
        assert found >= done
        swarm.processes[0].tell(ask=True)
        assert swarm.processes[0].event(30.0)["sent"] < 1.05 * pieces
