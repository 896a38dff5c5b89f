"""Lies and damage: a member that misbehaves harms only itself.

The peers are real, on a simulated network; one of them has a lying part. At any place in the roster, the others exclude
it by name, report its action, and end with the same bits: the mean of exactly the other members.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import trio
from msgspec import structs

import p2pavg
from p2pavg.allreduce.attempt import Attempt
from p2pavg.allreduce.messages import FRAME_BYTES, PROTOCOL, Lane, LaneHeader, Step, part_frame
from p2pavg.allreduce.movers.lobby import InboundLane
from p2pavg.allreduce.proofs import part_digest
from p2pavg.allreduce.receiver import Receiver
from p2pavg.allreduce.sender import Sender
from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.messages import pack
from p2pavg.consensus import agreement
from p2pavg.consensus.member import MemberState
from p2pavg.consensus.statements import result_digest
from p2pavg.consensus.votes import (
    MAX_VOTE_BYTES,
    Begin,
    Event,
    Gather,
    ResultHeld,
    StaleBallot,
    Trouble,
    Vote,
    VoteHeard,
)
from p2pavg.consensus.votes import ResultCommit as VotedCommit
from p2pavg.group.candidate import Candidate
from p2pavg.group.milestones import Milestone
from p2pavg.group.roster import Roster
from p2pavg.group.shares import SharePart
from p2pavg.matchmaking.actions import Actions, Send
from p2pavg.matchmaking.attempt_state import Memory
from p2pavg.matchmaking.matchmaker import Matchmaker
from p2pavg.matchmaking.messages import Accept, GroupCommit, GroupProposal, Message
from p2pavg.matchmaking.own_group import OwnGroup
from p2pavg.matchmaking.rules import Matchmaking
from p2pavg.net.addresses import with_peer_id
from p2pavg.net.transport import Buffer, Stream, Transport, send_message
from p2pavg.peer.peer import Peer
from p2pavg.round import exchange, voting
from p2pavg.round.control import VoteStreams
from p2pavg.round.rounds import Rounds
from p2pavg.round.signing import Signing
from p2pavg.round.slow_members import SlowMembers
from p2pavg.round.voting import max_votes
from p2pavg.testing import MemoryNetwork
from p2pavg.testing.memory import MemoryTransport
from tests.simulation.liars import (
    ELEMENTS,
    SIZE,
    check_certificate,
    check_costs_itself,
    check_exact,
    honest,
    instead,
    name,
    play,
)
from tests.simulation.swarm import LAN, config, mean, same_bits, tensors_of

EVERYWHERE = pytest.mark.parametrize("liar", [0, 2], ids=["leads", "follows"])


@pytest.fixture(autouse=True)
def many_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, _reducers: 64)


# ---------------------------------------------------------------------- lies on lanes

Deliver = Callable[[Stream, SharePart, bytes], Awaitable[None]]


async def deliver(stream: Stream, part: SharePart, payload: bytes) -> None:
    """Deliver a part unchanged."""
    await stream.send_all(part_frame(part.index) + payload)


class Noted(Stream):
    """A stream that notes what is sent on it."""

    def __init__(self, stream: Stream) -> None:
        self.remote = stream.remote
        self.sent: list[bytes] = []
        self._stream = stream

    async def send_all(self, data: Buffer) -> None:
        self.sent.append(bytes(data))
        await self._stream.send_all(data)

    async def receive_some(self, max_bytes: int) -> bytes:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def reset(self) -> None:
        await self._stream.reset()


class LyingSender(Sender):
    """Sends one kind of lane in its own way."""

    lies_on: ClassVar[Lane | None] = None
    how: ClassVar[list[Deliver]] = []

    async def _send(self, stream: Stream, header: LaneHeader, steps: Sequence[Step]) -> None:
        match header.lane:
            case Lane.CONTRIBUTIONS:
                await self._send_contributions(stream)
            case Lane.AVERAGES:
                await self._send_averages(stream)
            case _:
                await super()._send(stream, header, steps)

    async def _send_contributions(self, stream: Stream) -> None:
        values, reducer, digests = self._plan.values, stream.remote, []
        for part in self._plan.ledger.parts[reducer]:
            payload = await self._plan.context.run_in_thread(values.contribution, reducer, part)
            digests += await self._hand_over(Lane.CONTRIBUTIONS, stream, part, payload)
        assert values.proofs is not None
        if len(digests) == len(self._plan.ledger.parts[reducer]):
            values.proofs._sent[reducer] = digests
            await stream.send_all(values.proofs.sign_input(reducer))

    async def _send_averages(self, stream: Stream) -> None:
        proofs, digests = self._plan.values.proofs, []
        for part in self._plan.own_parts:
            await self._signals.until_ready(part.index)
            payload = self._plan.values.averages.encoded(self._plan.me, part.index)
            digests += await self._hand_over(Lane.AVERAGES, stream, part, payload)
        assert proofs is not None
        if len(digests) == len(self._plan.own_parts):
            proofs._shares.clear()  # other averages may have gone to another member
            await stream.send_all(proofs.sign_output(digests).trailer)

    async def _hand_over(self, lane: Lane, stream: Stream, part: SharePart, payload: Buffer) -> list[bytes]:
        """Send a part, and return the digest of what was sent: a liar signs its lies."""
        how = self.how[0] if lane is self.lies_on else deliver
        noted = Noted(stream)
        await how(noted, part, bytes(payload))
        return [part_digest(sent[FRAME_BYTES:]) for sent in noted.sent[:1]]


class LyingAttempt(Attempt):
    """Sends with a lying sender, and accuses no member."""

    lying_sender: ClassVar[type[Sender]] = LyingSender

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        vars(self.signals)["broken"] = lambda *_: None
        self.sender = self.lying_sender(self.plan, self.signals)


def lying(lane: Lane, how: Deliver) -> type[LyingAttempt]:
    made = type("Lying", (LyingSender,), {"lies_on": lane, "how": [how]})
    return type("LyingOnALane", (LyingAttempt,), {"lying_sender": made})


def changed(change: Callable[[bytes], bytes], index: int = 1) -> Deliver:
    """Sends a vector of which a part is changed."""

    async def send(stream: Stream, part: SharePart, payload: bytes) -> None:
        await deliver(stream, part, change(payload) if part.index == index else payload)

    return send


async def a_part_twice(stream: Stream, part: SharePart, payload: bytes) -> None:
    for _ in range(1 + (part.index == 1)):
        await deliver(stream, part, payload)


async def too_few(stream: Stream, part: SharePart, payload: bytes) -> None:
    if part.index < 2:
        await deliver(stream, part, payload)


def first_number(value: float) -> Callable[[bytes], bytes]:
    return lambda payload: struct.pack("<f", value) + payload[4:]


INVALID = "does not decode"
ON_LANES: dict[str, tuple[Deliver, str]] = {
    "NaN": (changed(first_number(float("nan"))), INVALID),
    "a part twice": (a_part_twice, "came where part"),
    "too few parts": (too_few, "bytes early"),
}


@pytest.mark.parametrize(
    ("lie", "lane", "liar"),
    [
        *[(lie, Lane.CONTRIBUTIONS, 2) for lie in ON_LANES],
        ("NaN", Lane.CONTRIBUTIONS, 0),
        *[(lie, Lane.AVERAGES, 2) for lie in ON_LANES],
    ],
)
async def test_member_with_damaged_parts_is_excluded_by_name(
    monkeypatch: pytest.MonkeyPatch, lie: str, lane: Lane, liar: int
) -> None:
    how, reason = ON_LANES[lie]
    instead(monkeypatch, "Attempt", liar, lying(lane, how))
    check_costs_itself(await play(), liar, reason)


def only_to(victim: int, how: Deliver) -> Deliver:
    async def send(stream: Stream, part: SharePart, payload: bytes) -> None:
        await (how if stream.remote == name(victim) else deliver)(stream, part, payload)

    return send


@pytest.mark.parametrize(("lane", "victim"), [(Lane.CONTRIBUTIONS, 3), (Lane.AVERAGES, 1)])
async def test_all_members_learn_which_member_one_saw_lie(
    monkeypatch: pytest.MonkeyPatch, lane: Lane, victim: int
) -> None:
    nan = changed(first_number(float("nan")))
    instead(monkeypatch, "Attempt", 2, lying(lane, only_to(victim, nan)))
    check_costs_itself(await play(), 2, INVALID)


async def test_leader_that_lies_later_to_others_splits_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader drops the member that saw it lie; when the others see a lie too, they keep that member."""
    victim, first = 2, dict[str, Stream]()

    async def lie(stream: Stream, part: SharePart, payload: bytes) -> None:
        spared = first.setdefault(stream.remote, stream) is stream and stream.remote != name(victim)
        if spared and part.index > 3:
            await trio.sleep(0.1)  # so that the others are already in the exchange
        await deliver(stream, part, payload if spared else first_number(float("nan"))(payload))

    instead(monkeypatch, "Attempt", 0, lying(Lane.CONTRIBUTIONS, lie))
    check_costs_itself(await play(), 0, INVALID)


