"""Blobs for tests, with manifests of their own."""

from __future__ import annotations

import random
from collections.abc import Callable

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.state.joiner.fetching import Wanted
from p2pavg.state.joiner.sink import digest_of
from p2pavg.state.messages import BlobManifest

KIND = 1
MAX_MANIFEST_BYTES = 1 << 20


class Blob:
    """Random bytes in pieces. Its manifest has the size of all pieces but the last, that of the last, and digests."""

    def __init__(self, seed: int, count: int, piece_bytes: int, last_bytes: int | None = None) -> None:
        rng = random.Random(seed)
        last = piece_bytes if last_bytes is None else last_bytes
        self.pieces = [rng.randbytes(piece_bytes) for _ in range(count - 1)] + [rng.randbytes(last)]
        self.data = b"".join(self.pieces)
        self.sizes = [len(piece) for piece in self.pieces]
        self.digests = [digest_of(piece) for piece in self.pieces]
        self.manifest = piece_bytes.to_bytes(4, "big") + last.to_bytes(4, "big") + b"".join(self.digests)
        self.id = digest_of(self.manifest)

    @property
    def wanted(self) -> Wanted:
        """The arguments that a joiner gives to a fetch."""
        return Wanted(KIND, self.id, MAX_MANIFEST_BYTES, self.read_manifest)

    def read_manifest(self, data: bytes) -> BlobManifest:
        """Read a manifest, which must be this blob's."""
        if digest_of(data) != self.id:
            raise RemoteProtocolError("it has another digest")
        digests = [data[start : start + 32] for start in range(8, len(data), 32)]
        sizes = [int.from_bytes(data[:4], "big")] * (len(digests) - 1) + [int.from_bytes(data[4:8], "big")]
        return BlobManifest(sizes, digests)


class Held:
    """Holdings of some blobs, which note what they were asked."""

    def __init__(self, *blobs: Blob) -> None:
        self.blobs = {blob.id: blob for blob in blobs}
        self.sent: list[int] = []
        self.manifests = 0
        self.change: Callable[[int, bytes], bytes | None] = lambda _index, piece: piece

    def manifest(self, kind: int, blob_id: bytes) -> bytes | None:
        self.manifests += 1
        blob = self.blobs.get(blob_id)
        return blob.manifest if blob is not None and kind == KIND else None

    def piece(self, kind: int, blob_id: bytes, index: int) -> bytes | None:
        blob = self.blobs.get(blob_id)
        if blob is None or kind != KIND or index >= len(blob.pieces):
            return None
        self.sent.append(index)
        return self.change(index, blob.pieces[index])
