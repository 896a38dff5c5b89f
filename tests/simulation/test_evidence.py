"""Evidence of a lie spreads through a run: every member excludes the liar, and no accuser harms an honest peer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio

import p2pavg
from p2pavg.allreduce.attempt import Attempt
from p2pavg.base.errors import StreamBrokenError
from p2pavg.base.limits import LOOK_SECONDS, RECORD_LIFE_SECONDS, SPREAD_LOOK_SECONDS
from p2pavg.consensus.statements import Signed, Statement, encode_evidence, result_digest
from p2pavg.consensus.votes import ResultCommit
from p2pavg.net.transport import Stream, receive_message, send_message
from p2pavg.peer.auxiliary import assist
from p2pavg.peer.peer import Peer
from p2pavg.round import exchange
from p2pavg.runs.membership.certificate import Role
from p2pavg.runs.membership.membership import Membership
from p2pavg.runs.records.run_records import RunRecords
from p2pavg.testing import MemoryNetwork, simulated_peers
from p2pavg.testing.simulation import EPOCH, simulated_clock, simulated_signer
from p2pavg.verification.evidence import service
from p2pavg.verification.evidence.accusation import (
    PROTOCOL,
    EvidenceAnswer,
    EvidenceRequest,
    Named,
    Notice,
    accusations_key,
    digest_of,
    read_accusation,
)
from p2pavg_dht import Ed25519Signer, Signer
from tests.simulation.swarm import LAN, config, values
from tests.unit.group.samples import SIGNERS, candidate
from tests.unit.runs.membership.runs import Authority
from tests.unit.verification.evidence.large import admit_large, large_evidence
from tests.unit.verification.evidence.samples import LIAR

RUN = Authority()
KEY = accusations_key("sim")
LIE = "it signed that it holds two results of attempt 0 of group"
SOON = 2 * LOOK_SECONDS + 1.0
"""Seconds until a notice that other peers store is read, and its evidence fetched, on a network of a few peers."""


def name(index: int) -> str:
    return simulated_signer(index).peer_id


def of_run(index: int, *roles: Role, **changed: Any) -> p2pavg.AveragingConfig:
    access = RUN.access(
        simulated_signer(index), roles=roles or [Role.CONTRIBUTOR], not_before=EPOCH, expires=EPOCH + 86400.0
    )
    return config(access=access, match_timeout=2.0, **changed)


def evidence_against(signer: Signer, group: bytes = b"g") -> bytes:
    """Return genuine evidence: a peer signed two results."""
    one, other = (
        Signed(signer.peer_id, said, signer.sign(said.signed_bytes()))
        for said in (Statement(group * 32, 0, frozenset({0, 1}), digest * 32) for digest in (b"a", b"b"))
    )
    return encode_evidence(one, other)


@asynccontextmanager
async def averagers(
    peers: Sequence[Peer], how: Callable[[int], p2pavg.AveragingConfig] = of_run
) -> AsyncIterator[list[p2pavg.DecentralizedAverager]]:
    """Open an averager on each peer, and let them finish a round, so that they have met."""
    async with AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(peer.averager(how(index))) for index, peer in enumerate(peers)
        ]
        await step_all(opened)
        yield opened


async def step_all(opened: Sequence[p2pavg.DecentralizedAverager]) -> dict[str, p2pavg.RoundResult]:
    results: dict[str, p2pavg.RoundResult] = {}

    async def step(index: int, averager: p2pavg.DecentralizedAverager) -> None:
        await trio.sleep(0.1 * index)
        averager.clear()
        averager.accumulate([values(index)])
        results[averager.peer_id] = await averager.step(wait=None)

    async with trio.open_nursery() as nursery:
        for index, averager in enumerate(opened):
            nursery.start_soon(step, index, averager)
    return results


def lie_in_rounds(monkeypatch: pytest.MonkeyPatch, liar: int) -> None:
    """Let a member sign a second result in each round, and show it to the leader."""
    completed = exchange.Exchange.hold

    def lie(self: exchange.Exchange, attempt: Attempt, digests: tuple[bytes, ...]) -> None:
        if self._context.transport.peer_id == name(liar) and attempt.number == 0:
            members, other = frozenset(range(len(self._roster.members))), (bytes(32), *digests[1:])
            me = self._positions[self._context.transport.peer_id]
            signature = self._voting.signing.sign(0, members, other)
            self._voting.control.tell(0, ResultCommit(0, members, result_digest(other), ((me, signature),)))
        completed(self, attempt, digests)

    monkeypatch.setattr(exchange.Exchange, "hold", lie)


# ---------------------------------------------------------------------- lies


@pytest.mark.parametrize(
    "how",
    [of_run, lambda _index, **changed: config(match_timeout=2.0, **changed)],
    ids=["run with an authority", "open run"],
)
async def test_all_members_and_newcomers_exclude_a_member_that_signed_two_results(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: Callable[..., p2pavg.AveragingConfig],
) -> None:
    """The liar is in one group of two; the other group hears of it, and a newcomer hears of it from that one."""
    liar, witnesses, others, newcomer = 2, (0, 1), (3, 4, 5), 6
    lie_in_rounds(monkeypatch, liar)
    async with simulated_peers(MemoryNetwork(latency=LAN), 7) as peers, AsyncExitStack() as leaving:
        opened: dict[int, p2pavg.DecentralizedAverager] = {}
        async with AsyncExitStack() as stack:
            for index in (*others, *witnesses, liar):
                owner = leaving if index in others else stack
                opened[index] = await owner.enter_async_context(
                    peers[index].averager(how(index, group_size=3))
                )
            first = await step_all([opened[index] for index in (*witnesses, liar)])
            assert isinstance(first[name(0)], p2pavg.Success)
            assert name(liar) not in first[name(0)].peers  # type: ignore[union-attr]
            second = await step_all([opened[index] for index in others])
            assert all(isinstance(result, p2pavg.Success) for result in second.values()), second
            await trio.sleep(SOON)
            for index in (*witnesses, *others):
                assert opened[index].excluded.keys() == {name(liar)}, index
                assert opened[index].excluded[name(liar)].startswith(LIE)
            assert opened[liar].excluded == {}
        async with peers[newcomer].averager(how(newcomer, group_size=3)) as late:
            await trio.sleep(SOON)
            assert late.excluded.keys() == {name(liar)}
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum(f"{name(liar)} is excluded from run 'sim': {LIE}" in line for line in said) == 6


async def test_evidence_of_a_round_that_fails_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    lie_in_rounds(monkeypatch, 1)
    async with simulated_peers(MemoryNetwork(latency=LAN), 2) as peers, AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(peers[index].averager(of_run(index, group_size=2)))
            for index in (0, 1)
        ]
        results = await step_all(opened)
        assert isinstance(results[name(0)], p2pavg.Failed)
        assert opened[0].excluded.keys() == {name(1)}


async def test_an_excluded_peer_hears_why_it_cannot_join() -> None:
    async with (
        simulated_peers(MemoryNetwork(latency=LAN), 3) as peers,
        averagers(peers, partial(of_run, group_size=3)) as opened,
    ):
        opened[0]._run.accuse(evidence_against(simulated_signer(2)))
        await trio.sleep(SOON)
        results = await step_all(opened)
        refused = results[name(2)]
        assert isinstance(refused, p2pavg.NoPeers | p2pavg.InProgress)
        assert f"it is excluded from the run by evidence: {LIE}" in refused.reason
        for index in (0, 1):
            result = results[name(index)]
            assert isinstance(result, p2pavg.Success)
            assert set(result.peers) == {name(0), name(1)}


async def test_a_follower_that_is_excluded_while_it_waits_is_dropped() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 2) as peers, AsyncExitStack() as stack:
        how = config(group_size=3, min_group_size=3, match_timeout=120.0)
        opened = [await stack.enter_async_context(peer.averager(how)) for peer in peers]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(step_all, opened)
            await trio.sleep(5.0)
            leader = opened[0]._rounds
            assert leader is not None
            attempt = leader.matchmaker._attempt
            assert attempt is not None
            assert set(attempt.rules.group.followers) == {name(1)}
            opened[0]._run.accuse(evidence_against(simulated_signer(1)))
            await trio.sleep(0.1)
            assert leader.matchmaker._attempt is attempt, "the same attempt"
            assert attempt.rules.group.followers == {}
            nursery.cancel_scope.cancel()


async def test_entries_on_boards_of_an_excluded_peer_are_left_out() -> None:
    """An optimizer's progress and the source of ``sync_parameters`` are such entries."""
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers, averagers(peers) as opened:
        boards = [await averager.board("progress") for averager in opened]
        for board in boards:
            board.publish(b"here", now=True)
        await trio.sleep(5.0)
        assert boards[0].entries.keys() == {name(1), name(2)}
        opened[1]._run.accuse(evidence_against(simulated_signer(2)))
        await trio.sleep(2 * SPREAD_LOOK_SECONDS)
        assert boards[0].entries.keys() == {name(1)}


