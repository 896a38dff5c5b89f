import statistics

from p2pavg_dht import Contact, Ed25519Signer
from p2pavg_dht.routing import (
    BITS,
    BUCKET_CAPACITY,
    CHECK_INTERVAL,
    FORGIVENESS_INTERVAL,
    LONGEST_BACKOFF,
    MOST_BACKOFFS,
    MOST_FAILURES,
    K,
    RoutingTable,
    bucket_of,
    flipped,
    key_point,
    nearest,
    peer_point,
)

PEERS = [
    Contact(Ed25519Signer(number.to_bytes(32, "big")).peer_id, (f"/dns4/peer{number}/tcp/1",))
    for number in range(120)
]
ME, *OTHERS = PEERS
OWN_POINT = peer_point(ME.peer_id)
# Half of all peers differ from this one in the first bit. That is more than the farthest bucket holds.
FAR = [peer for peer in OTHERS if bucket_of(OWN_POINT, peer_point(peer.peer_id)) == BITS]
A, B, C = OTHERS[:3]


def moved(contact: Contact) -> Contact:
    return Contact(contact.peer_id, ("/dns4/elsewhere/tcp/1",))


def table_of(peers: list[Contact]) -> RoutingTable:
    table = RoutingTable(ME.peer_id)
    for number, peer in enumerate(peers):
        table.succeeded(peer, float(number))
    return table


def test_buckets_follow_kademlia() -> None:
    assert bucket_of(0b1000, 0b1000) == 0
    assert bucket_of(0b1000, 0b1011) == 2
    assert bucket_of(OWN_POINT, flipped(OWN_POINT, 250)) == 250
    assert [peer.peer_id for peer in nearest(PEERS, OWN_POINT, 1)] == [ME.peer_id]


def test_the_nearest_are_nearest_by_xor_and_there_are_k_of_them() -> None:
    point = key_point(b"key")
    by_distance = sorted(OTHERS[:15], key=lambda peer: peer_point(peer.peer_id) ^ point)
    assert table_of(OTHERS[:15]).nearest(point) == by_distance[:K]


def test_only_peers_that_have_answered_are_known() -> None:
    table = RoutingTable(ME.peer_id)
    assert table.wanted(A, 0.0)
    assert table.live() == []
    assert table.succeeded(A, 0.0)
    assert table.live() == [A]
    assert not table.wanted(A, 0.0)


def test_a_peer_is_not_in_its_own_table() -> None:
    table = RoutingTable(ME.peer_id)
    assert not table.succeeded(ME, 0.0)
    assert not table.wanted(ME, 0.0)
    assert not table.usable(ME, 0.0)
    assert table.live() == []


def test_a_failed_peer_is_not_named_until_it_answers_again() -> None:
    table = table_of([A, B])
    table.failed(A, 10.0)
    assert table.live() == [B]
    assert not table.usable(A, 11.9)
    assert table.usable(A, 12.0)
    assert table.live() == [B]
    assert table.succeeded(A, 12.0)
    assert set(table.live()) == {A, B}


def test_backing_off_doubles_and_is_capped() -> None:
    table = table_of([A])
    now, waits = 0.0, []
    for _ in range(MOST_FAILURES - 1):
        table.failed(A, now)
        wait = next(wait for wait in (2.0**n for n in range(1, 12)) if table.due(now + wait))
        waits.append(wait)
        now += wait
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
    stranger = RoutingTable(ME.peer_id)
    for number in range(2000):  # the check of a contact that is gone for a week
        stranger.failed(A, number * LONGEST_BACKOFF)
    assert stranger.usable(A, 2000 * LONGEST_BACKOFF)


def test_calls_that_fail_together_are_one_failure() -> None:
    """A peer that stood still for twelve seconds was given up by all, and had given up all."""
    table = table_of([A])
    for _ in range(2 * MOST_FAILURES):
        table.failed(A, 10.0)
    table.failed(A, 11.9)
    assert table.usable(A, 12.0)
    assert table.due(12.0) == [A]
    table.failed(A, 12.0)
    assert not table.usable(A, 15.9)
    assert table.usable(A, 16.0)


