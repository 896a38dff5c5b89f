"""A member that is left out while its votes still arrive: its stream stays open, as long as it answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from p2pavg.consensus.member import RoundPhase, new_member
from p2pavg.consensus.votes import Promise, ResultCommit, StaleBallot, Vote
from p2pavg.group.milestones import Milestone
from p2pavg.round.control import VoteStreams
from p2pavg.round.signing import Signing
from p2pavg.round.voting import PROMISE_SECONDS, Voting
from tests.unit.allreduce.attempts import SHARE
from tests.unit.group.samples import SIGNERS, candidate, roster

ALL = frozenset({0, 1, 2})


class Lines:
    """Streams of votes that note what is told and which of them are closed."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Vote]] = []
        self.closed: list[int] = []
        self.answer: Vote | None = None

    def tell(self, position: int, vote: Vote) -> None:
        self.told.append((position, vote))

    def drop(self, position: int) -> None:
        self.closed.append(position)

    def doubt(self, position: int) -> None:
        pass

    async def ask(self, _position: int) -> Vote | None:
        return self.answer


class NoMoves:
    def begin_attempt(self, number: int, members: frozenset[int]) -> None:
        pass

    def pass_on(self, reducers: frozenset[int], to: frozenset[int]) -> None:
        pass

    def take_from(self, source: int, reducers: frozenset[int]) -> None:
        pass

    def came_from(self, position: int) -> None:
        return None

    def committed(self) -> None:
        pass

    def reached(self, milestone: Milestone) -> None:
        pass


@asynccontextmanager
async def leader(size: int = 3) -> AsyncIterator[tuple[Voting, Lines]]:
    group = roster([candidate(index, weight=1.0) for index in range(size)], [SHARE] * size)
    everyone = frozenset(range(size))
    member = new_member(0, size, everyone, everyone, 2)
    voting = Voting(group, member, NoMoves(), Signing(SIGNERS[0], group, ""))
    lines = Lines()
    voting.control = cast(VoteStreams, lines)
    async with trio.open_nursery() as nursery:
        voting.nursery = nursery
        yield voting, lines
        nursery.cancel_scope.cancel()


def promise(ballot: int, attempt: int = 0) -> Promise:
    return Promise(ballot, attempt, None, None, frozenset(), frozenset())


async def test_a_member_that_can_be_reached_is_asked_and_left_out() -> None:
    async with leader() as (voting, lines):
        voting.lost(1, "too slow", reachable=True)
        voting.lost(1, "too slow", reachable=True)
        assert [position for position, _ in lines.told] == [1, 2], "it is asked once, like the others"
        for position in (1, 2):
            voting.heard(position, promise(3))
        assert voting.member.begun.members == {0, 2}
        await trio.sleep(2 * PROMISE_SECONDS)
        assert lines.closed == []
        assert 1 in voting.losses


async def test_a_member_that_does_not_answer_then_is_lost() -> None:
    async with leader() as (voting, lines):
        voting.lost(1, "too slow", reachable=True)
        voting.heard(2, promise(3))
        await trio.sleep(PROMISE_SECONDS / 2)
        assert voting.member.phase is RoundPhase.GATHERING
        await trio.sleep(PROMISE_SECONDS)
        assert lines.closed == [1]
        assert voting.member.begun.members == {0, 2}


async def test_a_member_that_withholds_a_later_promise_is_lost() -> None:
    """It promised when it was left out. When the leader leaves out another one, it is asked again."""
    async with leader(4) as (voting, lines):
        voting.lost(1, "too slow", reachable=True)
        for position in (1, 2, 3):
            voting.heard(position, promise(4))
        assert voting.member.begun.ballot == 4
        await trio.sleep(2 * PROMISE_SECONDS)
        voting.lost(2, "its stream has ended")
        voting.heard(3, promise(8, attempt=4))
        await trio.sleep(PROMISE_SECONDS / 2)
        assert lines.closed == [2]
        await trio.sleep(PROMISE_SECONDS)
        assert lines.closed == [2, 1]
        assert voting.member.begun.members == {0, 3}


async def test_a_question_that_is_out_of_date_gives_a_member_no_more_time() -> None:
    """A member that said so again and again kept the round from its end."""
    async with leader(4) as (voting, lines):
        voting.lost(1, "too slow", reachable=True)
        await trio.sleep(0.75 * PROMISE_SECONDS)
        voting.heard(1, StaleBallot(5))
        assert (voting.member.promised, lines.closed) == (8, [])
        await trio.sleep(PROMISE_SECONDS / 2)
        assert lines.closed == [1]


@pytest.mark.parametrize(("ballot", "lost"), [(4, [1]), (8, [])])
async def test_a_promise_counts_for_its_question_and_earlier_ones(ballot: int, lost: list[int]) -> None:
    """The leader asks again with a newer ballot before it has begun one."""
    async with leader(4) as (voting, lines):
        voting.lost(1, "too slow", reachable=True)
        if ballot == 4:
            voting.heard(1, promise(4))
        voting.heard(2, StaleBallot(5))
        assert voting.member.promised == 8
        if ballot == 8:
            voting.heard(1, promise(8))
        await trio.sleep(2 * PROMISE_SECONDS)
        assert lines.closed == lost


async def test_a_member_that_can_be_reached_no_longer_is_lost() -> None:
    async with leader() as (voting, lines):
        voting.lost(1, "too slow", reachable=True)
        voting.lost(1, "it closed its stream")
        assert lines.closed == [1]


async def test_a_member_that_answers_with_a_commit_takes_part_no_longer() -> None:
    """Its signatures may be too few for this member, which must not wait for its promise then."""
    async with leader() as (voting, lines):
        lines.answer = ResultCommit(0, ALL, bytes(32), ())
        voting.missing(1)
        await wait_all_tasks_blocked()
        assert voting.member.lost == {1}
        assert voting.member.hostile == set()
        assert voting.member.phase is not RoundPhase.COMMITTED
