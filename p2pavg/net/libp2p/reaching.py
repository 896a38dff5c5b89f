"""How one peer is reached: its addresses, its relays, and the way from a relayed connection to a direct one.

Theory of operation
===================

A connection through a relay is an ordinary connection of libp2p. So all protocols work over it, and a peer behind a
router takes part from the first second. What follows improves the way without disturbing what is under way:

* A direct connection to the same peer is preferred by every stream that is opened after it.
* The relayed connection ends when its last stream has ended, and not before LINGER_SECONDS: the other side may be
  opening a stream on it at this moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import trio

from p2pavg.net.libp2p.carriers import RelayedStream
from p2pavg.net.libp2p.connections import Connections
from p2pavg.net.libp2p.guarded_yamux import GuardedYamux
from p2pavg.net.reach.options import ReachOptions
from p2pavg.net.relay.choice import Candidate
from p2pavg.net.relay.circuits import InboundCircuits
from p2pavg.net.relay.reservations import Reservations
from p2pavg.net.relay.service import RelayService
from p2pavg.net.transport import PeerId, Stream, Transport

logger = logging.getLogger(__name__)

LINGER_SECONDS = 5.0
_RETIRE_SECONDS = 600.0  # a stream that lasts longer than any round does not keep a relay busy for ever


class Reaching:
    """The ways to and from one transport.

    Args:
        listened: returns the addresses of the listeners.
        on_new: called when there is one more connection.
    """

    def __init__(
        self,
        transport: Transport,
        connections: Connections,
        nursery: trio.Nursery,
        options: ReachOptions,
        *,
        listened: Callable[[], Sequence[str]],
    ) -> None:
        self._transport = transport
        self._connections = connections
        self._nursery = nursery
        self._options = options
        self._listened = listened
        self._retiring: set[GuardedYamux] = set()
        self.relay = RelayService(
            transport,
            refusal=self._relays_nothing,
            addresses=self._direct_addresses,
            limits=options.relay_limits,
        )
        self.reservations = Reservations(
            transport,
            candidates=self._relay_candidates,
            reached=connections.dialled_addresses,
            on_change=self._addresses_changed,
        )
        InboundCircuits(transport, lambda peer_id: peer_id in self.reservations.relays, self._adopt_inbound)

    def start(self) -> None:
        """Start the tasks; the listeners are open."""
        self._nursery.start_soon(self.reservations.run)
        self.reservations.want(self._options.reachable and not self._listened())

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses to announce, the direct ones first."""
        return (*self._direct_addresses(), *self.reservations.addresses)

    def connected(self, muxed: GuardedYamux) -> None:
        """Note a new connection."""
        self.reservations.look()
        others = self._connections.of(str(muxed.peer_id))
        if not muxed.relay:
            for relayed in others:
                if relayed.relay:
                    self._retire(relayed)
        elif any(not other.relay for other in others):
            self._retire(muxed)

    def path_to(self, peer_id: PeerId) -> str:
        """Return how streams to a peer travel now: ``direct``, ``punched``, ``relayed``, or empty if not at all."""
        found = self._connections.of(peer_id)
        direct = [each for each in found if not each.relay]
        if direct:
            return "punched" if all(each.punched for each in direct) else "direct"
        return "relayed" if found else ""

    # -- callbacks

    def _direct_addresses(self) -> tuple[str, ...]:
        return tuple(self._listened())

    def _relays_nothing(self) -> str:
        if self._options.relay_limits is None:
            return "this peer relays for no one, as its user wants it"
        if not self._direct_addresses():
            return "this peer cannot be dialled itself"
        return ""

    def _relay_candidates(self) -> list[Candidate]:
        """Return the peers that this one has dialled directly: others can probably dial them too."""
        found = {
            str(muxed.peer_id): Candidate(str(muxed.peer_id), muxed.remote_host)
            for muxed in self._connections.all()
            if muxed.is_initiator and not muxed.relay and not muxed.punched
        }
        return list(found.values())

    def _addresses_changed(self) -> None:
        logger.debug("this peer is now at %s", ", ".join(self.addresses))

    async def _adopt_inbound(self, stream: Stream, peer_id: PeerId) -> None:
        await self._connections.adopt(RelayedStream(stream), peer_id, initiator=False)

    # -- from relayed to direct

    def _retire(self, relayed: GuardedYamux) -> None:
        if relayed not in self._retiring:
            self._retiring.add(relayed)
            self._nursery.start_soon(self._close_when_idle, relayed)

    async def _close_when_idle(self, relayed: GuardedYamux) -> None:
        try:
            with trio.move_on_after(_RETIRE_SECONDS):
                while True:
                    await trio.sleep(LINGER_SECONDS)
                    if not relayed.streams or relayed.event_closed.is_set():
                        break
            if any(not other.relay for other in self._connections.of(str(relayed.peer_id))):
                await relayed.abort()
        finally:
            self._retiring.discard(relayed)
