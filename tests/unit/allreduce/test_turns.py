"""Order of the turns of threads that send at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from p2pavg.allreduce.movers.lane_driver import Rank, Turns
from p2pavg.base.limits import GLANCE_SECONDS

WATCHDOG_SECONDS = 120.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def queue_up(turns: Turns, ranks: list[Rank], work: Callable[[Rank], None]) -> list[threading.Thread]:
    """Start a thread per rank while another thread has its turn; return when all of them wait."""

    def wait_and_work(rank: Rank) -> None:
        with turns.turn(rank):
            work(rank)

    threads = [threading.Thread(target=wait_and_work, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    while True:
        with turns._changed:
            if len(turns._waiting) == len(ranks):
                return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(WATCHDOG_SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("ranks", "order"),
    [
        ([(1, 0, 1), (0, 900, 2)], [(0, 900, 2), (1, 0, 1)]),
        ([(0, 200, 1), (0, 100, 2)], [(0, 100, 2), (0, 200, 1)]),
        ([(0, 100, 3), (0, 100, 1), (0, 100, 2)], [(0, 100, 1), (0, 100, 2), (0, 100, 3)]),
    ],
    ids=["contributions first", "who has sent least", "the next member"],
)
def test_the_lowest_rank_goes_first(ranks: list[Rank], order: list[Rank]) -> None:
    turns, went = Turns(), list[Rank]()
    with turns.turn((0, 0, 0)):
        threads = queue_up(turns, ranks, went.append)
    join(threads)
    assert went == order


def test_one_thread_at_a_time_has_a_turn() -> None:
    turns, busy, clashes = Turns(clock=Clock()), threading.Lock(), list[Rank]()

    def work(rank: Rank) -> None:
        if not busy.acquire(blocking=False):
            clashes.append(rank)
            return
        busy.release()

    for lap in range(30):
        with turns.turn((0, lap, 0)):
            threads = queue_up(turns, [(0, lap, place) for place in range(1, 6)], work)
        join(threads)
    assert clashes == []


def test_a_stuck_thread_loses_its_turn() -> None:
    clock, went = Clock(), threading.Event()
    turns = Turns(clock)
    with turns.turn((0, 0, 0)):
        clock.now += GLANCE_SECONDS
        threads = queue_up(turns, [], lambda _rank: None)
        threads = [threading.Thread(target=lambda: _go(turns, went), daemon=True)]
        threads[0].start()
        assert went.wait(WATCHDOG_SECONDS), "the next one waits for ever"
    join(threads)
    with turns.turn((0, 1, 0)):
        pass


def _go(turns: Turns, went: threading.Event) -> None:
    with turns.turn((0, 0, 1)):
        went.set()


def test_a_turn_that_was_taken_over_does_not_end_the_next_ones() -> None:
    """The stuck thread goes on while another has its turn, and a third still waits."""
    clock = Clock()
    turns = Turns(clock)
    stuck = turns.turn((0, 0, 0))
    stuck.__enter__()
    clock.now += GLANCE_SECONDS
    with turns.turn((0, 0, 1)):
        stuck.__exit__(None, None, None)
        assert turns._holder is not None


def test_an_error_ends_the_turn() -> None:
    turns = Turns()
    with pytest.raises(ValueError, match="broken"), turns.turn((0, 0, 0)):
        raise ValueError("broken")
    with turns.turn((0, 0, 0)):
        pass
