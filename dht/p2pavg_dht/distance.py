"""The XOR metric: peers and keys are points of one 256-bit space, and the distance of two points is their XOR.

After Maymounkov & Mazières, "Kademlia" (IPTPS 2002), section 2.1. Points are SHA-256 hashes, so peer ids and
keys do not cluster, however they were made.

No I/O, no clock.
"""

from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from heapq import nsmallest
from typing import Protocol, TypeVar

# Copies of a record (k of the paper's section 2.2, there 20 for file sharing on modems). Readiness is
# renewed every TTL/3, and 30 % dead peers leave all 8 copies dead once in 15,000.
K = 8
BITS = 256


class HasPeerId(Protocol):
    """An object with a peer id."""

    @property
    def peer_id(self) -> str:
        """The peer id."""


P = TypeVar("P", bound=HasPeerId)


@lru_cache(maxsize=4096)
def peer_point(peer_id: str) -> int:
    """Return the point of a peer: SHA-256 of its id's text."""
    return int.from_bytes(sha256(peer_id.encode()).digest(), "big")


def key_point(key: bytes) -> int:
    """Return the point of a key: SHA-256 of its bytes."""
    return int.from_bytes(sha256(key).digest(), "big")


def point_bytes(point: int) -> bytes:
    """Encode a point for the wire: 32 bytes, big-endian."""
    return point.to_bytes(BITS // 8, "big")


def bucket_of(own: int, other: int) -> int:
    """Return the bucket in which `own` keeps `other`: the bit length of their distance, 0 for the same point."""
    return (own ^ other).bit_length()


def flipped(own: int, bucket: int) -> int:
    """Return the point in `bucket` (1 to 256) that differs from `own` in one bit only."""
    return own ^ (1 << (bucket - 1))


def nearest(peers: Iterable[P], point: int, count: int = K) -> list[P]:
    """Return the `count` peers nearest to `point`, nearest first."""
    return nsmallest(count, peers, key=lambda peer: peer_point(peer.peer_id) ^ point)
