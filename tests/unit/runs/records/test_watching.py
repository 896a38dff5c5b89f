"""A record node notifies watchers as soon as a record is stored."""

from __future__ import annotations

from typing import Any

import trio

from p2pavg_dht import Contact, Ed25519Signer, Record, RecordNode, sign_record
from p2pavg_dht.messages import Find, Locate, LocateAnswer, Store, decode_answer, decode_request, encode

NOW = 1_700_000_000.0
KEY, OTHER_KEY = b"k" * 32, b"o" * 32
ME, ALICE, BOB = (Ed25519Signer(bytes([number]) * 32) for number in range(3))


class NoPeers:
    """An Rpc without other peers, which records its calls."""

    addresses = ()

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def call(self, contact: Contact, request: bytes) -> bytes:
        self.asked.append(decode_request(request))
        await trio.lowlevel.checkpoint()
        return encode(LocateAnswer(()))


class Watched:
    """A node and its notifications."""

    def __init__(self) -> None:
        self.rpc = NoPeers()
        self.now = NOW
        self.told: list[tuple[Record, ...]] = []
        self.node = RecordNode(signer=ME, rpc=self.rpc, wall_clock=lambda: self.now)

    def note(self) -> None:
        self.told.append(self.node.held(KEY))

    async def ask(self, request: Store | Find | Locate, sender: Ed25519Signer = ALICE) -> Any:
        return decode_answer(self.node.answer(sender.peer_id, encode(request)))

    async def store(self, *records: Record) -> None:
        await self.ask(Store((), records))


def record(
    signer: Ed25519Signer = ALICE,
    value: bytes = b"v",
    *,
    key: bytes = KEY,
    sequence: int = 1,
    ttl: float = 60.0,
) -> Record:
    return sign_record(signer, key=key, sequence=sequence, expiration_time=NOW + ttl, value=value)


async def test_watcher_is_called_after_a_record_is_stored() -> None:
    watched = Watched()
    watched.node.watch(KEY, watched.note)
    await watched.store(record())
    assert watched.told == [(record(),)]
    newer, relayed = record(value=b"w", sequence=2), record(BOB)
    await watched.store(newer)
    await watched.store(relayed)
    assert [set(held) for held in watched.told[1:]] == [{newer}, {newer, relayed}]


async def test_watcher_is_called_once_per_message_and_key() -> None:
    watched = Watched()
    others: list[None] = []
    watched.node.watch(KEY, watched.note)
    watched.node.watch(OTHER_KEY, lambda: others.append(None))
    await watched.store(record(), record(BOB))
    assert (len(watched.told), len(others)) == (1, 0)
    await watched.store(record(key=OTHER_KEY))
    assert (len(watched.told), len(others)) == (1, 1)
    await watched.store(record(BOB, key=OTHER_KEY), record(sequence=2))
    assert (len(watched.told), len(others)) == (2, 2)


async def test_watcher_is_called_for_others_records_only() -> None:
    watched = Watched()
    watched.node.watch(KEY, watched.note)
    await watched.node.publish(KEY, b"mine", ttl=60.0)
    await watched.node.withdraw(KEY)
    await watched.ask(Find((), KEY))
    await watched.ask(Locate((), KEY))
    assert watched.told == []


async def test_unwatched_key_calls_no_watcher() -> None:
    watched = Watched()
    watched.node.unwatch(KEY)
    watched.node.watch(KEY, watched.note)
    watched.node.unwatch(KEY)
    watched.node.unwatch(KEY)
    await watched.store(record())
    assert watched.told == []
    assert watched.node.held(KEY) == (record(),)


async def test_last_watcher_of_a_key_is_called() -> None:
    watched = Watched()
    first: list[None] = []
    watched.node.watch(KEY, lambda: first.append(None))
    watched.node.watch(KEY, watched.note)
    await watched.store(record())
    assert (len(first), len(watched.told)) == (0, 1)


async def test_held_records_need_no_call() -> None:
    watched = Watched()
    await watched.node.join([Contact(BOB.peer_id, ("/bob",))])
    watched.rpc.asked.clear()
    short, tombstone = record(ttl=5.0), record(BOB, b"")
    await watched.store(short, tombstone, record(key=OTHER_KEY))
    assert set(watched.node.held(KEY)) == {short, tombstone}
    watched.now += 5.0
    assert watched.node.held(KEY) == (tombstone,)
    assert watched.rpc.asked == []


async def test_own_records_are_held_too() -> None:
    watched = Watched()
    await watched.node.publish(KEY, b"mine", ttl=60.0)
    assert [(each.publisher, each.value) for each in watched.node.held(KEY)] == [(ME.peer_id, b"mine")]
