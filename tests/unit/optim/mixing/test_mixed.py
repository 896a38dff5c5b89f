"""Local updates that mix, without a network: their steps, their refusals and their saved states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch.optim import SGD

import p2pavg
from p2pavg.base.result import FailedCode
from p2pavg.blocking import Averager
from p2pavg.optim import MixedUpdates, StepReport, gossip, noloco
from p2pavg.optim.coordination.progress import PeerProgress
from p2pavg.optim.coordination.view import LAST_WORDS
from p2pavg.optim.mixing.mixed import SKETCH
from p2pavg.optim.mixing.mixing import ROUND
from tests.unit.optim.fakes import Alone, large_batch, local, parameter

LR = 0.5


class Partner(Alone):
    """An averager whose average is that with a partner that the test chooses."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**({"compression": None} | changes))
        self.point: list[float] | None = None
        """What the partner contributes instead of parameters; the same as this peer if ``None``."""
        self.round_number: float | None = None
        self.mine: list[torch.Tensor] = []
        self.meetings: list[Any] = []

    def step(self, *, state: bytes, **options: Any) -> p2pavg.RoundResult:
        self.meetings.append(options.get("meeting"))
        result = super().step(state=state, **options)
        if not isinstance(result, p2pavg.Success):
            return result
        own = self._taken.metrics.means[ROUND]
        number = own if self.round_number is None else self.round_number
        values: dict[str, Any] = {name: getattr(result, name) for name in result.__slots__}
        return p2pavg.Success(
            **values | {"weights": {"me": 1.0, "other": 1.0}, "metrics": {ROUND: (own + number) / 2}}
        )

    def taken(self) -> list[torch.Tensor]:
        mine = super().taken()
        self.mine = [tensor.clone() for tensor in mine]
        if self.point is not None:
            mine[0] = (mine[0] + torch.tensor(self.point)) / 2
        return mine


def one_step(optimizer: MixedUpdates, of: torch.nn.Parameter, gradient: list[float]) -> StepReport:
    of.grad = torch.tensor(gradient)
    return optimizer.step(samples=1)


def optimizer_of(averager: Alone, of: torch.nn.Parameter, make: Any = gossip, **options: Any) -> MixedUpdates:
    given: dict[str, Any] = {"sync_every": 1, "partner_timeout": 0.5}
    if make is gossip:  # plain averages, if a test does not ask for more
        given |= {"lr": 1.0, "momentum": 0.0}
    made: MixedUpdates = make(SGD([of], lr=LR), cast(Averager, averager), **(given | options))
    return made


