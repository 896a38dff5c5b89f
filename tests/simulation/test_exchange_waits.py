"""A caller that waits for an exchange hears for whom, and how much that member owes."""

from __future__ import annotations

import logging
from typing import NoReturn

import pytest
import trio

import p2pavg
from p2pavg.base.errors import UnreachableError
from p2pavg.base.result import EXCHANGES
from p2pavg.net.transport import Transport
from p2pavg.peer.peer import Peer
from p2pavg.testing import At, Fault, FaultPlan, MemoryNetwork, Throttle, run_peers
from tests.simulation.swarm import LAN, config, play_round, successes, values


async def test_the_member_that_is_waited_for_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Peer 1 has a twenty-fifth of the others' bandwidth."""
    how = config(group_size=3, exchange_timeout=120.0)
    seen: list[p2pavg.InProgress] = []

    async def average(peer: Peer, index: int) -> p2pavg.RoundResult:
        async with peer.averager(how) as averager:
            averager.accumulate([values(index, 100_000)])
            if index == 0:
                result = await averager.step(wait=5.0)
                assert isinstance(result, p2pavg.InProgress)
                seen.append(result)
            return await averager.step(wait=None)

    plan = FaultPlan([Fault(Throttle(1, bandwidth=4e4), At(0.0))])
    network = MemoryNetwork(latency=LAN, bandwidth=1e6)
    with trio.fail_after(600.0):
        results = await run_peers(network, 3, average, plan=plan)
    assert all(isinstance(result, p2pavg.Success) for result in results.values())
    [progress] = seen
    slow = next(peer_id for peer_id in results[0].peers if peer_id in progress.waits_for)  # type: ignore[union-attr]
    assert progress.reason == EXCHANGES
    assert f"waiting for parts of {slow} (" in progress.waits_for
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    said = [text for text in warned if text.startswith("the round in run 'sim' takes longer than 10 s: ")]
    assert said, warned
    assert all("waiting for" in text for text in said)


async def test_lanes_that_never_come_about_cost_no_member_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the first round needs more lanes than can be made in time. Its parts go over streams then."""

    async def search(*_: object, timeout: float, **__: object) -> NoReturn:
        await trio.sleep(timeout)
        raise UnreachableError("no direct lane in time")

    monkeypatch.setattr(Transport, "open_lane", search)

    with trio.fail_after(600.0):
        found = await play_round([config()] * 4, elements=1_000)
    for result in successes(found):
        assert len(result.peers) == 4
        assert result.lost == {}
        assert set(result.paths.values()) == {"stream"}
