"""The averages that one member holds: as values, as the bytes that they came as, and as digests. No I/O, no clock.

Parts of different shares may come in from several threads at once. Two calls for the same part must not overlap.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from blake3 import blake3

from p2pavg.allreduce.reduction import PartTracker, bytes_of
from p2pavg.allreduce.vector.buffers import Buffers
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.consensus.votes import DIGEST_BYTES
from p2pavg.group.shares import SharePart
from p2pavg.net.transport import Buffer
from p2pavg_compression import Codec, CodecError


@dataclass(frozen=True, slots=True)
class EncodedAverage:
    """The average of a whole vector as all members of its group have it, part by part.

    Parts are in the order of the attempt's roster: all parts of one reducer's share, then those of the next one.
    """

    parts: tuple[Buffer, ...]
    """With a codec that changes nothing, the memory of the average itself."""
    digests: tuple[bytes, ...]
    """BLAKE3 digest of each part, 32 bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(len(part) for part in self.parts)


class Averages:
    """The averaged parts of the whole vector, or of an auxiliary's share."""

    def __init__(self, ledger: PartTracker, codec: Codec, buffers: Buffers) -> None:
        self._holding = ledger.holding
        self._codec = codec
        shares, own_parts = ledger.roster.shares, ledger.parts[ledger.me]
        # An auxiliary holds its own share only, range after range; every other member holds the whole vector.
        places = itertools.accumulate((part.elements for part in own_parts), initial=0)
        self._places = (
            {} if ledger.holding else {part.start: at for part, at in zip(own_parts, places, strict=False)}
        )
        length = sum(shares) if ledger.holding else shares[ledger.roster.position(ledger.me)]
        self.values = buffers.floats(length)
        """float32: of the whole vector, or an auxiliary's share."""
        # What came of each share, as it came: it may have to be passed on. In the order of the roster.
        self._encoded: dict[str, list[Buffer]] = {
            peer_id: [b""] * len(parts) for peer_id, parts in ledger.parts.items()
        }
        self._digests: dict[str, list[bytes]] = {
            peer_id: [b""] * len(parts) for peer_id, parts in ledger.parts.items()
        }

    def let_go(self) -> None:
        """Release everything that has the size of a vector."""
        self.values = torch.empty(0, dtype=torch.float32, device="cpu")
        self._encoded.clear()

    def values_of(self, part: SharePart) -> torch.Tensor:
        """Return the values of a part, where they are held."""
        start = part.start if self._holding else self._places[part.start]
        return self.values[start : start + part.elements]

    def encoded(self, reducer: str, index: int) -> Buffer:
        """Return an averaged part as all members have it. It must be there."""
        return self._encoded[reducer][index]

    def as_encoded(self) -> EncodedAverage:
        """Return the whole average as all members have it. Every part must be there."""
        return EncodedAverage(
            tuple(part for parts in self._encoded.values() for part in parts),
            tuple(digest for digests in self._digests.values() for digest in digests),
        )

    def digests(self) -> tuple[bytes, ...]:
        """Return one digest a share, in the order of the roster. An auxiliary has none."""
        if not self._holding:
            return ()
        return tuple(blake3(b"".join(parts)).digest(DIGEST_BYTES) for parts in self._digests.values())

    def part_digests(self, reducer: str) -> list[bytes]:
        """Return the digest of each part of a reducer's share that is there; empty bytes for the other parts."""
        return self._digests[reducer]

    def keep(self, reducer: str, index: int, encoded: Buffer, digest: bytes) -> None:
        """Keep the bytes of a part whose values are in place, and the digest of these bytes."""
        self._encoded[reducer][index], self._digests[reducer][index] = encoded, digest

    def install(self, reducer: str, part: SharePart, payload: Buffer) -> None:
        """Decode a part of a reducer's share into its place, and keep it.

        Raises:
            RemoteProtocolError: it does not decode.
        """
        out = self.values_of(part)
        try:
            self._codec.decode(payload, part.elements, out)
        except CodecError as error:
            raise RemoteProtocolError(f"an averaged part does not decode: {error}") from None
        # Where the vector's own bytes are what was sent, they need not be kept twice.
        held = bytes_of(out) if self._codec.is_identity else payload
        self.keep(reducer, part.index, held, blake3(payload).digest())
