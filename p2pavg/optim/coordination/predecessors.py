"""Optimizers that a program has replaced by new ones, such as a notebook whose cell runs again.

Such an optimizer takes no further batch, but its peer is still there, and says that it takes part. The other peers
would wait for it, and the new optimizer first of all, which is in the same process.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

from p2pavg.base.errors import ClosedError
from p2pavg.optim.coordination.turns import OfThread

if TYPE_CHECKING:
    from p2pavg.blocking import Averager

logger = logging.getLogger(__name__)


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
