"""Limits of lanes: the idle lanes that are kept, the lanes that strangers may have, and the peers not to try again."""

from __future__ import annotations

from collections import Counter, OrderedDict

import trio

from p2pavg.base.errors import UnreachableError
from p2pavg.net.lanes.tls_lane import TlsLane
from p2pavg.net.transport import LaneHost, PeerId

MAX_IDLE_PER_PEER = 4
MAX_IDLE = 128
MAX_INBOUND_PER_PEER = 16
MAX_INBOUND = 512
# Lanes of peers that are in no expected group. A lane may be requested just before its group is known here, or just
# after its end. Peers outside every group have no use for a lane.
MAX_UNEXPECTED_PER_PEER = 2
MAX_UNEXPECTED = 16
IDLE_LANE_SECONDS = 600.0
MAX_NOWHERE = 1024


class IdleLanes:
    """Outbound lanes that are not in use, the least recently used first."""

    def __init__(self) -> None:
        self._lanes: dict[TlsLane, None] = {}

    def put(self, lane: TlsLane) -> None:
        """Keep one more lane, and abort the oldest ones above the limits."""
        self._lanes[lane] = None
        if len(self._of(lane.remote)) > MAX_IDLE_PER_PEER:
            self._drop(self._of(lane.remote)[0])
        if len(self._lanes) > MAX_IDLE:
            self._drop(next(iter(self._lanes)))

    def take(self, peer_id: PeerId) -> TlsLane | None:
        """Return the most recently used lane of a peer, so that surplus lanes grow old and are closed.

        A lane that is not acknowledged yet is skipped and stays.
        """
        for lane in reversed(self._of(peer_id)):
            if lane.owed:
                continue
            del self._lanes[lane]
            if not lane.is_readable():  # without an acknowledgement to come, only the end can be read
                return lane
            lane.abort()
        return None

    def forget(self, lane: TlsLane) -> None:
        """Forget a lane that has ended."""
        self._lanes.pop(lane, None)

    def _of(self, peer_id: PeerId) -> list[TlsLane]:
        return [lane for lane in self._lanes if lane.remote == peer_id]

    def _drop(self, lane: TlsLane) -> None:
        del self._lanes[lane]
        lane.abort()


class InboundSlots:
    """The number of inbound lanes, of each peer and in all.

    Args:
        share: the share of MAX_INBOUND that is allowed, where this process may open few files.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._taken: Counter[PeerId] = Counter()
        self._share = share
        self.host: LaneHost | None = None
        """Reads the lanes, and says of which peers they are expected."""

    def wants(self, peer_id: PeerId) -> bool:
        """Return whether lanes of a peer are expected now."""
        return self.host is None or self.host.wants_lane(peer_id)

    def refusal(self, peer_id: PeerId) -> str:
        """Return the reason for which the peer may have no more lanes; empty if it may."""
        wanted = self.wants(peer_id)
        most = MAX_INBOUND_PER_PEER if wanted else MAX_UNEXPECTED_PER_PEER
        if self._taken[peer_id] >= most:
            return f"the sender holds {most} lanes already" + (
                "" if wanted else ", and is in no group with this peer now"
            )
        unwanted = sum(count for other, count in self._taken.items() if not self.wants(other))
        if not wanted and unwanted >= MAX_UNEXPECTED:
            return "the sender is in no group with this peer now"
        if self.is_full():
            return f"there are {self._taken.total()} lanes already"
        return ""

    def is_full(self) -> bool:
        """Return whether the limit of all lanes is reached."""
        return self._taken.total() >= int(MAX_INBOUND * self._share)

    def take(self, peer_id: PeerId) -> None:
        """Count one more lane of a peer."""
        self._taken[peer_id] += 1

    def give_back(self, peer_id: PeerId) -> None:
        """Count one lane less of a peer."""
        self._taken[peer_id] -= 1
        self._taken += Counter()  # drops the peers without lanes


class Nowhere:
    """Peers to which no lane could be made a short while ago, with the reason."""

    def __init__(self) -> None:
        self._found: OrderedDict[PeerId, tuple[float, str]] = OrderedDict()

    def add(self, peer_id: PeerId, reason: str, seconds: float) -> None:
        """Let :meth:`check` refuse this peer for a while."""
        self._found[peer_id] = (trio.current_time() + seconds, reason)
        self._found.move_to_end(peer_id)
        while len(self._found) > MAX_NOWHERE:
            self._found.popitem(last=False)

    def check(self, peer_id: PeerId) -> None:
        """Raise UnreachableError if an attempt has failed a short while ago."""
        until, reason = self._found.get(peer_id, (0.0, ""))
        if trio.current_time() < until:
            raise UnreachableError(f"no direct way to {peer_id} was found a moment ago: {reason}")
        self._found.pop(peer_id, None)
