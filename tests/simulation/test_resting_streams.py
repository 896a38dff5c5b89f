"""Streams of votes that serve one round after another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import trio

import p2pavg
from p2pavg.allreduce.movers import lobby
from p2pavg.base.limits import IDLE_STREAM_SECONDS
from p2pavg.consensus.votes import MemberPing, Rest, ResultCommit, Vote, decode_vote
from p2pavg.net.transport import Stream, send_messages
from p2pavg.peer.peer import Peer
from p2pavg.round import control
from p2pavg.round.control import VoteStreams
from p2pavg.round.quiet import QUIET_BYTES
from p2pavg.testing import MemoryNetwork, simulated_peers
from tests.simulation.swarm import LAN, config, same_bits, values

PEERS = 4
PAIRS = PEERS * (PEERS - 1) // 2
ELEMENTS = QUIET_BYTES // 4 + 1  # the least with which each pair of members opens its stream at once


class Opened:
    """Counts the streams of votes that all peers open."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = VoteStreams._begin

        async def begin(votes: VoteStreams, position: int, stream: Stream, *, is_new: bool = True) -> None:
            self.count += is_new
            await original(votes, position, stream, is_new=is_new)

        patched.setattr(VoteStreams, "_begin", begin)

    def since(self) -> int:
        """Return how many were opened since the last call."""
        count, self.count = self.count, 0
        return count


class Rounds:
    """Rounds of the same peers, one after another."""

    def __init__(self, opened: Opened) -> None:
        self.opened: list[int] = []
        """Streams that each round has opened."""
        self.results: list[list[p2pavg.RoundResult]] = []
        self._opened = opened

    async def run(self, pauses: Sequence[float]) -> None:
        """Run one round, and another one after each pause."""
        how = config(group_size=PEERS)
        async with simulated_peers(MemoryNetwork(latency=LAN), PEERS) as peers:
            begin = [trio.Event() for _ in range(len(pauses) + 1)]
            ended = [Counter[int]() for _ in begin]
            self.results = [[] for _ in begin]
            async with trio.open_nursery() as nursery:
                for index, peer in enumerate(peers):
                    nursery.start_soon(self._live, peer, index, how, begin, ended)
                for number, pause in enumerate([0.0, *pauses]):
                    await trio.sleep(pause)
                    self._opened.since()
                    begin[number].set()
                    while ended[number].total() < PEERS:
                        await trio.sleep(0.1)
                    self.opened.append(self._opened.since())

    async def _live(
        self,
        peer: Peer,
        index: int,
        how: p2pavg.AveragingConfig,
        begin: list[trio.Event],
        ended: list[Counter[int]],
    ) -> None:
        async with peer.averager(how) as averager:
            for number, event in enumerate(begin):
                await event.wait()
                averager.accumulate([values(index, ELEMENTS)])
                self.results[number].append(await averager.step(wait=None))
                ended[number][index] += 1

    def check(self) -> None:
        """Check that every round had all members, and one result."""
        for results in self.results:
            successes = [result for result in results if isinstance(result, p2pavg.Success)]
            assert [len(result.peers) for result in successes] == [PEERS] * PEERS, results
            assert same_bits(successes)


async def test_the_next_round_opens_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs of the second round may be the other way round: who opens depends on the roster."""
    rounds = Rounds(Opened(monkeypatch))
    await rounds.run([1.0] * 5)
    rounds.check()
    assert rounds.opened[0] == PAIRS
    assert rounds.opened[-1] == 0
    assert sum(rounds.opened[1:]) <= PAIRS


async def test_streams_that_rest_for_too_long_are_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(Opened(monkeypatch))
    await rounds.run([IDLE_STREAM_SECONDS])
    rounds.check()
    assert rounds.opened == [PAIRS, PAIRS]


async def test_a_stream_that_the_other_side_has_closed_costs_no_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other side waits for a shorter time than this one believes. The votes are sent again on new streams."""
    monkeypatch.setattr(lobby, "IDLE_STREAM_SECONDS", 0.5)
    rounds = Rounds(Opened(monkeypatch))
    await rounds.run([5.0, 5.0])
    rounds.check()
    assert rounds.opened == [PAIRS] * 3


async def test_a_member_that_says_no_last_word_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that was killed at the end of the round. Its streams are closed after a bounded time."""
    monkeypatch.setattr(Rest, "encode", lambda _: MemberPing().encode())
    rounds = Rounds(Opened(monkeypatch))
    await rounds.run([1.0, 5.0])
    rounds.check()
    assert rounds.opened == [PAIRS] * 3


async def test_the_last_word_goes_out_together_with_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message less for each pair of members, of the three that a round takes."""
    written: list[list[type[Vote]]] = []

    async def send(stream: Stream, messages: Sequence[bytes]) -> None:
        written.append([type(decode_vote(message, PEERS)) for message in messages])
        await send_messages(stream, messages)

    monkeypatch.setattr(control, "send_messages", send)
    rounds = Rounds(Opened(monkeypatch))
    await rounds.run([])
    commits = [kinds for kinds in written if ResultCommit in kinds]
    assert len(commits) == 2 * PAIRS
    assert all(kinds[-2:] == [ResultCommit, Rest] for kinds in commits)