class TestSteps:
    def test_gossip_without_momentum_takes_the_average_of_the_parameters(self) -> None:
        averager, weight = Partner(), parameter(1.0, 2.0)
        averager.point = [3.0, 0.0]
        optimizer = optimizer_of(averager, weight)
        report = one_step(optimizer, weight, [1.0, 0.0])
        assert report.updated
        assert weight.tolist() == [(0.5 + 3.0) / 2, (2.0 + 0.0) / 2]
        assert optimizer.anchor[0].tolist() == weight.tolist()

    def test_gossip_goes_on_in_the_direction_of_its_averages(self) -> None:
        """x <- c + momentum (c - c'), in which the anchor of the beginning is the first c'."""
        averager, weight = Partner(), parameter(1.0, -2.0)
        optimizer = optimizer_of(averager, weight, momentum=0.5)
        before = torch.tensor([1.0, -2.0])
        for step in range(5):
            averager.point = [0.3 * step, 1.0 - step]
            gradient = torch.tensor([0.1 * (step + 1), -0.2])
            mine = optimizer.anchor[0] - LR * gradient
            average = (mine + torch.tensor(averager.point)) / 2
            one_step(optimizer, weight, gradient.tolist())
            torch.testing.assert_close(optimizer.anchor[0], average + 0.5 * (average - before))
            before = average

    def test_gossip_chooses_its_rate(self) -> None:
        averager, weight = Partner(), parameter(1.0, -2.0)
        optimizer = optimizer_of(averager, weight, lr="auto", momentum=0.5)
        rates = []
        for _ in range(8):  # the average is always the same way off
            averager.point = (optimizer.anchor[0] - 1.0).tolist()
            rates.append(one_step(optimizer, weight, [0.0, 0.0]).outer_rate)
        assert rates[0] == 1.0
        assert all(rate is not None and 0.5 <= rate <= 1.0 for rate in rates)
        assert rates == sorted(rates, reverse=True, key=lambda rate: rate or 0.0)
        assert rates[-1] != 1.0

    def test_noloco_takes_the_step_of_its_paper(self) -> None:
        """Equation: d <- alpha d + beta mean(D) - gamma (x - mean(x)), x <- x + d, with both peers written out."""
        averager, weight = Partner(), parameter(1.0)
        optimizer = optimizer_of(averager, weight, noloco, lr=0.7, momentum=0.5)
        ours, theirs = 1.0, 2.0  # the anchors
        momentum = 0.0
        for step in range(4):
            gradient, progress = 0.1 * (step + 1), 0.3 * (step - 1)
            averager.point = [theirs + progress]
            one_step(optimizer, weight, [gradient])
            mean_progress, mean_anchor = (-LR * gradient + progress) / 2, (ours + theirs) / 2
            momentum = 0.5 * momentum + 0.7 * mean_progress - 0.7 * (ours - mean_anchor)
            ours += momentum
            assert weight.item() == pytest.approx(ours, abs=1e-5)
            theirs += 0.2

    def test_a_peer_sends_one_vector_and_a_short_projection(self) -> None:
        averager, weight = Partner(), parameter(*range(5000))
        one_step(optimizer_of(averager, weight, noloco), weight, [0.0] * 5000)
        assert sum(tensor.numel() for tensor in averager.mine) == 5000 + SKETCH

    def test_distance_is_that_of_the_own_anchor_from_the_mean_of_the_groups(self) -> None:
        """The partner holds the first parameters, and this peer moves away from them."""
        averager, weight = Partner(), parameter(*[0.0] * 4096)
        optimizer = optimizer_of(averager, weight)
        first = one_step(optimizer, weight, [1.0] * 4096)
        assert first.consensus_distance == 0.0
        moved = float((optimizer.anchor[0]).norm())
        averager.point = [0.0] * 4096
        taken = averager.taken

        def with_the_first_anchor() -> list[torch.Tensor]:
            found = taken()
            found[1] = found[1] / 2  # the partner's projection is zero
            return found

        averager.taken = with_the_first_anchor  # type: ignore[method-assign]
        second = one_step(optimizer, weight, [0.0] * 4096)
        assert second.consensus_distance == pytest.approx(moved / 2, rel=0.1)

    def test_pairs_of_a_run_have_one_state_whatever_they_have_taken(self) -> None:
        averager, weight = Partner(), parameter(1.0)
        optimizer = optimizer_of(averager, weight)
        before = optimizer.lineage.state
        for _ in range(3):
            one_step(optimizer, weight, [1.0])
        assert optimizer.epoch == 3
        assert optimizer.lineage.state == before

    def test_other_first_parameters_are_another_state(self) -> None:
        one, other = (optimizer_of(Partner(), parameter(value)).lineage.state for value in (1.0, 2.0))
        assert one != other

    def test_nothing_is_compared(self) -> None:
        averager, weight = Partner(), parameter(1.0)
        optimizer = optimizer_of(averager, weight, check_every=None)
        reports = [one_step(optimizer, weight, [1.0]) for _ in range(12)]
        assert all(report.drifted is None and not report.differs for report in reports)


