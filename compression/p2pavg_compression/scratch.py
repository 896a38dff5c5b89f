"""Working memory: chunks that fit into a core's cache, in buffers that each thread reuses."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .codec import CPU

# Copies from the memory of a GPU to a payload in host memory.


@contextmanager
def default_stream(device: torch.device) -> Iterator[None]:
    """Run the block on the default stream of `device`, after the work that is queued on the current stream.

    bitsandbytes launches its quantization kernels on the legacy default stream, whatever the current stream
    is. torch's other streams do not wait for that one. When the block ends, even by an error, the device has
    finished. So no kernel still reads memory that the caller may free on its own stream.
    """
    stream = torch.cuda.default_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()


def copy_to_host(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `source` (contiguous, on a GPU) into the bytes `target` (uint8, CPU), and wait for the end.

    The copy goes through pinned memory, to which the GPU writes without another copy by the driver. torch
    caches pinned blocks, so only the first copy of each size pays for pinning.
    """
    staging = torch.empty(target.numel(), dtype=torch.uint8, device="cpu", pin_memory=True)
    staging.copy_(source.view(-1).view(torch.uint8), non_blocking=True)
    torch.cuda.current_stream(source.device).synchronize()
    target.copy_(staging)


CHUNK_ELEMENTS = 1 << 18
"""The elements of a chunk on the CPU: 1 MiB of float32.

Temporaries of the whole vector cost more than the arithmetic, because every page of them is new. With chunks
of a quarter of this size, launching operations makes encoding 25 % slower.
"""

CUDA_CHUNK_ELEMENTS = 1 << 22
"""The elements of a chunk on a GPU: 16 MiB of float32.

That makes kernel launches cheap, and is small beside a model.
"""


class _Memory:
    """Buffers of CHUNK_ELEMENTS numbers each."""

    def __init__(self) -> None:
        # Tensors made under inference_mode would be refused outside of it, in every later call of this thread.
        with torch.inference_mode(False):
            self.floats = torch.empty(CHUNK_ELEMENTS, dtype=torch.float32, device=CPU)
            self.halves = torch.empty(CHUNK_ELEMENTS, dtype=torch.float16, device=CPU)
            self.integers = torch.empty(CHUNK_ELEMENTS, dtype=torch.int32, device=CPU)


_MAX_IDLE = 32
_idle: list[_Memory] = []
"""The buffers of threads that have ended. New pages for each short-lived thread would cost more than its work."""


class _Loan:
    """The loan of buffers to a thread, which ends with the thread."""

    def __init__(self) -> None:
        try:
            self.memory = _idle.pop()
        except IndexError:
            self.memory = _Memory()

    def __del__(self, idle: list[_Memory] = _idle, most: int = _MAX_IDLE) -> None:
        # The defaults bind the globals here, because at exit the module may be gone.
        if len(idle) < most:
            idle.append(self.memory)


class Scratch(threading.local):
    """The buffers of one thread. Their content is valid within one call."""

    def __init__(self) -> None:
        self._loan = _Loan()
        memory = self._loan.memory
        self.floats, self.halves, self.integers = memory.floats, memory.halves, memory.integers


scratch = Scratch()


def chunk_ranges(elements: int, granularity: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of successive chunks of `elements` elements.

    Every chunk holds a multiple of `granularity` elements, except that a remainder of fewer than `granularity`
    elements is a chunk of its own. `chunk` must be a multiple of `granularity`.
    """
    whole = elements - elements % granularity
    for start in range(0, whole, chunk):
        yield start, min(start + chunk, whole)
    if whole < elements:
        yield whole, elements
