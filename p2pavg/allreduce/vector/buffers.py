"""Memory that is reused from round to round.

Allocating a vector costs more than averaging it: the system hands out its pages one by one and fills each with zeros
(64 MiB: 24 ms, against 2 ms). So a later round reuses the memory of an earlier one, as soon as the last tensor or view
on it is gone. That includes the caller's views: a caller may keep a result for any time.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class Buffers:
    """Lends buffers, and reclaims each when nothing refers to it any more. Safe to use from any thread.

    Args:
        max_idle_bytes: limit of the idle bytes kept for reuse; the oldest idle buffer is freed first.
    """

    def __init__(self, max_idle_bytes: int) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.Lock()
        self._idle: list[NDArray[np.uint8]] = []
        # Finalizers run wherever a last reference is dropped, even under the lock. They append here and never wait.
        self._returned: deque[NDArray[np.uint8]] = deque()

    def floats(self, elements: int) -> torch.Tensor:
        """Return a float32 tensor (elements,) on the CPU, of arbitrary content."""
        return torch.from_numpy(self._lend(4 * elements, np.float32))

    def bytes(self, count: int) -> memoryview:
        """Return a writable buffer of that many bytes, of arbitrary content."""
        return self._lend(count, np.uint8).data

    def _lend(self, count: int, dtype: type[np.generic]) -> NDArray[Any]:
        memory = self._take(count)
        # The finalizer watches the view that is handed out, because in numpy a view of a view refers to the memory
        # itself.
        lent = memory.view(dtype)
        if count:
            weakref.finalize(lent, self._take_back, memory).atexit = False
        return lent

    def _take(self, count: int) -> NDArray[np.uint8]:
        with self._lock:
            self._sort_in()
            for index in reversed(range(len(self._idle))):
                if self._idle[index].nbytes == count:
                    return self._idle.pop(index)
        return np.empty(count, dtype=np.uint8)

    def _take_back(self, memory: NDArray[np.uint8]) -> None:
        self._returned.append(memory)
        # The last reference may be dropped in the thread that holds the lock, so do not wait for it.
        if self._lock.acquire(blocking=False):
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def _sort_in(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())
        held = sum(memory.nbytes for memory in self._idle)
        while held > self._max_idle_bytes:
            held -= self._idle.pop(0).nbytes


FRESH = Buffers(0)
"""Memory that is not reused."""
