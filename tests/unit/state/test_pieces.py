"""Which donor sends which pieces: no piece is lost, excluded donors get no work, slow ones are taken over."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from p2pavg.base.limits import ASK_AGAIN_SECONDS, REPLY_SECONDS, STALL_SECONDS
from p2pavg.state.joiner.pieces import (
    AMONG_OTHERS,
    DONOR_PIECE_SECONDS,
    MAX_RANGES,
    STALLED_SECONDS,
    TRUSTED_FAILURES,
    FetchManifest,
    Meter,
    Pieces,
    Range,
    WaitUntil,
)
from p2pavg.state.messages import MAX_RANGE

MIB = 1 << 20


def plan_of(count: int, *donors: str, size: int = MIB, have: Sequence[int] = ()) -> Pieces:
    plan = Pieces()
    plan.start(0.0)
    for donor in donors:
        plan.add(donor)
        plan.opened(donor, 0, 0.0)
    plan.begin([size] * count, have)
    return plan


def take(plan: Pieces, donor: str, now: float = 0.0) -> Range:
    decision = plan.next(donor, now)
    assert isinstance(decision, Range), decision
    return decision


def send(plan: Pieces, donor: str, range_: Range, now: float) -> None:
    """Let a donor send a whole range."""
    for index in [*range_.left]:
        plan.came(donor, range_, index, now)
    plan.ended(donor, range_, now)


def with_rate(plan: Pieces, donor: str, rate: float) -> None:
    plan.donors[donor].meter = Meter()
    plan.donors[donor].meter.note(int(rate), 1.0)


class TestManifest:
    def test_one_donor_is_asked_and_another_one_after_a_while(self) -> None:
        plan = Pieces()
        plan.start(0.0)
        for donor in ("a", "b"):
            plan.add(donor)
            plan.opened(donor, 0, 0.0)
        assert isinstance(plan.next("a", 0.0), FetchManifest)
        assert isinstance(plan.next("a", 0.1), WaitUntil)
        waiting = plan.next("b", 0.1)
        assert isinstance(waiting, WaitUntil)
        assert waiting.until == STALLED_SECONDS
        assert isinstance(plan.next("b", STALLED_SECONDS), FetchManifest)
        plan.manifest_came("b", 4.0)
        assert not plan.donors["a"].is_busy
        assert isinstance(plan.next("a", 4.0), WaitUntil), "until earlier pieces are verified"
        plan.begin([1, 1])
        assert isinstance(plan.next("a", 4.0), Range)

    def test_another_donor_is_asked_at_once_when_the_first_one_fails(self) -> None:
        plan = Pieces()
        for donor in ("a", "b"):
            plan.add(donor)
            plan.opened(donor, 0, 0.0)
        plan.next("a", 0.0)
        plan.failed("a", 0.5, "it is gone")
        assert isinstance(plan.next("b", 0.5), FetchManifest)

    def test_one_that_let_a_download_wait_is_asked_after_the_others_in_later_ones(self) -> None:
        slow: set[str] = set()

        def plan() -> Pieces:
            found = Pieces(slow=slow)
            for donor in ("silent", "good"):
                found.add(donor)
                found.opened(donor, 0, 0.0)
            return found

        first, second, third = plan(), plan(), plan()
        assert isinstance(first.next("silent", 0.0), FetchManifest)
        assert isinstance(first.next("good", STALLED_SECONDS), FetchManifest)
        assert isinstance(second.next("silent", 0.0), WaitUntil)
        assert isinstance(second.next("good", 0.0), FetchManifest)
        # It is asked all the same when the other one is gone, and counts as any other one when it has answered.
        second.failed("good", 0.5, "it is gone")
        assert isinstance(second.next("silent", 0.5), FetchManifest)
        second.manifest_came("silent", 1.0)
        assert isinstance(third.next("silent", 0.0), FetchManifest)


class TestRanges:
    def test_the_first_ranges_have_one_piece_each(self) -> None:
        plan = plan_of(100, "a", "b")
        assert [take(plan, "a").left for _ in range(MAX_RANGES)] == [[0], [1]]
        assert isinstance(plan.next("a", 0.0), WaitUntil)
        assert take(plan, "b").left == [2]

    def test_a_range_is_what_a_donor_sends_in_a_second_or_two(self) -> None:
        plan = plan_of(100, "a")
        with_rate(plan, "a", 2.2 * MIB)
        assert take(plan, "a").count == 3
        with_rate(plan, "a", 1000 * MIB)
        assert take(plan, "a").count == MAX_RANGE

    def test_the_last_pieces_are_shared(self) -> None:
        plan = plan_of(6, "a", "b")
        for donor in ("a", "b"):
            with_rate(plan, donor, 1000 * MIB)
        assert take(plan, "a").left == [0, 1, 2]
        assert take(plan, "b").left == [3, 4]


class TestEndGame:
    def slow_and_fast(self) -> Pieces:
        plan = plan_of(4, "slow", "fast")
        with_rate(plan, "slow", 4 * MIB)
        assert [take(plan, "slow").left for _ in range(2)] == [[0, 1], [2]]
        assert take(plan, "fast").left == [3]
        send(plan, "fast", plan.donors["fast"].ranges[0], 0.1)
        return plan

    def test_a_donor_that_is_much_slower_is_taken_over_from_its_last_piece_on(self) -> None:
        plan = self.slow_and_fast()
        with_rate(plan, "slow", 0.1 * MIB)
        with_rate(plan, "fast", 10 * MIB)
        assert take(plan, "fast", 0.1).left == [0, 1, 2]

    def test_a_donor_that_is_about_as_fast_is_not(self) -> None:
        plan = self.slow_and_fast()
        with_rate(plan, "fast", 3 * MIB)
        assert isinstance(plan.next("fast", 0.1), WaitUntil)

    def test_a_donor_that_finishes_within_half_a_second_is_not(self) -> None:
        plan = self.slow_and_fast()
        with_rate(plan, "slow", 8 * MIB)
        with_rate(plan, "fast", 1000 * MIB)
        assert isinstance(plan.next("fast", 0.1), WaitUntil)

    def test_a_donor_that_stalls_is_taken_over_even_by_a_slow_one(self) -> None:
        plan = self.slow_and_fast()
        with_rate(plan, "fast", 0.001 * MIB)
        assert isinstance(plan.next("fast", STALLED_SECONDS), WaitUntil)
        assert take(plan, "fast", STALLED_SECONDS + 0.1).left == [2]

    def test_a_piece_is_asked_of_two_donors_at_most_while_they_send(self) -> None:
        plan = plan_of(1, "a", "b", "c")
        take(plan, "a")
        for donor in ("b", "c"):
            with_rate(plan, donor, 1000 * MIB)
        with_rate(plan, "a", 0.001 * MIB)
        take(plan, "b", 1.0)
        with_rate(plan, "b", 0.001 * MIB)
        assert isinstance(plan.next("c", 1.0), WaitUntil)

    def test_what_came_from_another_donor_is_cancelled(self) -> None:
        plan = self.slow_and_fast()
        with_rate(plan, "slow", 0.1 * MIB)
        with_rate(plan, "fast", 10 * MIB)
        taken = take(plan, "fast", 0.1)
        first, second = plan.donors["slow"].ranges
        assert plan.came("fast", taken, 0, 0.2) == ()
        assert plan.came("fast", taken, 1, 0.2) == (first,)
        assert second in plan.came("fast", taken, 2, 0.2)
        assert plan.complete
        plan.came("slow", first, 0, 0.3)
        assert plan.twice_bytes == MIB


class TestFailures:
    def test_a_pause_grows_and_is_longer_while_others_are_there(self) -> None:
        plan = plan_of(10, "a", "b")
        plan.failed("a", 100.0, "it is gone")
        assert plan.may_use_at("a") == 100.0 + ASK_AGAIN_SECONDS * AMONG_OTHERS
        plan.failed("b", 100.0, "it is gone")
        pauses = []
        for _ in range(10):
            pauses.append(plan.may_use_at("a") - 100.0)
            plan.failed("a", 100.0, "it is gone")
        assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
        assert pauses[-1] == STALL_SECONDS

    def test_silence_is_a_failure_only_if_something_was_asked(self) -> None:
        plan = plan_of(10, "a")
        assert plan.too_slow(100.0) == []
        take(plan, "a", 100.0)
        assert plan.too_slow(100.0 + REPLY_SECONDS - 0.1) == []
        assert [peer_id for peer_id, _ in plan.too_slow(100.0 + REPLY_SECONDS)] == ["a"]

    def test_bytes_without_a_piece_are_a_failure(self) -> None:
        plan = plan_of(10, "a")
        take(plan, "a")
        for second in range(int(DONOR_PIECE_SECONDS)):
            plan.observe("a", second + 1, float(second))
            assert plan.too_slow(float(second)) == []
        assert plan.too_slow(DONOR_PIECE_SECONDS) == [("a", "it completed no piece within 120 s")]

    def test_a_lonely_excluded_donor_is_never_tried_again(self) -> None:
        plan = plan_of(10, "a")
        plan.exclude("a", 1.0, "sent piece 3 with another digest")
        assert plan.may_use_at("a") == math.inf
        assert plan.hopeless(1.0) is None
        why = plan.hopeless(1.0 + STALL_SECONDS)
        assert why == "no donor is left: a: sent piece 3 with another digest"

    def test_a_donor_that_only_fails_does_not_keep_a_joiner_waiting(self) -> None:
        plan = plan_of(10, "a")
        now = 0.0
        for _ in range(TRUSTED_FAILURES):
            assert plan.hopeless(now) is None
            plan.failed("a", now, "it sent nothing")
            now += 1.0
            plan.opened("a", 0, now)
        assert plan.hopeless(now) is None
        assert plan.hopeless(now + STALL_SECONDS) is not None


NAMES = ["a", "b", "c", "d"]


class Downloads(RuleBasedStateMachine):
    """Donors come and go, send, stall, fail and lie, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.count = 40
        self.plan = plan_of(self.count, have=[5, 17])
        self.have = {5, 17}
        self.asked: list[tuple[str, Range]] = []
        self.excluded: set[str] = set()
        self.twice = 0

    @rule(donor=st.sampled_from(NAMES), seconds=st.floats(0.0, 20.0))
    def open(self, donor: str, seconds: float) -> None:
        self.now += seconds
        self.plan.add(donor)
        if self.plan.may_use_at(donor) <= self.now and not self.plan.donors[donor].active:
            assert donor not in self.excluded
            self.plan.opened(donor, 0, self.now)

    @rule(donor=st.sampled_from(NAMES), rate=st.floats(1.0, 1e9))
    def ask(self, donor: str, rate: float) -> None:
        if donor not in self.plan.donors:
            return
        with_rate(self.plan, donor, rate)
        decision = self.plan.next(donor, self.now)
        if isinstance(decision, Range):
            range_ = decision
            assert donor not in self.excluded
            assert range_.left == [*range(range_.first, range_.first + range_.count)]
            assert 1 <= range_.count <= MAX_RANGE
            assert not self.have & set(range_.left), "a piece that is here is not asked for again"
            self.asked.append((donor, range_))
            assert len(self.plan.donors[donor].ranges) <= MAX_RANGES

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), pieces=st.integers(0, MAX_RANGE))
    def send(self, data: st.DataObject, pieces: int) -> None:
        """Let the answer to a request come, also one that its donor's failure has overtaken."""
        donor, range_ = data.draw(st.sampled_from(self.asked))
        for index in range_.left[:pieces]:
            self.plan.came(donor, range_, index, self.now)
            self.twice += index in self.have
            self.have.add(index)
        if not range_.left or pieces == 0:
            self.plan.ended(donor, range_, self.now)
            self.asked.remove((donor, range_))

    @rule(donor=st.sampled_from(NAMES))
    def fail(self, donor: str) -> None:
        if donor in self.plan.donors:
            self.plan.failed(donor, self.now, "it is gone")

    @rule(donor=st.sampled_from(NAMES[2:]))
    def lie(self, donor: str) -> None:
        if donor in self.plan.donors:
            self.plan.exclude(donor, self.now, "sent a wrong piece")
            self.excluded.add(donor)

    @invariant()
    def every_missing_piece_is_free_or_asked_for(self) -> None:
        free = {index for first, end in self.plan._free for index in range(first, end)}
        held = {
            index for donor in self.plan.donors.values() for range_ in donor.ranges for index in range_.left
        }
        assert free | (held - self.have) == set(range(self.count)) - self.have
        assert not free & held
        assert self.plan.done_bytes == len(self.have) * MIB
        assert self.plan.twice_bytes == self.twice * MIB
        assert self.plan.complete == (len(self.have) == self.count)
        assert [*self.plan._free] == sorted(self.plan._free)

    def teardown(self) -> None:
        """One honest donor completes every download, whatever has happened before."""
        for donor, range_ in self.asked:
            self.plan.ended(donor, range_, self.now)
        for donor in self.plan.donors:
            self.plan.failed(donor, self.now, "it is gone")
        self.plan.add("honest")
        self.plan.opened("honest", 0, self.now)
        while not self.plan.complete:
            send(self.plan, "honest", take(self.plan, "honest", self.now), self.now)


