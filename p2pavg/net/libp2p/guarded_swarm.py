"""A swarm that asks before it admits a connection, and frees everything that an ended connection held."""

from __future__ import annotations

import logging
from typing import Any, Protocol, cast

import trio
from libp2p.abc import IMuxedConn, INetConn, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.io.abc import ReadWriteCloser
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from multiaddr import Multiaddr

from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.net.libp2p.carriers import Carrier
from p2pavg.net.libp2p.guarded_yamux import GuardedYamux
from p2pavg.net.libp2p.speed import ReadAheadStream
from p2pavg.net.limits.entrance import NoPlaceError
from p2pavg.net.limits.first_messages import Handshakes

logger = logging.getLogger(__name__)

# libp2p only logs the address of a connection that it did not accept itself.
_NO_ADDRESS = Multiaddr("/ip4/0.0.0.0/tcp/0")


class GuardedMuxerMultistream(MuxerMultistream):
    """The negotiation of a muxer, always with GuardedYamux: libp2p's own ignores the registered class."""

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        protocol, _ = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        muxed = GuardedYamux(conn, peer_id, is_initiator=conn.is_initiator)
        return self._annotate_connection(muxed, conn, protocol)


class _IdleConnector(AutoConnector):
    """An auto-connector that dials no peer.

    libp2p's own dials every peer with a known address, up to the mean of its watermarks, even if the lower one is 0.
    """

    async def maybe_connect(self) -> None:
        """Do nothing: this library decides which peers are dialled."""


class SwarmOwner(Protocol):
    """Decides about the connections of a swarm, and notes them."""

    def admit(self, muxed: GuardedYamux) -> None:
        """Find a place for a connection before it is added. Raises NoPlaceError to refuse it."""

    def connected(self, connection: SwarmConn) -> None:
        """Note that there is one more connection."""

    def ended(self, muxed: GuardedYamux) -> None:
        """Note that an admitted connection has ended."""


class GuardedSwarm(Swarm):
    """A swarm that admits connections by our rules, and frees what each one held when it ends.

    libp2p keeps a task and a slot of its limiter for every inbound connection until the host ends. After 250 of them,
    even one after another, it refuses every peer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.owner: SwarmOwner
        """Set before anything can connect."""
        self.handshakes = Handshakes()

    def _init_connection_management(self) -> None:
        super()._init_connection_management()
        self.auto_connector = _IdleConnector(self)

    async def _notify(self, method: str, *args: Any) -> None:
        """Call the observers one after another.

        libp2p makes a nursery with a task for each of them, also for every stream that opens or closes. It waits for
        all of them too, so an observer that blocks holds up its caller there as well.
        """
        for notifee in list(self.notifees):
            try:
                await getattr(notifee, method)(self, *args)
            except Exception:
                logger.exception("%s.%s failed", type(notifee).__name__, method)

    async def add_conn(self, muxed_conn: IMuxedConn, direction: str = "unknown") -> SwarmConn:
        assert isinstance(muxed_conn, GuardedYamux)
        expected = muxed_conn.carrier.expected
        if expected and expected != str(muxed_conn.peer_id):
            raise SwarmException(f"{muxed_conn.peer_id} is there instead of {expected}")
        try:
            self.owner.admit(muxed_conn)
        except NoPlaceError as error:
            raise SwarmException(str(error)) from None
        try:
            connection = await super().add_conn(muxed_conn, direction)
        except BaseException:
            self.owner.ended(muxed_conn)
            raise
        self.owner.connected(connection)
        return connection

    async def adopt(self, carrier: Carrier, peer_id: ID, works: trio.Event, *, initiator: bool) -> None:
        """Make a connection over a carrier that exists: a circuit, or a socket of a punched hole.

        The initiator's call returns when the connection is in the swarm. The other side's call lives as long as the
        connection, as the task of a listener does.

        Args:
            peer_id: the peer that must be at the other end.
            works: set when the connection is in the swarm.

        Raises:
            SwarmException: the handshake failed, another peer is there, or there is no place.
        """
        carrier.expected = str(peer_id)
        kind = ConnectionType.RELAYED if carrier.relay else ConnectionType.DIRECT
        raw = RawConnection(carrier, initiator, kind)
        muxed: IMuxedConn | None = None
        try:
            if initiator:
                await self.upgrade_outbound_raw_conn(raw, peer_id)
            else:
                # A relay pays as itself: the hosts behind it are not known, and it may have invented them.
                muxed = await self._shake_hands(carrier.relay or carrier.remote_endpoint[0], raw, _NO_ADDRESS)
        except BaseException as error:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                await carrier.close()
            if isinstance(error, SwarmException) or not isinstance(error, Exception):
                raise
            # The bytes of a handshake are the relay's or a stranger's, and so it may fail in any way.
            raise SwarmException(f"the handshake with {peer_id} failed") from error
        works.set()
        if isinstance(muxed, GuardedYamux):
            try:
                await muxed.event_closed.wait()
            finally:
                await muxed.abort()

    def _best_connection(self, connections: list[INetConn]) -> INetConn:
        """Return the oldest direct connection, or else the oldest relayed one.

        A peer that has changed its network leaves connections behind that look alive. So the host of the newest
        connection counts, and older connections to other hosts come last.
        """
        muxed = {found: cast(GuardedYamux, found.muxed_conn) for found in connections}
        preferred = [found for found in connections if not muxed[found].relay] or connections
        host = muxed[preferred[-1]].remote_host
        return next(found for found in preferred if muxed[found].remote_host == host)

    def remove_conn(self, swarm_conn: SwarmConn) -> None:
        super().remove_conn(swarm_conn)
        self.owner.ended(cast(GuardedYamux, swarm_conn.muxed_conn))

    async def _do_handle_inbound_connection(
        self,
        read_write_closer: ReadWriteCloser,
        maddr: Any,
        failure_event: Any,  # noqa: ARG002
    ) -> None:
        assert isinstance(read_write_closer, ReadAheadStream)
        assert read_write_closer.arrival is not None
        raw, host = RawConnection(read_write_closer, False), read_write_closer.arrival.host
        try:
            muxed = await self._shake_hands(host, raw, maddr)
        except Exception as error:  # noqa: BLE001 - a stranger's handshake may fail in any way
            logger.debug("inbound connection on %s refused: %r", maddr, error)
            await raw.close()
            return
        assert isinstance(muxed, GuardedYamux)
        try:
            await muxed.event_closed.wait()
        finally:
            await muxed.abort()

    async def _shake_hands(self, source: str, raw: RawConnection, maddr: Multiaddr) -> IMuxedConn:
        """Finish a handshake that the other end begins, at the cost of ``source``, once that has paid its debt."""
        with trio.fail_after(REPLY_SECONDS):
            await self.handshakes.wait_for_turn(source)
        return await self.handshakes.run(source, self.upgrade_inbound_raw_conn(raw, maddr))
