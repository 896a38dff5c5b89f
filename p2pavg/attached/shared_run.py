"""One run at a peer that processes share: one averager, its boards and its rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil
import torch
import trio

from p2pavg.allreduce.vector.accumulation import Schema
from p2pavg.attached.boards import SharedBoard
from p2pavg.attached.guest import Guest
from p2pavg.attached.messages import check_topic, read_update
from p2pavg.attached.rounds import Seat, SharedRounds
from p2pavg.attached.segments import ContributionSegment, ResultWriter
from p2pavg.attached.settings import difference
from p2pavg.attached.shared_states import SharedStates
from p2pavg.attached.updates import Updates
from p2pavg.attached.words import SPOKEN
from p2pavg.base.errors import AccumulateError, BusyError, ConfigError, RemoteProtocolError
from p2pavg.base.limits import MAX_MBPS
from p2pavg.optim.coordination.progress import read_progress
from p2pavg.optim.coordination.view import TOPIC as PROGRESS
from p2pavg.peer.averager import DecentralizedAverager
from p2pavg.peer.peer import Peer
from p2pavg.peer.shared_states import ShareSettings
from p2pavg.runs.config import AveragingConfig
from p2pavg.state.joiner.transfers import Transfer
from p2pavg.telemetry.events import AnyEvent, Drifted, Progressed, StateMoved

if TYPE_CHECKING:
    # libp2p installs trio-typing, whose stubs mypy prefers to trio's own.
    from trio_typing import TaskStatus

MAX_TOPICS = 16
VECTORS = 4
"""Vectors in memory for a run with one process: its contribution, the result, the peer's contribution and its parts."""


