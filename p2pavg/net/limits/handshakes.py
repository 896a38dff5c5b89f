"""The processor time of inbound handshakes that are begun and not finished: measured, charged, and waited for.

A stranger that sends the first message of a handshake makes this peer compute keys and sign, which costs it more than
the stranger. A handshake that is finished cost the other end as much, so only the others are charged. The other end has
proved no identity yet, so its network pays, at the rates that :mod:`p2pavg.net.limits.call_budget` grants a network; a
relay pays for the handshakes that come through it. A connection from a network in debt waits, and is not refused: an
honest peer may be behind the same router.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

import trio

from p2pavg.net.limits.call_budget import LONGEST_DELAY, CallBudget
from p2pavg.net.limits.sources import prefix_of

T = TypeVar("T")


class Handshakes:
    """The budget of the handshakes that other peers begin.

    Args:
        budget: ``None``: one with the usual rates.
        clock: returns the processor seconds of this thread.
    """

    def __init__(
        self, budget: CallBudget | None = None, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._budget = budget or CallBudget()
        self._clock = clock

    async def wait_for_turn(self, source: str) -> None:
        """Wait until the network of a host, or a relay, has paid its debt. The caller bounds the wait."""
        # Time alone pays a debt, so no event tells its end.
        while (delay := self._budget.delay(trio.current_time(), "", prefix_of(source))) != 0.0:  # noqa: ASYNC110
            await trio.sleep(LONGEST_DELAY if delay is None else delay)

    async def run(self, source: str, handshake: Coroutine[Any, Any, T]) -> T:
        """Return the result of a handshake. If it fails or is cancelled, charge its processor time to ``source``."""
        meter = _Meter(self._clock)
        try:
            return await meter.run(handshake)
        except BaseException:
            self._budget.charge(trio.current_time(), "", prefix_of(source), seconds=meter.seconds, count=0)
            raise


class _Meter:
    """The processor time of one coroutine, without that of the tasks that run while it waits."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds = 0.0

    @coroutine
    def run(self, metered: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Do what ``await metered`` does, and measure each step of it."""
        value: Any = None
        error: BaseException | None = None
        try:
            while True:
                began = self._clock()
                try:
                    wanted = metered.send(value) if error is None else metered.throw(error)
                except StopIteration as end:
                    result: T = end.value
                    return result
                finally:
                    self.seconds += self._clock() - began
                value, error = None, None
                try:
                    value = yield wanted
                except BaseException as thrown:  # noqa: BLE001 - the coroutine decides what it means
                    error = thrown
        finally:
            metered.close()
