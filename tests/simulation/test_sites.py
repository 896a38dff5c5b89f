"""The guarantees of a round of sites that exchange sums: kills, stops, slow members, lies, and the bytes between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
import trio

import p2pavg
from p2pavg.allreduce.averages import Averages
from p2pavg.allreduce.context import AttemptPlan
from p2pavg.allreduce.messages import Lane, LaneHeader, Step
from p2pavg.allreduce.sender import Sender
from p2pavg.allreduce.values import AttemptData
from p2pavg.base.result import RoundResult, Success
from p2pavg.group.shares import SharePart
from p2pavg.net.transport import Buffer, Stream
from p2pavg.peer.auxiliary import assist
from p2pavg.peer.peer import Peer
from p2pavg.testing import After, Crash, Fault, MemoryNetwork, Milestone, simulated_peers
from tests.simulation.liars import name
from tests.simulation.swarm import (
    check_one_result,
    config,
    ids,
    mean,
    play_round,
    successes,
    tensors_of,
    values,
)

SIZE = 6
ELEMENTS = 30_000
SITES = ("lab-a", "lab-b", "lab-a", "lab-b", "lab-b", "lab-a")
"""In the order of the roster."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 700)


async def play(
    *faults: Fault,
    sites: Sequence[str] = SITES,
    elements: int = ELEMENTS,
    weights: Sequence[float] = (),
    observers: Sequence[int] = (),
    **changes: Any,
) -> dict[int, RoundResult]:
    """Return the results of one round of peers of these sites, of all that do not crash."""
    how = {"group_size": len(sites), "audit": "off", **changes}
    hows = [config(**{"topology": p2pavg.Hierarchical(site), **how}) for site in sites]
    return await play_round(hows, network(), faults, elements=elements, weights=weights, observers=observers)


def network() -> MemoryNetwork:
    """Links on which contributions take a third of a second, and the averages about as long."""
    return MemoryNetwork(latency=(0.002, 0.006), bandwidth=5e5)


@pytest.mark.parametrize(
    "sites",
    [SITES, ("", "a", "a", ""), ("a", "b", "a", "b", "c", "c", "c", ""), ("a", "b", "c"), ("a", "a", "a")],
    ids=["two of three", "two and two alone", "many", "all alone", "one"],
)
async def test_the_result_is_the_mean_of_all_members(sites: tuple[str, ...]) -> None:
    found = await play(sites=sites)
    for result in check_one_result(found.values(), ELEMENTS):
        assert len(result.peers) == len(sites)
        proof = p2pavg.verify_certificate(result.certificate)
        assert proof.weights == result.weights
        assert result.compression_ratio == pytest.approx(1.0, rel=0.05)


