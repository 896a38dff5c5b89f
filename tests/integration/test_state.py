"""States are fetched from real peers: over direct lanes where there are any, and over streams otherwise."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import p2pavg
from p2pavg.net.libp2p.transport import Libp2pTransport
from p2pavg.peer import Peer
from p2pavg.state.service import stored_key
from p2pavg.state.sessions import Sessions, open_sessions
from tests.integration.hosts import LOOPBACK, eventually, watched
from tests.simulation.test_state import check_fetch, fetch_of
from tests.unit.state.blobs import Blob, Held

RUN = "states"


@asynccontextmanager
async def company(donors: int, *blobs: Blob) -> AsyncIterator[tuple[list[Peer], list[Held], Sessions]]:
    async with AsyncExitStack() as stack:
        peers: list[Peer] = []
        for _ in range(donors + 1):
            bootstrap = peers[0].addresses if peers else []
            peers.append(
                await stack.enter_async_context(p2pavg.open_peer(listen=[LOOPBACK], bootstrap=bootstrap))
            )
        held = [Held(*blobs) for _ in range(donors)]
        for peer, holdings in zip(peers[1:], held, strict=True):
            peer.state.join(RUN, None, holdings)
        sessions = await stack.enter_async_context(
            open_sessions(peers[0].context, peers[0].lobby, key=stored_key(RUN, None))
        )
        yield peers, held, sessions


def lanes_of(peer: Peer) -> list[object]:
    transport = peer.context.transport
    assert isinstance(transport, Libp2pTransport)
    return [*transport._lanes.lanes]


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
        sessions.close()
        for peer in peers[1:]:
            transport = peer.context.transport
            assert isinstance(transport, Libp2pTransport)
            await eventually(lambda transport=transport: len(transport._lanes._idle._lanes) == 1)  # type: ignore[misc]
        assert peers[0].lobby.tickets == {}
        assert len(lanes_of(peers[0])) == 2
