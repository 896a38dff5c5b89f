"""The turns of optimizers that one loop steps."""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Iterator

import pytest

from p2pavg.optim.coordination.turns import Turn


class Optimizer:
    """An optimizer that is wanted as the test says."""

    def __init__(self, run_id: str) -> None:
        self.turn = Turn(run_id)
        self.is_wanted = False
        self.asked_for: list[float] = []

    def wants_step(self, at: float) -> bool:
        self.asked_for.append(at)
        return self.is_wanted


@pytest.fixture
def loop() -> Iterator[tuple[Optimizer, Optimizer]]:
    """Two optimizers of one loop, the first of which sorts first; no other test knows their runs."""
    run = uuid.uuid4().hex
    optimizers = Optimizer(f"{run}/a"), Optimizer(f"{run}/b")
    for optimizer in optimizers:
        optimizer.turn.begin(1.0, optimizer)
    yield optimizers
    for optimizer in optimizers:
        optimizer.turn.end()


def test_only_the_later_run_gives_way(loop: tuple[Optimizer, Optimizer]) -> None:
    """If each gave way to the other, peers could leave each other's rounds for ever."""
    first, second = loop
    first.is_wanted = second.is_wanted = True
    assert first.turn.gives_way() == ""
    assert "comes first" in second.turn.gives_way()


def test_an_optimizer_that_is_not_wanted_delays_no_other(loop: tuple[Optimizer, Optimizer]) -> None:
    first, second = loop
    second.turn.begin(7.0, second)
    assert second.turn.gives_way() == ""
    assert first.asked_for == [-math.inf]


def test_an_optimizer_gets_one_step_for_each_time_that_another_gives_way_to_it_and_then_only_by_the_clock(
    loop: tuple[Optimizer, Optimizer],
) -> None:
    """A loop may take very long between two steps. If it steps the other no longer, the clock says so."""
    first, second = loop
    first.is_wanted = True
    second.turn.begin(7.0, second)
    assert second.turn.gives_way()
    assert second.turn.gives_way(), "the round is being left"
    second.turn.begin(8.0, second)
    assert second.turn.gives_way()
    first.turn.begin(9.0, first)
    second.turn.begin(10.0, second)
    assert second.turn.gives_way()
    assert first.asked_for == [-math.inf, -math.inf, 8.0, -math.inf]


def test_an_optimizer_that_is_about_to_be_stepped_for_the_first_time_is_waited_for() -> None:
    """Else a peer waits in the round of its first network, while another one has come to that of its second."""
    run = uuid.uuid4().hex
    first, second = Optimizer(f"{run}/a"), Optimizer(f"{run}/b")
    first.turn.expect(first)
    first.is_wanted = True
    second.turn.begin(1.0, second)
    assert "comes first" in second.turn.gives_way()
    second.turn.end()


def test_an_optimizer_that_was_replaced_does_not_end_the_turn_of_its_successor(
    loop: tuple[Optimizer, Optimizer],
) -> None:
    first, second = loop
    successor = Optimizer(first.turn.run_id)
    successor.turn.expect(successor)
    successor.is_wanted = True
    first.turn.end()
    assert "comes first" in second.turn.gives_way()
    successor.turn.end()


def test_an_optimizer_that_has_left_delays_no_other(loop: tuple[Optimizer, Optimizer]) -> None:
    first, second = loop
    first.is_wanted = True
    first.turn.end()
    assert second.turn.gives_way() == ""


def test_loops_of_several_threads_do_not_give_way_to_each_other(loop: tuple[Optimizer, Optimizer]) -> None:
    first, second = loop
    first.is_wanted = True
    found = []

    def elsewhere() -> None:
        second.turn.begin(2.0, second)
        found.append((second.turn.gives_way(), second.turn.is_shared))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [("", False)]


def test_an_optimizer_that_was_never_stepped_has_no_turn() -> None:
    """Such as one of several ranks, which would have to give way together."""
    turn = Turn("~")
    assert (turn.gives_way(), turn.is_shared) == ("", False)
