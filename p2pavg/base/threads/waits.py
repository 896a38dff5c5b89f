"""Words about waits: each wait that lasts says in the log what it waits for, and why."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio

from p2pavg.base.limits import MAX_BACKOFF_SECONDS

# Unwrapping of exception groups, into which nurseries wrap every exception.


@contextmanager
def bare_exceptions() -> Iterator[None]:
    """Raise the only exception of a group instead of the group. A group of several exceptions is raised unchanged."""
    try:
        yield
    except BaseExceptionGroup as group:
        leaves = list(_leaves(group))
        if len(leaves) == 1:
            raise leaves[0] from leaves[0].__cause__
        raise


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


FIRST_WORD_SECONDS = 3.0  # about the time after which a user wonders why a program stands still


@asynccontextmanager
async def told_while_waiting(
    logger: logging.Logger, why: Callable[[float], str], *, first: float = FIRST_WORD_SECONDS
) -> AsyncIterator[None]:
    """Log a warning as long as the block runs: after ``first`` seconds, then with doubling pauses.

    A warning is seen without any setup of logging.

    Args:
        why: is given the seconds so far. Returns a sentence that says what is waited for, and why; an empty text is
            not logged.
        first: seconds until the first warning.
    """

    async def tell() -> None:
        began, pause = trio.current_time(), first
        while True:
            await trio.sleep(pause)
            if sentence := why(trio.current_time() - began):
                logger.warning("%s", sentence)
            pause = min(2 * pause, MAX_BACKOFF_SECONDS)

    with bare_exceptions():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell)
            yield
            nursery.cancel_scope.cancel()
