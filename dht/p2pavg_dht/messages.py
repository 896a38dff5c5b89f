"""The requests and answers of `/p2pavg/records/2.0.0`, and their encoding.

Every message object is valid: the dataclasses check their fields, and messages from the network pass the
decoders. On the wire, each message is a msgpack array that begins with its number.

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

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeAlias, TypeVar

from p2pavg_dht.identity import MAX_ADDRESSES, Contact, ContactError, check_addresses
from p2pavg_dht.record import FIELDS, KEY_BYTES, Record, RecordError, pack, unpack
from p2pavg_dht.routing import BITS, K
from p2pavg_dht.wire import MAX_MESSAGE_BYTES, Reader, WireError, packed

PROTOCOL: Final = "/p2pavg/records/2.0.0"
# The limit of a Store, for the responder's sake: checking 64 signatures takes about 6 ms.
MAX_STORED_RECORDS: Final = 64
# The number of tombstones that fit into an answer. They are the smallest records, so no answer has more.
MAX_ANSWER_RECORDS: Final = 4096
MAX_OUTCOME_LENGTH: Final = 200
MARK_BYTES: Final = 8
# As many as a key has publishers.
MAX_MARKS: Final = 256

T = TypeVar("T")


class MessageError(ValueError):
    """Bytes or fields do not make a valid message; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def marks_of(records: Iterable[Record]) -> bytes:
    """Return the marks of records, MAX_MARKS at most: each is the beginning of a signature, which is like a digest."""
    return b"".join(record.signature[:MARK_BYTES] for record in islice(records, MAX_MARKS))


def unmarked(records: Iterable[Record], known: bytes) -> tuple[Record, ...]:
    """Return the records whose marks are not in `known`."""
    marks = {known[start : start + MARK_BYTES] for start in range(0, len(known), MARK_BYTES)}
    return tuple(record for record in records if record.signature[:MARK_BYTES] not in marks)


@dataclass(frozen=True, slots=True)
class Store:
    """The request to store 1 to 64 records."""

    addresses: tuple[str, ...]
    records: tuple[Record, ...]
    known: bytes = b""
    brief: bool = False

    def __post_init__(self) -> None:
        _check_sender(self.addresses)
        _check_known(self.known)
        _require(
            0 < len(self.records) <= MAX_STORED_RECORDS, f"a store has 1 to {MAX_STORED_RECORDS} records"
        )


@dataclass(frozen=True, slots=True)
class Find:
    """The request for the records under `key` (32 bytes), and for contacts nearer to it."""

    addresses: tuple[str, ...]
    key: bytes
    known: bytes = b""
    brief: bool = False

    def __post_init__(self) -> None:
        _check_sender(self.addresses)
        _check_known(self.known)
        _require(len(self.key) == KEY_BYTES, f"a key has {KEY_BYTES} bytes")


