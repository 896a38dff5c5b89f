"""Context managers that are held open in a task of their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, TypeVar

import trio

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # whose stubs mypy prefers to trio's own

T = TypeVar("T")


async def hold_in(
    nursery: trio.Nursery, enter: Callable[..., AbstractAsyncContextManager[T]], *args: object
) -> tuple[T, Callable[[], Awaitable[None]]]:
    """Enter ``enter(*args)`` in a task of a nursery. Return its value, and a function that leaves it and waits."""
    leave, left = trio.Event(), trio.Event()

    async def live(task_status: TaskStatus[T]) -> None:
        try:
            async with enter(*args) as what:
                task_status.started(what)
                await leave.wait()
        finally:
            left.set()

    async def close() -> None:
        leave.set()
        await left.wait()

    what: T = await nursery.start(live)
    return what, close
