"""New threads reuse the working memory of ended ones, and no two live threads share it."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from p2pavg_compression import Blockwise8, Int8
from p2pavg_compression import scratch as scratch_module
from p2pavg_compression.scratch import CHUNK_ELEMENTS, scratch
from tests.programs import run_python

WATCHDOG_SECONDS = 120.0

T = TypeVar("T")


@pytest.fixture(autouse=True)
def _nothing_idle() -> Iterator[None]:
    """Put aside the buffers that threads of other tests have left."""
    idle = scratch_module._idle
    kept = idle[:]
    idle.clear()
    yield
    idle[:] = kept


def addresses() -> tuple[int, int, int]:
    return scratch.floats.data_ptr(), scratch.halves.data_ptr(), scratch.integers.data_ptr()


def in_a_new_thread(work: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result(WATCHDOG_SECONDS)


def test_a_thread_keeps_its_buffers() -> None:
    assert addresses() == addresses()
    assert len(set(addresses())) == 3
    for buffer in (scratch.floats, scratch.halves, scratch.integers):
        assert buffer.shape == (CHUNK_ELEMENTS,)
        assert buffer.device.type == "cpu"


def test_buffers_of_an_ended_thread_are_reused() -> None:
    first = in_a_new_thread(addresses)
    assert [in_a_new_thread(addresses) for _ in range(5)] == [first] * 5
    assert len(scratch_module._idle) == 1


def test_buffers_of_a_failed_thread_are_reused() -> None:
    def fail() -> None:
        addresses()
        raise ValueError

    first = in_a_new_thread(addresses)
    with pytest.raises(ValueError):  # noqa: PT011 - it is the one from above
        in_a_new_thread(fail)
    assert in_a_new_thread(addresses) == first


def test_two_live_threads_never_share_buffers() -> None:
    threads = 6
    together = threading.Barrier(threads)

    def work() -> tuple[int, int, int]:
        found = addresses()
        together.wait(WATCHDOG_SECONDS)
        return found

    for _ in range(20):
        with ThreadPoolExecutor(threads) as pool:
            found = [future.result() for future in [pool.submit(work) for _ in range(threads)]]
        assert len({address for each in found for address in each}) == 3 * threads
    assert len(scratch_module._idle) == threads, (
        "each generation of threads must reuse all buffers of the one before"
    )


def test_short_lived_threads_do_not_disturb_each_other() -> None:
    """Many new threads encode different values, and get the same results as a single thread."""
    codecs = [Int8(block_size=64), Blockwise8(block_size=64)]
    values = [torch.randn(5000, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    alone = [[bytes(codec.encode(each)) for codec in codecs] for each in values]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(5):
            if [bytes(codec.encode(values[index])) for codec in codecs] != alone[index]:
                wrong.append(index)

    for _ in range(15):
        running = [threading.Thread(target=work, args=(index,)) for index in range(len(values))]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(WATCHDOG_SECONDS)
    assert wrong == []
    assert len(scratch_module._idle) <= len(values)


SCRIPTS = {
    "its main thread": "encode()",
    "a thread that has ended": """
thread = threading.Thread(target=encode)
thread.start()
thread.join()
""",
    "a thread that ended, and its main thread": """
thread = threading.Thread(target=encode)
thread.start()
thread.join()
encode()
""",
    "its main thread, with the module kept to the last": """
import sys, p2pavg_compression.scratch
sys.kept = p2pavg_compression.scratch
encode()
""",
    "a thread that still runs": """
done = threading.Event()
def work():
    encode()
    done.set()
    time.sleep(3600)
threading.Thread(target=work, daemon=True).start()
done.wait()
""",
}


@pytest.mark.parametrize("script", [pytest.param(script, id=name) for name, script in SCRIPTS.items()])
def test_a_process_that_used_a_codec_ends_without_output(script: str) -> None:
    begin = """
import threading, time, torch
from p2pavg_compression import Blockwise8
def encode():
    Blockwise8(block_size=64).encode(torch.ones(1000))
"""
    done = run_python("-W", "error", "-c", begin + script, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
