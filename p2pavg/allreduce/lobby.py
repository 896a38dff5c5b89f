"""Where inbound lanes wait for the group that they belong to.

A member may hear of a commit later than another one's first lane arrives. So a group is expected from the moment in
which this peer accepts its roster; a lane of any other group is refused at once.
"""

from __future__ import annotations

import logging
from types import TracebackType

import trio

from p2pavg.allreduce.messages import MAX_HEADER_BYTES, Lane, LaneHeader, decode_header
from p2pavg.errors import RemoteProtocolError
from p2pavg.net.framing import receive_message
from p2pavg.net.transport import Stream

logger = logging.getLogger(__name__)

HEADER_SECONDS = 10.0


class InboundLane:
    """A lane that another member opened, with its header read."""

    def __init__(self, stream: Stream, lane: Lane) -> None:
        self.stream = stream
        self.lane = lane
        self.finished = trio.Event()
        """Set by whoever took the lane; the stream is reset after it."""


class ExpectedGroup:
    """The lanes of one group, as they arrive. Close it, or they wait for ever."""

    def __init__(self, lobby: Lobby, group_id: bytes) -> None:
        self.group_id = group_id
        self._lobby = lobby
        # Unbounded, and bounded all the same: one lane of each kind a peer, the lobby sees to that.
        self._arrive, self.lanes = trio.open_memory_channel[InboundLane](1024)
        self._seen: set[tuple[str, Lane]] = set()
        self._waiting: set[InboundLane] = set()
        lobby.groups[group_id] = self

    def __enter__(self) -> ExpectedGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """No lane of this group is expected any more; those that wait are let go."""
        self._lobby.groups.pop(self.group_id, None)
        for lane in self._waiting:
            lane.finished.set()

    async def arrived(self, stream: Stream, header: LaneHeader) -> None:
        """Hand a lane over and keep its stream for as long as it is used."""
        place = (stream.remote, header.lane)
        if place in self._seen:
            raise RemoteProtocolError(f"{stream.remote} opened a second lane of {header.lane.name.lower()}")
        self._seen.add(place)
        lane = InboundLane(stream, header.lane)
        self._waiting.add(lane)
        try:
            self._arrive.send_nowait(lane)
            await lane.finished.wait()
        except trio.WouldBlock:
            raise RemoteProtocolError("more lanes than any group has") from None
        finally:
            self._waiting.discard(lane)


class Lobby:
    """Serves the exchange protocol of one peer."""

    def __init__(self) -> None:
        self.groups: dict[bytes, ExpectedGroup] = {}

    def expect(self, group_id: bytes) -> ExpectedGroup:
        """Let lanes of this group in from now on."""
        return ExpectedGroup(self, group_id)

    async def serve(self, stream: Stream) -> None:
        """One inbound stream of the exchange protocol."""
        with trio.move_on_after(HEADER_SECONDS) as scope:
            message = await receive_message(stream, max_bytes=MAX_HEADER_BYTES)
        if scope.cancelled_caught or message is None:
            return
        header = decode_header(message)
        group = self.groups.get(header.group_id)
        if group is None:
            logger.info("%s opened a lane of a group that is not expected", stream.remote)
            return
        await group.arrived(stream, header)
