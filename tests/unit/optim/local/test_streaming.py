"""Local updates whose rounds run in the background, and of fragments, with rounds whose results the test sets."""

from __future__ import annotations

import copy
import gc
import time
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch.optim import SGD

from p2pavg.base.result import Failed, FailedCode, InProgress, NoPeers, RoundResult, Success
from p2pavg.blocking import Averager
from p2pavg.optim import ErrorFeedback, LocalUpdates, StepReport, diloco
from tests.unit.optim.fakes import GROUP, Alone, local, parameter

LR = 0.1


def stepped(
    optimizer: LocalUpdates, weights: torch.nn.Parameter, gradient: float = 1.0, loss: float = 0.0
) -> StepReport:
    weights.grad = torch.full_like(weights, gradient)
    return optimizer.step(samples=1, metrics={"loss": loss})


def run(optimizer: LocalUpdates, weights: torch.nn.Parameter, steps: int) -> list[StepReport]:
    """Take inner steps with the losses 0, 1, 2 and so on."""
    return [stepped(optimizer, weights, loss=float(step)) for step in range(steps)]


def updates_of(reports: list[StepReport]) -> list[int]:
    """Return the inner steps, from 1, in which an average was applied."""
    return [index for index, report in enumerate(reports, 1) if report.updated]


class Failing(Alone):
    """An averager whose rounds end with these results, in turn, before they succeed."""

    def __init__(self, *results: RoundResult, **changes: Any) -> None:
        super().__init__(**changes)
        self.results = list(results)

    def step(self, *, state: bytes, **how: Any) -> RoundResult:
        if self.round_state is not None and not self._left and self.results:
            self.round_state = None
            self._accumulation.give_back(self._taken)
            return self.results.pop(0)
        return super().step(state=state, **how)


class Slow(Alone):
    """An averager whose groups are complete 1.5 s after this peer has come, and exchange for 0.5 s."""

    rounds = 0

    def step(self, *, state: bytes, **how: Any) -> RoundResult:
        self.rounds += self.round_state is None
        result = super().step(state=state, **how)
        return replace(result, duration=2.0, exchange_duration=0.5) if isinstance(result, Success) else result


