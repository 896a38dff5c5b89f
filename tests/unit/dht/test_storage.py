"""The records that a store accepts or refuses; a flood displaces no honest record."""

import pytest
from msgspec.structs import replace

from p2pavg_dht import Ed25519Signer, Limits, Record, Refusal, sign_record
from p2pavg_dht.record import MAX_VALUE_BYTES, MAX_WIRE_BYTES, WIRE_OVERHEAD
from p2pavg_dht.storage import RecordStore

NOW = 1_700_000_000.0
KEY = b"k" * 32
SIGNERS = [Ed25519Signer(number.to_bytes(32, "big")) for number in range(12)]
ALICE, BOB, CAROL, *CROWD = SIGNERS


def record(
    signer: Ed25519Signer = ALICE,
    *,
    key: bytes = KEY,
    sequence: int = 1,
    ttl: float = 60.0,
    value: bytes = b"value",
) -> Record:
    return sign_record(signer, key=key, sequence=sequence, expiration_time=NOW + ttl, value=value)


def numbered_key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def put(
    store: RecordStore, record: Record, *, sender: Ed25519Signer | None = None, at: float = NOW
) -> str | None:
    return store.put(record, sender=sender.peer_id if sender else record.publisher, now=at)


def test_a_record_is_kept_until_it_expires() -> None:
    store = RecordStore(Limits())
    assert put(store, record()) is None
    assert store.records(KEY, NOW + 59.9) == (record(),)
    assert store.records(KEY, NOW + 60.0) == ()
    assert (len(store), store.total_bytes) == (0, 0)


def test_a_lower_sequence_is_a_replay_and_the_same_record_again_is_none() -> None:
    store = RecordStore(Limits())
    assert [put(store, record(sequence=2)) for _ in range(2)] == [None, None]
    assert put(store, record(sequence=1)) is Refusal.REPLAYED


def test_all_stores_keep_the_same_of_two_records_with_one_sequence() -> None:
    one, other = record(value=b"one"), record(value=b"other")
    stores = RecordStore(Limits()), RecordStore(Limits())
    for store, order in zip(stores, ((one, other), (other, one)), strict=True):
        for each in order:
            put(store, each)
    assert stores[0].records(KEY, NOW) == stores[1].records(KEY, NOW)


def test_a_withdrawn_record_stays_withdrawn() -> None:
    store = RecordStore(Limits())
    put(store, record(sequence=1))
    assert put(store, record(sequence=2, value=b"")) is None
    assert put(store, record(sequence=1)) is Refusal.REPLAYED
    assert [held.withdrawn for held in store.records(KEY, NOW + 59.9)] == [True]
    assert put(store, record(sequence=1), at=NOW + 60.0) is Refusal.EXPIRED


def test_a_record_that_expires_before_the_one_it_replaces_is_refused() -> None:
    # After its expiration, the older record could be replayed.
    store = RecordStore(Limits())
    put(store, record(sequence=1, ttl=60.0))
    assert put(store, record(sequence=2, ttl=59.0, value=b"")) is Refusal.SHORTENED


@pytest.mark.parametrize("ttl", [0.0, -1.0, -1e12])
def test_an_expired_record_is_refused(ttl: float) -> None:
    assert put(RecordStore(Limits()), record(ttl=ttl)) is Refusal.EXPIRED


def test_an_expiration_too_far_in_the_future_is_refused() -> None:
    store = RecordStore(Limits(max_ttl=100.0, clock_skew=10.0))
    assert put(store, record(ttl=110.5)) is Refusal.TOO_FAR
    assert put(store, record(ttl=110.0)) is None


def test_a_forgery_does_not_affect_the_record_held() -> None:
    store = RecordStore(Limits())
    put(store, record())
    assert put(store, replace(record(), sequence=2), sender=BOB) is Refusal.FORGED
    assert store.records(KEY, NOW) == (record(),)


def test_a_publisher_has_its_allowance_of_records_over_all_keys() -> None:
    store = RecordStore(Limits(records_per_publisher=3))
    outcomes = [put(store, record(key=numbered_key(number))) for number in range(4)]
    assert outcomes == [None, None, None, Refusal.PUBLISHER_QUOTA]
    assert put(store, record(BOB)) is None


