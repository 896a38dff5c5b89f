"""An auxiliary's subscribers hear of the rounds that it helps."""

from __future__ import annotations

import logging

import pytest
import torch
import trio

import p2pavg
from p2pavg.peer.auxiliary import assist
from p2pavg.telemetry.events import AnyEvent, RoundEnded, RoundKind
from p2pavg.testing import MemoryNetwork, simulated_peers
from tests.simulation.swarm import LAN, config


async def test_a_round_that_was_helped_is_an_event_of_the_peer_and_one_line_of_its_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "p2pavg")
    heard: list[AnyEvent] = []
    how = config(group_size=2, match_timeout=60.0)
    results: list[p2pavg.RoundResult] = []

    async def average(peer: p2pavg.Peer) -> None:
        async with peer.averager(how) as averager:
            for _ in range(3):
                averager.accumulate([torch.ones(4000)], weight=2.0)
                results.append(await averager.step(wait=None))
                await trio.sleep(10.0)

    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as (helper, *others):
        helper.subscribe(heard.append)
        async with trio.open_nursery() as outer:
            outer.start_soon(assist, helper, how.run_id)
            async with trio.open_nursery() as nursery:
                for peer in others:
                    nursery.start_soon(average, peer)
            outer.cancel_scope.cancel()
    helped = {
        result.group_id for result in results if isinstance(result, p2pavg.Success) and result.auxiliaries
    }
    assert helped
    for group_id in helped:  # each of the three members logs it
        lines = [each for each in caplog.records if getattr(each, "round", None) == group_id[:8]]
        assert len(lines) == 3
        assert not [
            each for each in caplog.records if each not in lines and group_id[:8] in each.getMessage()
        ]
    ended = [event for event in heard if isinstance(event, RoundEnded)]
    assert {event.group_id for event in ended} == helped
    for event in ended:
        assert event.result is RoundKind.SUCCESS
        assert event.auxiliaries == (helper.id,)
        assert len(event.members) == 3
        assert (event.samples, event.own_samples) == (4.0, 0.0)
        assert sum(event.received.values()) > 0
        assert event.duration < 60.0


async def test_peers_that_change_their_rules_are_helped_again() -> None:
    """The same tensors under another rule: the peers look for their groups at another place."""
    helped: list[bool] = []

    async def average(peer: p2pavg.Peer) -> None:
        for robust in (None, "centered_clip:1.0:3"):
            how = config(group_size=2, match_timeout=60.0, robust=robust)
            async with peer.averager(how) as averager:
                for _ in range(6):
                    averager.accumulate([torch.ones(4000)], weight=2.0)
                    result = await averager.step(wait=None)
                    helped.append(isinstance(result, p2pavg.Success) and bool(result.auxiliaries))
                    await trio.sleep(10.0)

    async with (
        simulated_peers(MemoryNetwork(latency=LAN), 3) as (helper, *others),
        trio.open_nursery() as outer,
    ):
        outer.start_soon(assist, helper, config().run_id)
        async with trio.open_nursery() as nursery:
            for peer in others:
                nursery.start_soon(average, peer)
        outer.cancel_scope.cancel()
    assert any(helped[:12])
    assert any(helped[12:]), "the helper waited where the peers had looked before"
