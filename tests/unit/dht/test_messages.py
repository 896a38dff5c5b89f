import tracemalloc
from typing import Any

import pytest

from p2pavg_dht import MAX_MESSAGE_BYTES, Contact, ContactError, Ed25519Signer, MessageError, sign_record
from p2pavg_dht.messages import (
    MARK_BYTES,
    MAX_MARKS,
    Answer,
    Find,
    Found,
    Locate,
    LocateAnswer,
    Request,
    Store,
    Stored,
    decode_answer,
    decode_request,
    encode,
    marks_of,
    unmarked,
)
from p2pavg_dht.record import MAX_VALUE_BYTES, pack
from p2pavg_dht.wire import packed

SIGNER = Ed25519Signer(bytes(range(32)))
ME = SIGNER.peer_id
ADDRESS = "/ip4/10.0.0.1/tcp/4001"
KEY = b"k" * 32
RECORD = sign_record(
    SIGNER, key=KEY, sequence=1_700_000_000_000_000, expiration_time=1_700_000_060.5, value=b"ready"
)
CONTACT = Contact(ME, (ADDRESS,))
MARKS = bytes(range(16))
REQUESTS: list[Request] = [
    Store((ADDRESS,), (RECORD,)),
    Find((), KEY),
    Locate((ADDRESS,) * 16, bytes(32)),
    Store((ADDRESS,), (RECORD,), MARKS),
    Store((ADDRESS,), (RECORD,), b"", True),
    Find((), KEY, MARKS, True),
    Find((), KEY, bytes(MAX_MARKS * MARK_BYTES)),
]
ANSWERS: list[Answer] = [
    Stored((CONTACT,), (RECORD,), ("", "no room"), 3),
    Found((CONTACT,), (RECORD, RECORD)),
    LocateAnswer(()),
]


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_request_survives_the_wire(request_: Request) -> None:
    assert decode_request(encode(request_)) == request_


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_survives_the_wire(answer: Answer) -> None:
    assert decode_answer(encode(answer)) == answer


def test_the_bytes_of_a_store_never_change() -> None:
    assert encode(REQUESTS[0]).hex() == (
        "930191b62f6970342f31302e302e302e312f7463702f343030319196c420"
        + "6b" * 32
        + "d934"
        + ME.encode().hex()
        + "cf00060a24181e4000cb41d954fc4f200000c4057265616479c440"
        + RECORD.signature.hex()
    )


def test_the_bytes_of_a_find_never_change() -> None:
    assert encode(Find((), KEY)).hex() == "930290c420" + "6b" * 32


def test_the_bytes_of_marks_never_change() -> None:
    assert encode(Find((), KEY, MARKS, True)).hex() == "950290c420" + "6b" * 32 + "c410" + MARKS.hex() + "01"


@pytest.mark.parametrize(
    "options", [(bytes(7), 0), (bytes(MAX_MARKS * MARK_BYTES + 8), 0), ("a", 1), (b"", 2), (b"", 0), (b"",)]
)
def test_malformed_marks_are_refused(options: tuple[Any, ...]) -> None:
    for parts in ((1, (), (FIELDS,)), (2, (), KEY)):
        with pytest.raises(MessageError):
            decode_request(message(*parts, *options))
    with pytest.raises(MessageError):
        Find((), KEY, bytes(7))


def test_marked_records_are_left_out() -> None:
    records = [
        sign_record(SIGNER, key=KEY, sequence=n, expiration_time=1_700_000_060.5, value=b"v")
        for n in range(300)
    ]
    assert unmarked(records, marks_of(records[:3])) == tuple(records[3:])
    assert unmarked(records, b"") == tuple(records)
    assert len(marks_of(records)) == MAX_MARKS * MARK_BYTES


def message(*parts: Any) -> bytes:
    return packed(parts)


FIELDS = pack(RECORD)


