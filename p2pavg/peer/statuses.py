"""The statuses of a run's peers: this peer publishes its own, and reads those of the others."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import trio

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import CALM_LOOK_SECONDS
from p2pavg.group.bandwidth import BandwidthMeter
from p2pavg.net.nat.reach.reachability import Reachability
from p2pavg.runs.context import PeerContext
from p2pavg.runs.records.board import Board, Topic
from p2pavg.runs.records.boards import Boards
from p2pavg.telemetry.events import PeerGone, PeerSeen
from p2pavg.telemetry.hub import Events
from p2pavg.telemetry.keeper import StatusKeeper
from p2pavg.telemetry.status import TOPIC, PeerStatus, RunPeer, encode_status, read_status, run_peer

SECONDS_PER_PEER = 0.25
"""Between two statuses of one peer, for each other peer: so all statuses together take no more of a link."""
FEW_PEERS = 8
"""In a smaller run, a peer pauses for as long as in one with so many others."""
REFRESH_STATUS_SECONDS = 60.0
"""A status that nothing has changed is published again after this: its bandwidth and uptime may be new."""


@dataclass(frozen=True, slots=True)
class HeardStatus:
    """The last status of another peer."""

    status: PeerStatus
    sequence: int
    at: float
    """Wall clock of this peer when it came, seconds."""


class StatusOwners:
    """The averagers of one peer that could publish its status in each run: the first one does, the others read with it.

    A peer has one entry on a board. Two averagers of one run would replace and withdraw each other's.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, list[Statuses]] = {}

    def join(self, run_id: str, statuses: Statuses) -> None:
        """Add an averager of a run."""
        self._statuses.setdefault(run_id, []).append(statuses)
        self._statuses[run_id][0].is_first.set()

    def leave(self, run_id: str, statuses: Statuses) -> None:
        """Remove an averager that has withdrawn its status: the next one publishes from now on."""
        others = [each for each in self._statuses[run_id] if each is not statuses]
        if others:
            self._statuses[run_id] = others
            others[0].is_first.set()
        else:
            del self._statuses[run_id]

    def owner(self, run_id: str) -> Statuses | None:
        """Return the statuses of the averager that publishes, if there is one."""
        found = self._statuses.get(run_id)
        return found[0] if found else None


class HeardStatuses:
    """The statuses on a board, each read once. All methods may be called from any thread."""

    def __init__(self, board: Topic, context: PeerContext) -> None:
        self._board = board
        self._context = context
        self._lock = threading.Lock()
        self._heard: dict[str, HeardStatus] = {}

    def read(self) -> dict[str, HeardStatus]:
        """Return the live statuses of the other peers by peer id; leave out malformed ones."""
        now = self._context.wall_clock()
        with self._lock:
            found: dict[str, HeardStatus] = {}
            for peer_id, entry in self._board.entries.items():
                known = self._heard.get(peer_id)
                if known is not None and known.sequence == entry.sequence:
                    found[peer_id] = known
                    continue
                try:
                    found[peer_id] = HeardStatus(read_status(entry.value), entry.sequence, now)
                except RemoteProtocolError:
                    continue
            self._heard = found
        return dict(found)


class Statuses:
    """This peer's status, and those of the others.

    Args:
        boards: of the run.
        events: delivers :class:`PeerSeen` and :class:`PeerGone`.
        keeper: has this peer's status.
        owners: the averagers of this peer that could publish its status.
        meter: of this peer's link.
    """

    def __init__(
        self,
        context: PeerContext,
        boards: Boards,
        events: Events,
        keeper: StatusKeeper,
        owners: StatusOwners,
        *,
        run_id: str,
        meter: BandwidthMeter,
    ) -> None:
        self.context = context
        self._boards = boards
        self._board: Board | None = None
        self._events = events
        self._keeper = keeper
        self._owners = owners
        self._run_id = run_id
        self._meter = meter
        self._began = context.wall_clock()
        self._heards: HeardStatuses | None = None
        self._look_seconds = CALM_LOOK_SECONDS
        self._present: dict[str, str] = {}
        self.is_first = trio.Event()
        """Set when this averager is the one that publishes."""
        owners.join(run_id, self)

    @property
    def version(self) -> int:
        """A number that grows when an event changes this peer's status."""
        return self._keeper.version

    @property
    def mine(self) -> PeerStatus:
        """This peer's present status."""
        now, reach = self.context.wall_clock(), self.context.transport.reachability
        return self._keeper.status(
            now=now,
            uptime=now - self._began,
            reach=(str(reach.kind), reach.sentence),
            mbps=self._meter.known_mbps,
        )

    def others(self) -> dict[str, HeardStatus]:
        """Return the live statuses of the other peers, by peer id."""
        owner = self._owners.owner(self._run_id) or self
        return {} if owner._heards is None else owner._heards.read()

    def close(self) -> None:
        """Let another averager of this peer publish, after this one has withdrawn its status."""
        self._owners.leave(self._run_id, self)

    def members(self) -> tuple[RunPeer, ...]:
        """Return all peers of the run that publish a status, this one first and the others by their ids."""
        me = run_peer(self.context.signer.peer_id, self.mine, self.context.wall_clock(), is_self=True)
        others = sorted(self.others().items())
        return (me, *(run_peer(peer_id, heard.status, heard.at) for peer_id, heard in others))

    def look_every(self, seconds: float) -> None:
        """Look for the others' statuses at least this often from now on: someone watches them."""
        self._look_seconds = min(self._look_seconds, seconds)
        owner = self._owners.owner(self._run_id) or self
        if owner._board is not None:
            owner._board.look_every(seconds)

    async def run(self) -> None:
        """Publish this peer's status, and tell of peers that come and go, until cancelled.

        While another averager of this peer publishes, this one waits to take its place.
        """
        await self.is_first.wait()
        board = self._board = self._boards.open(TOPIC, self._look_seconds)
        board.look_every(self._look_seconds)  # another user may have opened it
        self._heards = HeardStatuses(board, self.context)
        published: tuple[int, Reachability] | None = None
        published_at = -REFRESH_STATUS_SECONDS
        while True:
            now, state = trio.current_time(), (self._keeper.version, self.context.transport.reachability)
            if state != published or now >= published_at + REFRESH_STATUS_SECONDS:
                published, published_at = state, now
                board.publish(encode_status(self.mine))
            self._tell()
            await trio.sleep(SECONDS_PER_PEER * max(FEW_PEERS, len(self._present)))

    def _tell(self) -> None:
        """Emit an event for each peer that has come or gone."""
        now = {peer_id: heard.status.name for peer_id, heard in self.others().items()}
        before, self._present = self._present, now
        at = self.context.wall_clock()
        for peer_id in sorted(now.keys() - before.keys()):
            self._events.emit(PeerSeen(time=at, run_id=self._run_id, peer_id=peer_id, name=now[peer_id]))
        for peer_id in sorted(before.keys() - now.keys()):
            self._events.emit(PeerGone(time=at, run_id=self._run_id, peer_id=peer_id))
