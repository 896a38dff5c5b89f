"""Records of a run under keys that are the same for all of its peers, spread over places once the run is large.

A peer reads and writes in its own place (:mod:`p2pavg.group.places.levels`), so it sees a sample of a large run: the 20
to 80 peers of its place, which their ids have drawn. Every peer of a small run is in the common place and sees all
others. A peer that sees too few in its place publishes in the next larger one as well. :class:`WholeRun` reads all
places.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio

from p2pavg.group.places.levels import FACTOR, Ladder, ladder_for, level_key, place_key
from p2pavg.runs.records.board import BoardRecords
from p2pavg_dht import Published, Record

ENOUGH = 8
"""Other peers in a place that make a sample. With fewer, the next larger place is read as well."""
CLIMB_SECONDS = 2.0
"""A peer waits so long for others in its place. The peers of a run may all have begun just now."""
SLOT = 0
"""Places of these records do not change with time: some records live long, and few readers know all of a run."""
MAX_AT_ONCE = 8
"""Places that :class:`WholeRun` reads at once."""
MAX_WHOLE_LEVEL = 3
"""The last level that :class:`WholeRun` reads: it has 64 places, for six thousand peers."""


class KeyedRecords(BoardRecords, Protocol):
    """The part of :class:`~p2pavg.runs.records.run_records.RunRecords` that this module uses."""

    @property
    def network_size(self) -> int: ...


async def find_sample(
    find: Callable[[bytes], Awaitable[Sequence[Record]]],
    key: bytes,
    peer_id: str,
    network: int,
    *,
    slot: int = 0,
) -> list[Record]:
    """Return records of :data:`ENOUGH` publishers or more, or of all that there are.

    Args:
        find: looks up one key.
        key: of the common place.
        peer_id: this peer, whose places are read.
        network: about how many peers the network has.
        slot: time slot of the places; readiness has one (:func:`p2pavg.group.places.levels.slot_at`).
    """
    ladder = ladder_for(network)
    found: dict[str, Record] = {}
    for level in [ladder.start, *ladder.left]:
        for record in await find(level_key(key, peer_id, slot, level)):
            known = found.get(record.publisher)
            if known is None or known.sequence < record.sequence:
                found[record.publisher] = record
        if len(found) >= ENOUGH:
            break
    return list(found.values())


@dataclass(slots=True)
class _Topic:
    """This peer's places for one key."""

    ladder: Ladder
    keys: list[bytes]
    """Of the places in use, the last one tried last."""
    tried_at: float
    value: bytes = b""
    ttl: float = 0.0
    full: bool = False
    seen: int = 0
    """The most other publishers seen in the last place."""
    turn: int = 0
    changed: Callable[[], None] | None = field(default=None)


