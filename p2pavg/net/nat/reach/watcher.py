"""The task that finds out how other peers reach this one, and tells when that changes.

:class:`~p2pavg.net.nat.reach.knowledge.Knowledge` decides; this module asks peers, probes, maps a port, and watches the
machine's addresses.

Wiring in a transport
=====================

1. Make a :class:`~p2pavg.net.nat.reach.service.ReachService` with a function that dials back, and a
   :class:`~p2pavg.net.nat.reach.whoami.WhoamiAnswerer`, to whose ``answer`` the listener hands each connection that
   begins with ``P``.
2. Make a :class:`ReachWatcher`, and start :meth:`ReachWatcher.run` in the transport's nursery. ``on_change`` is called
   at once with the machine's own addresses, and after that with each change.
3. Call :meth:`ReachWatcher.inbound` for each new inbound libp2p connection that came to the listener, as soon as its
   peer id is proved: not for relayed and not for punched ones.
4. Call :meth:`ReachWatcher.wake` when a direct connection begins or ends, and :meth:`ReachWatcher.relayed_by` when
   relays change.
5. While :attr:`ReachWatcher.relays_wanted` is true, reserve places at relays. ``on_change`` is called when it changes,
   too.
6. Cancel :meth:`ReachWatcher.run` at the end. It removes the router's mapping within a second, so give it that time
   before the nursery is abandoned.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import psutil
import trio

from p2pavg.base.errors import UnreachableError, is_shortage
from p2pavg.base.hosts import is_loopback, parse_host, prefix_of, version_of
from p2pavg.base.limits import CALM_LOOK_SECONDS, REPLY_SECONDS, ROUND_TRIPS_SECONDS
from p2pavg.net.addresses import reachable_hosts
from p2pavg.net.limits.dial_policy import is_private
from p2pavg.net.nat.reach.facts import Endpoint, Mapped, Neighbour
from p2pavg.net.nat.reach.knowledge import AskDialBack, AskLook, AskWhoami, Knowledge, Question
from p2pavg.net.nat.reach.mapping import PortMapper
from p2pavg.net.nat.reach.reachability import NOT_ASKED, NOT_KNOWN_YET, Probe, Reachability
from p2pavg.net.nat.reach.service import DialBackOutcome, ask_dial_back, ask_to_look
from p2pavg.net.nat.reach.whoami import ask
from p2pavg.net.transport import PeerId, Stream, Transport

logger = logging.getLogger(__name__)


PROBE_SECONDS = 3.0
_MOST_PROBES = 2

_FAR6 = "2001:200::1"
"""An address of another network (WIDE, Japan). Nothing is sent to it: the system is asked for the way there."""


class Connecting(Protocol):
    """The connections of a transport, for the parts that find ways through routers."""

    def listening(self) -> Sequence[Endpoint]:
        """Return the hosts and ports at which the listeners are bound; hosts may be wildcards."""

    def neighbours(self) -> Sequence[Neighbour]:
        """Return the peers with direct connections, once for each connection."""

    def dialled_addresses(self, peer_id: PeerId) -> Sequence[str]:
        """Return the addresses at which this process has dialled a peer."""

    async def dial_one(self, peer_id: PeerId, address: str) -> None:
        """Connect to a peer at one address through the dial gate, even if there is a relayed connection.

        Raises UnreachableError or AddressError.
        """

    async def host_circuit(self, stream: Stream, peer_id: PeerId) -> None:
        """Make a connection over a circuit, as the side that was asked. The call lives as long as the connection.

        Raises UnreachableError if the other end is not that peer, or there is no place for the connection.
        """

    async def adopt_socket(self, plain: socket.socket, peer_id: PeerId, *, initiator: bool) -> None:
        """Make a connection with a peer over a connected socket, which this call takes over.

        Raises UnreachableError if the other end is not this peer, or does not shake hands.
        """


OnChange = Callable[[Reachability, tuple[str, ...]], None]
"""Called with the reachability and the addresses to announce, when they or ``relays_wanted`` have changed."""


def machine_hosts() -> list[str]:
    """Return the IP addresses of this machine.

    Raises:
        OSError: the machine has no file to open.
    """
    found = [
        str(address)
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if (address := parse_host(entry.address)) is not None
    ]
    return sorted(set(found))


def machine_source6() -> str:
    """Return the global address from which this machine connects to other networks over IPv6; empty if it cannot.

    A machine may have several addresses, such as temporary ones (RFC 8981). The system chooses, and no packet is sent.

    Raises:
        OSError: the machine has no file to open.
    """
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as opened:
            opened.connect((_FAR6, 9))
            address = parse_host(opened.getsockname()[0])
    except OSError as error:
        if is_shortage(error):
            raise
        return ""  # no IPv6, or no way to other networks
    return str(address) if address is not None and address.is_global else ""


class ReachWatcher:
    """See the top of this file.

    Args:
        transport: asks the questions over its existing connections.
        connections: the connections of the transport.
        on_change: see :data:`OnChange`.
        announce: addresses that the user has named, without a peer id.
        maps_ports: ask the router to pass a port on.
    """

    def __init__(
        self,
        transport: Transport,
        connections: Connecting,
        *,
        on_change: OnChange,
        announce: Sequence[str] = (),
        maps_ports: bool = True,
    ) -> None:
        self._transport = transport
        self._connections = connections
        self._on_change = on_change
        # A user who names the addresses needs no mapping.
        self._mapper = PortMapper(self._mapped) if maps_ports and not announce else None
        self._mapping: trio.CancelScope | None = None
        self.knowledge = Knowledge(transport.peer_id, announce)
        self._told: tuple[Reachability, tuple[str, ...], bool] = (NOT_ASKED, (), False)
        self._awaited: dict[PeerId, _DialBack] = {}
        self._woken = trio.Event()
        self._alone_since: float | None = None
        self._seen_hosts: Sequence[str] = ()

    @property
    def relays_wanted(self) -> bool:
        """True if a router or a firewall keeps other peers from dialling this one, as far as is known."""
        return self._told[2]

    def begin(self) -> None:
        """Tell this machine's own addresses now, before :meth:`run` asks other peers."""
        self._look_at_the_machine()
        self._tell()

    def wake(self) -> None:
        """Look at the connections and relays now."""
        self._woken.set()

    def relayed_by(self, relays: Sequence[PeerId], circuits: Sequence[str]) -> None:
        """Note the peers that relay for this one, and the addresses that lead through them."""
        self.knowledge.relayed_by(relays, circuits)
        self.wake()

    def inbound(self, peer_id: PeerId, host: str) -> None:
        """Note a new inbound connection of a peer, from a host, at a listening port."""
        awaited = self._awaited.get(peer_id)
        # A dial-back has to come from the network in which this process sees the peer.
        if awaited is not None and awaited.network == prefix_of(host):
            awaited.seen.set()

    async def run(self) -> None:
        """Find out and tell changes until cancelled."""
        async with trio.open_nursery() as nursery:
            machine_at = float("-inf")
            while True:
                self._woken = trio.Event()  # before everything else: a call of wake() from here on counts
                now = trio.current_time()
                # Connections and answers can wake this task many times a second. The machine's addresses
                # change rarely.
                if now >= machine_at + CALM_LOOK_SECONDS:
                    machine_at = now
                    self._look_at_the_machine()
                # Facts first, then the questions that follow from them, then the conclusions.
                self._look_at_the_connections()
                for question in self.knowledge.questions(now):
                    nursery.start_soon(self._ask, question)
                self._map_if_useful(nursery)
                self._tell()
                with trio.move_on_after(CALM_LOOK_SECONDS):
                    await self._woken.wait()

    def _look_at_the_machine(self) -> None:
        network = self.knowledge.network
        try:
            listening = [
                (found, port)
                for host, port in self._connections.listening()
                for found in reachable_hosts(host)
            ]
            hosts, source6 = machine_hosts(), machine_source6()
        except OSError as error:
            # Without free files the system cannot list the addresses. What was known before is kept.
            if not is_shortage(error):
                raise
            logger.warning("cannot look at this machine's addresses: %s", error.strerror)
            return
        self._seen_hosts = hosts
        self.knowledge.machine(hosts, listening, source6=source6)
        if self._mapping is not None and self.knowledge.network != network:
            self._mapping.cancel()  # the mapping is of another router

    def _look_at_the_connections(self) -> None:
        neighbours = self._connections.neighbours()
        self.knowledge.connected(neighbours)
        if neighbours:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = trio.current_time()

    def _tell(self) -> None:
        known = self.knowledge
        found = (known.reachability, known.addresses, known.relays_wanted)
        if found == self._told:
            return
        before, self._told = self._told[0], found
        sentence = found[0].sentence
        # The user reads conclusions. That the first answers are still missing is none.
        if sentence != before.sentence and not sentence.startswith(NOT_KNOWN_YET):
            logger.info("reachability: %s", sentence)
        self._on_change(found[0], found[1])

    # -- questions

    async def _ask(self, question: Question) -> None:
        """Ask one question, within a bounded time, and note its end."""
        answer: str | bool | Probe | None = None
        try:
            match question:
                case AskLook():
                    answer = (await ask_to_look(self._transport, question.peer.peer_id)).host
                case AskDialBack():
                    answer = await self._dialled_back(question)
                case AskWhoami(peer=peer):
                    seen = await ask(
                        peer.host, peer.port, local_port=question.local_port, timeout=PROBE_SECONDS
                    )
                    answer = Probe(peer.host, seen.local_port, seen.port, trio.current_time())
        except UnreachableError as error:
            logger.debug("no answer (%s): %s", question.reason, error)
        # Also without an answer: a question that stays open is never asked again.
        self.knowledge.heard(trio.current_time(), question, answer)
        self.wake()

    async def _dialled_back(self, question: AskDialBack) -> bool | None:
        """Return whether a peer reached this one; ``None`` if it did not try, or its connection was not seen.

        Raises:
            UnreachableError: it gave no valid answer.
        """
        peer = question.peer
        # A dial-back that was asked for in the network before ends soon.
        while peer.peer_id in self._awaited:
            await self._awaited[peer.peer_id].ended.wait()
        # Before the question: the peer's connection may come sooner than its answer.
        awaited = self._awaited[peer.peer_id] = _DialBack(prefix_of(peer.host))
        try:
            answer = await ask_dial_back(self._transport, peer.peer_id, question.port)
            if answer.outcome is DialBackOutcome.REACHED:
                # The answer may overtake the connection, whose handshake is not over here yet.
                with trio.move_on_after(2 * ROUND_TRIPS_SECONDS):
                    await awaited.seen.wait()
        finally:
            del self._awaited[peer.peer_id]
            awaited.ended.set()
        logger.debug("%s dialled port %d: %s %s", peer.peer_id, question.port, answer.outcome, answer.reason)
        if awaited.seen.is_set():
            return True
        # A peer that claims to have reached this one, and was not seen, counts as one that did not answer: it
        # may lie.
        return False if answer.outcome is DialBackOutcome.FAILED else None

    async def outer_port(self, version: int, port: int) -> int:
        """Return the outer port of a fresh port: the same, or what a peer sees that is asked from this very port.

        Raises:
            UnreachableError: it cannot be told.
        """
        if self.knowledge.keeps_ports(version):
            return port
        reasons = []
        servers = [
            peer
            for peer in self._connections.neighbours()
            if peer.port and version_of(peer.host) == version and not is_loopback(peer.host)
        ]
        for peer in servers[:_MOST_PROBES]:
            try:
                # From the fresh port itself: a router may map each local port to another outer one. For less time than
                # a search for a lane has (DIRECT_SECONDS); two servers of both versions fit into REPLY_SECONDS.
                timeout = 2 * ROUND_TRIPS_SECONDS
                seen = await ask(peer.host, peer.port, local_port=port, timeout=timeout)
            except UnreachableError as error:
                reasons.append(str(error))
            else:
                return seen.port
        raise UnreachableError("; ".join(reasons) or "no peer can be asked for the outer port")

    # -- mapping

    def _map_if_useful(self, nursery: trio.Nursery) -> None:
        """Map a port if a router is there, or may be there while this peer is alone.

        Peers of one machine never do: their tests and training need no router.
        """
        if self._mapper is None or self._mapping is not None:
            return
        # With peers around, they tell whether a router is there. A peer that is alone has none to ask.
        # By then, a peer that it has dialled has answered.
        alone = self._alone_since is not None and trio.current_time() >= self._alone_since + REPLY_SECONDS
        has_public_host = any(not is_private(host) and ":" not in host for host in self._seen_hosts)
        if not (self.knowledge.behind_router or (alone and not has_public_host)):
            return
        # A router can pass connections on to a listener of IPv4 only.
        ports = [
            port
            for host, port in self._connections.listening()
            if version_of(host) == 4 and not is_loopback(host)
        ]
        if ports:
            self._mapping = trio.CancelScope()
            nursery.start_soon(self._map, self._mapper, ports[0], self._mapping)

    async def _map(self, mapper: PortMapper, port: int, scope: trio.CancelScope) -> None:
        with scope:
            await mapper.run(port)
        # The network may have changed: then the next look begins anew, at the new router.
        self._mapping = None
        self.wake()

    def _mapped(self, mapping: Mapped | None) -> None:
        self.knowledge.mapped(mapping)
        self.wake()


class _DialBack:
    """A dial-back that a peer was asked for.

    Args:
        network: the peer's, from which its connection has to come.
    """

    def __init__(self, network: str) -> None:
        self.network = network
        self.seen = trio.Event()
        self.ended = trio.Event()