class TestRounds:
    def test_a_peer_continues_from_the_larger_round(self) -> None:
        averager, weight = Partner(), parameter(1.0)
        optimizer = optimizer_of(averager, weight)
        averager.round_number = 7
        assert one_step(optimizer, weight, [1.0]).epoch == 8

    def test_an_average_from_too_far_away_is_not_taken_and_the_work_is_kept(self) -> None:
        averager, weight = Partner(), parameter(1.0)
        optimizer = optimizer_of(averager, weight, max_lag=8)
        averager.round_number, averager.point = 9, [100.0]
        report = one_step(optimizer, weight, [1.0])
        assert isinstance(report.result, p2pavg.Failed)
        assert report.result.code is FailedCode.TOO_FAR_APART
        assert (weight.item(), optimizer.epoch) == (0.5, 0)
        averager.round_number, averager.point = 0, None
        report = one_step(optimizer, weight, [1.0])
        assert report.updated
        assert weight.item() == 0.0
        assert averager._taken.weight == 2.0, "the samples of both steps"

    def test_a_peer_that_is_far_behind_does_not_average(self) -> None:
        averager, weight = Partner(), parameter(1.0)
        optimizer = optimizer_of(averager, weight, max_lag=8)
        averager.progress_board.other = PeerProgress(
            epoch=9, state=optimizer.lineage.state, samples=1.0, samples_per_second=1.0, waiting=False
        ).encode()
        report = one_step(optimizer, weight, [1.0])
        assert report.result is None
        assert report.behind is not None
        assert "max_lag is 8" in report.behind
        assert weight.item() == 0.5, "it goes on with its own steps"

    def test_a_search_without_a_partner_goes_on_in_the_background(self) -> None:
        averager, weight = Partner(), parameter(1.0)
        optimizer = optimizer_of(averager, weight, sync_every=2, partner_timeout=0.01)
        averager.runs_for = 10**9
        one_step(optimizer, weight, [1.0])
        second = one_step(optimizer, weight, [1.0])
        assert isinstance(second.result, p2pavg.InProgress)
        averager._left = 0
        third = one_step(optimizer, weight, [1.0])
        assert third.updated
        assert weight.item() == pytest.approx(1.0 - 3 * LR), "the step since the contribution is kept"
        assert optimizer.anchor[0].item() == pytest.approx(1.0 - 2 * LR)

    @pytest.mark.parametrize("end", [MixedUpdates.finish, MixedUpdates.leave])
    def test_a_peer_that_ends_says_no_last_word(self, end: Callable[[MixedUpdates], None]) -> None:
        """Peers that mix have no common update that one of them could hand over to another."""
        averager, weight = Partner(), parameter(1.0)
        optimizer = optimizer_of(averager, weight)
        assert one_step(optimizer, weight, [1.0]).updated
        end(optimizer)
        assert LAST_WORDS not in averager.boards


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({"fragments": 2, "sync_every": 2}, "fragments"),
            ({"feedback": True}, "feedback"),
            ({"grace": 5.0}, "grace"),
            ({"min_peers": 2}, "min_peers"),
            ({"check_every": 10}, "check_every"),
            ({"group_size": 1}, "group_size"),
            ({"group_size": 65}, "group_size"),
            ({"group_size": 2.0}, "group_size"),
            ({"partner_timeout": -1}, "partner_timeout"),
            ({"partner_timeout": 0}, "partner_timeout"),
            ({"max_lag": 0}, "max_lag"),
            ({"sync_every": 0}, "sync_every"),
        ],
    )
    def test_an_option_that_needs_a_common_anchor_or_is_out_of_range_is_named(
        self, options: dict[str, Any], name: str
    ) -> None:
        with pytest.raises(ValueError, match=name):
            optimizer_of(Partner(), parameter(1.0), **options)

    def test_groups_smaller_than_the_run_allows_are_refused(self) -> None:
        with pytest.raises(ValueError, match="group_size must be from 3, the config's min_group_size"):
            optimizer_of(Partner(min_group_size=3), parameter(1.0), group_size=2)

    def test_a_sparse_codec_and_a_config_with_participation_are_refused(self) -> None:
        for codec in ("topk", "ternary"):
            with pytest.raises(ValueError, match="too coarse: peers that mix average whole parameters"):
                optimizer_of(Partner(compression=codec), parameter(1.0))
        with pytest.raises(ValueError, match="participation"):
            optimizer_of(Partner(participation=p2pavg.RandomFraction(0.5)), parameter(1.0))

    @pytest.mark.parametrize(
        ("make", "options", "why"),
        [
            (noloco, {"lr": 2.5}, "do not come together"),
            (gossip, {"momentum": 0.9}, "do not come together"),
            (noloco, {"momentum": 1.0}, "momentum"),
            (noloco, {"lr": -0.7}, "lr"),
        ],
    )
    def test_rates_with_which_anchors_move_apart_are_refused(
        self, make: Any, options: dict[str, float], why: str
    ) -> None:
        with pytest.raises(ValueError, match=why):
            optimizer_of(Partner(), parameter(1.0), make, **options)

    def test_peers_with_other_groups_have_other_states(self) -> None:
        states = {
            optimizer_of(Partner(), parameter(1.0), make, **options).lineage.state
            for make, options in (
                (gossip, {}),
                (gossip, {"group_size": 4}),
                (noloco, {}),
                (noloco, {"lr": 0.8}),
            )
        }
        assert len(states) == 4