# ---------------------------------------------------------------------- unexpected lanes


class AnotherGroups(LyingAttempt):
    """Marks all its lanes as belonging to another group."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given | {"group": replace(given["group"], proposal=99)})


class AnotherAttempts(LyingAttempt):
    """Marks all its lanes as belonging to a far later attempt."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.sender = LyingSender(replace(self.plan, number=self.plan.number + 1000), self.signals)


@pytest.mark.parametrize(("lie", "liar"), [(AnotherGroups, 0), (AnotherAttempts, 2)])
async def test_member_with_parts_of_another_group_or_attempt_is_excluded_by_name(
    monkeypatch: pytest.MonkeyPatch, lie: type[LyingAttempt], liar: int
) -> None:
    instead(monkeypatch, "Attempt", liar, lie)
    swarm = await play()
    check_costs_itself(swarm, liar, "sent no part of its contribution")
    assert max(swarm.ended[name(index)] - swarm.began[name(index)] for index in honest(liar)) < 6.0


def opening(*headers: LaneHeader, parts: int = 40) -> type[LyingAttempt]:
    """Return an attempt class that opens additional lanes and sends numbers on them."""

    class Opening(LyingSender):
        async def send_to(self, member: Candidate) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(super().send_to, member)
                for header in headers:
                    sent = structs.replace(header, group_id=self._plan.group.group_id)
                    transport = self._plan.context.transport
                    nursery.start_soon(open_lane, transport, member.peer_id, sent, parts)

    return type("OpeningAttempt", (LyingAttempt,), {"lying_sender": Opening})