@dataclass(frozen=True, slots=True)
class Locate:
    """The request for contacts near `point` (32 bytes, big-endian). It also serves as a ping."""

    addresses: tuple[str, ...]
    point: bytes

    def __post_init__(self) -> None:
        _check_sender(self.addresses)
        _require(len(self.point) == BITS // 8, f"a point has {BITS // 8} bytes")


@dataclass(frozen=True, slots=True)
class Stored:
    """The answer to a Store: the outcome of each record, in order, and the records now held under its keys.

    An empty outcome means that the record was stored. `omitted` counts the records that did not fit into the
    answer; it is 0 if the Store concerned a single key. Records that the Store has marked do not count.
    """

    closer: tuple[Contact, ...]
    records: tuple[Record, ...]
    outcomes: tuple[str, ...]
    omitted: int

    def __post_init__(self) -> None:
        _check_closer(self.closer)
        _require(0 < len(self.outcomes) <= MAX_STORED_RECORDS, f"1 to {MAX_STORED_RECORDS} outcomes")
        for outcome in self.outcomes:
            # Outcomes appear in logs and terminals.
            _require(len(outcome) <= MAX_OUTCOME_LENGTH, f"an outcome has {MAX_OUTCOME_LENGTH} characters")
            _require(outcome.isascii() and (not outcome or outcome.isprintable()), "an outcome is ASCII")


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to a Find: the unexpired records under the key, including withdrawals, without the marked ones."""

    closer: tuple[Contact, ...]
    records: tuple[Record, ...]

    def __post_init__(self) -> None:
        _check_closer(self.closer)


@dataclass(frozen=True, slots=True)
class LocateAnswer:
    """The answer to a Locate: the responder's contacts nearest to the point."""

    closer: tuple[Contact, ...]

    def __post_init__(self) -> None:
        _check_closer(self.closer)


Request: TypeAlias = Store | Find | Locate
Answer: TypeAlias = Stored | Found | LocateAnswer


def encode(message: Request | Answer) -> bytes:
    """Encode `message`. Raise MessageError if it has more than MAX_MESSAGE_BYTES."""
    encoded = packed(_parts(message))
    # Checked by the sender as well: the other side would refuse the whole message.
    _require(len(encoded) <= MAX_MESSAGE_BYTES, f"a message has at most {MAX_MESSAGE_BYTES} bytes")
    return encoded


def _parts(message: Request | Answer) -> tuple[object, ...]:
    match message:
        case Store(addresses, records, known, brief):
            return 1, addresses, tuple(map(pack, records)), *_options(known, brief)
        case Find(addresses, key, known, brief):
            return 2, addresses, key, *_options(known, brief)
        case Locate(addresses, point):
            return 3, addresses, point
        case Stored(closer, records, outcomes, omitted):
            return 4, _contact_parts(closer), tuple(map(pack, records)), outcomes, omitted
        case Found(closer, records):
            return 5, _contact_parts(closer), tuple(map(pack, records))
        case LocateAnswer(closer):
            return 6, _contact_parts(closer)


def _options(known: bytes, brief: bool) -> tuple[object, ...]:
    # A request without options has one encoding, and it is shorter.
    return (known, int(brief)) if known or brief else ()


def decode_request(message: bytes) -> Request:
    """Decode a request. Raise MessageError for any other bytes. Signatures are not checked here."""
    request = _decode(message)
    if not isinstance(request, Store | Find | Locate):
        raise MessageError("an answer came where a request was expected")
    return request


def decode_answer(message: bytes) -> Answer:
    """Decode an answer. Raise MessageError for any other bytes. Signatures are not checked here."""
    answer = _decode(message)
    if isinstance(answer, Store | Find | Locate):
        raise MessageError("a request came where an answer was expected")
    return answer


def _decode(message: bytes) -> Request | Answer:
    try:
        reader = Reader(message)
        decoded = _read_message(reader)
        # Bytes after the end are refused: a message has one encoding.
        reader.end()
    except (WireError, RecordError, ContactError) as error:
        raise MessageError(str(error)) from error
    return decoded


def _read_message(reader: Reader) -> Request | Answer:
    length = reader.array(5)
    # The number and the length together name the form, so that no field is read that the form does not have.
    match reader.integer(6), length:
        case 1, 3 | 5:
            addresses = _read_addresses(reader)
            records = _read_many(reader, MAX_STORED_RECORDS, _read_record)
            return Store(addresses, records, *_read_options(reader, length))
        case 2, 3 | 5:
            return Find(_read_addresses(reader), reader.binary(KEY_BYTES), *_read_options(reader, length))
        case 3, 3:
            return Locate(_read_addresses(reader), reader.binary(BITS // 8))
        case 4, 5:
            closer, records = _read_closer(reader), _read_records(reader)
            outcomes = _read_many(reader, MAX_STORED_RECORDS, Reader.text)
            return Stored(closer, records, outcomes, reader.integer(2**32))
        case 5, 3:
            return Found(_read_closer(reader), _read_records(reader))
        case 6, 2:
            return LocateAnswer(_read_closer(reader))
    raise WireError("no message has this number and length")


def _read_options(reader: Reader, length: int) -> tuple[bytes, bool]:
    if length == 3:
        return b"", False
    known, brief = reader.multiple(MARK_BYTES, MAX_MARKS * MARK_BYTES), bool(reader.integer(1))
    # The shorter form says the same.
    if not (known or brief):
        raise WireError("a request has no options that say nothing")
    return known, brief


def _read_many(reader: Reader, most: int, read: Callable[[Reader], T]) -> tuple[T, ...]:
    # The length is bounded before an element is read: a claimed length costs no memory.
    return tuple(read(reader) for _ in range(reader.array(most)))


def _read_records(reader: Reader) -> tuple[Record, ...]:
    return _read_many(reader, MAX_ANSWER_RECORDS, _read_record)


def _read_record(reader: Reader) -> Record:
    return unpack(reader.scalars(FIELDS))


def _read_closer(reader: Reader) -> tuple[Contact, ...]:
    return _read_many(reader, K, _read_contact)


def _read_contact(reader: Reader) -> Contact:
    if reader.array(2) != 2:
        raise WireError("a contact is a peer id and its addresses")
    return Contact(reader.text(), _read_addresses(reader))


def _read_addresses(reader: Reader) -> tuple[str, ...]:
    return _read_many(reader, MAX_ADDRESSES, Reader.text)


def _contact_parts(contacts: tuple[Contact, ...]) -> tuple[object, ...]:
    return tuple((contact.peer_id, contact.addresses) for contact in contacts)


def _check_sender(addresses: tuple[str, ...]) -> None:
    try:
        check_addresses(addresses)
    except ContactError as error:
        raise MessageError(error.reason) from error


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
