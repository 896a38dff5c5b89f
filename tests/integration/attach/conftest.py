"""A peer of this process that other connections attach to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

import p2pavg
from p2pavg.attached import share_peer
from p2pavg.base.threads.trio_thread import TrioThread
from p2pavg.telemetry.events import AnyEvent
from tests.integration.optim.company import LISTEN


@pytest.fixture
def peer_events() -> list[AnyEvent]:
    """Return the events of the peer that :func:`shared` serves, which grow as they happen."""
    return []


@pytest.fixture
def shared(tmp_path: Path, peer_events: list[AnyEvent]) -> Iterator[str]:
    """Serve a peer in a thread; return the address at which to attach."""
    path = f"unix:{tmp_path / 'peer.sock'}"

    async def live(give: Callable[[str], None], stop: trio.Event) -> None:
        async with p2pavg.open_peer(listen=LISTEN, port_mapping=False) as peer, share_peer(peer, path):
            peer.subscribe(peer_events.append)
            give(path)
            await stop.wait()

    thread: TrioThread[str] = TrioThread(live, name="shared-peer")
    yield thread.start()
    thread.stop()
