"""The requests and answers of `/p2pavg/records/2.0.0`, and their encoding.

Every message object is valid: the structs check their fields, and msgspec checks the types and lengths of what comes
from the network. On the wire, each message is a msgpack array that begins with its number.

| message | number | fields |
|---|---|---|
| Store   | 1 | addresses, records [, known, brief]      |
| Find    | 2 | addresses, key [, known, brief]          |
| Locate  | 3 | addresses, point                         |
| Stored  | 4 | closer, records, outcomes, omitted       |
| Found   | 5 | closer, records                          |
| Located | 6 | closer                                   |

`addresses` are the sender's own; the transport knows the sender's peer id. `closer` are the K contacts of the
responder that are nearest to the key or point of the request.

`known` are the marks of records that the sender has already. The answer leaves these out: a board of 40 peers takes
14 KB, and each of them asks many others every second. A `brief` request gets no contacts, and a brief Store no records.
Without marks, a request that is not brief leaves out both fields.

No I/O, no clock.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from p2pavg_dht.identity import Addresses, Contact, ContactError, check_addresses
from p2pavg_dht.record import KEY_BYTES, Record
from p2pavg_dht.routing import BITS, K

PROTOCOL: Final = "/p2pavg/records/2.0.0"
MAX_MESSAGE_BYTES: Final = 1 << 20
_TOO_LONG: Final = f"a message has at most {MAX_MESSAGE_BYTES} bytes"
# The rest of an answer is for contacts and outcomes, which take at most 48 KiB.
MAX_RECORD_BYTES_PER_ANSWER: Final = MAX_MESSAGE_BYTES - 64 * 1024
# The limit of a Store, for the responder's sake: checking 64 signatures takes about 6 ms.
MAX_STORED_RECORDS: Final = 64
# The number of tombstones that fit into an answer. They are the smallest records, so no answer has more.
MAX_ANSWER_RECORDS: Final = 4096
MAX_OUTCOME_LENGTH: Final = 200
MARK_BYTES: Final = 8
# As many as a key has publishers.
MAX_MARKS: Final = 256


class MessageError(ValueError):
    """Bytes or fields do not make a valid message; the text says why."""


def marks_of(records: Iterable[Record]) -> bytes:
    """Return the marks of records, MAX_MARKS at most: each is the beginning of a signature, which is like a digest."""
    return b"".join(record.signature[:MARK_BYTES] for record in islice(records, MAX_MARKS))


def unmarked(records: Iterable[Record], known: bytes) -> tuple[Record, ...]:
    """Return the records whose marks are not in `known`."""
    marks = {known[start : start + MARK_BYTES] for start in range(0, len(known), MARK_BYTES)}
    return tuple(record for record in records if record.signature[:MARK_BYTES] not in marks)


# The length of each list is bounded before an element is read: a claimed length costs no memory.
_Closer: TypeAlias = Annotated[tuple[Contact, ...], Meta(max_length=K)]
_Held: TypeAlias = Annotated[tuple[Record, ...], Meta(max_length=MAX_ANSWER_RECORDS)]
_Flag: TypeAlias = Annotated[int, Meta(ge=0, le=1)]


class _RecordMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message of this protocol. Its number is the tag of its class."""


class Store(_RecordMessage, frozen=True, tag=1):
    """The request to store 1 to 64 records."""

    addresses: Addresses
    records: Annotated[tuple[Record, ...], Meta(max_length=MAX_STORED_RECORDS)]
    known: bytes = b""
    brief: _Flag = False

    def __post_init__(self) -> None:
        _check_sender(self.addresses)
        _check_known(self.known)
        _require(
            0 < len(self.records) <= MAX_STORED_RECORDS, f"a store has 1 to {MAX_STORED_RECORDS} records"
        )


class Find(_RecordMessage, frozen=True, tag=2):
    """The request for the records under `key` (32 bytes), and for contacts nearer to it."""

    addresses: Addresses
    key: bytes
    known: bytes = b""
    brief: _Flag = False

    def __post_init__(self) -> None:
        _check_sender(self.addresses)
        _check_known(self.known)
        _require(len(self.key) == KEY_BYTES, f"a key has {KEY_BYTES} bytes")


