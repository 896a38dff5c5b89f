"""Attendance: the peers that a peer expects, for how long, and the credit of their words."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from p2pavg.optim.coordination import attendance
from p2pavg.optim.coordination.attendance import (
    CLAIM_MARGIN,
    FIRST_BATCH_SECONDS,
    FIRST_BATCHES,
    KNOWN_UPDATES,
    MAX_ABSENT_RETRY_SECONDS,
    MAX_REMEMBERED,
    MAX_SETTLE_SECONDS,
    MAX_UPDATES_PER_SECOND,
    MIN_ABSENCE_SECONDS,
    NEWCOMER_SECONDS,
    NEWCOMERS,
    PAUSE_BATCHES,
    REPLAY_SECONDS,
    WOKEN_SECONDS,
    PeerTrust,
)
from p2pavg.optim.coordination.progress import MAX_BATCH_SECONDS, PeerProgress, Survey, survey

SETTLE_SECONDS = 5.0
BATCH_SECONDS = 2.0
SPEED = 4.0  # samples a second: 8 a batch


def state_at(epoch: int) -> bytes:
    return epoch.to_bytes(32, "big")


ELSEWHERE = b"x" * 32


class World:
    """One peer, the words of others, and a clock that the test controls."""

    def __init__(self) -> None:
        self.now = 100.0
        self.epoch = 0
        self.samples = 8.0
        self.waiting = False
        self.words: dict[str, PeerProgress] = {}
        self.attendance = PeerTrust(self.now)

    @property
    def mine(self) -> PeerProgress:
        return self.word(waiting=self.waiting, samples=self.samples, started=self.attendance.started)

    def word(self, **changes: Any) -> PeerProgress:
        fields: dict[str, Any] = {
            "epoch": self.epoch,
            "state": state_at(self.epoch),
            "samples": 8.0,
            "samples_per_second": SPEED,
            "waiting": False,
            "batch_seconds": BATCH_SECONDS,
        }
        return PeerProgress(**(fields | changes))

    def says(self, *peers: str, **changes: Any) -> None:
        self.words |= dict.fromkeys(peers, self.word(**changes))

    def took(self, *peers: str) -> None:
        self.attendance.took(peers, self.mine, self.words, self.now)
        self.epoch += 1
        self.samples = 0.0
        self.says(*peers, samples=0.0, started=True)

    def seen(self) -> Survey:
        heard = self.attendance.receive(self.mine, self.words, self.now)
        return survey(self.mine, heard, stays=self.attendance.stays(self.mine, self.now))

    def is_settled(self, peers_to_start: int = 2) -> bool:
        return self.attendance.is_settled(self.mine, self.seen().peers, peers_to_start, self.now)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(attendance, "SETTLE_START_SECONDS", SETTLE_SECONDS)
    return World()


@pytest.fixture
def running(world: World) -> World:
    """Return a run in which this peer has taken an update with two others."""
    world.says("a", "b")
    world.seen()
    world.took("a", "b")
    return world


class TestStart:
    def test_start_is_settled_when_no_new_peer_has_come_for_a_while(self, world: World) -> None:
        world.says("a")
        assert not world.is_settled()
        world.now += 4.9
        assert not world.is_settled()
        world.says("b")
        assert not world.is_settled()
        world.now += 4.9
        assert not world.is_settled()
        world.now += 0.1
        assert world.is_settled()

    def test_peers_with_other_parameters_do_not_delay_the_start(self, world: World) -> None:
        world.says("a")
        world.is_settled()
        world.now += SETTLE_SECONDS
        world.says("b", state=ELSEWHERE)
        assert world.is_settled()

    def test_new_peers_delay_the_start_for_a_limited_time(self, world: World) -> None:
        began = world.now
        while not world.is_settled():
            world.says(f"new{world.now}", samples=0.0)
            world.now += 4.0
        assert world.now - began == pytest.approx(MAX_SETTLE_SECONDS, abs=8.0)

    def test_a_peer_is_counted_before_its_first_batch(self, world: World) -> None:
        world.says("a", samples=0.0, batch_seconds=0.0, samples_per_second=0.0)
        assert world.seen().peers == 2

    def test_peer_that_never_computes_is_not_waited_for(self, world: World) -> None:
        world.says("a")
        world.says("stuck", samples=0.0, batch_seconds=0.0)
        assert world.seen().peers == 3
        world.now += FIRST_BATCH_SECONDS
        world.says("a", samples=9.0)
        assert world.seen().peers == 2

    def test_no_settling_after_the_start(self, running: World) -> None:
        running.says("new")
        assert running.is_settled(1)

    def test_a_peer_that_comes_into_a_run_does_not_wait_for_others_to_start(self, world: World) -> None:
        world.epoch = 7
        world.says("a", samples=0.0, started=True)
        assert world.is_settled()
        assert world.attendance.joins(world.mine)
        assert world.seen().peers == 2, "it is there, though it has yet to compute"

    def test_peers_that_load_one_state_wait_for_each_other(self, world: World) -> None:
        world.epoch = 7
        world.says("a", samples=0.0)
        assert not world.is_settled()
        assert not world.attendance.joins(world.mine)

    def test_at_epoch_0_no_claim_shortens_the_start(self, world: World) -> None:
        world.says("liar", started=True)
        assert not world.is_settled()


class TestPauses:
    def test_a_peer_that_computes_nothing_is_not_waited_for(self, running: World) -> None:
        running.says("a", "b", samples=8.0, started=True)
        assert running.seen().peers == 3
        running.now += MIN_ABSENCE_SECONDS - 0.1
        running.says("a", samples=16.0, started=True)
        assert running.seen().peers == 3
        running.now += 0.1
        assert running.seen().peers == 2
        running.says("b", samples=16.0, started=True)
        assert running.seen().peers == 3, "it is back"

    def test_slow_batches_are_waited_for(self, running: World) -> None:
        running.says("a", "b", started=True, batch_seconds=30.0)
        running.seen()
        running.now += PAUSE_BATCHES * 30.0 - 0.1
        assert running.seen().peers == 3
        running.now += 0.1
        assert running.seen().peers == 1

    def test_waiting_peer_does_not_count_as_paused(self, running: World) -> None:
        running.says("a", waiting=True, started=True)
        running.seen()
        running.now += 1000.0
        assert running.seen().peers == 2


class TestLaterStates:
    """Which peers count against a later state that fewer peers have."""

    def sleeps(self, world: World, *others: str) -> None:
        """Let this peer and others sleep, and compute a batch each when they have woken."""
        world.seen()
        world.now += 20.0
        world.samples += 8.0
        world.says(*others, samples=world.samples, started=True)

    def test_a_known_peer_alone_does_not_move_peers_that_were_awake(self, running: World) -> None:
        running.seen()
        running.says("b", state=ELSEWHERE, epoch=3)
        running.now += BATCH_SECONDS
        running.samples += 8.0
        running.says("a", samples=8.0, started=True)
        assert running.seen().ahead is None

    def test_peers_that_slept_do_not_outweigh_one_that_went_on(self, running: World) -> None:
        self.sleeps(running, "a")
        running.says("b", state=ELSEWHERE, epoch=3)
        seen = running.seen()
        assert (seen.ahead, seen.ahead_peers, seen.few_ahead) == ((3, 1), ("b",), True)
        running.says("a", state=ELSEWHERE, epoch=3)
        seen = running.seen()
        assert (seen.ahead, seen.few_ahead) == ((3, 2), False), "these are more than this peer"

    def test_a_peer_that_was_awake_waits_for_those_that_sleep(self, running: World) -> None:
        """It would follow one word otherwise, for as long as the other one sleeps."""
        for _ in range(4):
            running.says("b", state=ELSEWHERE, epoch=3)
            running.seen()
            running.now += 5.0
            running.samples += 8.0
        assert running.seen().ahead is None

    def test_one_word_holds_woken_peers_up_for_a_while_only(self, running: World) -> None:
        self.sleeps(running, "a")
        running.says("b", state=ELSEWHERE, epoch=3)
        woke = running.now
        while running.seen().ahead is not None:
            assert running.now < woke + 2 * WOKEN_SECONDS
            running.now += 1.0
        assert running.now == woke + WOKEN_SECONDS, "the other one is held up as well, and computes nothing"

    def test_peers_that_have_fetched_this_state_do_not_outweigh_those_that_went_on(
        self, running: World
    ) -> None:
        self.sleeps(running)
        running.says("new", "newer", "newest", samples=8.0, started=False)
        running.says("a", "b", state=ELSEWHERE, epoch=2)
        assert running.seen().ahead == (2, 2)

    def test_the_same_for_a_peer_that_has_fetched_this_state_itself(self) -> None:
        world = World()
        world.epoch = 7
        world.says("new", "newer", samples=8.0)
        world.says("a", state=ELSEWHERE, epoch=8)
        assert world.seen().ahead == (8, 1)

    def test_halves_of_one_epoch_do_not_swap_their_states(self, running: World) -> None:
        """Each would follow the other one, if those that slept did not count."""
        other = World()
        other.says("c", "d")
        other.seen()
        other.took("c", "d")
        for world, there in ((running, "b"), (other, "d")):
            self.sleeps(world, "a" if world is running else "c")
            world.says(there, state=ELSEWHERE)
            assert world.seen().ahead is None

    def test_before_the_first_update_none_has_missed_anything(self, world: World) -> None:
        world.says("a", "b")
        world.says("c", state=ELSEWHERE, epoch=2)
        world.now += 40.0
        assert world.seen().ahead is None


class TestJoining:
    def test_a_peer_counts_once_it_has_computed_a_batch(self, running: World) -> None:
        running.says("new", samples=0.0)
        assert running.seen().peers == 3
        running.says("new", samples=8.0)
        assert running.seen().peers == 4

    def test_newcomer_is_waited_for_briefly_for_any_claim(self, running: World) -> None:
        running.waiting = True
        running.says("a", "b", waiting=True, started=True)
        running.says("new", batch_seconds=MAX_BATCH_SECONDS)
        assert running.seen().computing == ("new",)
        began = running.now
        while running.seen().computing:
            running.now += 1.0
            running.says("new", samples=running.now, batch_seconds=MAX_BATCH_SECONDS)
        assert running.now - began == pytest.approx(NEWCOMER_SECONDS, abs=1.0)

    def test_number_of_newcomers_in_a_round_is_limited(self, running: World) -> None:
        running.says("a", "b", started=True)
        running.says(*(f"new{number}" for number in range(64)), waiting=True)
        assert running.seen().peers == 3 + NEWCOMERS

    def test_absent_newcomers_are_expected_exponentially_less_often(self, running: World) -> None:
        """They use new names each time."""
        expected = 0
        for update in range(60):
            running.says("a", "b", started=True)
            running.says(*(f"{update}/{number}" for number in range(16)))
            expected += running.seen().peers > 3
            running.took("a", "b")
        assert expected <= 9
        running.epoch += 300
        running.says("a", "b", started=True)
        running.says("honest")
        assert running.seen().peers == 4, "not for ever"


class TestMissedRounds:
    def test_peer_absent_from_a_failed_round_counts_after_a_new_word(self, running: World) -> None:
        running.says("a", "b", started=True)
        running.seen()
        running.attendance.no_group_formed(running.mine, running.words, running.now)
        assert running.seen().peers == 1
        running.says("a", samples=16.0, started=True)
        assert running.seen().peers == 2

    def test_repeatedly_absent_peer_counts_after_growing_pauses(self, running: World) -> None:
        """The pauses are in seconds: without these peers there may never be another update."""
        rounds = 0
        for second in range(3600):
            running.now += 1.0
            running.says("a", samples=float(second + 1), started=True)
            if running.seen().peers == 2:
                rounds += 1
                running.attendance.no_group_formed(running.mine, running.words, running.now)
        assert rounds <= 3600 / MAX_ABSENT_RETRY_SECONDS + 8

    def test_repeatedly_absent_peer_is_expected_exponentially_less_often(self, world: World) -> None:
        """Its words do not help: each absence costs the others a match timeout."""
        counted = []
        for _ in range(40):
            world.says("liar", waiting=True)
            counted.append(world.seen().peers == 2)
            world.took()
        assert counted[:3] == [True, True, True]
        assert sum(counted) <= 8
        world.says("liar", waiting=True)
        world.took("liar")
        assert world.seen().peers == 2, "it came"

    def test_peer_that_still_computes_has_missed_no_round_in_the_background(self, world: World) -> None:
        """The others have begun without it, after the grace period."""
        world.attendance = PeerTrust(world.now, overlaps=True)
        world.says("a", "slow")
        world.took("a", "slow")
        for _ in range(6):
            world.says("a", waiting=True, started=True)
            world.says("slow", started=True)
            world.took("a")
        world.says("a", "slow", started=True)
        assert world.seen().peers == 3

    def test_number_of_remembered_absent_peers_is_limited(self, running: World) -> None:
        for number in range(2 * MAX_REMEMBERED):
            running.words = {}
            running.says(f"new{number}", waiting=True)
            running.took()
        assert len(running.attendance._missed) <= MAX_REMEMBERED


class TestClaims:
    def test_samples_of_known_peers_are_believed(self, running: World) -> None:
        running.says("a", samples=1e6, started=True)
        assert running.seen().samples == 1e6

    def test_a_first_word_counts_as_a_few_batches(self, world: World) -> None:
        world.says("new", samples=1e9)
        assert world.seen().samples == world.samples + FIRST_BATCHES * 8.0

    def test_later_words_are_limited_by_the_time_since_the_first(self, world: World) -> None:
        world.says("new", samples=1e9)
        world.seen()
        world.now += 10.0
        assert world.seen().samples == world.samples + FIRST_BATCHES * 8.0 + CLAIM_MARGIN * SPEED * 10.0
        assert world.seen().claimed == world.samples + 1e9

    def test_the_claimed_speed_does_not_matter(self, world: World) -> None:
        world.says("new", samples=1e9, samples_per_second=1e15, batch_seconds=1e-9)
        world.seen()
        world.now += 10.0
        assert world.seen().samples < 1000.0

    def test_a_newcomer_may_be_as_fast_as_the_known_ones(self, running: World) -> None:
        running.says("a", "b", samples=0.0, samples_per_second=1000.0, started=True)
        running.samples = 1e6
        running.says("new", samples=1e5)
        running.seen()
        running.now += 9.0
        assert running.seen().samples == pytest.approx(1e6 + FIRST_BATCHES * 8.0 + CLAIM_MARGIN * 9e3)

    def test_newcomers_together_count_for_no_more_than_the_others(self, running: World) -> None:
        running.samples = 16.0
        running.says("a", "b", samples=8.0, started=True)
        running.says(*(f"new{number}" for number in range(64)), samples=1e9)
        seen = running.attendance.receive(running.mine, running.words, running.now)
        new = sum(other.samples for other in seen if other.peer_id.startswith("new"))
        assert new == pytest.approx(32.0)


class TestBehind:
    def test_invented_peers_do_not_decide_while_known_ones_are_present(self, running: World) -> None:
        for epoch in (1, 2, 10**6):
            running.says(*(f"x{number}" for number in range(64)), state=ELSEWHERE, epoch=epoch)
            assert running.seen().ahead is None
        running.says("a", "b", state=state_at(2), epoch=2, started=True)
        assert running.seen().ahead == (2, 2)

    def test_possible_split_is_noted(self, running: World) -> None:
        running.says("a", "b", started=True)
        assert running.seen().unmet_ahead is None
        running.says("x", "y", state=ELSEWHERE, epoch=7)
        assert running.seen().unmet_ahead is None
        running.says("z", state=ELSEWHERE, epoch=7)
        assert (running.seen().ahead, running.seen().unmet_ahead) == (None, (7, 3))

    def test_invented_peers_do_not_hide_that_this_peer_is_behind(self, running: World) -> None:
        running.says(*(f"x{number}" for number in range(64)))
        running.says("a", "b", state=state_at(2), epoch=2, started=True)
        assert running.seen().ahead == (2, 2)

    def test_impossible_epoch_is_not_believed(self, running: World) -> None:
        """This holds for known peers too, until the epoch is possible: this peer may have been suspended."""
        for names in (("a", "b"), ("x", "y")):
            running.words = {}
            running.now = 200.0
            running.says(*names, state=ELSEWHERE, epoch=10**4)
            assert running.seen().ahead is None
            running.now = 100.0 + 10**4 / MAX_UPDATES_PER_SECOND
            assert running.seen().ahead == (10**4, 2)

    def test_a_peer_that_has_just_begun_believes_the_majority(self, world: World) -> None:
        """It knows no peer. This gap remains as long as any peer may join."""
        world.says("x", "y", state=ELSEWHERE, epoch=10**6)
        assert world.seen().ahead == (10**6, 2)

    def test_a_peer_that_took_none_of_the_last_updates_is_a_newcomer_again(self, running: World) -> None:
        for _ in range(KNOWN_UPDATES):
            running.says("b", started=True)
            running.took("b")
        running.says("a", state=ELSEWHERE, epoch=running.epoch + 1)
        running.says("b", "c", started=True)
        seen = running.attendance.receive(running.mine, running.words, running.now)
        assert [other.peer_id for other in seen if other.votes] == ["b"]

    def test_loading_a_state_clears_the_known_peers(self, running: World) -> None:
        running.attendance.begin(running.now)
        running.words = {}
        running.says("x", "y", state=ELSEWHERE, epoch=10**6)
        assert running.seen().ahead == (10**6, 2)


class TestFollowing:
    def test_words_may_be_slower_than_updates(self, running: World) -> None:
        """A companion's word is two updates old, although it has the same state as this peer."""
        old = {peer: replace(word, epoch=0, state=state_at(0)) for peer, word in running.words.items()}
        running.took("a", "b")
        running.words = dict(old)
        assert (running.seen().peers, running.seen().others) == (3, 0)
        running.now += MIN_ABSENCE_SECONDS
        assert (running.seen().peers, running.seen().others) == (1, 2)


