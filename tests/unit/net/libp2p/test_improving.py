"""The step from a relayed connection to a direct one: when it is tried, and when no more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import trio
from trio.testing import MockClock

from p2pavg.base.errors import UnreachableError
from p2pavg.net.libp2p.reaching import PAUSES, Reaching
from p2pavg.net.nat.punch.service import PunchService
from p2pavg.net.nat.reach.options import ReachOptions
from p2pavg.net.nat.reach.reachability import Kind, Reachability

PEER = "12D3peer"
ADDRESS = "/ip4/203.0.113.1/tcp/1/p2p/me"


class Stage:
    """The ways of a peer that is connected to another one through a relay. Its punches fail, up to a number."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.path = [SimpleNamespace(relay="relay", punched=False)]
        self.punches: list[float] = []
        """The moments of the punches, since the beginning."""
        self.asked: list[tuple[str, ...]] = []
        """The addresses at which the other peer was asked to dial."""
        self.failures = 100
        self.began = trio.current_time()
        transport: Any = SimpleNamespace(serve=lambda *_: None, peer_id="me")
        connections: Any = SimpleNamespace(
            gate=None, of=lambda _: self.path, all=list, neighbours=list, listening=lambda: [("0.0.0.0", 1)]
        )
        self.reaching = Reaching(transport, connections, nursery, ReachOptions(port_mapping=False))
        self.reaching.punches = cast(PunchService, self)
        self.reaching._improve_soon(PEER)
        self.reaching._improve_soon(PEER)

    async def connect(self, peer_id: str, *, timeout: float) -> None:
        self.punches.append(trio.current_time() - self.began)
        if len(self.punches) <= self.failures:
            raise UnreachableError("no luck")

    async def ask_to_dial(self, peer_id: str, addresses: tuple[str, ...], *, timeout: float) -> None:
        self.asked.append(addresses)

    def conclude(self, kind: Kind, *addresses: str) -> None:
        self.reaching._conclude(Reachability(kind=kind, sentence="it moved"), addresses)


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    async with trio.open_nursery() as nursery:
        yield Stage(nursery)
        nursery.cancel_scope.cancel()


async def test_punches_are_repeated_after_growing_pauses(autojump_clock: MockClock) -> None:
    async with stage() as found:
        moments = list(accumulate([*PAUSES, PAUSES[-1]]))
        await trio.sleep(moments[-1] + 1.0)
        assert found.punches == moments


async def test_a_success_is_the_last_try(autojump_clock: MockClock) -> None:
    async with stage() as found:
        found.failures = 1
        await trio.sleep(1000.0)
        assert len(found.punches) == 2
        assert not found.reaching._improving


async def test_no_try_follows_once_there_is_another_path(autojump_clock: MockClock) -> None:
    async with stage() as found:
        await trio.sleep(0.5)
        found.path.append(SimpleNamespace(relay="", punched=False))
        await trio.sleep(1000.0)
        assert len(found.punches) == 1
        assert not found.reaching._improving


async def test_another_kind_of_reachability_is_tried_at_once(autojump_clock: MockClock) -> None:
    async with stage() as found:
        await trio.sleep(100.0)
        tries = len(found.punches)
        found.conclude(Kind.RELAYED)
        await trio.sleep(0.1)
        assert len(found.punches) == tries + 1
        found.conclude(Kind.PUBLIC, ADDRESS)
        await trio.sleep(0.1)
        assert found.asked == [(ADDRESS,)], "a peer that can be dialled needs no punch"
        assert len(found.punches) == tries + 1
