"""Metrics beside the tensors: weighted means, correct after any number of calls and failed rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.allreduce.vector.metrics import MetricMeans, checked_metrics
from p2pavg.base.errors import AccumulateError
from p2pavg.base.limits import MAX_METRICS

MANY = {f"m{index}": float(index) for index in range(MAX_METRICS)}

numbers = st.floats(-1e9, 1e9)
weights = st.floats(1e-6, 1e6)
calls = st.lists(
    st.tuples(st.dictionaries(st.sampled_from("abc"), numbers, max_size=3), weights), max_size=20
)


def means(*calls: tuple[Mapping[str, float], float]) -> MetricMeans:
    found = MetricMeans()
    for metrics, weight in calls:
        found.add(metrics, weight)
    return found


def exact(calls: list[tuple[dict[str, float], float]], name: str) -> Fraction | None:
    given = [(Fraction(metrics[name]), Fraction(weight)) for metrics, weight in calls if name in metrics]
    total = sum(weight for _, weight in given)
    return sum((value * weight for value, weight in given), Fraction()) / total if given else None


class TestMeans:
    @given(calls)
    def test_means_of_any_calls(self, calls: list[tuple[dict[str, float], float]]) -> None:
        found = means(*calls).means
        for name in "abc":
            expected = exact(calls, name)
            assert (name in found) == (expected is not None)
            if expected is not None:
                assert found[name] == pytest.approx(float(expected), rel=1e-9, abs=1e-4)

    @given(calls, st.integers(0, 20))
    def test_merged_means_equal_means_of_all_calls(
        self, calls: list[tuple[dict[str, float], float]], where: int
    ) -> None:
        whole, first, second = means(*calls), means(*calls[:where]), means(*calls[where:])
        second.merge(first)
        assert second.means == pytest.approx(whole.means, rel=1e-9, abs=1e-4)

    def test_merging_does_not_change_the_other(self) -> None:
        one, other = means(({"loss": 1.0}, 1.0)), means(({"loss": 3.0}, 1.0))
        one.merge(other)
        assert (one.means, other.means) == ({"loss": 2.0}, {"loss": 3.0})

    def test_mean_of_extreme_values(self) -> None:
        assert means(({"loss": 1e308}, 1.0), ({"loss": -1e308}, 1.0)).means == {"loss": 0.0}
        assert means(({"loss": 1.0}, 1e15), ({"loss": 3.0}, 5e-324)).means == {"loss": 1.0}


class TestRoom:
    def test_number_of_names_is_limited(self) -> None:
        found = means((MANY, 1.0))
        found.check_room(MANY)
        with pytest.raises(AccumulateError, match="at most 16 metrics"):
            found.check_room({"one more": 1.0})

    def test_too_many_names_at_once_are_refused(self) -> None:
        with pytest.raises(AccumulateError, match="at most 16 metrics"):
            MetricMeans().check_room(MANY | {"one more": 1.0})

    def test_merged_names_beyond_the_limit_are_left_out(self) -> None:
        found = means((MANY, 1.0))
        found.merge(means(({"one more": 1.0, "m3": 5.0}, 1.0)))
        assert found.means == MANY | {"m3": 4.0}

    def test_a_metric_of_the_averager_is_refused_by_name(self) -> None:
        with pytest.raises(AccumulateError, match="metric 'm3' belongs to the run's topology"):
            MetricMeans(["m3"]).check_room(MANY)

    def test_there_is_always_room_for_a_metric_of_the_averager(self) -> None:
        own = MetricMeans(["own"])
        with pytest.raises(AccumulateError, match="at most 15 metrics"):
            own.check_room(MANY)
        own.merge(means((MANY, 1.0)))
        assert len(own.means) == 15


class TestChecks:
    @pytest.mark.parametrize("value", [1, 1.5, np.float32(1.5), np.int64(3), Fraction(1, 2), -0.0, 5e-324])
    def test_any_number_becomes_a_float(self, value: Any) -> None:
        [(name, found)] = checked_metrics({"loss": value}).items()
        assert (name, found, type(found)) == ("loss", float(value), float)

    @pytest.mark.parametrize(
        "value", [math.nan, math.inf, -math.inf, np.float32("nan"), 1.1e100, -1.1e100, 10**400]
    )
    def test_non_finite_or_large_value_is_refused_by_name(self, value: Any) -> None:
        with pytest.raises(AccumulateError, match=r"metric 'loss' must be a finite number, 1e\+100 at most"):
            checked_metrics({"accuracy": 0.5, "loss": value})

    @pytest.mark.parametrize("value", [None, "1.0", True, 1j, [1.0]])
    def test_value_that_is_no_number_is_refused_by_name(self, value: Any) -> None:
        with pytest.raises(AccumulateError, match=r"metric 'loss' must be a number, got \w+"):
            checked_metrics({"accuracy": 0.5, "loss": value})

    @pytest.mark.parametrize("value", [torch.tensor(1.0), np.array(1.0), np.bool_(True)])
    def test_tensor_error_says_what_to_do(self, value: Any) -> None:
        with pytest.raises(AccumulateError, match=r"metric 'loss' must be a number, got \S+; use \.item\(\)"):
            checked_metrics({"loss": value})

    @pytest.mark.parametrize("name", ["", "x" * 33, "a\nb", "\x1b[2J", 5, None, b"loss", "half \ud800"])
    def test_a_name_that_cannot_be_printed_is_refused(self, name: Any) -> None:
        with pytest.raises(AccumulateError, match="a metric's name has 1 to 32 printable characters"):
            checked_metrics({name: 1.0})

    @pytest.mark.parametrize("name", ["x" * 32, "loss/train", "übung 1"])
    def test_any_other_name_is_allowed(self, name: str) -> None:
        assert checked_metrics({name: 1.0}) == {name: 1.0}

    @pytest.mark.parametrize("metrics", [None, 1.0, [("loss", 1.0)], "loss"])
    def test_other_than_a_mapping_is_refused(self, metrics: Any) -> None:
        with pytest.raises(AccumulateError, match="metrics must be a mapping of names to numbers, got "):
            checked_metrics(metrics)
