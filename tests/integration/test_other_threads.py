"""Averagers of threads that outlive the main thread, and of notebooks whose cells run again."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from p2pavg import ClosedError, InProgress, NoPeers
from p2pavg.blocking import open_averager, start_averager
from p2pavg.optim import AveragedOptimizer
from tests.integration.loopback import LOOPBACK, WATCHDOG_SECONDS, config
from tests.programs import run_python

PROGRAM = """
import concurrent.futures.thread  # most programs have loaded it; its pools close with the main thread
import sys, threading, torch
from p2pavg import AveragingConfig
from p2pavg.blocking import open_averager, start_averager

settings = AveragingConfig(run_id="threads", group_size=2, exchange_timeout=120.0)
listen = ["/ip4/127.0.0.1/tcp/0"]
opened = threading.Event()

def step(averager, told):
    averager.accumulate([torch.ones(100_000)])
    told.append(type(averager.step(wait=None)).__name__)

def meet(first, second):
    opened.set()
    if when == "before":
        threading.main_thread().join()
    told = []
    threads = [threading.Thread(target=step, args=(each, told)) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(*told, flush=True)

def work():
    if when == "after":
        threading.main_thread().join()
    if how == "open":
        with open_averager(settings, listen=listen) as first:
            with open_averager(settings, listen=listen, bootstrap=first.addresses) as second:
                meet(first, second)
    else:
        first = start_averager(settings, listen=listen)
        with open_averager(settings, listen=listen, bootstrap=first.addresses) as second:
            meet(first, second)

how, when = sys.argv[1:]
threading.Thread(target=work).start()
if when == "before":
    opened.wait()
"""


@pytest.mark.parametrize(("how", "when"), [("open", "before"), ("start", "before"), ("start", "after")])
def test_a_thread_goes_on_when_the_main_thread_has_ended(how: str, when: str) -> None:
    """It opens its averagers before the main thread ends, or after. The program ends when the thread has ended."""
    done = run_python("-W", "error", "-c", PROGRAM, how, when, timeout=WATCHDOG_SECONDS)
    assert (done.returncode, done.stdout) == (0, "Success Success\n"), done.stderr
    assert "Traceback" not in done.stderr


def running_peers() -> int:
    return [thread.name for thread in threading.enumerate()].count("p2pavg")


def test_a_started_averager_can_be_closed() -> None:
    averager = start_averager(config(), listen=LOOPBACK)
    assert running_peers() == 1
    averager.close()
    averager.close()
    assert running_peers() == 0
    with pytest.raises(ClosedError, match="the averager is closed"):
        averager.accumulate([torch.ones(3)])


def test_a_sibling_that_is_closed_is_not_taken_for_a_thread_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call waits for a thread that ends with an error. This one goes on, and the call would wait in vain."""
    with open_averager(config(), listen=LOOPBACK) as averager:
        sibling, close = averager.open_sibling(config(run_id="other"))
        sibling.accumulate([torch.ones(3)])
        sibling.close()
        assert sibling not in averager._siblings
        with monkeypatch.context() as patch:
            patch.setattr(averager._thread._thread, "join", lambda _: pytest.fail("the thread goes on"))
            with pytest.raises(ClosedError, match="the averager is closed"):
                sibling.step(wait=0.0)
        close()  # does nothing
        averager.accumulate([torch.ones(3)])
        assert isinstance(averager.step(wait=0.0), InProgress | NoPeers), "its peer stays open"


def test_a_cell_that_runs_again_has_one_peer() -> None:
    """The first peer is closed before the second one starts, so that its port is free again."""
    first = start_averager(config(), listen=LOOPBACK)
    address = first.addresses[0].split("/p2p/")[0]
    second = start_averager(config(), listen=[address])
    try:
        assert running_peers() == 1
        assert second.peer_id != first.peer_id
        assert second.addresses[0].startswith(address)
        first.close()  # does nothing: the second one goes on
        second.accumulate([torch.ones(3)])
    finally:
        second.close()
    assert running_peers() == 0


def test_started_averagers_of_two_runs_live_side_by_side() -> None:
    with start_averager(config(), listen=LOOPBACK), start_averager(config(run_id="other"), listen=LOOPBACK):
        assert running_peers() == 2
    assert running_peers() == 0, "an averager is a block"


def test_an_optimizer_that_a_thread_has_replaced_is_not_waited_for() -> None:
    """A cell made an optimizer that has said that it takes part. The cell runs again, with a new averager."""
    with open_averager(config(), listen=LOOPBACK) as ghost:
        inner = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
        earlier = AveragedOptimizer(inner, ghost, target_batch_size=1e9, peers_to_start=1)
        earlier.inner.param_groups[0]["params"][0].grad = torch.ones(1, 2)
        earlier.step(samples=1)
        with (
            open_averager(config(), listen=LOOPBACK, bootstrap=ghost.addresses) as new,
            open_averager(config(), listen=LOOPBACK, bootstrap=ghost.addresses) as other,
        ):
            board = other.board("progress")
            version = board.version
            while ghost.peer_id not in board.entries:
                board.wait(version, 1.0)
                version = board.version
            model = torch.nn.Linear(2, 1)
            later = AveragedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1), new, target_batch_size=1e9, peers_to_start=1
            )
            model(torch.ones(1, 2)).sum().backward()
            later.step(samples=1)
            end = time.monotonic() + WATCHDOG_SECONDS
            while set(board.entries) != {new.peer_id}:
                assert time.monotonic() < end, board.entries
                version = board.version
                board.poll()
                board.wait(version, 1.0)