class Locate(_RecordMessage, frozen=True, tag=3):
    """The request for contacts near `point` (32 bytes, big-endian). It also serves as a ping."""

    addresses: Addresses
    point: bytes

    def __post_init__(self) -> None:
        _check_sender(self.addresses)
        _require(len(self.point) == BITS // 8, f"a point has {BITS // 8} bytes")


class Stored(_RecordMessage, frozen=True, tag=4):
    """The answer to a Store: the outcome of each record, in order, and the records now held under its keys.

    An empty outcome means that the record was stored. `omitted` counts the records that did not fit into the
    answer; it is 0 if the Store concerned a single key. Records that the Store has marked do not count.
    """

    closer: _Closer
    records: _Held
    outcomes: Annotated[tuple[str, ...], Meta(max_length=MAX_STORED_RECORDS)]
    omitted: Annotated[int, Meta(ge=0, le=2**32)]

    def __post_init__(self) -> None:
        _check_closer(self.closer)
        _require(0 < len(self.outcomes) <= MAX_STORED_RECORDS, f"1 to {MAX_STORED_RECORDS} outcomes")
        for outcome in self.outcomes:
            # Outcomes appear in logs and terminals.
            _require(len(outcome) <= MAX_OUTCOME_LENGTH, f"an outcome has {MAX_OUTCOME_LENGTH} characters")
            _require(outcome.isascii() and (not outcome or outcome.isprintable()), "an outcome is ASCII")


class Found(_RecordMessage, frozen=True, tag=5):
    """The answer to a Find: the unexpired records under the key, including withdrawals, without the marked ones."""

    closer: _Closer
    records: _Held

    def __post_init__(self) -> None:
        _check_closer(self.closer)


class LocateAnswer(_RecordMessage, frozen=True, tag=6):
    """The answer to a Locate: the responder's contacts nearest to the point."""

    closer: _Closer

    def __post_init__(self) -> None:
        _check_closer(self.closer)


Request: TypeAlias = Store | Find | Locate
Answer: TypeAlias = Stored | Found | LocateAnswer
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    """Encode `message`. Raise MessageError if it has more than MAX_MESSAGE_BYTES."""
    fields = msgspec.structs.astuple(message)
    if isinstance(message, Store | Find):
        # A request without options has one encoding, and it is shorter.
        has_options = message.known or message.brief
        fields = (*fields[:2], message.known, int(message.brief)) if has_options else fields[:2]
    encoded = msgspec.msgpack.encode((message.__struct_config__.tag, *fields))
    # Checked by the sender as well: the other side would refuse the whole message.
    _require(len(encoded) <= MAX_MESSAGE_BYTES, _TOO_LONG)
    return encoded


def decode_request(message: bytes) -> Request:
    """Decode a request. Raise MessageError for any other bytes. Signatures are not checked here."""
    request: Request = _decode(message, _requests)
    return request


def decode_answer(message: bytes) -> Answer:
    """Decode an answer. Raise MessageError for any other bytes. Signatures are not checked here."""
    answer: Answer = _decode(message, _answers)
    return answer


def _decode(message: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    _require(len(message) <= MAX_MESSAGE_BYTES, _TOO_LONG)
    try:
        decoded = decoder.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(str(error)) from error
    # A message has one encoding. An integer in the place of a float, for example, would be a second one.
    _require(encode(decoded) == message, "the message is written in another way than its own")
    return decoded


def _check_sender(addresses: tuple[str, ...]) -> None:
    try:
        check_addresses(addresses)
    except ContactError as error:
        raise MessageError(str(error)) from error


def _check_known(known: bytes) -> None:
    _require(
        len(known) % MARK_BYTES == 0 and len(known) <= MAX_MARKS * MARK_BYTES,
        f"at most {MAX_MARKS} marks of {MARK_BYTES} bytes",
    )


def _check_closer(closer: tuple[Contact, ...]) -> None:
    # A hostile responder could otherwise fill a lookup with contacts of its own.
    _require(len(closer) <= K, f"an answer names at most {K} contacts")
    _require(len({contact.peer_id for contact in closer}) == len(closer), "an answer names a contact twice")


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise MessageError(reason)
