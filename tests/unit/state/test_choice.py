"""The rules of states: when donors take snapshots, whose offers count, and which one a joiner takes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.state.choice import (
    ALIGN_SECONDS,
    FEW_OFFERS_SECONDS,
    MAX_ALIGN,
    MAX_DONORS,
    MAX_EPOCH,
    SETTLE_OFFERS_SECONDS,
    DonorView,
    SnapshotOffer,
    StateNews,
    alignment,
    choose_snapshot,
    head_of,
    keeps_up,
    next_average,
    takes_snapshot,
    voters,
)

DONOR = DonorView(
    epoch=32,
    update_seconds=60.0,
    since_update=0.0,
    wanted=True,
    snapshot_epoch=None,
    log_first=0,
    log_full=0.0,
    in_use=False,
)


def named(number: int) -> bytes:
    return number.to_bytes(32, "big")


def offer(epoch: int, root: int = 1) -> SnapshotOffer:
    return SnapshotOffer(epoch=epoch, state=named(epoch), root=named(root), size=10)


def says(epoch: int, snapshot: SnapshotOffer | None = None, *, lie: int = 0, log: int = 8) -> StateNews:
    """Return the news of a peer with the log of the last updates; a liar's has other averages."""
    names = tuple(named(1000 * lie + e) for e in range(max(epoch - log, 0) + 1, epoch + 1))
    return StateNews(wants=False, epoch=epoch, snapshot=snapshot, log=names)


class TestDonors:
    @pytest.mark.parametrize(
        ("seconds", "updates"),
        [
            (0.0, 1),
            (60.0, 1),
            (ALIGN_SECONDS, 1),
            (3.9, 2),
            (2.0, 2),
            (1.9, 4),
            (1.0, 4),
            (0.5, 8),
            (0.01, MAX_ALIGN),
        ],
    )
    def test_updates_are_aligned_by_as_many_as_fit_into_the_time_to_hear(
        self, seconds: float, updates: int
    ) -> None:
        assert alignment(seconds) == updates

    def test_a_run_that_stands_still_waits_for_no_aligned_update(self) -> None:
        """It waited for the joiner, which waited for a snapshot of an update that never came."""
        donor = replace(DONOR, epoch=6, update_seconds=1.3)
        assert not takes_snapshot(donor)
        assert not takes_snapshot(replace(donor, since_update=ALIGN_SECONDS))
        assert takes_snapshot(replace(donor, since_update=2 * ALIGN_SECONDS))
        assert not takes_snapshot(replace(donor, since_update=2 * ALIGN_SECONDS, wanted=False))

    @given(st.floats(0.0, 100.0), st.floats(0.8, 1.25))
    def test_donors_that_measure_slightly_differently_share_updates(
        self, seconds: float, factor: float
    ) -> None:
        """One power of two divides the other."""
        one, other = alignment(seconds), alignment(seconds * factor)
        assert max(one, other) % min(one, other) == 0
        assert max(one, other) <= MAX_ALIGN

    def test_a_fast_donor_waits_for_an_aligned_update(self) -> None:
        fast = replace(DONOR, update_seconds=0.5)
        assert [e for e in range(32, 49) if takes_snapshot(replace(fast, epoch=e))] == [32, 40, 48]

    def test_a_snapshot_from_which_the_log_leads_on_is_kept(self) -> None:
        assert not takes_snapshot(replace(DONOR, snapshot_epoch=20, log_first=20))
        assert takes_snapshot(replace(DONOR, snapshot_epoch=20, log_first=21))

    def test_a_snapshot_that_is_ahead_is_replaced(self) -> None:
        """The donor went back to an earlier state."""
        assert takes_snapshot(replace(DONOR, snapshot_epoch=33))

    @pytest.mark.parametrize(
        ("full", "in_use", "expected"), [(0.5, False, False), (0.6, False, True), (0.9, True, False)]
    )
    def test_a_snapshot_is_renewed_before_the_log_is_full_unless_it_is_in_use(
        self, full: float, in_use: bool, expected: bool
    ) -> None:
        assert takes_snapshot(replace(DONOR, snapshot_epoch=20, log_full=full, in_use=in_use)) is expected


class TestVoters:
    NEWS = {name: says(9, offer(9)) for name in ("companion", "bootstrap", "stranger")} | {
        "joiner": StateNews(wants=True, epoch=0)
    }

    def of(
        self, *, members_only: bool = False, companions: Collection[str] = (), bootstrap: Collection[str] = ()
    ) -> set[str]:
        return set(voters(self.NEWS, members_only=members_only, companions=companions, bootstrap=bootstrap))

    def test_all_members_decide_in_a_run_with_an_authority(self) -> None:
        assert self.of(members_only=True, companions={"companion"}) == {"companion", "bootstrap", "stranger"}

    def test_companions_decide_before_bootstrap_peers_and_these_before_strangers(self) -> None:
        assert self.of(companions={"companion"}, bootstrap={"bootstrap"}) == {"companion"}
        assert self.of(companions={"gone"}, bootstrap={"bootstrap"}) == {"bootstrap"}
        assert self.of(companions={"gone"}, bootstrap={"gone"}) == {"companion", "bootstrap", "stranger"}

    def test_peers_that_offer_nothing_do_not_decide(self) -> None:
        assert self.of(companions={"joiner"}, bootstrap={"bootstrap"}) == {"bootstrap"}


