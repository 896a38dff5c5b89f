import math
from typing import Any

import pytest
from msgspec.msgpack import encode
from msgspec.structs import replace

from p2pavg_dht import Ed25519Signer, RecordError, sign_record, verify
from p2pavg_dht.record import MAX_SEQUENCE, MAX_WIRE_BYTES, pack, unpack

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
