"""Notices that the process of a companion has ended, long before its entries on the boards expire.

A peer that is killed cannot withdraw its entries, and the others would wait for its next batch. Its operating system
closes its connections, though, and refuses new ones. We trust the operating system at an address where that peer was
met, as rounds do. A peer that only loses its connection, or cannot be reached, is dialled once, and keeps its entries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import trio

from p2pavg.base.errors import ClosedError, RefusedError, UnreachableError
from p2pavg.base.limits import QUICK_REPLY_SECONDS
from p2pavg.net.transport import PeerId, Transport
from p2pavg_dht import PROTOCOL, Contact

logger = logging.getLogger(__name__)

DEPARTURES_LOOK_SECONDS = 0.5
MAX_CHECKS = 4  # at once


class Departures:
    """Watches the members of the last round.

    Args:
        companions: returns the members of the last round, with their addresses; the same object until the next round.
        departed: called with the id of a companion whose process has ended.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        companions: Callable[[], Sequence[Contact]],
        departed: Callable[[PeerId], None],
    ) -> None:
        self._transport = transport
        self._companions = companions
        self._departed = departed
        self._checking = trio.CapacityLimiter(MAX_CHECKS)

    async def run(self) -> None:
        """Watch until cancelled."""
        watched: Sequence[Contact] = ()
        checked: set[PeerId] = set()
        async with trio.open_nursery() as nursery:
            while True:
                if (present := self._companions()) is not watched:
                    watched, checked = present, set()
                for companion in watched:
                    if companion.peer_id not in checked and not self._transport.is_connected(
                        companion.peer_id
                    ):
                        checked.add(companion.peer_id)
                        nursery.start_soon(self._check, companion, checked)
                await trio.sleep(DEPARTURES_LOOK_SECONDS)

    async def _check(self, companion: Contact, checked: set[PeerId]) -> None:
        """Dial a companion once, and again only if it answers and loses its connection once more."""
        async with self._checking:
            try:
                stream = await self._transport.open_stream(
                    companion.peer_id,
                    PROTOCOL,
                    addresses=companion.addresses,
                    timeout=QUICK_REPLY_SECONDS,
                )
            except RefusedError as error:
                logger.debug("%s has ended: %s", companion.peer_id, error)
                self._departed(companion.peer_id)
            except (UnreachableError, ClosedError) as error:
                logger.debug("%s cannot be reached: %s", companion.peer_id, error)
            else:
                checked.discard(companion.peer_id)
                await stream.reset()