async def open_lane(transport: Transport, to: str, header: LaneHeader, parts: int = 40) -> None:
    try:
        stream = await transport.open_stream(to, PROTOCOL, timeout=5.0)
        await send_message(stream, header.encode())
        for index in range(parts):
            await stream.send_all(part_frame(index) + struct.pack("<4f", *[7.0] * 4))
    except (UnreachableError, StreamBrokenError, ClosedError):
        pass


def header(lane: Lane, attempt: int = 0, reducer: int = 0) -> LaneHeader:
    return LaneHeader(bytes(32), lane, attempt, reducer)


@pytest.mark.parametrize(("often", "liar"), [(1, 0), (140, 2)])
async def test_member_that_opens_a_second_lane_is_excluded_by_name(
    monkeypatch: pytest.MonkeyPatch, often: int, liar: int
) -> None:
    instead(monkeypatch, "Attempt", liar, opening(*[header(Lane.CONTRIBUTIONS)] * often, parts=0))
    check_costs_itself(await play(), liar, "it opened a lane that is not due")


HARMLESS = [
    *[header(Lane.CONTRIBUTIONS, 1000 + index) for index in range(40)],  # of attempts that are far ahead
    *[header(Lane.PASSED_ON, reducer=index) for index in range(SIZE)],  # of shares that it was not asked for
    *[header(Lane.ASK)] * 20,
]


