"""Observers among real peers on a simulated network: their results and their kept contributions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import trio

import p2pavg
from p2pavg.group.participation import ByCapability, RandomFraction
from p2pavg.peer.auxiliary import assist
from p2pavg.peer.peer import Peer
from p2pavg.testing import (
    After,
    Crash,
    Delay,
    Fault,
    MemoryNetwork,
    Milestone,
    run_peers,
    simulate,
    simulated_peer,
)
from p2pavg.testing.simulation import simulated_signer
from tests.simulation.swarm import (
    ELEMENTS,
    LAN,
    check_one_result,
    config,
    ids,
    mean,
    play_round,
    same_bits,
    successes,
    tensors_of,
    values,
)


class TestObservers:
    @pytest.mark.parametrize(("contributor", "compression"), [(0, None), (2, "blockwise8")])
    async def test_all_members_hold_the_only_contribution(
        self, contributor: int, compression: str | None
    ) -> None:
        observers = {0, 1, 2} - {contributor}
        how = config(group_size=3, compression=compression)
        results = successes(await play_round([how] * 3, observers=observers))
        assert same_bits(results)
        [averaged] = tensors_of(results[0])
        if compression is None:
            assert torch.equal(averaged, values(contributor))
        else:
            torch.testing.assert_close(averaged, values(contributor), rtol=0.05, atol=0.05)
        for result in results:
            assert set(result.peers) == set(result.weights) == ids(contributor)
            assert result.total_weight == 1.0
            assert set(result.observers) == ids(*observers)
            assert result.group_id == results[0].group_id

    @pytest.mark.parametrize("weight", [0.0, 100.0], ids=["nothing", "something"])
    async def test_observers_are_not_in_the_average(self, weight: float) -> None:
        how = config(group_size=3)
        results = successes(await play_round([how] * 3, weights=[1.0, 2.0, weight], observers=[2]))
        assert same_bits(results)
        exact = mean([0, 1], ELEMENTS, [1.0, 2.0])
        error = float((tensors_of(results[0])[0].double() - exact).norm() / exact.norm())
        assert error < 1e-6
        for result in results:
            assert result.weights == {simulated_signer(0).peer_id: 1.0, simulated_signer(1).peer_id: 2.0}
            assert set(result.observers) == ids(2)

    @pytest.mark.parametrize("elements", [0, 2])
    async def test_vector_smaller_than_the_group(self, elements: int) -> None:
        hows = [config(compression="fp32")] * 4
        for result in successes(await play_round(hows, elements=elements, observers=[0, 2, 3])):
            assert torch.equal(tensors_of(result)[0], values(1, elements))

    async def test_compression_ratio_of_an_observer(self) -> None:
        how = config(group_size=3, compression="blockwise8")
        ratio = 4 * 100_000 / how.codec.encoded_nbytes(100_000)
        for result in successes(await play_round([how] * 3, elements=100_000, observers=[2])):
            assert 0.97 * ratio < result.compression_ratio <= ratio

    async def test_observing_needs_declared_tensors(self) -> None:
        async with simulated_peer(MemoryNetwork(latency=LAN), 0) as peer, peer.averager(config()) as averager:
            assert await averager.step(wait=None, observe=True) == p2pavg.NoPeers(
                reason="nothing is accumulated", code=p2pavg.NoPeersCode.NOTHING_ACCUMULATED
            )
            averager.declare([torch.ones(3)])
            nothing = await averager.step(wait=None)
            assert isinstance(nothing, p2pavg.NoPeers)
            assert nothing.reason == "nothing is accumulated"
            assert isinstance(await averager.step(wait=0, observe=True), p2pavg.InProgress)

    @pytest.mark.parametrize("rule", [None, RandomFraction(0.25)], ids=["observe", "rule"])
    async def test_auxiliary_helps_rounds_with_observers(self, rule: RandomFraction | None) -> None:
        """Auxiliaries help groups of any state and rule."""
        how = config(group_size=3, match_timeout=30.0, participation=rule)

        async def average(peer: Peer, index: int) -> p2pavg.RoundResult | None:
            if index == 3:
                with trio.move_on_after(80.0):
                    await assist(peer, how.run_id)
                return None
            async with peer.averager(how) as averager:
                result: p2pavg.RoundResult | None = None
                for number in range(2):  # the auxiliary finds the group while the first round runs
                    averager.accumulate([values(index)])
                    observes = rule is None and index > 0
                    result = await averager.step(wait=None, state=b"%d" % number, observe=observes)
                    await trio.sleep(30.0)
                return result

        results = await run_peers(MemoryNetwork(latency=LAN), 4, average)
        assert results.pop(3) is None
        for result in successes({index: result for index, result in results.items() if result is not None}):
            assert len(result.peers) == 1
            assert len(result.observers) == 2
            assert set(result.auxiliaries) == ids(3)
            [contributor] = result.peers
            index = [simulated_signer(each).peer_id for each in range(3)].index(contributor)
            assert torch.equal(tensors_of(result)[0], values(index))

    async def test_observers_alone_wait_for_a_contributor(self) -> None:
        how = config(group_size=3, match_timeout=5.0)

        async def average(peer: Peer, index: int) -> p2pavg.RoundResult:
            async with peer.averager(how) as averager:
                averager.declare([torch.empty(ELEMENTS)])
                if index == 2:
                    await trio.sleep(7.0)
                    averager.accumulate([values(index)])
                else:
                    waiting = await averager.step(wait=None, observe=True)
                    assert isinstance(waiting, p2pavg.InProgress)
                return await averager.step(wait=None, observe=index < 2)

        results = successes(await run_peers(MemoryNetwork(latency=LAN), 3, average))
        assert all(torch.equal(tensors_of(result)[0], values(2)) for result in results)

    async def test_contributor_may_observe_the_next_round(self) -> None:
        """A different one of three contributes in each round; the others keep their weights."""
        how = config(group_size=3)

        async def average(peer: Peer, index: int) -> list[p2pavg.RoundResult]:
            async with peer.averager(how) as averager:
                results = []
                for number in range(3):
                    averager.accumulate([values(index)])
                    step = await averager.step(wait=None, state=bytes([number]), observe=index != number)
                    results.append(step)
                assert averager.weight == 2.0 - index
                return results

        found = await run_peers(MemoryNetwork(latency=LAN), 3, average)
        for number in range(3):
            for result in successes({index: results[number] for index, results in found.items()}):
                assert result.weights == {simulated_signer(number).peer_id: number + 1.0}


class TestParticipation:
    async def test_half_of_four_contribute_and_the_others_keep_their_weight(self) -> None:
        rounds = 6
        how = config(participation=RandomFraction(0.5))

        async def average(peer: Peer, index: int) -> list[p2pavg.Success]:
            found: list[p2pavg.Success] = []
            async with peer.averager(how) as averager:
                for number in range(rounds):
                    averager.accumulate([values(index)])
                    before = averager.weight
                    result = await averager.step(wait=None, state=b"round %d" % number)
                    assert isinstance(result, p2pavg.Success), result
                    assert (peer.id in result.peers) != (peer.id in result.observers)
                    assert averager.weight == (before if peer.id in result.observers else 0.0)
                    assert result.weights.get(peer.id, before) == before
                    found.append(result)
            return found

        results = await run_peers(MemoryNetwork(latency=LAN), 4, average)
        indices = {simulated_signer(index).peer_id: index for index in range(4)}
        chosen = set()
        for number in range(rounds):
            of_all = [results[index][number] for index in range(4)]
            assert same_bits(of_all)
            assert {result.group_id for result in of_all} == {of_all[0].group_id}
            assert len(of_all[0].peers) == len(of_all[0].observers) == 2
            assert all(result.weights == of_all[0].weights for result in of_all)
            weights = dict(of_all[0].weights)
            exact = mean([indices[peer_id] for peer_id in weights], ELEMENTS, list(weights.values()))
            torch.testing.assert_close(tensors_of(of_all[0])[0], exact.float(), rtol=1e-5, atol=1e-6)
            chosen.add(frozenset(weights))
        assert len(chosen) > 1
        assert max(max(result.weights.values()) for result in results[0]) > 1.0, "a weight that has grown"

    async def test_only_tagged_peers_contribute(self) -> None:
        async def average(peer: Peer, index: int) -> p2pavg.RoundResult:
            tags = ("fast", "gpu") if index == 1 else ("fast",)
            how = config(group_size=3, participation=ByCapability(tags=("gpu",)), tags=tags)
            async with peer.averager(how) as averager:
                averager.accumulate([values(index)])
                result = await averager.step(wait=None)
                assert averager.weight == (0.0 if index == 1 else 1.0)
                return result

        results = successes(await run_peers(MemoryNetwork(latency=LAN), 3, average))
        assert all(torch.equal(tensors_of(result)[0], values(1)) for result in results)
        assert all(set(result.peers) == ids(1) for result in results)

    async def test_peers_with_different_rules_never_meet_and_are_reported(self) -> None:
        async def average(peer: Peer, index: int) -> p2pavg.RoundResult:
            rule = RandomFraction(0.5) if index else None
            async with peer.averager(config(group_size=3, participation=rule)) as averager:
                averager.accumulate([values(index)])
                result = await averager.step(wait=None)
                if index:
                    await trio.sleep(1.0)  # its record can be read by then
                return result

        results = await run_peers(MemoryNetwork(latency=LAN), 3, average)
        lone = results.pop(0)
        assert isinstance(lone, p2pavg.NoPeers)
        assert "2 peers of this run average with another participation rule than yours" in lone.reason
        assert all(set(result.weights) | set(result.observers) == ids(1, 2) for result in successes(results))


class TestStates:
    async def test_only_peers_of_one_state_meet(self) -> None:
        how = config(group_size=3)

        async def average(peer: Peer, index: int) -> p2pavg.RoundResult:
            async with peer.averager(how) as averager:
                averager.accumulate([values(index)])
                return await averager.step(wait=None, state=b"8" if index == 1 else b"7")

        results = await run_peers(MemoryNetwork(latency=LAN), 3, average)
        assert isinstance(results.pop(1), p2pavg.NoPeers)
        assert all(set(result.peers) == ids(0, 2) for result in successes(results))

    async def test_peer_alone_in_its_state_later_meets_the_others(self) -> None:
        """Its contribution, which it could not average alone, counts in the next round, with its metrics."""
        how = config(group_size=2, match_timeout=3.0)

        async def average(peer: Peer, index: int) -> p2pavg.RoundResult:
            async with peer.averager(how) as averager:
                averager.accumulate([values(index)], metrics={"loss": 4.0 * index})
                if index:
                    assert isinstance(await averager.step(wait=None, state=b"behind"), p2pavg.NoPeers)
                else:
                    await trio.sleep(2.5)
                return await averager.step(wait=None, state=b"ahead")

        for result in successes(await run_peers(MemoryNetwork(latency=LAN), 2, average)):
            assert result.total_weight == 2.0
            assert result.metrics == {"loss": 2.0}


async def test_a_smaller_group_does_not_wait_for_more_in_this_round() -> None:
    async def average(peer: Peer, index: int) -> p2pavg.RoundResult:
        async with peer.averager(config(match_timeout=10.0)) as averager:
            averager.accumulate([values(index)])
            begun = await averager.step(wait=0, group_size=2)
            assert isinstance(begun, p2pavg.InProgress)
            assert begun.target_size == 2
            small = await averager.step(wait=None)
            assert isinstance(small, p2pavg.Success)
            assert len(small.peers) == 2
            assert small.duration < 5.0
            averager.accumulate([values(index)])
            return await averager.step(wait=None)

    for result in successes(await run_peers(MemoryNetwork(latency=LAN), 2, average)):
        assert result.duration > 9.0, "the second one waited for four"


async def test_metrics_are_weighted_means_and_equal_on_all_members() -> None:
    async def average(peer: Peer, index: int) -> p2pavg.RoundResult:
        async with peer.averager(config()) as averager:
            averager.accumulate([values(index)], weight=1.0, metrics={"loss": float(index)})
            averager.accumulate([values(index)], weight=index + 1.0, metrics={"loss": 10.0})
            if index == 2:
                averager.accumulate([values(index)], metrics={"accuracy": 0.25})
            return await averager.step(wait=None, observe=index == 3)

    results = successes(await run_peers(MemoryNetwork(latency=LAN), 4, average))
    # Peer i has the value i + 10 (i + 1), with 2, 3 and 4 samples; the fourth peer only observes.
    losses = [10.0 / 2, 21.0 / 3, 32.0 / 4]
    expected = sum(loss * weight for loss, weight in zip(losses, (2.0, 3.0, 5.0), strict=True)) / 10.0
    for result in results:
        assert dict(result.metrics) == dict(results[0].metrics)
        assert result.metrics["accuracy"] == 0.25
        assert result.metrics["loss"] == pytest.approx(expected, rel=1e-12)
        assert set(result.metrics) == {"accuracy", "loss"}


class TestLosses:
    @pytest.fixture
    def slower(self) -> MemoryNetwork:
        return MemoryNetwork(latency=LAN, bandwidth=1e6)

    @pytest.mark.parametrize(("victim", "seconds"), [(0, 0.02), (0, 0.2), (3, 0.08)])
    async def test_dead_contributor_costs_only_its_own_contribution(
        self, slower: MemoryNetwork, victim: int, seconds: float
    ) -> None:
        """The first and the last contribute, and the two between them observe."""
        crash = Fault(Crash(victim), After(Milestone.FORMED, seconds=seconds))
        results = await play_round([config()] * 4, slower, [crash], elements=50_000, observers=[1, 2])
        assert {1, 2, 3 - victim} <= results.keys()
        for result in check_one_result(results.values(), 50_000):
            assert set(result.observers) == ids(1, 2)

    @pytest.mark.parametrize("victim", [0, 2], ids=["leader", "follower"])
    async def test_death_of_the_only_contributor_fails_the_round_with_a_reason(
        self, slower: MemoryNetwork, victim: int
    ) -> None:
        how = config(group_size=3, exchange_timeout=30.0)
        crash = Fault(Crash(victim), After(Milestone.FORMED, seconds=0.02))
        began = trio.current_time()
        observers = {0, 1, 2} - {victim}
        results = await play_round([how] * 3, slower, [crash], elements=50_000, observers=observers)
        assert len(results) == 2
        for result in results.values():
            assert isinstance(result, p2pavg.Failed)
            assert "none of the members that are left has a contribution" in result.reason
            assert f"{simulated_signer(victim).peer_id} was lost" in result.reason
            assert result.contribution_used is False
        assert trio.current_time() - began < how.match_timeout + how.exchange_timeout

    async def test_observer_passes_on_the_shares_of_a_dead_contributor(self, slower: MemoryNetwork) -> None:
        """The second observer has a slow link and reduces nothing: the first one holds the result long before."""
        hows = [config(group_size=3, bandwidth=rate) for rate in (100.0, 100.0, 0.1)]
        faults = [
            Fault(Delay(2, latency=(0.2, 0.2)), After(Milestone.FORMED)),
            Fault(Crash(0), After(Milestone.HOLDING, of=1)),
        ]
        results = successes(await play_round(hows, slower, faults, elements=50_000, observers=[1, 2]))
        assert len(results) == 2
        for result in results:
            assert torch.equal(tensors_of(result)[0], values(0, 50_000))
            assert set(result.peers) == ids(0)
            assert set(result.lost) == ids(0)

    async def test_dead_observer_costs_no_contribution(self, slower: MemoryNetwork) -> None:
        crash = Fault(Crash(2), After(Milestone.FORMED, seconds=0.05))
        hows = [config(group_size=3)] * 3
        found = await play_round(hows, slower, [crash], elements=50_000, observers=[1, 2])
        for result in successes(found):
            assert torch.equal(tensors_of(result)[0], values(0, 50_000))
            assert set(result.observers) == ids(1)
            assert set(result.lost) == ids(2)

    async def test_contributor_keeps_its_weight_when_all_observers_die(self, slower: MemoryNetwork) -> None:
        crash = Fault(Crash(1), After(Milestone.FORMED, seconds=0.05))
        found = await play_round(
            [config(group_size=2)] * 2, slower, [crash], elements=50_000, observers=[1], apart=0.0
        )
        [result] = found.values()
        assert isinstance(result, p2pavg.Failed)
        assert result.contribution_used is False


@pytest.mark.parametrize("contributors", [1, 2])
def test_contributor_lost_at_any_part(monkeypatch: pytest.MonkeyPatch, contributors: int) -> None:
    """The others all end with one result or, without another contributor, all with none."""
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 64)
    hows = [config(exchange_timeout=10.0)] * 4
    ends: set[type] = set()
    for seed in range(0, 20, 6):
        network = MemoryNetwork(seed=seed, latency=LAN, bandwidth=2e5)
        crash = Fault(Crash(0), After(Milestone.FORMED, of=3, seconds=0.012 * seed))
        observers = range(contributors, 4)
        round_ = partial(play_round, hows, network, [crash], observers=observers, apart=0.05)
        found = list(simulate(round_, seed=seed).values())
        ends.update(type(result) for result in found)
        if contributors > 1 or isinstance(found[0], p2pavg.Success):
            check_one_result(found, ELEMENTS)
        else:
            assert all(isinstance(result, p2pavg.Failed) for result in found), found
    assert ends == ({p2pavg.Success} if contributors > 1 else {p2pavg.Success, p2pavg.Failed})


class TestArguments:
    async def test_out_of_range_arguments_are_named(self) -> None:
        wrong: list[tuple[str, object]] = [
            *[("state", value) for value in (b"x" * 33, "7", 7, None, bytearray(b"7"))],
            *[("group_size", value) for value in (-1, 0, 1, 65, 2.0, "4", True)],
            *[("wait", value) for value in (-1.0, float("nan"), "soon", True)],
        ]
        async with simulated_peer(MemoryNetwork(latency=LAN), 0) as peer, peer.averager(config()) as averager:
            averager.accumulate([torch.ones(3)])
            for name, value in wrong:
                arguments: dict[str, Any] = {"wait": 0, name: value}
                with pytest.raises(ValueError, match=rf"^{name}\b"):
                    await averager.step(**arguments)
                assert averager.weight == 1.0

    @pytest.mark.parametrize(
        "arguments", [{"state": b"x" * 32, "group_size": 64}, {"observe": True}], ids=str
    )
    async def test_the_ends_of_the_ranges_are_allowed(self, arguments: dict[str, Any]) -> None:
        async with simulated_peer(MemoryNetwork(latency=LAN), 0) as peer, peer.averager(config()) as averager:
            averager.accumulate([torch.ones(3)])
            assert isinstance(await averager.step(wait=0, **arguments), p2pavg.InProgress)
            assert averager.weight == (1.0 if "observe" in arguments else 0.0)

    async def test_running_round_keeps_its_arguments(self) -> None:
        async with simulated_peer(MemoryNetwork(latency=LAN), 0) as peer, peer.averager(config()) as averager:
            averager.accumulate([torch.ones(3)])
            await averager.step(wait=0, group_size=3)
            again = await averager.step(wait=0, observe=True, group_size=2)
            assert isinstance(again, p2pavg.InProgress)
            assert again.target_size == 3
            assert averager.weight == 0.0
