"""An optimizer that replaces another one of its thread, and one of another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from p2pavg.blocking import Averager
from p2pavg.optim.coordination.turns import begins


class Stepped:
    """An optimizer of a peer, which notes that it has left."""

    def __init__(self, peer_id: str, run_id: str = "run") -> None:
        self.averager = cast(
            Averager, SimpleNamespace(peer_id=peer_id, config=SimpleNamespace(run_id=run_id))
        )
        self.has_left = False

    def leave(self) -> None:
        self.has_left = True

    def step(self) -> None:
        begins(self, self.averager)


def in_a_thread(work: Callable[[], Any]) -> int | None:
    """Do the work in a thread of its own; return the thread's identifier."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return thread.ident


def test_an_optimizer_is_left_when_its_thread_steps_another_one_of_the_run() -> None:
    earlier, of_another_run, later = Stepped("one"), Stepped("two", "another run"), Stepped("three")

    def work() -> None:
        for each in (earlier, of_another_run, later, later):
            each.step()

    in_a_thread(work)
    assert (earlier.has_left, of_another_run.has_left, later.has_left) == (True, False, False)


def test_a_thread_with_the_identifier_of_one_that_ended_replaces_nothing() -> None:
    """The system gives a new thread the identifier of one that has ended, so most of these have the same one."""
    stepped = [Stepped(f"peer {number}") for number in range(8)]
    identifiers = {in_a_thread(each.step) for each in stepped}
    assert len(identifiers) < len(stepped), "no identifier came again, so this test shows nothing"
    assert not any(each.has_left for each in stepped)
