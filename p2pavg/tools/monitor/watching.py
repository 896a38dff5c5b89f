"""Watches a run: reads its peers' statuses, and tells those that look on of changes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from typing import TypeAlias

import trio

from p2pavg.base.limits import CALM_LOOK_SECONDS, LOOK_SECONDS
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.net.transport import PeerId
from p2pavg.peer.averager import DecentralizedAverager
from p2pavg.peer.host import Host, JoinedRun
from p2pavg.peer.statuses import HeardStatuses, Statuses
from p2pavg.runs.membership.membership import RunAccess
from p2pavg.runs.records.board import Board, board_key
from p2pavg.runs.records.boards import Departures
from p2pavg.runs.records.spread_records import WholeRun
from p2pavg.telemetry.status import TOPIC, PeerStatus
from p2pavg.tools.daemon.life import DaemonProcess
from p2pavg.tools.monitor.overview import Overview
from p2pavg_dht import Contact

READ_SECONDS = 0.5
"""Between two readings of what has come, and between two events of one page."""
MAX_WATCHED = 64
"""Peers whose processes are watched: a killed one is gone at once. Any other is gone when its status expires."""


class _Own:
    """This peer's own status: a new object only when something has changed, or after a while."""

    def __init__(self) -> None:
        self._read: tuple[int, float, PeerStatus] | None = None

    def read(self, statuses: Statuses) -> tuple[PeerStatus, float]:
        """Return the status, and when it was read."""
        now, version = statuses.context.wall_clock(), statuses.version
        # Between two readings of this peer's own status when nothing has happened to it.
        if self._read is None or self._read[0] != version or now >= self._read[1] + CALM_LOOK_SECONDS:
            self._read = version, now, statuses.mine
        return self._read[2], self._read[1]


class AveragerSource:
    """The statuses that an averager of this program has read, and its own."""

    gives = ""

    def __init__(self, averager: DecentralizedAverager) -> None:
        self.run_id = averager.config.run_id
        self.me = averager.peer_id
        self.wall_clock = averager.statuses.context.wall_clock
        self._averager = averager
        self._own = _Own()
        averager.statuses.look_every(LOOK_SECONDS)

    @property
    def excluded(self) -> Mapping[str, str]:
        """Peers that verified evidence excludes, and why."""
        return self._averager.excluded

    def read(self) -> dict[str, tuple[PeerStatus, float]]:
        """Return each peer's status, and when it came."""
        statuses = self._averager.statuses
        found = {peer_id: (heard.status, heard.at) for peer_id, heard in statuses.others().items()}
        return {self.me: self._own.read(statuses), **found}


class BoardSource:
    """The statuses on a run's board, for a peer that is no peer of the run, or helps it as an auxiliary."""

    def __init__(
        self, host: Host, run_id: str, run: JoinedRun, heards: HeardStatuses, daemon: DaemonProcess | None
    ) -> None:
        self.run_id = run_id
        self.me = host.id
        self.wall_clock = host.context.wall_clock
        self._daemon = daemon
        self._host = host
        self._run = run
        self._heards = heards
        self._own = _Own()

    @property
    def excluded(self) -> Mapping[str, str]:
        """Peers that verified evidence excludes, and why."""
        return self._run.excluded

    @property
    def gives(self) -> str:
        """A sentence on the samples that this machine has given to the run; empty if it does not train with its job."""
        return "" if self._daemon is None else self._daemon.training()

    def read(self) -> dict[str, tuple[PeerStatus, float]]:
        """Return each peer's status, and when it came; this peer's own one too, if it publishes one."""
        found = {peer_id: (heard.status, heard.at) for peer_id, heard in self._heards.read().items()}
        publishes = self._host.registry.statuses.owner(self.run_id)
        return found if publishes is None else {self.me: self._own.read(publishes), **found}


StatusSource: TypeAlias = AveragerSource | BoardSource
"""The statuses of a run."""


