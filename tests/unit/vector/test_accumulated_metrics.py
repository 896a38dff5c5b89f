"""Metrics go where the tensors go that they were measured on: into the round, back, or nowhere."""

from __future__ import annotations

import pytest
import torch

from p2pavg.errors import AccumulateError
from p2pavg.vector.accumulation import Accumulation, Contribution

ONES = [torch.ones(4)]


def take(accumulation: Accumulation) -> Contribution:
    taken = accumulation.take()
    assert taken is not None
    return taken


def waiting(accumulation: Accumulation) -> dict[str, float]:
    """What the next contribution carries."""
    taken = accumulation.take()
    return {} if taken is None else taken.metrics.means


def test_a_contribution_carries_what_was_measured_on_it() -> None:
    accumulation = Accumulation()
    accumulation.add(ONES, 1.0, {"loss": 4.0})
    accumulation.add(ONES, 5.0)
    accumulation.add(ONES, 3.0, {"loss": 8.0, "accuracy": 0.5})
    assert take(accumulation).metrics.means == {"loss": 7.0, "accuracy": 0.5}


def test_what_comes_during_a_round_belongs_to_the_next() -> None:
    accumulation = Accumulation()
    accumulation.add(ONES, 1.0, {"loss": 4.0})
    taken = take(accumulation)
    accumulation.add(ONES, 1.0, {"accuracy": 0.5})
    assert taken.metrics.means == {"loss": 4.0}
    accumulation.release(taken)
    assert waiting(accumulation) == {"accuracy": 0.5}


def test_a_failed_round_gives_them_back() -> None:
    accumulation = Accumulation()
    accumulation.add(ONES, 1.0, {"loss": 4.0})
    accumulation.give_back(take(accumulation))
    assert waiting(accumulation) == {"loss": 4.0}


def test_a_failed_round_is_averaged_with_what_came_meanwhile() -> None:
    accumulation = Accumulation()
    accumulation.add(ONES, 3.0, {"loss": 1.0, "accuracy": 0.5})
    taken = take(accumulation)
    accumulation.add(ONES, 1.0, {"loss": 5.0})
    accumulation.give_back(taken)
    assert waiting(accumulation) == {"loss": 2.0, "accuracy": 0.5}


@pytest.mark.parametrize("used", [False, True])
def test_what_is_withheld_comes_back_when_it_was_not_used(used: bool) -> None:
    accumulation = Accumulation()
    accumulation.add(ONES, 1.0, {"loss": 4.0})
    taken = take(accumulation)
    accumulation.withhold(taken)
    assert waiting(accumulation) == {}
    accumulation.found_out(taken, used=used)
    assert waiting(accumulation) == ({} if used else {"loss": 4.0})


def test_clear_forgets_them() -> None:
    accumulation = Accumulation()
    accumulation.add(ONES, 1.0, {"loss": 4.0})
    accumulation.clear()
    accumulation.add(ONES, 1.0)
    assert waiting(accumulation) == {}


def test_clear_during_a_round_forgets_what_it_would_give_back() -> None:
    accumulation = Accumulation()
    accumulation.add(ONES, 1.0, {"loss": 4.0})
    taken = take(accumulation)
    accumulation.clear()
    accumulation.add(ONES, 1.0, {"loss": 8.0})
    accumulation.give_back(taken)
    assert taken.metrics.means == {"loss": 4.0}
    assert waiting(accumulation) == {"loss": 8.0}


def test_nothing_changes_when_one_is_refused() -> None:
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


def test_there_is_room_for_as_many_again_once_they_are_taken() -> None:
    accumulation = Accumulation()
    accumulation.add(ONES, 1.0, {f"m{index}": 1.0 for index in range(16)})
    taken = take(accumulation)
    accumulation.add(ONES, 1.0, {f"n{index}": 1.0 for index in range(16)})
    accumulation.give_back(taken)
    assert sorted(waiting(accumulation)) == sorted(f"n{index}" for index in range(16))


class TestDeclared:
    def test_nothing_is_accumulated_and_what_is_averaged_stands(self) -> None:
        accumulation = Accumulation()
        accumulation.declare(ONES)
        assert (accumulation.weight, accumulation.mean(), accumulation.take()) == (0, None, None)
        declared = accumulation.schema
        accumulation.add(ONES, 1.0)
        assert accumulation.schema == declared
        with pytest.raises(AccumulateError):
            accumulation.add([torch.ones(5)], 1.0)

    def test_only_what_was_accumulated_already_can_be_declared(self) -> None:
        accumulation = Accumulation()
        accumulation.add(ONES, 1.0)
        accumulation.declare(ONES)
        for other in ([torch.ones(5)], [torch.ones(4)] * 2, {"a": torch.ones(4)}):
            with pytest.raises(AccumulateError):
                accumulation.declare(other)
        assert accumulation.weight == 1.0

    def test_values_are_not_read(self) -> None:
        accumulation = Accumulation()
        accumulation.declare([torch.full((4,), torch.nan)])
        assert accumulation.schema is not None
