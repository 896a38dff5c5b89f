"""Peers that become ready while many others are in groups already, whose records are still there."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

import p2pavg
from p2pavg.group.candidate import Candidate
from p2pavg.matchmaking.attempt_runner import AttemptRunner
from p2pavg.matchmaking.messages import JoinRequest
from p2pavg.peer.peer import Peer
from p2pavg.testing import MemoryNetwork, run_peers
from tests.simulation.swarm import config, values
from tests.simulation.test_reuse import name

GROUP_SIZE = 4
GROUPS = 3
LAST = GROUP_SIZE * GROUPS


async def test_a_late_peer_asks_one_member_of_each_group(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others have a group, and it has seen their records. It need not ask each of them."""
    asked: list[str] = []
    ask = AttemptRunner._ask

    async def noted(self: AttemptRunner, candidate: Candidate, message: JoinRequest) -> None:
        if self._me.peer_id == name(LAST):
            asked.append(candidate.peer_id)
        await ask(self, candidate, message)

    monkeypatch.setattr(AttemptRunner, "_ask", noted)
    groups: list[frozenset[str]] = []
    last_is_over = trio.Event()

    async def live(peer: Peer, index: int) -> None:
        how = config(group_size=GROUP_SIZE, min_group_size=2, match_timeout=0.9)
        async with peer.averager(how) as averager:
            averager.accumulate([values(index)])
            await trio.sleep(0.2 * (index // GROUP_SIZE))  # each group's members are ready together
            result = await averager.step(wait=None)
            if index == LAST:
                assert not isinstance(result, p2pavg.Success)
                last_is_over.set()
            else:
                assert isinstance(result, p2pavg.Success)
                groups.append(frozenset(result.peers))
            await last_is_over.wait()

    await run_peers(MemoryNetwork(latency=(0.002, 0.006)), LAST + 1, live)
    assert {len(group) for group in groups} == {GROUP_SIZE}
    first_of = [next(group for group in groups if peer in group) for peer in asked[:GROUPS]]
    assert len(set(first_of)) == GROUPS, "the first ones that it asks are of different groups"
