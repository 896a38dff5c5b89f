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


def mean(accumulation: Accumulation) -> float | None:
    found = accumulation.mean()
    if found is None:
        return None
    assert isinstance(found, list)
    assert bool((found[0] == found[0][0]).all())
    return found[0][0].item()


def test_taken_contribution_is_gone() -> None:
    accumulation = Accumulation()
    add(accumulation, 1.0, 3.0)
    taken = take(accumulation)
    assert (taken.weight, taken.mean.tolist()) == (3.0, [1.0] * 4)
    assert accumulation.weight == 0
    assert mean(accumulation) is None
    assert accumulation.take() is None


def test_tensors_during_a_round_belong_to_the_next() -> None:
    accumulation = Accumulation()
    add(accumulation, 1.0)
    taken = take(accumulation)
    add(accumulation, 5.0, 2.0)
    assert taken.mean.tolist() == [1.0] * 4
    accumulation.release(taken)
    assert (mean(accumulation), accumulation.weight) == (5.0, 2.0)


def test_failed_round_gives_its_contribution_back() -> None:
    accumulation = Accumulation()
    add(accumulation, 1.0)
    add(accumulation, 3.0)
    accumulation.give_back(take(accumulation))
    assert (mean(accumulation), accumulation.weight) == (2.0, 2.0)


def test_failed_contribution_is_averaged_with_newer_tensors() -> None:
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


def test_success_starts_a_new_mean() -> None:
    accumulation = Accumulation()
    for value in (1.0, 2.0, 3.0):
        add(accumulation, value)
        taken = take(accumulation)
        assert taken.mean.tolist() == [value] * 4
        accumulation.release(taken)
    assert mean(accumulation) is None


def test_clear_drops_everything() -> None:
    accumulation = Accumulation()
    add(accumulation, 1.0)
    accumulation.clear()
    assert accumulation.weight == 0
    assert mean(accumulation) is None
    assert accumulation.take() is None
    add(accumulation, 7.0)
    assert (mean(accumulation), accumulation.weight) == (7.0, 1.0)


