"""The ways to one peer: its knowledge of itself, its relays, and the step from a relayed connection to a direct one.

Theory of operation
===================

A connection through a relay is an ordinary connection of libp2p. So all protocols work over it, and a peer behind a
router takes part from the first second. What follows improves the way without disturbing what is under way:

* A direct connection to the same peer is preferred by every stream that is opened after it.
* The relayed connection ends when its last stream has ended, and not before QUICK_REPLY_SECONDS: the other side may be
  opening a stream on it at this moment. The connection of a dial-back ends in the same way.
* The peer that opened a relayed connection tries again and again to replace it by a direct one, while it is in use.

When an address of this machine disappears, the connections from it are dead, although nothing says so. They are dropped
at once, and relays are asked again.
"""

from __future__ import annotations

import logging

import trio

from p2pavg.base.errors import ClosedError, UnreachableError, is_shortage
from p2pavg.base.hosts import is_loopback, parse_host, version_of
from p2pavg.base.limits import QUICK_REPLY_SECONDS, RETRY_SECONDS
from p2pavg.net.addresses import direct
from p2pavg.net.libp2p.connections import Connections
from p2pavg.net.libp2p.guarded_yamux import GuardedYamux
from p2pavg.net.nat.punch.meeting import Puncher
from p2pavg.net.nat.punch.service import ALL_TRIES_SECONDS, PunchService
from p2pavg.net.nat.reach.options import ReachOptions
from p2pavg.net.nat.reach.reachability import NOT_ASKED, Reachability
from p2pavg.net.nat.reach.service import ReachService
from p2pavg.net.nat.reach.watcher import ReachWatcher, machine_hosts
from p2pavg.net.nat.reach.whoami import WhoamiAnswerer
from p2pavg.net.nat.relay.reservations import Reservations
from p2pavg.net.nat.relay.service import RelayService
from p2pavg.net.transport import PeerId, Transport

logger = logging.getLogger(__name__)

SETTLE_DIAL_SECONDS = 4.0
# The pauses before each try. At first, a peer may not know its router yet; later, one of the two may have moved.
PAUSES = (0.0, 1.0, 3.0, 10.0, 30.0, 120.0, 300.0)
_IDLE_LOOKS = 2


