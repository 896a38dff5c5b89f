"""Optimizers with cells, without a network: the mix's arithmetic, its place among the updates, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch.optim import SGD

import p2pavg
from p2pavg.base.result import Failed, NoPeers, RoundResult, Success
from p2pavg.blocking import Averager
from p2pavg.optim import CellOptimizer, Cells, RunState
from p2pavg.optim.cells import cell_optimizer
from p2pavg.optim.cells.cell_choice import CellBoard
from p2pavg.optim.cells.cell_member import MIXED, CellMember
from p2pavg.optim.cells.cells import holders
from tests.unit.optim.fakes import Alone

ROSTER = ("me", "other")
CELLS = Cells(count=2, every=2, shares=4)
HELD = [share for share, peer in enumerate(holders(ROSTER, 4)) if peer == "me"]


class Counterpart(Alone):
    """The averager of a share: the other cell's values are all 1, or it does not come."""

    comes = True

    def subscribe(self, callback: Callable[..., None]) -> None:
        """Have no events."""

    def step(self, *, state: bytes, **options: Any) -> RoundResult:
        if not self.comes:
            self.clear()
            return NoPeers()
        return super().step(state=state, **options)

    def taken(self) -> list[torch.Tensor]:
        return [(values + 1.0) / 2 for values in super().taken()]


