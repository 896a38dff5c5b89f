"""Short rounds, in which two followers open no stream of votes until they need it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import trio

import p2pavg
from p2pavg.consensus.failure_detector import MEMBER_PING_SECONDS
from p2pavg.consensus.votes import ResultCommit, Vote
from p2pavg.peer.peer import Peer
from p2pavg.round.control import VoteStreams
from p2pavg.round.quiet import QUIET_BYTES, QUIET_FOLLOWERS_SECONDS
from p2pavg.testing import MemoryNetwork
from tests.simulation.liars import check_exact, honest, instead, name, play
from tests.simulation.swarm import ELEMENTS, LAN, config

SIZE = 4
assert 4 * ELEMENTS <= QUIET_BYTES


class Pairs:
    """Pairs of members that have opened a stream of votes to each other."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.opened: set[tuple[int, int]] = set()
        original = VoteStreams._begin

        async def begin(control: VoteStreams, position: int, *arguments: Any, **named: Any) -> None:
            self.opened.add((position, control._me))
            await original(control, position, *arguments, **named)

        patched.setattr(VoteStreams, "_begin", begin)


async def test_followers_of_a_short_round_open_no_streams_to_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = Pairs(monkeypatch)
    check_exact(await play(size=SIZE), range(SIZE))
    assert pairs.opened == {(0, follower) for follower in range(1, SIZE)}


async def test_a_member_answers_with_the_commit_before_its_streams_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[bool] = []
    end = VoteStreams.end

    def note(control: VoteStreams) -> None:
        answers.append(control._group.group_id in control._group._lobby._ended)
        end(control)

    monkeypatch.setattr(VoteStreams, "end", note)
    check_exact(await play(size=SIZE), range(SIZE))
    assert answers == [True] * len(answers)
    assert len(answers) >= SIZE


class TellsOneOnly(VoteStreams):
    """A leader that commits, tells one member only, and stays."""

    told: int

    def tell(self, position: int, vote: Vote) -> None:
        if not isinstance(vote, ResultCommit) or position == self.told:
            super().tell(position, vote)

    def end(self) -> None:
        for position, line in self._lines.items():
            if position == self.told:
                line.ending = True
                line.wake()


@pytest.mark.parametrize("told", [1, SIZE - 1])
async def test_members_that_a_lying_leader_does_not_tell_learn_of_the_commit_from_others(
    monkeypatch: pytest.MonkeyPatch, told: int
) -> None:
    """The member that was told has ended the round, and opens no stream any more."""
    instead(monkeypatch, "VoteStreams", 0, type("Tells", (TellsOneOnly,), {"told": told}))
    swarm = await play(size=SIZE)
    results = [swarm.results[name(index)] for index in honest(0)]
    found = [result for result in results if isinstance(result, p2pavg.Success)]
    assert len(found) == SIZE - 1, results
    for result in found:
        assert result.exchange_duration < QUIET_FOLLOWERS_SECONDS + 3 * MEMBER_PING_SECONDS


@pytest.mark.parametrize(("lost", "moment"), [(0, 0.0), (0, 0.004), (1, 0.002), (3, 0.006)])
async def test_all_members_notice_soon_that_one_has_died_in_a_short_round(lost: int, moment: float) -> None:
    """A member that is not lost has to promise the next ballot, so each member waits until it has noticed the death."""
    network = MemoryNetwork(latency=LAN)

    async def kill(_stranger: Peer, _group_id: bytes, peers: Sequence[Peer]) -> None:
        await trio.sleep(moment)
        network.crash(peers[lost].id)

    how = config(group_size=SIZE, min_group_size=SIZE - 1)
    swarm = await play(network, size=SIZE, how=how, stranger=kill)
    for index in honest(lost):
        result = swarm.results[name(index)]
        assert isinstance(result, p2pavg.Success), result
        assert result.exchange_duration < QUIET_FOLLOWERS_SECONDS  # as if all streams were open
