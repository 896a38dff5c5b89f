"""The parts that members owe in an attempt, and the members that are waited for."""

from __future__ import annotations

import random

import pytest

from p2pavg.allreduce.messages import Lane
from p2pavg.allreduce.reduction import PartTracker
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.group.roster import Roster
from p2pavg.group.shares import MIN_PART_ELEMENTS as PART_ELEMENTS
from tests.unit.group.samples import SIGNERS, candidate, roster

A, B, C, AUX, LISTENER = (signer.peer_id for signer in SIGNERS[:5])
TWO_PARTS = 2 * PART_ELEMENTS
SHARES = [TWO_PARTS, PART_ELEMENTS, 5]  # 2, 1 and 1 parts
CONTRIBUTIONS, AVERAGES = Lane.CONTRIBUTIONS, Lane.AVERAGES


def three(shares: list[int] | None = None) -> Roster:
    return roster([candidate(index) for index in range(3)], SHARES if shares is None else shares)


def with_auxiliary() -> Roster:
    return roster([candidate(0), candidate(1), candidate(3, auxiliary=True)], SHARES)


def with_observers() -> Roster:
    """Return a roster in which B and the fifth observe; one of the two has something to contribute."""
    found = [candidate(0), candidate(1), candidate(3, auxiliary=True), candidate(4, weight=0.0)]
    return roster(found, [*SHARES, 5], observers=[found[1], found[3]])


def deliver(ledger: PartTracker, peer_id: str) -> None:
    """Receive all parts that a member owes."""
    for lane in Lane:
        while ledger.expects(peer_id, lane) and ledger.owed_by(peer_id):
            try:
                ledger.received(peer_id, lane)
            except RemoteProtocolError:
                break


def average_everything(ledger: PartTracker) -> None:
    for _ in ledger.parts[ledger.me]:
        ledger.averaged_own()


class TestExpectations:
    def test_the_parts_of_every_share(self) -> None:
        parts = PartTracker(three(), A, 64).parts
        assert [(part.start, part.stop) for part in parts[A]] == [
            (0, PART_ELEMENTS),
            (PART_ELEMENTS, TWO_PARTS),
        ]
        assert [(part.start, part.stop) for part in parts[B]] == [(TWO_PARTS, TWO_PARTS + PART_ELEMENTS)]
        assert [(part.index, part.elements) for part in parts[C]] == [(0, 5)]

    def test_a_vector_without_elements_is_complete_at_once(self) -> None:
        ledger = PartTracker(three([0, 0, 0]), B, 64)
        assert ledger.complete
        assert [ledger.expects(peer, lane) for peer in (A, C) for lane in Lane] == [0] * 2 * len(Lane)

    def test_every_expected_part_is_sent_by_a_member(self) -> None:
        for group in (three(), with_auxiliary(), with_observers(), three([0, 1, 0])):
            contributors = {member.peer_id for member in group.contributors}
            ledgers = {member.peer_id: PartTracker(group, member.peer_id, 64) for member in group.members}
            for receiver, ledger in ledgers.items():
                for sender, other in ledgers.items():
                    if sender == receiver:
                        continue
                    contributes, takes = sender in contributors, ledger.holding
                    assert ledger.expects(sender, CONTRIBUTIONS) == len(other.parts[receiver]) * contributes
                    assert ledger.expects(sender, AVERAGES) == len(other.parts[sender]) * takes


class TestProgress:
    def test_parts_of_a_lane_are_due_in_order(self) -> None:
        ledger = PartTracker(three(), A, 64)
        assert ledger.due(B, CONTRIBUTIONS) == ledger.parts[A][0]
        assert ledger.due(B, CONTRIBUTIONS) == ledger.parts[A][0], "asking changed it"
        ledger.received(B, CONTRIBUTIONS)
        assert ledger.due(B, CONTRIBUTIONS) == ledger.parts[A][1]
        assert ledger.due(C, CONTRIBUTIONS) == ledger.parts[A][0], "lanes are independent"
        assert ledger.due(B, AVERAGES) == ledger.parts[B][0]

    @pytest.mark.parametrize("seed", range(20))
    def test_each_part_is_averaged_once_for_any_order_of_arrival(self, seed: int) -> None:
        ledger = PartTracker(three(), A, 64)
        arrivals = [
            (peer, lane) for peer in (B, C) for lane in Lane for _ in range(ledger.expects(peer, lane))
        ]
        random.Random(seed).shuffle(arrivals)
        averaged = []
        for peer, lane in arrivals:
            assert not ledger.complete
            index = ledger.due(peer, lane).index
            if ledger.received(peer, lane):
                averaged.append(index)
                ledger.averaged_own()
        assert sorted(averaged) == [0, 1]
        assert ledger.complete

    @pytest.mark.parametrize("lane", Lane)
    def test_a_part_after_the_last_is_refused(self, lane: Lane) -> None:
        ledger = PartTracker(three(), A, 64)
        for _ in range(ledger.expects(B, lane)):
            ledger.received(B, lane)
        for refused in (ledger.due, ledger.received):
            with pytest.raises(
                RemoteProtocolError, match=f"a part of {lane.name.lower()} came where none was due"
            ):
                refused(B, lane)

    @pytest.mark.parametrize(
        ("group", "me", "sender", "lane"),
        [
            (three(), A, "stranger", CONTRIBUTIONS),
            (three(), A, A, AVERAGES),
            (with_auxiliary(), A, AUX, CONTRIBUTIONS),
            (with_auxiliary(), AUX, A, AVERAGES),
            (three([0, 10, 10]), A, B, CONTRIBUTIONS),
            (three([10, 0, 10]), A, B, AVERAGES),
        ],
    )
    def test_a_part_that_no_member_owes_is_refused(
        self, group: Roster, me: str, sender: str, lane: Lane
    ) -> None:
        ledger = PartTracker(group, me, 64)
        with pytest.raises(RemoteProtocolError, match="came where none was due"):
            ledger.received(sender, lane)
        assert ledger.owed_by(sender) == PartTracker(group, me, 64).owed_by(sender)