async def test_unread_lanes_and_unexpected_votes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members later in the roster open the stream of votes."""
    instead(monkeypatch, "Attempt", 0, opening(*HARMLESS, *[header(Lane.CONTROL)] * 20))
    for result in check_exact(await play(), range(SIZE)):
        assert result.lost == {}


async def test_stranger_that_knows_the_group_changes_nothing() -> None:
    async def intrude(stranger: Peer, group_id: bytes, peers: Sequence[Peer]) -> None:
        transport = stranger.context.transport
        async with trio.open_nursery() as nursery:
            for peer in peers:
                for number, lane in enumerate([*Lane] * 10):
                    named = structs.replace(header(lane, number % 2 * 7), group_id=group_id)
                    nursery.start_soon(open_lane, transport, peer.id, named)

    network = MemoryNetwork(latency=LAN, bandwidth=1e6)
    for result in check_exact(await play(network, stranger=intrude), range(SIZE)):
        assert result.lost == {}


# ---------------------------------------------------------------------- lies in votes


class LyingControl(VoteStreams):
    """Sends something before its own votes."""

    said: ClassVar[bytes]

    async def _speak(self, line: Any, stream: Stream) -> None:
        await stream.send_all(self.said)
        await super()._speak(line, stream)


def saying(said: bytes) -> type[LyingControl]:
    return type("Saying", (LyingControl,), {"said": said})


def message(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


TOO_LONG = MAX_VOTE_BYTES + 1
OUTSIDE = f"a member that a group of {SIZE} does not have"
BROKEN_VOTES: dict[str, tuple[bytes, str]] = {
    "garbage": (message(bytes(range(1, 200))), "it broke the protocol"),
    "members out of range": (message(pack("commit", 0, (0, 1, 99), b"", ())), OUTSIDE),
    "a length above the limit": (TOO_LONG.to_bytes(4, "big"), f"a message of {TOO_LONG} bytes"),
}


@pytest.mark.parametrize(("vote", "liar"), [*[(vote, 2) for vote in BROKEN_VOTES], ("garbage", 0)])
async def test_member_with_malformed_votes_is_excluded_by_name(
    monkeypatch: pytest.MonkeyPatch, vote: str, liar: int
) -> None:
    said, reason = BROKEN_VOTES[vote]
    instead(monkeypatch, "VoteStreams", liar, saying(said))
    check_costs_itself(await play(), liar, reason)


OTHERS_VOTES: list[Vote] = [
    Begin(SIZE, SIZE, frozenset({2, 3}), frozenset({2, 3}), 2, frozenset()),
    Begin(2, 2, frozenset({2, 3}), frozenset({2, 3}), 2, frozenset()),  # its own ballot
    Gather(2 + SIZE),
    ResultHeld(9, (bytes(32),) * SIZE, bytes(64)),  # of a ballot that is none
    StaleBallot(77),
]


async def test_votes_beyond_a_members_role_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    votes = b"".join(message(vote.encode()) for vote in OTHERS_VOTES)
    instead(monkeypatch, "VoteStreams", 2, saying(votes))
    for result in check_exact(await play(), range(SIZE)):
        assert result.lost == {}


SMALLER = frozenset({0, 1, 2})
ATTEMPT_WITH_STRANGERS: list[Vote] = [
    Gather(SIZE),
    Begin(SIZE, SIZE, SMALLER, SMALLER, 0, frozenset()),
    Gather(2 * SIZE),
    Begin(2 * SIZE, SIZE, frozenset(range(SIZE)), SMALLER, 1, frozenset({0})),
]


async def test_a_leader_that_names_members_of_an_attempt_that_were_not_in_it_is_excluded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leader asks a member to pass on the share of another one that was never in that attempt."""
    votes = b"".join(message(vote.encode()) for vote in ATTEMPT_WITH_STRANGERS)
    instead(monkeypatch, "VoteStreams", 0, saying(votes))
    swarm = await play()
    for index in (
        1,
        2,
    ):  # both were asked; they continue without the leader or, if too few, keep their contributions
        result = swarm.results[name(index)]
        assert isinstance(result, p2pavg.Success | p2pavg.Failed)
        told = result.lost[name(0)] if isinstance(result, p2pavg.Success) else result.reason
        assert "it sent an impossible vote: Begin" in told
        assert isinstance(result, p2pavg.Success) or result.contribution_used is False
    groups = [result for result in swarm.results.values() if isinstance(result, p2pavg.Success)]
    for found in groups:
        members = [index for index in range(SIZE) if name(index) in found.peers]
        torch.testing.assert_close(
            tensors_of(found)[0], mean(members, ELEMENTS).float(), rtol=1e-5, atol=1e-6
        )


