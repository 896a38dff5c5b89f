"""From relayed connections to direct ones, while the relayed ones are in use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import trio

from p2pavg.base.errors import ClosedError, UnreachableError
from p2pavg.net.nat.punch.service import PunchService
from p2pavg.net.nat.reach.reachability import Reachability
from p2pavg.net.transport import PeerId

logger = logging.getLogger(__name__)

TRY_DIRECT_SECONDS = 30.0

# The pauses before each try. At first, a peer may not know its router yet; later, one of the two may have moved.
PAUSES = (0.0, 1.0, 3.0, 10.0, 30.0, 120.0, 300.0)


class Improver:
    """Tries to replace relayed connections by direct ones, one task for each peer.

    Args:
        path_to: returns how streams to a peer travel now; see :meth:`Libp2pTransport.path_to`.
        reachability: returns what this peer knows of itself.
        direct_addresses: returns the addresses at which others can dial this peer.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        puncher: PunchService,
        *,
        path_to: Callable[[PeerId], str],
        reachability: Callable[[], Reachability],
        direct_addresses: Callable[[], Sequence[str]],
    ) -> None:
        self._nursery = nursery
        self._puncher = puncher
        self._path_to = path_to
        self._reachability = reachability
        self._direct_addresses = direct_addresses
        self._busy: set[PeerId] = set()
        self._changed = trio.Event()

    def relayed(self, peer_id: PeerId) -> None:
        """Note that this peer has opened a relayed connection to another one."""
        if peer_id not in self._busy:
            self._busy.add(peer_id)
            self._nursery.start_soon(self._improve, peer_id)

    def look_again(self) -> None:
        """Try again at once: this peer's reachability has changed."""
        self._changed.set()
        self._changed = trio.Event()

    async def _improve(self, peer_id: PeerId) -> None:
        tries = 0
        try:
            while True:
                changed = self._changed
                with trio.move_on_after(PAUSES[min(tries, len(PAUSES) - 1)]):
                    await changed.wait()
                if self._path_to(peer_id) != "relayed":
                    return
                tries += 1
                try:
                    await self._once(peer_id)
                except (UnreachableError, ClosedError) as error:
                    logger.debug("%s stays behind a relay: %s", peer_id, error)
                else:
                    logger.info("%s is connected directly now", peer_id)
                    return
        finally:
            self._busy.discard(peer_id)

    async def _once(self, peer_id: PeerId) -> None:
        addresses = self._direct_addresses()
        if self._reachability().dialable and addresses:
            await self._puncher.ask_to_dial(peer_id, addresses, timeout=TRY_DIRECT_SECONDS)
        else:
            await self._puncher.connect(peer_id, timeout=TRY_DIRECT_SECONDS)
