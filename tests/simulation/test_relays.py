"""The relays of a peer behind a router: it finds another one when its only one is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast

import pytest
import trio

from p2pavg.base.limits import RETRY_SECONDS
from p2pavg.net.nat.reach.facts import Neighbour
from p2pavg.net.nat.reach.reachability import Kind
from p2pavg.net.nat.reach.watcher import Connecting, ReachWatcher
from p2pavg.net.nat.relay.limits import RelayLimits
from p2pavg.net.nat.relay.messages import PROTOCOL
from p2pavg.net.nat.relay.reservations import Reservations
from p2pavg.net.nat.relay.service import RelayService
from p2pavg.net.transport import Stream
from p2pavg.testing import MemoryNetwork, MemoryTransport
from p2pavg.testing.simulation import simulated_signer
from tests.simulation.swarm import LAN

FOUND_WITHIN = 30.0


class Public:
    """A public peer that may relay; at first it may not know that it can be dialled."""

    def __init__(self, transport: MemoryTransport) -> None:
        self.transport = transport
        self.asked = 0
        self.service = RelayService(transport, RelayLimits())
        transport.serve(PROTOCOL, self._serve)

    def knows_that_it_can_be_dialled(self, knows: bool) -> None:
        self.transport.kind = Kind.PUBLIC if knows else Kind.RELAYED

    async def _serve(self, stream: Stream) -> None:
        self.asked += 1
        await self.service.serve(stream)


class Inside:
    """A peer behind a router, which has dialled the public peers."""

    def __init__(self, transport: MemoryTransport, publics: list[Public]) -> None:
        self._transport = transport
        self._publics = publics
        self.reservations = Reservations(transport, cast(Connecting, self), cast(ReachWatcher, self))

    def relayed_by(self, relays: Sequence[str], circuits: Sequence[str]) -> None:
        """Stand for the watcher."""

    def dialled_addresses(self, peer_id: str) -> list[str]:
        return [f"/ip4/203.0.113.1/tcp/1/p2p/{peer_id}"]

    def neighbours(self) -> list[Neighbour]:
        ids = [public.transport.peer_id for public in self._publics]
        return [
            Neighbour(peer_id=peer_id, host=f"203.0.113.{number}", port=1)
            for number, peer_id in enumerate(ids)
            if self._transport.is_connected(peer_id)
        ]

    @property
    def peer_id(self) -> str:
        return self._transport.peer_id

    async def dial(self, public: Public) -> None:
        await self._transport.dial(public.transport.addresses[0], timeout=5.0)

    async def has(self, *relays: Public) -> None:
        """Wait until these are the relays of this peer."""
        wanted = {public.transport.peer_id for public in relays}
        while set(self.reservations.relays) != wanted:
            await trio.sleep(0.1)


@asynccontextmanager
async def meeting(network: MemoryNetwork) -> AsyncIterator[tuple[Inside, Public, Public]]:
    async with AsyncExitStack() as stack:
        kinds = (Kind.PUBLIC, Kind.PUBLIC, Kind.RELAYED)
        one, other, inside = [
            await stack.enter_async_context(network.transport(simulated_signer(index), kind=kind))
            for index, kind in enumerate(kinds)
        ]
        publics = [Public(one), Public(other)]
        peer = Inside(inside, publics)
        for public in publics:
            await peer.dial(public)
        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(peer.reservations.run)
        peer.reservations.want(True)
        yield peer, publics[0], publics[1]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("end", [MemoryNetwork.crash, MemoryNetwork.stop], ids=["killed", "silent"])
@pytest.mark.parametrize("after", [1.0, 55.0, 300.0])
async def test_a_peer_whose_only_relay_is_gone_has_another_one_within_30_s(
    end: Callable[[MemoryNetwork, str], None], after: float
) -> None:
    """The other public peer was asked before, when it did not know yet that it can be dialled."""
    network = MemoryNetwork(latency=LAN)
    async with meeting(network) as (inside, relay, other):
        other.knows_that_it_can_be_dialled(False)
        with trio.fail_after(FOUND_WITHIN):
            await inside.has(relay)
        other.knows_that_it_can_be_dialled(True)
        await trio.sleep(after)
        if after > 60.0:
            await inside.has(relay, other)
        end(network, relay.transport.peer_id)
        with trio.fail_after(FOUND_WITHIN):
            await inside.has(other)


async def test_a_relay_that_drops_a_peer_again_and_again_does_not_make_it_ask_the_others_each_time() -> None:
    network = MemoryNetwork(latency=LAN)
    async with meeting(network) as (inside, relay, other):
        other.knows_that_it_can_be_dialled(False)
        asked = other.asked
        for _ in range(20):
            await inside.has(relay)
            await trio.sleep(1.0)
            network.disconnect(inside.peer_id, relay.transport.peer_id)
            await inside.dial(relay)
        assert trio.current_time() < 2 * RETRY_SECONDS
        assert other.asked - asked <= 5
