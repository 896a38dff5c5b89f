"""An exchange of a member that reaches no other member, and its later answers about the outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import trio

from p2pavg.allreduce.messages import Lane, LaneHeader
from p2pavg.allreduce.movers.lobby import StreamRouter
from p2pavg.consensus.statements import Statement
from p2pavg.consensus.votes import Left, ResultCommit, Unknown, Vote, decode_vote
from p2pavg.net.transport import Stream, Transport
from p2pavg.round.exchange import Exchange
from p2pavg.round.voting import FIND_OUT_SECONDS
from p2pavg_compression import Fp32
from tests.unit.allreduce.attempts import A, B, C, Reaches, three
from tests.unit.allreduce.contexts import context_over
from tests.unit.allreduce.streams import SaidBefore
from tests.unit.group.samples import SIGNERS
from tests.unit.round.hearing import framed
from tests.unit.round.test_audits import Learnt

TIMEOUT = 20.0


def exchange(
    lobby: StreamRouter,
    me: str,
    found_out: Callable[[bool], None] | None = None,
    *,
    transport: Transport | None = None,
) -> Exchange:
    roster = three()
    return Exchange(
        context_over(transport or Reaches(me, unreachable=[A, B, C]), Fp32(), sum(roster.shares), lobby),
        roster,
        lobby.expect(roster.group_id),
        Learnt(),
        vector=torch.ones(sum(roster.shares)),
        minimum=2,
        timeout=TIMEOUT,
        found_out=found_out,
    )


async def answer(lobby: StreamRouter, remote: str) -> Vote:
    """Return the answer to a peer that asks for the outcome of the round."""
    header = LaneHeader(three().group_id, Lane.ASK).encode()
    stream = SaidBefore(framed(header), remote)
    await lobby.serve(stream)
    return decode_vote(bytes(stream.sent[4:]), 3)


@pytest.mark.parametrize(
    ("me", "used", "later"),
    [
        (A, None, [False]),  # the other two may go on without it and commit its contribution
        (B, False, []),  # the others are no quorum without the first member
    ],
    ids=["the first", "the second"],
)
async def test_a_member_alone_ends_in_time_and_loses_no_contribution(
    me: str, used: bool | None, later: list[bool]
) -> None:
    lobby, heard = StreamRouter(), list[bool]()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        running = exchange(lobby, me, heard.append)
        await nursery.start(running.run)
        outcome = running.take_outcome()
        assert trio.current_time() - began < TIMEOUT + 2.0
        assert heard == []
    assert trio.current_time() - began < TIMEOUT + FIND_OUT_SECONDS + 30.0
    assert outcome.verdict is not None
    assert outcome.used is used
    assert {verdict.peer_id for verdict in outcome.lost} == {A, B, C} - {me}
    assert heard == later


class Tells(Reaches):
    """A transport that reaches no peer during the round; later some members tell the outcome."""

    def __init__(self, peer_id: str, vote: Vote, tellers: Sequence[str] = (C,)) -> None:
        super().__init__(peer_id, unreachable=[A, B, C])
        self.tellers = tellers
        self.end = trio.current_time() + TIMEOUT + 5.0
        self.said = framed(vote.encode())

    async def open_stream(self, peer_id: str, protocol: str, **options: object) -> Stream:
        if trio.current_time() > self.end and peer_id in self.tellers:
            return SaidBefore(self.said, peer_id)
        return await super().open_stream(peer_id, protocol, **options)


def signed_commit(attempt: int, *members: int, forged: bool = False) -> ResultCommit:
    """Return a commit that the members B and C have signed."""
    statement = Statement(three().group_id, attempt, frozenset(members), b"d" * 32)
    said = statement.signed_bytes() + bytes(forged)
    signatures = tuple((position, SIGNERS[position].sign(said)) for position in (1, 2))
    return ResultCommit(attempt, statement.members, statement.digest, signatures)


@pytest.mark.parametrize("members", [(0, 1, 2), (1, 2)], ids=["used", "not used"])
async def test_a_member_that_was_cut_off_learns_the_outcome_of_the_round(members: tuple[int, ...]) -> None:
    lobby, heard, used = StreamRouter(), list[bool](), 0 in members
    commit = signed_commit(0 if used else 4, *members)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        # B and C have to say it before A takes its contribution as used: one of them may lie.
        side = exchange(lobby, A, heard.append, transport=Tells(A, commit, [B, C] if used else [C]))
        await nursery.start(side.run)
        assert side.take_outcome().used is None
        assert isinstance(await answer(lobby, B), Left)
    assert trio.current_time() - began < TIMEOUT + 60.0
    assert heard == [used]
    assert await answer(lobby, B) == commit, "it passes on what it was told"


@pytest.mark.parametrize(
    "false",
    [
        signed_commit(0, 0, 1, 2, forged=True),
        signed_commit(4, 1, 2, forged=True),
        ResultCommit(0, frozenset({0, 1, 2})),
        signed_commit(0, 0, 1, 2),
    ],
    ids=["forged", "forged, without it", "not signed", "told by one of those that signed"],
)
async def test_a_member_that_was_cut_off_believes_no_commit_without_proof(false: ResultCommit) -> None:
    lobby, heard = StreamRouter(), list[bool]()
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        await nursery.start(exchange(lobby, A, heard.append, transport=Tells(A, false)).run)
    assert trio.current_time() - began > FIND_OUT_SECONDS
    assert heard == [False]
    assert isinstance(await answer(lobby, B), Left)


async def test_the_outcome_is_told_to_the_groups_members_only() -> None:
    lobby = StreamRouter()
    async with trio.open_nursery() as nursery:
        await nursery.start(exchange(lobby, A).run)
        assert lobby.groups == {}
        told = await answer(lobby, B)
        assert isinstance(told, Left)
        assert told.accepted == -1
        assert told.reason
        assert await answer(lobby, "a stranger") == Unknown()


async def test_a_cancelled_member_has_left() -> None:
    lobby = StreamRouter()
    with trio.move_on_after(1.0):
        await exchange(lobby, B).run()
    assert lobby.groups == {}
    assert await answer(lobby, A) == Left(-1, "it was stopped")