class SpreadRecords:
    """Publishes and finds records of a run in this peer's places. In a small run these are the common ones."""

    def __init__(self, records: KeyedRecords, peer_id: str) -> None:
        self._records = records
        self._peer_id = peer_id
        self._topics: dict[bytes, _Topic] = {}

    async def publish(self, key: bytes, value: bytes, *, ttl: float) -> Published:
        """Publish a value in the places of a key, until :meth:`withdraw`; return other peers' records there."""
        topic = self._topic(key)
        topic.value, topic.ttl = value, ttl
        published = await self._publish_in(topic, topic.keys[-1])
        for other in topic.keys[:-1]:
            if not topic.value:  # withdrawn meanwhile
                break
            await self._publish_in(topic, other)
        return await self._step(key, topic) or published

    async def find(self, key: bytes) -> tuple[Record, ...]:
        """Return other peers' records in one of the places of a key; the next call looks in the next one."""
        topic = self._topic(key)
        topic.turn = (topic.turn + 1) % len(topic.keys)
        place = topic.keys[-1 - topic.turn]
        found = await self._records.find(place)
        self._note(topic, place, found)
        stepped = await self._step(key, topic)
        return found if stepped is None else (*found, *stepped.records)

    async def settle(self, key: bytes) -> None:
        """Look for others until this peer is in a place that has enough of them, or in the common one."""
        topic = self._topic(key)
        while topic.keys[-1] != key and topic.seen < ENOUGH and topic.ladder.left:
            await trio.sleep(CLIMB_SECONDS)
            await self.find(key)

    async def withdraw(self, key: bytes) -> None:
        """Withdraw this peer's record from all places of a key."""
        topic = self._topics.get(key)
        if topic is None:
            return
        topic.value = b""
        async with trio.open_nursery() as nursery:
            for place in topic.keys:
                nursery.start_soon(self._records.withdraw, place)

    def held(self, key: bytes) -> tuple[Record, ...]:
        """Return the records in the places of a key that this peer stores, withdrawals included."""
        return tuple(record for place in self._topic(key).keys for record in self._records.held(place))

    def watch(self, key: bytes, changed: Callable[[], None]) -> None:
        """Call ``changed`` when other peers have stored records in the places of a key here."""
        topic = self._topic(key)
        topic.changed = changed
        for place in topic.keys:
            self._records.watch(place, changed)

    def unwatch(self, key: bytes) -> None:
        """End a :meth:`watch`."""
        topic = self._topic(key)
        topic.changed = None
        for place in topic.keys:
            self._records.unwatch(place)

    def _topic(self, key: bytes) -> _Topic:
        topic = self._topics.get(key)
        if topic is None:
            ladder = ladder_for(self._records.network_size)
            places = [level_key(key, self._peer_id, SLOT, ladder.start)]
            topic = self._topics[key] = _Topic(ladder, places, trio.current_time())
        return topic

    async def _publish_in(self, topic: _Topic, place: bytes) -> Published:
        published = await self._records.publish(place, topic.value, ttl=topic.ttl)
        if place == topic.keys[-1]:
            topic.full = len(published.refused) >= published.stored
        self._note(topic, place, published.records)
        return published

    def _note(self, topic: _Topic, place: bytes, found: Sequence[Record]) -> None:
        if place == topic.keys[-1]:
            topic.seen = max(topic.seen, sum(record.publisher != self._peer_id for record in found))

    async def _step(self, key: bytes, topic: _Topic) -> Published | None:
        """Go on to the next place if the last one is full, or has had too few others for a while."""
        waited = trio.current_time() - topic.tried_at
        climbs = topic.seen < ENOUGH and waited >= CLIMB_SECONDS and topic.keys[-1] != key
        if not topic.ladder.left or not (topic.full or climbs):
            return None
        level = topic.ladder.take(full=topic.full)
        place = level_key(key, self._peer_id, SLOT, level)
        topic.keys.append(place)
        topic.tried_at, topic.seen, topic.turn, topic.full = trio.current_time(), 0, 0, False
        if topic.changed is not None:
            self._records.watch(place, topic.changed)
        if topic.value:
            return await self._publish_in(topic, place)
        found = await self._records.find(place)
        self._note(topic, place, found)
        return Published(0, (), found)


class WholeRun:
    """Reads the records of all peers of a run, for a monitor. It publishes nothing."""

    def __init__(self, records: KeyedRecords) -> None:
        self._records = records

    @property
    def pauses(self) -> float:
        """Factor by which looks are rarer than in a small run: a look takes a lookup for each place."""
        return max(1.0, len(self._places(b"")) / MAX_AT_ONCE)

    def _places(self, key: bytes) -> list[bytes]:
        top = min(ladder_for(self._records.network_size).deepest, MAX_WHOLE_LEVEL)
        return [
            place_key(key, SLOT, level, number) for level in range(top + 1) for number in range(FACTOR**level)
        ]

    async def publish(self, key: bytes, value: bytes, *, ttl: float) -> Published:
        """Publish in the common place."""
        return await self._records.publish(key, value, ttl=ttl)

    async def withdraw(self, key: bytes) -> None:
        """Withdraw from the common place."""
        await self._records.withdraw(key)

    async def find(self, key: bytes) -> tuple[Record, ...]:
        """Return the records in all places of a key."""
        found: list[Record] = []
        turns = trio.CapacityLimiter(MAX_AT_ONCE)

        async def read(place: bytes) -> None:
            async with turns:
                found.extend(await self._records.find(place))

        async with trio.open_nursery() as nursery:
            for place in self._places(key):
                nursery.start_soon(read, place)
        return tuple(found)

    def held(self, key: bytes) -> tuple[Record, ...]:
        """Return the records in the common place that this peer stores."""
        return self._records.held(key)

    def watch(self, key: bytes, changed: Callable[[], None]) -> None:
        """Call ``changed`` when other peers have stored records in the common place here."""
        self._records.watch(key, changed)

    def unwatch(self, key: bytes) -> None:
        """End a :meth:`watch`."""
        self._records.unwatch(key)
