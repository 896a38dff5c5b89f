"""The record in which a peer names evidence, and the messages with which another one fetches it. No I/O, no clock."""

from __future__ import annotations

import hashlib
from typing import Annotated

from msgspec import Meta

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_CERTIFICATE_BYTES
from p2pavg.base.messages import Hash, Message, cut, pack
from p2pavg.verification.evidence.accusation import Named
from p2pavg_dht.identity import PeerIdError, check_addresses, public_key_of

PROTOCOL = "/p2pavg/evidence/1"
MAX_NAMED = 16
"""Pieces of evidence that one record names: 2 KiB."""
MAX_ADDRESSES = 4
"""Addresses of the publisher in its record: at most 1 KiB."""
MAX_REQUEST_BYTES = MAX_CERTIFICATE_BYTES + 128
MAX_ANSWER_BYTES = 1024
_MAX_REASON_CHARS = 200
_KEY_DOMAIN = "p2pavg/accusations/1"


def accusations_key(run_id: str) -> bytes:
    """Return the key under which the peers of a run name evidence."""
    return hashlib.sha256(pack(_KEY_DOMAIN, run_id)).digest()


class Notice(Message, frozen=True, tag=1):
    """One peer's record: the evidence that it can show, and where it can be reached."""

    addresses: Annotated[tuple[str, ...], Meta(max_length=MAX_ADDRESSES)]
    """Of the publisher."""
    named: Annotated[tuple[Named, ...], Meta(min_length=1, max_length=MAX_NAMED)]
    """The most important ones first."""

    def __post_init__(self) -> None:
        check_addresses(self.addresses)


def read_notice(value: bytes) -> Notice:
    """Read the value of a record. Raises RemoteProtocolError if it is no notice, or names no peer."""
    notice = Notice.decode(value)
    try:
        for each in notice.named:
            public_key_of(each.peer_id)
    except PeerIdError as error:
        raise RemoteProtocolError(str(error)) from None
    return notice


class EvidenceRequest(Message, frozen=True, tag=1):
    """The first message of a stream: a peer of a run asks for evidence."""

    key: Hash
    """Key of the run's notices, as they are stored."""
    digest: Hash
    certificate: Annotated[bytes, Meta(max_length=MAX_CERTIFICATE_BYTES)]
    """Of the peer that asks; empty if the run is open to anybody."""


class EvidenceAnswer(Message, frozen=True, tag=1):
    """The answer to a request."""

    refusal: str
    """The reason for which the evidence is not sent. If it is empty, the evidence follows."""

    def __post_init__(self) -> None:
        cut(self, refusal=_MAX_REASON_CHARS)
