"""The bytes that pass a rate limit, on a clock that the test moves."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.net.limits.rate import (
    MIN_BURST_BYTES,
    UNLIMITED,
    WIRE_OVERHEAD,
    Accounts,
    RateLimit,
    TokenBucket,
    take_from_all,
)

BEGUN = 500.0
RATE = 1_000_000.0
BURST = 50_000

Gone = list[tuple[float, int]]
"""The moments at which bytes went, with their number."""


def most_in_a_window(gone: Gone, rate: float) -> float:
    """Return the largest number of bytes by which any window exceeded its rate."""
    gone = sorted(gone)
    totals = [0, *itertools.accumulate(count for _, count in gone)]
    return max(
        totals[last + 1] - totals[first] - rate * (gone[last][0] - gone[first][0])
        for first in range(len(gone))
        for last in range(first, len(gone))
    )


pauses = st.floats(0.0, 0.3) | st.just(0.0)


def taken(asked: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return when each count of tokens may go, taken after these pauses."""
    bucket, now, gone = TokenBucket(RATE, BURST), BEGUN, []
    for pause, count in asked:
        now += pause
        gone.append((now + bucket.take(now, count), count))
    return gone


@given(st.lists(st.tuples(pauses, st.integers(0, BURST)), min_size=1, max_size=60))
def test_no_window_has_more_than_its_rate_and_a_burst(asked: list[tuple[float, int]]) -> None:
    """Callers take at any moment, also while others still wait."""
    assert most_in_a_window(taken(asked), RATE) <= BURST + 1e-3


@given(st.lists(st.tuples(pauses, st.integers(0, 10 * BURST)), min_size=1, max_size=60))
def test_a_take_larger_than_the_burst_waits_until_it_is_earned(asked: list[tuple[float, int]]) -> None:
    assert most_in_a_window(taken(asked), RATE) <= max(BURST, *(count for _, count in asked)) + 1e-3


@given(
    st.lists(st.tuples(st.integers(1, 5 * BURST), st.floats(0.0, 0.04)), min_size=30, max_size=30),
    st.floats(0.0, 10.0),
)
def test_a_constant_sender_gets_the_full_rate(chunks: list[tuple[int, float]], idle: float) -> None:
    """The sender wakes up late after each wait, by less than the time of a burst."""
    bucket = TokenBucket(RATE, BURST)
    bucket.take(BEGUN, 0)
    now = begun = BEGUN + idle
    total = 0
    for count, late in chunks:
        wait = bucket.take(now, count)
        now += wait + late if wait else 0.0
        total += count
    seconds = now - begun
    assert total >= 0.95 * RATE * (seconds - 0.04)
    assert total <= RATE * seconds + BURST + 1e-3


def test_only_a_pause_earns_another_burst() -> None:
    bucket = TokenBucket(RATE, BURST)
    assert bucket.take(BEGUN, BURST) == 0.0
    assert bucket.take(BEGUN, 10_000) == pytest.approx(0.01)
    assert bucket.take(BEGUN, 10_000) == pytest.approx(0.02), "earlier takes come first"
    assert bucket.take(BEGUN + 0.02, 0) == pytest.approx(0.0)
    assert bucket.take(BEGUN + 100.0, BURST) == 0.0
    assert bucket.take(BEGUN + 100.0, BURST) == pytest.approx(0.05), "a long pause earns one burst, not many"


def test_an_earlier_moment_earns_nothing() -> None:
    bucket = TokenBucket(RATE, BURST)
    bucket.take(BEGUN, BURST)
    assert bucket.take(BEGUN - 10.0, 1000) == pytest.approx(0.001)
    assert bucket.take(BEGUN, 0) == pytest.approx(0.001)


@pytest.mark.parametrize(("rate", "burst"), [(0.0, 1), (-1.0, 1), (1.0, 0), (float("nan"), 1)])
def test_a_rate_of_zero_is_refused(rate: float, burst: int) -> None:
    with pytest.raises(ValueError, match="above 0"):
        TokenBucket(rate, burst)


class Clock:
    def __init__(self) -> None:
        self.now = BEGUN

    def __call__(self) -> float:
        return self.now


class TestRateLimit:
    @pytest.mark.parametrize("mbps", [0.1, 5.0, 100.0])
    def test_bytes_on_the_link_stay_under_the_limit(self, mbps: float) -> None:
        """Over ten seconds after a pause, the bytes with all headers stay under the limit and use it up."""
        clock = Clock()
        limit = RateLimit(mbps, clock=clock)
        gone: Gone = []
        piece = 16 * 1024
        rate = mbps * 1e6 / 8
        for _ in range(int(10.0 * rate / piece)):
            clock.now += limit.delay(piece)
            gone.append((clock.now, piece))
        assert most_in_a_window(gone[:500], rate / WIRE_OVERHEAD) <= max(0.05 * rate, 64 * 1024)
        sent = sum(count for _, count in gone) * WIRE_OVERHEAD / (clock.now - BEGUN)
        assert sent >= 0.95 * rate
        if mbps >= 5.0:
            assert sent <= 1.05 * rate

    @pytest.mark.parametrize(
        ("mbps", "kib"), [(1.0, 64), (20.0, 64), (60.0, 140), (1000.0, 256), (None, 256)]
    )
    def test_a_piece_takes_a_fiftieth_of_a_second_within_bounds(self, mbps: float | None, kib: int) -> None:
        assert RateLimit(mbps).piece_bytes == pytest.approx(kib * 1024, rel=0.01)

    @pytest.mark.parametrize("count", [0, 1, 2**40])
    def test_an_unlimited_rate_never_waits(self, count: int) -> None:
        def no_clock() -> float:
            raise AssertionError("asked for the time")

        assert UNLIMITED.delay(count) == 0.0
        assert RateLimit(None, clock=no_clock).delay(count) == 0.0

    def test_concurrent_threads_take_one_after_another(self) -> None:
        """No other thread takes anything between the reading of the clock and the take."""
        inside, most, waits = 0, 0, []

        def slow_clock() -> float:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            time.sleep(0.001)
            inside -= 1
            return BEGUN

        limit = RateLimit(8.0, clock=slow_clock)
        limit.delay(MIN_BURST_BYTES * 2)

        def take() -> None:
            for _ in range(10):
                waits.append(limit.delay(100))

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert most == 1
        assert len(set(waits)) == len(waits) == 80
        one = RateLimit(8.0, clock=Clock())
        one.delay(MIN_BURST_BYTES * 2)
        assert max(waits) == pytest.approx(one.delay(100 * 80))


def test_the_account_that_was_used_least_recently_is_forgotten() -> None:
    accounts = Accounts(1.0, 1.0, most=2)
    for name in ("one", "two", "one", "three"):
        accounts.of(name).take(BEGUN, 1.0)
    assert len(accounts) == 2
    assert [accounts.of(name).level(BEGUN) for name in ("one", "three", "two")] == [-1.0, 0.0, 1.0]


def test_an_empty_bucket_costs_the_others_nothing() -> None:
    full, empty = TokenBucket(1.0, 2.0), TokenBucket(1.0, 0.5)
    assert not take_from_all(BEGUN, 1.0, full, empty)
    assert take_from_all(BEGUN, 1.0, full)
    assert (full.level(BEGUN), empty.level(BEGUN)) == (1.0, 0.5)


def test_a_question_takes_no_account() -> None:
    accounts = Accounts(1.0, 2.0, most=1)
    accounts.of("one").take(BEGUN, 2.0)
    assert [accounts.level(BEGUN, name) for name in ("two", "one")] == [2.0, 0.0]
