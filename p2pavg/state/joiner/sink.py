"""Places where the pieces of a blob land: memory, or a file that survives a crash of this process.

The pieces that a sink gets are verified. Its methods may be called from any thread, except :meth:`Sink.close`.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

from blake3 import blake3

from p2pavg.base.errors import StateError
from p2pavg.base.messages import pack
from p2pavg.net.transport import Buffer

_MAGIC = b"p2pavg pieces 1\n"
_DOMAIN = "p2pavg/pieces/1"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SUFFIX = ".pieces"


def digest_of(piece: Buffer) -> bytes:
    """Return the digest of a piece, 32 bytes of BLAKE3."""
    return blake3(piece).digest()


class MemorySink:
    """Keeps the pieces of one blob in one buffer.

    Args:
        sizes: bytes of each piece.

    Raises:
        StateError: there is no room for it.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._offsets = [0, *accumulate(sizes)]
        size = self._offsets[-1]
        try:
            self._data = memoryview(bytearray(size))
        except MemoryError:
            raise StateError(f"there is no memory for a state of {size} bytes") from None

    @property
    def claimed(self) -> Sequence[int]:
        """Nothing: memory keeps no earlier download."""
        return ()

    def verify(self, indices: Iterable[int]) -> list[int]:  # noqa: ARG002 - as in Sink
        """Return nothing: see :attr:`claimed`."""
        return []

    def put(self, index: int, piece: Buffer) -> None:
        """Copy a piece to its place."""
        self._data[self._offsets[index] : self._offsets[index + 1]] = piece

    def take(self) -> memoryview:
        """Return the data, read-only."""
        return self._data.toreadonly()

    def close(self) -> None:
        """Do nothing: the memory is free when no view of it is left."""


class FileSink:
    """Keeps the pieces of one blob in a file, and beside it a file that says which ones are there.

    The second file names the blob by its pieces' sizes and digests, and has a bit for each piece, which is set after
    the piece was written. If it names another blob, or is damaged, both files are made anew. A bit that was written to
    the disk before its piece does no harm: :meth:`verify` reads what is claimed.

    Args:
        path: of the file with the data; the other one has this name and :data:`SUFFIX`. One process uses them.
        sizes: bytes of each piece.
        digests: of each piece, 32 bytes of BLAKE3.

    Raises:
        StateError: the files cannot be made, or the disk has no room for all of the blob.
    """

    def __init__(self, path: Path, sizes: Sequence[int], digests: Sequence[bytes]) -> None:
        self._path = path
        self._offsets = [0, *accumulate(sizes)]
        self._digests = digests
        self._name = _MAGIC + digest_of(pack(_DOMAIN) + b"".join(digests) + array("Q", sizes).tobytes())
        self._lock = threading.Lock()
        self._files: list[int] = []
        try:
            with self._explained():
                self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        for path in (self._path, self._path.with_name(self._path.name + SUFFIX)):
            self._files.append(os.open(path, flags, 0o600))
        data, bits = self._files
        total, count = self._offsets[-1], (len(self._digests) + 7) // 8
        found = os.pread(bits, len(self._name) + count + 1, 0)
        if not found.startswith(self._name) or len(found) != len(self._name) + count:
            # The name goes last: until it is there, no bit counts.
            os.ftruncate(bits, 0)
            os.ftruncate(data, 0)
            os.pwrite(bits, self._name + bytes(count), 0)
            found = self._name + bytes(count)
        self._bits = bytearray(found[len(self._name) :])
        _reserve(data, total)

    @property
    def claimed(self) -> Sequence[int]:
        """Pieces whose bits are set, and that are still to be verified."""
        return [index for index in range(len(self._digests)) if self._bits[index // 8] >> index % 8 & 1]

    def verify(self, indices: Iterable[int]) -> list[int]:
        """Read claimed pieces; return those that have their digests."""
        right = []
        for index in indices:
            start, end = self._offsets[index], self._offsets[index + 1]
            with self._explained():
                piece = os.pread(self._files[0], end - start, start)
                if len(piece) == end - start and digest_of(piece) == self._digests[index]:
                    right.append(index)
                else:
                    self._set_bit(index, False)
        return right

    def put(self, index: int, piece: Buffer) -> None:
        """Write a piece, and then its bit.

        Raises:
            StateError: the disk is full, or failed.
        """
        with self._explained():
            written, offset = 0, self._offsets[index]
            view = memoryview(piece)
            while written < len(view):
                written += os.pwrite(self._files[0], view[written:], offset + written)
            self._set_bit(index, True)

    def _set_bit(self, index: int, value: bool) -> None:
        place, mask = index // 8, 1 << index % 8
        with self._lock:
            self._bits[place] = self._bits[place] | mask if value else self._bits[place] & ~mask
            os.pwrite(self._files[1], self._bits[place : place + 1], len(self._name) + place)

    def take(self) -> memoryview:
        """Return the data as a read-only map of the file, which stays valid after :meth:`close` and :meth:`remove`."""
        if not self._offsets[-1]:
            return memoryview(b"")
        with self._explained():
            return memoryview(mmap.mmap(self._files[0], self._offsets[-1], access=mmap.ACCESS_READ))

    def close(self) -> None:
        """Close both files, which stay."""
        while self._files:
            os.close(self._files.pop())

    def remove(self) -> None:
        """Delete both files."""
        for path in (self._path.with_name(self._path.name + SUFFIX), self._path):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise StateError(f"the disk of {self._path} is full") from error
            raise StateError(f"{self._path}: {error.strerror or error}") from error


def _reserve(file: int, size: int) -> None:
    """Give a file its size, with room on the disk where the system can reserve it."""
    if os.fstat(file).st_size != size:
        os.ftruncate(file, size)
    if hasattr(os, "posix_fallocate") and size:
        try:
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise


Sink: TypeAlias = MemorySink | FileSink
"""A place for the pieces of one blob."""