def test_a_publisher_has_its_allowance_of_bytes() -> None:
    store = RecordStore(Limits(bytes_per_publisher=MAX_WIRE_BYTES))
    assert put(store, record(value=bytes(2400))) is None
    assert put(store, record(key=numbered_key(1), value=bytes(2400))) is Refusal.PUBLISHER_QUOTA
    # A longer value of a record that is held needs room too.
    assert put(store, record(sequence=2, value=bytes(MAX_VALUE_BYTES))) is None
    assert put(store, record(key=numbered_key(1), value=b"")) is Refusal.PUBLISHER_QUOTA


def test_a_key_has_limits_of_publishers_and_bytes() -> None:
    few = RecordStore(Limits(publishers_per_key=2))
    outcomes = [put(few, record(signer)) for signer in SIGNERS[:3]]
    assert outcomes == [None, None, Refusal.KEY_FULL]
    small = RecordStore(Limits(bytes_per_key=MAX_WIRE_BYTES))
    assert put(small, record(ALICE, value=bytes(MAX_VALUE_BYTES - 96))) is None
    assert put(small, record(BOB)) is Refusal.KEY_FULL


@pytest.mark.parametrize(
    "limits", [Limits(total_keys=2), Limits(total_records=2), Limits(total_bytes=MAX_WIRE_BYTES)]
)
def test_the_whole_store_is_bounded(limits: Limits) -> None:
    store = RecordStore(limits)
    big = bytes(MAX_WIRE_BYTES // 2 - WIRE_OVERHEAD)
    for number, signer in enumerate(SIGNERS[:2]):
        assert put(store, record(signer, key=numbered_key(number), value=big)) is None
    assert put(store, record(CAROL, key=numbered_key(3), value=b"one more")) is Refusal.STORE_FULL


def test_a_sender_has_its_allowance_of_other_publishers_records() -> None:
    store = RecordStore(Limits(relayed_per_sender=2))
    outcomes = [put(store, record(signer), sender=ALICE) for signer in CROWD[:3]]
    assert outcomes == [None, None, Refusal.SENDER_QUOTA]
    # Renewals of relayed records, the sender's own records and those sent by their publishers are not limited by it.
    assert put(store, record(CROWD[0], sequence=2), sender=ALICE) is None
    assert put(store, record(ALICE), sender=ALICE) is None
    assert put(store, record(CROWD[2]), sender=CROWD[2]) is None


def test_a_publisher_takes_over_the_charge_of_its_relayed_record() -> None:
    store = RecordStore(Limits(relayed_per_sender=1))
    put(store, record(CROWD[0]), sender=ALICE)
    put(store, record(CROWD[0], sequence=2), sender=CROWD[0])
    assert put(store, record(CROWD[1]), sender=ALICE) is None


def test_the_first_sender_of_a_record_keeps_the_charge() -> None:
    store = RecordStore(Limits(relayed_per_sender=1))
    put(store, record(CROWD[0]), sender=ALICE)
    put(store, record(CROWD[0], sequence=2), sender=BOB)
    assert put(store, record(CROWD[1]), sender=ALICE) is Refusal.SENDER_QUOTA
    assert put(store, record(CROWD[1]), sender=BOB) is None


def test_expiry_frees_every_allowance() -> None:
    store = RecordStore(Limits(total_records=1, publishers_per_key=1, relayed_per_sender=1))
    put(store, record(BOB, ttl=10.0), sender=ALICE)
    assert put(store, record(CAROL), sender=ALICE) is Refusal.SENDER_QUOTA
    assert put(store, record(CAROL), sender=ALICE, at=NOW + 10.0) is None


def test_a_flood_displaces_no_record_and_no_renewal() -> None:
    store = RecordStore(Limits(publishers_per_key=4, total_records=6, total_bytes=6 * MAX_WIRE_BYTES))
    put(store, record(ALICE))
    for key in (KEY, numbered_key(1), numbered_key(2)):
        for sybil in CROWD:
            put(store, record(sybil, key=key, value=bytes(MAX_VALUE_BYTES)))
    assert len(store) == 6
    assert put(store, record(ALICE, sequence=2, ttl=90.0)) is None
    assert put(store, record(ALICE, sequence=3, ttl=90.0, value=b"")) is None


def test_constant_renewal_does_not_grow_the_list_of_expirations() -> None:
    store = RecordStore(Limits())
    for sequence in range(500):
        put(store, record(sequence=sequence, ttl=60.0 + sequence))
    assert len(store._expirations) <= 66
    assert store.records(KEY, NOW + 558.5) == (record(sequence=499, ttl=559.0),)
    assert store.records(KEY, NOW + 559.0) == ()


def test_an_answer_holds_the_records_that_fit_and_counts_the_others() -> None:
    store = RecordStore(Limits())
    for signer in SIGNERS[:3]:
        put(store, record(signer))
    one = record().wire_bytes
    taken, omitted = store.records_within([KEY], 2 * one, NOW)
    assert (len(taken), omitted) == (2, 1)


class TestReservedPlaces:
    """Places under a key that this peer uses itself."""

    def full(self) -> RecordStore:
        store = RecordStore(Limits(publishers_per_key=1, total_records=1))
        assert put(store, record(ALICE)) is None
        return store

    def test_a_reserved_publisher_finds_a_place_under_a_full_key(self) -> None:
        store = self.full()
        assert put(store, record(BOB)) is Refusal.KEY_FULL
        store.reserve(KEY, {BOB.peer_id})
        assert put(store, record(BOB)) is None
        assert put(store, record(CAROL)) is Refusal.KEY_FULL

    def test_a_place_is_reserved_under_that_key_only_and_until_it_is_given_up(self) -> None:
        store = self.full()
        store.reserve(KEY, {BOB.peer_id})
        assert put(store, record(BOB, key=numbered_key(1))) is Refusal.STORE_FULL
        store.reserve(KEY, ())
        assert put(store, record(BOB)) is Refusal.KEY_FULL

    def test_a_reserved_publisher_keeps_within_its_own_allowance(self) -> None:
        store = RecordStore(Limits(records_per_publisher=1))
        store.reserve(KEY, {BOB.peer_id})
        assert put(store, record(BOB, key=numbered_key(1))) is None
        assert put(store, record(BOB)) is Refusal.PUBLISHER_QUOTA


class TestGuards:
    """Keys whose records a rule of this peer decides about."""

    def test_a_guard_refuses_with_its_own_reason(self) -> None:
        store = RecordStore(Limits())
        store.guard(KEY, lambda found: "no member" if found.publisher == BOB.peer_id else None)
        assert put(store, record(ALICE)) is None
        assert put(store, record(BOB)) == "no member"
        assert put(store, record(BOB, key=numbered_key(1))) is None

    def test_a_guard_sees_genuine_records_only(self) -> None:
        store, seen = RecordStore(Limits()), []
        store.guard(KEY, lambda found: seen.append(found))
        forged = replace(record(ALICE), signature=bytes(64))
        assert put(store, forged) is Refusal.FORGED
        assert not seen

    def test_a_withdrawal_counts_only_for_a_record_that_is_held(self) -> None:
        store = RecordStore(Limits())
        store.guard(KEY, lambda _: None)
        assert put(store, record(BOB, value=b"")) is Refusal.UNKNOWN_WITHDRAWN
        assert put(store, record(BOB)) is None
        assert put(store, record(BOB, sequence=2, value=b"")) is None

    def test_the_next_guard_decides_when_the_first_has_ended(self) -> None:
        store = RecordStore(Limits())
        first, second = (lambda _: "first"), (lambda _: "second")
        store.guard(KEY, first)
        store.guard(KEY, second)
        assert put(store, record(BOB)) == "first"
        store.unguard(KEY, first)
        assert put(store, record(BOB)) == "second"
        store.unguard(KEY, second)
        assert put(store, record(BOB)) is None