def test_clear_during_a_round_drops_its_contribution() -> None:
    accumulation = Accumulation()
    add(accumulation, 1.0)
    taken = take(accumulation)
    add(accumulation, 3.0)
    accumulation.clear()
    assert mean(accumulation) is None
    add(accumulation, 5.0, 2.0)
    accumulation.give_back(taken)
    assert (mean(accumulation), accumulation.weight) == (5.0, 2.0)


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

    def test_withheld_contribution_counts_nowhere_until_settled(self) -> None:
        accumulation = Accumulation()
        assert accumulation.unresolved_weight == 0
        self.cut_off(accumulation, 1.0, 3.0)
        assert (accumulation.unresolved_weight, accumulation.weight, mean(accumulation)) == (3.0, 0, None)
        assert accumulation.take() is None

    def test_used_contribution_is_gone(self) -> None:
        accumulation = Accumulation()
        accumulation.found_out(self.cut_off(accumulation, 1.0, 3.0), used=True)
        assert (accumulation.unresolved_weight, accumulation.weight, mean(accumulation)) == (0, 0, None)

    def test_unused_contribution_counts_again(self) -> None:
        accumulation = Accumulation()
        accumulation.found_out(self.cut_off(accumulation, 1.0, 3.0), used=False)
        assert (accumulation.unresolved_weight, accumulation.weight, mean(accumulation)) == (0, 3.0, 1.0)

    def test_unused_contribution_is_averaged_with_newer_tensors(self) -> None:
        accumulation = Accumulation()
        unresolved = self.cut_off(accumulation, 1.0, 3.0)
        add(accumulation, 5.0)
        assert (accumulation.unresolved_weight, accumulation.weight, mean(accumulation)) == (3.0, 1.0, 5.0)
        accumulation.found_out(unresolved, used=False)
        assert (accumulation.unresolved_weight, accumulation.weight, mean(accumulation)) == (0, 4.0, 2.0)

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
    @pytest.mark.parametrize("used", [(True, False, False), (False, True, True), (False,) * 3, (True,) * 3])
    def test_several_withheld_contributions(self, order: tuple[int, ...], used: tuple[bool, ...]) -> None:
        accumulation = Accumulation()
        unresolved = [self.cut_off(accumulation, 2.0**power, 2.0**power) for power in range(3)]
        add(accumulation, 64.0, 64.0)
        running = take(accumulation)
        add(accumulation, 128.0, 128.0)
        assert (accumulation.unresolved_weight, accumulation.weight) == (7.0, 128.0)
        left = {128.0}
        for index in order:
            accumulation.found_out(unresolved[index], used=used[index])
            left |= set() if used[index] else {2.0**index}
            assert accumulation.weight == sum(left)
            assert mean(accumulation) == pytest.approx(sum(one * one for one in left) / sum(left), rel=1e-6)
        assert accumulation.unresolved_weight == 0
        assert (running.weight, running.mean.tolist()) == (64.0, [64.0] * 4), "the round that runs"
        accumulation.give_back(running)
        left.add(64.0)
        assert accumulation.weight == sum(left)
        assert mean(accumulation) == pytest.approx(sum(one * one for one in left) / sum(left), rel=1e-6)

    def test_unresolved_weight_is_exactly_zero_when_all_is_settled(self) -> None:
        accumulation = Accumulation()
        unresolved = [self.cut_off(accumulation, 1.0, weight) for weight in (0.1, 0.2, 0.3)]
        for one in unresolved:
            accumulation.found_out(one, used=True)
        assert accumulation.unresolved_weight == 0, "a caller waits for that"

    def test_later_success_keeps_the_withheld_contribution(self) -> None:
        accumulation = Accumulation()
        unresolved = self.cut_off(accumulation, 1.0, 3.0)
        for value in (10.0, 20.0, 30.0):
            add(accumulation, value)
            running = take(accumulation)
            assert running.mean.tolist() == [value] * 4
            accumulation.release(running)
        add(accumulation, 5.0)
        assert unresolved.mean.tolist() == [1.0] * 4
        accumulation.found_out(unresolved, used=False)
        assert (mean(accumulation), accumulation.weight) == (2.0, 4.0)

    @pytest.mark.parametrize("used", [True, False])
    def test_clear_drops_a_withheld_contribution(self, used: bool) -> None:
        accumulation = Accumulation()
        unresolved = [self.cut_off(accumulation, 1.0), self.cut_off(accumulation, 2.0)]
        accumulation.clear()
        assert (accumulation.unresolved_weight, accumulation.weight) == (0, 0)
        add(accumulation, 5.0, 2.0)
        for one in unresolved:
            accumulation.found_out(one, used=used)
            assert (accumulation.unresolved_weight, accumulation.weight, mean(accumulation)) == (0, 2.0, 5.0)

    def test_clear_drops_only_older_withheld_contributions(self) -> None:
        accumulation = Accumulation()
        older = self.cut_off(accumulation, 1.0, 4.0)
        accumulation.clear()
        newer = self.cut_off(accumulation, 3.0, 2.0)
        assert accumulation.unresolved_weight == 2.0
        accumulation.found_out(older, used=False)
        assert (accumulation.unresolved_weight, accumulation.weight) == (2.0, 0)
        accumulation.found_out(newer, used=False)
        assert (accumulation.unresolved_weight, accumulation.weight, mean(accumulation)) == (0, 2.0, 3.0)

    def test_round_cut_off_after_clear_withholds_nothing(self) -> None:
        accumulation = Accumulation()
        add(accumulation, 1.0, 4.0)
        taken = take(accumulation)
        accumulation.clear()
        accumulation.withhold(taken)
        assert accumulation.unresolved_weight == 0
        accumulation.found_out(taken, used=False)
        assert (accumulation.unresolved_weight, accumulation.weight, mean(accumulation)) == (0, 0, None)

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
