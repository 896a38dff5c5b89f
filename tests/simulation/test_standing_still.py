"""A member that stands still for seconds, and comes back: it is given up once, and then waited for."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio
from trio.testing import MockClock

import p2pavg
from p2pavg.consensus.failure_detector import FIRST_CONTACT_SECONDS
from p2pavg.group.milestones import Milestone
from p2pavg.matchmaking.timing import LEADER_SILENCE_SECONDS
from p2pavg.peer.peer import Peer
from p2pavg.round.control import VoteStreams
from p2pavg.round.quiet import QUIET_BYTES
from p2pavg.testing import MemoryNetwork
from p2pavg.testing.faults import After, Fault, FaultPlan, Stop
from p2pavg.testing.simulation import run_peers, simulated_signer
from tests.simulation.liars import instead
from tests.simulation.swarm import LAN, config, values

PEERS, ROUNDS, PAUSE = 4, 3, 15.0
TIMEOUT = 30.0
LONGEST_SILENCE = TIMEOUT / 3
AGREEING_SECONDS = 3.0
"""Least time that is enough for the exchange itself, and for a ballot without a lost member."""
SHORT = QUIET_BYTES // 8
LONG = 16 * QUIET_BYTES
"""Takes about a second over the network of these tests, so the pace of each member is known in the midst of it."""


class Rounds:
    """Results of the peers' rounds."""

    def __init__(self, elements: int) -> None:
        self.results: dict[int, list[p2pavg.RoundResult]] = {}
        self._how = config(group_size=PEERS, min_group_size=2, exchange_timeout=TIMEOUT)
        self._elements = elements

    async def live(self, peer: Peer, index: int) -> None:
        """Take part in all rounds. A pause lets a member that was lost be in the next one."""
        found = self.results[index] = []
        async with peer.averager(self._how) as averager:
            for number in range(ROUNDS):
                await trio.sleep_until(PAUSE * (number + 1))
                averager.accumulate([values(number, self._elements)])
                found.append(await averager.step(wait=None))

    def of_others(self, member: int, number: int) -> list[p2pavg.Success]:
        """Return what the others got in a round; each of them a success."""
        found = [results[number] for index, results in self.results.items() if index != member]
        successes = [result for result in found if isinstance(result, p2pavg.Success)]
        assert len(successes) == PEERS - 1, found
        return successes


async def play(elements: int, *stops: Fault) -> Rounds:
    rounds = Rounds(elements)
    network = MemoryNetwork(latency=LAN, bandwidth=2e6)
    await run_peers(network, PEERS, rounds.live, plan=FaultPlan(stops))
    return rounds


def stop(member: int, seconds: float | None, number: int, elements: int) -> Fault:
    """Let a member stand still in the midst of a round."""
    moment = 0.002 if elements == SHORT else 0.6
    return Fault(Stop(member, seconds), After(Milestone.FORMED, number + 1, seconds=moment))


@pytest.mark.parametrize(
    ("elements", "seconds", "member"),
    [(SHORT, 5.0, 0), (LONG, 2.5, 3), (LONG, 5.0, 0)],
    ids=["a leader of short rounds", "a follower for a moment", "a leader"],
)
async def test_a_member_that_stands_still_again_is_kept(elements: int, seconds: float, member: int) -> None:
    """The first time, the others go on without it: it may have died."""
    rounds = await play(elements, *(stop(member, seconds, number, elements) for number in range(ROUNDS)))
    for result in rounds.of_others(member, 0):
        assert len(result.peers) >= PEERS - 1
        assert set(result.lost) == {simulated_signer(member).peer_id}
        assert result.exchange_duration < FIRST_CONTACT_SECONDS + AGREEING_SECONDS
    for number in range(1, ROUNDS):
        kept = rounds.results[member][number]
        assert isinstance(kept, p2pavg.Success), (number, kept)
        for result in (kept, *rounds.of_others(member, number)):
            assert len(result.peers) == PEERS, (number, result.lost)
            assert seconds < result.exchange_duration < seconds + AGREEING_SECONDS


async def test_a_member_that_stood_still_and_then_dies_is_waited_for_no_longer_than_a_slow_link() -> None:
    rounds = await play(LONG, stop(3, 5.0, 0, LONG), stop(3, None, 1, LONG))
    for result in rounds.of_others(3, 1):
        assert result.exchange_duration < LONGEST_SILENCE + AGREEING_SECONDS
    for result in rounds.of_others(3, 2):
        assert len(result.peers) == PEERS - 1


@pytest.mark.parametrize("newcomer", [0, 1], ids=["a leader", "a follower"])
async def test_members_do_not_wait_for_one_that_a_newcomer_has_given_up(
    monkeypatch: pytest.MonkeyPatch, newcomer: int
) -> None:
    """It has not seen the member come back. Otherwise the two kinds of members would wait for each other."""

    def without_memory(**given: Any) -> VoteStreams:
        return VoteStreams(**given | {"silences": None})

    instead(monkeypatch, "VoteStreams", newcomer, without_memory)
    rounds = await play(LONG, *(stop(3, 7.0, number, LONG) for number in range(2)))
    for result in rounds.of_others(3, 1):
        assert len(result.peers) >= PEERS - 1
        assert result.exchange_duration < FIRST_CONTACT_SECONDS + AGREEING_SECONDS


async def test_a_follower_that_stood_still_reads_its_leader_before_it_judges(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own timer is a little late only, since it was due near the end of the time in which it stood still."""
    caplog.set_level(logging.DEBUG, "p2pavg.matchmaking")

    async def live(peer: Peer, index: int) -> None:
        del index
        async with peer.averager(config(group_size=3, min_group_size=3, match_timeout=60.0)) as averager:
            averager.accumulate([values(0, 16)])
            with trio.move_on_after(30.0):
                await averager.step(wait=None)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_peers, MemoryNetwork(latency=LAN), 2, live)
        await trio.sleep(10.0)  # the two have met, and wait for a third one
        for _ in range(8):
            await trio.sleep(1.3)  # at another moment between two words of the leader each time
            autojump_clock.jump(LEADER_SILENCE_SECONDS - 1.0)
    left = [record.message for record in caplog.records if "silent for" in record.message]
    assert not left, left
