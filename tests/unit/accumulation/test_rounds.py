"""What a round takes, gives back or releases, and what comes meanwhile: nothing is lost, nothing counts twice."""

from __future__ import annotations

import pytest
import torch

from p2pavg.accumulation import Accumulation, Contribution


def add(accumulation: Accumulation, value: float, weight: float = 1.0) -> None:
    accumulation.add([torch.full((4,), value)], weight)


def take(accumulation: Accumulation) -> Contribution:
    taken = accumulation.take()
    assert taken is not None
    return taken


def mean(accumulation: Accumulation) -> float | None:
    found = accumulation.mean()
    if found is None:
        return None
    assert isinstance(found, list)
    assert bool((found[0] == found[0][0]).all())
    return found[0][0].item()


def test_what_is_taken_is_gone() -> None:
    accumulation = Accumulation()
    add(accumulation, 1.0, 3.0)
    taken = take(accumulation)
    assert (taken.weight, taken.mean.tolist()) == (3.0, [1.0] * 4)
    assert accumulation.weight == 0
    assert mean(accumulation) is None
    assert accumulation.take() is None


def test_what_comes_during_a_round_belongs_to_the_next() -> None:
    accumulation = Accumulation()
    add(accumulation, 1.0)
    taken = take(accumulation)
    add(accumulation, 5.0, 2.0)
    assert taken.mean.tolist() == [1.0] * 4
    accumulation.release(taken)
    assert (mean(accumulation), accumulation.weight) == (5.0, 2.0)


def test_a_failed_round_gives_everything_back() -> None:
    accumulation = Accumulation()
    add(accumulation, 1.0)
    add(accumulation, 3.0)
    accumulation.give_back(take(accumulation))
    assert (mean(accumulation), accumulation.weight) == (2.0, 2.0)


def test_a_failed_round_is_averaged_with_what_came_meanwhile() -> None:
    accumulation = Accumulation()
    add(accumulation, 1.0, 3.0)
    taken = take(accumulation)
    add(accumulation, 5.0, 1.0)
    accumulation.give_back(taken)
    assert (mean(accumulation), accumulation.weight) == (2.0, 4.0)
    add(accumulation, 12.0, 1.0)
    assert (mean(accumulation), accumulation.weight) == (4.0, 5.0)


def test_any_number_of_failed_rounds_changes_nothing() -> None:
    accumulation = Accumulation()
    values = [float(2**power) for power in range(6)]
    for value in values:
        add(accumulation, value)
        taken = take(accumulation)
        accumulation.give_back(taken)
    assert accumulation.weight == len(values)
    assert mean(accumulation) == pytest.approx(sum(values) / len(values), rel=1e-6)


def test_after_a_success_it_starts_anew() -> None:
    accumulation = Accumulation()
    for value in (1.0, 2.0, 3.0):
        add(accumulation, value)
        taken = take(accumulation)
        assert taken.mean.tolist() == [value] * 4
        accumulation.release(taken)
    assert mean(accumulation) is None


def test_clear_forgets() -> None:
    accumulation = Accumulation()
    add(accumulation, 1.0)
    accumulation.clear()
    assert accumulation.weight == 0
    assert mean(accumulation) is None
    assert accumulation.take() is None
    add(accumulation, 7.0)
    assert (mean(accumulation), accumulation.weight) == (7.0, 1.0)


def test_clear_during_a_round_forgets_what_it_would_give_back() -> None:
    accumulation = Accumulation()
    add(accumulation, 1.0)
    taken = take(accumulation)
    add(accumulation, 3.0)
    accumulation.clear()
    assert mean(accumulation) is None
    add(accumulation, 5.0, 2.0)
    accumulation.give_back(taken)
    assert (mean(accumulation), accumulation.weight) == (5.0, 2.0)


def test_clear_changes_nothing_in_the_round_that_runs() -> None:
    accumulation = Accumulation()
    add(accumulation, 1.0, 2.0)
    taken = take(accumulation)
    accumulation.clear()
    add(accumulation, 9.0)
    assert (taken.weight, taken.mean.tolist()) == (2.0, [1.0] * 4)


def test_clear_keeps_the_schema() -> None:
    accumulation = Accumulation()
    add(accumulation, 1.0)
    schema = accumulation.schema
    accumulation.clear()
    assert accumulation.schema == schema


def test_two_buffers_take_turns_and_no_third_is_made() -> None:
    accumulation = Accumulation()
    seen = []
    for value in range(8):
        add(accumulation, float(value))
        taken = take(accumulation)
        seen.append(taken.mean.data_ptr())
        add(accumulation, -1.0)  # meanwhile, into the other one
        if value % 3:
            accumulation.release(taken)
        else:
            accumulation.give_back(taken)
    assert len(set(seen)) == 2
    accumulation.clear()
    add(accumulation, 1.0)
    assert take(accumulation).mean.data_ptr() in seen


def test_one_buffer_is_enough_when_nothing_comes_meanwhile() -> None:
    accumulation = Accumulation()
    seen = set()
    for _ in range(4):
        add(accumulation, 1.0)
        taken = take(accumulation)
        seen.add(taken.mean.data_ptr())
        accumulation.release(taken)
    assert len(seen) == 1
