import math
from typing import Any

import pytest
from msgspec.msgpack import encode
from msgspec.structs import replace

from p2pavg_dht import Ed25519Signer, Record, RecordError, sign_record, verify
from p2pavg_dht.record import MAX_SEQUENCE, MAX_WIRE_BYTES, live_records, pack, unpack

SIGNER = Ed25519Signer(bytes(range(32)))
OTHER = Ed25519Signer(bytes(range(1, 33)))
GOLDEN = sign_record(
    SIGNER, key=b"k" * 32, sequence=1_700_000_000_000_000, expiration_time=1_700_000_060.5, value=b"ready"
)


def test_the_signature_is_over_these_very_bytes() -> None:
    message = (
        b"p2pavg-record/1\0"
        + b"k" * 32
        + b"\x00\x34"
        + b"12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
        + (1_700_000_000_000_000).to_bytes(8, "big")
        + bytes.fromhex("41d954fc4f200000")  # 1_700_000_060.5 as an IEEE 754 double
        + b"\x00\x00\x00\x05ready"
    )
    assert GOLDEN.signature == SIGNER.sign(message)


def test_the_signature_never_changes() -> None:
    assert GOLDEN.signature.hex() == (
        "e7a3b4d8f51f36eeeb71aaae6efaacd1cd271145d8655bec9150be492ff45ba5"
        "229a5a2aead3d057f3e37f4e8d3566c74c1a765336cb7f8b11c50f61c4507103"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"key": b"K" * 32},
        {"publisher": OTHER.peer_id},
        {"sequence": GOLDEN.sequence + 1},
        {"expiration_time": math.nextafter(GOLDEN.expiration_time, math.inf)},
        {"value": b"Ready"},
        {"value": b""},
        {"signature": OTHER.sign(b"anything")},
    ],
)
def test_a_record_changed_in_any_field_is_forged(change: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match="forged"):
        verify(replace(GOLDEN, **change))


def test_a_signature_without_the_domain_tag_is_refused() -> None:
    message = b"k" * 32 + b"\x00\x34" + SIGNER.peer_id.encode() + bytes(20)
    record = replace(GOLDEN, sequence=0, expiration_time=0.0, value=b"", signature=SIGNER.sign(message))
    with pytest.raises(RecordError, match="forged"):
        verify(record)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"key": b"k" * 31}, "the key is not 32 bytes"),
        ({"key": "k" * 32}, "the key is not 32 bytes"),
        ({"key": bytearray(32)}, "the key is not 32 bytes"),
        ({"publisher": "somebody"}, "the publisher is not a peer id"),
        ({"publisher": b"x" * 52}, "the publisher is not a peer id"),
        ({"sequence": -1}, "the sequence is not an integer"),
        ({"sequence": True}, "the sequence is not an integer"),
        ({"sequence": 1.0}, "the sequence is not an integer"),
        ({"sequence": MAX_SEQUENCE + 1}, "the sequence is not an integer"),
        ({"expiration_time": 5}, "the expiration time is not a finite float"),
        ({"expiration_time": math.nan}, "the expiration time is not a finite float"),
        ({"expiration_time": math.inf}, "the expiration time is not a finite float"),
        ({"value": bytes(4865)}, "the value is not bytes, at most 4864"),
        ({"value": "ready"}, "the value is not bytes"),
        ({"signature": bytes(63)}, "the signature is not 64 bytes"),
        ({"signature": None}, "the signature is not 64 bytes"),
    ],
)
def test_a_record_with_an_invalid_field_cannot_be_constructed(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        replace(GOLDEN, **change)


@pytest.mark.parametrize("fields", [None, 5, "abcdef", b"abcdef", (), pack(GOLDEN)[:5], (*pack(GOLDEN), 1)])
def test_only_six_fields_are_a_record(fields: object) -> None:
    with pytest.raises(RecordError, match="6 fields"):
        unpack(fields)


def test_wire_bytes_bound_the_encoded_size() -> None:
    biggest = sign_record(
        SIGNER, key=bytes(32), sequence=MAX_SEQUENCE, expiration_time=1e300, value=bytes(4864)
    )
    assert len(encode(biggest)) <= biggest.wire_bytes == MAX_WIRE_BYTES
    assert len(encode(GOLDEN)) <= GOLDEN.wire_bytes


def _record(sequence: int, expiration_time: float, value: bytes, signer: Ed25519Signer = SIGNER) -> Record:
    return sign_record(signer, key=bytes(32), sequence=sequence, expiration_time=expiration_time, value=value)


def test_a_withdrawal_hides_its_record_and_itself() -> None:
    assert live_records([_record(1, 100.0, b"old"), _record(2, 100.0, b"")], 0.0) == ()


def test_an_expired_record_does_not_restore_the_one_it_replaced() -> None:
    assert live_records([_record(1, 100.0, b"old"), _record(2, 50.0, b"new")], 60.0) == ()
