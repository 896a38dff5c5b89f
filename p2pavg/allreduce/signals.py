"""Signals of one attempt: from the lanes' threads to the event loop, and from there, as events, to its exchange."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import trio

from p2pavg.allreduce.events import AttemptEvent, ContributionOwed, LaneFailed, ResultComplete
from p2pavg.allreduce.reduction import PartTracker
from p2pavg.allreduce.values import AttemptData
from p2pavg.base.errors import RemoteProtocolError, UnreachableError
from p2pavg.base.threads.workers import ToLoop
from p2pavg.group.milestones import Milestone, OnMilestone, ignore

logger = logging.getLogger(__name__)


class Signals:
    """Signals of one attempt.

    The first group of methods may be called in any thread; it is what
    :class:`~p2pavg.allreduce.movers.lane_driver.DirectUse` reports to. The second group belongs to the event loop.

    Args:
        emit: takes the attempt's events, on the event loop.
        on_milestone: is told on the event loop which milestones this member has reached.
        values: what this member holds of the attempt.
        ledger: of the attempt.
        scope: of the attempt. After it was cancelled nothing is complete any more.
    """

    def __init__(
        self,
        emit: Callable[[AttemptEvent], None],
        on_milestone: OnMilestone,
        values: AttemptData,
        ledger: PartTracker,
        scope: trio.CancelScope,
    ) -> None:
        self.emit = emit
        self._on_milestone = on_milestone
        self._values = values
        # They send this member their own contributions, and wait for no other member before that.
        self._feeders = frozenset(ledger.feeders)
        self._scope = scope
        self._to_loop: ToLoop | None = None
        self._ready = [trio.Event() for _ in (*ledger.tasks, *ledger.forwards)]
        self._loop = 0  # identifier of the event loop's thread
        self._awaited = False  # whether a task on the event loop waits for them
        self._complete = False

    def open(self) -> None:
        """Take signals from threads from now on. Call it on the event loop."""
        self._to_loop = ToLoop()
        self._loop = threading.get_ident()

    # ------------------------------------------------------------------ in any thread

    def ready(self, index: int) -> None:
        """Note that something is ready: see :meth:`~p2pavg.allreduce.values.AttemptData.is_ready`."""
        if self._awaited:
            self._soon(self._ready[index].set)
        self.progressed()

    def owes(self, peer_id: str, yes: bool) -> None:
        """Note whether a member's contribution is waited for."""
        self._soon(self.note_owes, peer_id, yes)

    def reached(self, milestone: Milestone) -> None:
        """Note that a part has been sent."""
        if self._on_milestone is not ignore:
            self._soon(self._on_milestone, milestone)

    def progressed(self) -> None:
        """Note that a part has come."""
        if self._values.complete:
            self._soon(self.check_complete)

    def blame(self, peer_id: str, error: Exception) -> None:
        """Note that a member sent a part that cannot be averaged."""
        self._soon(self.broken, peer_id, error)

    def _soon(self, function: Callable[..., object], *args: object) -> None:
        if threading.get_ident() == self._loop:
            function(*args)
            return
        assert self._to_loop is not None
        self._to_loop(function, *args)

    # ------------------------------------------------------------------ on the event loop

    async def until_ready(self, index: int) -> None:
        """Wait for what :meth:`~p2pavg.allreduce.values.AttemptData.is_ready` numbers so."""
        with self._values.changed:  # a thread has said that it is ready, or will see that a task waits
            self._awaited = True
            if self._values.is_ready(index):
                self._ready[index].set()
        await self._ready[index].wait()

    def note_owes(self, peer_id: str, yes: bool) -> None:
        """Tell whether a member's contribution is waited for."""
        if not yes or peer_id in self._feeders:
            self.emit(ContributionOwed(peer_id, yes))

    def check_complete(self) -> None:
        """Tell once that everything is here."""
        if not self._complete and not self._scope.cancel_called and self._values.complete:
            self._complete = True
            self.emit(ResultComplete(self._values.averages.digests()))

    def broken(self, peer_id: str, error: Exception | str) -> None:
        """Tell that a lane to or from a member broke."""
        if isinstance(error, UnreachableError):
            # The leader is told the reason. It must not hear what answers at the addresses that a member announced.
            logger.info("%s could not be reached: %s", peer_id, error)
            error = "it could not be reached"
        hostile = isinstance(error, RemoteProtocolError)
        reason = f"it broke the protocol: {error}" if hostile else str(error)
        self.emit(LaneFailed(peer_id, reason, hostile))

    def cannot_handle(self, peer_id: str, error: Exception) -> None:
        """Tell that a member's message raised an exception here."""
        self.broken(peer_id, RemoteProtocolError(f"its message cannot be handled: {error!r}"))
