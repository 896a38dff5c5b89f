"""Records of a private run: their keys and values say nothing to those who store them. No I/O, no clock.

The key of a record is an HMAC of its key among the run's peers. Its value is encrypted with ChaCha20-Poly1305 (RFC
8439) under a key of its publisher alone, so that random nonces of 96 bits suffice however many peers a run has. The
record's key and publisher are authenticated with it, so a value cannot be moved to another record. All keys follow
from the run's secret by HKDF (RFC 5869).

Those who store a record still see its publisher, its size, and which publishers use the same key.
"""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import Message

NONCE_BYTES = 12
OVERHEAD_BYTES = NONCE_BYTES + 16  # the nonce and the tag


class MemberRecord(Message, frozen=True):
    """The content of a sealed record: a value, and the certificate of the member that publishes it."""

    certificate: bytes
    value: bytes


def sealed_key(secret: bytes, key: bytes) -> bytes:
    """Return the key under which a record is stored, 32 bytes.

    Args:
        key: the record's key among the run's peers.
    """
    return hmac.new(_derive(secret, b"p2pavg/record-keys/1"), key, hashlib.sha256).digest()


def seal(secret: bytes, key: bytes, publisher: str, value: bytes, nonce: bytes) -> bytes:
    """Return the encrypted value of a record.

    Args:
        key: the key under which the record is stored.
        nonce: 12 random bytes, used once.
    """
    return nonce + _cipher(secret, publisher).encrypt(nonce, value, key + publisher.encode("ascii"))


def unseal(secret: bytes, key: bytes, publisher: str, sealed: bytes) -> bytes:
    """Return the value of a record.

    Raises:
        RemoteProtocolError: no peer that knows the secret has made it for this key and publisher.
    """
    if len(sealed) < OVERHEAD_BYTES:
        raise RemoteProtocolError("a record that is too short to be encrypted to this run")
    try:
        return _cipher(secret, publisher).decrypt(
            sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], key + publisher.encode("ascii")
        )
    except InvalidTag:
        raise RemoteProtocolError("a record that is not encrypted to this run") from None


@lru_cache(maxsize=1024)
def _cipher(secret: bytes, publisher: str) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(_derive(secret, b"p2pavg/record-values/1/" + publisher.encode("ascii")))


def _derive(secret: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(secret)
