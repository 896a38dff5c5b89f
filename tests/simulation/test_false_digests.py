"""Members that falsify a digest in each attempt: honest ones succeed, and hold off no honest one.

A reducer signs its averages. So a digest that it has not signed costs the member that names it, and no third one. That
holds in each group of which at most a third lies. A member that only heard that a liar was given up may still meet it
alone, in a group of two, where one word stands against the other: which peers meet depends on who asks whom first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import trio

import p2pavg
from p2pavg.allreduce.attempt import Attempt
from p2pavg.matchmaking.attempt_state import Memory
from p2pavg.matchmaking.known_peers import KnownPeer
from p2pavg.matchmaking.matchmaker import Matchmaker
from p2pavg.peer.peer import Peer
from p2pavg.round import exchange
from p2pavg.testing import MemoryNetwork, simulated_peers
from tests.simulation.liars import ELEMENTS, name
from tests.simulation.swarm import LAN, config, same_bits, values

SIZE, ROUNDS = 6, 3
NAMES = [name(index) for index in range(SIZE)]


class Rounds:
    """Several rounds of six peers, of which some name a false digest of an honest reducer's share in each attempt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, liars: Sequence[int]) -> None:
        self.liars = {name(index) for index in liars}
        self.results: dict[int, list[p2pavg.RoundResult]] = {}
        self.attempts: dict[bytes, set[int]] = {}
        """Numbers of the attempts that honest members have completed, by group."""
        self.lost_causes: set[tuple[str, int]] = set()
        """(a, n): a's n-th round was one of a group of which more than a third lies."""
        self.held_off: set[tuple[str, str]] = set()
        """(a, b): a did not want to meet b for a while."""
        self._here = ""
        completed, ban = exchange.Exchange.hold, Matchmaker.ban

        def lie(moved: exchange.Exchange, attempt: Attempt, digests: tuple[bytes, ...]) -> None:
            me = moved._context.transport.peer_id
            if me not in self.liars:
                self.attempts.setdefault(moved._roster.group_id, set()).add(attempt.number)
                members = [member.peer_id for member in moved._roster.members]
                if 3 * sum(member in self.liars for member in members) > len(members):
                    self.lost_causes.add((me, len(self.results.get(NAMES.index(me), ()))))
            elif digests:
                reducers = [member.peer_id for member in attempt.roster.members]
                share = next((at for at, one in enumerate(reducers) if one not in self.liars), 0)
                digests = (*digests[:share], me.encode()[-32:], *digests[share + 1 :])
            completed(moved, attempt, digests)

        def note(matchmaker: Matchmaker, peer_id: str, reason: str, seconds: float) -> None:
            self.held_off.add((matchmaker._context.signer.peer_id, peer_id))
            ban(matchmaker, peer_id, reason, seconds)

        monkeypatch.setattr(exchange.Exchange, "hold", lie)
        monkeypatch.setattr(Matchmaker, "ban", note)
        self._count_backoffs(monkeypatch)

    def _count_backoffs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hold_off, wasted = KnownPeer.hold_off, Memory.wasted

        def note_follower(known: KnownPeer, reason: str, now: float) -> float:
            self.held_off.add(("", known.peer_id))
            return hold_off(known, reason, now)

        def note_leader(memory: Memory, peer_id: str, now: float, *, most: float = float("inf")) -> float:
            self.held_off.add(("", peer_id))
            return wasted(memory, peer_id, now, most=most)

        monkeypatch.setattr(KnownPeer, "hold_off", note_follower)
        monkeypatch.setattr(Memory, "wasted", note_leader)

    async def play(self, how: p2pavg.AveragingConfig) -> None:
        async with simulated_peers(MemoryNetwork(latency=LAN), SIZE) as peers, trio.open_nursery() as nursery:
            for index, peer in enumerate(peers):
                if peer.id in self.liars:
                    nursery.start_soon(self._lie_on, peer, index, how)
            async with trio.open_nursery() as honest:
                for index, peer in enumerate(peers):
                    if peer.id not in self.liars:
                        honest.start_soon(partial(self._take_part, peer, index, how))
            nursery.cancel_scope.cancel()

    async def _take_part(self, peer: Peer, index: int, how: p2pavg.AveragingConfig) -> None:
        await trio.sleep(0.1 * index)
        async with peer.averager(how) as averager:
            for _ in range(ROUNDS):
                averager.accumulate([values(index, ELEMENTS)], weight=1.0)
                self.results.setdefault(index, []).append(await averager.step(wait=None))

    async def _lie_on(self, peer: Peer, index: int, how: p2pavg.AveragingConfig) -> None:
        await trio.sleep(0.1 * index)
        async with peer.averager(how) as averager:
            while True:
                averager.accumulate([values(index, ELEMENTS)], weight=1.0)
                await averager.step(wait=None)


@pytest.mark.parametrize(("liars", "audit"), [((3, 4), "off"), ((0, 1), "after")], ids=str)
async def test_honest_members_succeed_and_hold_off_no_honest_one(
    monkeypatch: pytest.MonkeyPatch, liars: tuple[int, ...], audit: str
) -> None:
    rounds = Rounds(monkeypatch, liars)
    await rounds.play(config(group_size=SIZE, audit=audit))
    honest = {name(index) for index in range(SIZE)} - rounds.liars
    assert len(rounds.results) == len(honest)
    apart = {number for _, number in rounds.lost_causes}
    assert len(apart) <= 1, "honest members met a liar alone in more than one of the rounds"
    for number in range(ROUNDS):
        found = {name(index): results[number] for index, results in rounds.results.items()}
        done = {peer: result for peer, result in found.items() if isinstance(result, p2pavg.Success)}
        assert {(peer, number) for peer in found.keys() - done.keys()} <= rounds.lost_causes, found
        assert same_bits(list(done.values()))
        assert number in apart or all(honest <= set(result.peers) for result in done.values())
    # Each attempt costs a liar its place, whichever of them leads.
    assert max(len(numbers) for numbers in rounds.attempts.values()) <= 1 + len(liars)
    assert not {pair for pair in rounds.held_off if pair[1] in honest and pair[0] not in rounds.liars}