async def test_an_auxiliary_excludes_a_liar_and_is_excluded_as_one() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 5) as peers, trio.open_nursery() as nursery:
        for index in (3, 4):
            nursery.start_soon(
                partial(assist, peers[index], "sim", access=of_run(index, Role.AUXILIARY).access)
            )
        async with averagers(peers[:3], partial(of_run, group_size=2)) as opened:
            await trio.sleep(SPREAD_LOOK_SECONDS)
            opened[0]._run.accuse(evidence_against(simulated_signer(3)))
            opened[0]._run.accuse(evidence_against(simulated_signer(2)))
            await trio.sleep(SPREAD_LOOK_SECONDS)
            (run,) = peers[4].evidence._runs.values()
            assert run.accusations.exclusions.reasons.keys() == {name(2), name(3)}
            results = await step_all(opened[:2])
            for result in results.values():
                assert isinstance(result, p2pavg.Success)
                assert result.auxiliaries == (name(4),)
        nursery.cancel_scope.cancel()


async def test_an_auxiliary_refuses_candidates_that_are_excluded() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers, trio.open_nursery() as nursery:
        nursery.start_soon(assist, peers[2], "sim")
        async with averagers(peers[:2], lambda _index: config(match_timeout=2.0)) as opened:
            await trio.sleep(SPREAD_LOOK_SECONDS)
            (matchmaker,) = peers[2].registry._matchmakers.values()
            refuses = matchmaker._settings.refuses
            assert refuses is not None
            assert refuses(candidate(0), simulated_clock()) is None
            opened[0]._run.accuse(evidence_against(SIGNERS[0]))
            await trio.sleep(SOON)
            assert LIE in (refuses(candidate(0), simulated_clock()) or "")
        nursery.cancel_scope.cancel()


