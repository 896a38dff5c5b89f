"""Spread records: small runs share one place, peers of large runs read samples, monitors read everything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
import trio
from trio.testing import MockClock

from p2pavg.group.places.levels import FACTOR, LEAST, level_key
from p2pavg.runs.records.spread_records import (
    CLIMB_SECONDS,
    ENOUGH,
    MAX_WHOLE_LEVEL,
    SpreadRecords,
    WholeRun,
    find_sample,
)
from p2pavg_dht import Ed25519Signer, Published, Record, sign_record
from tests.unit.runs.records.records import EPOCH, KEY, ME, record

SMALL, LARGE = 10, LEAST * FACTOR**2
SIGNERS = [Ed25519Signer(number.to_bytes(32, "big")) for number in range(1, 20)]


def place(level: int) -> bytes:
    """Return the key of this peer's place on a level."""
    return level_key(KEY, ME.peer_id, 0, level)


class Network:
    """Records by key, as one peer sees them."""

    def __init__(self, size: int) -> None:
        self.network_size = size
        self.there: dict[bytes, tuple[Record, ...]] = defaultdict(tuple)
        self.published: list[bytes] = []
        self.found: list[bytes] = []
        self.withdrawn: list[bytes] = []
        self.watched: set[bytes] = set()
        self.full: set[bytes] = set()

    async def publish(self, key: bytes, value: bytes, *, ttl: float) -> Published:
        await trio.lowlevel.checkpoint()
        assert value
        assert ttl > 0
        self.published.append(key)
        refused = ("someone: no room under this key",) * 8 if key in self.full else ()
        return Published(1 if refused else 9, refused, self.there[key])

    async def withdraw(self, key: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.withdrawn.append(key)

    async def find(self, key: bytes) -> tuple[Record, ...]:
        await trio.lowlevel.checkpoint()
        self.found.append(key)
        return self.there[key]

    def held(self, key: bytes) -> tuple[Record, ...]:
        return self.there[key]

    def watch(self, key: bytes, changed: Callable[[], None]) -> None:
        self.watched.add(key)

    def unwatch(self, key: bytes) -> None:
        self.watched.remove(key)


def records(count: int) -> tuple[Record, ...]:
    return tuple(record(signer) for signer in SIGNERS[:count])


def publishers(found: Sequence[Record]) -> set[str]:
    return {each.publisher for each in found}


async def test_small_run_uses_the_common_key_only(autojump_clock: MockClock) -> None:
    network = Network(SMALL)
    spread = SpreadRecords(network, ME.peer_id)
    spread.watch(KEY, lambda: None)
    for _ in range(5):
        await spread.publish(KEY, b"v", ttl=15.0)
        await spread.find(KEY)
        await trio.sleep(2 * CLIMB_SECONDS)
    await spread.settle(KEY)
    await spread.withdraw(KEY)
    assert {*network.published, *network.found, *network.withdrawn} | network.watched == {KEY}
    assert len(network.published) == len(network.found) == 5


async def test_peer_of_a_large_run_stays_in_its_place_while_that_has_enough(
    autojump_clock: MockClock,
) -> None:
    network = Network(LARGE)
    network.there[place(2)] = records(ENOUGH)
    spread = SpreadRecords(network, ME.peer_id)
    assert (await spread.publish(KEY, b"v", ttl=15.0)).records == records(ENOUGH)
    await trio.sleep(10 * CLIMB_SECONDS)
    assert await spread.find(KEY) == records(ENOUGH)
    assert {*network.published, *network.found} == {place(2)}


async def test_peer_without_enough_others_climbs_to_the_common_place(autojump_clock: MockClock) -> None:
    network = Network(LARGE)
    network.there[place(0)] = records(1)
    spread = SpreadRecords(network, ME.peer_id)
    spread.watch(KEY, lambda: None)
    await spread.publish(KEY, b"v", ttl=15.0)
    assert network.published == [place(2)]
    found: list[Record] = []
    for _ in range(4):
        await trio.sleep(CLIMB_SECONDS)
        found += await spread.find(KEY)
    assert network.published == [place(2), place(1), place(0)]
    assert publishers(found) == publishers(records(1))
    assert network.watched == {place(0), place(1), place(2)}
    assert spread.held(KEY) == records(1)
    network.published.clear()
    await spread.publish(KEY, b"w", ttl=15.0)
    assert set(network.published) == {place(0), place(1), place(2)}
    await spread.withdraw(KEY)
    assert set(network.withdrawn) == {place(0), place(1), place(2)}
    spread.unwatch(KEY)
    assert not network.watched


async def test_own_record_is_no_other_peer(autojump_clock: MockClock) -> None:
    network = Network(LARGE)
    network.there[place(2)] = (*records(ENOUGH - 1), record(ME))
    spread = SpreadRecords(network, ME.peer_id)
    await spread.publish(KEY, b"v", ttl=15.0)
    await trio.sleep(CLIMB_SECONDS)
    await spread.find(KEY)
    assert network.published == [place(2), place(1)]


async def test_reader_climbs_without_publishing(autojump_clock: MockClock) -> None:
    network = Network(LARGE)
    network.there[place(1)] = records(ENOUGH)
    spread = SpreadRecords(network, ME.peer_id)
    await spread.settle(KEY)
    assert publishers(await spread.find(KEY)) | publishers(await spread.find(KEY)) == publishers(
        records(ENOUGH)
    )
    assert network.published == []
    assert place(0) not in network.found


async def test_settling_ends_in_the_common_place(autojump_clock: MockClock) -> None:
    network = Network(LARGE)
    spread = SpreadRecords(network, ME.peer_id)
    await spread.publish(KEY, b"v", ttl=15.0)
    await spread.settle(KEY)
    assert network.published == [place(2), place(1), place(0)]


async def test_full_place_sends_a_peer_on_at_once(autojump_clock: MockClock) -> None:
    network = Network(LARGE)
    network.full = {place(2)}
    network.there[place(2)] = records(ENOUGH)
    network.there[place(1)] = records(2)
    published = await SpreadRecords(network, ME.peer_id).publish(KEY, b"v", ttl=15.0)
    assert network.published == [place(2), place(1)]
    assert published.records == records(2)
    assert trio.current_time() == 0.0


@pytest.mark.parametrize("level", [0, 2])
async def test_sample_has_enough_publishers_or_all(level: int) -> None:
    network = Network(LARGE)
    network.there[place(level)] = records(ENOUGH)
    found = await find_sample(network.find, KEY, ME.peer_id, LARGE)
    assert publishers(found) == publishers(records(ENOUGH))
    assert len(network.found) == 3 - level


async def test_sample_has_the_newest_record_of_a_publisher() -> None:
    network = Network(LARGE)
    newer = sign_record(SIGNERS[0], key=KEY, sequence=2, expiration_time=EPOCH + 15, value=b"new")
    network.there[place(2)], network.there[place(0)] = (newer,), records(1)
    assert await find_sample(network.find, KEY, ME.peer_id, LARGE) == [newer]


async def test_monitor_reads_every_place() -> None:
    network = Network(LARGE)
    for number, signer in enumerate(SIGNERS):
        key = level_key(KEY, signer.peer_id, 0, number % 3)
        network.there[key] = (*network.there[key], record(signer))
    assert publishers(await WholeRun(network).find(KEY)) == publishers(records(len(SIGNERS)))


async def test_monitor_of_a_small_run_reads_the_common_place() -> None:
    network = Network(SMALL)
    whole = WholeRun(network)
    await whole.find(KEY)
    assert network.found == [KEY]
    assert whole.pauses == 1.0


def test_places_that_a_monitor_reads_are_bounded() -> None:
    most = sum(FACTOR**level for level in range(MAX_WHOLE_LEVEL + 1))
    assert WholeRun(Network(10**9)).pauses <= most / 8
