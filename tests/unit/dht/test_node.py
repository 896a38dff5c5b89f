"""One node against scripted peers: the records that it accepts or refuses, and the requests that it answers."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from p2pavg_dht import (
    RPC_TIMEOUT,
    Contact,
    Ed25519Signer,
    Limits,
    MessageError,
    Record,
    RecordNode,
    Refusal,
    RpcError,
    sign_record,
)
from p2pavg_dht.messages import (
    Find,
    Found,
    Locate,
    LocateAnswer,
    Store,
    Stored,
    decode_answer,
    decode_request,
    encode,
    marks_of,
    unmarked,
)
from p2pavg_dht.node import WITHDRAW_TIMEOUT
from p2pavg_dht.record import MAX_VALUE_BYTES
from p2pavg_dht.routing import K, key_point, peer_point
from p2pavg_dht.storage import UNCHECKED
from p2pavg_dht.upkeep import FIRST_REFRESH

NOW = 1_700_000_000.0
KEY = b"k" * 32
ME, ALICE, BOB, CAROL = (Ed25519Signer(bytes([number]) * 32) for number in range(4))
*NEAREST, FAR = sorted(
    (Ed25519Signer(bytes([number]) * 32) for number in range(10, 11 + K)),
    key=lambda signer: key_point(KEY) ^ peer_point(signer.peer_id),
)
Answering = Callable[[Contact, bytes], Awaitable[bytes]]


class Script:
    """An Rpc with scripted answers that records its requests."""

    addresses = ("/a",) * 20

    def __init__(self, answering: Answering) -> None:
        self.answering = answering
        self.asked: list[tuple[Contact, Any]] = []

    async def call(self, contact: Contact, request: bytes) -> bytes:
        self.asked.append((contact, decode_request(request)))
        await trio.lowlevel.checkpoint()
        return await self.answering(contact, request)


def record(
    signer: Ed25519Signer = ALICE, *, key: bytes = KEY, ttl: float = 60.0, value: bytes = b"v"
) -> Record:
    return sign_record(signer, key=key, sequence=1, expiration_time=NOW + ttl, value=value)


def contact(signer: Ed25519Signer) -> Contact:
    return Contact(signer.peer_id, ("/ip4/127.0.0.1/tcp/1",))


async def honest(_: Contact, request: bytes) -> bytes:
    match decode_request(request):
        case Store(_, records):
            return encode(Stored((), (), ("",) * len(records), 0))
        case Find():
            return encode(Found((), ()))
        case _:
            return encode(LocateAnswer(()))


def saying(*answers: Any) -> Answering:
    async def answer(_: Contact, request: bytes) -> bytes:
        if isinstance(decode_request(request), Locate):
            return encode(LocateAnswer(()))
        return b"".join(each if isinstance(each, bytes) else encode(each) for each in answers)

    return answer


def node(answering: Answering = honest, limits: Limits | None = None) -> tuple[RecordNode, Script]:
    script = Script(answering)
    made = RecordNode(signer=ME, rpc=script, limits=limits, wall_clock=lambda: NOW)
    return made, script


async def ask(asked: RecordNode, request: Store | Find | Locate, sender: Ed25519Signer = ALICE) -> Any:
    return decode_answer(asked.answer(sender.peer_id, encode(request)))


@pytest.mark.parametrize(
    ("key", "value", "ttl", "reason"),
    [
        (b"short", b"v", 60.0, "a key is 32 bytes"),
        (KEY, b"", 60.0, "1 to 4864 bytes, not 0"),
        (KEY, bytes(4865), 60.0, "1 to 4864 bytes, not 4865"),
        (KEY, b"v", 0.0, "ttl must be positive"),
        (KEY, b"v", 3601.0, "at most 3600"),
        (KEY, b"v", float("nan"), "ttl must be positive"),
    ],
)
async def test_a_bad_argument_of_publish_is_named(key: bytes, value: bytes, ttl: float, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        await node()[0].publish(key, value, ttl=ttl)


async def test_keys_have_32_bytes_everywhere() -> None:
    alone, _ = node()
    with pytest.raises(ValueError, match="32 bytes"):
        await alone.find(b"short")
    with pytest.raises(ValueError, match="32 bytes"):
        await alone.withdraw(b"short")


async def test_requests_carry_the_first_sixteen_addresses() -> None:
    joined, script = node()
    assert await joined.join([contact(ALICE)]) == 1
    assert script.asked[0][1].addresses == ("/a",) * 16


async def test_joining_through_itself_or_no_contact_finds_no_peer() -> None:
    alone, script = node()
    assert await alone.join([contact(ME)]) == 0
    assert script.asked == []


async def test_a_store_is_answered_with_the_records_held() -> None:
    asked, _ = node()
    assert await ask(asked, Store((), (record(BOB),)), BOB) == Stored((), (record(BOB),), ("",), 0)
    answer = await ask(asked, Store((), (record(ALICE),)))
    assert set(answer.records) == {record(ALICE), record(BOB)}
    assert set((await ask(asked, Find((), KEY))).records) == {record(ALICE), record(BOB)}


async def test_places_are_kept_before_a_record_is_published_and_after_it_is_withdrawn() -> None:
    asked, _ = node(limits=Limits(publishers_per_key=1))
    await ask(asked, Store((), (record(ALICE),)))
    assert (await ask(asked, Store((), (record(BOB),)), BOB)).outcomes == (Refusal.KEY_FULL,)
    asked.keep_places(KEY, [contact(BOB)])
    assert (await ask(asked, Store((), (record(BOB),)), BOB)).outcomes == ("",)
    await asked.publish(KEY, b"mine", ttl=60.0, also=[contact(BOB)])
    await asked.withdraw(KEY)
    newer = sign_record(BOB, key=KEY, sequence=2, expiration_time=NOW + 60.0, value=b"v")
    assert (await ask(asked, Store((), (newer,)), BOB)).outcomes == ("",)
    assert (await ask(asked, Store((), (record(CAROL),)), CAROL)).outcomes == (Refusal.KEY_FULL,)
    asked.keep_places(KEY, [contact(CAROL)])
    assert (await ask(asked, Store((), (record(CAROL),)), CAROL)).outcomes == ("",)
    asked.keep_places(KEY, ())
    assert asked.held(KEY)
    dave = Ed25519Signer(b"d" * 32)
    assert (await ask(asked, Store((), (record(dave),)), dave)).outcomes == (Refusal.KEY_FULL,)


async def test_records_after_a_forged_one_are_not_checked() -> None:
    asked, _ = node()
    forged = replace(record(BOB), value=b"forged")
    answer = await ask(asked, Store((), (record(), forged, record(CAROL))))
    assert answer.outcomes == ("", Refusal.FORGED, UNCHECKED)
    assert answer.records == (record(),)


async def test_an_answer_for_a_full_key_fits_into_a_message() -> None:
    asked, _ = node(limits=Limits(relayed_per_sender=300))
    crowd = [Ed25519Signer(number.to_bytes(32, "big")) for number in range(1, 251)]
    for signer in crowd:
        await ask(asked, Store((), (record(signer, value=bytes(MAX_VALUE_BYTES)),)), signer)
    encoded = asked.answer(ALICE.peer_id, encode(Find((), KEY)))
    assert len(encoded) > 900_000
    found = decode_answer(encoded)
    assert isinstance(found, Found)
    assert len(found.records) > 190


async def test_a_sender_that_has_no_peer_id_is_malformed() -> None:
    with pytest.raises(MessageError, match="sender"):
        node()[0].answer("nobody", encode(Find((), KEY)))


async def test_a_caller_becomes_known_when_it_answers_a_call() -> None:
    asked, script = node()
    async with trio.open_nursery() as nursery:
        await nursery.start(asked.run)
        await ask(asked, Find(("/here",), KEY), ALICE)
        assert not asked.contacts
        await trio.testing.wait_all_tasks_blocked()
        assert asked.contacts == (Contact(ALICE.peer_id, ("/here",)),)
        assert [type(request) for _, request in script.asked] == [Locate]
        nursery.cancel_scope.cancel()


async def test_a_caller_that_does_not_answer_stays_unknown() -> None:
    async def refusing(_: Contact, __: bytes) -> bytes:
        raise RpcError("refused")

    asked, script = node(refusing)
    async with trio.open_nursery() as nursery:
        await nursery.start(asked.run)
        for _ in range(5):
            await ask(asked, Find(("/here",), KEY), ALICE)
            await trio.testing.wait_all_tasks_blocked()
        assert asked.contacts == ()
        assert len(script.asked) == 1
        nursery.cancel_scope.cancel()


async def test_a_known_peer_may_announce_new_addresses() -> None:
    asked, _ = node()
    await asked.join([contact(ALICE)])
    await ask(asked, Find(("/moved",), KEY), ALICE)
    assert asked.contacts == (Contact(ALICE.peer_id, ("/moved",)),)


async def test_answers_name_reachable_peers_other_than_the_caller() -> None:
    asked, _ = node()
    await asked.join([contact(ALICE), contact(BOB), Contact(CAROL.peer_id, ())])
    assert len(asked.contacts) == 3
    assert await ask(asked, Locate((), KEY), BOB) == LocateAnswer((contact(ALICE),))
    assert set((await ask(asked, Find((), KEY), CAROL)).closer) == {contact(ALICE), contact(BOB)}


async def test_a_late_join_refreshes_the_table_soon(autojump_clock: MockClock) -> None:
    late, script = node()
    async with trio.open_nursery() as nursery:
        await nursery.start(late.run)
        # Long after its start, the node refreshes its table only every five minutes.
        begin = autojump_clock.current_time()
        await trio.sleep_until(begin + 1000.0)
        await late.join([contact(ALICE)])
        script.asked.clear()
        await trio.sleep(FIRST_REFRESH + 0.1)
        assert [type(request) for _, request in script.asked] == [Locate]
        nursery.cancel_scope.cancel()


async def test_a_call_that_a_lookup_no_longer_waits_for_goes_on_and_its_answer_counts(
    autojump_clock: MockClock,
) -> None:
    """A peer on a busy machine answers after a second. A call that is cancelled costs its stream."""
    slow = BOB

    async def answer(whom: Contact, request: bytes) -> bytes:
        if whom.peer_id == slow.peer_id and not isinstance(decode_request(request), Locate):
            await trio.sleep(1.0)
            answered.append(whom)
        return await honest(whom, request)

    answered: list[Contact] = []
    asking, _ = node(answer)
    async with trio.open_nursery() as nursery:
        await nursery.start(asking.run)
        await asking.join([contact(ALICE), contact(slow), contact(CAROL)])
        began = trio.current_time()
        await asking.find(KEY)
        assert trio.current_time() - began < 1.0
        assert contact(slow) not in asking.contacts
        await trio.sleep(1.0)
        assert answered == [contact(slow)]
        assert contact(slow) in asking.contacts
        nursery.cancel_scope.cancel()


async def test_a_node_runs_once() -> None:
    once, _ = node()
    async with trio.open_nursery() as nursery:
        await nursery.start(once.run)
        with pytest.raises(RuntimeError, match="runs already"):
            await once.run()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "answering",
    [
        saying(b"garbage"),
        saying(b""),
        saying(LocateAnswer(())),
        saying(Find((), KEY)),
        saying(Found((), (record(BOB, key=b"x" * 32),))),
        saying(Found((), (replace(record(BOB), value=b"forged"),))),
        saying(Found((), (record(BOB), replace(record(CAROL), value=b"forged")))),
        saying(Found((), ()), b"more"),
    ],
)
async def test_a_peer_with_malformed_answers_is_not_asked_again(answering: Answering) -> None:
    deceived, script = node(answering)
    await deceived.join([contact(ALICE)])
    assert await deceived.find(KEY) == ()
    assert deceived.contacts == ()
    asked = len(script.asked)
    assert await deceived.find(KEY) == ()
    assert len(script.asked) == asked


async def test_a_store_answered_for_another_number_of_records_is_not_counted() -> None:
    deceived, _ = node(saying(Stored((), (), ("", ""), 0)))
    await deceived.join([contact(ALICE)])
    assert (await deceived.publish(KEY, b"v", ttl=60.0)).stored == 1


async def test_expired_and_future_records_are_left_out() -> None:
    far = record(BOB, ttl=1e6)
    told, _ = node(saying(Found((), (record(ALICE), far, record(CAROL, ttl=-5.0)))))
    await told.join([contact(ALICE)])
    assert await told.find(KEY) == (record(ALICE),)
    # A peer whose clock differs is not treated as malicious.
    assert told.contacts == (contact(ALICE),)


def keeping(*kept: Record) -> Answering:
    """Answer as a peer that keeps these records."""
    store = list(kept)

    async def answer(_: Contact, request: bytes) -> bytes:
        match decode_request(request):
            case Store(_, records, known, brief):
                return encode(Stored((), () if brief else unmarked(store, known), ("",) * len(records), 0))
            case Find(_, _, known):
                return encode(Found((), unmarked(store, known)))
        return encode(LocateAnswer(()))

    return answer


async def test_records_that_are_known_are_not_sent_again() -> None:
    alice, bob = record(ALICE), record(BOB)
    asking, script = node(keeping(alice, bob))
    await asking.join([contact(ALICE)])
    script.asked.clear()
    assert set(await asking.find(KEY)) == {alice, bob}
    assert set(await asking.find(KEY)) == {alice, bob}
    [first, second] = [request for _, request in script.asked]
    assert first.known == b""
    assert unmarked([alice, bob], second.known) == ()
    published = await asking.publish(KEY, b"mine", ttl=60.0)
    assert set(published.records) == {alice, bob}
    assert unmarked([alice, bob], script.asked[-1][1].known) == ()


async def test_a_newer_record_replaces_a_known_one() -> None:
    old = record(ALICE)
    newer = sign_record(ALICE, key=KEY, sequence=2, expiration_time=NOW + 60.0, value=b"new")
    withdrawn = sign_record(ALICE, key=KEY, sequence=3, expiration_time=NOW + 60.0, value=b"")
    asking, script = node(keeping(old))
    await asking.join([contact(BOB)])
    assert await asking.find(KEY) == (old,)
    script.answering = keeping(newer)
    assert await asking.find(KEY) == (newer,)
    script.answering = keeping(withdrawn)
    assert await asking.find(KEY) == ()
    script.answering = keeping()
    assert await asking.find(KEY) == ()


async def test_a_known_record_expires() -> None:
    clock = [NOW]
    script = Script(keeping(record(ALICE)))
    asking = RecordNode(signer=ME, rpc=script, wall_clock=lambda: clock[0])
    await asking.join([contact(BOB)])
    assert await asking.find(KEY) == (record(ALICE),)
    clock[0] += 60.0
    script.answering = keeping()
    assert await asking.find(KEY) == ()


async def test_contacts_beside_a_lookup_are_asked_for_what_it_has_not_found() -> None:
    alice, bob = record(ALICE), record(BOB)
    there = {contact(FAR): keeping(alice), **dict.fromkeys(map(contact, NEAREST), keeping(bob))}
    asking, script = node(lambda to, request: there[to](to, request))
    await asking.join([contact(signer) for signer in NEAREST])
    assert set(await asking.find(KEY, [contact(FAR)])) == {alice, bob}
    (to, beside) = script.asked[-1]
    assert to == contact(FAR)
    assert beside.brief
    assert unmarked([bob], beside.known) == ()


async def test_contacts_beside_a_lookup_are_told_briefly() -> None:
    telling, script = node()
    await telling.join([contact(signer) for signer in NEAREST])
    await telling.publish(KEY, b"mine", ttl=60.0, also=[contact(FAR)])
    [told] = [request for to, request in script.asked if to == contact(FAR)]
    assert told.brief
    assert not any(
        request.brief for to, request in script.asked if to != contact(FAR) and isinstance(request, Store)
    )


async def test_a_brief_request_is_answered_without_contacts() -> None:
    asked, _ = node()
    await asked.join([contact(BOB)])
    assert await ask(asked, Store((), (record(BOB),), b"", True), BOB) == Stored((), (), ("",), 0)
    assert await ask(asked, Find((), KEY, b"", True)) == Found((), (record(BOB),))
    assert await ask(asked, Find((), KEY, marks_of([record(BOB)]))) == Found((contact(BOB),), ())
    stored = await ask(asked, Store((), (record(CAROL),), marks_of([record(BOB)])), CAROL)
    assert stored.records == (record(CAROL),)


async def test_refusals_name_the_peer_and_the_reason() -> None:
    refused, _ = node(saying(Stored((), (), ("no room",), 0)))
    await refused.join([contact(ALICE)])
    published = await refused.publish(KEY, b"v", ttl=60.0)
    assert published.stored == 1
    assert published.refused == (f"{ALICE.peer_id}: no room",)


async def test_a_hanging_call_ends_at_its_timeout(autojump_clock: MockClock) -> None:
    async def hanging(_: Contact, __: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    waiting, _ = node(hanging)
    begin = autojump_clock.current_time()
    assert await waiting.join([contact(ALICE)]) == 0
    assert autojump_clock.current_time() - begin == pytest.approx(RPC_TIMEOUT)


async def test_withdrawing_everything_is_bounded_in_time(autojump_clock: MockClock) -> None:
    hang = False

    async def later_hanging(to: Contact, request: bytes) -> bytes:
        if hang:
            await trio.sleep_forever()
        return await honest(to, request)

    leaving, _ = node(later_hanging)
    await leaving.join([contact(ALICE)])
    for number in range(20):
        await leaving.publish(bytes([number]) * 32, b"v", ttl=60.0)
    hang = True
    begin = autojump_clock.current_time()
    await leaving.withdraw_all()
    assert autojump_clock.current_time() - begin <= WITHDRAW_TIMEOUT + 0.01


async def test_an_error_other_than_the_networks_is_raised() -> None:
    async def broken(_: Contact, __: bytes) -> bytes:
        raise ZeroDivisionError

    owner, _ = node(broken)
    with pytest.RaisesGroup(ZeroDivisionError):
        await owner.join([contact(ALICE)])


async def test_renewals_and_withdrawals_ask_for_no_answer(autojump_clock: MockClock) -> None:
    # Each publisher of a large board would read what all others have renewed, eight times over.
    renewing, script = node(keeping(record(ALICE)))
    async with trio.open_nursery() as nursery:
        await nursery.start(renewing.run)
        await renewing.join([contact(ALICE)])
        await renewing.publish(KEY, b"v", ttl=60.0)
        script.asked.clear()
        await renewing._renew(KEY)
        await renewing.withdraw(KEY)
        nursery.cancel_scope.cancel()
    stores = [request for _, request in script.asked if isinstance(request, Store)]
    assert [request.brief for request in stores] == [True, True]
    assert [request.records[0].withdrawn for request in stores] == [False, True]
    assert all(not request.known for request in stores)


@pytest.mark.parametrize("withdraws", [False, True])
async def test_refused_renewal_asks_for_the_newer_record_and_outranks_it(withdraws: bool) -> None:
    newer = sign_record(ME, key=KEY, sequence=2**62, expiration_time=NOW + 100.0, value=b"earlier process")
    told: list[Store] = []

    async def answer(_: Contact, request: bytes) -> bytes:
        match decode_request(request):
            case Store(_, records, _, brief) as store:
                told.append(store)
                held = max([newer, *records], key=lambda each: each.rank)
                outcome = "" if held in records else "replayed: a newer record of this publisher is held"
                return encode(Stored((), () if brief else (held,), (outcome,), 0))
            case _:
                return encode(LocateAnswer(()))

    restarted, _ = node(answer)
    await restarted.join([contact(ALICE)])
    restarted._publications.announce(KEY, b"v", ttl=60.0, now=NOW)
    await (restarted.withdraw(KEY) if withdraws else restarted._renew(KEY))
    assert [request.brief for request in told] == [True, False, False]
    assert told[-1].records[0].rank > newer.rank
    assert told[-1].records[0].withdrawn is withdraws


async def test_a_publish_that_outranks_an_earlier_process_returns_what_came_of_the_second_try() -> None:
    newer = sign_record(ME, key=KEY, sequence=2**62, expiration_time=NOW + 100.0, value=b"earlier process")

    async def answer(_: Contact, request: bytes) -> bytes:
        match decode_request(request):
            case Store(_, records):
                refusal = "" if records[0].rank > newer.rank else "replayed"
                return encode(Stored((), (newer,) if refusal else (), (refusal,), 0))
            case _:
                return encode(LocateAnswer(()))

    restarted, _ = node(answer)
    await restarted.join([contact(ALICE)])
    published = await restarted.publish(KEY, b"v", ttl=60.0)
    assert (published.stored, published.refused) == (2, ())