async def test_evidence_of_some_mebibytes_spreads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network carries 80 Mbit/s."""
    admit_large(monkeypatch)
    network = MemoryNetwork(latency=LAN, bandwidth=1e7)
    async with simulated_peers(network, 4) as peers, averagers(peers) as opened:
        opened[0]._run.accuse(large_evidence())
        await trio.sleep(SPREAD_LOOK_SECONDS)
        assert [averager.excluded for averager in opened] == [{LIAR.peer_id: "it lied at length"}] * 4


async def test_a_run_of_many_peers_excludes_a_liar_within_a_minute() -> None:
    """Some of them do not store the notice, and the first witness is busy with showing the evidence to others."""
    count = 11
    async with simulated_peers(MemoryNetwork(latency=LAN), count) as peers, AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(peer.averager(config())) for peer in peers]
        await trio.sleep(SPREAD_LOOK_SECONDS)
        opened[0]._run.accuse(evidence_against(simulated_signer(count)))
        with trio.fail_after(60.0):
            while not all(averager.excluded for averager in opened):
                await trio.sleep(1.0)
        assert [set(averager.excluded) for averager in opened] == [{name(count)}] * count


async def test_two_processes_with_one_identity_are_told_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers, averagers(peers) as opened:
        for index in (0, 1):
            opened[index]._run.accuse(evidence_against(simulated_signer(2), bytes([index])))
        await trio.sleep(2 * SPREAD_LOOK_SECONDS)
        assert opened[2].excluded == {}
        assert opened[1].excluded.keys() == {name(2)}
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "make a new identity file, and use one for each process" in errors[0]


async def test_averagers_of_one_peer_share_what_they_know_and_one_goes_on_telling_it() -> None:
    leaves = 0
    async with simulated_peers(MemoryNetwork(latency=LAN), 2) as peers, trio.open_nursery() as nursery:
        opened: dict[int, p2pavg.DecentralizedAverager] = {}
        closing = [trio.Event(), trio.Event()]

        async def hold(number: int) -> None:
            async with peers[0].averager(of_run(0)) as averager:
                opened[number] = averager
                await closing[number].wait()

        for number in (0, 1):
            nursery.start_soon(hold, number)
            await trio.sleep(1.0)
        opened[0]._run.accuse(evidence_against(simulated_signer(5)))
        await trio.sleep(SOON)
        assert opened[0].excluded == opened[1].excluded
        assert opened[0].excluded.keys() == {name(5)}
        closing[leaves].set()
        await trio.sleep(SOON)
        async with peers[1].averager(of_run(1)) as newcomer:
            await trio.sleep(SOON)
            assert newcomer.excluded.keys() == {name(5)}
        closing[1 - leaves].set()
        await trio.sleep(SOON)
        assert peers[0].evidence._runs == {}


# ---------------------------------------------------------------------- hostile accusers


class Accuser:
    """A member that publishes notices of its own, and answers in its own way."""

    def __init__(self, peer: Peer, answer: Callable[[Stream, bytes], Awaitable[None]]) -> None:
        access = of_run(3).access
        assert access is not None
        self._records = RunRecords(peer.records, Membership(access, peer.id), simulated_clock)
        self._peer = peer
        self._answer = answer
        self.asked: Counter[str] = Counter()
        """Fetches, by the peer that fetched."""
        peer.context.transport.serve(PROTOCOL, self._serve)

    async def name(self, *named: Named) -> None:
        value = Notice(tuple(self._peer.addresses), named).encode()
        await self._records.publish(KEY, value, ttl=RECORD_LIFE_SECONDS)

    async def _serve(self, stream: Stream) -> None:
        self.asked[stream.remote] += 1
        request = await receive_message(stream)
        assert request is not None
        await self._answer(stream, request)


async def evidence_of(data: bytes, stream: Stream, _request: bytes) -> None:
    await send_message(stream, EvidenceAnswer("").encode())
    await stream.send_all(data)
    await stream.aclose()


async def never(_stream: Stream, _request: bytes) -> None:
    await trio.sleep_forever()


async def slowly(stream: Stream, _request: bytes) -> None:
    await send_message(stream, EvidenceAnswer("").encode())
    while True:
        await trio.sleep(1.0)
        await stream.send_all(b"x")


async def nonsense(stream: Stream, _request: bytes) -> None:
    await send_message(stream, b"nonsense")


FORGED = evidence_against(simulated_signer(1))[:-1] + b"\0"
VICTIM = name(1)
INVENTED = Ed25519Signer(b"i" * 32)
KIND = "p2pavg-evidence/1"


async def test_an_accuser_whose_evidence_proves_nothing_is_ignored_from_then_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It names the victim in ever new records, and then proves a true lie, which another member has to show."""
    async with simulated_peers(MemoryNetwork(latency=LAN), 4) as peers, averagers(peers[:3]) as opened:
        accuser = Accuser(peers[3], partial(evidence_of, FORGED))
        await accuser.name(Named(digest_of(FORGED), len(FORGED), VICTIM, KIND))
        await trio.sleep(SOON)
        true = evidence_against(INVENTED)
        for number in range(16):
            digest = bytes([number]) * 32
            others = [Named(digest, 300, name(index), KIND) for index in range(3)]
            await accuser.name(*others, read_accusation(true).named)
            await trio.sleep(1.0 if number < 8 else 20.0)
        assert accuser.asked == dict.fromkeys([name(0), name(1), name(2)], 1)
        assert [averager.excluded for averager in opened] == [{}, {}, {}]
        opened[0]._run.accuse(true)
        await trio.sleep(SOON)
        assert [set(averager.excluded) for averager in opened] == [{INVENTED.peer_id}] * 3
        assert set(await step_all(opened)) == {name(0), name(1), name(2)}
    warnings = [
        record.getMessage() for record in caplog.records if "are ignored from now on" in record.message
    ]
    assert len(warnings) == 3
    assert all(line.startswith(f"{name(3)} accused {VICTIM} in run 'sim' and sent ") for line in warnings)


