"""Memory that a peer shares with the processes that are attached to it.

The peer makes every segment, and seals its size: a process that could shorten one would end the peer by a bus error.

* A *contribution segment* belongs to one process: float32, the vector's length. The process writes its contribution
  into it, and the peer reads it once per round, before it checks the values.
* A *result segment* belongs to all processes of a run. Only the peer can write it. It begins with the *serial* of the
  round that is committed. Storing the serial is the commit of the round for all processes at once: whenever the peer
  is killed, either all of them find the serial of their round there, and the whole result, or none does.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import sys

import numpy
import torch

from p2pavg.base.errors import ConfigError, RemoteProtocolError

VECTOR_AT = 2**20
"""Offset of the vector in a result segment. The description of the result is in front of it."""
MAX_DESCRIPTION_BYTES = VECTOR_AT - 16

_F_SEAL_FUTURE_WRITE = 0x0010  # of Linux 5.1; the module fcntl has no name for it
_SERIAL = struct.Struct("=Q")
_LENGTH = struct.Struct("=I")


def check_platform() -> None:
    """Raise ConfigError on a system without the shared memory and the sockets that this needs."""
    if sys.platform != "linux":
        raise ConfigError(
            "processes can share a peer on Linux only; open a peer in each process with"
            " p2pavg.blocking.open_averager"
        )


def _make(name: str, size: int, seals: int) -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_size(descriptor: int, size: int) -> None:
    if os.fstat(descriptor).st_size != size:
        raise RemoteProtocolError("a shared segment of another size")


def _floats(memory: mmap.mmap, elements: int, offset: int = 0) -> torch.Tensor:
    if not elements:
        return torch.empty(0)
    return torch.frombuffer(memory, dtype=torch.float32, count=elements, offset=offset)


def contribution_size(elements: int) -> int:
    """Return the bytes of a contribution segment."""
    return max(4 * elements, 4)


def result_size(elements: int) -> int:
    """Return the bytes of a result segment."""
    return VECTOR_AT + 4 * elements


class ContributionSegment:
    """The segment of one process, seen from either end.

    Args:
        elements: length of the vector.
        descriptor: of the segment; a new one is made without it. It is closed by :meth:`close`.
    """

    def __init__(self, elements: int, descriptor: int | None = None) -> None:
        size = contribution_size(elements)
        self.descriptor = (
            _make("p2pavg-contribution", size, fcntl.F_SEAL_SEAL) if descriptor is None else descriptor
        )
        _check_size(self.descriptor, size)
        self.values = _floats(mmap.mmap(self.descriptor, size), elements)
        """float32, the vector's length, in the shared memory."""

    def close(self) -> None:
        """Close the descriptor. The memory lives as long as the tensor that shows it."""
        os.close(self.descriptor)


class ResultWriter:
    """The result segment of a run, at the peer.

    Args:
        elements: length of the vector.
    """

    def __init__(self, elements: int) -> None:
        size = result_size(elements)
        self.descriptor = _make("p2pavg-result", size, 0)
        self._memory = mmap.mmap(self.descriptor, size)
        # From here on, other processes can map it for reading only.
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        self.values = _floats(self._memory, elements, VECTOR_AT)
        """float32, the vector's length, in the shared memory. Write it after :meth:`open` only."""

    def open(self) -> None:
        """Take back the last round's serial, before anything of its result changes."""
        _SERIAL.pack_into(self._memory, 0, 0)

    def commit(self, serial: int, description: bytes) -> None:
        """Store the description of a result whose vector is written, and then the serial."""
        if len(description) > MAX_DESCRIPTION_BYTES:
            raise ValueError("the description of a result is too long")
        _LENGTH.pack_into(self._memory, 8, len(description))
        self._memory[16 : 16 + len(description)] = description
        _SERIAL.pack_into(self._memory, 0, serial)

    def close(self) -> None:
        """Close the descriptor. Processes that have mapped the segment can go on reading it."""
        os.close(self.descriptor)


class ResultReader:
    """The result segment of a run, at a process.

    Args:
        elements: length of the vector.
        descriptor: of the segment; it is closed.
    """

    def __init__(self, elements: int, descriptor: int) -> None:
        size = result_size(elements)
        try:
            _check_size(descriptor, size)
            self._memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        self._elements = elements

    def read(self, serial: int) -> tuple[bytes, torch.Tensor] | None:
        """Return the description and a copy of the vector of a round; ``None`` unless that round is committed there."""
        if self._serial() != serial:
            return None
        (length,) = _LENGTH.unpack_from(self._memory, 8)
        description = bytes(self._memory[16 : 16 + min(length, MAX_DESCRIPTION_BYTES)])
        vector = torch.empty(self._elements)
        numpy.copyto(
            vector.numpy(),
            numpy.frombuffer(self._memory, numpy.float32, count=self._elements, offset=VECTOR_AT),
        )
        # The peer gave this process up while it was copying, and wrote the next result.
        return (description, vector) if self._serial() == serial else None

    def _serial(self) -> int:
        (serial,) = _SERIAL.unpack_from(self._memory, 0)
        return int(serial)