def chosen(
    news: dict[str, StateNews],
    deciding: set[str] | None = None,
    *,
    waited: float = 0.0,
    at_least: int = 0,
    refused: tuple[bytes, ...] = (),
) -> SnapshotOffer | None:
    who = set(news) if deciding is None else deciding
    return choose_snapshot(news, who, at_least=at_least, waited=waited, refused=refused).offer


class TestSnapshots:
    def test_a_snapshot_of_more_than_half_is_taken_at_once(self) -> None:
        news = {"a": says(9, offer(8)), "b": says(9, offer(8)), "c": says(9)}
        assert chosen(news) == offer(8)

    def test_others_may_serve_it_too(self) -> None:
        news = {"a": says(9, offer(8)), "b": says(9, offer(8)), "c": says(9, offer(7))}
        found = choose_snapshot(news, {"a"}, at_least=0, waited=0.0)
        assert (found.offer, found.donors) == (offer(8), ("a", "b"))

    def test_a_snapshot_of_half_is_taken_after_a_while(self) -> None:
        news = {"a": says(9, offer(8)), "b": says(9)}
        assert chosen(news, waited=SETTLE_OFFERS_SECONDS - 0.1) is None
        assert chosen(news, waited=SETTLE_OFFERS_SECONDS) == offer(8)

    def test_there_is_no_wait_when_all_voters_offer_one_and_the_latest_counts(self) -> None:
        """Donors that have joined at different times hold the snapshots of different updates."""
        news = {"a": says(9, offer(8)), "b": says(9, offer(9))}
        assert chosen(news) == offer(9)
        assert chosen(news | {"c": says(9)}) is None

    def test_the_first_voter_with_a_snapshot_does_not_decide_alone(self) -> None:
        """Donors take a snapshot after their batch. A liar has one at once."""
        news = {name: says(9) for name in "abcd"} | {"liar": says(9, offer(9, root=666))}
        assert chosen(news, waited=SETTLE_OFFERS_SECONDS) is None
        assert chosen(news, waited=FEW_OFFERS_SECONDS - 0.1) is None
        assert chosen(news, waited=FEW_OFFERS_SECONDS) == offer(9, root=666)
        news |= {name: says(9, offer(8)) for name in "abc"}
        assert chosen(news) == offer(8)

    def test_a_lying_minority_is_outvoted_whatever_update_it_names(self) -> None:
        news = {name: says(9, offer(8)) for name in "abc"} | {
            name: says(9, offer(9, root=666)) for name in ("x", "y")
        }
        assert chosen(news) == chosen(news, waited=1e9) == offer(8)

    def test_an_update_far_ahead_of_the_run_is_no_offer(self) -> None:
        news = {
            "a": says(9, offer(8)),
            "b": says(9, offer(7, root=2)),
            "liar": says(MAX_EPOCH, offer(MAX_EPOCH, 666)),
        }
        assert chosen(news, waited=1e9) == offer(8)

    def test_a_crowd_of_strangers_does_not_count_beside_a_bootstrap_peer(self) -> None:
        news = {f"sybil{index}": says(9, offer(9, root=666)) for index in range(1000)} | {
            "b": says(9, offer(8))
        }
        deciding = voters(news, members_only=False, companions=(), bootstrap={"b"})
        found = choose_snapshot(news, deciding, at_least=0, waited=0.0)
        assert (found.offer, found.donors) == (offer(8), ("b",))  # the crowd offers another one

    def test_ties_of_one_update_go_to_the_largest_root(self) -> None:
        news = {"a": says(9, offer(8, root=1)), "b": says(9, offer(8, root=2))}
        assert chosen(news, waited=SETTLE_OFFERS_SECONDS) == offer(8, root=2)

    def test_between_as_many_voters_most_peers_decide_and_there_is_no_wait(self) -> None:
        """A peer that came after the last snapshot takes a newer one, and would be its only donor."""
        others = {name: says(9, offer(8)) for name in "cdef"}
        voters_ = {"a": says(9, offer(8)), "b": says(9)}
        assert chosen(others | voters_, {"a", "b"}) == offer(8)
        voters_ = {"a": says(9, offer(8)), "b": says(9, offer(9))}
        found = choose_snapshot(others | voters_, {"a", "b"}, at_least=0, waited=0.0)
        assert found.offer == offer(8)
        assert set(found.donors) == set("acdef")
        # Half of all peers is not most of them, and less than half of the voters is too few.
        few = {"c": says(9, offer(8)), "d": says(9)}
        assert chosen(few | {"a": says(9, offer(8)), "b": says(9)}, {"a", "b"}) is None
        assert chosen(others | {"a": says(9, offer(8)), "b": says(9), "x": says(9)}, {"a", "b", "x"}) is None

    def test_no_crowd_outvotes_more_voters(self) -> None:
        crowd = {f"sybil{index}": says(9, offer(9, root=666)) for index in range(100)}
        some = {"a": says(9, offer(8)), "b": says(9, offer(8)), "liar": says(9, offer(9, root=666))}
        assert chosen(crowd | some, {"a", "b", "liar"}, waited=1e9) == offer(8)

    def test_a_snapshot_from_which_no_log_leads_on_is_left(self) -> None:
        assert chosen({"a": says(20, offer(8))}) is None

    def test_an_earlier_snapshot_than_this_peers_state_is_left(self) -> None:
        news = {"a": says(9, offer(8))}
        assert chosen(news, at_least=8) == offer(8)
        assert chosen(news, at_least=9) is None

    def test_a_refused_snapshot_is_left_and_others_of_its_update_are_not(self) -> None:
        news = {"liar": says(9, offer(9, root=666)), "a": says(9, offer(9, root=1))}
        assert chosen(news, waited=SETTLE_OFFERS_SECONDS, refused=(named(666),)) == offer(9, root=1)

    def test_reasons_say_what_is_missing(self) -> None:
        assert (
            choose_snapshot({}, (), at_least=0, waited=0.0).reason
            == "no other peer of this run offers a state"
        )
        news = {"a": says(9), "b": says(9)}
        assert "none offers one yet" in choose_snapshot(news, news, at_least=0, waited=0.0).reason