@pytest.mark.parametrize("answer", [never, slowly, nonsense])
async def test_an_accuser_that_gives_no_answer_is_asked_ever_more_rarely(
    answer: Callable[[Stream, bytes], Awaitable[None]],
) -> None:
    """Meanwhile evidence of other members is fetched as soon as ever."""
    true = evidence_against(INVENTED)
    async with simulated_peers(MemoryNetwork(latency=LAN), 4) as peers, averagers(peers[:3]) as opened:
        accuser = Accuser(peers[3], answer)
        for number in range(14):
            digest = bytes([number]) * 32
            await accuser.name(*(Named(digest, 4096, name(index), KIND) for index in range(3)))
            await trio.sleep(10.0)
            if number == 1:
                opened[0]._run.accuse(true)
            if number == 2:
                assert [set(averager.excluded) for averager in opened] == [{INVENTED.peer_id}] * 3
        # After 15, 30 and 60 s besides the first time.
        assert all(2 <= accuser.asked[name(index)] <= 4 for index in range(3)), accuser.asked


# ---------------------------------------------------------------------- showing evidence


async def ask(peer: Peer, of: Peer, key: bytes, digest: bytes, certificate: bytes) -> str:
    """Ask for evidence; return the refusal, or ``"it was shown"``."""
    stream = await peer.context.transport.open_stream(of.id, PROTOCOL, addresses=of.addresses, timeout=5.0)
    await send_message(stream, EvidenceRequest(key, digest, certificate).encode())
    answer = await receive_message(stream)
    if answer is None:
        return "the stream was closed"
    refusal = EvidenceAnswer.decode(answer).refusal
    if not refusal:
        assert digest_of(await stream.receive_some(10_000)) == digest
    await stream.reset()
    return refusal or "it was shown"


