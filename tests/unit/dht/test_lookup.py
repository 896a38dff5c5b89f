from collections.abc import Mapping, Set

from p2pavg_dht import Contact, Ed25519Signer
from p2pavg_dht.lookup import ALPHA, HEDGE_DELAY, MOST_CALLS, PATHS, PATIENCE, Lookup
from p2pavg_dht.routing import K, peer_point

POINT = 1 << 200
ME, *PEERS = sorted(
    (Contact(Ed25519Signer(number.to_bytes(32, "big")).peer_id, ("/a",)) for number in range(120)),
    key=lambda contact: -(peer_point(contact.peer_id) ^ POINT),
)
# PEERS[0] is the nearest from here on; ME is the farthest of all.
PEERS.reverse()


def lookup(seeds: list[Contact], *, wide: bool = True) -> Lookup:
    return Lookup(POINT, seeds, own_id=ME.peer_id, wide=wide)


def test_a_wide_lookup_asks_the_k_nearest_at_once() -> None:
    known = lookup(PEERS[:20])
    assert known.next_calls(0.0) == PEERS[:K]
    assert not known.finished
    for peer in PEERS[:K]:
        known.answered(peer, PEERS[:K])
    assert known.next_calls(0.0) == []
    assert known.finished


def test_a_path_makes_one_call_until_its_first_answer() -> None:
    unknown = lookup(PEERS[20:40], wide=False)
    first = unknown.next_calls(0.0)
    assert first == PEERS[20 : 20 + ALPHA]
    unknown.answered(first[0], PEERS[:K])
    assert unknown.next_calls(0.0) == PEERS[: K // PATHS]
    unknown.answered(PEERS[0], PEERS[:K])
    assert unknown.next_calls(0.0) == []


def test_a_patient_lookup_has_one_call_of_each_path_under_way() -> None:
    patient = Lookup(POINT, PEERS[:20], own_id=ME.peer_id, wide=True, patient=True)
    assert patient.next_calls(0.0) == PEERS[:PATHS]
    assert patient.next_calls(0.0) == []
    patient.answered(PEERS[1], [])
    assert patient.next_calls(0.0) == [PEERS[1 + PATHS]], "the next one of the path that has its answer"
    for peer in (PEERS[0], *PEERS[2:PATHS]):
        patient.answered(peer, [])
    rest = patient.next_calls(0.0)
    assert set(rest) == {*PEERS[PATHS:K]} - {PEERS[1 + PATHS]}
    for peer in (*rest, PEERS[1 + PATHS]):
        assert not patient.finished
        patient.answered(peer, [])
    assert patient.finished


def test_a_patient_lookup_is_patient_for_a_while_only() -> None:
    patient = Lookup(POINT, PEERS[:20], own_id=ME.peer_id, wide=True, patient=True)
    assert patient.next_calls(1.0) == PEERS[:PATHS]
    assert patient.next_calls(1.0 + PATIENCE) == PEERS[PATHS:K]


def test_a_hostile_keeper_delays_a_patient_lookup_hardly_more_than_another_one() -> None:
    """The nearest known one names eight invented ones that are nearer and silent, or slow."""
    known, invented = PEERS[20:40], PEERS[:K]
    silent = dict.fromkeys(invented, float("inf"))
    slow = dict.fromkeys(invented, HEDGE_DELAY - 0.01)
    for delays in (silent, slow):
        answers = {known[0]: invented}
        eager, patient = (
            lasts(Lookup(POINT, known, own_id=ME.peer_id, wide=True, patient=patient), answers, delays)
            for patient in (False, True)
        )
        assert patient <= eager + 2 * HEDGE_DELAY


def lasts(path: Lookup, answer: Mapping[Contact, list[Contact]], delays: Mapping[Contact, float]) -> float:
    """Return the seconds until a lookup has finished, if calls take 0.05 s unless ``delays`` says more."""
    now = 0.0
    waiting: dict[Contact, float] = {}
    while True:
        waiting |= {contact: now + delays.get(contact, 0.05) for contact in path.next_calls(now)}
        if path.finished:
            return now
        now = min(path.next_stall, *waiting.values())
        assert now < float("inf")
        for contact in [each for each, at in waiting.items() if at <= now]:
            del waiting[contact]
            path.answered(contact, answer.get(contact, []))
        path.notice_stalls(now)


def test_a_failed_peer_is_replaced_by_the_next_nearest() -> None:
    replaced = lookup(PEERS[:20])
    replaced.next_calls(0.0)
    replaced.failed(PEERS[0])
    assert replaced.next_calls(0.0) == [PEERS[K]]


def test_a_majority_of_answers_ends_the_wait_for_stalled_calls() -> None:
    hedged = lookup(PEERS[:20])
    hedged.next_calls(0.0)
    for peer in PEERS[1:K]:
        hedged.answered(peer, [])
    assert not hedged.finished
    assert hedged.next_stall == HEDGE_DELAY
    hedged.notice_stalls(HEDGE_DELAY)
    assert hedged.next_calls(HEDGE_DELAY) == [PEERS[K]]
    assert not hedged.finished
    hedged.answered(PEERS[K], [])
    assert hedged.finished
    assert hedged.stalled == [PEERS[0]]


def test_stalled_calls_are_awaited_without_a_majority() -> None:
    few = lookup(PEERS[:7])
    few.next_calls(0.0)
    for peer in PEERS[:3]:
        few.answered(peer, [])
    few.notice_stalls(HEDGE_DELAY)
    # With this peer, 4 of 8 have answered. Another half of the same 8 might not overlap with them.
    assert not few.finished
    few.answered(PEERS[3], [])
    assert few.finished


def test_the_only_other_peer_is_awaited() -> None:
    pair = lookup(PEERS[:1])
    pair.next_calls(0.0)
    pair.notice_stalls(HEDGE_DELAY)
    assert not pair.finished
    pair.failed(PEERS[0])
    assert pair.finished


def test_a_late_answer_counts() -> None:
    late = lookup(PEERS[:1])
    late.next_calls(0.0)
    late.notice_stalls(HEDGE_DELAY)
    late.answered(PEERS[0], [PEERS[1]])
    assert late.next_calls(1.0) == [PEERS[1]]


def test_a_failed_peer_is_tried_at_another_address() -> None:
    false, true = Contact(PEERS[0].peer_id, ("/false",)), Contact(PEERS[0].peer_id, ("/true",))
    mended = lookup([false, PEERS[1]])
    mended.next_calls(0.0)
    mended.failed(false)
    mended.answered(PEERS[1], [false])
    assert mended.next_calls(0.0) == []
    again = lookup([false, PEERS[1]])
    again.next_calls(0.0)
    again.failed(false)
    again.answered(PEERS[1], [true])
    assert again.next_calls(0.0) == [true]


def walk(
    path: Lookup, answer: dict[Contact, list[Contact]], silent: Set[Contact] = frozenset()
) -> list[Contact]:
    """Answer all calls except those to `silent` contacts, and return the calls."""
    now, made, waiting = 0.0, [], []
    while not path.finished:
        calls = path.next_calls(now)
        made += calls
        waiting += calls
        prompt = [contact for contact in waiting if contact not in silent]
        for contact in prompt:
            waiting.remove(contact)
            path.answered(contact, answer.get(contact, []))
        if not prompt:
            now = path.next_stall
            assert now < float("inf")
            path.notice_stalls(now)
    return made


def test_known_contacts_are_dealt_to_the_paths_and_each_path_asks_its_nearest() -> None:
    dealt = lookup(PEERS[20:36], wide=False)
    assert dealt.next_calls(0.0) == PEERS[20:24]
    hands = [set(path.known) & {peer.peer_id for peer in PEERS} for path in dealt._paths]
    assert [len(hand) for hand in hands] == [4] * PATHS
    assert len(set().union(*hands)) == 16


def test_few_honest_peers_are_a_majority_although_one_path_invents_contacts() -> None:
    few = lookup(PEERS[20:24])
    made = walk(few, {PEERS[20]: PEERS[:K]}, set(PEERS[:K]))
    assert set(PEERS[20:24]) <= set(made)


def test_a_contact_named_at_a_false_address_is_asked_at_the_true_one_by_another_path() -> None:
    true, false = PEERS[0], Contact(PEERS[0].peer_id, ("/false",))
    blocked = lookup(PEERS[20:36], wide=False)
    answer = {PEERS[20]: [false]} | {peer: [true] for peer in PEERS[21:36]}
    assert true in walk(blocked, answer, {false})


def test_paths_without_a_contact_share_what_the_first_one_names() -> None:
    bootstrap, hostile, honest = PEERS[60], PEERS[40], PEERS[41:48]
    newcomer = lookup([bootstrap])
    answer = {bootstrap: [hostile, *honest], hostile: PEERS[:K]} | dict.fromkeys(PEERS[:K], PEERS[:K])
    assert set(honest[: (PATHS - 1) * K // PATHS]) <= set(walk(newcomer, answer))


def test_a_lookup_goes_on_where_an_earlier_one_ended() -> None:
    first = lookup(PEERS[20:36], wide=False)
    answer = {PEERS[20]: PEERS[:K]} | dict.fromkeys(PEERS[:K], PEERS[:K])
    walk(first, answer | dict.fromkeys((*PEERS[10:18], *PEERS[21:36]), PEERS[10:18]))
    again = Lookup(POINT, PEERS[:K], own_id=ME.peer_id, wide=True, starts=first.ends)
    assert len(set(again.next_calls(0.0)) & set(PEERS[10:18])) >= (PATHS - 1) * K // PATHS - 1


def test_k_answers_end_the_wait_although_half_of_the_nearest_are_dead() -> None:
    dead = set(PEERS[: K // 2 + 1])
    hedged = lookup(PEERS[:20])
    assert set(PEERS[: K + len(dead)]) >= set(walk(hedged, {}, dead)) >= dead


def test_a_path_that_runs_out_of_calls_leaves_the_rest_unasked() -> None:
    """One path alone names contacts, more than it may ask, while the places of the others are free."""
    single = lookup(PEERS[100:101], wide=True)
    answer = {PEERS[100]: PEERS[90:91]} | {PEERS[n]: PEERS[n - 5 : n] for n in range(5, 91, 5)}
    made = walk(single, answer)
    assert len(made) <= MOST_CALLS
