"""The records that are remembered between two lookups of a key, and the limits of their memory."""

from p2pavg_dht import Ed25519Signer, Record, sign_record
from p2pavg_dht.node import MAX_HEARD_BYTES, MAX_KEYS, RecordCache
from p2pavg_dht.record import MAX_VALUE_BYTES

SIGNER = Ed25519Signer(bytes(32))


def record(number: int, size: int = 10) -> Record:
    value = bytes([number]) * size
    return sign_record(SIGNER, key=bytes(32), sequence=number, expiration_time=2e9, value=value)


def test_the_last_records_of_a_key_are_remembered() -> None:
    heard = RecordCache()
    assert heard.records(b"a") == ()
    assert heard.keep(b"a", [record(1)]) == (record(1),)
    heard.keep(b"b", [record(2)])
    heard.keep(b"a", [record(3)])
    assert (heard.records(b"a"), heard.records(b"b")) == ((record(3),), (record(2),))


def test_a_key_has_bounded_memory_and_the_caller_gets_all_records() -> None:
    heard, large = RecordCache(), [record(number, MAX_VALUE_BYTES) for number in range(1, 100)]
    assert heard.keep(b"a", large) == tuple(large)
    kept = heard.records(b"a")
    assert kept == tuple(large[: len(kept)])
    assert sum(each.wire_bytes for each in kept) <= MAX_HEARD_BYTES < sum(e.wire_bytes for e in large)


def test_the_keys_that_were_used_least_recently_are_forgotten() -> None:
    heard = RecordCache()
    for number in range(MAX_KEYS):
        heard.keep(bytes([number]), [record(1)])
    heard.keep(bytes([0]), [record(1)])
    heard.keep(b"new", [record(1)])
    assert heard.records(bytes([1])) == ()
    assert heard.records(bytes([0]))
    assert heard.records(b"new")