class TestDonorsOfATransfer:
    def test_voters_are_asked_first_and_few_others(self) -> None:
        """Strangers that repeat an offer make a joiner dial few addresses, and do not crowd out the voters."""
        news = {f"0sybil{index}": says(9, offer(9)) for index in range(1000)} | {"b": says(9, offer(9))}
        snapshot = choose_snapshot(news, {"b"}, at_least=0, waited=0.0)
        average = next_average(news, {"b"}, 9)
        assert average is not None
        for donors in (snapshot.donors, average[1]):
            assert donors[0] == "b"
            assert len(donors) == MAX_DONORS


class TestAverages:
    def test_the_average_of_most_voters_comes_next(self) -> None:
        news = {"a": says(9), "b": says(9), "liar": says(9, lie=1), "d": says(8)}
        assert next_average(news, {"a", "b", "liar"}, 9) == (named(9), ("a", "b"))

    def test_donors_may_be_any_peers(self) -> None:
        news = {"a": says(9), "stranger": says(9)}
        assert next_average(news, {"a"}, 9) == (named(9), ("a", "stranger"))

    def test_no_voter_has_it(self) -> None:
        news = {"a": says(9, log=1)}
        assert next_average(news, {"a"}, 8) is None
        assert next_average(news, {"a"}, 10) is None
        assert next_average(news, (), 9) is None

    def test_one_voter_ahead_of_all_others_names_nothing(self) -> None:
        """Otherwise this peer would fetch what is not there, again and again, and never catch up."""
        news = {"a": says(9), "b": says(9), "c": says(9), "liar": says(MAX_EPOCH, lie=1)}
        assert next_average(news, news, 10) is None
        liar = {"liar": says(10, lie=1)}
        assert next_average(news | liar, [*news, "liar"], 10) is None
        assert next_average(news | liar | {"a": says(10), "b": says(10)}, news, 10) == (named(10), ("a", "b"))

    def test_ties_go_to_the_largest_id(self) -> None:
        news = {"a": says(9), "b": says(9, lie=1)}
        assert next_average(news, news, 9) == (named(1009), ("b",))


class TestHead:
    def test_the_head_is_the_median(self) -> None:
        news = {"a": says(9), "b": says(10), "liar": says(MAX_EPOCH)}
        assert head_of(news, news) == 10
        assert head_of(news, ()) == 0

    @given(st.lists(st.integers(0, 100), min_size=1, max_size=9), st.data())
    def test_a_minority_moves_it_only_within_what_honest_voters_say(
        self, honest: list[int], data: st.DataObject
    ) -> None:
        lies = data.draw(st.lists(st.integers(0, MAX_EPOCH), max_size=(len(honest) - 1)))
        news = {str(index): says(epoch) for index, epoch in enumerate([*honest, *lies])}
        assert min(honest) <= head_of(news, news) <= max(honest)


@pytest.mark.parametrize(("rate", "expected"), [(99.0, False), (100.0, True), (0.0, False)])
def test_a_link_keeps_up_if_it_carries_an_average_per_update(rate: float, expected: bool) -> None:
    assert keeps_up(200.0, 2.0, rate) is expected
