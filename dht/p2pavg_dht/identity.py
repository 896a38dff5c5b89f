"""Identities: Ed25519 keys, and peer ids that contain their own public key.

A libp2p peer id of an Ed25519 key is the base58btc text of an identity multihash around the key's
protobuf: `00 24 | 08 01 12 20 | 32 bytes of key`. So the publisher's id contains the key that verifies its
records, and no key has to be looked up or trusted
(https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md).

No I/O, no clock.
"""

from functools import lru_cache
from typing import Protocol

import base58
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

MULTIHASH_PREFIX = bytes.fromhex("002408011220")
KEY_BYTES = 32
# The prefix is fixed, so 38 bytes always become 52 characters ("12D3Koo..."). Decoding base58 takes time
# quadratic in the length, so texts of any other length are not decoded.
PEER_ID_LENGTH = 52


class PeerIdError(ValueError):
    """A text that is not the peer id of an Ed25519 key."""


class Signer(Protocol):
    """The owner of a private key, which alone can make records of its peer id."""

    @property
    def peer_id(self) -> str:
        """The base58 peer id that contains the public key."""

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature of `message`."""


class Ed25519Signer:
    """A signer that holds its private key in memory.

    `seed` is the 32-byte Ed25519 private key (RFC 8032, section 5.1.5). Raises ValueError for other lengths.
    """

    def __init__(self, seed: bytes) -> None:
        self._private_key = Ed25519PrivateKey.from_private_bytes(seed)
        self.peer_id: str = peer_id_of(self._private_key.public_key())

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte Ed25519 signature of `message`."""
        return self._private_key.sign(message)


def peer_id_of(public_key: Ed25519PublicKey) -> str:
    """Return the base58 peer id that contains `public_key`."""
    return base58.b58encode(MULTIHASH_PREFIX + public_key.public_bytes_raw()).decode("ascii")


@lru_cache(maxsize=4096)
def public_key_of(peer_id: str) -> Ed25519PublicKey:
    """Return the Ed25519 key inside `peer_id`. Raise PeerIdError unless it is the canonical id of such a key."""
    if len(peer_id) != PEER_ID_LENGTH:
        raise PeerIdError(f"a peer id of an Ed25519 key has {PEER_ID_LENGTH} characters, not {len(peer_id)}")
    multihash = _base58_bytes(peer_id)
    if not multihash.startswith(MULTIHASH_PREFIX) or len(multihash) != len(MULTIHASH_PREFIX) + KEY_BYTES:
        raise PeerIdError(f"{peer_id!r} is not the peer id of an Ed25519 key")
    return Ed25519PublicKey.from_public_bytes(multihash[len(MULTIHASH_PREFIX) :])


def _base58_bytes(peer_id: str) -> bytes:
    try:
        decoded = base58.b58decode(peer_id)
    except ValueError as error:
        raise PeerIdError(f"{peer_id!r} is not base58") from error
    # The decoder accepts trailing blanks. Two spellings of one peer would count as two publishers.
    if base58.b58encode(decoded) != peer_id.encode("ascii", "replace"):
        raise PeerIdError(f"{peer_id!r} is not canonical base58")
    return decoded
