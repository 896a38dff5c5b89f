"""Inbound lanes: how many there may be, and who reads them when there is something to read."""

from __future__ import annotations

import logging

import trio

from p2pavg.errors import ClosedError, RemoteProtocolError, StreamBrokenError
from p2pavg.net.lane_limits import IDLE_SECONDS, InboundSlots
from p2pavg.net.tls_connection import TlsConnection
from p2pavg.net.tls_lane import TlsLane
from p2pavg.net.transport import DirectLaneHandler, PeerId

logger = logging.getLogger(__name__)

# The sender lets go first: a receiver that did might do so when the next message is on its way.
_INBOUND_IDLE_SECONDS = IDLE_SECONDS + 60.0


class InboundLanes:
    """The lanes on which others send to this process."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.lanes: set[TlsLane] = set()
        self.slots = InboundSlots()
        self._nursery = nursery
        self._closed = False
        self._handler: DirectLaneHandler | None = None
        self._handler_set = trio.Event()

    def serve(self, handler: DirectLaneHandler) -> None:
        """What :meth:`Transport.serve_lanes` says."""
        self._handler = handler
        self._handler_set.set()

    def close(self) -> None:
        """Abort every lane, and take no more."""
        self._closed = True
        for lane in self.lanes:
            lane.abort()

    def refusal(self, peer_id: PeerId) -> str:
        """Why the peer may have no lane now; empty if it may."""
        return "it is closing" if self._closed else self.slots.refusal(peer_id)

    def adopt(self, connection: TlsConnection, slot: Slot) -> None:
        """There is one more lane: attend to it for as long as it lives."""
        lane = TlsLane(connection, slot.peer_id)
        slot.used = True
        self.lanes.add(lane)
        self._nursery.start_soon(self._attend, lane)
        if self._closed:
            lane.abort()

    async def _attend(self, lane: TlsLane) -> None:
        try:
            while await self._has_something(lane):
                await self._handle(lane)
        except (StreamBrokenError, RemoteProtocolError, ClosedError) as error:
            logger.info("a lane of %s ended: %s", lane.remote, error)
        except Exception:
            logger.exception("a lane of %s is dropped", lane.remote)
        finally:
            lane.abort()
            self.lanes.remove(lane)
            self.slots.give_back(lane.remote)

    async def _handle(self, lane: TlsLane) -> None:
        assert self._handler is not None
        before = lane.bytes_received
        await self._handler(lane)
        if lane.bytes_received == before and not lane.aborted:
            raise ClosedError("its handler read nothing")  # and would be called for ever

    async def _has_something(self, lane: TlsLane) -> bool:
        """Wait for bytes and for somebody to read them; false when there will be none."""
        with trio.move_on_after(_INBOUND_IDLE_SECONDS):
            if lane.aborted:
                return False
            await lane.wait_readable(ours_to_read=True)
            if lane.has_ended():
                return False
            await self._handler_set.wait()
            return True
        return False


class Slot:
    """A place for one inbound lane, which goes back unless a lane uses it."""

    def __init__(self, slots: InboundSlots, peer_id: PeerId) -> None:
        self.peer_id = peer_id
        self.used = False
        self._slots = slots
        slots.take(peer_id)

    def release(self) -> None:
        """Nobody waits for a lane any more."""
        if not self.used:
            self._slots.give_back(self.peer_id)
