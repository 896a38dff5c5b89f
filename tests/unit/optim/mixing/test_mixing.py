"""The rules of mixing: cells, places, round numbers, and how fast anchors come together."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.group.places.gossip import next_round, rounds_of_others
from p2pavg.optim.mixing.mixed import SKETCH, sketch_of
from p2pavg.optim.mixing.mixing import ROUND, contraction, is_too_far, lag_behind
from scripts.benchmarks.mixing import Mixing, measured
from tests.unit.group.samples import candidate, roster

ids = st.text(st.characters(codec="ascii"), min_size=1, max_size=60)
rounds = st.integers(0, 2**53)


class TestRoundNumbers:
    @given(st.integers(0, 10**9), st.integers(0, 10**9))
    def test_the_number_of_a_partner_follows_from_the_median(self, own: int, other: int) -> None:
        assert rounds_of_others(own, (own + other) / 2, ("me", "other"), "me") == other

    @given(st.integers(3, 8), st.integers(0, 1000), st.sampled_from([1e9, -1e9, 2.0**53]))
    def test_fewer_than_half_of_a_group_make_it_throw_no_average_away(
        self, size: int, own: int, claim: float
    ) -> None:
        liars = (size - 1) // 2
        said = [claim if index < liars else own + index % 3 for index in range(size)]
        group = roster([candidate(index, metrics={ROUND: float(one)}) for index, one in enumerate(said)])
        ids = [member.peer_id for member in group.members]
        others = rounds_of_others(own, group.metrics[ROUND], ids, ids[-1])
        assert not is_too_far(own, others, 8)

    @given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 100))
    def test_two_peers_continue_from_the_larger_number(self, own: int, other: int, lag: int) -> None:
        if not is_too_far(own, other, lag):
            assert next_round(own, other, lag) == next_round(other, own, lag) == max(own, other) + 1

    @given(st.integers(0, 10**6), st.floats(allow_nan=False, min_value=0, max_value=1e300))
    def test_no_claim_advances_a_peer_far(self, own: int, claimed: float) -> None:
        assert own < next_round(own, claimed, 8) <= own + 9

    def test_a_claim_that_is_not_a_number_is_too_far(self) -> None:
        assert is_too_far(3, math.nan, 8)
        assert is_too_far(3, math.inf, 8)
        assert not is_too_far(3, 11, 8)
        assert is_too_far(3, 12, 8)
        assert is_too_far(12, 3, 8)

    def test_half_of_the_others_decide_that_a_peer_is_behind(self) -> None:
        assert lag_behind(0, [9], 8) == 9
        assert lag_behind(0, [8], 8) == 0
        assert lag_behind(0, [2**53, 3], 8) == 0
        assert lag_behind(0, [2**53, 9, 9], 8) == 9
        assert lag_behind(0, [], 8) == 0


class TestDistance:
    """The published claim: a round of random pairs halves the mean squared distance (Boyd et al. 2006)."""

    @pytest.mark.parametrize("group_size", [2, 3, 8, 64])
    def test_gossip_divides_the_squared_distance_by_the_size_of_a_group(self, group_size: int) -> None:
        assert contraction(1.0, 0.0, group_size) == pytest.approx(1 / group_size)

    @pytest.mark.parametrize(("peers", "golden"), [(10, 0.3737), (100, 0.4930), (1000, 0.5003)])
    def test_simulated_pairs_halve_it_in_each_round(self, peers: int, golden: float) -> None:
        found, run = measured(peers, rounds=10)
        assert found == pytest.approx(golden, abs=5e-4)
        assert found < 0.55
        assert max(run.left_over) <= 0.1
        assert run.crowd <= 24

    @pytest.mark.parametrize("group_size", [4, 8])
    def test_simulated_larger_groups_do_better(self, group_size: int) -> None:
        found, _ = measured(300, rounds=5, group_size=group_size)
        assert found < 1.3 / group_size

    def test_simulated_momentum_agrees_with_the_theory(self) -> None:
        run = Mixing(1000, momentum=0.5, lr=0.7)
        distances = run.run(24)
        found = (distances[-1] / distances[8]) ** (1 / 16)
        assert found == pytest.approx(contraction(0.7, 0.5, 2), rel=0.1)

    def test_simulated_nesterov_momentum_agrees_with_the_theory(self) -> None:
        generator = torch.Generator().manual_seed(0)
        x, m, squares = torch.randn(20_000, generator=generator), torch.zeros(20_000), []
        for _ in range(24):
            pairs = torch.randperm(len(x), generator=generator).view(-1, 2)
            away = torch.empty_like(x)
            away[pairs] = x[pairs] - x[pairs].mean(1, keepdim=True)
            m = 0.5 * m + away
            x = x - (away + 0.5 * m)
            squares.append(float(x.var()))
        found = (squares[-1] / squares[8]) ** (1 / 15)
        assert found == pytest.approx(contraction(1.0, 0.5, 2, nesterov=True), rel=0.05)

    def test_the_mean_of_all_peers_stays_what_it_was(self) -> None:
        run = Mixing(50)
        before = run.anchors.mean(0).copy()
        run.run(10)
        assert abs(run.anchors.mean(0) - before).max() < 1e-12


class TestSketch:
    def test_projection_is_linear_and_does_not_depend_on_the_cut_into_tensors(self) -> None:
        generator = torch.Generator().manual_seed(1)
        one, other = (torch.randn(5000, generator=generator) for _ in range(2))
        parts = [one[:7].view(7, 1), one[7:3000], one[3000:]]
        assert torch.allclose(sketch_of(parts), sketch_of([one]), atol=1e-4)
        assert torch.allclose(sketch_of([one - other]), sketch_of([one]) - sketch_of([other]), atol=1e-3)

    @pytest.mark.parametrize("kind", ["random", "constant", "one element", "few large"])
    def test_distances_are_estimated_to_a_few_percent(self, kind: str) -> None:
        """Four standard errors, on fixed values: the signs are drawn from the positions."""
        count = 3 * 2**20 + 17
        values = torch.zeros(count)
        if kind == "random":
            values = torch.randn(count, generator=torch.Generator().manual_seed(2))
        elif kind == "constant":
            values += 0.25
        elif kind == "one element":
            values[12345] = 3.0
        else:
            values[::4099] = 2.0
        found = float(sketch_of([values]).norm() / values.norm())
        assert found == pytest.approx(1.0, abs=4 / math.sqrt(2 * SKETCH))