class TestSavedStates:
    def test_a_peer_goes_on_from_its_own_state(self) -> None:
        averager, weight = Partner(), parameter(1.0, 1.0)
        optimizer = optimizer_of(averager, weight, noloco)
        for _ in range(3):
            one_step(optimizer, weight, [1.0, 0.5])
        saved = copy.deepcopy(optimizer.state_dict())
        later = parameter(*weight.tolist())
        resumed = optimizer_of(averager, later, noloco)
        resumed.load_state_dict(saved)
        one, other = (one_step(o, w, [1.0, 0.5]) for o, w in ((optimizer, weight), (resumed, later)))
        assert later.tolist() == pytest.approx(weight.tolist())
        assert (one.epoch, resumed.lineage) == (other.epoch, optimizer.lineage)

    def test_a_peer_that_comes_late_takes_the_state_of_another(self) -> None:
        averager, weight = Partner(), parameter(1.0)
        optimizer = optimizer_of(averager, weight)
        for _ in range(3):
            one_step(optimizer, weight, [1.0])
        saved = optimizer.state_dict()
        newcomer, its = Partner(), parameter(*weight.tolist())
        newcomer.peer_id = "newcomer"
        joined = optimizer_of(newcomer, its)
        joined.load_state_dict(saved)
        assert joined.lineage == optimizer.lineage
        report = one_step(joined, its, [0.0])
        assert report.updated
        assert report.consensus_distance == 0.0

    @pytest.mark.parametrize("wrong", [torch.zeros(3), torch.full((SKETCH,), torch.nan), None])
    def test_a_malformed_projection_is_refused(self, wrong: torch.Tensor | None) -> None:
        optimizer = optimizer_of(Partner(), parameter(1.0))
        saved = optimizer.state_dict()
        saved["origin_projection"] = wrong
        with pytest.raises(ValueError, match="projection"):
            optimizer.load_state_dict(saved)


class TestTopology:
    @pytest.mark.parametrize("make", [gossip, noloco])
    def test_groups_have_the_size_of_the_topology(self, make: Any) -> None:
        averager = Partner(topology=p2pavg.Gossip(degree=3))
        optimizer = optimizer_of(averager, parameter(1.0), make)
        assert ("group_size", 4) in optimizer._mixing.rules
        assert optimizer_of(averager, parameter(1.0), make, group_size=4)._mixing == optimizer._mixing

    @pytest.mark.parametrize("make", [gossip, noloco])
    def test_another_size_than_the_topology_s_is_refused(self, make: Any) -> None:
        averager = Partner(topology="gossip")
        with pytest.raises(
            ValueError, match="group_size is 4, and groups of the averager's topology 'gossip:1:grid'"
        ):
            optimizer_of(averager, parameter(1.0), make, group_size=4)

    @pytest.mark.parametrize("make", [large_batch, local])
    def test_optimizers_of_common_parameters_refuse_gossip(self, make: Any) -> None:
        with pytest.raises(ValueError, match=r"train with p2pavg\.optim\.gossip or noloco"):
            make(Partner(topology="gossip"), SGD([parameter(1.0)], lr=LR))
