"""The conformance suite of the transports over the network in memory, on a virtual clock."""

from contextlib import AbstractAsyncContextManager
from itertools import count
from typing import Any

import pytest
from trio.testing import MockClock

from p2pavg.net.nat.reach.reachability import Kind
from p2pavg.net.transport import Transport
from p2pavg.testing import MemoryNetwork
from p2pavg_dht import Ed25519Signer
from tests.transport_conformance import CHECKS, Check


class InMemory:
    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._signers = (Ed25519Signer(number.to_bytes(32, "big")) for number in count(1))

    def transport(self, *, listening: bool = True) -> AbstractAsyncContextManager[Transport]:
        return self._network.transport(next(self._signers), inbound="accepted" if listening else "refused")

    def unused_address(self) -> str:
        return f"/ip4/10.255.255.255/tcp/4001/p2p/{next(self._signers).peer_id}"


class BehindARelay(InMemory):
    """Peers that can only be relayed. The relay is in the network as well."""

    def __init__(self, network: MemoryNetwork, relay: str) -> None:
        super().__init__(network)
        self._relay = relay

    def transport(self, *, listening: bool = True) -> AbstractAsyncContextManager[Transport]:
        relays = [self._relay] if listening else []
        return self._network.transport(next(self._signers), kind=Kind.RELAYED, relays=relays)


@pytest.mark.parametrize(
    "network",
    [
        pytest.param({"latency": (0.0, 0.0)}, id="no-latency"),
        pytest.param({"latency": (0.01, 0.05), "bandwidth": 12.5e6}, id="100-Mbit"),
    ],
)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check: Check, network: dict[str, Any], autojump_clock: MockClock) -> None:
    await check(InMemory(MemoryNetwork(**network)))


# A relay's address leads to whichever peer it is asked for.
DIRECT_ONLY = {"another_peer_at_the_address_is_refused"}
RELAYED = [check for check in CHECKS if check.__name__ not in DIRECT_ONLY]


@pytest.mark.parametrize("check", RELAYED, ids=lambda check: check.__name__)
async def test_conformance_of_relayed_connections(check: Check, autojump_clock: MockClock) -> None:
    network = MemoryNetwork(latency=(0.01, 0.05), bandwidth=12.5e6, relaying=None)
    async with network.transport(Ed25519Signer(b"\xff" * 32)) as relay:
        await check(BehindARelay(network, relay.peer_id))