async def test_a_leader_that_names_other_members_to_each_member_makes_no_two_ban_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their shares of the vector differ, so that one member's parts are wrong for the other."""
    misled = 1
    # As with vectors of millions of elements, a part's size depends on the number of members.
    monkeypatch.setattr("p2pavg.allreduce.reduction.part_size", lambda _elements, count: 32 * count)

    class TwoFaced(LyingControl):
        async def _speak(self, line: Any, stream: Stream) -> None:
            position = self._positions[stream.remote]
            members = frozenset({0, 1, 2} if position == misled else range(SIZE))
            for vote in (Gather(SIZE), Begin(SIZE, SIZE, members, members, 0, frozenset())):
                await stream.send_all(message(vote.encode()))
            await VoteStreams._speak(self, line, stream)

    bans: list[tuple[str, str]] = []

    def ban(self: Matchmaker, peer_id: str, reason: str, seconds: float) -> None:
        bans.append((self._context.transport.peer_id, peer_id))

    monkeypatch.setattr(Matchmaker, "ban", ban)
    instead(monkeypatch, "VoteStreams", 0, TwoFaced)
    swarm = await play()
    assert not [pair for pair in bans if name(0) not in pair]
    for index in honest(0):
        result = swarm.results[name(index)]
        assert isinstance(result, p2pavg.Success | p2pavg.Failed)
        if isinstance(result, p2pavg.Success):
            members = [index for index in range(SIZE) if name(index) in result.peers]
            torch.testing.assert_close(
                tensors_of(result)[0], mean(members, ELEMENTS).float(), rtol=1e-5, atol=1e-6
            )


async def test_a_member_that_votes_without_end_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    said = message(StaleBallot(1).encode()) * (max_votes(SIZE) + 1)
    instead(monkeypatch, "VoteStreams", 2, saying(said))
    check_costs_itself(await play(), 2, "it sends more votes than a round needs")


async def test_a_member_that_accuses_all_others_is_left_out_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It repeats the accusation, but answers the leader that it has trouble with no member."""
    liar = 1
    accused = [index for index in range(1, SIZE) if index != liar]
    said = b"".join(message(Trouble(index, False, "so it says").encode()) for index in accused) * 20
    instead(monkeypatch, "VoteStreams", liar, saying(said))
    check_exact(await play(), honest(liar))


@EVERYWHERE
async def test_an_exception_over_a_members_vote_excludes_that_member(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, liar: int
) -> None:
    advance = agreement.advance

    def fault(member: MemberState, event: Event) -> Any:
        if isinstance(event, VoteHeard) and event.sender == liar and isinstance(event.vote, StaleBallot):
            raise KeyError("a rule that is wrong")
        return advance(member, event)

    monkeypatch.setattr(voting, "advance", fault)
    instead(monkeypatch, "VoteStreams", liar, saying(message(StaleBallot(1).encode())))
    check_costs_itself(await play(), liar, "its vote cannot be handled: KeyError")
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert errors
    assert all(name(liar) in record.getMessage() and record.exc_info for record in errors)


async def test_members_that_can_form_no_group_end_the_round_without_an_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leader may have placed an auxiliary first in the roster, and left."""

    def impossible(self: Roster, attempt: int, *_: Any) -> Roster:
        if attempt:
            raise RemoteProtocolError("a roster that is led by an auxiliary")
        return self

    monkeypatch.setattr(Roster, "among", impossible)
    instead(monkeypatch, "VoteStreams", 2, saying(message(b"garbage")))
    swarm = await play()
    for index in honest(2):
        result = swarm.results[name(index)]
        assert isinstance(result, p2pavg.Failed)
        assert result.contribution_used is not True
    assert "cannot form a group" in str(swarm.results[name(0)])


