"""Metrics follow the tensors that they belong to: into the round, back, or nowhere."""

from __future__ import annotations

import pytest
import torch

from p2pavg.allreduce.vector.accumulation import Accumulation, Contribution
from p2pavg.base.errors import AccumulateError

ONES = [torch.ones(4)]


def take(accumulation: Accumulation) -> Contribution:
    taken = accumulation.take()
    assert taken is not None
    return taken


def waiting(accumulation: Accumulation) -> dict[str, float]:
    """Return the metrics of the next contribution."""
    taken = accumulation.take()
    return {} if taken is None else taken.metrics.means


def test_contribution_carries_its_metrics() -> None:
    accumulation = Accumulation()
    accumulation.add(ONES, 1.0, {"loss": 4.0})
    accumulation.add(ONES, 5.0)
    accumulation.add(ONES, 3.0, {"loss": 8.0, "accuracy": 0.5})
    assert take(accumulation).metrics.means == {"loss": 7.0, "accuracy": 0.5}


def test_failed_rounds_metrics_are_merged_with_newer_ones() -> None:
    accumulation = Accumulation()
    accumulation.add(ONES, 3.0, {"loss": 1.0, "accuracy": 0.5})
    taken = take(accumulation)
    accumulation.add(ONES, 1.0, {"loss": 5.0})
    accumulation.give_back(taken)
    assert waiting(accumulation) == {"loss": 2.0, "accuracy": 0.5}


@pytest.mark.parametrize("used", [False, True])
def test_withheld_metrics_come_back_if_unused(used: bool) -> None:
    accumulation = Accumulation()
    accumulation.add(ONES, 1.0, {"loss": 4.0})
    taken = take(accumulation)
    accumulation.withhold(taken)
    assert waiting(accumulation) == {}
    accumulation.found_out(taken, used=used)
    assert waiting(accumulation) == ({} if used else {"loss": 4.0})


def test_clear_drops_metrics() -> None:
    accumulation = Accumulation()
    accumulation.add(ONES, 1.0, {"loss": 4.0})
    accumulation.clear()
    accumulation.add(ONES, 1.0)
    assert waiting(accumulation) == {}


def test_clear_during_a_round_drops_its_metrics() -> None:
    accumulation = Accumulation()
    accumulation.add(ONES, 1.0, {"loss": 4.0})
    taken = take(accumulation)
    accumulation.clear()
    accumulation.add(ONES, 1.0, {"loss": 8.0})
    accumulation.give_back(taken)
    assert taken.metrics.means == {"loss": 4.0}
    assert waiting(accumulation) == {"loss": 8.0}


def test_refused_metric_changes_nothing() -> None:
    accumulation = Accumulation()
    accumulation.add(ONES, 1.0, {"loss": 4.0})
    many = {f"m{index}": 1.0 for index in range(16)}
    with pytest.raises(AccumulateError, match="metric 'loss'"):
        accumulation.add(ONES, 1.0, {"loss": float("nan")})
    with pytest.raises(AccumulateError, match="at most 16 metrics"):
        accumulation.add(ONES, 1.0, many)
    with pytest.raises(AccumulateError):
        accumulation.add([torch.full((4,), torch.inf)], 1.0, {"loss": 8.0, "accuracy": 1.0})
    assert accumulation.weight == 1.0
    assert waiting(accumulation) == {"loss": 4.0}


def test_limit_of_names_holds_for_each_contribution() -> None:
    accumulation = Accumulation()
    accumulation.add(ONES, 1.0, {f"m{index}": 1.0 for index in range(16)})
    taken = take(accumulation)
    accumulation.add(ONES, 1.0, {f"n{index}": 1.0 for index in range(16)})
    accumulation.give_back(taken)
    assert sorted(waiting(accumulation)) == sorted(f"n{index}" for index in range(16))


class TestDeclared:
    def test_declare_accumulates_nothing_and_fixes_the_schema(self) -> None:
        accumulation = Accumulation()
        accumulation.declare(ONES)
        assert (accumulation.weight, accumulation.mean(), accumulation.take()) == (0, None, None)
        declared = accumulation.schema
        accumulation.add(ONES, 1.0)
        assert accumulation.schema == declared
        with pytest.raises(AccumulateError):
            accumulation.add([torch.ones(5)], 1.0)

    def test_declare_refuses_a_schema_other_than_the_accumulated(self) -> None:
        accumulation = Accumulation()
        accumulation.add(ONES, 1.0)
        accumulation.declare(ONES)
        for other in ([torch.ones(5)], [torch.ones(4)] * 2, {"a": torch.ones(4)}):
            with pytest.raises(AccumulateError):
                accumulation.declare(other)
        assert accumulation.weight == 1.0

    def test_declare_reads_no_values(self) -> None:
        accumulation = Accumulation()
        accumulation.declare([torch.full((4,), torch.nan)])
        assert accumulation.schema is not None
