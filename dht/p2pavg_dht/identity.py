"""Identities: Ed25519 keys, and peer ids that contain their own public key.

A libp2p peer id of an Ed25519 key is the base58btc text of an identity multihash around the key's
protobuf: `00 24 | 08 01 12 20 | 32 bytes of key`. So the publisher's id contains the key that verifies its
records, and no key has to be looked up or trusted
(https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md).

No I/O, no clock.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Protocol, TypeAlias

import base58
import msgspec
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


# Contacts: a peer id, and addresses at which the peer may be reached.

MAX_ADDRESSES = 16
# The longest in use, a relayed WebSocket address with two peer ids, has about 200 characters.
MAX_ADDRESS_LENGTH = 256
_PRINTABLE = re.compile(r"/[!-~]+")
Addresses: TypeAlias = Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_ADDRESSES)]


class ContactError(ValueError):
    """A contact is invalid; the text says why."""


class Contact(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A peer id and at most 16 addresses, each printable ASCII of at most 256 characters that begins with "/".

    Addresses are hints: the peer that answers there must prove its id to the transport. The constructor raises
    ContactError if a part is invalid.
    """

    peer_id: str
    addresses: Addresses = ()

    def __post_init__(self) -> None:
        if type(self.peer_id) is not str:
            raise ContactError("a peer id is a text")
        try:
            public_key_of(self.peer_id)
        except PeerIdError as error:
            raise ContactError(str(error)) from error
        check_addresses(self.addresses)


def check_addresses(addresses: object) -> None:
    """Raise ContactError unless `addresses` is a tuple of at most 16 possible multiaddresses."""
    if type(addresses) is not tuple or len(addresses) > MAX_ADDRESSES:
        raise ContactError(f"a contact has a tuple of at most {MAX_ADDRESSES} addresses")
    for address in addresses:
        if type(address) is not str or not 1 < len(address) <= MAX_ADDRESS_LENGTH:
            raise ContactError(f"an address is a text of 2 to {MAX_ADDRESS_LENGTH} characters")
        # Addresses appear in logs and terminals: no blanks, no control characters, no look-alikes.
        if _PRINTABLE.fullmatch(address) is None:
            raise ContactError('an address is printable ASCII and begins with "/"')


# The interface of the network that this package needs.

# The timeout of dialling, the handshake and the answer together.
RPC_TIMEOUT = 5.0


class RpcError(Exception):
    """A call brought no valid answer; the text says why."""


class Rpc(Protocol):
    """Calls to other peers, each on its own stream."""

    @property
    def addresses(self) -> Sequence[str]:
        """The addresses of this peer now. The first 16 count."""

    async def call(self, contact: Contact, request: bytes) -> bytes:
        """Send `request` to `contact.peer_id`, whose identity the transport proves, and return the answer.

        Addresses are hints: an existing connection is used instead. The answer is at most MAX_MESSAGE_BYTES
        long. Raises RpcError if the call fails. It may be cancelled at any time, and is cancelled after
        RPC_TIMEOUT.
        """
