"""Boards of a run on a simulated network: which peers read an entry, and for how long."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
import trio

import p2pavg
from p2pavg.base.limits import LOOK_SECONDS
from p2pavg.peer.peer import Peer
from p2pavg.runs.records.board import SAID_TTL_SECONDS, Board
from p2pavg.testing import MemoryNetwork, simulated_peers

LAN = (0.0005, 0.002)
SECOND = 1.0
AT_ONCE = 0.05


def config(run_id: str = "sim") -> p2pavg.AveragingConfig:
    return p2pavg.AveragingConfig(run_id=run_id, compression=None)


def heard(board: Board) -> dict[str, bytes]:
    return {peer_id: said.value for peer_id, said in board.entries.items()}


def all_but(peer: Peer, words: dict[str, bytes]) -> dict[str, bytes]:
    return {peer_id: word for peer_id, word in words.items() if peer_id != peer.id}


class Company:
    """Averagers of one run, one for each peer, and their boards of one topic."""

    def __init__(self, peers: list[Peer]) -> None:
        self.peers = peers
        self.boards: list[Board] = []
        self._averagers = [AsyncExitStack() for _ in peers]

    async def __aenter__(self) -> Company:
        for peer, stack in zip(self.peers, self._averagers, strict=True):
            averager = await stack.enter_async_context(peer.averager(config()))
            self.boards.append(await averager.board("topic"))
        return self

    async def __aexit__(self, *_: object) -> None:
        for stack in reversed(self._averagers):
            await stack.aclose()

    async def say_hello(self) -> dict[str, bytes]:
        """Publish an entry on every board at once; return the entries."""
        words = {peer.id: b"peer %d" % index for index, peer in enumerate(self.peers)}
        for peer, board in zip(self.peers, self.boards, strict=True):
            board.publish(words[peer.id])
        await trio.sleep(SECOND)
        return words

    async def close_the_last(self) -> Peer:
        await self._averagers.pop().aclose()
        self.boards.pop()
        return self.peers.pop()


async def test_withdrawn_entry_is_gone_until_the_next_publish() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers, Company(peers) as company:
        await company.say_hello()
        company.boards[0].withdraw()
        await trio.sleep(SECOND)
        for board in company.boards[1:]:
            assert peers[0].id not in heard(board)
        company.boards[0].publish(b"again", now=True)
        await trio.sleep(SECOND)
        for board in company.boards[1:]:
            assert heard(board)[peers[0].id] == b"again"


@pytest.mark.parametrize("count", [2, 9])
async def test_all_peers_read_all_entries_within_seconds(count: int) -> None:
    """With nine peers, not every peer stores every entry: some have to look."""
    async with simulated_peers(MemoryNetwork(latency=LAN), count) as peers, Company(peers) as company:
        words = await company.say_hello()
        if count > 8:
            await trio.sleep(LOOK_SECONDS)
        for peer, board in zip(peers, company.boards, strict=True):
            assert heard(board) == all_but(peer, words)


async def test_urgent_entry_is_read_at_once() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers, Company(peers) as company:
        await company.say_hello()
        for word in (b"a", b"b", b"c"):
            company.boards[0].publish(word, now=True)
            await trio.sleep(AT_ONCE)
            assert all(heard(board)[peers[0].id] == word for board in company.boards[1:])


async def test_entries_last_as_long_as_their_peers() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers, Company(peers) as company:
        words = await company.say_hello()
        for _ in range(11):
            await trio.sleep(SAID_TTL_SECONDS / 5)
            for peer, board in zip(peers, company.boards, strict=True):
                assert heard(board) == all_but(peer, words)


@pytest.mark.parametrize(("count", "seconds"), [(3, AT_ONCE), (9, SAID_TTL_SECONDS + 1.0)])
async def test_entry_of_a_closed_averager_is_gone(count: int, seconds: float) -> None:
    """It is gone at once where it is stored. A peer that only looks gets no withdrawals, and sees it expire."""
    async with simulated_peers(MemoryNetwork(latency=LAN), count) as peers, Company(peers) as company:
        await company.say_hello()
        await trio.sleep(LOOK_SECONDS)
        gone = await company.close_the_last()
        await trio.sleep(seconds)
        for board in company.boards:
            assert len(heard(board)) == count - 2
            assert gone.id not in heard(board)


async def test_entries_of_a_restarted_averager_are_read() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers, Company(peers) as company:
        await company.say_hello()
        again = await company.close_the_last()
        async with again.averager(config()) as averager:
            board = await averager.board("topic")
            board.publish(b"again", now=True)
            await trio.sleep(AT_ONCE)
            assert all(heard(other)[again.id] == b"again" for other in company.boards)
            assert set(heard(board)) == {peer.id for peer in company.peers}


async def test_entry_of_a_killed_peer_expires() -> None:
    network = MemoryNetwork(latency=LAN)
    async with simulated_peers(network, 3) as peers, Company(peers) as company:
        words = await company.say_hello()
        await trio.sleep(20.0)
        network.crash(peers[2].id)
        left = all_but(peers[2], words)
        assert all(peers[2].id in heard(board) for board in company.boards[:2])
        await trio.sleep(SAID_TTL_SECONDS)
        for peer, board in zip(peers[:2], company.boards[:2], strict=True):
            assert heard(board) == all_but(peer, left)


async def test_topics_and_runs_are_separate() -> None:
    async with (
        simulated_peers(MemoryNetwork(latency=LAN), 2) as (speaker, listener),
        speaker.averager(config()) as one,
        listener.averager(config()) as other,
        listener.averager(config("another run")) as apart,
    ):
        said = await one.board("topic")
        (await one.board("another topic")).publish(b"b")
        said.publish(b"a")
        boards = [
            await other.board("topic"),
            await other.board("another topic"),
            await other.board("a third topic"),
            await apart.board("topic"),
        ]
        await trio.sleep(2 * SECOND)
        assert [heard(each) for each in boards] == [{speaker.id: b"a"}, {speaker.id: b"b"}, {}, {}]


async def test_each_topic_of_an_averager_has_one_board() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 1) as (peer,):
        async with peer.averager(config()) as averager:
            board = await averager.board("topic")
            assert await averager.board("topic") is board
            assert await averager.board("another") is not board
        with pytest.raises(p2pavg.ClosedError):
            await averager.board("topic")
        board.publish(b"too late", now=True)
        await trio.sleep(SECOND)


@pytest.mark.parametrize("pause", [0.0, 5.0])
async def test_a_last_word_is_read_after_its_peer_has_closed_and_expires(pause: float) -> None:
    """It is published also if the averager closes right after it; an entry of any other board is withdrawn."""
    lasts = 90.0
    async with simulated_peers(MemoryNetwork(latency=LAN), 2) as (peer, late):
        async with peer.averager(config()) as averager:
            board = await averager.board("ends", lasts=lasts)
            other = await averager.board("topic")
            board.publish(b"update 20", now=True)
            other.publish(b"here", now=True)
            await trio.sleep(pause)
        await trio.sleep(lasts / 3)
        async with late.averager(config()) as averager:
            board = await averager.board("ends", lasts=lasts)
            other = await averager.board("topic")
            await trio.sleep(5 * LOOK_SECONDS)
            assert heard(board) == {peer.id: b"update 20"}
            assert heard(other) == {}
            await trio.sleep(lasts)
            assert heard(board) == {}


async def test_a_last_word_that_was_taken_back_is_gone() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 2) as (peer, late):
        async with peer.averager(config()) as averager:
            board = await averager.board("ends", lasts=90.0)
            board.publish(b"update 20", now=True)
            await trio.sleep(SECOND)
            board.withdraw()
            await trio.sleep(SECOND)
        async with late.averager(config()) as averager:
            board = await averager.board("ends", lasts=90.0)
            await trio.sleep(5 * LOOK_SECONDS)
            assert heard(board) == {}
