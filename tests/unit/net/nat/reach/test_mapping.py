"""The mapper of ports: order of protocols, renewal, loss, removal, and what it logs."""

from __future__ import annotations

import logging

import pytest
import trio
from trio.testing import MockClock

from p2pavg.base.errors import UnreachableError
from p2pavg.base.limits import FAREWELL_SECONDS, RETRY_SECONDS
from p2pavg.net.nat.reach.facts import Mapped
from p2pavg.net.nat.reach.gateway import Granted
from p2pavg.net.nat.reach.mapping import CHECK_MAPPING_SECONDS, LEASE_SECONDS, PortMapper

PORT = 4001


class Router:
    """A router that speaks one protocol."""

    def __init__(self, name: str = "UPnP", *, lease: int = LEASE_SECONDS) -> None:
        self.name = name
        self.lease = lease
        self.host = "5.0.0.1"
        self.outer_port = 4777
        self.refusal = ""
        self.has = False
        self.hangs = False
        self.added: list[float] = []
        self.removed = 0

    async def add(self, port: int, outer_port: int, lease: int) -> tuple[str, Granted]:
        await trio.lowlevel.checkpoint()
        self._check()
        self.added.append(trio.current_time())
        self.has = True
        return self.host, Granted(self.outer_port, self.lease)

    async def still_has(self, port: int, host: str, granted: Granted) -> bool:
        await trio.lowlevel.checkpoint()
        self._check()
        return self.has and host == self.host

    async def remove(self, port: int, granted: Granted) -> None:
        if self.hangs:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        self._check()
        self.removed += 1

    def _check(self) -> None:
        if self.refusal:
            raise UnreachableError(self.refusal)


class Run:
    """A mapper under test, for as long as the block runs."""

    def __init__(self, *routers: Router) -> None:
        self.told: list[Mapped | None] = []
        self.mapper = PortMapper(self.told.append, routers)

    async def run(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await self.mapper.run(PORT)


MAPPED = Mapped(port=4777, protocol="UPnP", host="5.0.0.1")


async def test_mapping_is_told_and_removed_at_the_end(autojump_clock: MockClock) -> None:
    router = Router()
    run = Run(router)
    await run.run(10.0)
    assert run.told == [MAPPED, None]
    assert router.removed == 1


async def test_second_protocol_is_used_if_the_first_fails(autojump_clock: MockClock) -> None:
    first, second = Router("NAT-PMP"), Router()
    first.refusal = "no router is known"
    run = Run(first, second)
    await run.run(10.0)
    assert run.told == [MAPPED, None]


@pytest.mark.parametrize("lease", [LEASE_SECONDS, 200])
async def test_mapping_is_renewed_at_half_of_its_lease(autojump_clock: MockClock, lease: int) -> None:
    router = Router(lease=lease)
    run = Run(router)
    await run.run(2.2 * lease)
    pauses = [later - earlier for earlier, later in zip(router.added, router.added[1:], strict=False)]
    assert len(pauses) == 4
    assert all(pause == pytest.approx(lease / 2) for pause in pauses)
    assert run.told == [MAPPED, None]


async def test_tiny_lease_does_not_make_a_busy_loop(autojump_clock: MockClock) -> None:
    router = Router(lease=1)
    await Run(router).run(3600.0)
    assert len(router.added) <= 121


async def test_lost_mapping_is_made_again_within_seconds(autojump_clock: MockClock) -> None:
    router = Router()
    run = Run(router)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.run, 200.0)
        await trio.sleep(50.0)
        router.has = False
        await trio.sleep(CHECK_MAPPING_SECONDS + 1.0)
        assert run.told == [MAPPED, None, MAPPED]


async def test_other_port_at_a_renewal_is_told(autojump_clock: MockClock) -> None:
    router = Router()
    run = Run(router)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.run, LEASE_SECONDS)
        await trio.sleep(10.0)
        router.outer_port = 4888
        await trio.sleep(LEASE_SECONDS / 2 + 10.0)
        assert run.told[-1] == Mapped(port=4888, protocol="UPnP", host="5.0.0.1")


async def test_router_that_dies_is_told_and_asked_again(autojump_clock: MockClock) -> None:
    router = Router()
    run = Run(router)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.run, 1000.0)
        await trio.sleep(50.0)
        router.refusal = "no answer"
        await trio.sleep(CHECK_MAPPING_SECONDS + 1.0)
        assert run.told == [MAPPED, None]
        router.refusal = ""
        await trio.sleep(5 * RETRY_SECONDS + 1.0)
        assert run.told == [MAPPED, None, MAPPED]


async def test_absence_of_a_router_is_one_line_of_the_log(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "p2pavg")
    first, second = Router("NAT-PMP"), Router()
    first.refusal, second.refusal = "no router is known", "No UPnP device discovered"
    run = Run(first, second)
    await run.run(50 * RETRY_SECONDS)
    assert [record.getMessage() for record in caplog.records] == [
        "the router maps no port: NAT-PMP: no router is known; UPnP: No UPnP device discovered"
    ]
    assert run.told == []


async def test_removal_that_hangs_is_given_up(autojump_clock: MockClock) -> None:
    router = Router()
    router.hangs = True
    run = Run(router)
    await run.run(10.0)
    assert trio.current_time() == pytest.approx(10.0 + FAREWELL_SECONDS)
    assert run.told == [MAPPED, None]


async def test_removal_that_is_refused_harms_nothing(autojump_clock: MockClock) -> None:
    router = Router()
    run = Run(router)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.run, 10.0)
        await trio.sleep(5.0)
        router.refusal = "NoSuchEntryInArray"
    assert run.told == [MAPPED, None]
