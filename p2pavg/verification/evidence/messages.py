"""The record in which a peer names evidence, and the messages with which another one fetches it. No I/O, no clock."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from p2pavg.base.encoding import checked, pack, unpack
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_CERTIFICATE_BYTES
from p2pavg.base.peer_text import PeerText
from p2pavg.verification.evidence.accusation import DIGEST_BYTES, MAX_EVIDENCE_BYTES, Named
from p2pavg_dht.contact import ContactError, check_addresses
from p2pavg_dht.identity import PeerIdError, public_key_of

PROTOCOL = "/p2pavg/evidence/1"
MAX_NAMED = 16
"""Pieces of evidence that one record names: 2 KiB."""
MAX_ADDRESSES = 4
"""Addresses of the publisher in its record: at most 1 KiB."""
MAX_KIND_CHARS = 32
KEY_BYTES = 32
MAX_REQUEST_BYTES = MAX_CERTIFICATE_BYTES + 128
MAX_ANSWER_BYTES = 1024
_MAX_REASON_CHARS = 200
_VERSION = 1
_KEY_DOMAIN = "p2pavg/accusations/1"


def accusations_key(run_id: str) -> bytes:
    """Return the key under which the peers of a run name evidence."""
    return hashlib.sha256(pack(_KEY_DOMAIN, run_id)).digest()


@dataclass(frozen=True, slots=True)
class Notice:
    """One peer's record: the evidence that it can show, and where it can be reached."""

    addresses: tuple[str, ...]
    """Of the publisher, 4 at most."""
    named: tuple[Named, ...]
    """16 at most, the most important ones first."""


def encode_notice(notice: Notice) -> bytes:
    """Return the value of a record."""
    named = tuple((each.digest, each.size, each.peer_id, each.kind) for each in notice.named)
    return pack(_VERSION, notice.addresses, named)


def read_notice(value: bytes) -> Notice:
    """Read the value of a record.

    Raises:
        RemoteProtocolError: it is nothing that :func:`encode_notice` makes.
    """
    version, addresses, named = unpack(value, int, tuple, tuple)
    if version != _VERSION:
        raise RemoteProtocolError(f"a notice of version {version}")
    if len(addresses) > MAX_ADDRESSES or not 0 < len(named) <= MAX_NAMED:
        raise RemoteProtocolError("a notice with too many addresses, or with too much evidence or none")
    try:
        check_addresses(addresses)
    except ContactError as error:
        raise RemoteProtocolError(str(error)) from None
    return Notice(addresses, tuple(_read_named(each) for each in named))


def _read_named(fields: object) -> Named:
    if type(fields) is not tuple:
        raise RemoteProtocolError("evidence without a name")
    digest, size, peer_id, kind = checked(fields, (bytes, int, str, str))
    if len(digest) != DIGEST_BYTES or not 0 < size <= MAX_EVIDENCE_BYTES:
        raise RemoteProtocolError("evidence with a digest of another length, or a size out of range")
    if not 0 < len(kind) <= MAX_KIND_CHARS or not kind.isascii() or not kind.isprintable():
        raise RemoteProtocolError("evidence of a kind that is no short text")
    try:
        public_key_of(peer_id)
    except PeerIdError as error:
        raise RemoteProtocolError(str(error)) from None
    return Named(digest, size, peer_id, kind)


@dataclass(frozen=True, slots=True)
class EvidenceRequest:
    """The first message of a stream: a peer of a run asks for evidence."""

    key: bytes
    """Key of the run's notices, as they are stored."""
    digest: bytes
    certificate: bytes
    """Of the peer that asks; empty if the run is open to anybody."""


def encode_request(request: EvidenceRequest) -> bytes:
    """Return a request as bytes."""
    return pack(_VERSION, request.key, request.digest, request.certificate)


def read_request(data: bytes) -> EvidenceRequest:
    """Read a request; raise RemoteProtocolError for anything that :func:`encode_request` does not make."""
    version, key, digest, certificate = unpack(data, int, bytes, bytes, bytes)
    if version != _VERSION or len(key) != KEY_BYTES or len(digest) != DIGEST_BYTES:
        raise RemoteProtocolError("a request of another version, or without a run or digest")
    if len(certificate) > MAX_CERTIFICATE_BYTES:
        raise RemoteProtocolError(f"a certificate of {len(certificate)} bytes")
    return EvidenceRequest(key, digest, certificate)


def encode_answer(refusal: str) -> bytes:
    """Return the answer to a request.

    Args:
        refusal: the reason for which the evidence is not sent. If it is empty, the evidence follows the answer.
    """
    return pack(_VERSION, refusal[:_MAX_REASON_CHARS])


def read_answer(data: bytes) -> PeerText:
    """Return the reason for which evidence is not sent; empty if it follows.

    Raises:
        RemoteProtocolError: the bytes are no answer.
    """
    version, refusal = unpack(data, int, str)
    if version != _VERSION or len(refusal) > _MAX_REASON_CHARS or not refusal.isprintable():
        raise RemoteProtocolError("an answer of another version, or with a reason that is no short text")
    return PeerText(refusal)
