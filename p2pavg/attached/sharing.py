"""States of a run, as an attached process offers and fetches them through its peer. Safe to use from any thread.

The objects here are those that :mod:`p2pavg.optim` uses at a peer of its own, with the peer's answers in place of the
network: :class:`~p2pavg.state.sharing.StateSharing` and its transfers.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from p2pavg.attached.blobs import ReceivedFile, sealed_file, vector_of
from p2pavg.attached.link import Link
from p2pavg.attached.messages import process_id
from p2pavg.attached.results import read_success
from p2pavg.attached.standing import Shelved
from p2pavg.attached.topic import AttachedTopic
from p2pavg.base.encoding import checked
from p2pavg.base.errors import ConfigError, RemoteProtocolError, StateError
from p2pavg.base.result import Success
from p2pavg.net.transport import PeerId
from p2pavg.state.choice import voters
from p2pavg.state.donor.shelf import HeldSnapshot, Shelf
from p2pavg.state.joiner.fetching import Progress
from p2pavg.state.joiner.transfers import AverageTransfer, SnapshotTransfer, Transfer
from p2pavg.state.news import SnapshotOffer, StateNews, read_all
from p2pavg.state.sharing import StateSharing

logger = logging.getLogger(__name__)

Send = Callable[..., None]
"""Sends a message about this averager, with the descriptors of files; the kind comes first."""


class AttachedTransfer(Transfer):
    """A blob on its way through the peer. The peer runs it."""

    def __init__(self, number: int, send: Send) -> None:
        self._number = number
        self._send = send
        self._donors: Mapping[PeerId, Sequence[str]] = {}
        self._ended = threading.Event()
        self._progress: Progress | None = None
        self.sink = None
        self.failure = ""

    def set_donors(self, donors: Mapping[PeerId, Sequence[str]]) -> None:
        """See :class:`~p2pavg.state.joiner.transfers.Transfer`. The peer looks at what it holds itself first."""
        others = {peer_id: tuple(found) for peer_id, found in donors.items() if "/" not in peer_id}
        if others != self._donors:
            self._donors = others
            self._send("donors", self._number, tuple(others.items()))

    def cancel(self) -> None:
        """See :class:`~p2pavg.state.joiner.transfers.Transfer`."""
        self.fail("the transfer was stopped")
        self.forget()

    def forget(self) -> None:
        """Tell the peer that this process has what it wanted, or wants it no more."""
        self._send("drop", self._number)

    # ------------------------------------------------------------------ events of the connection

    def ask(self) -> None:
        """Ask the peer for it."""
        raise NotImplementedError

    def take(self, state: bytes, description: bytes, sink: ReceivedFile) -> None:  # noqa: ARG002
        """Take the complete blob."""
        self.sink = sink
        self._ended.set()

    def fail(self, reason: str) -> None:
        """Note that it does not come."""
        if not self.ended:
            self.failure = reason
            self._ended.set()


class AttachedSnapshot(AttachedTransfer, SnapshotTransfer):
    """A snapshot on its way."""

    def __init__(self, number: int, send: Send, offer: SnapshotOffer) -> None:
        super().__init__(number, send)
        self.offer = offer

    def ask(self) -> None:
        """See :class:`AttachedTransfer`."""
        offer = self.offer
        self._send("fetch_snapshot", self._number, offer.epoch, offer.state, offer.root, offer.size)


class AttachedAverage(AttachedTransfer, AverageTransfer):
    """An average on its way.

    Args:
        unflatten: turns a vector into the tensors of this process's averager.
    """

    def __init__(
        self,
        number: int,
        send: Send,
        group_id: bytes,
        unflatten: Callable[[torch.Tensor], list[torch.Tensor]],
    ) -> None:
        super().__init__(number, send)
        self.group_id = group_id
        self._unflatten = unflatten
        self._before: bytes | None = None
        self._description = b""

    def ask(self) -> None:
        """See :class:`AttachedTransfer`."""
        self._send("fetch_average", self._number, self.group_id)

    def take(self, state: bytes, description: bytes, sink: ReceivedFile) -> None:
        """See :class:`AttachedTransfer`."""
        self._before, self._description = state, description
        super().take(state, description, sink)

    @property
    def before(self) -> bytes | None:
        """See :class:`~p2pavg.state.joiner.transfers.AverageTransfer`."""
        return self._before

    def decode(self) -> list[torch.Tensor]:
        """See :class:`~p2pavg.state.joiner.transfers.AverageTransfer`."""
        assert self.sink is not None
        return self._unflatten(vector_of(self.sink.take()))

    def success(self, averaged: list[torch.Tensor]) -> Success:
        """See :class:`~p2pavg.state.joiner.transfers.AverageTransfer`."""
        return read_success(self._description, averaged)


class AttachedShelf(Shelf):
    """The peer's snapshot and log, as far as this process has to know them."""

    def __init__(self, send: Send) -> None:
        super().__init__(0)
        self._tell = send
        self._shelved = Shelved()
        self._read_at = -math.inf
        self.loaded = b""
        """Root of the snapshot that this process has just loaded; empty if it was none."""

    @property
    def snapshot(self) -> HeldSnapshot | None:
        """The peer's snapshot, if there is one; its data are not here."""
        epoch = self._shelved.snapshot_epoch
        if epoch < 0:
            return None
        offer = SnapshotOffer(epoch=epoch, state=bytes(32), root=bytes(32), size=1)
        return HeldSnapshot(offer, memoryview(b""), ())

    @property
    def log_first(self) -> int:
        """See :class:`~p2pavg.state.donor.shelf.Shelf`."""
        return self._shelved.log_first

    def set_log_bytes(self, log_bytes: int) -> None:
        """See :class:`~p2pavg.state.donor.shelf.Shelf`."""
        self._tell("log_bytes", log_bytes)

    def log_full(self, since: int) -> float:  # noqa: ARG002 - the peer knows its snapshot
        """See :class:`~p2pavg.state.donor.shelf.Shelf`."""
        return self._shelved.log_full

    def put(self, snapshot: HeldSnapshot | None, *, keeps_former: bool = False) -> None:  # noqa: ARG002
        """Tell the peer that its snapshot is not wanted; a new one takes its place by itself.

        Raises:
            ConfigError: a snapshot was given: the peer holds one for all of its processes, which optimizers offer.
        """
        if snapshot is not None:
            raise ConfigError(
                "an attached process cannot offer a snapshot of its own, as members of a population do",
                remedy="give this process a peer of its own with p2pavg.blocking.open_averager",
            )
        if self.snapshot is not None:
            self._tell("unwanted")

    def begin(self, epoch: int) -> None:
        """See :class:`~p2pavg.state.donor.shelf.Shelf`."""
        root, self.loaded = self.loaded, b""
        self._tell("begin", epoch, root)

    def take(self, shelved: Shelved) -> bool:
        """Note what the peer has told; return whether this process takes the snapshots."""
        self._shelved = shelved
        self._read_at = time.monotonic() - shelved.idle_seconds
        return shelved.gives


