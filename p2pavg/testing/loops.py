"""Training loops, which block, on virtual time: the real optimizers over a simulated network.

Each loop has a thread, which runs only while trio's loop waits for it. A call that would block hands over to trio's
loop, which answers it as time passes there, and resumes the thread with the answer. So at any moment one thread runs, a
run is deterministic, and virtual time stands still while a thread computes.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, cast
from unittest.mock import patch

import outcome
import trio

from p2pavg.base.threads.trio_thread import TrioThread, hold_in
from p2pavg.blocking import Averager
from p2pavg.net.nat.reach.reachability import Kind
from p2pavg.peer.averager import DecentralizedAverager
from p2pavg.peer.peer import Peer
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.records import board
from p2pavg.state import sharing
from p2pavg.state.joiner import transfers
from p2pavg.testing import simulation
from p2pavg.testing.faults import FaultPlan
from p2pavg.testing.memory import MemoryNetwork

T = TypeVar("T")
R = TypeVar("R")

ROOMS = ("p2pavg.optim.", "p2pavg.population.", "p2pavg.state.")


class Ended(BaseException):
    """The task of a training loop was cancelled. Ends its thread."""


class LoopThread(Generic[T]):
    """The thread of one training loop. It stands in for the :class:`TrioThread` of a blocking averager.

    Args:
        work: the training loop.
    """

    def __init__(self, work: Callable[[LoopThread[T]], T]) -> None:
        self._work = work
        self._turn = threading.Semaphore(0)
        self._handed_over = threading.Semaphore(0)
        self._request: Callable[[], Awaitable[Any]] | None = None
        self._answer: outcome.Outcome[Any] = outcome.Value(None)
        self._ended: outcome.Outcome[T] | None = None
        self._nursery: trio.Nursery | None = None
        self._averagers: list[Averager] = []

    # ------------------------------------------------------------------ in trio

    async def run(self) -> T:
        """Run the loop to its end, and return its result. If the caller is cancelled, it ends in its present call."""
        thread = threading.Thread(target=self._main, name="simulated training", daemon=True)
        thread.start()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await self._take_turns(thread)
            nursery.cancel_scope.cancel()
        thread.join()
        assert self._ended is not None
        return self._ended.unwrap()

    async def _take_turns(self, thread: threading.Thread) -> None:
        while True:
            self._turn.release()
            self._handed_over.acquire()
            if self._ended is not None:
                return
            assert self._request is not None
            try:
                self._answer = outcome.Value(await self._request())
            except Exception as error:  # noqa: BLE001 - the loop gets it
                self._answer = outcome.Error(error)
            except BaseException:  # a Cancelled, or a nursery's group of them
                self._answer = outcome.Error(Ended())
                self._turn.release()
                thread.join()
                raise

    async def hold(self, block: AbstractAsyncContextManager[R]) -> tuple[R, Callable[[], None]]:
        """Enter a block; return its value, and a function for the loop that leaves it and waits."""
        assert self._nursery is not None
        what, close = await hold_in(self._nursery, block)
        return what, partial(self.call, close)

    # ------------------------------------------------------------------ in the thread

    def _main(self) -> None:
        _here.thread = self
        self._turn.acquire()
        self._ended = outcome.capture(self._work_to_the_end)
        self._handed_over.release()

    def _work_to_the_end(self) -> T:
        """Run the loop, and end its averagers as the block of a blocking averager does."""
        result = self._work(self)
        for averager in self._averagers:
            averager.end()
        return result

    def call(self, function: Callable[[], Awaitable[R]], **_: object) -> R:
        """Run ``await function()`` in trio; return its result."""
        if isinstance(self._answer, outcome.Error) and isinstance(self._answer.error, Ended):
            raise Ended  # the thread cleans up
        self._request = function
        self._handed_over.release()
        self._turn.acquire()
        return cast(R, self._answer.unwrap())

    def check(self) -> None:
        """Do nothing: an averager of the simulation does not end before its loop."""

    def let_catch_up(self) -> None:
        """Do nothing: on a virtual clock, no loop stands still."""

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass, as a computation would."""
        self.call(partial(trio.sleep, seconds))

    def averager(self, averager: DecentralizedAverager) -> Averager:
        """Return an averager whose calls block this loop."""
        made = Averager(cast("TrioThread[DecentralizedAverager]", self), averager)
        self._averagers.append(made)
        return made