class TestAShareFromAnother:
    """The reducer is gone, and a member that has its averages passes them on."""

    def test_no_more_averages_are_due_from_the_reducer(self) -> None:
        ledger = PartTracker(three(), C, 64)
        ledger.received_share(A)
        assert ledger.owed_by(A) == 1, "only its contribution"
        with pytest.raises(RemoteProtocolError, match="a part of averages came where none was due"):
            ledger.due(A, AVERAGES)
        assert ledger.due(A, CONTRIBUTIONS) == ledger.parts[C][0]
        assert ledger.owed_by(B) == 2, "another's share is as it was"

    def test_a_share_is_lacking_until_all_of_it_has_come_from_any_member(self) -> None:
        ledger = PartTracker(three(), C, 64)
        assert [ledger.lacks(peer) for peer in (A, B, C, "stranger")] == [True, True, False, False]
        ledger.received(A, AVERAGES)
        assert ledger.lacks(A)
        ledger.received(A, AVERAGES)
        ledger.received_share(B)
        assert not ledger.lacks(A)
        assert not ledger.lacks(B)

    @pytest.mark.parametrize("elements", [0, 10])
    def test_an_auxiliarys_share_may_be_passed_on_even_if_empty(self, elements: int) -> None:
        group = roster([candidate(0), candidate(1), candidate(3, auxiliary=True)], [10, 10, elements])
        ledger = PartTracker(group, A, 64)
        deliver(ledger, B)
        average_everything(ledger)
        ledger.received_share(AUX)
        assert ledger.owed_by(AUX) == 0
        assert ledger.complete


class TestOutOfTime:
    def test_the_reason_names_the_members_that_owe_parts(self) -> None:
        ledger = PartTracker(three(), A, 64)
        verdict = ledger.overdue(60.0)
        assert verdict.reason == (
            f"the exchange took longer than 60 s, waiting for {B} (3 parts), {C} (3 parts)"
        )
        assert verdict.peer_id == B
        deliver(ledger, B)
        ledger.received(C, AVERAGES)
        verdict = ledger.overdue(0.5)
        assert verdict.reason == f"the exchange took longer than 0.5 s, waiting for {C} (2 parts)"
        assert (verdict.peer_id, verdict.hostile, verdict.seconds) == (C, False, 0.5)

    def test_the_reason_names_no_member_if_only_the_own_share_is_missing(self) -> None:
        ledger = PartTracker(three(), A, 64)
        deliver(ledger, B)
        deliver(ledger, C)
        verdict = ledger.overdue(60.0)
        assert verdict.reason == "the exchange took longer than 60 s, waiting for itself"
        assert verdict.peer_id is None

    def test_a_member_that_owes_a_contribution_is_named_first(self) -> None:
        ledger = PartTracker(three([5, TWO_PARTS, 5]), A, 64)
        ledger.received(B, CONTRIBUTIONS)
        ledger.received(C, AVERAGES)
        assert (ledger.owed_by(B), ledger.owed_by(C)) == (2, 1)
        assert ledger.overdue(60.0).peer_id == C

    def test_the_member_that_owes_most_is_named(self) -> None:
        ledger = PartTracker(three(), A, 64)
        ledger.received(B, CONTRIBUTIONS)
        assert ledger.overdue(60.0).peer_id == C


class TestHoldsUp:
    """The contributor that a reducer waits for, while most others wait too."""

    def ledger(self, parts: int = 12) -> PartTracker:
        members = [candidate(index) for index in (0, 1, 2, 4)]
        return PartTracker(roster(members, [parts * PART_ELEMENTS, 0, 0, 0]), A, 64)

    def came(self, *counts: int, parts: int = 12) -> str | None:
        ledger = self.ledger(parts)
        for peer_id, count in zip((B, C, LISTENER), counts, strict=True):
            for _ in range(count):
                ledger.received(peer_id, CONTRIBUTIONS)
        return ledger.holds_up()

    def test_one_that_most_others_wait_for(self) -> None:
        assert self.came(1, 5, 5) == B
        assert self.came(5, 1, 5) == C
        assert self.came(1, 5, 2) is None, "half of the others"

    def test_none_while_all_come_alike(self) -> None:
        assert self.came(0, 0, 0) is None
        assert self.came(3, 4, 5) is None
        assert self.came(12, 12, 12) is None

    def test_those_that_have_sent_everything_wait(self) -> None:
        assert self.came(11, 12, 12) == B
        assert self.came(0, 1, 1, parts=1) == B

    def test_none_that_is_the_only_one(self) -> None:
        ledger = PartTracker(roster([candidate(0), candidate(1)], [TWO_PARTS, 0]), A, 64)
        assert ledger.holds_up() is None
