"""One member's exchange, where the moment matters and no network can be made to hit it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import trio

from p2pavg.allreduce.exchange import Exchange
from p2pavg.allreduce.lobby import InboundLane, Lobby
from p2pavg.allreduce.messages import Kind, Lane
from p2pavg.allreduce.reduction import Verdict
from p2pavg.errors import UnreachableError
from p2pavg.matchmaking.roster import Roster, share_cutter
from p2pavg.net.transport import Buffer, Stream, StreamHandler, Transport
from p2pavg.testing.simulation import run_on_loop
from p2pavg_compression import Fp32
from tests.unit.matchmaking.bus import EPOCH, candidate

ELEMENTS = 8


class Alone(Transport):
    """A transport that reaches nobody."""

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        return ()

    def serve(self, protocol: str, handler: StreamHandler) -> None:
        raise NotImplementedError

    async def dial(self, address: str, *, timeout: float) -> str:
        raise UnreachableError(address)

    async def open_stream(
        self,
        peer_id: str,
        protocol: str,
        *,
        addresses: Sequence[str] = (),
        timeout: float,
        wait_inbound: bool = False,
    ) -> Stream:
        raise UnreachableError(peer_id)

    def is_connected(self, peer_id: str) -> bool:
        return False

    async def disconnect(self, peer_id: str) -> None:
        raise NotImplementedError


class LastPart(Stream):
    """Carries one part; while its values arrive, the round is given up."""

    def __init__(self, remote: str, exchange: Exchange) -> None:
        self.remote = remote
        self.exchange = exchange
        self.index_sent = False

    async def send_all(self, data: Buffer) -> None:
        raise NotImplementedError

    async def receive_some(self, max_bytes: int) -> bytes:
        if not self.index_sent:
            self.index_sent = True
            return bytes(4)
        self.exchange._fail(Verdict("another member was lost", None))
        self.exchange._let_go()
        return bytes(max_bytes)

    async def aclose(self) -> None:
        raise NotImplementedError

    async def reset(self) -> None:
        raise NotImplementedError


async def test_a_part_that_comes_as_the_round_is_given_up_is_dropped() -> None:
    members = (candidate(0, EPOCH + 1), candidate(1, EPOCH + 2))
    roster = Roster(members=members, shares=share_cutter(ELEMENTS, 1)(members), proposal=1)
    for lane in Lane:
        exchange = Exchange(
            transport=Alone(members[0].peer_id),
            roster=roster,
            group=Lobby().expect(roster.group_id),
            codec=Fp32(),
            vector=torch.ones(ELEMENTS),
            timeout=1.0,
            run_in_thread=run_on_loop,
        )
        inbound = InboundLane(LastPart(members[1].peer_id, exchange), lane)
        async with trio.open_nursery() as nursery:
            await exchange._receive_part(inbound, Kind.PART, nursery)
        assert exchange._bytes_received == 0
