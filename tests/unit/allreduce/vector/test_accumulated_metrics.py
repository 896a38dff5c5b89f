"""Metrics that are refused or too many beside the tensors, and a schema that is declared before them."""

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
