"""Which averages of its own rounds a peer passes on to latecomers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

import p2pavg
from p2pavg.base.result import RoundResult
from p2pavg.peer.peer import Peer
from p2pavg.round.exchange import ExchangeOutcome
from p2pavg.round.reports import Timing
from p2pavg.round.roles import Contributor
from p2pavg.state.average import LoggedAverage
from p2pavg.testing import MemoryNetwork, run_peers
from tests.simulation.swarm import LAN, config, values


class Log:
    """Stands for the states of a run, which take the averages that others can check."""

    def __init__(self) -> None:
        self.averages: list[LoggedAverage] = []

    def committed(self, average: LoggedAverage) -> None:
        self.averages.append(average)


@pytest.mark.parametrize(
    ("lost", "logged"), [(0, 1), (1, 0)], ids=["both signed", "one was lost before it signed"]
)
async def test_only_an_average_with_two_signatures_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, lost: int, logged: int
) -> None:
    """Latecomers ask for two signatures, and would take a donor with fewer for a liar."""
    logs = [Log(), Log()]
    signers: list[int] = []
    end = Contributor.end

    async def with_fewer_signatures(
        role: Contributor, outcome: ExchangeOutcome, timing: Timing
    ) -> RoundResult:
        signers.append(outcome.signers)
        return await end(role, replace(outcome, signers=outcome.signers - lost), timing)

    monkeypatch.setattr(Contributor, "end", with_fewer_signatures)

    async def average(peer: Peer, index: int) -> p2pavg.RoundResult:
        async with peer.averager(config(group_size=2)) as averager:
            averager._sharing = cast(Any, logs[index])
            averager.accumulate([values(index, 1000)])
            return await averager.step(wait=None)

    results = await run_peers(MemoryNetwork(latency=LAN), 2, average)
    assert [len(log.averages) for log in logs] == [logged, logged]
    for result in results.values():
        assert isinstance(result, p2pavg.Success)
        assert signers == [len(p2pavg.verify_certificate(result.certificate).signers)] * 2