class SharedRun:
    """A run that processes of this machine take part in through one peer.

    Args:
        peer: the peer.
        config: of the first process; the others need the same.
    """

    def __init__(self, peer: Peer, config: AveragingConfig) -> None:
        self.config = config
        self._peer = peer
        self._averager: DecentralizedAverager | None = None
        self._rounds: SharedRounds | None = None
        self._boards: dict[str, SharedBoard] = {}
        self._channels: dict[str, int] = {}
        self._states: SharedStates | None = None
        self._sharing = trio.Lock()
        self._updates = Updates()
        self._nursery: trio.Nursery | None = None
        self._scope = trio.CancelScope()
        self.ended = trio.Event()
        """Set when the run's averager is closed."""

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Average for the processes, until :meth:`close` is called."""
        try:
            with self._scope:
                async with self._peer.averager(self.config) as averager, trio.open_nursery() as nursery:
                    self._averager, self._nursery = averager, nursery
                    self._rounds = SharedRounds(
                        averager,
                        self.config,
                        self._peer.context.run_in_thread,
                        self._peer.context.wall_clock,
                    )
                    task_status.started()
                    await self._rounds.run()
        finally:
            if self._rounds is not None and self._rounds.result is not None:
                self._rounds.result.close()
            self.ended.set()

    @property
    def has_begun(self) -> bool:
        """True once the run's averager was opened."""
        return self._rounds is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the processes that take part."""
        return tuple(self._channels)

    @property
    def is_empty(self) -> bool:
        """True if no process takes part any more."""
        return not self._channels

    @property
    def is_exchanging(self) -> bool:
        """True while a round runs that has its group, or needs none."""
        return self._rounds is not None and self._rounds.is_exchanging

    async def finish(self) -> None:
        """Begin no further round, and wait until the one that runs has ended."""
        if self._rounds is not None:
            await self._rounds.finish()

    def close(self) -> None:
        """End :meth:`run`."""
        self._scope.cancel()

    def join(self, guest: Guest, channel: int, config: AveragingConfig) -> None:
        """Let a process take part.

        Raises:
            ConfigError: its configuration differs from the other processes'; the message names the setting.
            BusyError: it has an averager of this run already.
        """
        found = difference(self.config, config)
        if found:
            raise ConfigError(found)
        if guest.name in self._channels:
            raise BusyError(f"this process has an averager of the run {self.config.run_id!r} already")
        self._channels[guest.name] = channel

    def leave(self, name: str) -> None:
        """Forget a process, its entries, and its request for a round."""
        for board in self._boards.values():
            board.leave(name)
        if self._states is not None:
            self._states.leave(name)
        if self._rounds is not None:
            self._rounds.leave(name)
        self._channels.pop(name, None)

    def declare(self, guest: Guest, schema: Schema) -> None:
        """Note a process's tensors, and send it the shared memory.

        Raises:
            AccumulateError: the other processes average other tensors.
            ConfigError: this machine has too little memory for them.
        """
        rounds = self._rounds
        assert rounds is not None
        if rounds.schema is not None and rounds.schema != schema:
            raise AccumulateError(
                "the processes that share this peer average other tensors: "
                f"{len(rounds.schema.shapes)} of {rounds.schema.elements} elements, this one"
                f" {len(schema.shapes)} of {schema.elements}, or other names, shapes or dtypes"
            )
        if guest.name in rounds.seats:
            raise RemoteProtocolError("tensors that were described twice")
        needed, there = VECTORS * 4 * schema.elements, psutil.virtual_memory().total
        if needed > there:
            raise ConfigError(
                f"a vector of {schema.elements} elements needs {needed / 1e9:.1f} GB at the peer, and this machine has"
                f" {there / 1e9:.1f} GB"
            )
        rounds.schema = schema
        if rounds.result is None:
            rounds.result = ResultWriter(schema.elements)
        segment = ContributionSegment(schema.elements)
        channel = self._channels[guest.name]
        rounds.sit(Seat(guest, channel, segment))
        guest.send("declared", channel, descriptors=(segment.descriptor, rounds.result.descriptor))

    async def open_board(self, guest: Guest, topic: str, look_seconds: float) -> None:
        """Show a process the entries of a topic from now on."""
        check_topic(topic, look_seconds)
        assert self._averager is not None
        if topic not in self._boards:
            if len(self._boards) >= MAX_TOPICS:
                raise RemoteProtocolError("too many boards")
            board = await self._averager.board(topic, look_seconds)
            if topic not in self._boards:  # else another process has opened it meanwhile
                self._boards[topic] = SharedBoard(
                    self._averager.peer_id, topic, board, self._channels.__getitem__, self._said
                )
        self._boards[topic].join(guest)

    def _said(self, topic: str, joint: bytes) -> None:
        """Tell the subscribers of the peer's averager how far its processes are."""
        if topic != PROGRESS or not joint:
            return
        progress = read_progress(joint)
        self._emit(
            Progressed(
                time=self._peer.context.wall_clock(),
                run_id=self.config.run_id,
                epoch=progress.epoch,
                lineage=progress.state,
                samples=progress.samples,
                samples_per_second=progress.samples_per_second,
                waiting=progress.waiting,
                follows=progress.follows,
            )
        )

    # ------------------------------------------------------------------ states and events

    async def share(self, guest: Guest, log_bytes: int, upload_mbps: float, download_mbps: float) -> None:
        """Let a process share the run's states. The limits are those of the first process.

        Args:
            log_bytes: memory of the averages.
            upload_mbps: Mbit/s that the peer sends of states; 0 is without limit.
            download_mbps: Mbit/s that the peer receives of states; 0 is without limit.
        """
        rounds = self.rounds_of(guest)
        if not 0 < log_bytes < 2**50 or not all(
            0 <= mbps <= MAX_MBPS for mbps in (upload_mbps, download_mbps)
        ):
            raise RemoteProtocolError("states with limits out of range")
        async with self._sharing:
            if self._states is None:
                assert self._averager is not None
                assert rounds.schema is not None
                self._averager.accumulate_vector(rounds.schema, torch.empty(0), weight=0.0, metrics={})
                settings = ShareSettings(
                    log_bytes=log_bytes,
                    upload_mbps=upload_mbps or None,
                    download_mbps=download_mbps or None,
                )
                await self._open_states(settings)
        assert self._states is not None
        self._states.leave(guest.name)  # of an earlier optimizer
        if guest.name in self._channels:
            self._states.join(guest, self._channels[guest.name])

    async def _open_states(self, settings: ShareSettings) -> None:
        assert self._averager is not None
        assert self._nursery is not None
        assert self._rounds is not None
        states = self._states = SharedStates(
            await self._averager.share_states(settings),
            self._averager.peer_id,
            log_bytes=settings.log_bytes,
            run_in_thread=self._peer.context.run_in_thread,
            nursery=self._nursery,
            moved=self._moved,
        )
        self._rounds.states = states
        self._nursery.start_soon(states.run)

    def states_of(self, guest: Guest) -> SharedStates:
        """Return the states; raise RemoteProtocolError if no process shares them."""
        if self._states is None or guest.name not in self._channels:
            raise RemoteProtocolError("a state of a run whose states are not shared")
        return self._states

    def _moved(self, transfer: Transfer) -> None:
        """Tell the subscribers of the peer's averager of a transfer for one of its processes."""
        progress = transfer.latest
        assert progress is not None
        self._emit(
            StateMoved(
                time=self._peer.context.wall_clock(),
                run_id=self.config.run_id,
                direction="download",
                done=progress.done,
                total=progress.total,
                bytes_per_second=progress.rate,
                peers=len(progress.rates),
            )
        )

    def updated(self, fields: tuple[object, ...]) -> None:
        """Tell the subscribers of the peer's averager of an update, when the first process has taken it."""
        now = self._peer.context.wall_clock()
        update = read_update(fields, time=now, run_id=self.config.run_id, peer_id=self._peer.id)
        if self._updates.is_new(update):
            self._emit(update)

    def drifted(self, sentence: str) -> None:
        """Tell the subscribers of the peer's averager that parameters differ from other peers', or do so no more."""
        now = self._peer.context.wall_clock()
        self._emit(Drifted(time=now, run_id=self.config.run_id, sentence=sentence))

    def _emit(self, event: AnyEvent) -> None:
        assert self._averager is not None
        self._averager.events.emit(event)

    # ------------------------------------------------------------------ boards and rounds

    def board(self, topic: str) -> SharedBoard:
        """Return the board of a topic, for a word; raise RemoteProtocolError if it is closed, or for the peer alone."""
        if topic not in self._boards or topic not in SPOKEN:
            raise RemoteProtocolError("a word on a board that is closed, or for the peer alone")
        return self._boards[topic]

    def rounds_of(self, guest: Guest) -> SharedRounds:
        """Return the rounds; raise RemoteProtocolError if the process has not described its tensors."""
        if self._rounds is None or guest.name not in self._rounds.seats:
            raise RemoteProtocolError("a round of tensors that were not described")
        return self._rounds
