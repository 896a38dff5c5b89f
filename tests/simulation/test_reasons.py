"""Each reason why two peers do not meet is reported to both, in the result and in the log."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest
import torch
import trio

import p2pavg
from p2pavg import NoPeersCode
from p2pavg.base.errors import StreamBrokenError
from p2pavg.net.transport import Stream, receive_message, send_message
from p2pavg.peer.peer import Peer, peer_over
from p2pavg.runs.records.hello import PROTOCOL, QUESTION, PeerHello
from p2pavg.testing import MemoryNetwork, simulated_clock, simulated_peers
from p2pavg.testing.simulation import run_on_loop, simulated_signer
from tests.simulation.swarm import LAN
from tests.simulation.swarm import config as usual

ONES = [torch.ones(1_000)]


def config(**changes: object) -> p2pavg.AveragingConfig:
    fields = {"group_size": 2, "match_timeout": 15.0, "exchange_timeout": 8.0, "compression": "blockwise8"}
    return usual(**(fields | changes))


@asynccontextmanager
async def peer_whose_clock_is_off(
    network: MemoryNetwork, index: int, seconds: float, bootstrap: Sequence[str]
) -> AsyncIterator[Peer]:
    signer = simulated_signer(index)
    async with (
        network.transport(signer) as transport,
        peer_over(
            transport,
            signer,
            bootstrap=bootstrap,
            wall_clock=lambda: simulated_clock() + seconds,
            run_in_thread=run_on_loop,
        ) as peer,
    ):
        yield peer


async def step(
    peer: Peer, how: p2pavg.AveragingConfig, tensors: Sequence[torch.Tensor] = ONES, state: bytes = b""
) -> p2pavg.RoundResult:
    async with peer.averager(how) as averager:
        averager.accumulate(tensors)
        return await averager.step(wait=None, state=state)


async def reasons(
    *calls: Callable[[], Awaitable[p2pavg.RoundResult]], codes: Sequence[NoPeersCode | None] = ()
) -> list[str]:
    """Run rounds at once that find no group; return their reasons. Check their ``codes``; one in progress has none."""
    found: dict[int, str] = {}
    named: dict[int, NoPeersCode] = {}

    async def run(index: int, call: Callable[[], Awaitable[p2pavg.RoundResult]]) -> None:
        result = await call()
        assert isinstance(result, p2pavg.NoPeers | p2pavg.InProgress), result
        found[index] = result.reason
        if isinstance(result, p2pavg.NoPeers):
            named[index] = result.code

    async with trio.open_nursery() as nursery:
        for index, call in enumerate(calls):
            nursery.start_soon(run, index, call)
    if codes:
        assert [named.get(index) for index in range(len(calls))] == list(codes)
    return [found[index] for index in range(len(calls))]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def test_empty_network(caplog: pytest.LogCaptureFixture) -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 1) as (peer,):
        [reason] = await reasons(partial(step, peer, config()), codes=[NoPeersCode.NO_PEER_READY])
        alone = f"no other peer is in this network; others join with bootstrap=[{peer.addresses[0]!r}]"
    assert alone in reason
    [warned] = warnings(caplog)
    assert warned.startswith("no group in run 'sim' for 10 s: no other peer has joined this one")
    assert alone in warned


async def test_waiting_is_logged_with_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 1) as (peer,):
        await reasons(partial(step, peer, config(match_timeout=200.0)))
    seconds = [warned.partition(" s: ")[0].rpartition(" ")[2] for warned in warnings(caplog)]
    assert seconds == ["10", "30", "70", "150"]


async def test_a_round_that_forms_soon_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 2) as peers, trio.open_nursery() as nursery:
        for peer in peers:
            nursery.start_soon(step, peer, config())
    assert warnings(caplog) == []


async def test_other_peers_in_another_run() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers:
        first, second, _ = await reasons(
            partial(step, peers[0], config(run_id="mine")),
            partial(step, peers[1], config(run_id="theirs")),
            partial(step, peers[2], config(run_id="theirs", compression="int8")),
        )
    assert (
        "2 other peers are in this network; none of them takes part in run 'mine'; 2 of 2 asked take part in other runs"
        in first
    )
    assert "theirs" not in first, "run ids are private"
    assert "takes part in run" not in second


async def test_other_parameters_and_other_architecture() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 3) as peers:
        first, second, third = await reasons(
            partial(step, peers[0], config(), state=b"seed 1"),
            partial(step, peers[1], config(), state=b"seed 2"),
            partial(step, peers[2], config(), tensors=ONES * 2),
            codes=[NoPeersCode.OTHER_PARAMETERS, NoPeersCode.OTHER_PARAMETERS, NoPeersCode.OTHER_SETTINGS],
        )
    for reason in (first, second):
        assert "1 peer of this run averages with other parameters (state)" in reason
        assert "1 peer of this run averages 2 tensors, you have 1" in reason
    assert "2 peers of this run average 1 tensors, you have 2" in third


@pytest.mark.parametrize("seconds", [118.0, -118.0])
async def test_wrong_clock(caplog: pytest.LogCaptureFixture, seconds: float) -> None:
    """With a fast or a slow clock, its records are refused; version 0.1 did not report it."""
    network = MemoryNetwork(latency=LAN)
    async with (
        simulated_peers(network, 3) as peers,
        peer_whose_clock_is_off(network, 9, seconds, peers[0].addresses) as wrong,
    ):
        [reason] = await reasons(partial(step, wrong, config()), codes=[NoPeersCode.CLOCK_OR_VERSION])
    how = "ahead of" if seconds > 0 else "behind"
    assert f"your clock is 118 s {how} 3 peers" in reason
    said = [warned for warned in warnings(caplog) if warned.startswith("your clock")]
    assert said == [f"your clock is 118 s {how} 3 peers; set it"], "once, and by no peer whose clock is right"


async def test_other_protocol_version(caplog: pytest.LogCaptureFixture) -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 2) as (peer, newer):

        async def answer(stream: Stream) -> None:
            await receive_message(stream)
            said = PeerHello(clock=simulated_clock(), protocols=("/p2pavg/match/99.0.0",), runs=1)
            await send_message(stream, said.encode())
            await stream.aclose()

        newer.context.transport.serve(PROTOCOL, answer)
        [reason] = await reasons(partial(step, peer, config()))
    assert "1 peer speaks match/99.0.0, this one match/3.0.0" in reason
    assert any("1 peer speaks match/99.0.0" in warned for warned in warnings(caplog))


async def test_a_heavy_peer_is_named_by_the_others_and_gets_the_reason() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 2) as (peer, heavy):

        async def step_heavily() -> p2pavg.RoundResult:
            async with heavy.averager(config()) as averager:
                averager.accumulate(ONES, weight=1e15)
                return await averager.step(wait=None)

        first, second = await reasons(
            partial(step, peer, config(max_weight=1000)), step_heavily, codes=[NoPeersCode.REFUSED, None]
        )
    short = f"12D3..{heavy.id[-6:]}"
    assert f"does not meet 1 other peer: {short} (its weight of 1e+15 is above max_weight 1000)" in first
    assert "is above max_weight 1000" in second


async def test_repeated_questions_get_one_answer() -> None:
    async with simulated_peers(MemoryNetwork(latency=LAN), 2) as (peer, asker):
        answers = []
        for pause in (2.0, 0.0, 0.0, 1.0):
            await trio.sleep(pause)
            stream = await asker.context.transport.open_stream(peer.id, PROTOCOL, timeout=5.0)
            try:
                await send_message(stream, QUESTION)
                answers.append(await receive_message(stream))
            except StreamBrokenError:
                answers.append(None)
    assert [answer is not None for answer in answers] == [True, False, False, True]
    assert answers[0] is not None
    assert PeerHello.decode(answers[0]).runs == 0


async def test_sum_above_max_weight_counts_max_weight(caplog: pytest.LogCaptureFixture) -> None:
    results: dict[str, p2pavg.RoundResult] = {}

    async def average(peer: Peer, times: int) -> None:
        async with peer.averager(config(max_weight=10)) as averager:
            for _ in range(times):
                averager.accumulate([torch.full((1_000,), float(times))], weight=10)
            results[peer.id] = await averager.step(wait=None)

    async with simulated_peers(MemoryNetwork(latency=LAN), 2) as peers, trio.open_nursery() as nursery:
        for peer, times in zip(peers, (1, 3), strict=True):
            nursery.start_soon(average, peer, times)
    for result in results.values():
        assert isinstance(result, p2pavg.Success)
        assert set(result.weights.values()) == {10.0}
        assert isinstance(result.averaged, list)
        assert torch.allclose(result.averaged[0], torch.tensor(2.0), atol=0.05)
    assert "30 samples were accumulated, and max_weight is 10" in caplog.text