class Watcher:
    """Keeps an overview of a run up to date.

    Args:
        source: the statuses.
    """

    def __init__(self, source: StatusSource) -> None:
        self._source, self._wall_clock = source, source.wall_clock
        self.overview = Overview(source.run_id, me=source.me, begins=source.wall_clock())
        self._changed = trio.Event()
        self._shown = (-1, 0.0, "")
        self._read()

    def shown(self) -> dict[str, object]:
        """Return the run as JSON values."""
        return self.overview.shown(self._wall_clock())

    def text(self) -> str:
        """Return the run as JSON text, made once for all that look on at the same time."""
        version, now = self.overview.version, self._wall_clock()
        # Text is made anew after this also if nothing has changed, because it carries the time.
        if self._shown[0] != version or now >= self._shown[1] + LOOK_SECONDS:
            self._shown = version, now, json.dumps(self.overview.shown(now), separators=(",", ":"))
        return self._shown[2]

    async def changed(self) -> None:
        """Wait for the next change."""
        await self._changed.wait()

    async def run(self) -> None:
        """Read the statuses until cancelled."""
        while True:
            await trio.sleep(READ_SECONDS)
            before = self.overview.version
            self._read()
            if self.overview.version != before:
                event, self._changed = self._changed, trio.Event()
                event.set()

    def _read(self) -> None:
        now = self._wall_clock()
        self.overview.receive(self._source.read(), now)
        self.overview.exclude(self._source.excluded, now)
        self.overview.give(self._source.gives)


@asynccontextmanager
async def watching(source: StatusSource) -> AsyncIterator[Watcher]:
    """Watch a run for as long as the block runs."""
    with bare_exceptions():
        async with trio.open_nursery() as nursery:
            watcher = Watcher(source)
            nursery.start_soon(watcher.run)
            yield watcher
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def board_source(
    host: Host, run_id: str, access: RunAccess | None, daemon: DaemonProcess | None = None
) -> AsyncIterator[BoardSource]:
    """Read the statuses of a run, for as long as the block runs, without being one of its peers.

    Args:
        host: this peer, a :class:`p2pavg.Peer`.
        access: keys and certificate of a run that has an authority; ``None``: the run is open to anybody.
        daemon: of this peer; it knows what this machine gives to the run, if it trains with the run's job.

    Raises:
        ConfigError: the certificate is for another peer.
    """
    context = host.context
    with bare_exceptions(), closing(JoinedRun(host, run_id, access)) as run:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run.run)
            whole = WholeRun(run.records)
            board = Board(
                whole,
                key=board_key(run_id, TOPIC),
                peer_id=host.id,
                wall_clock=context.wall_clock,
                look_seconds=LOOK_SECONDS * whole.pauses,
            )
            nursery.start_soon(board.run)
            nursery.start_soon(Departures(context.transport, _Publishers(host, board), {TOPIC: board}).run)
            yield BoardSource(host, run_id, run, HeardStatuses(board, context), daemon)
            nursery.cancel_scope.cancel()


class _Publishers:
    """The peers that publish a status and that this peer could call once; the same object until one comes or goes.

    A killed peer's contact is forgotten with the first call that fails, often before anything has looked at it. So each
    contact is kept here for as long as there is a status of that peer.
    """

    def __init__(self, host: Host, board: Board) -> None:
        self._host = host
        self._board = board
        self._known: dict[PeerId, Contact] = {}
        self._found: Sequence[Contact] = ()

    @property
    def companions(self) -> Sequence[Contact]:
        entries = self._board.entries
        known = {peer_id: contact for peer_id, contact in self._known.items() if peer_id in entries}
        for contact in self._host.records.contacts:
            if contact.peer_id in entries and (contact.peer_id in known or len(known) < MAX_WATCHED):
                known[contact.peer_id] = contact
        if known.keys() != self._known.keys():
            self._found = tuple(known.values())
        self._known = known
        return self._found
