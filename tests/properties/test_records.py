"""Properties for every input: decoders refuse with their own error, and stores keep their limits."""

from collections import Counter
from contextlib import suppress

from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import msgpack
from msgspec.structs import replace

from p2pavg_dht import (
    Contact,
    ContactError,
    Ed25519Signer,
    Limits,
    MessageError,
    PeerIdError,
    Record,
    RecordError,
    public_key_of,
    sign_record,
)
from p2pavg_dht.messages import Find, Found, Locate, Store, Stored, decode_answer, decode_request, encode
from p2pavg_dht.record import MAX_WIRE_BYTES, live_records, merge, unpack
from p2pavg_dht.storage import RecordStore

SIGNERS = [Ed25519Signer(number.to_bytes(32, "big")) for number in range(4)]
KEYS = [bytes([number]) * 32 for number in range(3)]
LIMITS = Limits(
    max_ttl=60.0,
    clock_skew=5.0,
    publishers_per_key=3,
    bytes_per_key=2 * MAX_WIRE_BYTES,
    records_per_publisher=2,
    bytes_per_publisher=MAX_WIRE_BYTES + 1000,
    relayed_per_sender=2,
    total_keys=2,
    total_records=5,
    total_bytes=3 * MAX_WIRE_BYTES,
)

records = st.builds(
    sign_record,
    st.sampled_from(SIGNERS),
    key=st.sampled_from(KEYS),
    sequence=st.integers(0, 5),
    expiration_time=st.integers(1, 100).map(float),
    value=st.sampled_from([b"", b"a", b"b", bytes(2000), bytes(4864)]),
)
contacts = st.builds(
    Contact, st.sampled_from([s.peer_id for s in SIGNERS]), st.just(("/ip4/127.0.0.1/tcp/4001",))
)
marks = st.sampled_from([b"", bytes(8), bytes(2048)])
messages = st.one_of(
    st.builds(
        Store, st.just(("/a",)), st.lists(records, min_size=1, max_size=3).map(tuple), marks, st.booleans()
    ),
    st.builds(Find, st.just(()), st.sampled_from(KEYS), marks, st.booleans()),
    st.builds(Locate, st.just(()), st.sampled_from(KEYS)),
    st.builds(Found, contacts.map(lambda c: (c,)), st.lists(records, max_size=3).map(tuple)),
    st.builds(Stored, st.just(()), st.lists(records, max_size=2).map(tuple), st.just(("",)), st.just(0)),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=60),
    st.binary(max_size=80),
    st.sampled_from([*KEYS, SIGNERS[0].peer_id, bytes(64), "/a"]),
)
structures = st.recursive(scalars, lambda inner: st.lists(inner, max_size=7), max_leaves=20)


def decode_both(message: bytes) -> None:
    with suppress(MessageError):
        decode_request(message)
    with suppress(MessageError):
        decode_answer(message)


@given(st.integers(0, 7), st.lists(structures, max_size=5))
def test_any_msgpack_is_a_message_or_a_message_error(number: int, parts: list[object]) -> None:
    decode_both(msgpack.encode((number, *parts)))


@given(messages, st.data())
def test_a_damaged_message_is_a_message_or_a_message_error(message: Store, data: st.DataObject) -> None:
    damaged = bytearray(encode(message))
    for position in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=4)):
        damaged[position] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(damaged)))
    decode_both(bytes(damaged))
    decode_both(bytes(damaged[:end]))


@given(messages)
def test_every_message_survives_the_wire(message: Store) -> None:
    decode = decode_request if isinstance(message, Store | Find | Locate) else decode_answer
    assert decode(encode(message)) == message


@given(structures)
def test_anything_is_a_record_or_a_record_error(fields: object) -> None:
    with suppress(RecordError):
        unpack(fields)


@given(st.one_of(st.text(max_size=80), st.text("123ABCabcxyz", min_size=52, max_size=52)))
@example(SIGNERS[0].peer_id[:-1] + "\n")
def test_any_text_is_a_peer_id_or_a_peer_id_error(text: str) -> None:
    with suppress(PeerIdError):
        public_key_of(text)


