"""The eager lock behaves like trio's, except that a free lock is acquired without a turn of the event loop."""

from __future__ import annotations

import random
from typing import Any, cast

import libp2p.io.trio as io_trio
import libp2p.network.stream.net_stream as net_stream
import libp2p.stream_muxer.rw_lock as rw_lock
import libp2p.stream_muxer.yamux.yamux as yamux
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from p2pavg.net.libp2p.speed import EagerLock, install


async def test_a_free_lock_is_taken_at_once() -> None:
    lock = EagerLock()
    ran: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.lowlevel.checkpoint)
        nursery.start_soon(lambda: note(ran, "another"))
        for _ in range(100):
            async with lock:
                assert lock.locked()
            assert not lock.locked()
        assert ran == []


async def note(where: list[str], what: str) -> None:
    where.append(what)


async def test_only_one_task_holds_the_lock() -> None:
    lock = EagerLock()
    inside: list[int] = []
    most = [0]
    draw = random.Random(1)

    async def work(number: int) -> None:
        for _ in range(20):
            async with lock:
                inside.append(number)
                most.append(len(inside))
                for _ in range(draw.randrange(3)):
                    await trio.lowlevel.checkpoint()
                inside.remove(number)
            for _ in range(draw.randrange(3)):
                await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(work, number)
    assert max(most) == 1
    assert len(most) == 201
    assert not lock.locked()


async def test_waiters_get_the_lock_in_order_before_its_last_holder() -> None:
    """A task that releases the lock and acquires it again at once comes after the waiting tasks."""
    lock = EagerLock()
    order: list[str] = []

    async def wait(name: str) -> None:
        async with lock:
            order.append(name)

    async with trio.open_nursery() as nursery:
        await lock.acquire()
        for name in ("first", "second", "third"):
            nursery.start_soon(wait, name)
            await wait_all_tasks_blocked()
        lock.release()
        assert lock.locked(), "the first waiter has the lock already"
        await wait("last holder")
    assert order == ["first", "second", "third", "last holder"]


async def test_libp2p_sees_all_of_trio_except_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = (yamux, net_stream, rw_lock, io_trio)
    for module in modules:
        monkeypatch.setattr(module, "trio", trio)
    install()
    install()
    for module in modules:
        seen = cast(Any, module).trio
        assert seen.Lock is EagerLock
        assert seen.Event is trio.Event
        assert seen.BrokenResourceError is trio.BrokenResourceError
        with pytest.raises(AttributeError):
            _ = seen.NothingOfThatName
    assert isinstance(trio.Lock(), trio.Lock), "trio itself must not change"
    lock = rw_lock.ReadWriteLock()
    async with lock.read_lock():
        pass
    async with lock.write_lock():
        pass
