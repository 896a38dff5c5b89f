"""The pieces of a blob. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.state.messages import DIGEST_BYTES, MAX_PIECE_BYTES, MAX_PIECES


@dataclass(frozen=True)
class BlobManifest:
    """The pieces of a blob.

    Raises:
        RemoteProtocolError: there are too many, or they are too large.
    """

    sizes: Sequence[int]
    """Bytes of each piece, above 0."""
    digests: Sequence[bytes]
    """Of each piece, 32 bytes of BLAKE3."""

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.digests) or len(self.sizes) > MAX_PIECES:
            raise RemoteProtocolError(f"a manifest of {len(self.sizes)} pieces")
        if any(not 0 < size <= MAX_PIECE_BYTES for size in self.sizes):
            raise RemoteProtocolError("a manifest with a piece of an impossible size")
        if any(len(digest) != DIGEST_BYTES for digest in self.digests):
            raise RemoteProtocolError("a manifest with a digest of another length")
