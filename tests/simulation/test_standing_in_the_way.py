"""Hostile leaders that accept peers and never propose: they cost seconds, and do not keep the others apart."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock

import p2pavg
from p2pavg.allreduce.vector.accumulation import schema_of
from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError
from p2pavg.group.candidate import Candidate, ready_key, sign_candidate
from p2pavg.group.roster import Roster, share_cutter
from p2pavg.matchmaking.messages import (
    PROTOCOL,
    GroupProposal,
    Joined,
    JoinRequest,
    LeaderStatus,
    Message,
    decode,
    encode,
)
from p2pavg.net.transport import Stream, receive_message, send_message
from p2pavg.peer.peer import Peer
from p2pavg.testing import MemoryNetwork, simulated_clock, simulated_peer, simulated_peers
from p2pavg.testing.simulation import simulated_signer

LAN = (0.0005, 0.002)
ONES = [torch.ones(1_000)]
KEY = ready_key("sim", schema_of(ONES)[0].hash)
MATCH_TIMEOUT = 30.0


def hostile_candidate(index: int, seconds: float, weight: float = 1.0) -> Candidate:
    """Return the candidate record of the ``index``-th peer, with a deadline some seconds from now."""
    now = simulated_clock()
    return sign_candidate(
        simulated_signer(index),
        key=KEY,
        deadline=now + seconds,
        expiration_time=now + 3560.0,
        weight=weight,
        bandwidth=100.0,
        codec="blockwise8:64",
        auxiliary=False,
        addresses=(),
        state=b"",
    )


class Standing:
    """A peer that accepts all that ask it, and always answers that its group is not complete yet.

    Args:
        seconds: time from its start to its deadline.
        renews: if true, sign a deadline earlier than the honest peers' every 2 s.
        says: message that it repeats to a peer that has joined.
    """

    def __init__(
        self, index: int, *, seconds: float, renews: bool = False, proposes: bool = False, ready: int = 2
    ) -> None:
        self.index, self.seconds, self.renews, self.proposes, self.ready = (
            index,
            seconds,
            renews,
            proposes,
            ready,
        )
        self.me: Candidate | None = None
        self.asked = 0

    async def live(self, network: MemoryNetwork, bootstrap: Sequence[str]) -> None:
        async with simulated_peer(network, self.index, bootstrap=bootstrap) as peer:
            peer.context.transport.serve(PROTOCOL, self.serve)
            while True:
                if self.me is None or self.renews:
                    signed = hostile_candidate(self.index, self.seconds)
                    record = signed.record
                    addresses = tuple(peer.addresses)
                    self.me = sign_candidate(
                        simulated_signer(self.index),
                        key=KEY,
                        deadline=signed.deadline,
                        expiration_time=record.expiration_time,
                        weight=1.0,
                        bandwidth=100.0,
                        codec=signed.codec,
                        auxiliary=False,
                        addresses=addresses,
                    )
                await peer.records.publish(KEY, self.me.record.value, ttl=30.0)
                await trio.sleep(2.0)

    async def serve(self, stream: Stream) -> None:
        data = await receive_message(stream)
        assert data is not None
        message = decode(data)
        if not isinstance(message, JoinRequest) or self.me is None:
            return
        self.asked += 1
        try:
            await send_message(stream, encode(Joined(self.me)))
            for number in count(1):
                await send_message(stream, encode(self.say(message.me, number)))
                await trio.sleep(1.0)
        except (StreamBrokenError, RemoteProtocolError):
            pass

    def say(self, joined: Candidate, number: int) -> Message:
        assert self.me is not None
        if self.proposes and number % 2:
            members = (self.me, joined)
            return GroupProposal(
                Roster(members=members, shares=share_cutter(1_000, 64)(members), proposal=number)
            )
        return LeaderStatus(self.ready, False)


async def rounds_among(
    network: MemoryNetwork, peers: Sequence[Peer], rounds: int, size: int
) -> list[list[tuple[float, p2pavg.RoundResult]]]:
    """Run rounds; return, for each peer, the seconds from result to result."""
    found: list[list[tuple[float, p2pavg.RoundResult]]] = [[] for _ in peers]
    how = p2pavg.AveragingConfig(run_id="sim", group_size=size, match_timeout=MATCH_TIMEOUT)

    async def average(peer: Peer, took: list[tuple[float, p2pavg.RoundResult]]) -> None:
        async with peer.averager(how) as averager:
            for _ in range(rounds):
                began = trio.current_time()
                averager.accumulate(ONES)
                result: p2pavg.RoundResult = p2pavg.InProgress(ready_peers=1, target_size=1)
                while isinstance(result, p2pavg.InProgress):
                    result = await averager.step(wait=None)
                took.append((trio.current_time() - began, result))

    async with trio.open_nursery() as nursery:
        for peer, took in zip(peers, found, strict=True):
            nursery.start_soon(average, peer, took)
    return found


async def stand_among_four(
    hostile: Sequence[Standing], rounds: int = 1
) -> list[list[tuple[float, p2pavg.RoundResult]]]:
    network = MemoryNetwork(latency=LAN)
    async with simulated_peers(network, 4) as peers, trio.open_nursery() as nursery:
        for one in hostile:
            nursery.start_soon(partial(one.live, network, peers[0].addresses))
        await trio.sleep(0.5)
        found = await rounds_among(network, peers, rounds, 4)
        nursery.cancel_scope.cancel()
    return found


@pytest.mark.parametrize("seconds", [1.0, 5.0, 8.0, 12.0, 20.0, 29.0])
@pytest.mark.parametrize("hostiles", [1, 2])
async def test_hostile_leaders_cost_seconds_each(
    autojump_clock: MockClock, hostiles: int, seconds: float
) -> None:
    """In version 0.1, one cost each peer 61 s, and two kept the four apart for 3,400 s."""
    hostile = [Standing(10 + index, seconds=seconds) for index in range(hostiles)]
    for [(took, result)] in await stand_among_four(hostile):
        assert isinstance(result, p2pavg.Success), result
        assert len(result.peers) == 4
        assert took <= 15.0 + 8.0 * (hostiles - 1), took
    assert all(one.asked for one in hostile), "they delayed no peer"


@pytest.mark.parametrize("how", [{"renews": True}, {"proposes": True}, {"ready": 64}], ids=str)
async def test_variations_of_hostile_leaders_cost_no_more(
    autojump_clock: MockClock, how: dict[str, Any]
) -> None:
    hostile = [Standing(10 + index, seconds=20.0, **how) for index in range(2)]
    for [(took, result)] in await stand_among_four(hostile):
        assert isinstance(result, p2pavg.Success), result
        assert took <= 40.0, took


async def test_peers_that_have_finished_a_round_do_not_pay_again(autojump_clock: MockClock) -> None:
    hostile = [Standing(10 + index, seconds=20.0, renews=True) for index in range(2)]
    for results in await stand_among_four(hostile, rounds=6):
        assert all(isinstance(result, p2pavg.Success) for _, result in results), results
        assert max(took for took, _ in results[1:]) < 3.0, results
