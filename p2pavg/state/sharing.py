"""The states of one run, as one averager offers them to other peers and fetches them.

The object is made in trio's thread. The training loop calls its methods from another thread, where they never wait for
the network: a transfer runs in trio's thread, and the loop looks at it from time to time.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import trio

from p2pavg.base.messages import decoded_all
from p2pavg.base.threads.workers import in_own_thread
from p2pavg.net.transport import PeerId
from p2pavg.runs.records.board import Board
from p2pavg.state.average import LoggedAverage
from p2pavg.state.choice import MAX_ADDRESSES, SnapshotOffer, StateNews, voters
from p2pavg.state.donor.shelf import HeldSnapshot, Shelf
from p2pavg.state.history.recording import HistoryRecorder
from p2pavg.state.joiner.sessions import Sessions
from p2pavg.state.joiner.transfers import AverageTransfer, SharedRun, SnapshotTransfer, Transfer
from p2pavg.state.tree import chunk_digests, root_of
from p2pavg_dht.identity import MAX_ADDRESS_LENGTH

TransferT = TypeVar("TransferT", bound=Transfer)

logger = logging.getLogger(__name__)

MAX_LOGGED = 4
"""Averages of this peer's own rounds that wait to be taken by its optimizer."""


class StateSharing:
    """The states of one run at one peer.

    Args:
        run: the run.
        board: the run's board of states.
        shelf: what this peer offers.
        sessions: this peer's sessions with donors.
        directory: folder for a download that survives this process; ``None``: downloads are kept in memory.
        history: records each update; ``None``: none is recorded.
        nursery: lives as long as the averager.
    """

    def __init__(
        self,
        run: SharedRun,
        board: Board,
        shelf: Shelf,
        sessions: Sessions,
        directory: Path | None,
        history: HistoryRecorder | None,
        nursery: trio.Nursery,
    ) -> None:
        self.shelf = shelf
        self.history = history
        self._run = run
        self._board = board
        self._sessions = sessions
        self._directory = directory
        self._nursery = nursery
        self._token = trio.lowlevel.current_trio_token()
        self._logged: OrderedDict[bytes, LoggedAverage] = OrderedDict()
        self._said: StateNews | None = None
        self._working = threading.Event()
        self._closed = False
        self.ended = trio.Event()
        """Set when another user of the averager takes its place."""
        self.average_bytes = run.expected(bytes(32)).codec.averages.encoded_nbytes(run.elements)
        """Bytes of one average on the wire."""

    # ------------------------------------------------------------------ records

    @property
    def members_only(self) -> bool:
        """True if the run has an authority."""
        return self._run.members_only

    @property
    def bootstrap(self) -> frozenset[str]:
        """Ids of the peers through which this one joined the network."""
        return self._run.bootstrap

    @property
    def version(self) -> int:
        """A number that grows whenever another peer's record changes."""
        return self._board.version

    def news(self) -> dict[str, StateNews]:
        """Return the records of the other peers."""
        said = {peer_id: entry.value for peer_id, entry in self._board.entries.items()}
        return decoded_all(said, StateNews)

    def deciding(self, news: Mapping[str, StateNews], companions: Collection[str]) -> frozenset[str]:
        """Return the peers whose offers decide; see :func:`~p2pavg.state.choice.voters`."""
        return voters(
            news, members_only=self._run.members_only, companions=companions, bootstrap=self._run.bootstrap
        )

    def addresses_of(
        self, news: Mapping[str, StateNews], donors: Iterable[str]
    ) -> dict[PeerId, tuple[str, ...]]:
        """Return the addresses of donors."""
        return {peer_id: news[peer_id].addresses for peer_id in donors}

    def publish(self, *, wants: bool, epoch: int) -> None:
        """Publish this peer's record.

        Args:
            wants: true if it asks for a snapshot.
            epoch: update of its parameters.
        """
        # A log that ends at another update than this peer's would lead a joiner to other parameters.
        snapshot, log = self.shelf.snapshot, self.shelf.log if self.shelf.epoch == epoch else ()
        # Readers refuse the whole record for one address that is too long.
        usable = (text for text in self._run.addresses() if len(text) <= MAX_ADDRESS_LENGTH)
        # After this peer has loaded an earlier state, a later snapshot is of updates that it no longer has.
        offer = None if snapshot is None or snapshot.offer.epoch > epoch else snapshot.offer
        said = StateNews(
            wants=wants, epoch=epoch, snapshot=offer, log=log, addresses=tuple(usable)[:MAX_ADDRESSES]
        )
        # A publication costs calls to the peers that store it, so an unchanged record is not sent.
        if said != self._said:
            self._said = said
            self._board.publish(said.encode())

    # ------------------------------------------------------------------ this peer's own states

    def committed(self, average: LoggedAverage) -> None:
        """Keep the average of one of this peer's rounds until the optimizer takes it; called in trio's thread."""
        self._logged[average.group_id] = average
        # A round's average may never be taken, such as that of a call that was interrupted.
        while len(self._logged) > MAX_LOGGED:
            self._logged.popitem(last=False)

    def took(self, group_id: bytes, epoch: int, after: bytes, numbers: bytes) -> None:
        """Note that the optimizer has taken an update by the average of one of this peer's rounds.

        Args:
            group_id: of the round.
            epoch: updates since the run began, this one included.
            after: state of the lineage after the update.
            numbers: the hyperparameters of the update.
        """
        average = self._logged.pop(group_id, None)
        if average is None:  # it committed nothing that could be passed on
            self.shelf.begin(epoch)
        else:
            average = replace(average, numbers=numbers)
            self.shelf.took(average, epoch)
        if self.history is not None:
            self.history.took(average, epoch, after)

    @property
    def is_working(self) -> bool:
        """True while :meth:`offer` or :meth:`in_background` works."""
        return self._working.is_set()

    def offer(self, data: memoryview, epoch: int, state: bytes) -> None:
        """Compute the root of a snapshot, and offer it from then on. Returns at once.

        Args:
            data: the snapshot's bytes, which nothing changes any more.
            epoch: update of its parameters.
            state: state of their lineage.
        """

        def prepare() -> None:
            # Hashing a large state takes seconds, so it is not done in the training loop's thread.
            digests = chunk_digests(data)
            offer = SnapshotOffer(epoch=epoch, state=state, root=root_of(digests, len(data)), size=len(data))
            self.shelf.put(HeldSnapshot(offer, data, digests))

        self.in_background(prepare)

    def in_background(self, work: Callable[[], None]) -> None:
        """Run a function in a thread of its own, one at a time; the averager's end waits for it."""

        async def run() -> None:
            try:
                # A checkpoint that was begun is written, also if the averager closes.
                with trio.CancelScope(shield=True):
                    await in_own_thread(work, stop=lambda: None, name="p2pavg-state")
            finally:
                self._working.clear()

        # Here and not in the task: the caller may look at `is_working` before the task begins.
        self._working.set()
        self._soon(run, otherwise=self._working.clear)

    # ------------------------------------------------------------------ states of others

    def fetch_snapshot(self, offer: SnapshotOffer) -> SnapshotTransfer:
        """Begin to fetch a snapshot."""
        return self._started(SnapshotTransfer(offer, self._sessions, self._token, self._directory))

    def fetch_average(self, group_id: bytes) -> AverageTransfer:
        """Begin to fetch an average of the log."""
        return self._started(AverageTransfer(group_id, self._run, self._sessions, self._token))

    def replayed(self, transfer: AverageTransfer, epoch: int, after: bytes, numbers: bytes) -> None:
        """Note that the optimizer has taken an update from the log: its average is offered, too; see :meth:`took`."""
        # A joiner that follows the log becomes a donor of it: the first donors need not serve all that come later.
        average = transfer.logged(numbers)
        self.shelf.took(average, epoch)
        if self.history is not None:
            self.history.took(average, epoch, after)

    def _started(self, transfer: TransferT) -> TransferT:
        self._soon(transfer.run, otherwise=transfer.abandon)
        return transfer

    def end(self) -> None:
        """End for another one, which takes its place; called in trio's thread."""
        self.close()
        self.ended.set()

    def close(self) -> None:
        """Begin no more work; called in trio's thread."""
        self._closed = True

    def _soon(self, work: Callable[[], Awaitable[None]], *, otherwise: Callable[[], None]) -> None:
        """Start a task in trio's thread, from any thread; call ``otherwise`` if the averager has closed."""

        def start() -> None:
            # Looked at in trio's thread, where `close` sets it, so no task begins after it.
            if self._closed:
                otherwise()
            else:
                self._nursery.start_soon(work)

        try:
            self._token.run_sync_soon(start)
        except trio.RunFinishedError:
            # The event loop has ended, and the caller must not wait for a task that never runs.
            otherwise()

    def poll(self) -> None:
        """Look for new records now, without waiting for the next regular look."""
        self._board.poll()

    def wait(self, version: int, timeout: float) -> None:
        """Block until :attr:`version` is above ``version``, for at most ``timeout`` seconds.

        Raises:
            ClosedError: the averager is closed.
        """
        self._board.wait(version, timeout)