class AttachedSharing(StateSharing):
    """The states of one run, as one attached process offers and fetches them.

    Args:
        link: the connection.
        topic: the board of states.
        send: sends a message about this averager.
        unflatten: turns a vector into the tensors of this process's averager.
        settings: the limits: bytes of the log, Mbit/s up and down, 0 for none.
    """

    belongs_to_several = True

    def __init__(
        self,
        link: Link,
        topic: AttachedTopic,
        send: Send,
        unflatten: Callable[[torch.Tensor], list[torch.Tensor]],
        settings: tuple[int, float, float],
    ) -> None:
        self._link = link
        self._topic = topic
        self._send = send
        self._unflatten = unflatten
        self._settings = settings
        self.shelf: AttachedShelf = AttachedShelf(send)
        self.average_bytes = 0
        self.is_shared = False
        """True while the peer shares this process's states."""
        self._gives = False
        self._members_only = True
        self._bootstrap: frozenset[str] = frozenset()
        self._transfers: dict[int, AttachedTransfer] = {}
        self._numbers = 0
        self._stand: tuple[bool, int] | None = None
        self._working = threading.Event()
        self._worker: threading.Thread | None = None

    # ------------------------------------------------------------------ records

    @property
    def members_only(self) -> bool:
        """See :class:`~p2pavg.state.sharing.StateSharing`."""
        return self._members_only

    @property
    def bootstrap(self) -> frozenset[str]:
        """See :class:`~p2pavg.state.sharing.StateSharing`."""
        return self._bootstrap

    @property
    def gives_snapshots(self) -> bool:
        """True if this process, of those that share the peer, takes the snapshots."""
        return self._gives

    @property
    def version(self) -> int:
        """See :class:`~p2pavg.state.sharing.StateSharing`."""
        return self._topic.version

    def news(self) -> dict[str, StateNews]:
        """Return the records of the other processes of this peer, and of other peers."""
        return read_all({peer_id: said.value for peer_id, said in self._topic.entries.items()})

    def deciding(self, news: Mapping[str, StateNews], companions: Collection[str]) -> frozenset[str]:
        """See :class:`~p2pavg.state.sharing.StateSharing`. A newcomer trusts the other processes of its peer."""
        prefix = process_id(self._link.peer_id, "")
        ours = frozenset(peer_id for peer_id in news if peer_id.startswith(prefix))
        return voters(
            news,
            members_only=self._members_only,
            companions=companions,
            bootstrap=self._bootstrap | ours,
        )

    def addresses_of(
        self, news: Mapping[str, StateNews], donors: Iterable[str]
    ) -> dict[PeerId, tuple[str, ...]]:
        """See :class:`~p2pavg.state.sharing.StateSharing`."""
        return {peer_id: news[peer_id].addresses for peer_id in donors}

    def say(self, *, wants: bool, epoch: int) -> None:
        """See :class:`~p2pavg.state.sharing.StateSharing`."""
        if self._stand != (wants, epoch):
            self._stand = (wants, epoch)
            self._send("stand", wants, epoch)

    def look(self) -> None:
        """See :class:`~p2pavg.state.sharing.StateSharing`."""
        self._send("look")

    def wait(self, version: int, timeout: float) -> None:
        """See :class:`~p2pavg.state.sharing.StateSharing`."""
        self._topic.wait(version, timeout)

    # ------------------------------------------------------------------ this process's own states

    def took(self, group_id: bytes, epoch: int) -> None:
        """See :class:`~p2pavg.state.sharing.StateSharing`."""
        self._send("took", group_id, epoch)

    def replayed(self, transfer: AverageTransfer, epoch: int) -> None:
        """See :class:`~p2pavg.state.sharing.StateSharing`."""
        self.took(transfer.group_id, epoch)
        assert isinstance(transfer, AttachedAverage)
        self._finished(transfer)

    def offer(self, data: memoryview, epoch: int, state: bytes) -> None:
        """See :class:`~p2pavg.state.sharing.StateSharing`. The peer computes the root, and holds the snapshot."""

        def hand_over() -> None:
            try:
                descriptor = sealed_file(data)
            except StateError as error:
                logger.error("this process offers no state: %s", error)  # noqa: TRY400 - one line is enough
                return
            try:
                self._send("offer", epoch, state, len(data), descriptors=(descriptor,))
            finally:
                os.close(descriptor)

        self.in_background(hand_over)

    def in_background(self, work: Callable[[], None]) -> None:
        """See :class:`~p2pavg.state.sharing.StateSharing`."""
        self._working.set()

        def run() -> None:
            try:
                work()
            except Exception:
                logger.exception("an exception while a state was written")
            finally:
                self._working.clear()

        self._worker = threading.Thread(target=run, name="p2pavg-state")
        self._worker.start()

    # ------------------------------------------------------------------ states of others

    def fetch_snapshot(self, offer: SnapshotOffer) -> SnapshotTransfer:
        """See :class:`~p2pavg.state.sharing.StateSharing`."""
        transfer = AttachedSnapshot(self._next(), self._send, offer)
        self.shelf.loaded = offer.root
        self._begin(transfer)
        return transfer

    def fetch_average(self, group_id: bytes) -> AverageTransfer:
        """See :class:`~p2pavg.state.sharing.StateSharing`."""
        transfer = AttachedAverage(self._next(), self._send, group_id, self._unflatten)
        self._begin(transfer)
        return transfer

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    def _begin(self, transfer: AttachedTransfer) -> None:
        with self._link.changed:
            for number, other in list(self._transfers.items()):
                if other.ended and other.failure:
                    del self._transfers[number]
            if self.is_shared:
                self._transfers[transfer._number] = transfer
                transfer.ask()
            else:
                transfer.fail(self._link.why_down)

    def _finished(self, transfer: AttachedTransfer) -> None:
        with self._link.changed:
            self._transfers.pop(transfer._number, None)
        transfer.forget()

    def close(self) -> None:
        """Wait until what :meth:`in_background` does has ended; a checkpoint that was begun is written."""
        with self._link.changed:
            self._fail_all("the averager is closed")
        worker = self._worker
        if worker is not None:
            worker.join()

    # ------------------------------------------------------------------ events of the connection, `changed` held

    def attached(self) -> None:
        """Share the states at the peer, which may have been started again."""
        self._send("share", *self._settings)
        if self._stand is not None:
            wants, epoch = self._stand
            self._send("stand", wants, epoch)
            self._send("begin", epoch, b"")

    def lost(self, reason: str) -> None:
        """End all transfers: the peer is gone."""
        self.is_shared, self._gives = False, False
        self.shelf.take(Shelved())
        self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        for transfer in self._transfers.values():
            transfer.fail(reason)
        self._transfers.clear()

    def take(self, kind: str, fields: tuple[Any, ...], descriptor: Callable[[], int]) -> None:
        """Take a message of the peer about states.

        Raises:
            RemoteProtocolError: it is out of range.
        """
        if kind == "shared":
            self.average_bytes, self._members_only = fields[:2]
            self._bootstrap = frozenset(checked(fields[2], (str,) * len(fields[2])))
            self.is_shared = True
        elif kind == "shelf":
            self._gives = self.shelf.take(Shelved(*fields))
        elif kind == "moved":
            self._note(*fields)
        elif kind == "fetched":
            number, state, description, size = fields
            self._take_fetched(number, state, description, ReceivedFile(descriptor(), size))
        elif (transfer := self._transfers.pop(fields[0], None)) is not None:  # not_fetched
            transfer.fail(fields[1])

    def _note(self, number: int, done: int, total: int, rate: float, left: float, donors: int) -> None:
        if (transfer := self._transfers.get(number)) is None:
            return
        if not 0 <= donors <= 1024:
            raise RemoteProtocolError("a transfer from that many donors")
        each = dict.fromkeys(map(str, range(donors)), rate / max(donors, 1))
        transfer.note(Progress(done, total, rate, math.inf if left < 0 else left, each, 0))

    def _take_fetched(self, number: int, state: bytes, description: bytes, sink: ReceivedFile) -> None:
        transfer = self._transfers.get(number)
        if transfer is None or transfer.ended:
            return
        transfer.take(state, description, sink)
        if isinstance(transfer, AttachedSnapshot):
            del self._transfers[number]


STATE_KINDS = frozenset(("shared", "shelf", "moved", "fetched", "not_fetched"))
"""The messages of a peer about states."""
