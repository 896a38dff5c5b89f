"""New threads reuse the working memory of ended ones, and no two live threads share it."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

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


SCRIPTS = {
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
