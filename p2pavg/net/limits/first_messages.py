"""The processor time that other peers take by what they say: measured, charged to them, and waited for.

Everything that a stranger sends is read on the event loop before anything is known of it. A signature takes 0.1 ms, a
context of TLS 2 ms, and a message may ask for many. So what a message has cost is charged to its sender and the
sender's network afterwards (:mod:`p2pavg.net.limits.call_budget`), and a sender in debt is read later, or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from types import coroutine
from typing import Any, TypeVar

import trio

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.hosts import prefix_of
from p2pavg.net.limits.call_budget import LONGEST_DELAY, CallBudget
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


T = TypeVar("T")


# The processor time of inbound handshakes that are begun and not finished: measured, charged, and waited for.
#
# A stranger that sends the first message of a handshake makes this peer compute keys and sign, which costs it more
# than the stranger. A handshake that is finished cost the other end as much, so only the others are charged. The
# other end has proved no identity yet, so its network pays, at the rates that p2pavg.net.limits.call_budget grants a
# network; a relay pays for the handshakes that come through it. A connection from a network in debt waits, and is not
# refused: an honest peer may be behind the same router.


class Handshakes:
    """The budget of the handshakes that other peers begin.

    Args:
        budget: ``None``: one with the usual rates.
    """

    def __init__(self, budget: CallBudget | None = None) -> None:
        self._budget = budget or CallBudget()

    async def wait_for_turn(self, source: str) -> None:
        """Wait until the network of a host, or a relay, has paid its debt. The caller bounds the wait."""
        # Time alone pays a debt, so no event tells its end.
        while (delay := self._budget.delay(trio.current_time(), "", prefix_of(source))) != 0.0:  # noqa: ASYNC110
            await trio.sleep(LONGEST_DELAY if delay is None else delay)

    async def run(self, source: str, handshake: Coroutine[Any, Any, T]) -> T:
        """Return the result of a handshake. If it fails or is cancelled, charge its processor time to ``source``."""
        meter = _Meter()
        try:
            return await meter.run(handshake)
        except BaseException:
            self._budget.charge(trio.current_time(), "", prefix_of(source), seconds=meter.seconds, count=0)
            raise


class _Meter:
    """The processor time of one coroutine, without that of the tasks that run while it waits."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @coroutine
    def run(self, metered: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Do what ``await metered`` does, and measure each step of it."""
        value: Any = None
        error: BaseException | None = None
        try:
            while True:
                began = time.thread_time()
                try:
                    wanted = metered.send(value) if error is None else metered.throw(error)
                except StopIteration as end:
                    result: T = end.value
                    return result
                finally:
                    self.seconds += time.thread_time() - began
                value, error = None, None
                try:
                    value = yield wanted
                except BaseException as thrown:  # noqa: BLE001 - the coroutine decides what it means
                    error = thrown
        finally:
            metered.close()
