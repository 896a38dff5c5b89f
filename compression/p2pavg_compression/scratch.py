"""Working memory: chunks that stay in a core's cache, in buffers that each thread reuses."""

import threading
from collections.abc import Iterator

import torch

from .buffers import CPU

__all__ = ["CHUNK_ELEMENTS", "CUDA_CHUNK_ELEMENTS", "Scratch", "chunk_ranges", "scratch"]

CHUNK_ELEMENTS = 1 << 18
"""1 MiB of float32. Temporaries of the whole vector cost more than the arithmetic does, because every page of
them is new; chunks much smaller spend their time in launching operations (a quarter of it: 25 % slower)."""

CUDA_CHUNK_ELEMENTS = 1 << 22
"""16 MiB of float32: enough that launching kernels does not count, little beside a model."""


class _Memory:
    """Buffers of CHUNK_ELEMENTS numbers each."""

    def __init__(self) -> None:
        # Made under inference_mode they would be refused outside of it, in every later call of this thread.
        with torch.inference_mode(False):
            self.floats = torch.empty(CHUNK_ELEMENTS, dtype=torch.float32, device=CPU)
            self.halves = torch.empty(CHUNK_ELEMENTS, dtype=torch.float16, device=CPU)
            self.integers = torch.empty(CHUNK_ELEMENTS, dtype=torch.int32, device=CPU)


_MAX_IDLE = 32
_idle: list[_Memory] = []
"""Of threads that have ended: new pages for each short-lived thread would cost more than what it does in them."""


class _Loan:
    """A thread's hold on its buffers; it ends with the thread."""

    def __init__(self) -> None:
        try:
            self.memory = _idle.pop()
        except IndexError:
            self.memory = _Memory()

    def __del__(self, idle: list[_Memory] = _idle, most: int = _MAX_IDLE) -> None:
        # Bound here: at exit the module may be gone.
        if len(idle) < most:
            idle.append(self.memory)


class Scratch(threading.local):
    """One thread's buffers. What they contain is valid within one call."""

    def __init__(self) -> None:
        self._loan = _Loan()
        memory = self._loan.memory
        self.floats, self.halves, self.integers = memory.floats, memory.halves, memory.integers


scratch = Scratch()


def chunk_ranges(elements: int, granularity: int, chunk: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of successive chunks of `elements` elements.

    Every chunk holds a multiple of `granularity` elements, save that what is left over at the end, less than
    `granularity`, is a chunk of its own. `chunk` is a multiple of `granularity`.
    """
    whole = elements - elements % granularity
    for start in range(0, whole, chunk):
        yield start, min(start + chunk, whole)
    if whole < elements:
        yield whole, elements
