"""Simulated peers: the matchmaker, exchange and record node of production, on a network in memory and virtual time."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

import trio
from trio.testing import MockClock

from p2pavg.base.threads.processor import never_waits
from p2pavg.net.addresses import with_peer_id
from p2pavg.net.nat.reach.reachability import Kind
from p2pavg.peer.peer import Peer, peer_over
from p2pavg.testing.faults import FaultPlan
from p2pavg.testing.memory import DIRECT_KINDS, MemoryNetwork, MemoryTransport
from p2pavg_dht import Ed25519Signer

T = TypeVar("T")

EPOCH = 1_800_000_000.0


def simulated_clock() -> float:
    """Return wall-clock seconds that follow trio's clock."""
    return EPOCH + trio.current_time()


def simulated_signer(index: int) -> Ed25519Signer:
    """Return the identity of the ``index``-th peer, the same in every run."""
    return Ed25519Signer(sha256(b"p2pavg simulated peer %d" % index).digest())


async def run_on_loop(function: Callable[..., T], *args: object) -> T:
    """Run a function on the event loop. During a wait for a worker thread, the virtual clock would jump."""
    await trio.lowlevel.checkpoint()
    return function(*args)


@asynccontextmanager
async def simulated_peer(
    network: MemoryNetwork, index: int, *, bootstrap: Sequence[str] = (), kinds: Sequence[Kind] = ()
) -> AsyncIterator[Peer]:
    """Open the ``index``-th peer of a network, as :func:`p2pavg.open_peer` opens one on the real network.

    Args:
        kinds: the reachability of each peer of the network; empty if all can be dialled. Those that cannot have two of
            the others as relays.
    """
    signer = simulated_signer(index)
    kind = kinds[index] if kinds else Kind.UNKNOWN
    async with (
        network.transport(signer, kind=kind, relays=_relays_of(index, kinds)) as transport,
        peer_over(
            transport,
            signer,
            bootstrap=bootstrap,
            wall_clock=simulated_clock,
            run_in_thread=run_on_loop,
            processor_wait=never_waits,
            on_milestone=partial(network.reached, signer.peer_id),
        ) as peer,
    ):
        yield peer


def _relays_of(index: int, kinds: Sequence[Kind]) -> list[str]:
    """Return the two relays of a peer. Peers take turns at those that can be dialled."""
    able = [other for other, kind in enumerate(kinds) if kind in DIRECT_KINDS]
    chosen = [able[(index + turn) % len(able)] for turn in range(2)] if able else []
    return [simulated_signer(other).peer_id for other in dict.fromkeys(chosen)]


def simulate(main: Callable[[], Awaitable[T]], *, seed: int = 0) -> T:
    """Run ``main`` on a virtual clock, with an order of tasks that follows from the seed.

    With ``PYTHONHASHSEED`` set, two runs of the same seed are equal to the last message.
    """
    # trio has no public function for this; hypothesis-trio does the same.
    scheduler: Any = importlib.import_module("trio._core._run")
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
    state = scheduler._r.getstate()
    scheduler._r.seed(seed)
    try:
        return trio.run(main, clock=MockClock(autojump_threshold=0))
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before
        scheduler._r.setstate(state)


async def run_peers(
    network: MemoryNetwork,
    count: int,
    work: Callable[[Peer, int], Awaitable[T]],
    *,
    plan: FaultPlan | None = None,
    kinds: Sequence[Kind] = (),
    join_every: float = 0.0,
) -> dict[int, T]:
    """Run ``work(peer, index)`` on ``count`` peers at once, while a plan causes faults.

    The plan begins when all peers have joined. The work of a peer that crashes is cancelled. ``kinds`` has the
    reachability of each peer; the first one must be dialable. One peer joins every ``join_every`` virtual seconds.

    Returns:
        The result of each peer's work by index, without the peers that crashed.
    """
    results: dict[int, T] = {}
    all_joined = trio.Event()
    signers = [simulated_signer(index) for index in range(count)]

    async def live(index: int, bootstrap: Sequence[str], done: trio.Event) -> None:
        with trio.CancelScope() as scope:
            async with (
                simulated_peer(network, index, bootstrap=bootstrap, kinds=kinds) as peer,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(cancel_when_crashed, peer, scope)
                done.set()
                await all_joined.wait()
                results[index] = await work(peer, index)
                working.discard(index)
                if not working:
                    finished.set()
                # Other peers may need this one as a bootstrap peer, or for their records.
                await finished.wait()
                nursery.cancel_scope.cancel()
        working.discard(index)
        if not working:
            finished.set()

    working = set(range(count))
    finished = trio.Event()
    async with trio.open_nursery() as nursery:
        first = trio.Event()
        nursery.start_soon(live, 0, (), first)
        await first.wait()
        addresses = with_peer_id([network.location_of(signers[0].peer_id)], signers[0].peer_id)
        others = [trio.Event() for _ in range(1, count)]
        for index, done in enumerate(others, 1):
            nursery.start_soon(live, index, addresses, done)
            if join_every:
                await trio.sleep(join_every)
        for done in others:
            await done.wait()
        if plan is not None:
            nursery.start_soon(plan.carry_out, network, [signer.peer_id for signer in signers])
        all_joined.set()
        await finished.wait()
        nursery.cancel_scope.cancel()
    return results


async def cancel_when_crashed(peer: Peer, scope: trio.CancelScope) -> None:
    """Cancel the work of a simulated peer when the peer has crashed."""
    transport = peer.context.transport
    assert isinstance(transport, MemoryTransport)
    await transport.crashed.wait()
    scope.cancel()


@asynccontextmanager
async def simulated_peers(
    network: MemoryNetwork, count: int, *, first: int = 0, kinds: Sequence[Kind] = ()
) -> AsyncIterator[list[Peer]]:
    """Open ``count`` peers. The first one is the bootstrap peer of all others. They leave all at once.

    Args:
        kinds: the reachability of each peer by index; the first one must be dialable. Empty if all can be dialled.
    """
    peers: dict[int, Peer] = {}

    async def live(
        index: int,
        bootstrap: Sequence[str],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,  # type: ignore[name-defined]
    ) -> None:
        async with simulated_peer(network, index, bootstrap=bootstrap, kinds=kinds) as peer:
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
