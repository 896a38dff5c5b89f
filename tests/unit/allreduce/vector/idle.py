"""The bytes that a pool of buffers keeps for reuse."""

from __future__ import annotations

from p2pavg.allreduce.vector.buffers import Buffers


def idle_bytes(buffers: Buffers) -> int:
    """Return the bytes that the pool keeps, after it has sorted in all memory that came back."""
    buffers.bytes(0)
    with buffers._lock:
        return sum(memory.nbytes for memory in buffers._idle)
