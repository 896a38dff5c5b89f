"""Memory reused from round to round: lent once at a time, and reclaimed when nothing refers to it."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.allreduce.vector.buffers import Buffers
from tests.unit.allreduce.vector.idle import idle_bytes

ELEMENTS = 1000
NBYTES = 4 * ELEMENTS
PLENTY = 1 << 30


def address_of(lent: torch.Tensor | memoryview) -> int:
    if isinstance(lent, torch.Tensor):
        return lent.data_ptr()
    return int(np.frombuffer(lent, np.uint8).__array_interface__["data"][0])


VIEWS: dict[str, Callable[[torch.Tensor], object]] = {
    "the tensor": lambda tensor: tensor,
    "a slice": lambda tensor: tensor[3:5],
    "an empty slice": lambda tensor: tensor[5:5],
    "a view of a view": lambda tensor: tensor[10:20].view(2, 5)[1].t(),
    "numpy's array": lambda tensor: tensor.numpy(),
    "a slice of numpy's array": lambda tensor: tensor.numpy()[7:][::2],
    "a view of other numbers": lambda tensor: tensor.numpy().view(np.uint8)[1:].reshape(-1),
    "its bytes": lambda tensor: tensor.numpy().data.cast("B")[2:9],
    "a tensor of numpy's array": lambda tensor: torch.from_numpy(tensor.numpy()[1:])[1:],
    "its storage": lambda tensor: tensor.untyped_storage(),
    "a parameter": lambda tensor: torch.nn.Parameter(tensor.detach()[1:]),
    "an array over dlpack": lambda tensor: np.from_dlpack(tensor)[1:],
}

BYTE_VIEWS: dict[str, Callable[[memoryview], object]] = {
    "the bytes": lambda view: view,
    "a slice": lambda view: view[5:7],
    "a slice of a cast slice": lambda view: view[4:44].cast("f")[2:].toreadonly(),
    "numpy's array": lambda view: np.frombuffer(view, np.uint8)[3:],
    "numpy's view of a slice": lambda view: np.asarray(view[8:16]).view(np.float32)[1:],
    "a tensor": lambda view: torch.frombuffer(view, dtype=torch.float32)[1:],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_float_memory_is_reclaimed_with_its_last_view(view: Callable[[torch.Tensor], object]) -> None:
    buffers = Buffers(PLENTY)
    check_reclaimed(buffers, partial(buffers.floats, ELEMENTS), view)


@pytest.mark.parametrize("view", BYTE_VIEWS.values(), ids=BYTE_VIEWS)
def test_byte_memory_is_reclaimed_with_its_last_view(view: Callable[[memoryview], object]) -> None:
    buffers = Buffers(PLENTY)
    check_reclaimed(buffers, partial(buffers.bytes, NBYTES), view)


def check_reclaimed(buffers: Buffers, lend: Callable[[], Any], view: Callable[[Any], object]) -> None:
    lent = lend()
    address, kept = address_of(lent), [view(lent)]
    del lent
    assert idle_bytes(buffers) == 0
    meanwhile = lend()
    assert address_of(meanwhile) != address
    kept.clear()
    assert idle_bytes(buffers) == NBYTES
    assert address_of(lend()) == address


def test_float_memory_can_be_reused_as_bytes() -> None:
    buffers = Buffers(PLENTY)
    address = address_of(buffers.floats(ELEMENTS))
    assert address_of(buffers.bytes(NBYTES)) == address
    assert address_of(buffers.floats(ELEMENTS)) == address


def test_only_memory_of_the_same_length_is_reused() -> None:
    buffers = Buffers(PLENTY)
    buffers.bytes(NBYTES).release()
    assert len(buffers.bytes(NBYTES - 1)) == NBYTES - 1
    assert buffers.floats(ELEMENTS + 1).shape == (ELEMENTS + 1,)
    assert idle_bytes(buffers) >= NBYTES


def test_buffer_is_writable_and_has_its_shape() -> None:
    buffers = Buffers(PLENTY)
    for _ in range(2):
        floats, view = buffers.floats(ELEMENTS), buffers.bytes(7)
        assert (floats.dtype, floats.shape, floats.device.type) == (torch.float32, (ELEMENTS,), "cpu")
        assert (view.format, view.shape, view.readonly, view.contiguous) == ("B", (7,), False, True)
        floats.fill_(1.0)
        view[:] = b"written"
        assert floats.sum().item() == ELEMENTS
        assert bytes(view) == b"written"


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_idle_memory_is_limited(keep: int) -> None:
    buffers = Buffers(keep * NBYTES + NBYTES // 2)
    lent = [buffers.floats(ELEMENTS) for _ in range(5)]
    addresses = [address_of(each) for each in lent]
    assert idle_bytes(buffers) == 0, "what is lent does not count"
    while lent:
        lent.pop(0)
        assert idle_bytes(buffers) <= keep * NBYTES
    assert idle_bytes(buffers) == keep * NBYTES
    if keep:
        again = [buffers.floats(ELEMENTS) for _ in range(keep)]
        assert [address_of(each) for each in again] == addresses[: -keep - 1 : -1], "the last ones were kept"


def test_excess_memory_is_freed_on_return() -> None:
    buffers = Buffers(NBYTES)
    lent = [buffers.bytes(NBYTES) for _ in range(5)]
    memories = [memory_of(each) for each in lent]
    lent.clear()
    assert sum(memory() is not None for memory in memories) <= 1


def memory_of(lent: memoryview) -> weakref.ref[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    base = np.asarray(lent.obj).base
    assert isinstance(base, np.ndarray)
    return weakref.ref(base)


def test_empty_buffers() -> None:
    buffers = Buffers(PLENTY)
    for _ in range(3):
        floats, view = buffers.floats(0), buffers.bytes(0)
        assert floats.shape == (0,)
        assert floats.dtype is torch.float32
        assert view.nbytes == 0
        del floats, view
        assert idle_bytes(buffers) == 0
    assert len(buffers._idle) == len(buffers._returned) == 0


def test_lent_memory_outlives_its_pool() -> None:
    buffers = Buffers(PLENTY)
    floats, view = buffers.floats(ELEMENTS), buffers.bytes(NBYTES)
    del buffers
    gc.collect()
    floats.fill_(2.0)
    view[:] = bytes(NBYTES)
    assert floats.mean().item() == 2.0


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("lend"), st.sampled_from([0, 4, 8, 40]), st.booleans()),
            st.tuples(st.just("drop"), st.integers(0, 9), st.booleans()),
        ),
        max_size=60,
    ),
    st.integers(0, 100),
)
def test_no_two_live_buffers_share_memory(steps: list[tuple[str, int, bool]], bound: int) -> None:
    buffers = Buffers(bound)
    alive: list[tuple[np.ndarray[tuple[int, ...], np.dtype[np.uint8]], int]] = []
    for number, (what, value, yes) in enumerate(steps):
        if what == "lend":
            lent = (
                buffers.floats(value // 4).numpy() if yes else np.frombuffer(buffers.bytes(value), np.uint8)
            )
            view = lent.view(np.uint8)
            view[:] = number
            alive.append((view, number))
            del lent, view
        elif alive:
            del alive[value % len(alive)]
        assert idle_bytes(buffers) <= bound
        assert all((view == written).all() for view, written in alive)
    ranges = sorted((view.ctypes.data, view.ctypes.data + view.nbytes) for view, _ in alive if view.nbytes)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))


def test_one_of_concurrent_threads_gets_the_idle_buffer() -> None:
    class Slow(list[Any]):
        """Lets other threads run between finding and taking a buffer."""

        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            time.sleep(0)
            return found

    threads = 8
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(50):
            buffers = Buffers(PLENTY)
            buffers._idle = Slow(np.empty(NBYTES, np.uint8) for _ in range(threads // 2))
            begin = threading.Barrier(threads)

            def ask(buffers: Buffers = buffers, begin: threading.Barrier = begin) -> memoryview:
                begin.wait(30.0)
                return buffers.bytes(NBYTES)

            lent = [future.result(30.0) for future in [pool.submit(ask) for _ in range(threads)]]
            assert len({address_of(each) for each in lent}) == threads
            assert idle_bytes(buffers) == 0


def test_return_during_lending_does_not_deadlock() -> None:
    """Garbage collection may run finalizers at any allocation, even in the thread that holds the lock."""
    buffers = Buffers(PLENTY)
    cycle: list[object] = [buffers.floats(ELEMENTS)]
    cycle.append(cycle)
    del cycle
    with buffers._lock:
        gc.collect()
    assert idle_bytes(buffers) == NBYTES
