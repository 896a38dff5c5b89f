"""Turns of optimizers that one loop steps, each in a run of its own, such as those of both networks of a GAN.

A step waits for the other peers. Peers hear of each other's batches at different times, so one may wait in its round of
the first run while another waits in that of the second. Neither would come to the other's round. Therefore, a step
gives way to an optimizer that is wanted too, and whose run's id sorts before its own. It returns without an update, and
keeps what it has accumulated. All peers have the same order, so they cannot wait for each other in a circle.

No I/O, no clock: calls are given ``now``.
"""

from __future__ import annotations

import logging
import math
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from weakref import WeakSet, WeakValueDictionary

from p2pavg.base.errors import ClosedError

if TYPE_CHECKING:
    from p2pavg.blocking import Averager

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Steppable(Protocol):
    """The part of an optimizer's coordination with the other peers that this module needs."""

    @property
    def turn(self) -> Turn:
        """Its turn."""
        ...

    def wants_step(self, at: float) -> bool:
        """Return whether the next update waits for a step of this optimizer.

        Args:
            at: when the loop began to step another optimizer; minus infinity if the loop surely steps this one.
        """
        ...


class OfThread(threading.local, Generic[T]):
    """One object of each run, for each thread; none of them is kept alive.

    An identifier of a thread would not do: the system gives that of a thread that has ended to a new one.
    """

    def __init__(self) -> None:
        self.by_run: WeakValueDictionary[str, T] = WeakValueDictionary()


_loop: OfThread[Steppable] = OfThread()
"""The optimizers that a thread steps, or is about to step."""


class Turn:
    """The turn of one optimizer; all calls are made in the thread that steps it.

    Args:
        run_id: its run.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.steps = 0
        """Number of steps that have begun."""
        self._began = 0.0
        self._is_over = True
        self._gave_way: dict[str, tuple[int, int]] = {}
        """By the other's run: the step in which this optimizer last gave way to it, and its number of steps then."""

    def expect(self, steppable: Steppable) -> None:
        """Note that the thread that calls this is about to step the optimizer."""
        _loop.by_run[self.run_id] = steppable

    def begin(self, now: float, steppable: Steppable) -> None:
        """Note that a step begins. An optimizer that never does never gives way."""
        self._began, self._is_over = now, False
        self.steps += 1
        self.expect(steppable)

    def end(self) -> None:
        """Note that the optimizer takes no further step, unless it begins one again."""
        known = _loop.by_run.get(self.run_id)
        if known is not None and known.turn is self:
            del _loop.by_run[self.run_id]
        self._is_over = True

    @property
    def is_shared(self) -> bool:
        """True if the loop steps optimizers of other runs too."""
        return not self._is_over and len(_loop.by_run) > 1

    def gives_way(self) -> str:
        """Return the reason why the loop must step another optimizer before this one waits; empty if there is none."""
        if self._is_over:
            return ""
        for run_id, other in sorted(_loop.by_run.items()):
            if run_id >= self.run_id:
                break
            # A loop may take long between two steps, and long before the first. If it does not step the other optimizer
            # after this one has given way to it, only the clock says whether it still does so.
            step, before = self._gave_way.get(run_id, (0, -1))
            surely_stepped = step == self.steps or before != other.turn.steps
            if other.wants_step(-math.inf if surely_stepped else self._began):
                self._gave_way[run_id] = self.steps, other.turn.steps
                return f"the update of run {run_id!r}, which the same loop trains, comes first"
        return ""


# Optimizers that a program has replaced by new ones, such as a notebook whose cell runs again.
#
# Such an optimizer takes no further batch, but its peer is still there, and says that it takes part. The other peers
# would wait for it, and the new optimizer first of all, which is in the same process.


class ReplaceableOptimizer(Protocol):
    """The part of an optimizer that this module needs."""

    @property
    def averager(self) -> Averager:
        """The averager that it was made with."""
        ...

    def leave(self) -> None:
        """Stop taking part, until it is stepped again."""
        ...


_stepped: OfThread[ReplaceableOptimizer] = OfThread()
"""The optimizers that began last."""
_begun: WeakSet[ReplaceableOptimizer] = WeakSet()


def begins(optimizer: ReplaceableOptimizer, averager: Averager) -> None:
    """Note a step. At its first one, the optimizer that this thread stepped before in the same run leaves the run.

    A step waits for other peers, so a program that has two peers of one run steps them in two threads. If the earlier
    optimizer is stepped again all the same, it takes part again.
    """
    if optimizer in _begun:
        return
    _begun.add(optimizer)
    run_id, latest = averager.config.run_id, _stepped.by_run
    earlier, latest[run_id] = latest.get(run_id), optimizer
    if earlier is None or earlier.averager.peer_id == averager.peer_id:
        return
    logger.info(
        "an optimizer of run %r is replaced by a new one, and its peer %s is not waited for: close its averager",
        run_id,
        earlier.averager.peer_id,
    )
    with suppress(ClosedError):  # its averager has been closed
        earlier.leave()
