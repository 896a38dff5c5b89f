"""Inbound lanes: their limits, and the task that calls the handler when there is something to read."""

from __future__ import annotations

import logging

import trio

from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError
from p2pavg.net.lanes.limits import IDLE_LANE_SECONDS, InboundSlots
from p2pavg.net.lanes.tls_connection import TlsConnection
from p2pavg.net.lanes.tls_lane import TlsLane
from p2pavg.net.transport import LaneHost, PeerId

logger = logging.getLogger(__name__)


class InboundLanes:
    """The lanes on which other peers send to this process."""

    def __init__(self, nursery: trio.Nursery, share: float = 1.0) -> None:
        self.lanes: set[TlsLane] = set()
        self.slots = InboundSlots(share)
        self._idle: dict[TlsLane, None] = {}
        """Idle lanes, the least recently used first."""
        self._nursery = nursery
        self._closed = False
        self._host_set = trio.Event()

    def serve(self, host: LaneHost) -> None:
        """Serve inbound lanes, see :meth:`Transport.serve_lanes`."""
        self.slots.host = host
        self._host_set.set()

    def close(self) -> None:
        """Abort every lane, and accept no more."""
        self._closed = True
        for lane in self.lanes:
            lane.abort()

    def refusal(self, peer_id: PeerId) -> str:
        """Return the reason for which the peer may have no lane now; empty if it may have one."""
        if self._closed:
            return "its transport is closing"
        if self.slots.is_full() and self.slots.wants(peer_id):
            self._drop_an_idle_one()
        return self.slots.refusal(peer_id)

    def _drop_an_idle_one(self) -> None:
        """Drop an idle lane to make room for a member of a group. Its sender makes a new lane when it needs one."""
        for lane in self._idle:
            if not self.slots.wants(lane.remote):
                del self._idle[lane]
                self._give_back(lane)
                lane.abort()
                return

    def adopt(self, connection: TlsConnection, slot: Slot) -> None:
        """Add a lane, and attend to it for as long as it lives."""
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
            logger.debug("a lane of %s ended: %s", lane.remote, error)
        except Exception:
            logger.exception("a lane of %s is dropped", lane.remote)
        finally:
            lane.abort()
            self._idle.pop(lane, None)
            self._give_back(lane)

    def _give_back(self, lane: TlsLane) -> None:
        if lane in self.lanes:
            self.lanes.remove(lane)
            self.slots.give_back(lane.remote)

    async def _handle(self, lane: TlsLane) -> None:
        assert self.slots.host is not None
        before = lane.bytes_received
        await self.slots.host.serve_lane(lane)
        if lane.bytes_received == before and not lane.aborted:
            raise ClosedError("its handler read nothing")  # the loop would call it without end

    async def _has_something(self, lane: TlsLane) -> bool:
        """Wait for bytes and for a handler. Return false if the lane has ended, or was idle for too long."""
        # The sender closes an idle lane first. If the receiver did, the next message might be on its way already.
        with trio.move_on_after(1.1 * IDLE_LANE_SECONDS):
            if lane.aborted:
                return False
            self._idle[lane] = None
            await lane.wait_readable(ours_to_read=True)
            self._idle.pop(lane, None)
            if lane.has_ended():
                return False
            if self.slots.host is None:  # for an event that is set, trio would make a turn of the event loop
                await self._host_set.wait()
            return True
        return False


class Slot:
    """A place for one inbound lane. It must be released unless a lane uses it."""

    def __init__(self, slots: InboundSlots, peer_id: PeerId) -> None:
        self.peer_id = peer_id
        self.used = False
        self._slots = slots
        slots.take(peer_id)

    def release(self) -> None:
        """Return the place, unless a lane uses it."""
        if not self.used:
            self._slots.give_back(self.peer_id)
