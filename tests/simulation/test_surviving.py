"""Loss of members during a round, with real peers on a simulated network: the others' results, with each topology."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

import p2pavg
from p2pavg.testing import (
    After,
    At,
    Crash,
    Fault,
    MemoryNetwork,
    Milestone,
    Partition,
    Stop,
    Throttle,
    simulate,
)
from tests.simulation.swarm import LAN, check_one_result, config, ids, play_round, play_rounds, successes

ELEMENTS = 40_000
BUTTERFLY = [config(group_size=3)] * 3
STAR = [config(group_size=4, topology="star", bandwidth=rate) for rate in (100.0, 100.0, 1000.0, 500.0)]
"""Member 2 is elected, and reduces everything."""
SITES = [config(group_size=6, topology=p2pavg.Hierarchical(site), audit="off") for site in "abaabb"]
MEMBERS = [(BUTTERFLY, 0), (BUTTERFLY, 2), (STAR, 0), (STAR, 1), (STAR, 2), (SITES, 0), (SITES, 4)]
AVERAGING_SECONDS = {id(BUTTERFLY): 0.3, id(STAR): 0.7, id(SITES): 0.3}
"""Seconds after which members of a group send averages."""
each_member = pytest.mark.parametrize(
    ("hows", "member"),
    MEMBERS,
    ids=[
        *("leader", "follower", "leader of a star", "contributor of a star", "reducer of a star"),
        *("leader of sites", "of the other site"),
    ],
)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 2_000)


def network() -> MemoryNetwork:
    """Links on which an exchange takes from half a second, that of a butterfly, to a second, that of a star."""
    return MemoryNetwork(latency=(0.002, 0.006), bandwidth=5e5)


@each_member
@pytest.mark.parametrize("late", [False, True])
async def test_a_member_that_crashes_costs_its_own_contribution_only(
    hows: list[p2pavg.AveragingConfig], member: int, late: bool
) -> None:
    """Survivors end the same round with one result: without the victim, or with its whole contribution."""
    seconds = AVERAGING_SECONDS[id(hows)] if late else 0.0
    crash = Fault(Crash(member), After(Milestone.FORMED, seconds=seconds))
    found = await play_round(hows, network(), [crash], elements=ELEMENTS)
    for result in check_one_result(found.values(), ELEMENTS):
        assert set(result.peers) >= ids(*range(len(hows))) - ids(member)
        p2pavg.verify_certificate(result.certificate)
        if late and not ids(member) <= set(result.peers):  # otherwise the group was formed without it
            assert ids(member) <= result.lost.keys()


@each_member
async def test_a_silent_member_is_dropped_and_learns_it_later(
    hows: list[p2pavg.AveragingConfig], member: int
) -> None:
    """The others end within seconds. When it resumes, it learns that it was dropped, and keeps its contribution."""
    stop = Fault(Stop(member, seconds=20.0), After(Milestone.FORMED, seconds=0.1))
    patient = [replace(how, exchange_timeout=60.0) for how in hows]
    found = await play_round(patient, network(), [stop], elements=ELEMENTS)
    back = found.pop(member)
    assert isinstance(back, p2pavg.Failed)
    assert back.contribution_used is False
    assert "gave this peer up" in back.reason
    assert back.code is p2pavg.FailedCode.LEFT_OUT
    for result in check_one_result(found.values(), ELEMENTS):
        assert len(result.peers) == len(hows) - 1
        assert result.exchange_duration < (5.0 if hows is BUTTERFLY else 8.0)


@pytest.mark.parametrize(
    ("hows", "slow"),
    [(BUTTERFLY, 2), (STAR, 1), (SITES, 4)],
    ids=["follower", "contributor of a star", "of the other site"],
)
async def test_a_member_too_slow_for_the_round_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, hows: list[p2pavg.AveragingConfig], slow: int
) -> None:
    """It is never silent, but its contribution would take 20 s. (A leader cannot detect this of itself.)

    The leader of a star, and members of another site, see nothing of it.
    """
    large = 240_000
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 10_000)
    throttle = Fault(Throttle(slow, bandwidth=4e4), At(0.0))
    found = await play_round(hows, network(), [throttle], elements=large)
    assert isinstance(found.pop(slow), p2pavg.Failed)
    for result in check_one_result(found.values(), large):
        assert result.lost.keys() == ids(slow)
        assert result.exchange_duration < 18.0


async def test_no_member_is_lost_without_faults() -> None:
    """The last message of a member that has ended is read, even if it is slow."""
    slow = MemoryNetwork(latency=(0.01, 0.01), bandwidth=5e4)
    found = await play_rounds([config(group_size=5)] * 5, slow, rounds=6, elements=500, apart=0.0)
    for results in found.values():
        assert all(isinstance(result, p2pavg.Success) and not result.lost for result in results), results


async def test_a_slow_member_is_waited_for() -> None:
    """It has a twentieth of the others' bandwidth, so that a part takes longer than the shortest suspicious silence."""
    throttle = Fault(Throttle(1, bandwidth=5e4), At(0.0))
    hows = [config(group_size=3, exchange_timeout=120.0)] * 3
    found = await play_round(hows, MemoryNetwork(latency=LAN, bandwidth=1e6), [throttle], elements=50_000)
    for result in check_one_result(found.values(), 50_000):
        assert len(result.peers) == 3
        assert result.exchange_duration > 3.0


async def test_last_survivor_keeps_its_contribution() -> None:
    crashes = [Fault(Crash(index), After(Milestone.FORMED, of=3, seconds=0.05)) for index in range(3)]
    found = await play_round([config()] * 4, network(), crashes, elements=ELEMENTS, apart=0.0)
    [alone] = found.values()
    assert isinstance(alone, p2pavg.Failed)
    assert alone.code is p2pavg.FailedCode.PEERS_LOST
    assert alone.contribution_used is False


async def test_half_of_a_group_survives_the_loss_of_the_other_half() -> None:
    crashes = [Fault(Crash(index), After(Milestone.FORMED, of=3, seconds=0.05)) for index in range(2)]
    found = await play_round([config()] * 4, network(), crashes, elements=ELEMENTS)
    assert [len(result.peers) for result in check_one_result(found.values(), ELEMENTS)] == [2, 2]


async def test_one_of_two_separated_halves_continues_and_the_other_learns_it() -> None:
    split = Fault(Partition((2, 3), seconds=15.0), After(Milestone.FORMED, of=0, seconds=0.05))
    hows = [config(exchange_timeout=60.0)] * 4
    found = await play_round(hows, network(), [split], elements=ELEMENTS)
    check_one_result([found[0], found[1]], ELEMENTS)
    for index in (2, 3):
        assert isinstance(found[index], p2pavg.Failed), found[index]


@pytest.mark.parametrize("seed", range(0, 30, 10))
def test_member_lost_at_any_part_breaks_no_other(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A member crashes among many small parts: survivors succeed. ``scripts/faults simulate`` draws more moments."""
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 64)
    narrow = MemoryNetwork(seed=seed, latency=LAN, bandwidth=2e5)
    crash = Fault(Crash(0), After(Milestone.FORMED, of=0, seconds=0.004 * seed))
    hows = [config(min_group_size=3, exchange_timeout=5.0)] * 4
    successes(simulate(partial(play_round, hows, narrow, [crash], apart=0.0), seed=seed))