@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        (b"", "an array was expected"),
        (bytes(MAX_MESSAGE_BYTES + 1), "at most 1048576 bytes"),
        (b"\xdd\xff\xff\xff\xff", "an array of at most 5"),
        (b"\x93\x01\xdd\xff\xff\xff\xff", "an array of at most 16"),
        (b"\x93\x01\x90\xdd\xff\xff\xff\xff", "an array of at most 64"),
        (b"\x93\x02\x90\xc6\xff\xff\xff\xff", "a value was expected"),
        (b"\x91" * 1000, "a value was expected"),
        (message(1), "no message has this number and length"),
        (message(7, [], KEY), "an integer from 0 to 6"),
        (message(True, [], KEY), "an integer from 0 to 6"),
        (message({}, [], KEY), "an integer from 0 to 6"),
        (message(2, [], b"k" * 31), "32 bytes were expected"),
        (message(2, [], "k" * 32), "32 bytes were expected"),
        (message(2, [], KEY) + b"\x00", "bytes follow"),
        (message(2, {}, KEY), "an array was expected"),
        (message(2, [ADDRESS] * 17, KEY), "an array of at most 16"),
        (message(2, ["/" + "a" * 256], KEY), "a value was expected"),
        (message(2, ["ip4"], KEY), 'begins with "/"'),
        (message(2, ["/ip4 /"], KEY), "printable ASCII"),
        (message(2, ["/\x1b[2J"], KEY), "printable ASCII"),
        (message(2, ["/é"], KEY), "printable ASCII"),
        (message(2, [b"/ip4"], KEY), "a text was expected"),
        (b"\x93\x02\x91\xa2/\xff\xc4\x20" + KEY, "a value was expected"),
        (message(1, [], []), "1 to 64 records"),
        (message(1, [], [FIELDS] * 65), "an array of at most 64"),
        (message(1, [], [FIELDS[:5]]), "an array of 6 values"),
        (message(1, [], [[*FIELDS[:4], bytes(MAX_VALUE_BYTES + 1), FIELDS[5]]]), "a value was expected"),
        (message(1, [], [[*FIELDS[:3], 5, *FIELDS[4:]]]), "finite float"),
        (message(1, [], [[*FIELDS[:4], [b"x"], FIELDS[5]]]), "a value was expected"),
        # An empty extension type in the place of the value.
        (message(1, [], [[*FIELDS[:4], b"", FIELDS[5]]]).replace(b"\xc4\0", b"\xc7\0\5"), "not bytes"),
        (encode(LocateAnswer(())), "an answer came"),
    ],
)
def test_other_bytes_are_refused_with_the_reason(hostile: bytes, reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        decode_request(hostile)


@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        (encode(Find((), KEY)), "a request came"),
        (message(6, [[ME, []]] * 9), "an array of at most 8"),
        (message(6, [[ME, []]] * 2), "names a contact twice"),
        (message(6, [[ME]]), "a contact is a peer id and its addresses"),
        (message(6, [["somebody", []]]), "52 characters"),
        (message(4, [], [], [], 0), "1 to 64 outcomes"),
        (message(4, [], [], ["no\nroom"], 0), "an outcome is ASCII"),
        (message(4, [], [], ["x" * 201], 0), "200 characters"),
        (message(4, [], [], [""], -1), "an integer from 0"),
        (b"\x93\x05\x90\xdd\x00\x00\x10\x01", "an array of at most 4096"),
    ],
)
def test_a_hostile_answer_is_refused_with_the_reason(hostile: bytes, reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        decode_answer(hostile)


def test_a_false_length_allocates_nothing() -> None:
    hostile = [b"\x93\x01\x90\xdd\xff\xff\xff\xff", b"\xdd\x7f\xff\xff\xff" * 500, b"\xdc\xff\xff" * 500]
    tracemalloc.start()
    for each in hostile:
        with pytest.raises(MessageError):
            decode_request(each)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The reader's own buffer is a megabyte.
    assert peak < 3 * MAX_MESSAGE_BYTES


def test_a_message_that_is_too_long_is_not_encoded() -> None:
    big = sign_record(SIGNER, key=KEY, sequence=1, expiration_time=1.0, value=bytes(MAX_VALUE_BYTES))
    with pytest.raises(MessageError, match="at most 1048576 bytes"):
        encode(Found((), (big,) * 300))


@pytest.mark.parametrize(
    ("peer_id", "addresses", "reason"),
    [
        ("nobody", (), "52 characters"),
        (ME, (ADDRESS,) * 17, "at most 16 addresses"),
        (ME, [ADDRESS], "a tuple"),
        (ME, ("/" + "a" * 256,), "2 to 256 characters"),
        (ME, ("/",), "2 to 256 characters"),
        (5, (), "a peer id is a text"),
    ],
)
def test_an_invalid_contact_cannot_be_constructed(peer_id: Any, addresses: Any, reason: str) -> None:
    with pytest.raises(ContactError, match=reason):
        Contact(peer_id, addresses)
