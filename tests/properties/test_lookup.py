"""Properties of a record lookup over disjoint paths, whatever its contacts answer."""

from collections import Counter
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from p2pavg_dht import Contact, Ed25519Signer
from p2pavg_dht.lookup import MOST_CALLS, PATHS, Lookup
from p2pavg_dht.routing import K, nearest

POINT = 1 << 200
ME, *PEERS = [Contact(Ed25519Signer(n.to_bytes(32, "big")).peer_id, ("/a",)) for n in range(1, 122)]
HONEST, INVENTED = nearest(PEERS[:60], POINT, 60), nearest(PEERS[60:], POINT, 60)

# What a contact does: it answers and names contacts (with a false address or not), fails, or stalls for ever.
named = st.lists(st.tuples(st.integers(0, len(PEERS) - 1), st.booleans()), max_size=12)
behaviour = st.one_of(named, st.just("fails"), st.just("stalls"))
behaviours = st.lists(behaviour, min_size=1, max_size=40)


def contact_named(number: int, false: bool) -> Contact:
    return Contact(PEERS[number].peer_id, ("/false",)) if false else PEERS[number]


@given(
    st.sets(st.integers(0, len(PEERS) - 1), max_size=20),
    behaviours,
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_a_lookup_asks_each_contact_once_and_ends_in_a_bounded_number_of_calls(
    seeds: set[int], answers: list[list[tuple[int, bool]] | str], wide: bool, patient: bool, dice: object
) -> None:
    known = [PEERS[number] for number in seeds]
    lookup = Lookup(POINT, known, own_id=ME.peer_id, wide=wide, patient=patient)
    asked: list[Contact] = []
    answered: list[str] = []
    under_way: list[tuple[Contact, list[tuple[int, bool]] | str]] = []
    now = 0.0
    for _ in range(4 * MOST_CALLS):
        for contact in lookup.next_calls(now):
            assert contact.peer_id not in answered
            asked.append(contact)
            under_way.append((contact, answers[len(asked) % len(answers)]))
        prompt = [call for call in under_way if call[1] != "stalls"]
        if lookup.finished:
            break
        if prompt:
            contact, what = dice.choice(prompt)  # type: ignore[attr-defined]
            under_way.remove((contact, what))
            if what == "fails":
                lookup.failed(contact)
            else:
                answered.append(contact.peer_id)
                lookup.answered(contact, [contact_named(*one) for one in what])
        elif now < lookup.next_stall < float("inf"):
            now = lookup.next_stall
            lookup.notice_stalls(now)
        else:  # the timeout of a call
            lookup.failed(under_way.pop(0)[0])
    assert lookup.finished
    assert len(asked) <= MOST_CALLS
    assert all(count == 1 for count in Counter(asked).values())
    assert all(count == 1 for count in Counter(answered).values())


def shares_asked(liar: Contact, lie: Callable[[Contact], list[Contact] | None], *, patient: bool) -> set[str]:
    """Return the peers that the paths without `liar` ask while the honest contacts are still on their way.

    An honest contact names the next nearer ones. `lie` says what `liar` and invented contacts name, or None if they
    never answer.
    """
    seeds = HONEST[-PATHS:]
    lookup = Lookup(POINT, seeds, own_id=ME.peer_id, wide=False, patient=patient)
    asked: set[str] = set()
    now = 0.0
    waiting: list[Contact] = []
    while not lookup.finished:
        waiting += lookup.next_calls(now)
        prompt = [c for c in waiting if (c in HONEST and c != liar) or lie(c) is not None]
        if not prompt and now < lookup.next_stall < float("inf"):
            now = lookup.next_stall
            lookup.notice_stalls(now)
            continue
        contact = (prompt or waiting)[0]
        waiting.remove(contact)
        if contact == liar or contact not in HONEST:
            names = lie(contact)
            if names is None:
                lookup.failed(contact)
            else:
                lookup.answered(contact, names)
            continue
        asked.add(contact.peer_id)
        place = HONEST.index(contact)
        lookup.answered(contact, HONEST[max(0, place // 2 - K) : max(0, place // 2 - K) + K])
    return asked


FALSE = [Contact(contact.peer_id, ("/false",)) for contact in HONEST[:K]]


@given(
    st.integers(0, PATHS - 1),
    st.lists(st.sampled_from([*INVENTED, *FALSE]), max_size=K),
    st.booleans(),
    st.booleans(),
)
def test_contacts_that_one_path_invents_keep_no_other_path_from_the_nearest(
    number: int, lies: list[Contact], dead: bool, patient: bool
) -> None:
    liar = HONEST[-1 - number]
    asked = shares_asked(
        liar,
        lambda contact: None if contact in FALSE or (dead and contact != liar) else lies,
        patient=patient,
    )
    assert {contact.peer_id for contact in HONEST[: K - K // PATHS]} <= asked
