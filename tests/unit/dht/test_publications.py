from p2pavg_dht import Ed25519Signer, Limits, Record, sign_record
from p2pavg_dht.publications import Publications

NOW = 1_700_000_000.0
KEY = b"k" * 32
SIGNER = Ed25519Signer(bytes(32))


def publications() -> Publications:
    return Publications(SIGNER, Limits())


def earlier_life(*, sequence: int, ttl: float, value: bytes = b"old") -> Record:
    return sign_record(SIGNER, key=KEY, sequence=sequence, expiration_time=NOW + ttl, value=value)


def test_a_record_counts_for_its_ttl_and_is_renewed_at_a_third_of_it() -> None:
    said = publications()
    first = said.announce(KEY, b"v", ttl=60.0, now=NOW)
    assert first.expiration_time == NOW + 60.0
    assert said.due(NOW + 19.9) == []
    assert said.due(NOW + 20.0) == [KEY]
    second = said.renew(KEY, NOW + 20.0)
    assert second is not None
    assert (second.value, second.expiration_time) == (b"v", NOW + 80.0)
    assert second.sequence > first.sequence
    assert said.due(NOW + 39.9) == []


def test_the_sequence_grows_across_restarts_and_while_the_clock_stands_still_or_goes_back() -> None:
    said = publications()
    sequences = [said.announce(KEY, b"v", ttl=60.0, now=now).sequence for now in (NOW, NOW, NOW - 100)]
    assert sequences == [sequences[0], sequences[0] + 1, sequences[0] + 2]
    assert publications().announce(KEY, b"v", ttl=60.0, now=NOW + 0.001).sequence > sequences[-1]


def test_a_withdrawal_lasts_as_long_as_its_record_and_is_repeated() -> None:
    said = publications()
    record = said.announce(KEY, b"v", ttl=60.0, now=NOW)
    tombstone = said.withdraw(KEY, NOW + 1)
    assert tombstone is not None
    assert tombstone.withdrawn
    assert tombstone.sequence > record.sequence
    assert tombstone.expiration_time == record.expiration_time
    assert said.due(NOW + 21) == [KEY]
    assert said.renew(KEY, NOW + 21) == tombstone
    assert said.due(NOW + 60) == []
    assert said.renew(KEY, NOW + 60) is None


def test_only_a_published_record_can_be_withdrawn_and_only_once() -> None:
    said = publications()
    assert said.withdraw(KEY, NOW) is None
    said.announce(KEY, b"v", ttl=60.0, now=NOW)
    assert said.said() == [KEY]
    assert said.withdraw(KEY, NOW) is not None
    assert said.withdraw(KEY, NOW) is None
    assert said.said() == []


def test_a_copy_never_expires_before_the_one_it_replaces() -> None:
    said = publications()
    said.announce(KEY, b"v", ttl=600.0, now=NOW)
    assert said.announce(KEY, b"w", ttl=10.0, now=NOW).expiration_time == NOW + 600.0


def test_a_clock_that_was_far_ahead_makes_no_unacceptable_records() -> None:
    said = publications()
    said.announce(KEY, b"v", ttl=60.0, now=NOW + 100_000)
    assert said.announce(KEY, b"v", ttl=60.0, now=NOW).expiration_time == NOW + Limits().max_ttl


def test_a_clock_that_was_set_back_does_not_postpone_the_renewal() -> None:
    said = publications()
    said.announce(KEY, b"v", ttl=60.0, now=NOW)
    assert said.due(NOW - 3600) == [KEY]


def test_a_record_of_an_earlier_process_is_outranked() -> None:
    said = publications()
    ours = said.announce(KEY, b"v", ttl=60.0, now=NOW)
    left = earlier_life(sequence=ours.sequence + 1000, ttl=300.0)
    again = said.adopt([left], NOW)
    assert again is not None
    assert again.value == b"v"
    assert again.rank > left.rank
    assert again.expiration_time >= left.expiration_time
    assert said.adopt([left, ours], NOW) is None


def test_a_record_of_an_earlier_process_is_outlived() -> None:
    said = publications()
    said.announce(KEY, b"v", ttl=60.0, now=NOW)
    again = said.adopt([earlier_life(sequence=1, ttl=300.0)], NOW)
    assert again is not None
    assert again.expiration_time == NOW + 300.0


def test_a_withdrawal_outranks_a_record_of_an_earlier_process() -> None:
    said = publications()
    said.announce(KEY, b"v", ttl=60.0, now=NOW)
    tombstone = said.withdraw(KEY, NOW)
    assert tombstone is not None
    left = earlier_life(sequence=tombstone.sequence + 5, ttl=300.0)
    again = said.adopt([left], NOW)
    assert again is not None
    assert again.withdrawn
    assert again.rank > left.rank
    assert again.expiration_time == left.expiration_time


def test_records_of_other_publishers_are_not_adopted() -> None:
    said = publications()
    said.announce(KEY, b"v", ttl=60.0, now=NOW)
    other = sign_record(
        Ed25519Signer(b"x" * 32), key=KEY, sequence=2**62, expiration_time=NOW + 60, value=b"x"
    )
    assert said.adopt([other], NOW) is None


def test_a_confirmed_record_is_not_sent_again_until_it_changes() -> None:
    said = publications()
    record = said.announce(KEY, b"v", ttl=60.0, now=NOW)
    assert said.unconfirmed("peer", NOW) == [record]
    said.confirmed(record, "peer")
    assert said.unconfirmed("peer", NOW) == []
    renewed = said.renew(KEY, NOW + 20)
    said.confirmed(record, "peer")
    assert said.unconfirmed("peer", NOW + 20) == [renewed]
    assert said.unconfirmed("peer", NOW + 81) == []
