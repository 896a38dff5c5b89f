"""Liars among real peers on a simulated network: with a robust rule, they cannot move the result far."""

from __future__ import annotations

import pytest
import torch
import trio

import p2pavg
from p2pavg.allreduce.robust import combine
from p2pavg.base.limits import MAX_WEIGHT
from p2pavg.group.aggregation import Median, RobustRule, TrimmedMean, resolve_rule
from p2pavg.peer.peer import Peer
from p2pavg.testing import MemoryNetwork, run_peers
from p2pavg.testing.simulation import simulated_signer
from tests.simulation.swarm import LAN, Swarm, config, same_bits, step_all, tensors_of, values

ELEMENTS = 2_000
SIZE = 7
LIARS = (1, 4)
HONEST = [index for index in range(SIZE) if index not in LIARS]
LIE = 1e6
RULES = pytest.mark.parametrize("rule", ["trimmed_mean:0.3", "median", "centered_clip:1.0:3"])


@pytest.fixture(autouse=True)
def many_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 64)


def sent(index: int) -> torch.Tensor:
    """Return the values that a peer contributes: those of a liar are a million times too large."""
    return values(index, ELEMENTS) * (LIE if index in LIARS else 1.0)


async def average(helpers: int = 0, **changes: object) -> Swarm:
    """Run one step of seven peers, of which two lie."""
    return await step_all(SIZE, config(group_size=SIZE, **changes), sent, helpers=helpers)


def honest_rows() -> torch.Tensor:
    return torch.stack([sent(index) for index in HONEST])


def result_of(swarm: Swarm) -> torch.Tensor:
    found = swarm.successes()
    assert len(found) == SIZE
    assert same_bits(found)
    assert all(len(result.peers) == SIZE for result in found)
    return tensors_of(found[0])[0]


def check_bound(found: torch.Tensor, rule: RobustRule | None) -> None:
    """Check the bound that the rule's documentation states."""
    honest = honest_rows()
    if isinstance(rule, TrimmedMean | Median):
        assert bool((found >= honest.amin(0)).all())
        assert bool((found <= honest.amax(0)).all())
    # Of a part, centered clipping leaves the median by 3 tau at most, and tau is at most the largest honest distance.
    furthest = (honest - honest.mean(0)).norm(dim=1).max()
    assert (found - honest.mean(0)).norm() < 6 * furthest


@RULES
async def test_two_of_seven_liars_cannot_move_the_result_far(rule: str) -> None:
    """Each share has the rule's result of all contributions to its parts, whichever member reduced it."""
    swarm = await average(robust=rule)
    found, chosen = result_of(swarm), resolve_rule(rule)
    assert chosen is not None
    check_bound(found, chosen)
    assert (found - honest_rows().mean(0)).abs().max() < 6.0
    bounds = sorted({result.share for result in swarm.successes()})
    assert len(bounds) == SIZE
    for start, stop in bounds:
        for first in range(start, stop, 64):
            part = slice(first, min(first + 64, stop))
            out = torch.empty(part.stop - part.start)
            combine(chosen, [sent(index)[part] for index in range(SIZE)], [1.0] * SIZE, out)
            assert torch.equal(found[part], out)


@RULES
async def test_a_weight_that_is_a_lie_moves_no_result_of_an_open_run(rule: str) -> None:
    """No ``max_weight`` is set: one peer of four claims the largest weight that a message can have."""

    async def step(peer: Peer, index: int) -> p2pavg.RoundResult:
        async with peer.averager(config(group_size=4, robust=rule)) as averager:
            averager.accumulate(
                [torch.full((100,), -6.9 if index == 0 else 1.0)], weight=MAX_WEIGHT if index == 0 else 8.0
            )
            return await averager.step(wait=None)

    for result in (await run_peers(MemoryNetwork(latency=LAN), 4, step)).values():
        assert isinstance(result, p2pavg.Success)
        assert len(result.peers) == 4
        torch.testing.assert_close(tensors_of(result)[0], torch.ones(100))


async def test_an_auxiliary_reduces_by_the_runs_rule() -> None:
    swarm = await average(helpers=1, robust="median")
    found = result_of(swarm)
    assert [len(result.auxiliaries) for result in swarm.successes()] == [1] * SIZE
    torch.testing.assert_close(found, torch.stack([sent(index) for index in range(SIZE)]).median(0).values)


async def test_peers_with_different_rules_never_meet_and_are_reported() -> None:
    async def step(peer: Peer, index: int) -> p2pavg.RoundResult:
        how = config(group_size=3, robust="median" if index else "trimmed_mean:0.1")
        async with peer.averager(how) as averager:
            averager.accumulate([values(index)])
            result = await averager.step(wait=None)
            if index:
                await trio.sleep(1.0)  # its record can be read by then
            return result

    results = await run_peers(MemoryNetwork(latency=LAN), 3, step)
    lone = results.pop(0)
    assert isinstance(lone, p2pavg.NoPeers)
    assert "2 peers of this run average by median, you by trimmed_mean:0.1" in lone.reason
    for result in results.values():
        assert isinstance(result, p2pavg.Success)
        assert set(result.peers) == {simulated_signer(index).peer_id for index in (1, 2)}


async def test_an_auxiliary_leaves_out_rules_that_it_does_not_know(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer of another version has a rule of which this one knows nothing."""
    monkeypatch.setattr(Median, "text", property(lambda _self: "another_rule:1"))
    swarm = await average(helpers=1, robust=Median())
    assert [result.auxiliaries for result in swarm.successes()] == [()] * SIZE
    assert "combine by 'another_rule:1'" in caplog.text
