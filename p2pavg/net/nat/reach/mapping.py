"""Map a port of the router to this machine, renew the mapping, and remove it at the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import trio

from p2pavg.base.errors import UnreachableError
from p2pavg.base.limits import FAREWELL_SECONDS, RETRY_SECONDS
from p2pavg.net.nat.reach.facts import Mapped
from p2pavg.net.nat.reach.gateway import Granted, NatPmp, Pcp
from p2pavg.net.nat.reach.upnp import Upnp

logger = logging.getLogger(__name__)

LEASE_SECONDS = 3600
"""A process that is killed leaves its mapping behind for this time. RFC 6886 recommends 2 hours."""

CHECK_MAPPING_SECONDS = 20.0
"""The time between two questions to the router: does it still have the mapping, and the same outer address?"""

SHORTEST_LEASE = 60
"""A router that grants less is not followed below it: a mapping that was lost is made again at the next check."""


class MappingClient(Protocol):
    """One protocol of routers.

    Every call is bounded in time, and raises UnreachableError with the reason if the router did not do it.
    """

    @property
    def name(self) -> str:
        """The name of the protocol, for sentences."""

    async def add(self, port: int, outer_port: int, lease: int) -> tuple[str, Granted]:
        """Map a TCP port, or renew its mapping. Return the router's outer address (or ``""``) with what was granted."""

    async def still_has(self, port: int, host: str, granted: Granted) -> bool:
        """Return whether the router has kept the mapping and its outer address."""

    async def remove(self, port: int, granted: Granted) -> None:
        """Remove the mapping."""


class PortMapper:
    """Keeps one port mapped, by the first protocol that the router speaks.

    Args:
        on_mapped: called with each new mapping, and with ``None`` when it is gone.
        clients: the protocols in the order in which they are tried; ``None`` tries NAT-PMP, PCP and UPnP.
    """

    def __init__(
        self, on_mapped: Callable[[Mapped | None], None], clients: Sequence[MappingClient] | None = None
    ) -> None:
        self._on_mapped = on_mapped
        natpmp = NatPmp()
        self._clients = clients if clients is not None else (natpmp, Pcp(natpmp), Upnp())
        self._said = ""

    async def run(self, port: int) -> None:
        """Keep a listening port mapped until cancelled. Then the mapping is removed, within FAREWELL_SECONDS.

        A router that is absent or refuses is reported in one INFO line, and is asked again after five minutes. A call
        that is cancelled while the router is making the mapping leaves it behind for its lease.
        """
        while True:
            reasons = []
            for client in self._clients:
                try:
                    host, granted = await client.add(port, port, LEASE_SECONDS)
                except UnreachableError as error:
                    reasons.append(f"{client.name}: {error}")
                    continue
                await self._hold(client, port, host, granted)
                break
            else:
                self._log(f"the router maps no port: {'; '.join(reasons)}")
                # Rarely: each time costs a search, and a router seldom learns to map ports.
                await trio.sleep(5 * RETRY_SECONDS)

    async def _hold(self, client: MappingClient, port: int, host: str, granted: Granted) -> None:
        """Renew a mapping until the router has lost it or does not answer any more."""
        self._log(f"the router maps its port {granted.outer_port} to port {port} here, by {client.name}")
        self._on_mapped(Mapped(port=granted.outer_port, protocol=client.name, host=host))
        try:
            await self._renew(client, port, host, granted)
        except UnreachableError as error:
            self._log(f"the router's mapping is lost: {client.name}: {error}")
        except trio.Cancelled:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + FAREWELL_SECONDS):
                try:
                    await client.remove(port, granted)
                except UnreachableError as error:
                    logger.debug("the mapping of port %d was not removed: %s", granted.outer_port, error)
            raise
        finally:
            self._on_mapped(None)

    async def _renew(self, client: MappingClient, port: int, host: str, granted: Granted) -> None:
        """Renew a mapping at half of its lease. Return when it is not the same any more."""
        while True:
            half = trio.current_time() + max(granted.lease, SHORTEST_LEASE) / 2
            while trio.current_time() < half:
                await trio.sleep(min(CHECK_MAPPING_SECONDS, max(0.0, half - trio.current_time())))
                if not await client.still_has(port, host, granted):
                    self._log("the router has lost its mapping, or has another address now")
                    return
            now_host, renewed = await client.add(port, granted.outer_port, LEASE_SECONDS)
            if (now_host, renewed.outer_port) != (host, granted.outer_port):
                return
            granted = renewed

    def _log(self, sentence: str) -> None:
        """Log a sentence once, until there is another one."""
        if sentence != self._said:
            self._said = sentence
            logger.info("%s", sentence)