class Reaching:
    """The ways to and from one transport."""

    def __init__(
        self, transport: Transport, connections: Connections, nursery: trio.Nursery, options: ReachOptions
    ) -> None:
        self._connections = connections
        self._nursery = nursery
        self._options = options
        self._retiring: set[GuardedYamux] = set()
        self._improving: set[PeerId] = set()
        self._kind_changed = trio.Event()
        self._network = 0
        self.addresses: tuple[str, ...] = ()
        """The addresses to announce, the direct ones first."""
        self.reachability = NOT_ASKED
        """The ways to this peer, as far as it knows them."""
        self._changed = trio.Event()
        self._tasks = trio.CancelScope()
        self._ended: trio.Event | None = None
        self._watcher = ReachWatcher(
            transport,
            connections,
            on_change=self._conclude,
            announce=options.announce,
            maps_ports=options.port_mapping,
        )
        connections.observer = self
        self.relay = RelayService(transport, options.relay_limits)
        self.reservations = Reservations(transport, connections, self._watcher)
        ReachService(transport, self._dial_back)
        self.puncher = Puncher(connections.gate, transport, self._watcher)
        self.punches = PunchService(transport, connections, self.puncher)
        self.whoami = WhoamiAnswerer()

    def start(self) -> None:
        """Start the tasks; the listeners are open."""
        # This machine's own addresses are known before the first task runs, so that they can be announced at
        # once.
        self._watcher.begin()
        self.reservations.want(self._wants_relays())
        self._ended = trio.Event()
        self._nursery.start_soon(self._run, self._ended)

    async def _run(self, ended: trio.Event) -> None:
        try:
            with self._tasks:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.reservations.run)
                    nursery.start_soon(self._watcher.run)
        finally:
            ended.set()

    async def stop(self) -> None:
        """End the tasks: they look at the listeners, so this comes before those are closed."""
        self._tasks.cancel()
        if self._ended is not None:
            await self._ended.wait()

    async def settle(self) -> None:
        """See :meth:`Transport.settle`."""
        with trio.move_on_after(SETTLE_DIAL_SECONDS):
            while not self._is_settled():
                await self._changed.wait()

    def _is_settled(self) -> bool:
        if self._wants_relays():
            return bool(self.reservations.relays)
        # Peers of this machine cannot tell how others reach it, so there is nothing to wait for.
        asked = any(not is_loopback(found.host) for found in self._connections.neighbours())
        return bool(self._options.announce) or not asked or self.reachability.outer_hosts != ()

    def connected(self, muxed: GuardedYamux) -> None:
        """Note a new connection."""
        # Only such a connection shows that the listening port can be dialled: a dial-back counts only when it
        # is seen here.
        if not muxed.is_initiator and not muxed.relay and not muxed.punched:
            self._watcher.inbound(str(muxed.peer_id), muxed.remote_host)
        self.reservations.poll()
        self._watcher.wake()
        others = self._connections.of(str(muxed.peer_id))
        # A direct connection retires the relayed ones to that peer. A relayed one that comes second retires
        # itself.
        if not muxed.relay:
            for relayed in others:
                if relayed.relay:
                    self._retire(relayed)
        elif any(not other.relay for other in others):
            self._retire(muxed)
        # Only the side that opened the connection tries to improve it, so that the two do not try at once.
        elif muxed.is_initiator:
            self._improve_soon(str(muxed.peer_id))

    def lost(self) -> None:
        """Note that a connection has ended."""
        self._watcher.wake()

    def path_to(self, peer_id: PeerId) -> str:
        """Return how streams to a peer travel now: ``direct``, ``punched``, ``relayed``, or empty if not at all."""
        found = self._connections.of(peer_id)
        direct = [each for each in found if not each.relay]
        if direct:
            return "punched" if all(each.punched for each in direct) else "direct"
        return "relayed" if found else ""

    # -- what the watcher sees, and what follows

    def _conclude(self, reachability: Reachability, addresses: tuple[str, ...]) -> None:
        """Act on what is known now."""
        before, self.reachability, self.addresses = self.reachability, reachability, addresses
        self.reservations.want(self._wants_relays())
        # In another network, what failed may work now, and what worked is dead.
        if self._watcher.knowledge.network != self._network:
            self._network = self._watcher.knowledge.network
            self.reservations.forget_failures()
            self._nursery.start_soon(self._drop_dead_connections)
        # The tries pause for up to five minutes. Another kind of reachability is a reason to try at once.
        if reachability.kind is not before.kind:
            self._kind_changed.set()
            self._kind_changed = trio.Event()
        if reachability.dialable and not before.dialable:
            # The peers that reach this one through relays do not know yet that they can dial it.
            for muxed in self._connections.all():
                if muxed.relay:
                    self._improve_soon(str(muxed.peer_id))
        self._changed.set()
        self._changed = trio.Event()

    def _wants_relays(self) -> bool:
        # A user who names the addresses vouches for it that this peer can be dialled there.
        if not self._options.reachable or self._options.announce:
            return False
        return self._watcher.relays_wanted or not self._connections.listening()

    async def _drop_dead_connections(self) -> None:
        """Drop the connections from addresses that this machine does not have any more."""
        try:
            own = set(machine_hosts())
        except OSError as error:
            if not is_shortage(error):
                raise
            logger.warning("connections of addresses that are gone may stay: %s", error.strerror)
            return
        for muxed in self._connections.all():
            try:
                # A relayed connection has no socket of its own: it ends with the connection to its relay.
                local = muxed.socket.getsockname()[0] if muxed.socket is not None else ""
            except OSError:  # the connection has ended
                continue
            address = parse_host(local)
            if address is not None and str(address) not in own:
                logger.info("the connection to %s is dropped: its address %s is gone", muxed.peer_id, local)
                await muxed.abort()

    async def _dial_back(self, peer_id: PeerId, host: str, port: int) -> None:
        # Only the connection that this dial makes is retired. Those that were there before are in use.
        before = set(self._connections.of(peer_id))
        await self._connections.dial_one(peer_id, f"/ip{version_of(host)}/{host}/tcp/{port}/p2p/{peer_id}")
        for muxed in self._connections.of(peer_id):
            if muxed not in before and muxed.is_initiator:
                self._retire(muxed)

    # -- from relayed connections to direct ones

    def _improve_soon(self, peer_id: PeerId) -> None:
        """Try to replace a relayed connection by a direct one, in one task for each peer."""
        if peer_id not in self._improving:
            self._improving.add(peer_id)
            self._nursery.start_soon(self._improve, peer_id)

    async def _improve(self, peer_id: PeerId) -> None:
        tries = 0
        try:
            while True:
                changed = self._kind_changed
                with trio.move_on_after(PAUSES[min(tries, len(PAUSES) - 1)]):
                    await changed.wait()
                if self.path_to(peer_id) != "relayed":
                    return
                tries += 1
                addresses = direct(self.addresses)
                try:
                    if self.reachability.dialable and addresses:
                        await self.punches.ask_to_dial(peer_id, addresses, timeout=ALL_TRIES_SECONDS)
                    else:
                        await self.punches.connect(peer_id, timeout=ALL_TRIES_SECONDS)
                except (UnreachableError, ClosedError) as error:
                    logger.debug("%s stays behind a relay: %s", peer_id, error)
                else:
                    logger.info("%s is connected directly now", peer_id)
                    return
        finally:
            self._improving.discard(peer_id)

    # -- connections that are not needed any more

    def _retire(self, muxed: GuardedYamux) -> None:
        if muxed not in self._retiring:
            self._retiring.add(muxed)
            self._nursery.start_soon(self._close_when_idle, muxed)

    async def _close_when_idle(self, muxed: GuardedYamux) -> None:
        try:
            # Streams of records are renewed with each call: without a bound, they keep a place at a relay for ever.
            with trio.move_on_after(10 * RETRY_SECONDS):
                # Idle twice in a row: the other side may still read a stream that has ended here.
                idle = 0
                while idle < _IDLE_LOOKS and not muxed.event_closed.is_set():
                    await trio.sleep(QUICK_REPLY_SECONDS / _IDLE_LOOKS)
                    idle = 0 if muxed.streams else idle + 1
            # Looked at again after the wait: if the direct connection has ended meanwhile, this one is the
            # only way left.
            others = [other for other in self._connections.of(str(muxed.peer_id)) if other is not muxed]
            if any(not other.relay for other in others):
                await muxed.abort()
        finally:
            self._retiring.discard(muxed)
