"""The processor time that other peers take by what they say: measured, charged to them, and waited for.

Everything that a stranger sends is read on the event loop before anything is known of it. A signature takes 0.1 ms, a
context of TLS 2 ms, and a message may ask for many. So what a message has cost is charged to its sender and the
sender's network afterwards (:mod:`p2pavg.net.limits.call_budget`), and a sender in debt is read later, or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.net.limits.call_budget import LONGEST_DELAY, CallBudget
from p2pavg.net.limits.sources import prefix_of
from p2pavg.net.transport import Stream


class Bill:
    """The bytes of one answer, to be noted while it is made."""

    def __init__(self) -> None:
        self.count = 0


class FirstMessages:
    """The budget of the messages that one or several protocols read.

    Args:
        budget: ``None``: one with the usual rates.
    """

    def __init__(self, budget: CallBudget | None = None) -> None:
        self._budget = budget or CallBudget()

    async def admit(self, stream: Stream) -> None:
        """Wait until the peer at the other end has paid its debt.

        Raises:
            RemoteProtocolError: the debt is too large to wait for.
        """
        delay = self._budget.delay(trio.current_time(), stream.remote, prefix_of(stream.remote_host))
        if delay is None:
            raise RemoteProtocolError(
                f"busy: its messages have used up the budget of the next {LONGEST_DELAY:.0f} s"
            )
        if delay:
            await trio.sleep(delay)

    @contextmanager
    def charged(self, stream: Stream) -> Iterator[Bill]:
        """Charge the processor time of the block to the peer at the other end. Nothing is awaited in the block."""
        bill = Bill()
        began, thread_began = trio.current_time(), time.thread_time()
        try:
            yield bill
        finally:
            now = trio.current_time()
            # This thread's own CPU time is charged: a training loop that holds the interpreter is not the sender's
            # fault. In simulations the event loop's clock stands still here, so that every run charges the same.
            seconds = min(now - began, time.thread_time() - thread_began)
            self._budget.charge(
                now, stream.remote, prefix_of(stream.remote_host), seconds=seconds, count=bill.count
            )
