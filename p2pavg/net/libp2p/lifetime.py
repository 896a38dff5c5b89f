"""The lifetime of one transport: the nursery of its tasks, and a note that it has ended."""

from __future__ import annotations

import trio

from p2pavg.base.errors import ClosedError


class Lifetime:
    """Shared by a transport and its streams, so that a stream need not know the transport.

    Args:
        nursery: runs the tasks that must not end with a cancelled caller, e.g. the write of a frame.
    """

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.has_ended = False

    def end(self) -> None:
        """Cancel the tasks; streams refuse calls from now on."""
        self.has_ended = True
        self.nursery.cancel_scope.cancel()

    def check(self) -> None:
        """Raise ClosedError if the transport is closed."""
        if self.has_ended:
            raise ClosedError("the transport is closed")
