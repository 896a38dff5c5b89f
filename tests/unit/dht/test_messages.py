import tracemalloc
from typing import Any

import pytest
from msgspec import msgpack

from p2pavg_dht import MAX_MESSAGE_BYTES, Contact, ContactError, Ed25519Signer, MessageError, sign_record
from p2pavg_dht.messages import (
    MARK_BYTES,
    MAX_MARKS,
    Find,
    Found,
    LocateAnswer,
    Request,
    Store,
    decode_answer,
    decode_request,
    encode,
    marks_of,
    unmarked,
)
from p2pavg_dht.record import MAX_VALUE_BYTES, pack

SIGNER = Ed25519Signer(bytes(range(32)))
ME = SIGNER.peer_id
ADDRESS = "/ip4/10.0.0.1/tcp/4001"
KEY = b"k" * 32
RECORD = sign_record(
    SIGNER, key=KEY, sequence=1_700_000_000_000_000, expiration_time=1_700_000_060.5, value=b"ready"
)
FIELDS = pack(RECORD)
MARKS = bytes(range(16))


@pytest.mark.parametrize(
    ("request_", "encoded"),
    [
        (
            Store((ADDRESS,), (RECORD,)),
            "930191b62f6970342f31302e302e302e312f7463702f343030319196c420"
            + "6b" * 32
            + "d934"
            + ME.encode().hex()
            + "cf00060a24181e4000cb41d954fc4f200000c4057265616479c440"
            + RECORD.signature.hex(),
        ),
        (Find((), KEY), "930290c420" + "6b" * 32),
        (Find((), KEY, MARKS, True), "950290c420" + "6b" * 32 + "c410" + MARKS.hex() + "01"),
    ],
)
def test_the_bytes_of_a_request_never_change(request_: Request, encoded: str) -> None:
    assert encode(request_).hex() == encoded
    assert decode_request(bytes.fromhex(encoded)) == request_


def test_marked_records_are_left_out() -> None:
    records = [
        sign_record(SIGNER, key=KEY, sequence=n, expiration_time=1_700_000_060.5, value=b"v")
        for n in range(300)
    ]
    assert unmarked(records, marks_of(records[:3])) == tuple(records[3:])
    assert unmarked(records, b"") == tuple(records)
    assert len(marks_of(records)) == MAX_MARKS * MARK_BYTES


def message(*parts: Any) -> bytes:
    return msgpack.encode(parts)


@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        (b"", "truncated"),
        (bytes(MAX_MESSAGE_BYTES + 1), "at most 1048576 bytes"),
        (b"\xdd\xff\xff\xff\xff", "truncated"),
        (b"\x93\x01\xdd\xff\xff\xff\xff", "length <= 16"),
        (b"\x93\x01\x90\xdd\xff\xff\xff\xff", "length <= 64"),
        (b"\x93\x02\x90\xc6\xff\xff\xff\xff", "truncated"),
        (b"\x91" * 1000, "got `array`"),
        (message(1), "at least length 3"),
        (message(7, [], KEY), "Invalid value 7"),
        (message(True, [], KEY), "got `bool`"),
        (message({}, [], KEY), "got `object`"),
        (message(2, [], b"k" * 31), "a key has 32 bytes"),
        (message(2, [], "k" * 32), "got `str`"),
        (message(2, [], KEY) + b"\x00", "trailing characters"),
        (message(2, {}, KEY), "got `object`"),
        (message(2, [ADDRESS] * 17, KEY), "length <= 16"),
        (message(2, ["/" + "a" * 256], KEY), "2 to 256 characters"),
        (message(2, ["ip4"], KEY), 'begins with "/"'),
        (message(2, ["/ip4 /"], KEY), "printable ASCII"),
        (message(2, ["/\x1b[2J"], KEY), "printable ASCII"),
        (message(2, ["/é"], KEY), "printable ASCII"),
        (message(2, [b"/ip4"], KEY), "got `bytes`"),
        (b"\x93\x02\x91\xa2/\xff\xc4\x20" + KEY, "can't decode"),
        (message(1, [], []), "1 to 64 records"),
        (message(1, [], [FIELDS] * 65), "length <= 64"),
        (message(1, [], [FIELDS[:5]]), "at least length 6"),
        (message(1, [], [(*FIELDS, 1)]), "at most length 6"),
        (message(1, [], [[*FIELDS[:4], bytes(MAX_VALUE_BYTES + 1), FIELDS[5]]]), "at most 4864"),
        (message(1, [], [[*FIELDS[:3], 5, *FIELDS[4:]]]), "in another way than its own"),
        (message(1, [], [[*FIELDS[:4], [b"x"], FIELDS[5]]]), "got `array`"),
        # An empty extension type in the place of the value.
        (message(1, [], [[*FIELDS[:4], b"", FIELDS[5]]]).replace(b"\xc4\0", b"\xc7\0\5"), "got `ext`"),
        (encode(LocateAnswer(())), "Invalid value 6"),
        # Options that are malformed, or have no effect.
        (message(2, [], KEY, bytes(7), 0), "at most 256 marks of 8 bytes"),
        (message(1, [], [FIELDS], bytes(MAX_MARKS * MARK_BYTES + 8), 0), "at most 256 marks of 8 bytes"),
        (message(2, [], KEY, "a", 1), "got `str`"),
        (message(1, [], [FIELDS], b"", 2), "`int` <= 1"),
        (message(2, [], KEY, b"", True), "got `bool`"),
        (message(1, [], [FIELDS], b"", 0), "in another way than its own"),
        (message(2, [], KEY, b""), "in another way than its own"),
        (message(2, [], KEY, MARKS), "in another way than its own"),
    ],
)
def test_other_bytes_are_refused_with_the_reason(hostile: bytes, reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        decode_request(hostile)


@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        (encode(Find((), KEY)), "Invalid value 2"),
        (message(6, [[ME, []]] * 9), "length <= 8"),
        (message(6, [[ME, []]] * 2), "names a contact twice"),
        (message(6, [[ME]]), "in another way than its own"),
        (message(6, [["somebody", []]]), "52 characters"),
        (message(4, [], [], [], 0), "1 to 64 outcomes"),
        (message(4, [], [], [""] * 65, 0), "length <= 64"),
        (message(4, [], [], ["no\nroom"], 0), "an outcome is ASCII"),
        (message(4, [], [], ["x" * 201], 0), "200 characters"),
        (message(4, [], [], [""], -1), "`int` >= 0"),
        (b"\x93\x05\x90\xdd\x00\x00\x10\x01", "length <= 4096"),
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
    assert peak < MAX_MESSAGE_BYTES


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
