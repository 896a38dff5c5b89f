"""Routes: every contribution gets into every average once, and every average to every holder."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.allreduce.messages import Lane, incoming
from p2pavg.allreduce.movers.moves import Move, ReceiveIndex, ReceivePart, RunWork, carry_out, receiving_share
from p2pavg.allreduce.movers.routes import Routes
from p2pavg.allreduce.reduction import PartTracker
from p2pavg.allreduce.signals import Signals
from p2pavg.allreduce.values import AttemptData
from p2pavg.allreduce.vector.buffers import Buffers
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.group.aggregation import Aggregation
from p2pavg.group.milestones import ignore
from p2pavg.group.roster import Roster, ShareCutter, sites_of
from p2pavg.group.topology import Hierarchical
from p2pavg_compression import Fp32
from tests.unit.group.samples import candidate, roster

ELEMENTS = 300_000
CUTTER = ShareCutter(ELEMENTS, 64, Hierarchical())


def group(names: list[str], watching: frozenset[int] = frozenset()) -> Roster:
    """Return a roster of members in sites; those in ``watching`` only observe."""
    members = [candidate(index, site=name) for index, name in enumerate(names)]
    return roster(members, CUTTER.cut(members), observers=[members[index] for index in watching])


def ledgers(whole: Roster) -> tuple[dict[str, PartTracker], Routes]:
    """Return the ledger of each member, and the routes that all of them compute."""
    sites = sites_of(whole.members)
    found = {member.peer_id: PartTracker(whole, member.peer_id, 64, sites) for member in whole.members}
    return found, next(iter(found.values())).routes


GROUPS = st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=2, max_size=8).flatmap(
    lambda names: st.builds(
        group, st.just(names), st.frozensets(st.integers(0, len(names) - 1), max_size=len(names) - 1)
    )
)


@given(GROUPS)
def test_every_average_counts_every_contributor_once(whole: Roster) -> None:
    found, routes = ledgers(whole)
    contributors = {member.peer_id: member.weight for member in whole.contributors}
    for reducer in found:
        counted: Counter[str] = Counter()
        _, weights = routes.weights_at(reducer)
        for sender, weight in weights.items():
            if sender in routes.senders_of_sums(reducer):
                of_site, _ = routes.weights_at(sender)
                assert sum(of_site.values()) == pytest.approx(weight)
                counted.update(of_site.keys())
            else:
                counted[sender] += 1
                assert weight == contributors[sender]
        if found[reducer].parts[reducer]:
            assert counted == Counter(contributors.keys())


@given(GROUPS)
def test_both_ends_of_a_lane_expect_the_same_parts(whole: Roster) -> None:
    found, routes = ledgers(whole)
    for receiver, ledger in found.items():
        fed: Counter[int] = Counter()
        for sender in found.keys() - {receiver}:
            fed.update(part.index for part in ledger.contributions_of(sender))
            served = sum(len(ledger.parts[reducer]) for reducer in routes.averages(sender, receiver))
            assert ledger.expects(sender, Lane.AVERAGES) == served
        near, far = len(routes.feeders_of(receiver)), len(routes.senders_of_sums(receiver))
        own = len(ledger.tasks) - ledger.first_own
        senders = [near] * ledger.first_own + [near + far] * own
        assert [fed[index] for index in range(len(ledger.tasks))] == senders
        assert ledger.unfed == [index for index, count in enumerate(senders) if count == 0]


@given(GROUPS)
def test_every_holder_gets_every_share_from_one_member_that_has_it(whole: Roster) -> None:
    found, routes = ledgers(whole)
    for receiver, ledger in found.items():
        served = [each for sender in found.keys() - {receiver} for each in routes.averages(sender, receiver)]
        assert sorted(served) == sorted(each for each in found if each != receiver and ledger.parts[each])
        for reducer in served:
            server = routes.server(reducer, receiver)
            assert server == reducer or routes.server(reducer, server) == reducer


def test_a_member_of_another_site_that_is_no_relay_owes_nothing() -> None:
    found, routes = ledgers(group(["a", "a", "b", "b"]))
    ids = list(found)
    ledger = found[ids[0]]
    [relay] = routes.senders_of_sums(ids[0])
    other = next(each for each in ids[2:] if each != relay)
    assert ledger.owed_by(other) == 0
    with pytest.raises(RemoteProtocolError, match="where none was due"):
        ledger.received(other, Lane.CONTRIBUTIONS)
    assert ledger.due(relay, Lane.CONTRIBUTIONS).index == ledger.first_own


def test_what_a_lost_relay_would_have_passed_on_is_cut_off() -> None:
    found, routes = ledgers(group(["a", "a", "b", "b"]))
    ids = list(found)
    [relay] = routes.senders_of_sums(ids[0])
    [other] = [each for each in ids[2:] if each != relay]
    assert routes.cut_off(other, {relay}) == [each for each in ids if each in (ids[0], relay)]
    assert routes.cut_off(ids[0], {relay}) == [relay]
    assert routes.cut_off(ids[1], {ids[0]}) == [ids[0], routes.relayed_by(ids[0])[0]]


def test_a_sum_that_is_late_counts_less_than_a_contribution() -> None:
    found, routes = ledgers(group(["a", "a", "b", "b"]))
    ids = list(found)
    ledger = found[ids[0]]
    [relay] = routes.senders_of_sums(ids[0])
    assert ledger.owed_by(relay) > 0
    for _ in range(ledger.expects(ids[1], Lane.CONTRIBUTIONS) - 1):
        ledger.received(ids[1], Lane.CONTRIBUTIONS)
    assert ledger.overdue(60.0).peer_id == ids[1]
    ledger.received(ids[1], Lane.CONTRIBUTIONS)
    assert ledger.overdue(60.0).peer_id in (relay, ids[1])


def test_one_site_is_a_butterfly() -> None:
    whole = group(["", "", ""])
    found, routes = ledgers(whole)
    assert not any(map(routes.relayed_by, found))
    for peer_id, ledger in found.items():
        plain = PartTracker(whole, peer_id, 64)
        assert ledger.tasks == plain.tasks == plain.parts[peer_id]
        assert (ledger.first_own, ledger.forwards) == (0, [])
        assert ledger.feeders == [each for each in plain.parts if each != peer_id]


@given(GROUPS)
def test_without_relays_a_member_moves_what_each_pair_of_members_exchanges(whole: Roster) -> None:
    parts = PartTracker(whole, whole.members[0].peer_id, 64).parts
    routes = Routes(whole, parts)
    moved = Counter[str]()
    for reducer, own in parts.items():
        for member in whole.members:
            if member.peer_id != reducer:
                # A contribution to the share, and its average back.
                ways = (member in whole.contributors) + (member in whole.holders)
                for end in (reducer, member.peer_id):
                    moved[end] += ways * sum(part.elements for part in own)
    assert {peer_id: routes.elements(peer_id) for peer_id in parts} == {each: moved[each] for each in parts}


def test_a_link_between_two_sites_carries_each_value_once() -> None:
    found, routes = ledgers(group(["a"] * 4 + ["b"] * 4))
    ids = list(found)
    crossing = sum(
        sum(part.elements for part in routes.contributions(sender, receiver))
        + sum(part.elements for each in routes.averages(sender, receiver) for part in found[each].parts[each])
        for sender in ids[:4]
        for receiver in ids[4:]
    )
    assert crossing == ELEMENTS


async def test_a_share_that_another_member_passes_on_is_passed_on_to_the_site() -> None:
    found, routes = ledgers(group(["a", "a", "b", "b"]))
    me = next(iter(found))
    values = AttemptData(
        ledger=found[me],
        codec=Fp32(),
        vector=torch.zeros(ELEMENTS),
        buffers=Buffers(0),
        aggregation=Aggregation(audits=None, topology=Hierarchical()),
    )
    signals = Signals(list[object]().append, ignore, values, found[me], trio.CancelScope())
    signals.open()
    [reducer] = routes.relayed_by(me)
    steps = incoming([], [(reducer, part) for part in found[me].parts[reducer]])

    class Zeros:
        """A lane on which the parts come one after the other, all of them zeros."""

        def __init__(self) -> None:
            self._indices = iter(range(len(steps)))

        async def move(self, move: Move) -> Any:
            match move:
                case ReceiveIndex():
                    return next(self._indices)
                case ReceivePart(coming, follow, _):
                    coming.rest[:] = bytes(len(coming.rest))
                    return bytes(follow)
                case RunWork(work):
                    return work()

    first = values.forward_at(reducer)
    assert first is not None
    with trio.fail_after(5.0):
        async with trio.open_nursery() as nursery:
            for part in found[me].parts[reducer]:
                nursery.start_soon(signals.until_ready, first + part.index)
            await trio.testing.wait_all_tasks_blocked()
            await carry_out(receiving_share(values, reducer, steps, signals), Zeros())


@pytest.mark.parametrize("whole_share", [False, True], ids=["part by part", "passed on"])
def test_a_relay_passes_on_what_has_come_by_any_way(whole_share: bool) -> None:
    found, routes = ledgers(group(["a", "a", "b", "b"]))
    me = next(iter(found))
    ledger = found[me]
    ready: list[int] = []
    values = AttemptData(
        ledger=ledger,
        codec=Fp32(),
        vector=torch.zeros(ELEMENTS),
        buffers=Buffers(0),
        aggregation=Aggregation(audits=None, topology=Hierarchical()),
    )
    [reducer] = routes.relayed_by(me)
    parts = ledger.parts[reducer]
    first = values.forward_at(reducer)
    assert first == len(ledger.tasks)
    numbers = [first + part.index for part in parts]
    assert not any(map(values.is_ready, numbers))
    payloads = [bytes(4 * part.elements) for part in parts]
    if whole_share:
        ready += values.receive_share(reducer, list(payloads))
        assert values.receive_share(reducer, list(payloads)) == ready, (
            "the first lane may have ended before it told"
        )
    else:
        for part, payload in zip(parts, payloads, strict=True):
            ready += values.receive_average(reducer, part, payload)
    assert all(map(values.is_ready, numbers))
    assert ready == numbers
