"""The record: a small signed value under a key, that says itself until when it counts.

One publisher has one record a key; a later one takes its place, and an empty one withdraws it. Whoever
carries a record changes nothing about it: its signature is checked against the key inside the publisher's
id, over every field, under a domain tag that no other signature of this identity uses.
"""

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from cryptography.exceptions import InvalidSignature

from p2pavg_dht.identity import PeerIdError, Signer, public_key_of

DOMAIN = b"p2pavg-record/1\0"
KEY_BYTES = 32
MAX_VALUE_BYTES = 4096
SIGNATURE_BYTES = 64
MAX_SEQUENCE = 2**63 - 1
# What msgpack makes of the other fields: key 34, publisher 54, two numbers 18, value's header 3,
# signature 66, array 1: 176, rounded up.
WIRE_OVERHEAD = 192
MAX_WIRE_BYTES = WIRE_OVERHEAD + MAX_VALUE_BYTES

Packed: TypeAlias = tuple[bytes, str, int, float, bytes, bytes]
FIELDS = 6


class RecordError(ValueError):
    """A record that cannot be or is not genuine; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A signed value. RecordError at construction when a field is not what it must be.

    - `key`: 32 bytes. `publisher`: the peer id of the signer, whose one record under `key` this is.
    - `sequence`: 0 to 2**63 - 1; the highest wins.
    - `expiration_time`: wall clock, seconds since 1970; from then on the record does not count.
    - `value`: up to 4096 bytes; empty = withdrawn.
    - `signature`: 64 bytes over all of it. Constructing does not check it, `verify` does.
    """

    key: bytes
    publisher: str
    sequence: int
    expiration_time: float
    value: bytes
    signature: bytes

    def __post_init__(self) -> None:
        check_fields(self.key, self.sequence, self.expiration_time, self.value)
        _check_publisher(self.publisher)
        if type(self.signature) is not bytes or len(self.signature) != SIGNATURE_BYTES:
            raise RecordError(f"the signature is not {SIGNATURE_BYTES} bytes")

    @property
    def withdrawn(self) -> bool:
        """Whether this is a tombstone: it counts in place of the older record and has nothing to say."""
        return not self.value

    @property
    def wire_bytes(self) -> int:
        """The most bytes this record takes in a message."""
        return WIRE_OVERHEAD + len(self.value)

    @property
    def rank(self) -> tuple[int, bool, float, bytes, bytes]:
        """Orders the records of one publisher under one key: the greatest wins.

        An honest publisher never uses a sequence twice; for one that does, everybody still prefers the same
        record, the withdrawal first.
        """
        return self.sequence, self.withdrawn, self.expiration_time, self.value, self.signature

    def live(self, now: float) -> bool:
        """Whether it says something at wall-clock time `now`."""
        return self.expiration_time > now and not self.withdrawn


def check_fields(key: object, sequence: object, expiration_time: object, value: object) -> None:
    """RecordError when one of a record's unsigned parts has the wrong type or range."""
    # `type(...) is`, since True is an int and a subclass of bytes may lie about its length.
    if type(key) is not bytes or len(key) != KEY_BYTES:
        raise RecordError(f"the key is not {KEY_BYTES} bytes")
    if type(sequence) is not int or not 0 <= sequence <= MAX_SEQUENCE:
        raise RecordError("the sequence is not an integer from 0 to 2**63 - 1")
    if type(expiration_time) is not float or not math.isfinite(expiration_time):
        raise RecordError("the expiration time is not a finite float")
    if type(value) is not bytes or len(value) > MAX_VALUE_BYTES:
        raise RecordError(f"the value is not bytes, at most {MAX_VALUE_BYTES} of them")


def _check_publisher(publisher: object) -> None:
    if type(publisher) is not str:
        raise RecordError("the publisher is not a peer id")
    try:
        public_key_of(publisher)
    except PeerIdError as error:
        raise RecordError(f"the publisher is not a peer id: {error}") from error


def sign_record(signer: Signer, *, key: bytes, sequence: int, expiration_time: float, value: bytes) -> Record:
    """A genuine record of `signer`. RecordError when a field is out of range."""
    check_fields(key, sequence, expiration_time, value)
    message = _signed_bytes(key, signer.peer_id, sequence, expiration_time, value)
    return Record(
        key=key,
        publisher=signer.peer_id,
        sequence=sequence,
        expiration_time=expiration_time,
        value=value,
        signature=signer.sign(message),
    )


def verify(record: Record) -> None:
    """RecordError unless the publisher signed exactly this. About 0.1 ms; a record seen lately is free."""
    if not _genuine(record):
        raise RecordError("forged: the signature is not the publisher's")


# A record is met at eight peers and again at each renewal; 1024 of them are at most 5 MB.
@lru_cache(maxsize=1024)
def _genuine(record: Record) -> bool:
    message = _signed_bytes(
        record.key, record.publisher, record.sequence, record.expiration_time, record.value
    )
    try:
        public_key_of(record.publisher).verify(record.signature, message)
    except InvalidSignature:
        return False
    return True


def _signed_bytes(key: bytes, publisher: str, sequence: int, expiration_time: float, value: bytes) -> bytes:
    # Fixed widths and length prefixes, big-endian: no two records share these bytes.
    name = publisher.encode("ascii")
    numbers = struct.pack(">QdI", sequence, expiration_time, len(value))
    return b"".join((DOMAIN, key, struct.pack(">H", len(name)), name, numbers, value))


def pack(record: Record) -> Packed:
    """The fields in the order in which they travel."""
    return (
        record.key,
        record.publisher,
        record.sequence,
        record.expiration_time,
        record.value,
        record.signature,
    )


def unpack(fields: object) -> Record:
    """The record that `pack` took apart. RecordError when `fields` is anything else; does not verify."""
    if not isinstance(fields, tuple | list) or len(fields) != FIELDS:
        raise RecordError(f"a record has {FIELDS} fields")
    key, publisher, sequence, expiration_time, value, signature = fields
    return Record(
        key=key,
        publisher=publisher,
        sequence=sequence,
        expiration_time=expiration_time,
        value=value,
        signature=signature,
    )


def merge(records: Iterable[Record]) -> dict[tuple[bytes, str], Record]:
    """The highest-ranked record of each key and publisher; order and repetition do not matter."""
    newest: dict[tuple[bytes, str], Record] = {}
    for record in records:
        place = record.key, record.publisher
        held = newest.get(place)
        if held is None or record.rank > held.rank:
            newest[place] = record
    return newest


def live_records(records: Iterable[Record], now: float) -> tuple[Record, ...]:
    """What `records` say together at wall-clock time `now`, ordered by key and publisher.

    Expired records and tombstones take part in the merge and are dropped after it: a newer record that has
    ended does not bring back the older one that it replaced.
    """
    merged = merge(records)
    return tuple(merged[place] for place in sorted(merged) if merged[place].live(now))
