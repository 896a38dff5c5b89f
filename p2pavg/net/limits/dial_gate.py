"""The gate of all dials: it applies :mod:`p2pavg.net.limits.dial_policy`, and looks up names that the user gave."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial

import psutil
import trio
from multiaddr import Multiaddr

from p2pavg.base.errors import UnreachableError, is_shortage
from p2pavg.base.limits import CALM_LOOK_SECONDS
from p2pavg.net.addresses import parse_address_of
from p2pavg.net.limits.admission import Acquaintances
from p2pavg.net.limits.dial_policy import DialBudget, DialPolicy, Network
from p2pavg.net.transport import PeerId

logger = logging.getLogger(__name__)

# Threads that look up names. A look-up that hangs occupies one for a minute. trio's own 40 threads belong to the
# program.
NAME_THREADS = 4

_FAMILIES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}


class DialGate:
    """The gate that every dial of one transport passes.

    Args:
        acquaintances: the hosts at which peers were met.
    """

    def __init__(self, acquaintances: Acquaintances) -> None:
        self.policy = DialPolicy()
        self._acquaintances = acquaintances
        self._budget = DialBudget()
        self._from_user: set[str] = set()
        self._interfaces_until = 0.0
        self._ended = trio.Event()
        self._names = trio.CapacityLimiter(NAME_THREADS)

    def listens_at(self, host: str) -> None:
        """Note a host at which this process listens, according to its user."""
        self.policy.trust_address(host)

    def trust_address(self, address: str) -> None:
        """Note an address that this process' own user named. It is always dialled, and may hold a DNS name."""
        self._from_user.add(address)
        self.policy.trust_address(_host_of(Multiaddr(address)))

    async def candidates(self, peer_id: PeerId, text: str) -> list[Multiaddr]:
        """Return the IP addresses for which an address of a peer stands.

        Raises:
            AddressError: the text is not an address of this peer.
            UnreachableError: the address must not be dialled, or its name is unknown; the message says why.
        """
        address = parse_address_of(peer_id, text)
        if self.policy.only_here and (reason := self.policy.refusal(_host_of(address))):
            raise UnreachableError(f"{_host_of(address)} is not dialled: {reason}")
        if not self._acquaintances.has_met_anyone():
            self.trust_address(text)  # no other source: no peer has spoken to this process yet
        if text in self._from_user:
            return await self._look_up(address)
        host = _host_of(address)
        self._notice_interfaces()
        met_there = self._acquaintances.has_met(peer_id, host)
        if reason := self.policy.refusal(host, met_there=met_there):
            raise UnreachableError(f"{host} is not dialled: {reason}")
        return [address]

    def askable(self, addresses: Iterable[str], asker: str) -> list[str]:
        """Return the addresses that a peer may have this process dial, and hear of: see :meth:`DialPolicy.may_ask`.

        Args:
            asker: the host from which the peer is connected directly; empty if it is connected through a relay.
        """
        self._notice_interfaces()
        return [text for text in addresses if self.policy.may_ask(_host_in(text), asker)]

    @asynccontextmanager
    async def dialling(self, peer_id: PeerId, text: str, address: Multiaddr) -> AsyncIterator[None]:
        """Wait until a dial of ``address``, which ``text`` stands for, may begin. The block is the dial.

        Raises:
            UnreachableError: too many dials of this host have failed recently.
        """
        if text in self._from_user:
            yield
            return
        host = _host_of(address)
        met = peer_id if self._acquaintances.has_met(peer_id, host) else ""
        while not (may := self._budget.may_begin(trio.current_time(), host, met)):
            if may is False:
                raise UnreachableError(f"{host} is not dialled for a while: too many dials have failed")
            await self._ended.wait()
        self._budget.begin(host, met)
        failed = True
        try:
            yield
            failed = False
        finally:
            self._budget.end(trio.current_time(), host, met, failed=failed)
            self._ended.set()
            self._ended = trio.Event()

    def _notice_interfaces(self) -> None:
        if trio.current_time() >= self._interfaces_until:
            # They change when a laptop moves or a VPN starts. Listing them takes 0.3 ms.
            self._interfaces_until = trio.current_time() + CALM_LOOK_SECONDS
            try:
                self.policy.own_networks = own_networks()
            except OSError as error:
                if not is_shortage(error):
                    raise
                logger.warning("cannot look at this machine's networks: %s", error.strerror)

    async def _look_up(self, address: Multiaddr) -> list[Multiaddr]:
        """Look up the DNS name in an address, because libp2p's TCP transport dials no names."""
        name = _protocol_of(address)
        if name not in _FAMILIES:
            return [address]
        host, port = _host_of(address), int(str(address.value_for_protocol("tcp")))
        look_up = partial(socket.getaddrinfo, host, port, _FAMILIES[name], socket.SOCK_STREAM)
        try:
            found = await trio.to_thread.run_sync(  # type: ignore[call-arg]  # trio-typing's stubs
                look_up, abandon_on_cancel=True, limiter=self._names
            )
        except OSError as error:
            raise UnreachableError(f"the name {host} is not known: {error.strerror}") from None
        peer_id = address.value_for_protocol("p2p")
        return [
            Multiaddr(f"/{'ip4' if family == socket.AF_INET else 'ip6'}/{where[0]}/tcp/{port}/p2p/{peer_id}")
            for family, _, _, _, where in found
        ]


def own_networks() -> list[Network]:
    """Return the subnets of this machine's interfaces, without loopback.

    Raises:
        OSError: the machine has no file to open.
    """
    found: list[Network] = []
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family not in (socket.AF_INET, socket.AF_INET6) or not entry.netmask:
                continue
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            bits = bin(int(ipaddress.ip_address(entry.netmask))).count("1")
            if not address.is_loopback:
                found.append(ipaddress.ip_network((address, bits), strict=False))
    return found


def _host_in(text: str) -> str:
    """Return the host in an address that has not been parsed yet; empty if there is none."""
    _, _, rest = text.partition("/ip")
    return rest.split("/")[1] if "/" in rest else ""


def _protocol_of(address: Multiaddr) -> str:
    return str(next(iter(address.protocols())).name)


def _host_of(address: Multiaddr) -> str:
    return str(address.value_for_protocol(_protocol_of(address)))