async def test_each_value_crosses_between_sites_once_in_each_direction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a butterfly, it would cross once for each member of a site."""
    crossed: Counter[tuple[str, str]] = Counter()
    send, site_by_name = Sender._send, {name(index): site for index, site in enumerate(SITES)}

    async def count(self: Sender, stream: Stream, header: LaneHeader, steps: Sequence[Step]) -> None:
        sites = site_by_name[self._plan.me], site_by_name[stream.remote]
        crossed[sites] += sum(step.part.elements for step in steps)
        await send(self, stream, header, steps)

    monkeypatch.setattr(Sender, "_send", count)
    check_one_result((await play()).values(), ELEMENTS)
    assert crossed["lab-a", "lab-b"] == pytest.approx(ELEMENTS, rel=0.02)
    assert crossed["lab-b", "lab-a"] == pytest.approx(ELEMENTS, rel=0.02)


async def test_the_error_of_a_codec_is_near_that_of_the_butterfly() -> None:
    errors = {}
    for topology in ("hierarchical", "butterfly"):
        changes: dict[str, Any] = {} if topology == "hierarchical" else {"topology": topology}
        found = await play(compression="blockwise8", **changes)
        bits = [tensors_of(result)[0] for result in found.values()]
        assert all(torch.equal(bits[0], other) for other in bits)
        errors[topology] = float((bits[0] - mean(range(SIZE), ELEMENTS)).norm())
    assert 0.0 < errors["hierarchical"] < 1.25 * errors["butterfly"]


async def test_observers_relay_and_hold_the_result() -> None:
    """One site has observers only, and one an observer beside a contributor."""
    watching = (1, 2, 3)
    found = await play(sites=("a", "a", "b", "b", "c", "a"), observers=watching)
    for result in check_one_result(found.values(), ELEMENTS):
        assert set(result.observers) == ids(*watching)


async def test_weights_count_across_sites() -> None:
    weights = [1.0, 2.0, 30.0, 4.0, 0.5, 6.0]
    for result in successes(await play(weights=weights)):
        assert result.total_weight == sum(weights)
        expected = mean(range(SIZE), ELEMENTS, weights).float()
        torch.testing.assert_close(tensors_of(result)[0], expected, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ kills and stops


@pytest.mark.parametrize("seconds", [0.1, 0.4])
async def test_the_loss_of_a_whole_site_leaves_the_other_one_with_its_mean(seconds: float) -> None:
    """The others are the greater part only if the leader is among them."""
    lost = [index for index, site in enumerate(SITES) if site == "lab-b"]
    found = await play(
        *(Fault(Crash(index), After(Milestone.FORMED, of=0, seconds=seconds)) for index in lost)
    )
    check_one_result(found.values(), ELEMENTS)
    assert len(found) == SIZE - len(lost)


@pytest.mark.parametrize(
    "milestone", [Milestone.AVERAGE_SENT, Milestone.HOLDING], ids=["averages", "holding"]
)
@pytest.mark.parametrize(("sites", "victim"), [(SITES, 0), (SITES, 4), (("a", "a", "b", "a", "b", "a"), 3)])
async def test_a_member_that_crashes_late_may_still_be_in_the_result(
    sites: tuple[str, ...], victim: int, milestone: Milestone
) -> None:
    """Some members hold the result then. They pass on what the lost one would have sent, also as a relay."""
    found = await play(Fault(Crash(victim), After(milestone, of=victim)), sites=sites)
    check_one_result(found.values(), ELEMENTS)


# ------------------------------------------------------------------ slow members and lies


async def test_a_relay_whose_sums_do_not_decode_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    liar, sum_of_site = 4, AttemptData.sum_of_site

    def false(self: AttemptData, index: int) -> Buffer:
        payload = sum_of_site(self, index)
        return b"\xff" * len(payload) if self._ledger.me == name(liar) else payload

    monkeypatch.setattr(AttemptData, "sum_of_site", false)
    found = await play(compression="blockwise8")
    assert isinstance(found.pop(liar), p2pavg.Failed)
    for result in successes(found):
        assert result.lost.keys() == {name(liar)}
        assert "a part that does not decode" in result.lost[name(liar)]
        assert set(result.peers) == {name(index) for index in range(SIZE) if index != liar}


async def test_a_relay_that_changes_the_averages_that_it_passes_on_splits_no_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Members that take part in the result hold the same bits, which are the mean of its peers."""
    liar, victim, send, encoded = 4, 1, Sender._send, Averages.encoded
    to_victim: ContextVar[bool] = ContextVar("to_victim", default=False)
    changed = 0

    async def note(self: Sender, stream: Stream, header: LaneHeader, steps: Sequence[Step]) -> None:
        lies = self._plan.me == name(liar) and self._plan.number == 0 and header.lane is Lane.AVERAGES
        to_victim.set(lies and stream.remote == name(victim))
        await send(self, stream, header, steps)

    def change(self: Averages, reducer: str, index: int) -> Buffer:
        nonlocal changed
        payload = encoded(self, reducer, index)
        if to_victim.get() and reducer != name(liar):
            payload, changed = bytes(len(payload)), changed + 1
        return payload

    monkeypatch.setattr(Sender, "_send", note)
    monkeypatch.setattr(Averages, "encoded", change)
    found = await play(sites=("a", "b", "a", "b", "b", "a"))
    assert changed
    results = [result for index, result in found.items() if index != liar and isinstance(result, Success)]
    assert len(results) >= SIZE - 2
    check_one_result(results, ELEMENTS)


async def test_a_contribution_from_another_site_excludes_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the relay of a site sends its sum: a member that sent its own values too would count twice."""
    liar, contributions_to = 4, AttemptPlan.contributions_to

    def more(self: AttemptPlan, peer_id: str) -> tuple[Sequence[SharePart], int | None]:
        parts, sums_at = contributions_to(self, peer_id)
        if self.me == name(liar) and not parts:
            return self.ledger.parts[peer_id], None
        return parts, sums_at

    monkeypatch.setattr(AttemptPlan, "contributions_to", more)
    found = await play()
    assert isinstance(found.pop(liar), p2pavg.Failed)
    for result in check_one_result(found.values(), ELEMENTS):
        assert "it opened a lane that is not due" in result.lost[name(liar)]


async def test_an_auxiliary_reduces_nothing_between_sites() -> None:
    """Its traffic would cross the links of all sites. The members end their rounds beside it."""
    results: dict[int, list[RoundResult]] = {index: [] for index in range(3)}

    async def average(peer: Peer, index: int) -> None:
        how = config(group_size=3, topology=p2pavg.Hierarchical("aba"[index]), audit="off")
        async with peer.averager(how) as averager:
            for _ in range(4):
                averager.accumulate([values(index, ELEMENTS)])
                results[index].append(await averager.step(wait=None))
                await trio.sleep(10.0)

    async with simulated_peers(network(), 4) as (*workers, helper), trio.open_nursery() as outer:
        outer.start_soon(partial(assist, helper, "sim", bandwidth=1000.0))
        async with trio.open_nursery() as nursery:
            for index, peer in enumerate(workers):
                nursery.start_soon(partial(average, peer, index))
        outer.cancel_scope.cancel()
    rounds = list(zip(*results.values(), strict=True))
    checked = [check_one_result(each, ELEMENTS) for each in rounds]
    assert any(result.auxiliaries for each in checked for result in each)
    assert sum(stop - start for start, stop in (result.share for result in checked[-1])) == ELEMENTS