async def test_an_exception_over_a_members_lane_excludes_that_member(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Receiver._moves_of

    def fault(self: Receiver, lane: InboundLane) -> Any:
        if lane.remote == name(2):
            raise ValueError("a rule that is wrong")
        return real(self, lane)

    monkeypatch.setattr(Receiver, "_moves_of", fault)
    check_costs_itself(await play(), 2, "its message cannot be handled: ValueError")


async def test_an_exception_that_no_message_caused_leaves_the_averager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fault(self: exchange.Traffic) -> None:
        raise KeyError("a rule that is wrong")

    monkeypatch.setattr(exchange.Traffic, "measure", fault)
    with pytest.raises(BaseExceptionGroup) as raised:
        await play()
    assert raised.group_contains(KeyError)


# ---------------------------------------------------------------------- different messages to different members


@EVERYWHERE
async def test_a_reducer_that_sends_different_averages_is_excluded_by_name(
    monkeypatch: pytest.MonkeyPatch, liar: int
) -> None:
    size = 3
    others = honest(liar, size)

    async def something_else(stream: Stream, part: SharePart, payload: bytes) -> None:
        number = struct.pack("<f", 1.0 + [name(index) for index in others].index(stream.remote))
        await deliver(stream, part, number + payload[4:] if part.index == 1 else payload)

    instead(monkeypatch, "Attempt", liar, lying(Lane.AVERAGES, something_else))
    reason = "it sent different results to different members, and signed both"
    if liar == 0:  # its own leader code detects the lie
        reason = "was lost: it gave the round up: this peer holds another result"
    check_costs_itself(await play(size=size), liar, reason, size)


async def test_a_member_that_names_another_digest_is_left_out_and_the_reducer_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reducer's signature decides which of the two lies. The first time may be damage: there is no ban."""
    liar, bans = 3, []
    completed = exchange.Exchange.hold

    def lie(self: exchange.Exchange, attempt: Attempt, digests: tuple[bytes, ...]) -> None:
        if self._context.transport.peer_id == name(liar):
            digests = (digests[0], bytes(32), *digests[2:])
        completed(self, attempt, digests)

    monkeypatch.setattr(exchange.Exchange, "hold", lie)
    monkeypatch.setattr(Memory, "ban", lambda *banned: bans.append(banned))
    swarm = await play(how=config(group_size=SIZE, audit="off"))
    assert bans == []
    check_exact(swarm, honest(liar))


# ---------------------------------------------------------------------- signatures


def saying_when_complete(
    monkeypatch: pytest.MonkeyPatch, liar: int, tell: Callable[[exchange.Exchange, tuple[bytes, ...]], None]
) -> None:
    """Let a member tell something as soon as it has the whole result of the first attempt."""
    completed = exchange.Exchange.hold

    def lie(self: exchange.Exchange, attempt: Attempt, digests: tuple[bytes, ...]) -> None:
        if self._context.transport.peer_id == name(liar) and attempt.number == 0:
            tell(self, digests)
        completed(self, attempt, digests)

    monkeypatch.setattr(exchange.Exchange, "hold", lie)


FALSE_SIGNERS = {
    "not signed": (),
    "signed by the liar": (3,),
    "signed by the liar, the others forged": (0, 1, 2, 3),
}


@pytest.mark.parametrize("signers", FALSE_SIGNERS)
async def test_a_false_commit_makes_no_member_succeed_alone_or_lose_its_contribution(
    monkeypatch: pytest.MonkeyPatch, signers: str
) -> None:
    """The liar sends its averages to one member only, and says to all members that the round was committed."""
    liar, victim = 3, 1

    async def withhold(stream: Stream, part: SharePart, payload: bytes) -> None:
        if stream.remote != name(victim):
            await trio.sleep_forever()
        await deliver(stream, part, payload)

    def tell(self: exchange.Exchange, digests: tuple[bytes, ...]) -> None:
        all_members, voting_ = frozenset(range(SIZE)), self._voting
        signature = voting_.signing.sign(0, all_members, digests)
        signed = tuple((one, signature) for one in FALSE_SIGNERS[signers])
        commit = VotedCommit(0, all_members, result_digest(digests) if signed else b"", signed)
        for position in range(SIZE - 1):
            voting_.control.tell(position, commit)

    instead(monkeypatch, "Attempt", liar, lying(Lane.AVERAGES, withhold))
    saying_when_complete(monkeypatch, liar, tell)
    swarm = await play()
    results = [swarm.results[name(index)] for index in honest(liar)]
    if any(isinstance(result, p2pavg.Success) for result in results):
        check_exact(swarm, honest(liar))  # a forged signature excludes the liar in time
    for result in results:
        assert isinstance(result, p2pavg.Success | p2pavg.Failed)
        assert isinstance(result, p2pavg.Success) or result.contribution_used is not True


async def test_a_member_whose_signature_does_not_verify_is_excluded_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sign = Signing.sign

    def forge(self: Signing, attempt: int, members: frozenset[int], digests: Sequence[bytes]) -> bytes:
        signature = sign(self, attempt, members, digests)
        return bytes(64) if self._signer.peer_id == name(2) else signature

    monkeypatch.setattr(Signing, "sign", forge)
    check_costs_itself(await play(), 2, "its signature of the result does not verify")


async def test_a_member_that_signs_two_results_is_excluded_and_banned_by_its_own_signatures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    liar, bans = 2, []

    def tell(self: exchange.Exchange, digests: tuple[bytes, ...]) -> None:
        all_members, other = frozenset(range(SIZE)), (bytes(32), *digests[1:])
        signature = self._voting.signing.sign(0, all_members, other)
        self._voting.control.tell(0, VotedCommit(0, all_members, result_digest(other), ((liar, signature),)))

    saying_when_complete(monkeypatch, liar, tell)
    monkeypatch.setattr(Matchmaker, "ban", lambda _self, peer_id, *_: bans.append(peer_id))
    check_costs_itself(await play(), liar, "it signed two results of one attempt")
    assert set(bans) == {name(liar)}


async def test_a_leader_that_does_not_show_all_signatures_makes_no_member_commit_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It shows two of four signatures, and leaves. The others end the round with the result that all of them hold."""
    signed_commit = agreement._signed_commit

    def some(member: MemberState) -> VotedCommit:
        commit = signed_commit(member)
        if member.me != 0:
            return commit
        return structs.replace(commit, signatures=tuple(one for one in commit.signatures if one[0] in (0, 1)))

    monkeypatch.setattr(agreement, "_signed_commit", some)
    swarm = await play()
    results = [swarm.results[name(index)] for index in honest(0)]
    found = [result for result in results if isinstance(result, p2pavg.Success)]
    assert len(found) == len(results)
    assert same_bits(found)
    for result in found:
        check_certificate(result)
        proof = p2pavg.verify_certificate(result.certificate)
        assert set(proof.signers) >= {name(index) for index in honest(0)}


# ---------------------------------------------------------------------- omissions


async def test_voter_that_never_contributes_is_excluded_by_name() -> None:
    """Its workers never run: it is present, answers and sends nothing false."""
    liar = 0

    async def never(function: Callable[..., Any], *args: object) -> Any:
        await trio.sleep_forever()

    def prepare(peer: Peer, index: int) -> None:
        if index == liar:
            peer.context = replace(peer.context, run_in_thread=never)

    swarm = await play(how=config(group_size=SIZE, exchange_timeout=60.0), prepare=prepare)
    check_costs_itself(swarm, liar, "sent no part of its contribution")
    assert max(swarm.ended[name(index)] - swarm.began[name(index)] for index in honest(liar)) < 6.0


async def test_a_member_that_never_says_that_it_holds_the_result_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does everything else. The leader leaves enough time for another attempt, even after a short first one."""
    liar, tell = 1, VoteStreams.tell

    def say_nothing_of_it(self: VoteStreams, position: int, vote: Vote) -> None:
        if self._roster.members[self._me].peer_id != name(liar) or not isinstance(vote, ResultHeld):
            tell(self, position, vote)

    monkeypatch.setattr(VoteStreams, "tell", say_nothing_of_it)
    check_costs_itself(await play(), liar, "it is too slow for the others to end in time")


async def test_a_leader_that_does_not_end_its_round_has_a_strike_and_no_ban(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is present and answers, but never announces the commit."""
    strikes: list[tuple[str | None, bool, bool]] = []
    advance, until_the_end = agreement.advance, exchange.Exchange._until_the_end
    leave = SlowMembers.leave_behind

    def hear_no_result(member: MemberState, event: Event) -> Any:
        held = isinstance(event, VoteHeard) and isinstance(event.vote, ResultHeld)
        return (member, []) if held and member.me == 0 else advance(member, event)

    async def outlast_the_others(self: exchange.Exchange) -> None:
        self._timeout *= 2 if self._context.transport.peer_id == name(0) else 1
        await until_the_end(self)

    async def wait_for_all(self: SlowMembers, began: float) -> None:
        if self._voting.member.me != 0:
            await leave(self, began)

    monkeypatch.setattr(voting, "advance", hear_no_result)
    monkeypatch.setattr(exchange.Exchange, "_until_the_end", outlast_the_others)
    monkeypatch.setattr(SlowMembers, "leave_behind", wait_for_all)
    monkeypatch.setattr(
        Rounds, "_avoid", lambda _self, v: strikes.append((v.peer_id, v.hostile, v.seconds > 0))
    )
    # With equal latencies the members' time is over at once, before one hears that another one gave up.
    swarm = await play(MemoryNetwork(latency=(0.001, 0.001)))
    for index in honest(0):
        result = swarm.results[name(index)]
        assert isinstance(result, p2pavg.Failed)
        assert "led the round and did not end it" in result.reason
        assert result.code is p2pavg.FailedCode.TIMED_OUT
    assert {strike for strike in strikes if strike[1] or strike[2]} == {(name(0), False, True)}


async def test_member_with_a_false_address_is_lost_and_its_neighbour_is_not() -> None:
    """Its record has another member's address, and it dials no other member once the group stands."""
    network, liar, victim = MemoryNetwork(latency=LAN), 2, 1
    location = network.location_of(name(victim))
    transports: list[MemoryTransport] = []

    class Elsewhere(MemoryTransport):
        @property
        def addresses(self) -> tuple[str, ...]:
            return with_peer_id([location], self.peer_id)

    def prepare(peer: Peer, index: int) -> None:
        if index == liar:
            transport = peer.context.transport
            assert isinstance(transport, MemoryTransport)
            transport.__class__ = Elsewhere
            transports.append(transport)

    async def refuse_to_dial(peer_id: str, address: str) -> None:
        raise UnreachableError("it does not want to")

    def hide(peer_id: str, milestone: Milestone) -> None:
        if milestone is Milestone.FORMED and transports:
            transport = transports.pop()
            transport.dial_one = refuse_to_dial  # type: ignore[method-assign]
            for index in honest(liar):
                network.disconnect(transport.peer_id, name(index))

    network.watchers.append(hide)
    swarm = await play(network, prepare=prepare)
    assert not transports
    check_costs_itself(swarm, liar, "silent for")


# ---------------------------------------------------------------------- a leader with two groups


@pytest.mark.parametrize(
    ("fewer", "astray"),
    [(False, {1}), (True, {3, 4})],
    ids=["the same members to one", "other members to two"],
)
async def test_leader_with_different_rosters_causes_no_wrong_result(
    monkeypatch: pytest.MonkeyPatch, fewer: bool, astray: set[int]
) -> None:
    """The leader commits both groups. Members of one group that succeed hold the same result."""
    ids = {name(index) for index in astray}
    proposed: dict[str, bytes] = {}
    propose, accepted, told = OwnGroup.propose, OwnGroup.accepted, Matchmaking.told

    def propose_both(self: OwnGroup, reason: str, now: float) -> Actions:
        actions = propose(self, reason, now)
        me, settings = self._state.me, self._state.settings
        if me.peer_id != name(0):
            return actions
        for at, action in enumerate(actions):
            if not isinstance(action, Send) or not isinstance(action.message, GroupProposal):
                continue
            roster = action.message.roster
            if action.peer_id in ids:
                members = [m for m in roster.members if not fewer or m is me or m.peer_id in ids]
                shares = settings.cutter.cut(members)
                roster = Roster(members=tuple(members), shares=shares, proposal=roster.proposal + 1)
                actions[at] = Send(action.peer_id, GroupProposal(roster), action.reason)
            proposed[action.peer_id] = roster.group_id
        return actions

    def hear_both(self: Matchmaking, peer_id: str, message: Message, now: float) -> Actions:
        if self.state.me.peer_id != name(0):
            return told(self, peer_id, message, now)
        assert isinstance(message, Accept)
        return self.group.accepted(peer_id)

    def commit_both(self: OwnGroup, peer_id: str) -> Actions:
        actions = accepted(self, peer_id)
        if self._state.me.peer_id != name(0):
            return actions
        return [
            replace(action, message=GroupCommit(proposed[action.peer_id]))
            if isinstance(action, Send)
            else action
            for action in actions
        ]

    monkeypatch.setattr(OwnGroup, "propose", propose_both)
    monkeypatch.setattr(Matchmaking, "told", hear_both)
    monkeypatch.setattr(OwnGroup, "accepted", commit_both)
    swarm = await play(size=5)
    assert len(set(proposed.values())) == 2
    groups: dict[str, list[p2pavg.Success]] = {}
    for index in range(1, 5):
        result = swarm.results[name(index)]
        assert isinstance(result, p2pavg.Success | p2pavg.Failed)
        if isinstance(result, p2pavg.Success):
            assert name(index) in result.peers
            groups.setdefault(result.group_id, []).append(result)
    for found in groups.values():
        assert same_bits(found)
        members = [index for index in range(5) if name(index) in found[0].peers]
        assert all(set(result.peers) == set(found[0].peers) for result in found)
        torch.testing.assert_close(
            tensors_of(found[0])[0], mean(members, ELEMENTS).float(), rtol=1e-5, atol=1e-6
        )
        used = {name(index) for index in members} - {name(0)}
        ended = {p for p in used if isinstance(swarm.results[p], p2pavg.Success)}
        assert ended == used, "a member that is told of a failure is counted in another group"
    assert groups