_here = threading.local()


class _Condition:
    """Stands in for a :class:`threading.Condition` that a loop waits for, and that trio notifies."""

    def __init__(self) -> None:
        self._notified = trio.Event()

    def __enter__(self) -> None:
        """Do nothing: one thread runs at a time."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def notify_all(self) -> None:
        self._notified.set()
        self._notified = trio.Event()

    def wait_for(self, predicate: Callable[[], bool], timeout: float) -> bool:
        async def wait() -> bool:
            with trio.move_on_after(timeout):
                while not predicate():
                    await self._notified.wait()
            return predicate()

        thread: LoopThread[Any] = _here.thread
        return thread.call(wait)


class _Event:
    """Stands in for a :class:`threading.Event` likewise. A loop, or trio, sets it."""

    def __init__(self) -> None:
        self._is_set = False
        self._changed = _Condition()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        if not hasattr(_here, "thread"):  # what a loop sets, no loop waits for
            self._changed.notify_all()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        return self._changed.wait_for(self.is_set, timeout)


async def _on_loop(work: Callable[[], R], **_: object) -> R:
    await trio.lowlevel.checkpoint()
    return work()


@contextlib.contextmanager
def virtual_threads(clock: trio.abc.Clock) -> Iterator[None]:
    """Let the optimizers and what they call from their threads live on a clock, for as long as the block runs."""
    time = SimpleNamespace(
        monotonic=clock.current_time,
        time=lambda: simulation.EPOCH + clock.current_time(),
        sleep=lambda seconds: _here.thread.sleep(seconds),
    )
    with contextlib.ExitStack() as stack:
        replaced: list[tuple[object, str, object]] = [
            (module, "time", time)
            for name, module in list(sys.modules.items())
            if name.startswith(ROOMS) and hasattr(module, "time")
        ]
        replaced += [
            (simulation, "simulated_clock", lambda: simulation.EPOCH + clock.current_time()),
            (board, "threading", SimpleNamespace(Condition=_Condition)),
            (sharing, "threading", SimpleNamespace(Event=_Event)),
            (transfers, "threading", SimpleNamespace(Event=_Event)),
            (sharing, "in_own_thread", _on_loop),
        ]
        for module, name, stand_in in replaced:
            stack.enter_context(patch.object(module, name, stand_in))
        yield


class SimulatedLoop:
    """A training loop on virtual time, seen from inside."""

    def __init__(self, index: int, averager: Averager, thread: LoopThread[Any]) -> None:
        self.index = index
        self.averager = averager
        """A blocking averager, for the optimizers of :mod:`p2pavg.optim`."""
        self._thread = thread

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass, as a computation would. ``time.sleep`` would stop all peers."""
        self._thread.sleep(seconds)


async def run_loops(
    network: MemoryNetwork,
    count: int,
    train: Callable[[SimulatedLoop], T],
    *,
    config: AveragingConfig,
    plan: FaultPlan | None = None,
    kinds: Sequence[Kind] = (),
) -> dict[int, T]:
    """Run ``train(loop)``, which blocks, on ``count`` simulated peers at once, while a plan causes faults.

    It is :func:`~p2pavg.testing.run_peers` for programs that use :mod:`p2pavg.blocking` and :mod:`p2pavg.optim`. Each
    runs in a thread of its own, of which one runs at a time, so a run is the same for the same seed.

    Args:
        config: of each peer's averager.
        plan, kinds: as for :func:`~p2pavg.testing.run_peers`.

    Returns:
        The result of each peer's loop by index, without the peers that crashed.
    """

    async def work(peer: Peer, index: int) -> T:
        async with peer.averager(config) as averager:

            def loop(thread: LoopThread[T]) -> T:
                return train(SimulatedLoop(index, thread.averager(averager), thread))

            return await LoopThread(loop).run()

    with virtual_threads(trio.lowlevel.current_clock()):
        return await simulation.run_peers(network, count, work, plan=plan, kinds=kinds)