class Cell(Alone):
    """A cell of two peers: the other one contributes the same gradient, and nothing to a mix unless a test says so."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**({"compression": None} | changes))
        self.opened: list[Counterpart] = []
        self.given: list[list[torch.Tensor]] = []
        self.fails_at: int | None = None
        """Number of rounds after which one fails."""

    def open_sibling(self, config: p2pavg.AveragingConfig) -> tuple[Averager, Callable[[], None]]:
        self.opened.append(Counterpart(run_id=config.run_id, compression=None))
        self.opened[-1].config = config
        return cast(Averager, self.opened[-1]), lambda: None

    def step(self, *, state: bytes, **options: Any) -> RoundResult:
        if self.fails_at == len(self.given):
            self.fails_at = None
            return Failed(reason="the test has it so")
        result = super().step(state=state, **options)
        assert isinstance(result, Success)
        metrics = dict(self._taken.metrics.means)
        weight = self._taken.weight
        averaged = result.averaged
        assert isinstance(averaged, list)
        self.given.append([tensor.clone() for tensor in averaged])
        if MIXED in metrics:  # the mean with the zeros of the other member
            averaged = [tensor / 2 for tensor in averaged]
            metrics[MIXED] /= 2
        values: dict[str, Any] = {name: getattr(result, name) for name in result.__slots__}
        changed = {
            "averaged": averaged,
            "peers": ROSTER,
            "weights": dict.fromkeys(ROSTER, weight),
            "total_weight": 2 * weight,
            "metrics": metrics,
        }
        return Success(**values | changed)


class Training:
    """A member of a cell that trains 8 zeros, or the parameters of its inner optimizer."""

    def __init__(self, cells: Cells = CELLS, live: int = 2, inner: SGD | None = None, **options: Any) -> None:
        self.values = (
            torch.nn.Parameter(torch.zeros(8)) if inner is None else inner.param_groups[0]["params"][0]
        )
        self.cell = Cell()
        self.reports: list[Any] = []
        given: dict[str, Any] = {"target_batch_size": 4, "peers_to_start": 2, "sync_timeout": 5.0}
        self.member = CellMember(
            SGD([self.values], lr=1.0) if inner is None else inner,
            cast(Averager, self.cell),
            base=cast(Averager, self.cell),
            cells=cells,
            cell=1,
            board=cast(CellBoard, SimpleNamespace(live=lambda _: live)),
            on_update=self.reports.append,
            **(given | options),
        )

    def step(self, gradient: float = 0.25) -> Any:
        self.values.grad = torch.full((8,), gradient)
        return self.member.step(samples=4)


def shares_of(values: torch.Tensor) -> list[torch.Tensor]:
    return list(values.detach().view(4, 2))


def test_mix_moves_the_shares_of_this_member_to_the_mean_of_the_cells() -> None:
    training = Training()
    training.step()
    report = training.step()
    assert [each.epoch for each in training.reports] == [1, 2, 3]
    assert report.epoch == 3
    for share, values in enumerate(shares_of(training.values)):
        # After two updates all values are -0.5. The other cell's are 1, so the mean is 0.25.
        assert values.tolist() == ([0.25, 0.25] if share in HELD else [-0.5, -0.5])
    assert report.mixed == pytest.approx(len(HELD) / 4)
    assert report.consensus_distance == pytest.approx(0.75 * (2 * len(HELD)) ** 0.5)
    assert training.reports[-1].cell == 1
    assert training.reports[0].mixed is None


def test_a_share_whose_counterpart_does_not_come_is_not_mixed() -> None:
    training = Training()
    training.step()
    for share in HELD:
        training.member._between._averager_of(share)
    training.cell.opened[0].comes = False
    report = training.step()
    moved = [share for share, values in enumerate(shares_of(training.values)) if values[0] > 0]
    assert moved == HELD[1:]
    assert report.mixed == pytest.approx(len(HELD[1:]) / 4)


def test_counterparts_that_send_what_is_not_finite_move_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counterpart, "taken", lambda _: [torch.full((2,), float("inf"))])
    training = Training()
    training.step()
    assert training.step().mixed == 0.0
    assert training.values.tolist() == [-0.5] * 8


def test_a_robust_rule_is_for_the_outer_averages() -> None:
    training = Training(Cells(count=3, every=2, shares=4, robust="median"))
    training.step()
    training.step()
    assert {each.config.robust for each in training.cell.opened} == {"median"}
    assert {each.config.run_id for each in training.cell.opened} == {f"run/share {share}" for share in HELD}


def test_without_another_cell_no_outer_average_begins() -> None:
    training = Training(live=1)
    training.step()
    report = training.step()
    assert not training.cell.opened
    assert report.epoch == 3
    assert report.mixed == 0.0
    assert report.consensus_distance == 0.0


def test_updates_during_the_outer_averages_are_kept() -> None:
    training = Training(Cells(count=2, every=2, shares=4, delay=1))
    training.step()  # the outer averages begin with -0.25: they move a value by (1 - -0.25) / 2
    training.step()
    for share, values in enumerate(shares_of(training.values)):
        assert values[0].item() == (-0.5 + 0.625 if share in HELD else -0.5)


def test_a_mix_that_fails_changes_nothing_and_is_tried_again() -> None:
    training = Training()
    training.step()
    training.cell.fails_at = 2
    report = training.step()
    assert report.epoch == 2
    assert report.updated
    assert training.values.tolist() == [-0.5] * 8
    report = training.step(gradient=100.0)  # this batch is left out
    assert report.epoch == 3
    assert report.mixed == pytest.approx(len(HELD) / 4)
    assert sorted(set(training.values.tolist())) == [-0.5, 0.25]


def test_a_peer_that_replays_the_updates_holds_the_same_bits() -> None:
    here, late = Training(), Training()
    here.step(gradient=0.3)
    here.step(gradient=0.7)
    late.member._training.begin()
    for report in here.reports:
        assert isinstance(report.result, Success)
        assert isinstance(report.result.averaged, list)
        late.member.replay([tensor.clone() for tensor in report.result.averaged], report.result)
    assert late.member.lineage == here.member.lineage
    assert torch.equal(late.values, here.values)
    assert late.reports[-1].mixed == here.reports[-1].mixed
    assert late.reports[-1].consensus_distance == here.reports[-1].consensus_distance


def test_a_contribution_to_a_mix_that_was_missed_is_in_no_later_update() -> None:
    here, missed = Training(), Training()
    missed.cell.fails_at = 2
    for training in (here, missed):
        training.step()
        training.step()
    assert missed.cell.weight == 1.0
    mix = here.reports[-1].result
    assert isinstance(mix, Success)
    assert isinstance(mix.averaged, list)
    missed.member.replay([tensor.clone() for tensor in mix.averaged], mix)
    assert missed.cell.weight == 0.0
    assert torch.equal(missed.values, here.values)


def test_a_schedule_counts_updates_with_gradients() -> None:
    inner = SGD([torch.nn.Parameter(torch.zeros(8))], lr=1.0)
    training = Training(inner=inner, scheduler=torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5))
    training.step()
    training.step()
    assert training.member.epoch == 3
    assert inner.param_groups[0]["lr"] == 0.25


def test_averaged_buffers_are_mixed_with_the_parameters() -> None:
    model = torch.nn.BatchNorm1d(4, affine=True)
    cells = Cells(count=2, every=1, shares=4)  # weight, bias, running mean and running variance
    training = Training(cells, inner=SGD(model.parameters(), lr=1.0), model=model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros(4)
    training.member.step(samples=4)
    assert training.member.epoch == 2
    assert HELD == [1, 2]
    assert model.running_mean is not None
    assert model.running_mean.tolist() == [0.5] * 4
    assert model.bias.tolist() == [0.5] * 4
    assert model.weight.tolist() == [1.0] * 4


# ---------------------------------------------------------------------- refusals


def make(config: dict[str, Any] | None = None, **options: Any) -> None:
    model = torch.nn.Linear(2, 1)
    averager = cast(Averager, Cell(**(config or {})))
    given: dict[str, Any] = {"cells": CELLS, "target_batch_size": 4, "state": model}
    CellOptimizer(SGD(model.parameters(), lr=0.1), averager, **(given | options))


@pytest.mark.parametrize(
    ("config", "options", "text"),
    [
        ({}, {"overlap": True}, "overlap cannot be used with cells"),
        ({}, {"min_peers": 1}, "min_peers cannot be used with cells"),
        ({}, {"process_group": object()}, "process_group cannot be used with cells"),
        ({"robust": "median"}, {}, "a config with robust cannot be used with cells"),
        ({"topology": "gossip"}, {}, "in which peers differ, and here all peers of a run hold the same"),
        ({"max_norm": 3.0}, {}, "a config with max_norm cannot be used with cells"),
        ({"participation": p2pavg.RandomFraction(0.5)}, {}, "a config with participation cannot be used"),
        ({"match_timeout": 15.0}, {}, "timeout is 15 s, and must be below the config's match_timeout"),
        ({}, {"state": False}, "state must not be False: a peer fetches its cell's state"),
        ({}, {"peers_to_start": 0}, "peers_to_start must be a whole number above 0"),
    ],
)
def test_what_cannot_be_used_with_cells_is_refused_by_name(
    config: dict[str, Any], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        make(config, **options)


def test_cells_must_be_cells() -> None:
    with pytest.raises(TypeError, match=r"cells must be p2pavg\.optim\.Cells"):
        make(cells=4)


# ---------------------------------------------------------------------- a cell that is joined and left


class Opening(Cell):
    """An averager that notes which of its siblings are open."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.open: list[str] = []

    def open_sibling(self, config: p2pavg.AveragingConfig) -> tuple[Averager, Callable[[], None]]:
        self.open.append(config.run_id)
        averager, _ = super().open_sibling(config)
        return averager, lambda: self.open.remove(config.run_id)


