"""UPnP's port mappings (Internet Gateway Device), by the library miniupnpc in a worker thread.

miniupnpc's calls block, some of them for as long as a device of the local network sends a byte now and then. So each
call has a timeout, after which its thread is left to itself. There is one thread at a time: while one hangs, further
calls fail.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import miniupnpc
import trio

from p2pavg.base.errors import UnreachableError
from p2pavg.net.nat.reach.router_udp import Granted

Result = TypeVar("Result")

DISCOVER_MILLISECONDS = 1000
CALL_SECONDS = 10.0
"""The timeout of one step, which is a few requests at a device of the local network."""

_DESCRIPTION = "p2pavg"
_OTHER_PORTS = 3
"""Ports that are tried if the wanted one belongs to another machine of the local network."""
_PERMANENT = "OnlyPermanentLeasesSupported"
_CONFLICT = "ConflictInMappingEntry"


class Device(Protocol):
    """The part of ``miniupnpc.UPnP`` that is used."""

    discoverdelay: int
    lanaddr: str

    def discover(self) -> int:
        """Look for devices and return their number."""

    def selectigd(self) -> str:
        """Choose a router among the devices."""

    def externalipaddress(self) -> str:
        """Return the router's outer address."""

    def addportmapping(
        self, outer_port: int, protocol: str, host: str, port: int, text: str, remote: str, lease: int, /
    ) -> bool:
        """Map a port, or renew the mapping."""

    def getspecificportmapping(self, outer_port: int, protocol: str, /) -> tuple[object, ...] | None:
        """Return the mapping of an outer port: host, port and more."""

    def deleteportmapping(self, outer_port: int, protocol: str, /) -> bool:
        """Remove a mapping."""


class Upnp:
    """The mapping of one port by UPnP."""

    name = "UPnP"

    def __init__(self, make: Callable[[], Device] = miniupnpc.UPnP) -> None:
        self._make = make
        self._device: Device | None = None
        self._thread = trio.CapacityLimiter(1)

    async def add(self, port: int, outer_port: int, lease: int) -> tuple[str, Granted]:
        """Map a TCP port, or renew its mapping. Return the router's outer address with what was granted.

        Args:
            outer_port: the port that is asked for first.
            lease: seconds. Some routers have permanent mappings only; theirs is made and renewed like the others.

        Raises:
            UnreachableError: there is no such router, or it did not answer, or it refused.
        """
        if self._device is None:
            self._device = await self._run(self._find)
        return await self._run(partial(_add, self._device, port, outer_port, lease))

    async def still_has(self, port: int, host: str, granted: Granted) -> bool:
        """Return whether the router has kept the mapping and its outer address.

        Raises:
            UnreachableError: it did not answer.
        """
        return await self._run(partial(_has, self._known(), port, host, granted.outer_port))

    async def remove(self, port: int, granted: Granted) -> None:  # noqa: ARG002 - NAT-PMP's needs the port
        """Remove the mapping. Raises UnreachableError."""
        await self._run(partial(self._known().deleteportmapping, granted.outer_port, "TCP"))

    def _known(self) -> Device:
        if self._device is None:
            raise UnreachableError("no router is known")
        return self._device

    def _find(self) -> Device:
        device = self._make()
        device.discoverdelay = DISCOVER_MILLISECONDS
        device.discover()
        device.selectigd()
        return device

    async def _run(self, call: Callable[[], Result]) -> Result:
        """Run a call of miniupnpc in a thread.

        Raises:
            UnreachableError: it failed, or took longer than CALL_SECONDS.
        """
        with trio.move_on_after(CALL_SECONDS):
            try:
                return await trio.to_thread.run_sync(  # type: ignore[call-arg]  # trio-typing's stubs
                    call, abandon_on_cancel=True, limiter=self._thread
                )
            except UnreachableError:
                raise
            except Exception as error:  # noqa: BLE001 - miniupnpc raises plain exceptions with the router's text
                self._device = None
                raise UnreachableError(str(error)[:200] or type(error).__name__) from None
        self._device = None
        raise UnreachableError(f"no answer within {CALL_SECONDS:.0f} s")


def _add(device: Device, port: int, outer_port: int, lease: int) -> tuple[str, Granted]:
    """Map a port; take another outer port or a permanent mapping if the router wants that."""
    host = _host(device)
    others = [1024 + secrets.randbelow(65536 - 1024) for _ in range(_OTHER_PORTS)]
    for wanted in (outer_port, *others):
        if _belongs_to_another(device, wanted, port):
            continue
        for seconds in (lease, 0):
            try:
                device.addportmapping(wanted, "TCP", device.lanaddr, port, _DESCRIPTION, "", seconds)
                return host, Granted(wanted, lease)
            except Exception as error:  # noqa: BLE001 - see Upnp._run
                if str(error) == _CONFLICT:
                    break
                if str(error) != _PERMANENT:
                    raise UnreachableError(f"the router refused: {str(error)[:200]}") from None
    raise UnreachableError(f"port {outer_port} and {_OTHER_PORTS} others belong to other machines")


def _belongs_to_another(device: Device, outer_port: int, port: int) -> bool:
    """Return whether another mapping has an outer port. Some routers would replace it without a word."""
    found = device.getspecificportmapping(outer_port, "TCP")
    return found is not None and tuple(found[:2]) != (device.lanaddr, port)


def _has(device: Device, port: int, host: str, outer_port: int) -> bool:
    found = device.getspecificportmapping(outer_port, "TCP")
    return found is not None and tuple(found[:2]) == (device.lanaddr, port) and _host(device) == host


def _host(device: Device) -> str:
    """Return the router's outer address; empty if what it says is none."""
    try:
        host = ipaddress.ip_address(device.externalipaddress())
    except ValueError:
        return ""
    return "" if host.is_unspecified or host.is_loopback or host.is_multicast else str(host)
