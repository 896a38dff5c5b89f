"""Peers at the end of their run, on virtual time: all have the last update, or learn that the run has ended."""

from __future__ import annotations

import logging

import pytest
import torch
from trio.testing import MockClock

import p2pavg
from p2pavg.optim import AveragedOptimizer, RunState
from p2pavg.testing import MemoryNetwork
from p2pavg.testing.loops import SimulatedLoop, run_loops
from tests.simulation.ends import TOLD_SECONDS, UPDATES, EndSetting, Incident, Plan, draw_setting, play_ends


def plan(*incidents: Incident, updates: int = UPDATES) -> Plan:
    return Plan(delay=0.0, batch_seconds=0.2, incidents=incidents, updates=updates)


@pytest.mark.parametrize(("kind", "local"), [("nap", True), ("stop", False)])
def test_a_peer_that_was_away_at_the_last_updates_gets_them(kind: str, local: bool) -> None:
    away = Incident(kind, UPDATES - 2, seconds=20.0)
    ends = play_ends(EndSetting(1, local, (plan(), plan(), plan(away))))
    assert ends.findings() == []
    assert {end.epoch for end in ends.peers} == {UPDATES}
    assert not any(end.told for end in ends.peers)


def test_a_peer_that_comes_too_late_is_told() -> None:
    """The others stay for their ``match_timeout`` of 4 s, and then are gone."""
    away = Incident("nap", UPDATES - 2, seconds=40.0)
    ends = play_ends(EndSetting(1, False, (plan(), plan(), plan(away)), match_timeout=4.0))
    late = ends.peers[2]
    assert ends.findings() == []
    assert f"ended at update {UPDATES}" in late.told
    assert late.last_at <= late.woke_at + TOLD_SECONDS


def test_a_peer_that_leaves_earlier_ends_nothing_for_the_others() -> None:
    ends = play_ends(EndSetting(1, False, (plan(), plan(), plan(updates=3))))
    assert ends.findings() == []
    assert [end.epoch for end in ends.peers] == [UPDATES, UPDATES, 3]
    first = ends.peers[2]
    assert first.ended_at is not None
    assert first.ended_at < first.last_at + 5.0, "the others have its last update, so it waits for none"


def test_without_anything_in_the_way_no_peer_stays() -> None:
    ends = play_ends(EndSetting(1, True, (plan(), plan(), plan())))
    assert ends.findings() == []
    for end in ends.peers:
        assert end.ended_at is not None
        assert end.ended_at < end.last_at + 5.0


@pytest.mark.parametrize("seed", [483, 748, 854])
def test_runs_with_naps_stops_and_kills_end_well(seed: int) -> None:
    """``scripts/faults starts --virtual`` plays more of them. It found 483, in which peers waited for ever, and 748,
    in which peers that had slept were more than those that had gone on, and went on without them. 854 is one in which
    the first mend of these held two peers up for ever.
    """
    assert play_ends(draw_setting(seed)).findings() == []


async def test_peers_whose_loops_have_ended_are_not_waited_for(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Their programs hold the averagers open and call nothing: they give no state, and a joiner is told so."""

    def train(loop: SimulatedLoop) -> tuple[float, str]:
        joins = loop.index == 2
        loop.sleep(60.0 if joins else 0.0)
        model = torch.nn.Linear(2, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = AveragedOptimizer(
            inner, loop.averager, target_batch_size=32, state=RunState(model), sync_timeout=600.0
        )
        longest, said = 0.0, ""
        for _ in range(40):
            if not joins and optimizer.epoch == 3:
                break
            loop.sleep(0.2)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            began = autojump_clock.current_time()
            report = optimizer.step(samples=8)
            longest = max(longest, autojump_clock.current_time() - began)
            said = report.catching_up or said
            if said:
                break
        if not joins:
            loop.sleep(120.0)
        return longest, said

    config = p2pavg.AveragingConfig(run_id="open")
    with caplog.at_level(logging.WARNING, logger="p2pavg"):
        found = await run_loops(MemoryNetwork(seed=1), 3, train, config=config)
    longest, said = found[2]
    assert longest < 60.0
    assert "computed nothing for long" in said
    assert "computed nothing for long" in caplog.text