@given(st.text(max_size=80), st.lists(st.text(max_size=300), max_size=20).map(tuple))
def test_any_texts_are_a_contact_or_a_contact_error(peer_id: str, addresses: tuple[str, ...]) -> None:
    for name in (peer_id, SIGNERS[0].peer_id):
        with suppress(ContactError):
            Contact(name, addresses)


@given(st.lists(records, max_size=12), st.randoms())
def test_merging_ignores_order_and_repetition(some: list[Record], random: object) -> None:
    shuffled = some + some[:3]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    merged = merge(some)
    assert merge(shuffled) == merged
    assert merge(merged.values()) == merged
    half = len(some) // 2
    assert merge([*merge(some[:half]).values(), *merge(some[half:]).values()]) == merged
    assert live_records(shuffled, 50.0) == live_records(some, 50.0)


@given(st.lists(records, max_size=12), st.integers(0, 100))
def test_live_records_are_the_newest_of_each_publisher_and_key(some: list[Record], now: int) -> None:
    live = live_records(some, now)
    assert len({(record.key, record.publisher) for record in live}) == len(live)
    for record in live:
        assert record.value
        assert record.expiration_time > now
        rivals = [r for r in some if (r.key, r.publisher) == (record.key, record.publisher)]
        assert record.sequence == max(rival.sequence for rival in rivals)


puts = st.tuples(records, st.sampled_from(SIGNERS), st.integers(0, 3), st.booleans())


@settings(max_examples=200)
@given(st.lists(puts, max_size=40))
def test_a_store_keeps_its_invariants_for_any_input(
    sequence: list[tuple[Record, Ed25519Signer, int, bool]],
) -> None:
    store, now = RecordStore(LIMITS), 0.0
    newest: dict[tuple[bytes, str], Record] = {}
    for record, sender, elapsed, forged in sequence:
        now += elapsed
        before = everything(store, now)
        offered = replace(record, signature=bytes(64)) if forged else record
        refusal = store.put(offered, sender=sender.peer_id, now=now)
        held = everything(store, now)
        check_bounds(store, held)
        assert all(r and r.signature != bytes(64) for r in held.values())
        place = record.key, record.publisher
        if refusal is None:
            assert held[place] == offered
            earlier = newest.get(place)
            if earlier is not None and earlier.expiration_time > now:
                assert offered.rank >= earlier.rank
                assert offered.expiration_time >= earlier.expiration_time
            newest[place] = offered
        # Whether this record was stored or refused, no other publisher's record has changed.
        assert {**before, place: None} == {**held, place: None}


def everything(store: RecordStore, now: float) -> dict[tuple[bytes, str], Record | None]:
    return {(r.key, r.publisher): r for key in KEYS for r in store.records(key, now)}


def check_bounds(store: RecordStore, held: dict[tuple[bytes, str], Record | None]) -> None:
    everyone = [record for record in held.values() if record is not None]
    assert len(store) == len(everyone) <= LIMITS.total_records
    assert store.total_bytes == sum(r.wire_bytes for r in everyone) <= LIMITS.total_bytes
    assert len({r.key for r in everyone}) <= LIMITS.total_keys
    by_key: list[bytes | str] = [r.key for r in everyone]
    by_publisher: list[bytes | str] = [r.publisher for r in everyone]
    for counted, most_records, most_bytes in (
        (by_key, LIMITS.publishers_per_key, LIMITS.bytes_per_key),
        (by_publisher, LIMITS.records_per_publisher, LIMITS.bytes_per_publisher),
    ):
        assert all(number <= most_records for number in Counter(counted).values())
        sizes: Counter[bytes | str] = Counter()
        for name, record in zip(counted, everyone, strict=True):
            sizes[name] += record.wire_bytes
        assert all(size <= most_bytes for size in sizes.values())