def test_a_peer_that_fails_too_often_is_forgotten() -> None:
    table = table_of([A])
    for number in range(MOST_FAILURES):
        table.failed(A, number * LONGEST_BACKOFF)
    assert table.due(1e9) == []


def test_a_failed_caller_is_called_back_at_most_every_few_seconds() -> None:
    table = table_of([A])
    table.failed(A, 10.0)
    assert not table.wanted(A, 10.0 + FORGIVENESS_INTERVAL - 0.1)
    assert table.wanted(A, 10.0 + FORGIVENESS_INTERVAL)


def test_contacts_that_have_not_answered_for_long_are_due() -> None:
    table = table_of([A])
    assert table.due(CHECK_INTERVAL - 0.1) == []
    assert table.due(CHECK_INTERVAL) == [A]


def test_a_full_bucket_keeps_its_contacts() -> None:
    table = table_of(FAR)
    assert table.live() == FAR[:BUCKET_CAPACITY]
    assert not table.wanted(FAR[-1], 0.0)


def test_a_newcomer_takes_the_place_of_one_that_failed() -> None:
    table = table_of(FAR)
    table.failed(FAR[3], 50.0)
    assert table.wanted(FAR[-1], 50.0)
    assert table.succeeded(FAR[-1], 50.0)
    assert set(table.live()) == {*FAR[:3], *FAR[4:BUCKET_CAPACITY], FAR[-1]}


def test_no_contact_is_replaced_while_there_is_room() -> None:
    table = table_of(FAR[:3])
    table.failed(FAR[0], 10.0)
    table.succeeded(FAR[3], 10.0)
    table.succeeded(FAR[0], 12.0)
    assert set(table.live()) == set(FAR[:4])
    assert table.live()[0] == FAR[0]


def test_addresses_named_by_strangers_do_not_affect_proved_ones() -> None:
    table = table_of([A])
    assert table.prefer_live(moved(A)) == A
    table.failed(moved(A), 1.0)
    table.succeeded(moved(A), 2.0)
    assert table.live() == [A]


def test_a_failed_peer_may_be_found_at_another_address() -> None:
    table = table_of([A])
    table.failed(A, 1.0)
    assert table.prefer_live(moved(A)) == moved(A)
    assert table.wanted(moved(A), 1.0)
    assert table.succeeded(moved(A), 2.0)
    assert table.live() == [moved(A)]


def test_backoffs_are_bounded() -> None:
    table = RoutingTable(ME.peer_id)
    for number in range(MOST_BACKOFFS + 5):
        table.failed(Contact(A.peer_id, (f"/dns4/fake{number}",)), 0.0)
    assert len(table._backoffs) == MOST_BACKOFFS


def test_buckets_beyond_the_nearest_peers_are_refreshed() -> None:
    assert table_of(OTHERS[: K - 1]).buckets_to_refresh() == []
    table = table_of(OTHERS)
    buckets = table.buckets_to_refresh()
    assert BITS not in buckets
    surroundings = [bucket_of(OWN_POINT, peer_point(peer.peer_id)) for peer in table.nearest(OWN_POINT)]
    assert all(bucket >= surroundings[-1] for bucket in buckets)


def test_a_large_network_is_estimated_from_the_nearest_peers() -> None:
    estimates = []
    everyone = [Contact(Ed25519Signer(number.to_bytes(32, "big")).peer_id) for number in range(600)]
    for own in everyone[:20]:
        table = RoutingTable(own.peer_id)
        for peer in everyone:
            table.succeeded(peer, 0.0)
        assert len(table.live()) < 200
        estimates.append(table.network_size())
    assert 450 < statistics.mean(estimates) < 800
    assert sum(300 < estimate < 1200 for estimate in estimates) >= 17


def test_refused_contacts_are_no_part_of_the_network() -> None:
    table = table_of(OTHERS[:30])
    for peer in OTHERS[:10]:
        table.failed(peer, 100.0)
    assert table.network_size() == 21
