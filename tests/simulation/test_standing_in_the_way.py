"""Hostile leaders that accept peers and never propose: they cost seconds, and do not keep the others apart."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import trio

import p2pavg
from p2pavg.allreduce.vector.accumulation import schema_of
from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError
from p2pavg.group.candidate import Candidate, ready_key, sign_candidate
from p2pavg.group.roster import Roster, ShareCutter
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
from tests.simulation.swarm import LAN

ONES = [torch.ones(1_000)]
KEY = ready_key("sim", schema_of(ONES)[0].hash)
MATCH_TIMEOUT = 30.0


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
        self.index, self.seconds, self.renews = index, seconds, renews
        self.proposes, self.ready = proposes, ready
        self.me: Candidate | None = None
        self.asked = 0

    async def live(self, network: MemoryNetwork, bootstrap: Sequence[str]) -> None:
        async with simulated_peer(network, self.index, bootstrap=bootstrap) as peer:
            peer.context.transport.serve(PROTOCOL, self.serve)
            while True:
                if self.me is None or self.renews:
                    now = simulated_clock()
                    self.me = sign_candidate(
                        simulated_signer(self.index),
                        key=KEY,
                        deadline=now + self.seconds,
                        expiration_time=now + 3560.0,
                        weight=1.0,
                        bandwidth=100.0,
                        codec="blockwise8:64",
                        auxiliary=False,
                        addresses=tuple(peer.addresses),
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
                Roster(members=members, shares=ShareCutter(1_000, 64).cut(members), proposal=number)
            )
        return LeaderStatus(self.ready, False)


Took = tuple[float, p2pavg.RoundResult]
"""Seconds from result to result, and the result."""


async def rounds_among(peers: Sequence[Peer], rounds: int) -> list[list[Took]]:
    """Run rounds; return the results of each peer."""
    found: list[list[Took]] = [[] for _ in peers]
    how = p2pavg.AveragingConfig(run_id="sim", group_size=len(peers), match_timeout=MATCH_TIMEOUT)

    async def average(peer: Peer, took: list[Took]) -> None:
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


async def stand_among_four(hostile: Sequence[Standing], rounds: int = 1) -> list[list[Took]]:
    network = MemoryNetwork(latency=LAN)
    async with simulated_peers(network, 4) as peers, trio.open_nursery() as nursery:
        for one in hostile:
            nursery.start_soon(partial(one.live, network, peers[0].addresses))
        await trio.sleep(0.5)
        found = await rounds_among(peers, rounds)
        nursery.cancel_scope.cancel()
    return found


@pytest.mark.parametrize(("hostiles", "seconds"), [(1, 29.0), (2, 8.0)])
async def test_hostile_leaders_cost_seconds_each(hostiles: int, seconds: float) -> None:
    """In version 0.1, one cost each peer 61 s, and two kept the four apart for 3,400 s."""
    hostile = [Standing(10 + index, seconds=seconds) for index in range(hostiles)]
    for [(took, result)] in await stand_among_four(hostile):
        assert isinstance(result, p2pavg.Success), result
        assert len(result.peers) == 4
        assert took <= 15.0 + 8.0 * (hostiles - 1), took
    assert all(one.asked for one in hostile), "they delayed no peer"


@pytest.mark.parametrize("how", [{"proposes": True}, {"ready": 64}], ids=str)
async def test_variations_of_hostile_leaders_cost_no_more(how: dict[str, Any]) -> None:
    hostile = [Standing(10 + index, seconds=20.0, **how) for index in range(2)]
    for [(took, result)] in await stand_among_four(hostile):
        assert isinstance(result, p2pavg.Success), result
        assert took <= 40.0, took


async def test_peers_that_have_finished_a_round_do_not_pay_again() -> None:
    hostile = [Standing(10 + index, seconds=20.0, renews=True) for index in range(2)]
    for results in await stand_among_four(hostile, rounds=3):
        assert all(isinstance(result, p2pavg.Success) for _, result in results), results
        assert max(took for took, _ in results[1:]) < 3.0, results
