"""Synchronous cells on virtual time, with the real optimizers: a short form of ``scripts/faults cells``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from p2pavg.optim import Cells
from tests.simulation.cells import CellCourse, CellSetting, cell_findings, compared, play_cells

pytestmark = pytest.mark.one_worker

CALM = CellSetting(
    peers=4,
    seconds=14.0,
    every=None,
    batches=1.0,
    batch_seconds=(0.4, 0.6),
    cells=Cells(count=2, every=3, shares=4),
)


def distance(course: CellCourse, epoch: int) -> float:
    """Return the largest difference between two cells after the mix of an epoch."""
    values = torch.stack([found for (_, at), found in course.after_mix.items() if at == epoch])
    return float((values - values[0]).abs().max())


@pytest.fixture(scope="module")
def calm() -> CellCourse:
    return play_cells(CALM)


def test_peers_divide_into_cells_of_equal_size(calm: CellCourse) -> None:
    assert sorted(calm.cells.values()) == [0, 0, 1, 1]
    assert set(calm.sizes.values()) == {2}


def test_members_of_a_cell_hold_the_same_bits(calm: CellCourse) -> None:
    assert not cell_findings(calm)
    assert all(len(states) == 1 for states in calm.states.values())


def test_cells_hold_the_mean_of_their_parameters_after_a_mix(calm: CellCourse) -> None:
    assert {epoch for _, epoch in calm.mixes} >= {4, 8}
    for mix in calm.mixes.values():
        assert mix.mixed == pytest.approx(1.0)
        # Two cells are as far from their mean as from each other, by half: before the mix they differ.
        assert mix.distance > 1e-3
    for epoch in (4, 8):
        assert distance(calm, epoch) < 1e-5


def test_outer_averages_in_the_background_do_not_undo_the_updates_meanwhile() -> None:
    course = play_cells(replace(CALM, cells=Cells(count=2, every=3, shares=4, delay=2)))
    assert not cell_findings(course)
    mixes = [mix for mix in course.mixes.values() if mix.epoch in (4, 8)]
    assert len(mixes) == 4
    assert all(mix.mixed == pytest.approx(1.0) for mix in mixes)
    # After the mix, the cells differ by the two updates that each took meanwhile: less than by four.
    assert 1e-6 < distance(course, 4) < 2 * min(mix.distance for mix in mixes)


@pytest.fixture(scope="module")
def churned() -> CellCourse:
    return play_cells(replace(CALM, peers=10, seconds=19.5, every=5.0))


@pytest.mark.long
def test_kills_and_joins_leave_each_cell_with_one_state(churned: CellCourse) -> None:
    assert sum(life.killed for life in churned.lives) == 3
    assert not cell_findings(churned)


@pytest.mark.long
def test_peers_that_join_later_replay_mixes_and_hold_the_cells_bits() -> None:
    course = play_cells(replace(CALM, peers=8, seconds=29.0, every=10.0))
    came = course.newcomers()
    assert came
    for life in came:
        assert life.updates[0].epoch > 4, "it has replayed no mix"
    assert not cell_findings(course)


@pytest.mark.long
def test_churn_costs_less_than_one_percent_of_loss(churned: CellCourse) -> None:
    calm = play_cells(replace(CALM, peers=10, seconds=13.0))
    rows = compared(churned, calm)
    assert rows[-1][0] >= 8, "no mix after the first kills"
    for epoch, loss, alone in rows:
        assert loss == pytest.approx(alone, rel=0.01), epoch


def test_last_member_of_a_cell_moves_to_another_one_and_takes_its_state() -> None:
    cells = Cells(count=2, every=3, shares=4, patience=3.0)
    course = play_cells(replace(CALM, peers=4, seconds=35.0, cells=cells, sinks=0))
    assert course.survivor is not None
    assert course.cells[course.survivor.peer_id] == 1
    epochs = {epoch for cell, epoch in course.states if cell == 1}
    assert course.survivor.updates[-1].epoch in epochs
    assert course.survivor.updates[-1].at > course.ended - 10.0
    assert course.survivor.updates[-1].contributed
    assert not cell_findings(course)
