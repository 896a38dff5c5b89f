"""Real peers in simulated surroundings: the matchmaker, exchange and record node of production on virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import TypeVar

import trio

from p2pavg.peer import Peer, peer_over
from p2pavg.testing.memory import MemoryNetwork
from p2pavg_dht import Ed25519Signer

T = TypeVar("T")

EPOCH = 1_800_000_000.0


def simulated_clock() -> float:
    """Wall-clock seconds that go with trio's clock."""
    return EPOCH + trio.current_time()


def simulated_signer(index: int) -> Ed25519Signer:
    """The identity of the ``index``-th peer, the same in every run."""
    return Ed25519Signer(sha256(b"p2pavg simulated peer %d" % index).digest())


async def run_on_loop(function: Callable[..., T], *args: object) -> T:
    """In the place of a worker thread: a virtual clock would jump while it waits for one."""
    await trio.lowlevel.checkpoint()
    return function(*args)


@asynccontextmanager
async def simulated_peer(
    network: MemoryNetwork, index: int, *, bootstrap: Sequence[str] = ()
) -> AsyncIterator[Peer]:
    """The ``index``-th peer of a network, as :func:`p2pavg.open_peer` makes one of the real network."""
    signer = simulated_signer(index)
    async with (
        network.transport(signer) as transport,
        peer_over(
            transport, signer, bootstrap=bootstrap, wall_clock=simulated_clock, run_in_thread=run_on_loop
        ) as peer,
    ):
        yield peer


@asynccontextmanager
async def simulated_peers(network: MemoryNetwork, count: int, *, first: int = 0) -> AsyncIterator[list[Peer]]:
    """So many peers; the first is everybody's bootstrap peer. They leave all at once."""
    peers: dict[int, Peer] = {}

    async def live(
        index: int,
        bootstrap: Sequence[str],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,  # type: ignore[name-defined]
    ) -> None:
        async with simulated_peer(network, index, bootstrap=bootstrap) as peer:
            peers[index] = peer
            task_status.started()
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        await nursery.start(live, first, ())
        async with trio.open_nursery() as joining:
            for index in range(first + 1, first + count):
                joining.start_soon(nursery.start, live, index, peers[first].addresses)
        yield [peers[index] for index in sorted(peers)]
        nursery.cancel_scope.cancel()
