"""A member that is left out while its votes still arrive: its stream stays open, as long as it answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from p2pavg.consensus.member import Phase, new_member
from p2pavg.consensus.votes import Commit, Promise, Vote
from p2pavg.group.milestones import Milestone
from p2pavg.round.control import Control
from p2pavg.round.signing import Signing
from p2pavg.round.voting import PROMISE_SECONDS, Voting
from tests.unit.allreduce.attempts import three
from tests.unit.group.samples import SIGNERS

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
async def leader() -> AsyncIterator[tuple[Voting, Lines]]:
    voting = Voting(three(), new_member(0, 3, ALL, ALL, 2), NoMoves(), Signing(SIGNERS[0], three()))
    lines = Lines()
    voting.control = cast(Control, lines)
    async with trio.open_nursery() as nursery:
        voting.nursery = nursery
        yield voting, lines
        nursery.cancel_scope.cancel()


def promise(ballot: int) -> Promise:
    return Promise(ballot, 0, None, None, frozenset(), frozenset())


async def test_a_member_that_can_be_reached_is_asked_and_left_out(autojump_clock: MockClock) -> None:
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


async def test_a_member_that_does_not_answer_then_is_lost(autojump_clock: MockClock) -> None:
    async with leader() as (voting, lines):
        voting.lost(1, "too slow", reachable=True)
        voting.heard(2, promise(3))
        await trio.sleep(PROMISE_SECONDS / 2)
        assert voting.member.phase is Phase.GATHERING
        await trio.sleep(PROMISE_SECONDS)
        assert lines.closed == [1]
        assert voting.member.begun.members == {0, 2}


async def test_a_member_that_can_be_reached_no_longer_is_lost(autojump_clock: MockClock) -> None:
    async with leader() as (voting, lines):
        voting.lost(1, "too slow", reachable=True)
        voting.lost(1, "it closed its stream")
        assert lines.closed == [1]


async def test_a_member_that_answers_with_a_commit_takes_part_no_longer(autojump_clock: MockClock) -> None:
    """Its signatures may be too few for this member, which must not wait for its promise then."""
    async with leader() as (voting, lines):
        lines.answer = Commit(0, ALL, bytes(32), ())
        voting.missing(1)
        await wait_all_tasks_blocked()
        assert voting.member.lost == {1}
        assert voting.member.hostile == set()
        assert voting.member.phase is not Phase.COMMITTED
