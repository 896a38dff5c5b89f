from p2pavg_dht import Contact, Ed25519Signer
from p2pavg_dht.distance import K, peer_point
from p2pavg_dht.lookup import ALPHA, HEDGE_DELAY, MOST_CALLS, Lookup

POINT = 1 << 200
ME, *PEERS = sorted(
    (Contact(Ed25519Signer(number.to_bytes(32, "big")).peer_id, ("/a",)) for number in range(120)),
    key=lambda contact: -(peer_point(contact.peer_id) ^ POINT),
)
# PEERS[0] is the nearest from here on; ME is the farthest of all.
PEERS.reverse()


def lookup(seeds: list[Contact], *, wide: bool = True) -> Lookup:
    return Lookup(POINT, seeds, own_id=ME.peer_id, wide=wide)


def test_a_peer_without_contacts_makes_no_call() -> None:
    alone = lookup([])
    assert alone.next_calls(0.0) == []
    assert alone.finished


def test_a_wide_lookup_asks_the_k_nearest_at_once() -> None:
    known = lookup(PEERS[:20])
    assert known.next_calls(0.0) == PEERS[:K]
    assert not known.finished
    for peer in PEERS[:K]:
        known.answered(peer.peer_id, PEERS[:K])
    assert known.next_calls(0.0) == []
    assert known.finished


def test_a_narrow_lookup_makes_few_calls_until_no_nearer_peer_is_named() -> None:
    unknown = lookup(PEERS[20:40], wide=False)
    first = unknown.next_calls(0.0)
    assert first == PEERS[20 : 20 + ALPHA]
    unknown.answered(first[0].peer_id, PEERS[:K])
    assert unknown.next_calls(0.0) == PEERS[:1]
    unknown.answered(PEERS[0].peer_id, PEERS[:K])
    assert len(unknown.next_calls(0.0)) == K - (ALPHA - 1)


def test_a_failed_peer_is_replaced_by_the_next_nearest() -> None:
    replaced = lookup(PEERS[:20])
    replaced.next_calls(0.0)
    replaced.failed(PEERS[0].peer_id)
    assert replaced.next_calls(0.0) == [PEERS[K]]


def test_a_majority_of_answers_ends_the_wait_for_stalled_calls() -> None:
    hedged = lookup(PEERS[:20])
    hedged.next_calls(0.0)
    for peer in PEERS[1:K]:
        hedged.answered(peer.peer_id, [])
    assert not hedged.finished
    assert hedged.next_stall == HEDGE_DELAY
    hedged.notice_stalls(HEDGE_DELAY)
    assert hedged.next_calls(HEDGE_DELAY) == [PEERS[K]]
    assert not hedged.finished
    hedged.answered(PEERS[K].peer_id, [])
    assert hedged.finished
    assert hedged.stalled == [PEERS[0]]


def test_stalled_calls_are_awaited_without_a_majority() -> None:
    few = lookup(PEERS[:7])
    few.next_calls(0.0)
    for peer in PEERS[:3]:
        few.answered(peer.peer_id, [])
    few.notice_stalls(HEDGE_DELAY)
    # With this peer, 4 of 8 have answered. Another half of the same 8 might not overlap with them.
    assert not few.finished
    few.answered(PEERS[3].peer_id, [])
    assert few.finished


def test_the_only_other_peer_is_awaited() -> None:
    pair = lookup(PEERS[:1])
    pair.next_calls(0.0)
    pair.notice_stalls(HEDGE_DELAY)
    assert not pair.finished
    pair.failed(PEERS[0].peer_id)
    assert pair.finished


def test_a_late_answer_counts() -> None:
    late = lookup(PEERS[:1])
    late.next_calls(0.0)
    late.notice_stalls(HEDGE_DELAY)
    late.answered(PEERS[0].peer_id, [PEERS[1]])
    assert late.next_calls(1.0) == [PEERS[1]]


def test_a_lookup_of_invented_peers_is_bounded() -> None:
    liar = lookup(PEERS[100:], wide=True)
    named = PEERS[100:]
    asked = 0
    while not liar.finished:
        for contact in liar.next_calls(0.0):
            asked += 1
            named = PEERS[max(0, PEERS.index(contact) - K) : PEERS.index(contact)]
            liar.answered(contact.peer_id, named)
    assert asked <= MOST_CALLS
    endless = lookup([Contact(ME.peer_id), *PEERS])
    asked = 0
    while calls := endless.next_calls(0.0):
        asked += len(calls)
        for contact in calls:
            endless.failed(contact.peer_id)
    assert asked == MOST_CALLS
    assert endless.finished


def test_no_answer_can_name_more_than_k() -> None:
    greedy = lookup(PEERS[50:51])
    greedy.next_calls(0.0)
    greedy.answered(PEERS[50].peer_id, PEERS[:40])
    assert len(greedy._candidates) == 2 + K


def test_a_failed_peer_is_tried_at_another_address() -> None:
    false, true = Contact(PEERS[0].peer_id, ("/false",)), Contact(PEERS[0].peer_id, ("/true",))
    mended = lookup([false, PEERS[1]])
    mended.next_calls(0.0)
    mended.failed(false.peer_id)
    mended.answered(PEERS[1].peer_id, [false])
    assert mended.next_calls(0.0) == []
    again = lookup([false, PEERS[1]])
    again.next_calls(0.0)
    again.failed(false.peer_id)
    again.answered(PEERS[1].peer_id, [true])
    assert again.next_calls(0.0) == [true]