class TestDelay:
    def test_average_is_applied_after_delay_steps(self) -> None:
        """The next boundary counts from the contribution, and each step counts once."""
        averager, weights = Alone(compression=None), parameter(1.0)
        averager.runs_for = 1
        optimizer = local(averager, SGD([weights], lr=LR), sync_every=4, delay=2)
        reports = run(optimizer, weights, 15)
        assert updates_of(reports) == [6, 10, 14]
        assert isinstance(reports[3].result, InProgress)
        given = [report.result.weights["me"] for report in reports if isinstance(report.result, Success)]
        assert given == [4.0, 4.0, 4.0]
        assert optimizer.anchor[0].item() == pytest.approx(1.0 - 12 * LR)
        assert weights.item() == pytest.approx(1.0 - 15 * LR)

    @pytest.mark.parametrize(
        ("alpha", "expected"),
        [(None, 1.0 - 6 * LR), (0.0, 1.0 - 4 * LR), (0.5, 1.0 - 5 * LR)],
        ids=["nothing is lost", "replaced", "mixed"],
    )
    def test_result_is_mixed_with_the_steps_since(self, alpha: float | None, expected: float) -> None:
        """The average is this peer's own contribution, so the anchor becomes what was sent: 1 - 4 steps."""
        averager, weights = Alone(compression=None), parameter(1.0)
        averager.runs_for = 1
        optimizer = local(averager, SGD([weights], lr=LR), sync_every=4, delay=2, alpha=alpha)
        assert run(optimizer, weights, 6)[-1].updated
        assert optimizer.anchor[0].item() == pytest.approx(1.0 - 4 * LR)
        assert weights.item() == pytest.approx(expected)

    def test_late_average_is_applied_with_the_first_later_step(self) -> None:
        averager, weights = Alone(compression=None), parameter(1.0)
        averager.runs_for = 3
        optimizer = local(averager, SGD([weights], lr=LR), sync_every=6, delay=1)
        reports = run(optimizer, weights, 11)
        assert updates_of(reports) == [9]
        assert weights.item() == pytest.approx(1.0 - 11 * LR)

    def test_next_boundary_waits_for_a_late_average_and_begins_the_next_round(self) -> None:
        averager, weights = Alone(compression=None), parameter(1.0)
        averager.runs_for = 4
        optimizer = local(averager, SGD([weights], lr=LR), sync_every=3, delay=2)
        run(optimizer, weights, 3)
        reports = run(optimizer, weights, 3)  # a look, then a wait that collects the result
        assert updates_of(reports) == [3]
        assert averager.round_state is not None, "the next round has begun with the same step"
        assert weights.item() == pytest.approx(1.0 - 6 * LR)

    def test_boundaries_in_seconds_follow_the_slowest_member(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A peer that were due again at once would be ahead of the slow one, and wait for it at each boundary."""
        averager, weights = Slow(compression=None), parameter(1.0)
        averager.runs_for = 1
        optimizer = local(averager, SGD([weights], lr=LR), sync_every="3s", delay=20)
        contributed = []
        for second in range(12):
            monkeypatch.setattr(time, "monotonic", lambda now=float(second): now)
            before = averager.rounds
            report = stepped(optimizer, weights)
            contributed += [second] * (averager.rounds - before)
            assert not report.waited_seconds
        # Each group is complete a second and a half after this peer has contributed, and due 3 s later.
        assert contributed == [3, 8]

    def test_round_without_a_group_is_tried_again_with_the_next_step(self) -> None:
        """The others may be at another step: a peer that comes early stays there."""
        averager, weights = Failing(NoPeers(), compression=None), parameter(1.0)
        averager.runs_for = 1
        optimizer = local(averager, SGD([weights], lr=LR), sync_every=4, delay=1)
        reports = run(optimizer, weights, 7)
        assert isinstance(reports[4].result, NoPeers)
        assert isinstance(reports[5].result, InProgress), "the next step begins another round"
        assert isinstance(reports[6].result, Success)
        assert reports[6].result.weights["me"] == 6.0, "which has the steps since"
        assert weights.item() == pytest.approx(1.0 - 7 * LR)

    @pytest.mark.parametrize("used", [False, None], ids=["not used", "not known"])
    def test_failed_round_loses_nothing(self, used: bool | None) -> None:
        averager = Failing(
            Failed(reason="x", code=FailedCode.OTHER, contribution_used=used), compression=None
        )
        weights = parameter(1.0)
        averager.runs_for = 1
        optimizer = local(averager, SGD([weights], lr=LR), sync_every=4, delay=1)
        reports = run(optimizer, weights, 9)
        assert isinstance(reports[4].result, Failed)
        assert isinstance(reports[8].result, Success)
        assert reports[8].result.weights["me"] == 8.0
        assert reports[8].result.metrics["loss"] == pytest.approx(3.5), "of all eight steps"
        assert weights.item() == pytest.approx(1.0 - 9 * LR)

    def test_failed_round_keeps_no_copy_of_the_parameters(self) -> None:
        """A copy of what was sent is for the steps since, while the contribution may be in an average."""
        weights = torch.nn.Parameter(torch.ones(1, 12345))

        def copies() -> int:
            gc.collect()
            # By its type: asking a proxy of something else in this process, whose object is gone, would raise.
            tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
            return sum(tensor.shape == weights.shape for tensor in tensors)

        averager = Failing(
            Failed(reason="x", code=FailedCode.OTHER, contribution_used=False), compression=None
        )
        averager.runs_for = 1
        optimizer = local(averager, SGD([weights], lr=LR), sync_every=4, delay=1)
        run(optimizer, weights, 3)
        before = copies()
        assert isinstance(run(optimizer, weights, 3)[1].result, Failed)
        assert copies() == before

    def test_return_to_the_anchor_while_a_round_runs(self) -> None:
        """The contribution is in the average; the steps since are lost; nothing counts twice."""
        averager, weights = Alone(compression=None), parameter(1.0)
        averager.runs_for = 1
        optimizer = local(averager, SGD([weights], lr=LR), sync_every=4, delay=3)
        run(optimizer, weights, 5)
        assert stepped(optimizer, weights, float("nan")).restored is not None
        assert weights.item() == 1.0
        reports = run(optimizer, weights, 2)
        assert updates_of(reports) == [2]
        assert weights.item() == pytest.approx(1.0 - 6 * LR), "four steps were sent, two are new"


def replayed(*peers: str) -> Success:
    return Success(
        averaged=[],
        peers=peers,
        weights=dict.fromkeys(peers, 4.0),
        total_weight=8.0,
        compression_ratio=1.0,
        bytes_sent=0,
        bytes_received=0,
        duration=0.0,
        exchange_duration=0.0,
        group_id=GROUP,
        share=(0, 0),
    )


class TestMissedUpdates:
    """Averages that a peer takes from the other peers' log."""

    AVERAGE = 0.5
    """Of the pseudo-gradients; the outer step is a plain one, so the anchor becomes 1 - 0.5."""

    def test_steps_of_a_late_peer_count_in_its_next_round(self) -> None:
        averager, weights = Alone(compression=None), parameter(1.0)
        optimizer = local(averager, SGD([weights], lr=LR), sync_every=4)
        run(optimizer, weights, 3)
        optimizer.replay([torch.tensor([self.AVERAGE])], replayed("a", "b"))
        assert optimizer.epoch == 1
        assert optimizer.anchor[0].item() == 1.0 - self.AVERAGE
        assert weights.item() == pytest.approx(1.0 - self.AVERAGE - 3 * LR)
        report = stepped(optimizer, weights)
        assert isinstance(report.result, Success)
        assert report.result.weights["me"] == 4.0
        assert weights.item() == pytest.approx(1.0 - self.AVERAGE - 4 * LR)

    def test_a_contribution_that_the_others_used_does_not_count_again(self) -> None:
        """This peer was cut off: it does not know the end of its round. Only its steps since are left."""
        unknown = Failed(reason="x", code=FailedCode.OTHER, contribution_used=None)
        averager, weights = Failing(unknown, compression=None), parameter(1.0)
        averager.runs_for = 3
        optimizer = local(averager, SGD([weights], lr=LR), sync_every=6, delay=1)
        reports = run(optimizer, weights, 9)
        assert reports[8].result is unknown
        optimizer.replay([torch.tensor([self.AVERAGE])], replayed("me", "b"))
        assert weights.item() == pytest.approx(1.0 - self.AVERAGE - 3 * LR)
        assert optimizer.state_dict()["samples"] == 3.0

    def test_steps_after_a_round_without_a_known_end_are_kept(self) -> None:
        """Without a delay, too: the round has failed before the first of these steps."""
        unknown = Failed(reason="x", code=FailedCode.OTHER, contribution_used=None)
        averager, weights = Failing(unknown, compression=None), parameter(1.0)
        averager.runs_for = 1
        optimizer = local(averager, SGD([weights], lr=LR), sync_every=6)
        reports = run(optimizer, weights, 9)
        assert reports[5].result is unknown
        optimizer.replay([torch.tensor([self.AVERAGE])], replayed("me", "b"))
        assert weights.item() == pytest.approx(1.0 - self.AVERAGE - 3 * LR)
        assert optimizer.state_dict()["samples"] == 3.0

    def test_a_contribution_of_an_earlier_process_does_not_count_again(self) -> None:
        averager, weights = Alone(compression=None), parameter(1.0)
        optimizer = local(averager, SGD([weights], lr=LR), sync_every=4)
        run(optimizer, weights, 3)
        optimizer.replay([torch.tensor([self.AVERAGE])], replayed("me", "b"))
        assert weights.item() == 1.0 - self.AVERAGE
        assert optimizer.state_dict()["samples"] == 0.0


class TestFragments:
    ELEMENTS = 7

    def made(
        self, averager: Alone, **options: Any
    ) -> tuple[LocalUpdates, torch.nn.Parameter, torch.nn.Parameter]:
        one = torch.nn.Parameter(torch.zeros(2, 2))
        two = torch.nn.Parameter(torch.zeros(3))
        given: dict[str, Any] = {"sync_every": 4, "fragments": 2, "peers_to_start": 2}
        inner = SGD([one, two], lr=LR)
        return diloco(inner, cast(Averager, averager), **(given | options)), one, two

    def step(self, optimizer: LocalUpdates, *weights: torch.nn.Parameter) -> StepReport:
        for tensor in weights:
            tensor.grad = torch.ones_like(tensor)
        return optimizer.step(samples=1)

    def test_fragments_are_averaged_in_turn(self) -> None:
        averager = Alone(compression=None)
        optimizer, one, two = self.made(averager, lr=1.0, momentum=0.0)
        reports = [self.step(optimizer, one, two) for _ in range(6)]
        assert updates_of(reports) == [2, 4, 6]
        given = [report.result.weights["me"] for report in reports if isinstance(report.result, Success)]
        assert given == [2.0, 4.0, 4.0], "the steps since the fragment's last average"
        schema = averager._accumulation.schema
        assert schema is not None
        assert schema.shapes == ((4,),), "vectors as long as the longest fragment"
        steps = torch.cat([tensor.reshape(-1) for tensor in optimizer.anchor]) / -LR
        assert torch.allclose(steps, torch.tensor([6.0, 6.0, 6.0, 4.0, 4.0, 4.0, 4.0])), "3 and 4 elements"
        parameters = torch.cat([one.reshape(-1), two])
        assert torch.allclose(parameters, torch.full((7,), -6 * LR)), "the others train on"

    def test_momentum_of_other_fragments_stays(self) -> None:
        averager = Alone(compression=None)
        optimizer, one, two = self.made(averager)
        self.step(optimizer, one, two)
        self.step(optimizer, one, two)
        states = optimizer.outer.state_dict()["state"]
        assert set(states) == {0}, "the first fragment has one piece of the first parameter"
        before = states[0]["momentum_buffer"].clone()
        for _ in range(2):
            self.step(optimizer, one, two)
        assert torch.equal(optimizer.outer.state_dict()["state"][0]["momentum_buffer"], before)

    def test_each_fragment_has_a_residual_of_its_own(self) -> None:
        averager = Alone(compression="int8")
        optimizer, one, two = self.made(averager, feedback=ErrorFeedback("int8"))
        for _ in range(4):
            self.step(optimizer, one, two)
        states = optimizer.state_dict()["feedback"]
        assert [state["shapes"] for state in states] == [[[4]], [[4]]]
        again, *_ = self.made(Alone(compression="int8"), feedback=ErrorFeedback("int8"))
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert all(
            torch.equal(one["residual"], other["residual"])
            for one, other in zip(again.state_dict()["feedback"], states, strict=True)
        )

    def test_saved_state_continues_identically(self) -> None:
        def trained(
            steps: int, saved: dict[str, Any] | None = None
        ) -> tuple[LocalUpdates, list[torch.Tensor]]:
            averager = Alone(compression=None)
            optimizer, one, two = self.made(averager)
            if saved is not None:
                with torch.no_grad():
                    one.copy_(saved["one"])
                    two.copy_(saved["two"])
                optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
            for _ in range(steps):
                self.step(optimizer, one, two)
            return optimizer, [one.detach().clone(), two.detach().clone()]

        first, (one, two) = trained(5)
        saved = {"one": one, "two": two, "optimizer": first.state_dict()}
        stopped, at_once = trained(4, saved), trained(9)
        assert stopped[0].epoch == at_once[0].epoch == 4
        for mine, other in zip(stopped[1], at_once[1], strict=True):
            assert torch.allclose(mine, other, atol=1e-7)
        assert all(map(torch.equal, stopped[0].anchor, at_once[0].anchor))

    def test_other_fragments_are_another_recipe(self) -> None:
        lineages = {
            self.made(Alone(), **options)[0].lineage
            for options in ({}, {"fragments": 4}, {"delay": 1}, {"alpha": 0.5}, {"fragments": 1})
        }
        assert len(lineages) == 5

    def test_other_layers_are_another_recipe(self) -> None:
        """Peers whose parameters have other names cut other fragments, also if their shapes are the same."""

        def lineage(*names: str) -> object:
            model = torch.nn.Module()
            for name in names:
                model.register_parameter(name, torch.nn.Parameter(torch.zeros(4)))
            inner = SGD(model.parameters(), lr=LR)
            return local(Alone(), inner, sync_every=2, fragments=2, model=model).lineage

        assert lineage("a", "b") == lineage("a", "b")
        assert lineage("a", "b") != lineage("a", "c")

    def test_parameters_that_are_not_contiguous(self) -> None:
        weights = torch.nn.Parameter(torch.zeros(2, 3).t())
        averager = Alone(compression=None)
        optimizer = local(averager, SGD([weights], lr=LR), sync_every=2, fragments=2)
        gradient = torch.arange(6.0).view(3, 2)
        for _ in range(4):
            weights.grad = gradient.clone()
            optimizer.step(samples=1)
        steps = optimizer.anchor[0] / -LR
        assert torch.allclose(steps, gradient * torch.tensor([[3.0, 3.0], [3.0, 4.0], [4.0, 4.0]]))
        assert torch.allclose(weights, -4 * LR * gradient)


class TestOffload:
    def test_anchor_and_momentum_are_in_the_cpus_memory(self) -> None:
        """Without another device this shows only that offload changes no result; tests/gpu has the rest."""
        found = []
        for offload in (False, True):
            weights = parameter(1.0, 2.0)
            optimizer = diloco(
                SGD([weights], lr=LR),
                cast(Averager, Alone(compression=None)),
                sync_every=1,
                peers_to_start=2,
                offload=offload,
            )
            run(optimizer, weights, 3)
            momentum = optimizer.outer.state_dict()["state"][0]["momentum_buffer"]
            found.append([weights.detach(), *optimizer.anchor, momentum])
            assert {tensor.device.type for tensor in (*optimizer.anchor, momentum)} == {"cpu"}
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fragments": 0}, "fragments"),
        ({"fragments": 1.0}, "fragments"),
        ({"fragments": 3}, "sync_every must be a multiple of fragments"),
        ({"fragments": 4, "sync_every": 4}, "fragments must be at most the number of elements, 2"),
        ({"delay": -1}, "delay"),
        ({"delay": 5}, "delay must be at most sync_every / fragments, 4 inner steps, got 5"),
        ({"fragments": 2, "delay": 3}, "delay must be at most sync_every / fragments, 2 inner steps, got 3"),
        ({"alpha": 1.0}, "alpha"),
        ({"alpha": -0.1}, "alpha"),
        ({"alpha": True}, "alpha"),
        ({"sync_every": "soon"}, "sync_every"),
        ({"grace": 0}, "grace"),
        ({"grace": "5s"}, "grace"),
        ({"proximal": -1.0}, "proximal"),
        ({"sync_timeout": "5"}, "sync_timeout"),
    ],
)
def test_arguments_that_are_out_of_range_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        local(Alone(), SGD([parameter(1.0, 2.0)], lr=LR), **({"sync_every": 4} | changes))