async def test_evidence_is_shown_to_members_that_are_not_excluded_and_not_again_and_again() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 4) as peers, averagers(peers[:3]) as opened:
        for index in (2, 4):
            opened[0]._run.accuse(evidence_against(simulated_signer(index)))
        await trio.sleep(SOON)
        (key,) = peers[0].evidence._runs
        digest = digest_of(evidence_against(simulated_signer(4)))
        against_itself = digest_of(evidence_against(simulated_signer(2)))
        own = [of_run(index).access for index in range(4)]
        certificates = [access.certificate for access in own if access is not None]
        stranger, member, liar = peers[3], peers[1], peers[2]
        assert (
            await ask(member, peers[0], key, bytes(32), certificates[1]) == "this peer has no such evidence"
        )
        assert "certificate" in await ask(stranger, peers[0], key, digest, b"")
        assert "certificate" in await ask(stranger, peers[0], key, digest, certificates[1])
        assert "takes no part" in await ask(member, peers[0], bytes(32), digest, certificates[1])
        assert "it is excluded" in await ask(liar, peers[0], key, digest, certificates[2])
        assert await ask(liar, peers[0], key, against_itself, certificates[2]) == "it was shown"
        times = [await ask(stranger, peers[0], key, digest, certificates[3]) for _ in range(9)]
        assert times[: service.TIMES] == ["it was shown"] * service.TIMES
        assert all("several times" in each for each in times[service.TIMES :])


async def test_streams_that_ask_nothing_are_few_and_end() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 11) as peers, averagers(peers[:1]):
        streams = []
        for peer in [*peers[1:], peers[1]]:
            stream = await peer.context.transport.open_stream(
                peers[0].id, PROTOCOL, addresses=peers[0].addresses, timeout=5.0
            )
            streams.append(stream)
        await trio.sleep(1.0)
        assert len(peers[0].evidence._served) == service.MAX_SERVED
        await trio.sleep(20.0)
        assert not peers[0].evidence._served
        for stream in streams:
            with pytest.raises(StreamBrokenError):
                await stream.receive_some(1)
