"""The conformance suite of the transports over the network in memory, on a virtual clock."""

from contextlib import AbstractAsyncContextManager
from itertools import count
from typing import Any

import pytest
from trio.testing import MockClock

from p2pavg.net.transport import Transport
from p2pavg.testing import MemoryNetwork
from p2pavg.testing.transport_conformance import CHECKS, Check
from p2pavg_dht import Ed25519Signer


class InMemory:
    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._signers = (Ed25519Signer(number.to_bytes(32, "big")) for number in count(1))

    def transport(self, *, listening: bool = True) -> AbstractAsyncContextManager[Transport]:
        return self._network.transport(next(self._signers), inbound="accepted" if listening else "refused")

    def unused_address(self) -> str:
        return f"/ip4/10.255.255.255/tcp/4001/p2p/{next(self._signers).peer_id}"


@pytest.mark.parametrize(
    "network",
    [
        pytest.param({"latency": (0.0, 0.0)}, id="no-latency"),
        pytest.param({"latency": (0.01, 0.05), "bandwidth": 12.5e6}, id="100-Mbit"),
    ],
)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(
    check: Check,
    network: dict[str, Any],
    autojump_clock: MockClock,
) -> None:
    await check(InMemory(MemoryNetwork(**network)))
