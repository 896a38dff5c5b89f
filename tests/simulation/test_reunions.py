"""Rounds of peers that have finished one together: their leader announces itself, and the others need not.

Records of groups that stand, and of the last round, are still read meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

import p2pavg
from p2pavg.group.candidate import Candidate
from p2pavg.group.places.levels import Ladder
from p2pavg.matchmaking.attempt_runner import AttemptRunner
from p2pavg.matchmaking.messages import JoinRequest
from p2pavg.matchmaking.timing import REUNION_SECONDS
from p2pavg.peer.peer import Peer
from p2pavg.runs.records.run_records import RunRecords
from p2pavg.testing import MemoryNetwork, run_peers, simulated_peers
from p2pavg.testing.simulation import simulated_signer
from p2pavg_dht.routing import K
from tests.simulation.swarm import LAN, config, successes, values

PEERS = 4
PAUSE = 5.0
"""Seconds from the beginning of one round to that of the next one."""


class Announcements:
    """The records by which peers announce themselves."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        """By the number of the round."""
        self.keys = set[bytes]()


@pytest.fixture
def announcements(monkeypatch: pytest.MonkeyPatch) -> Announcements:
    found = Announcements()
    original = AttemptRunner._publish_on

    async def publish(runner: AttemptRunner, level: int) -> bytes:
        found.counts[int(trio.current_time() / PAUSE)] += 1
        key = await original(runner, level)
        found.keys.add(key)
        return key

    monkeypatch.setattr(AttemptRunner, "_publish_on", publish)
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Candidate, Candidate]]:
    """Return who has asked whom."""
    found: list[tuple[Candidate, Candidate]] = []
    original = AttemptRunner._ask

    async def ask(runner: AttemptRunner, candidate: Candidate, message: JoinRequest) -> None:
        found.append((message.me, candidate))
        await original(runner, candidate, message)

    monkeypatch.setattr(AttemptRunner, "_ask", ask)
    return found


Results = list[list[p2pavg.RoundResult]]
"""By the number of the round."""


async def live(
    peer: Peer, results: Results, rounds: Iterable[int], late: float = 0.0, **changes: object
) -> None:
    """Take part in rounds, and keep the result of each."""
    async with peer.averager(config(group_size=PEERS, **changes)) as averager:
        for number in rounds:
            await trio.sleep_until(PAUSE * number + late)
            averager.clear()
            averager.accumulate([values(number)])
            results[number].append(await averager.step(wait=None))


def members_of(results: Iterable[p2pavg.RoundResult]) -> set[frozenset[str]]:
    return {frozenset(result.peers) for result in successes(dict(enumerate(results)))}


@asynccontextmanager
async def peers_and_nursery(count: int = PEERS) -> AsyncIterator[tuple[list[Peer], trio.Nursery]]:
    """Open peers, and a nursery for their rounds."""
    async with simulated_peers(MemoryNetwork(latency=LAN), count) as peers, trio.open_nursery() as nursery:
        yield peers, nursery


async def test_only_the_leader_of_the_last_group_announces_itself(announcements: Announcements) -> None:
    results: Results = [[] for _ in range(5)]
    async with peers_and_nursery() as (peers, nursery):
        for peer in peers:
            nursery.start_soon(live, peer, results, range(1, 5))
    assert all(len(members_of(found)) == 1 for found in results[1:])
    assert [announcements.counts[number] for number in (1, 2, 3, 4)] == [PEERS, 1, 1, 1]


async def test_no_peer_is_asked_about_the_last_round(asked: list[tuple[Candidate, Candidate]]) -> None:
    """Rounds follow each other so soon that the records of the last one are still read."""
    pause, rounds = 2.0, 5

    async def look(peer: Peer, _index: int) -> None:
        async with peer.averager(config(group_size=PEERS)) as averager:
            for number in range(rounds):
                await trio.sleep_until(pause * (number + 1))
                averager.accumulate([values(number)])
                assert isinstance(await averager.step(wait=None), p2pavg.Success)

    await run_peers(MemoryNetwork(latency=LAN), PEERS, look)
    assert len(asked) >= rounds * (PEERS - 1)
    assert max(asker.deadline - other.deadline for asker, other in asked) < pause / 2


async def test_a_late_peer_asks_one_member_of_each_group(asked: list[tuple[Candidate, Candidate]]) -> None:
    """All others have a group, and it has seen their records. It need not ask each of them."""
    last, groups = 3 * PEERS, set[frozenset[str]]()
    last_is_over = trio.Event()

    async def look(peer: Peer, index: int) -> None:
        how = config(group_size=PEERS, min_group_size=2, match_timeout=0.9)
        async with peer.averager(how) as averager:
            averager.accumulate([values(index)])
            await trio.sleep(0.2 * (index // PEERS))  # each group's members are ready together
            result = await averager.step(wait=None)
            if index == last:
                assert not isinstance(result, p2pavg.Success)
                last_is_over.set()
            else:
                groups.update(members_of([result]))
            await last_is_over.wait()

    await run_peers(MemoryNetwork(latency=(0.002, 0.006)), last + 1, look)
    assert [len(group) for group in groups] == [PEERS] * 3
    its = [other.peer_id for asker, other in asked if asker.peer_id == simulated_signer(last).peer_id]
    first_of = [next(group for group in groups if peer in group) for peer in its[:3]]
    assert len(set(first_of)) == 3, "the first ones that it asks are of different groups"


async def test_a_record_of_the_round_before_is_withdrawn(
    monkeypatch: pytest.MonkeyPatch, announcements: Announcements
) -> None:
    """Others would read it for as long as it is valid, and ask peers that are not looking for a group."""
    withdrawn: Counter[int] = Counter()
    original = RunRecords.withdraw

    async def withdraw(records: RunRecords, key: bytes) -> None:
        withdrawn[int(trio.current_time() / PAUSE)] += key in announcements.keys
        await original(records, key)

    monkeypatch.setattr(RunRecords, "withdraw", withdraw)
    monkeypatch.setattr("p2pavg.matchmaking.matchmaker.TAIL_SECONDS", 1.2 * PAUSE)
    results: Results = [[] for _ in range(4)]
    async with peers_and_nursery() as (peers, nursery):
        for peer in peers:
            nursery.start_soon(live, peer, results, range(1, 4))
        await trio.sleep_until(2 * PAUSE)
        assert withdrawn[1] == 0, "the records of the first round are still there when the second one begins"
        await trio.sleep_until(2.9 * PAUSE)
        assert withdrawn[2] == PEERS - 1
        nursery.cancel_scope.cancel()


async def test_the_others_meet_without_a_leader_that_has_left(announcements: Announcements) -> None:
    results: Results = [[] for _ in range(4)]
    async with peers_and_nursery() as (peers, nursery):
        first, *others = peers
        nursery.start_soon(live, first, results, [1])  # it begins first, and so it leads
        for peer in others:
            nursery.start_soon(partial(live, peer, results, [1, 2, 3], late=0.1, match_timeout=3.0))
    assert {len(members) for members in members_of(results[1])} == {PEERS}
    for number in (2, 3):
        assert members_of(results[number]) == {frozenset(peer.id for peer in others)}
        assert announcements.counts[number] == PEERS - 1, "an incomplete group is no group to meet again"


@pytest.mark.parametrize(("late", "announced"), [(0.1 + 0.8 * REUNION_SECONDS, 1), (2.0, PEERS)])
async def test_a_leader_that_is_late_is_met(
    announcements: Announcements, late: float, announced: int
) -> None:
    """A little later than the others, it is still before them in the order of candidates."""
    results: Results = [[] for _ in range(4)]
    async with peers_and_nursery() as (peers, nursery):
        first, *others = peers
        async with first.averager(config(group_size=PEERS)) as averager:
            for peer in others:
                nursery.start_soon(partial(live, peer, results, [1, 2, 3], late=0.1))
            for number in (1, 2, 3):
                await trio.sleep_until(PAUSE * number + (0.0 if number == 1 else late))
                averager.accumulate([values(number)])
                results[number].append(await averager.step(wait=None))
                assert trio.current_time() - PAUSE * number < max(late, 0.1) + 0.1
    for number in (1, 2, 3):
        assert {len(members) for members in members_of(results[number])} == {PEERS}
    assert announcements.counts[2] == announced


async def test_a_newcomer_sees_that_a_group_is_there_and_is_in_one_soon() -> None:
    results: Results = [[] for _ in range(8)]
    async with peers_and_nursery(PEERS + 1) as (peers, nursery):
        newcomer, *others = peers
        for peer in others:
            nursery.start_soon(partial(live, peer, results, range(1, 8), match_timeout=30.0))
        await trio.sleep_until(2.5 * PAUSE)
        async with newcomer.averager(config(group_size=PEERS, match_timeout=PAUSE)) as averager:
            averager.accumulate([values(0)])
            while not isinstance(found := await averager.step(wait=None), p2pavg.Success):
                assert isinstance(found, p2pavg.InProgress), found
                assert found.ready_peers > 1
            assert trio.current_time() < 5 * PAUSE
        nursery.cancel_scope.cancel()


async def test_peers_that_failed_together_announce_themselves(announcements: Announcements) -> None:
    results: Results = [[] for _ in range(4)]
    async with peers_and_nursery() as (peers, nursery):
        for peer in peers:
            nursery.start_soon(
                partial(live, peer, results, [1, 2, 3], exchange_timeout=2.0, min_group_size=PEERS)
            )
        await trio.sleep_until(1.9 * PAUSE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("p2pavg.round.exchange.Exchange.hold", lambda _exchange, _attempt, _digests: None)
            await trio.sleep_until(2.9 * PAUSE)
    assert all(isinstance(result, p2pavg.Failed) for result in results[2])
    assert announcements.counts[2] == 1
    assert announcements.counts[3] == PEERS


class Crowd:
    """Peers of which not all fit in one group, or of which all do, round after round."""

    def __init__(self) -> None:
        self.rounds: Counter[str] = Counter()
        """Number of rounds in which each peer had a result."""
        self.groups = set[frozenset[str]]()
        self.took: dict[int, float] = {}
        """Seconds of the slowest peer, by the number of the round."""

    async def run(self, peers: int, size: int, rounds: int, pause: float = PAUSE) -> None:
        async with peers_and_nursery(peers) as (there, nursery):
            for index, peer in enumerate(there):
                nursery.start_soon(self._live, peer, index, size, rounds, pause)

    async def _live(self, peer: Peer, index: int, size: int, rounds: int, pause: float) -> None:
        async with peer.averager(config(group_size=size, match_timeout=2 * PAUSE)) as averager:
            for number in range(1, rounds + 1):
                await trio.sleep_until(pause * number + 0.01 * ((index * number) % 7))
                averager.clear()
                averager.accumulate([values(number)])
                with trio.move_on_at(pause * (number + 1) - 0.1):
                    result = await averager.step(wait=None)
                    assert isinstance(result, p2pavg.Success | p2pavg.InProgress), result
                    if isinstance(result, p2pavg.Success):
                        self.rounds[peer.id] += 1
                        self.groups.add(frozenset(result.peers))
                        took = trio.current_time() - pause * number
                        self.took[number] = max(self.took.get(number, 0.0), took)


@pytest.mark.parametrize(("peers", "size", "rounds"), [(3, 2, 14)])
async def test_a_peer_too_many_is_not_left_out_every_time(
    announcements: Announcements, peers: int, size: int, rounds: int
) -> None:
    crowd = Crowd()
    await crowd.run(peers, size, rounds)
    assert len(crowd.rounds) == peers
    assert min(crowd.rounds.values()) >= rounds // 3
    announced = [announcements.counts[number] for number in range(3, rounds)]
    assert min(announced) >= peers - 1, "all but a peer that still waits: no group is the whole run"


async def test_groups_of_a_larger_run_mix(announcements: Announcements) -> None:
    crowd = Crowd()
    await crowd.run(8, 4, 5)
    assert len(crowd.groups) >= 5
    assert all(announcements.counts[number] == 8 for number in range(2, 6))
    assert set(crowd.rounds.values()) == {5}


async def test_no_member_holds_back_in_vain(announcements: Announcements) -> None:
    """The leader's record reaches all members directly, whatever keeps the run's key."""
    crowd, peers = Crowd(), K + 3
    await crowd.run(peers, peers, 2)
    assert set(crowd.rounds.values()) == {2}
    assert all(took < REUNION_SECONDS for took in crowd.took.values()), crowd.took
    assert announcements.counts[2] == 1


async def test_no_member_holds_back_away_from_the_common_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large network, peers begin in places that differ from each other."""
    monkeypatch.setattr("p2pavg.matchmaking.matchmaker.ladder_for", lambda *_: Ladder(1, 1))
    crowd = Crowd()
    await crowd.run(PEERS, PEERS, 3)
    assert set(crowd.rounds.values()) == {3}
    assert all(took < REUNION_SECONDS for took in crowd.took.values()), crowd.took


async def test_each_member_announces_itself_now_and_then(announcements: Announcements) -> None:
    """Else it would not see that there are others by now, where it keeps none of the run's records."""
    crowd = Crowd()
    await crowd.run(PEERS, PEERS, 9)
    announced = [announcements.counts[number] for number in range(1, 10)]
    assert announced[:6] == [PEERS, 1, 1, 1, 1, 1]
    assert sum(announced[6:]) == 3 + PEERS - 1, "the leader each time, and each of the others once after 30 s"
