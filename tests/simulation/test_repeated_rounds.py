"""Later rounds of peers that have finished one together: their records of the last round are still read."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

import p2pavg
from p2pavg.group.candidate import Candidate
from p2pavg.matchmaking.attempt_runner import AttemptRunner
from p2pavg.matchmaking.messages import JoinRequest
from p2pavg.peer.peer import Peer
from p2pavg.testing import MemoryNetwork, simulated_peers
from tests.simulation.swarm import LAN, config, values

PEERS = 4
ROUNDS = 5
PAUSE = 2.0


async def test_no_peer_is_asked_about_the_last_round(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = list[float]()  # of each question: seconds by which the asked attempt began before the own one
    original = AttemptRunner._ask

    async def ask(runner: AttemptRunner, asks: Candidate, message: JoinRequest) -> None:
        older.append(message.me.deadline - asks.deadline)
        await original(runner, asks, message)

    monkeypatch.setattr(AttemptRunner, "_ask", ask)

    async def live(peer: Peer) -> None:
        async with peer.averager(config(group_size=PEERS)) as averager:
            for number in range(ROUNDS):
                await trio.sleep_until(PAUSE * (number + 1))
                averager.accumulate([values(number)])
                assert isinstance(await averager.step(wait=None), p2pavg.Success)

    async with simulated_peers(MemoryNetwork(latency=LAN), PEERS) as peers, trio.open_nursery() as nursery:
        for peer in peers:
            nursery.start_soon(live, peer)
    assert len(older) >= ROUNDS * (PEERS - 1)
    assert max(older) < PAUSE / 2
