"""The bandwidth that is announced after rounds of any shape, against a clock that the test moves."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.group.bandwidth import (
    DEFAULT_MBPS,
    MAX_MEASURED_MBPS,
    MIN_MBPS,
    NEW_WEIGHT,
    WINDOW_SECONDS,
    BandwidthMeter,
)

BEGUN = 500.0  # a clock may start at any value
STEP = 0.125  # exact in binary, like its sums

Legs = list[tuple[float, float, float]]
"""Seconds, and Mbit/s sent and received in them."""


def play(meter: BandwidthMeter, legs: Legs, *, begun: float = BEGUN) -> None:
    """Measure one round, sampled as an exchange samples it."""
    now, sent, received = begun, 0.0, 0.0
    meter.begin(now)
    for seconds, up, down in legs:
        for _ in range(round(seconds / STEP)):
            now, sent, received = now + STEP, sent + STEP * up * 1e6 / 8, received + STEP * down * 1e6 / 8
            meter.sample(now, int(sent), int(received))
    meter.end(now)


def after(*rounds: Legs) -> BandwidthMeter:
    meter = BandwidthMeter()
    for legs in rounds:
        play(meter, legs)
    return meter


def test_a_default_is_announced_before_any_round() -> None:
    assert BandwidthMeter().mbps == DEFAULT_MBPS == 100.0


def test_nothing_is_announced_before_a_round_has_shown_both_directions() -> None:
    meter = BandwidthMeter()
    assert meter.announced_mbps == 0.0
    play(meter, [(0.25, 40.0, 40.0)])
    assert meter.announced_mbps == 0.0, "too short to show anything"
    play(meter, [(2.0, 0.0, 20.0)])
    assert meter.announced_mbps == 0.0, "an observer without a share sends nothing"
    play(meter, [(2.0, 5.0, 20.0)])
    assert meter.announced_mbps == meter.mbps == pytest.approx(5.0)


def test_a_short_round_that_was_faster_than_the_default_is_announced() -> None:
    meter = after([(0.25, 400.0, 300.0)])
    assert meter.announced_mbps == meter.mbps == pytest.approx(300.0)


def test_a_limit_is_announced_before_any_round() -> None:
    assert BandwidthMeter(max_upload_mbps=30.0).announced_mbps == 30.0
    assert BandwidthMeter(max_upload_mbps=500.0).announced_mbps == 0.0


def test_the_first_round_counts_fully_and_the_slower_direction_is_announced() -> None:
    assert after([(2.0, 40.0, 60.0)]).mbps == pytest.approx(40.0)
    assert after([(2.0, 60.0, 40.0)]).mbps == pytest.approx(40.0)
    assert after([(2.0, 40.0, 60.0)]).known_mbps == pytest.approx((40.0, 60.0))


def test_a_later_round_lowers_the_rate_slowly_and_raises_it_at_once() -> None:
    first, slower = [(2.0, 80.0, 80.0)], [(2.0, 40.0, 40.0)]
    assert after(first, slower).mbps == pytest.approx(80 * (1 - NEW_WEIGHT) + 40 * NEW_WEIGHT) == 68.0
    assert after(slower, first).mbps == pytest.approx(80.0)


@pytest.mark.parametrize("rate", [89.9, 91.0, 100.0, 109.0])
def test_a_change_of_a_tenth_or_less_is_not_announced(rate: float) -> None:
    meter = after([(2.0, 100.0, 100.0)], [(2.0, rate, rate)])
    assert meter.mbps == pytest.approx(100.0)
    assert meter.known_mbps[0] == pytest.approx(max(rate, 0.7 * 100 + 0.3 * rate))


def test_changes_that_add_up_are_announced() -> None:
    meter = after([(2.0, 100.0, 100.0)], [(2.0, 109.0, 109.0)])
    assert meter.mbps == pytest.approx(100.0)
    play(meter, [(2.0, 111.0, 111.0)])
    assert meter.mbps == pytest.approx(111.0)


def test_no_more_than_the_processor_manages_is_announced() -> None:
    meter = after([(2.0, 8000.0, 9000.0)])
    assert meter.mbps == MAX_MEASURED_MBPS == 1000.0
    assert meter.known_mbps[0] == pytest.approx(8000.0)


def test_the_announced_rate_is_never_zero() -> None:
    assert after([(20.0, 0.001, 0.001)]).mbps == MIN_MBPS == 0.1


@pytest.mark.parametrize(("up", "down", "mbps"), [(30.0, None, 30.0), (None, 20.0, 20.0), (30.0, 20.0, 20.0)])
def test_a_limit_bounds_what_is_announced(up: float | None, down: float | None, mbps: float) -> None:
    meter = BandwidthMeter(max_upload_mbps=up, max_download_mbps=down)
    assert meter.mbps == mbps
    play(meter, [(2.0, 500.0, 500.0)])
    assert meter.mbps == mbps
    assert BandwidthMeter(max_upload_mbps=5000.0).mbps == DEFAULT_MBPS


def test_a_limit_below_the_minimum_leaves_the_minimum() -> None:
    assert BandwidthMeter(max_upload_mbps=0.01).mbps == MIN_MBPS


class TestTooShort:
    """Rounds that show a lower bound of the link's capacity, but not the capacity."""

    def test_a_short_round_never_lowers_the_rate(self) -> None:
        assert after([(0.375, 3.0, 3.0)]).mbps == DEFAULT_MBPS
        assert after([(2.0, 80.0, 80.0)], *[[(0.375, 3.0, 3.0)]] * 9).mbps == pytest.approx(80.0)

    def test_a_short_round_may_raise_the_rate(self) -> None:
        assert after([(0.375, 300.0, 400.0)]).mbps == pytest.approx(300.0)
        assert after([(2.0, 80.0, 80.0)], [(0.375, 300.0, 400.0)]).mbps == pytest.approx(300.0)

    def test_the_first_long_round_counts_fully_all_the_same(self) -> None:
        assert after([(0.375, 300.0, 300.0)], [(2.0, 50.0, 50.0)]).mbps == pytest.approx(50.0)

    @pytest.mark.parametrize("seconds", [0.0, 1e-9, 0.01])
    def test_data_that_arrived_in_an_instant_is_spread(self, seconds: float) -> None:
        """The data had been waiting in buffers before the round began."""
        meter = BandwidthMeter()
        meter.begin(BEGUN)
        meter.sample(BEGUN + seconds, 2_500_000, 2_500_000)
        meter.end(BEGUN + seconds)
        assert meter.mbps == pytest.approx(2.5 * 8 / (WINDOW_SECONDS / 5))

    @pytest.mark.parametrize("idle", [0.0, 60.0])
    def test_a_round_without_traffic_changes_nothing(self, idle: float) -> None:
        """An empty share of an auxiliary, or a round that fails at once, must not make the link look slow."""
        assert after([(idle, 0.0, 0.0)]).mbps == DEFAULT_MBPS
        assert after([(2.0, 80.0, 80.0)], [(idle, 0.0, 0.0)]).mbps == pytest.approx(80.0)

    def test_a_small_vector_in_a_long_round_never_lowers_the_rate(self) -> None:
        assert after([(10.0, 0.0, 0.0), (0.25, 50.0, 50.0), (10.0, 0.0, 0.0)]).mbps == DEFAULT_MBPS

    def test_a_slow_link_is_noticed_for_any_size_of_the_vector(self) -> None:
        assert after([(1.0, 0.5, 0.5)]).mbps == pytest.approx(0.5, rel=1e-3)

    def test_each_direction_is_measured_separately(self) -> None:
        meter = after([(2.0, 40.0, 0.0)])
        assert meter.known_mbps == pytest.approx((40.0, 0.0))