class TestFollowers:
    """Peers that replay the last updates, and say that they will be in the next round."""

    def says(self, world: World, *peers: str, behind: int = 1) -> None:
        epoch = world.epoch - behind
        world.says(*peers, epoch=epoch, state=state_at(epoch), samples=0.0, waiting=True, follows=True)

    def test_a_follower_is_expected_in_the_next_round_before_it_has_caught_up(self, running: World) -> None:
        self.says(running, "f")
        assert running.seen().peers == 4

    def test_a_follower_counts_as_an_observer_until_it_has_taken_an_update(self, running: World) -> None:
        assert running.seen().observers == 0
        self.says(running, "f")
        assert running.seen().observers == 1
        self.says(running, "f", behind=0)
        assert (running.seen().peers, running.seen().observers) == (4, 1)
        running.took("a", "b", "f")
        assert (running.seen().peers, running.seen().observers) == (4, 0)
        assert running.attendance.known == {"a", "b", "f"}

    def test_the_late_word_of_a_follower_that_has_observed_counts_as_a_contributor(
        self, running: World
    ) -> None:
        self.says(running, "f", behind=0)
        late = running.words["f"]
        running.took("a", "b", "f")
        running.words["f"] = late
        assert (running.seen().peers, running.seen().observers) == (4, 0)

    def test_a_follower_that_is_not_expected_is_no_expected_observer(self, running: World) -> None:
        self.says(running, "f")
        running.waiting = True
        running.seen()
        running.now += REPLAY_SECONDS
        assert (running.seen().peers, running.seen().observers) == (3, 0)

    def test_a_follower_from_far_behind_is_not_expected(self, running: World) -> None:
        for _ in range(KNOWN_UPDATES):
            running.took("a", "b")
        running.says("f", epoch=0, state=state_at(0), waiting=True, follows=True)
        assert running.seen().peers == 3

    def test_a_follower_is_waited_for_briefly(self, running: World) -> None:
        self.says(running, "f")
        running.says("a", "b", waiting=True)
        running.waiting = True
        assert running.seen().peers == 4
        running.now += REPLAY_SECONDS - 0.1
        assert running.seen().peers == 4
        running.now += 0.1
        assert running.seen().peers == 3

    def test_a_follower_that_has_caught_up_is_not_given_up(self, running: World) -> None:
        running.waiting = True
        self.says(running, "f")
        running.seen()
        self.says(running, "f", behind=0)
        running.now += REPLAY_SECONDS + 0.1
        assert running.seen().peers == 4

    def test_a_follower_that_does_not_change_its_word_is_missed_once(self, running: World) -> None:
        self.says(running, "f")
        word = running.words["f"]
        assert running.seen().peers == 4
        running.took("a", "b")
        running.words["f"] = word
        assert running.seen().peers == 3
