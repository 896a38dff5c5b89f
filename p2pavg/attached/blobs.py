"""Files in memory that carry states between a peer and its attached processes."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

import torch

from p2pavg.base.errors import RemoteProtocolError, StateError
from p2pavg.net.transport import Buffer
from p2pavg.state.joiner.sink import MemorySink

SEALED = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_WRITE") else 0
_WRITE_BYTES = 2**24


def sealed_file(data: Buffer) -> int:
    """Return the descriptor of a new file in memory with this content, which no process can change any more.

    Raises:
        StateError: there is no memory for it.
    """
    descriptor = os.memfd_create("p2pavg-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view, written = memoryview(data).cast("B"), 0
        while written < len(view):
            written += os.write(descriptor, view[written : written + _WRITE_BYTES])
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALED | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(descriptor)
        raise StateError(f"there is no memory for a state: {error.strerror}") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def mapped_sealed(descriptor: int, size: int) -> memoryview:
    """Return the content of a file that another process has made.

    Raises:
        RemoteProtocolError: it has another size, or can still be changed.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise RemoteProtocolError("a state in a file that is not in memory") from None
    if seals & SEALED != SEALED:
        raise RemoteProtocolError("a state that can still be changed")
    return mapped(descriptor, size)


def mapped(descriptor: int, size: int) -> memoryview:
    """Return the content of a file of this size, to be read; raise RemoteProtocolError if it has another size."""
    if size <= 0 or os.fstat(descriptor).st_size != size:
        raise RemoteProtocolError("a state of another size")
    return memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ))


class FileInMemory(MemorySink):
    """Keeps the pieces of one blob in a file in memory, whose descriptor can be passed on.

    Args:
        sizes: bytes of each piece.

    Raises:
        StateError: there is no memory for it.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.size = sum(sizes)
        self.descriptor = -1
        super().__init__(sizes)

    def _room(self, size: int) -> memoryview:
        try:
            self.descriptor = os.memfd_create("p2pavg-state", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, size)
            return memoryview(mmap.mmap(self.descriptor, size)) if size else memoryview(b"")
        except OSError as error:
            self.close()
            raise StateError(f"there is no memory for a state of {size} bytes: {error.strerror}") from None

    def close(self) -> None:
        """Close the descriptor. The memory is free when no view of it is left."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class ReceivedFile:
    """A complete blob that the peer has passed to this process. A sink to read from.

    Args:
        descriptor: of the file; it is closed.
        size: bytes.

    Raises:
        RemoteProtocolError: the file has another size.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        try:
            self._data = mapped(descriptor, size)
        finally:
            os.close(descriptor)

    @property
    def claimed(self) -> Sequence[int]:
        """Nothing: it is complete."""
        return ()

    def verify(self, indices: object) -> list[int]:  # noqa: ARG002 - as in Sink
        """Return nothing: see :attr:`claimed`."""
        return []

    def put(self, index: int, piece: Buffer) -> None:
        """Refuse: the blob is complete."""
        raise StateError(f"piece {index} ({len(memoryview(piece))} bytes) of a state that is complete")

    def take(self) -> memoryview:
        """Return the data, read-only."""
        return self._data

    def close(self) -> None:
        """Do nothing: the memory is free when no view of it is left."""


def vector_file(vector: torch.Tensor) -> int:
    """Return the descriptor of a sealed file with a float32 vector; raise StateError if there is no memory for it."""
    return sealed_file(vector.contiguous().view(torch.uint8).numpy().data)


def vector_of(data: memoryview) -> torch.Tensor:
    """Return a copy of a float32 vector in a file.

    Raises:
        RemoteProtocolError: the file has no whole number of elements.
    """
    if len(data) % 4:
        raise RemoteProtocolError("a vector with a part of an element")
    vector = torch.empty(len(data) // 4)
    vector.numpy().data.cast("B")[:] = data
    return vector