class Member:
    """A member of a cell that does nothing."""

    made: ClassVar[list[Member]] = []

    def __init__(self, inner: SGD, averager: Averager, *, cell: int, state: RunState, **_: Any) -> None:
        self.inner, self.cell, self.state, self.loaded = inner, cell, state, None
        self.made.append(self)

    def leave(self) -> None: ...

    def finish(self) -> None:
        self.finished = True

    def close(self) -> None: ...

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


def joined(averager: Opening, folder: Path, **options: Any) -> tuple[CellOptimizer, RunState]:
    """Return the optimizer of a peer that was in cell 1 before, by its checkpoints."""
    model = torch.nn.Linear(2, 1)
    (folder / "cell-1").mkdir(parents=True, exist_ok=True)
    state = RunState(model, folder)
    inner = SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"cells": CELLS, "target_batch_size": 4, "state": state}
    return CellOptimizer(inner, cast(Averager, averager), **(given | options)), state


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> list[Member]:
    """Return the members that the test makes, which do nothing."""
    monkeypatch.setattr(cell_optimizer, "CellMember", Member)
    monkeypatch.setattr(Member, "made", [])
    return Member.made


def test_a_peer_that_finishes_is_in_no_cell_any_more(tmp_path: Path, members: list[Member]) -> None:
    averager = Opening()
    optimizer, _ = joined(averager, tmp_path)
    optimizer.finish()
    assert members[-1].finished
    assert averager.boards["cells"].withdrawn


def test_a_cell_that_cannot_be_joined_is_left(tmp_path: Path) -> None:
    averager = Opening()
    with pytest.raises(ValueError, match="max_grad_norm"):
        joined(averager, tmp_path, max_grad_norm=-1.0)
    assert averager.opened[0].config.run_id == "run/cell 1"
    assert not averager.open
    assert averager.boards["cells"].withdrawn


def test_a_peer_that_moves_to_another_cell_keeps_the_values_of_its_loop(
    tmp_path: Path, members: list[Member]
) -> None:
    """A checkpoint of that cell, from an earlier time, is older than they are."""
    averager = Opening()
    optimizer, state = joined(averager, tmp_path)
    state.extras = {"position": 7}
    optimizer.load_state_dict({"cell": 0, "epoch": 3})
    first, second = members
    assert (first.cell, first.state.continues) == (1, True)
    assert (second.cell, second.state.continues) == (0, False)
    assert second.state.directory == tmp_path / "cell-0"
    assert second.state.extras == {"position": 7}
    assert second.loaded == {"epoch": 3}
    assert averager.open == ["run/cell 0"]


@pytest.mark.usefixtures("members")
@pytest.mark.parametrize("cell", [None, True, -1, 2, "0"])
def test_a_state_of_no_cell_of_the_run_is_refused(tmp_path: Path, cell: object) -> None:
    averager = Opening()
    optimizer, _ = joined(averager, tmp_path)
    with pytest.raises(ValueError, match="it is of no cell of this run"):
        optimizer.load_state_dict({"cell": cell})
    assert averager.open == ["run/cell 1"]
