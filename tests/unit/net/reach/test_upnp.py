"""UPnP over a library that behaves like miniupnpc: conflicts, refusals, silence, and devices that lie."""

from __future__ import annotations

import threading

import pytest
import trio

from p2pavg.base.errors import UnreachableError
from p2pavg.net.nat.reach.router_udp import Granted
from p2pavg.net.reach import upnp
from p2pavg.net.reach.upnp import Upnp

PORT, LEASE = 4001, 3600


class Device:
    """A router with a table of mappings. Errors are those of miniupnpc."""

    def __init__(self) -> None:
        self.discoverdelay = 0
        self.lanaddr = "192.168.1.2"
        self.outer = "5.0.0.1"
        self.table: dict[int, tuple[str, int]] = {}
        self.leases: list[int] = []
        self.absent = False
        self.error = ""
        self.permanent_only = False
        self.hangs: threading.Event | None = None

    def discover(self) -> int:
        if self.hangs is not None:
            self.hangs.wait()
        return 0 if self.absent else 1

    def selectigd(self) -> str:
        if self.absent:
            raise Exception("No UPnP device discovered")  # noqa: TRY002 - like miniupnpc
        return "http://192.168.1.1/"

    def externalipaddress(self) -> str:
        return self.outer

    def addportmapping(
        self, outer_port: int, protocol: str, host: str, port: int, text: str, remote: str, lease: int, /
    ) -> bool:
        self.leases.append(lease)
        if self.error:
            raise Exception(self.error)  # noqa: TRY002
        if self.permanent_only and lease:
            raise Exception("OnlyPermanentLeasesSupported")  # noqa: TRY002
        self.table[outer_port] = (host, port)
        return True

    def getspecificportmapping(self, outer_port: int, protocol: str, /) -> tuple[object, ...] | None:
        found = self.table.get(outer_port)
        return (*found, "text", True, 3600) if found else None

    def deleteportmapping(self, outer_port: int, protocol: str, /) -> bool:
        if outer_port not in self.table:
            raise Exception("NoSuchEntryInArray")  # noqa: TRY002
        del self.table[outer_port]
        return True


async def test_port_is_mapped_renewed_and_removed() -> None:
    device = Device()
    client = Upnp(lambda: device)
    for _ in range(2):
        assert await client.add(PORT, PORT, LEASE) == ("5.0.0.1", Granted(PORT, LEASE))
    assert device.table == {PORT: ("192.168.1.2", PORT)}
    assert await client.still_has(PORT, "5.0.0.1", Granted(PORT, LEASE))
    await client.remove(PORT, Granted(PORT, LEASE))
    assert not device.table
    assert not await client.still_has(PORT, "5.0.0.1", Granted(PORT, LEASE))


async def test_mapping_of_another_machine_is_not_taken_over() -> None:
    device = Device()
    device.table[PORT] = ("192.168.1.9", PORT)
    _, granted = await Upnp(lambda: device).add(PORT, PORT, LEASE)
    assert granted.outer_port != PORT
    assert device.table[PORT] == ("192.168.1.9", PORT)
    assert device.table[granted.outer_port] == ("192.168.1.2", PORT)


async def test_router_whose_ports_are_all_taken_is_an_error() -> None:
    device = Device()
    device.error = "ConflictInMappingEntry"
    with pytest.raises(UnreachableError, match="belong to other machines"):
        await Upnp(lambda: device).add(PORT, PORT, LEASE)
    assert len(device.leases) == 4


async def test_router_with_permanent_mappings_only_gets_one() -> None:
    device = Device()
    device.permanent_only = True
    _, granted = await Upnp(lambda: device).add(PORT, PORT, LEASE)
    assert granted == Granted(PORT, LEASE)
    assert device.leases == [LEASE, 0]


async def test_refusal_and_absence_are_errors_with_their_reason() -> None:
    device = Device()
    device.error = "Not Authorized"
    with pytest.raises(UnreachableError, match="the router refused: Not Authorized"):
        await Upnp(lambda: device).add(PORT, PORT, LEASE)
    device.absent = True
    with pytest.raises(UnreachableError, match="No UPnP device discovered"):
        await Upnp(lambda: device).add(PORT, PORT, LEASE)


async def test_new_outer_address_is_recognized() -> None:
    device = Device()
    client = Upnp(lambda: device)
    host, granted = await client.add(PORT, PORT, LEASE)
    device.outer = "5.0.0.2"
    assert not await client.still_has(PORT, host, granted)


@pytest.mark.parametrize("outer", ["", "router.example", "0.0.0.0", "127.0.0.1", "224.0.0.1", "5.0.0.1\n"])
async def test_senseless_outer_addresses_count_as_none(outer: str) -> None:
    device = Device()
    device.outer = outer
    assert (await Upnp(lambda: device).add(PORT, PORT, LEASE))[0] == ""


async def test_device_that_hangs_costs_one_thread_and_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upnp, "CALL_SECONDS", 0.05)
    device = Device()
    device.hangs = threading.Event()
    client = Upnp(lambda: device)
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(UnreachableError, match="no answer within"):
            await client.add(PORT, PORT, LEASE)
    assert threading.active_count() <= before + 1
    device.hangs.set()


async def test_call_can_be_cancelled_while_a_device_hangs() -> None:
    device = Device()
    device.hangs = threading.Event()
    with trio.move_on_after(0.05) as scope:
        await Upnp(lambda: device).add(PORT, PORT, LEASE)
    assert scope.cancelled_caught
    device.hangs.set()


async def test_device_is_looked_for_again_after_an_error() -> None:
    made: list[Device] = []

    def make() -> Device:
        made.append(Device())
        made[-1].absent = len(made) == 1
        return made[-1]

    client = Upnp(make)
    with pytest.raises(UnreachableError):
        await client.add(PORT, PORT, LEASE)
    assert (await client.add(PORT, PORT, LEASE))[0] == "5.0.0.1"