Downloads.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestDownloads = Downloads.TestCase


@given(
    rates=st.lists(st.floats(1e4, 1e8), min_size=1, max_size=5),
    count=st.integers(1, 60),
    deaths=st.lists(st.floats(0.0, 30.0), max_size=4),
)
@settings(max_examples=60)
def test_each_piece_is_fetched_and_few_are_fetched_twice(
    rates: list[float], count: int, deaths: list[float]
) -> None:
    """Donors of any rates send what they are asked; some of them die. The first one lives."""
    names = [f"donor {number}" for number in range(len(rates))]
    plan = plan_of(count, *names)
    dies = dict(zip(names[1:], deaths, strict=False))
    busy: dict[
        str, tuple[Range, int, float]
    ] = {}  # the range, its next piece, and the moment at which it is here
    queued: dict[str, list[Range]] = {name: [] for name in names}
    received = dict.fromkeys(names, 0)
    now, steps = 0.0, 0

    def duration(name: str) -> float:
        return MIB / rates[names.index(name)]

    while not plan.complete:
        steps += 1
        assert steps < 20_000, "the download does not end"
        for name in names:
            if plan.donors[name].active:
                while isinstance(decision := plan.next(name, now), Range):
                    queued[name].append(decision)
            if name not in busy and queued[name]:
                range_ = queued[name].pop(0)
                busy[name] = (range_, range_.left[0], now + duration(name))
        events = [(at, name) for name, (_, _, at) in busy.items()]
        events += [(at, name) for name, at in dies.items()]
        now, name = min(events)
        if name in dies and dies[name] <= now:
            del dies[name]
            busy.pop(name, None)
            queued[name].clear()
            plan.failed(name, now, "it died")
            continue
        range_, index, _ = busy.pop(name)
        received[name] += MIB
        plan.observe(name, received[name], now)
        plan.came(name, range_, index, now)
        if range_.left:
            busy[name] = (range_, range_.left[0], now + duration(name))
        else:
            plan.ended(name, range_, now)
    assert plan.done_bytes == count * MIB
    assert plan.twice_bytes <= len(rates) * MAX_RANGES * MAX_RANGE * MIB