def test_rounds_that_do_not_begin_or_end() -> None:
    meter = BandwidthMeter()
    meter.sample(BEGUN, 10**9, 10**9)
    meter.end(BEGUN)
    assert meter.mbps == DEFAULT_MBPS
    meter.begin(BEGUN)
    meter.sample(BEGUN + 1.0, 10**9, 10**9)
    assert meter.mbps == DEFAULT_MBPS, "a round that runs changes nothing"
    play(meter, [(2.0, 40.0, 40.0)], begun=BEGUN + 5.0)
    assert meter.mbps == pytest.approx(40.0), "what did not end is forgotten"


def test_totals_need_not_begin_at_zero() -> None:
    meter = BandwidthMeter()
    meter.begin(BEGUN, 10**12, 10**13)
    for tick in range(1, 11):
        meter.sample(BEGUN + tick * STEP, 10**12 + tick * 10**6, 10**13 + tick * 10**6)
    meter.end(BEGUN + 10 * STEP)
    assert meter.mbps == pytest.approx(8 / STEP)


def busiest(samples: list[tuple[float, int]]) -> float:
    """Return the busiest rate, by checking every window."""
    return max(
        (total - before) * 8 / 1e6 / (now - then)
        for (then, before), (now, total) in itertools.combinations(samples, 2)
        if now - then >= WINDOW_SECONDS
    )


steps = st.tuples(st.integers(1, 40) | st.integers(1, 8), st.sampled_from([1, 10**6]) | st.integers(1, 10**7))


@given(st.lists(steps, min_size=20, max_size=60))
def test_the_busiest_window_counts_for_any_sampling(steps: list[tuple[int, int]]) -> None:
    now, total, samples = BEGUN, 0, [(BEGUN, 0)]
    meter = BandwidthMeter()
    meter.begin(BEGUN)
    for ticks, count in steps:
        now, total = now + ticks / 64, total + count
        samples.append((now, total))
        meter.sample(now, total, total)
    meter.end(now)
    if now - BEGUN >= WINDOW_SECONDS:
        assert meter.known_mbps == pytest.approx((busiest(samples),) * 2)


def test_the_samples_that_are_kept_are_bounded() -> None:
    meter = BandwidthMeter()
    play_long = [(600.0, 10.0, 10.0)]
    meter.begin(BEGUN)
    for tick in range(1, 6001):
        meter.sample(BEGUN + tick * 0.1, tick * 1000, tick * 1000)
        assert meter._round is not None
        assert all(len(direction._samples) <= 13 for direction in meter._round)
    meter.end(BEGUN + 600.0)
    assert after(play_long).mbps == pytest.approx(10.0)
