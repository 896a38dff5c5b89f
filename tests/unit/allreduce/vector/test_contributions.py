"""Contributions that rounds take, give back or release: none is lost, none counts twice."""

from __future__ import annotations

import pytest
import torch

from p2pavg.allreduce.vector.accumulation import Accumulation, Contribution
from p2pavg.base.errors import AccumulateError
from p2pavg.base.limits import MAX_WEIGHT


def add(accumulation: Accumulation, value: float, weight: float = 1.0) -> None:
    accumulation.add([torch.full((4,), value)], weight)


def take(accumulation: Accumulation) -> Contribution:
    taken = accumulation.take()
    assert taken is not None
    return taken


def test_clear_does_not_change_the_running_round() -> None:
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
        add(accumulation, -1.0)  # meanwhile, into the other buffer
        if value % 3:
            accumulation.release(taken)
        else:
            accumulation.give_back(taken)
    assert len(set(seen)) == 2
    accumulation.clear()
    add(accumulation, 1.0)
    assert take(accumulation).mean.data_ptr() in seen


def test_one_buffer_suffices_without_newer_tensors() -> None:
    accumulation = Accumulation()
    seen = set()
    for _ in range(4):
        add(accumulation, 1.0)
        taken = take(accumulation)
        seen.add(taken.mean.data_ptr())
        accumulation.release(taken)
    assert len(seen) == 1


class TestWithheld:
    """Rounds from which this peer was cut off: it learns later if they used its contribution."""

    def cut_off(self, accumulation: Accumulation, value: float, weight: float = 1.0) -> Contribution:
        """Run one more round that ends cut off."""
        add(accumulation, value, weight)
        taken = take(accumulation)
        accumulation.withhold(taken)
        return taken

    def test_weight_limit_includes_withheld_contributions(self) -> None:
        accumulation = Accumulation()
        unresolved = self.cut_off(accumulation, 1.0, MAX_WEIGHT)
        with pytest.raises(AccumulateError, match="would sum to more"):
            add(accumulation, 1.0)
        accumulation.found_out(unresolved, used=True)
        halves = [self.cut_off(accumulation, 1.0, MAX_WEIGHT / 2) for _ in range(2)]
        accumulation.found_out(halves[0], used=True)
        with pytest.raises(AccumulateError, match="would sum to more"):
            add(accumulation, 1.0, MAX_WEIGHT * 0.6)
        add(accumulation, 1.0, MAX_WEIGHT / 2)
