"""Records: small signed values under a key, each with its own expiration time.

A publisher has one record under each key. A newer record replaces it, and an empty one withdraws it. A peer
that relays a record cannot change it. The signature covers every field and is checked with the key inside the
publisher's id, under a domain tag that no other signature of this identity uses.

No I/O, no clock.
"""

import math
import struct
import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, TypeAlias

import msgspec
from cryptography.exceptions import InvalidSignature

from p2pavg_dht.identity import PeerIdError, Signer, public_key_of

DOMAIN = b"p2pavg-record/1\0"
KEY_BYTES = 32
MAX_VALUE_BYTES = 4864  # 4 KiB of content, and room for a certificate and the encryption of private runs
SIGNATURE_BYTES = 64
MAX_SEQUENCE = 2**63 - 1
# The bytes of the other fields in msgpack: key 34, publisher 54, two numbers 18, the value's header 3,
# signature 66, array 1. Together 176, rounded up.
WIRE_OVERHEAD = 192
MAX_WIRE_BYTES = WIRE_OVERHEAD + MAX_VALUE_BYTES

Packed: TypeAlias = tuple[bytes, str, int, float, bytes, bytes]


class RecordError(ValueError):
    """A record is invalid or not genuine; the text says why."""


class Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A signed value. The constructor raises RecordError if a field is invalid.

    - `key`: 32 bytes.
    - `publisher`: the peer id of the signer, which has only one record under `key`.
    - `sequence`: 0 to 2**63 - 1. The highest one wins.
    - `expiration_time`: wall clock, in seconds since 1970. From then on, the record does not count.
    - `value`: up to MAX_VALUE_BYTES (4864) bytes. An empty value means that the record is withdrawn.
    - `signature`: 64 bytes over all other fields. `verify` checks it; the constructor does not.
    """

    key: bytes
    publisher: str
    sequence: int
    expiration_time: Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
    value: bytes
    signature: bytes

    def __post_init__(self) -> None:
        check_fields(self.key, self.sequence, self.expiration_time, self.value)
        if type(self.publisher) is not str:
            raise RecordError("the publisher is not a peer id")
        try:
            public_key_of(self.publisher)
        except PeerIdError as error:
            raise RecordError(f"the publisher is not a peer id: {error}") from error
        if type(self.signature) is not bytes or len(self.signature) != SIGNATURE_BYTES:
            raise RecordError(f"the signature is not {SIGNATURE_BYTES} bytes")

    @property
    def withdrawn(self) -> bool:
        """True if this is a tombstone: it replaces the older record and has no value."""
        return not self.value

    @property
    def wire_bytes(self) -> int:
        """The largest number of bytes that this record takes in a message."""
        return WIRE_OVERHEAD + len(self.value)

    @property
    def rank(self) -> tuple[int, bool, float, bytes, bytes]:
        """The order of the records of one publisher under one key. The greatest one wins.

        An honest publisher never uses a sequence twice. If a publisher does, all peers still prefer the same
        record, and a withdrawal before a value.
        """
        return self.sequence, self.withdrawn, self.expiration_time, self.value, self.signature

    def live(self, now: float) -> bool:
        """Return whether the record is neither expired at wall-clock time `now` nor withdrawn."""
        return self.expiration_time > now and not self.withdrawn


def check_fields(key: object, sequence: object, expiration_time: object, value: object) -> None:
    """Raise RecordError if a field other than the publisher and the signature has the wrong type or range."""
    # `type(...) is`, because True is an int, and a subclass of bytes may report a false length.
    if type(key) is not bytes or len(key) != KEY_BYTES:
        raise RecordError(f"the key is not {KEY_BYTES} bytes")
    if type(sequence) is not int or not 0 <= sequence <= MAX_SEQUENCE:
        raise RecordError("the sequence is not an integer from 0 to 2**63 - 1")
    if type(expiration_time) is not float or not math.isfinite(expiration_time):
        raise RecordError("the expiration time is not a finite float")
    if type(value) is not bytes or len(value) > MAX_VALUE_BYTES:
        raise RecordError(f"the value is not bytes, at most {MAX_VALUE_BYTES} of them")


def sign_record(signer: Signer, *, key: bytes, sequence: int, expiration_time: float, value: bytes) -> Record:
    """Return a signed record of `signer`. Raise RecordError if a field is out of range."""
    check_fields(key, sequence, expiration_time, value)
    message = _signed_bytes(key, signer.peer_id, sequence, expiration_time, value)
    return Record(key, signer.peer_id, sequence, expiration_time, value, signer.sign(message))


def verify(record: Record) -> None:
    """Raise RecordError unless the publisher has signed this record. It takes 0.1 ms; recent results are cached."""
    if not _genuine(record):
        raise RecordError("forged: the signature is not the publisher's")


# The same record comes from eight peers. 1024 cached records take at most 5 MB.
@lru_cache(maxsize=1024)
def _genuine(record: Record) -> bool:
    try:
        public_key_of(record.publisher).verify(record.signature, _signed_bytes(*pack(record)[:-1]))
    except InvalidSignature:
        return False
    return True


def _signed_bytes(key: bytes, publisher: str, sequence: int, expiration_time: float, value: bytes) -> bytes:
    # Fixed widths and length prefixes, big-endian, so that no two records have the same bytes.
    name = publisher.encode("ascii")
    numbers = struct.pack(">QdI", sequence, expiration_time, len(value))
    return b"".join((DOMAIN, key, struct.pack(">H", len(name)), name, numbers, value))


def pack(record: Record) -> Packed:
    """Return the fields of a record in the order of the wire."""
    packed: Packed = msgspec.structs.astuple(record)
    return packed


def unpack(fields: object) -> Record:
    """Make a record of the fields that `pack` returns. Raise RecordError for anything else. Does not verify."""
    if not isinstance(fields, tuple | list) or len(fields) != len(Record.__struct_fields__):
        raise RecordError(f"a record has {len(Record.__struct_fields__)} fields")
    return Record(*fields)


def merge(records: Iterable[Record]) -> dict[tuple[bytes, str], Record]:
    """Return the highest-ranked record of each key and publisher. Order and repetition do not matter."""
    newest: dict[tuple[bytes, str], Record] = {}
    for record in records:
        place = record.key, record.publisher
        held = newest.get(place)
        if held is None or record.rank > held.rank:
            newest[place] = record
    return newest


def live_records(records: Iterable[Record], now: float) -> tuple[Record, ...]:
    """Merge `records` and return those that are live at wall-clock time `now`, ordered by key and publisher.

    Expired records and tombstones take part in the merge, and are dropped after it. So an older record does
    not come back when the newer one that replaced it has expired.
    """
    merged = merge(records)
    return tuple(merged[place] for place in sorted(merged) if merged[place].live(now))
