"""Digests of a large blob, chunk by chunk, and the root that names it. No I/O, no clock.

The root is BLAKE3 over a domain, the size and the digests of all chunks. A receiver that knows the root checks the list
of digests once, and then each chunk when it comes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from blake3 import blake3

from p2pavg.net.transport import Buffer

CHUNK_BYTES = 2**20
DIGEST_BYTES = 32
MANY_BYTES = 2**22  # from which on several threads hash; with less, waking them costs more than it saves
_DOMAIN = b"p2pavg/state/root/1\0"


def chunk_count(size: int) -> int:
    """Return the number of chunks of a blob of ``size`` bytes. Only the last chunk may be short."""
    return -(-size // CHUNK_BYTES)


def chunk_digests(data: Buffer) -> list[bytes]:
    """Return the BLAKE3 digest of each chunk, 32 bytes each. The data is not copied."""
    digester = ChunkDigester(many=memoryview(data).nbytes >= MANY_BYTES)
    digester.update(data)
    return digester.finish()


def root_of(digests: Sequence[bytes], size: int) -> bytes:
    """Return the 32 bytes that name a blob of ``size`` bytes with these digests of its chunks."""
    root = blake3(_DOMAIN + size.to_bytes(8, "big"))
    root.update(b"".join(digests))
    return root.digest()


class ChunkDigester:
    """Digests of the chunks of a blob that comes in pieces of any size."""

    def __init__(self, *, many: bool = True) -> None:
        """Begin with no data.

        Args:
            many: true if several threads shall hash.
        """
        self.size = 0
        """Bytes so far."""
        self._threads = blake3.AUTO if many else 1
        self._digests: list[bytes] = []
        self._chunk = blake3(max_threads=self._threads)

    def update(self, data: Buffer) -> None:
        """Add the next bytes of the blob. They are not copied."""
        view = memoryview(data)
        if view.format != "B":
            view = view.cast("B")
        start = 0
        while start < view.nbytes:
            end = min(view.nbytes, start + CHUNK_BYTES - self.size % CHUNK_BYTES)
            self._chunk.update(view[start:end])
            self.size += end - start
            start = end
            if self.size % CHUNK_BYTES == 0:
                self._end_chunk()

    def finish(self) -> list[bytes]:
        """Return the digests of all chunks. Nothing may be added afterwards."""
        if self.size % CHUNK_BYTES:
            self._end_chunk()
        return self._digests

    def _end_chunk(self) -> None:
        self._digests.append(self._chunk.digest())
        self._chunk = blake3(max_threads=self._threads)


# The kinds of blobs that peers fetch from each other.


class BlobKind(enum.IntEnum):
    """A kind of blob; its value is on the wire."""

    SNAPSHOT = 0
    """Named by its root, in pieces of 1 MiB. The manifest is the digests of the pieces."""
    AVERAGE = 1
    """Named by its group id, in pieces that are its encoded parts. See :mod:`p2pavg.state.average`."""
    JOB = 2
    """The file of a run's job, named by its root, in pieces of 1 MiB. The manifest is the digests of the pieces."""
