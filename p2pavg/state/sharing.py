"""The states of one run, as one averager offers them to other peers and fetches them.

The object is made in trio's thread. The training loop calls its methods from another thread, where they never wait for
the network: a transfer runs in trio's thread, and the loop looks at it from time to time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import trio

from p2pavg.allreduce.averages import EncodedAverage
from p2pavg.errors import RemoteProtocolError, StateError
from p2pavg.net.transport import PeerId
from p2pavg.records.board import Board
from p2pavg.state.average import (
    MAX_MANIFEST_BYTES,
    Expected,
    LoggedAverage,
    ProvenAverage,
    decode,
    read_manifest,
)
from p2pavg.state.blobs import BlobKind
from p2pavg.state.choice import voters
from p2pavg.state.fetching import Fetch, Progress, Wanted
from p2pavg.state.manifest import Manifest
from p2pavg.state.news import MAX_ADDRESSES, SnapshotOffer, StateNews, encode_news, read_all
from p2pavg.state.progress import StateProgress, amount, span
from p2pavg.state.sessions import Sessions
from p2pavg.state.shelf import HeldSnapshot, Shelf
from p2pavg.state.sink import FileSink, MemorySink, Sink
from p2pavg.state.tree import CHUNK_BYTES, chunk_count, chunk_digests, root_of
from p2pavg.threads.workers import in_own_thread
from p2pavg_dht.contact import MAX_ADDRESS_LENGTH

logger = logging.getLogger(__name__)

MAX_LOGGED = 4
"""Averages of this peer's own rounds that wait to be taken by its optimizer."""
DOWNLOAD_NAME = "download"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRun:
    """A run, as states need to know it.

    Args:
        peer_id: this peer.
        addresses: returns the addresses at which other peers can dial this one.
        elements: length of the vector.
        unflatten: turns a vector into the tensors that the averager averages.
        members_only: true if the run has an authority.
        bootstrap: the peers through which this one joined the network.
        expected: returns the average of a group that this peer can check, by its group id.
    """

    peer_id: PeerId
    addresses: Callable[[], Sequence[str]]
    elements: int
    unflatten: Callable[[torch.Tensor], list[torch.Tensor]]
    members_only: bool
    bootstrap: frozenset[str]
    expected: Callable[[bytes], Expected]


class Transfer:
    """A blob on its way to this peer. Calls may come from any thread, :meth:`run` belongs to trio."""

    def __init__(self, fetch: Callable[[Transfer], Fetch], token: trio.lowlevel.TrioToken) -> None:
        self._make = fetch
        self._token = token
        self._scope = trio.CancelScope()
        self._fetch: Fetch | None = None
        self._donors: Mapping[PeerId, Sequence[str]] = {}
        self._ended = threading.Event()
        self._progress: Progress | None = None
        self.sink: Sink | None = None
        self.failure = ""
        """Reason for which it failed; empty before the end, and if it succeeded."""

    @property
    def ended(self) -> bool:
        """True if it has succeeded or failed."""
        return self._ended.is_set()

    @property
    def stands_still(self) -> bool:
        """True while no donor is used: each has refused, or cannot be reached."""
        return self._progress is not None and not self._progress.rates

    def wait(self, timeout: float) -> None:
        """Block until it has ended, for at most ``timeout`` seconds."""
        self._ended.wait(timeout)

    def set_donors(self, donors: Mapping[PeerId, Sequence[str]]) -> None:
        """Replace the donors: addresses by peer id."""
        if donors != self._donors:
            self._donors = donors
            self._soon(self._tell_donors)

    def cancel(self) -> None:
        """Stop it."""
        self._soon(self._scope.cancel)

    def _soon(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(
            trio.RunFinishedError
        ):  # the averager is closed; its next call raises ClosedError
            self._token.run_sync_soon(function)

    def _tell_donors(self) -> None:
        if self._fetch is not None:
            self._fetch.set_donors(self._donors)

    def note(self, progress: Progress) -> None:
        """Take the progress of the transfer; called in trio's thread."""
        self._progress = progress

    def progress(self, about: StateProgress) -> StateProgress:
        """Return a progress with the numbers of this transfer."""
        found = self._progress
        if found is None:
            return about
        rate, left = found.rate, found.seconds_left
        told = f"{amount(found.done)} of {amount(found.total)}"
        donors = sum(each > 0 for each in found.rates.values())
        if rate > 0 and math.isfinite(left):
            told += f", {amount(rate)}/s from {donors} peer{'s' if donors != 1 else ''}, {span(left)} left"
        return replace(
            about,
            reason=f"{about.reason}: {told}",
            bytes_done=found.done,
            bytes_total=found.total,
            bytes_per_second=rate,
            seconds_left=left if math.isfinite(left) else None,
            donors=donors,
        )

    def abandon(self) -> None:
        """Note that it cannot run any more."""
        self.failure = "the averager is closed"
        self._ended.set()

    async def run(self) -> None:
        """Fetch the blob."""
        self.failure = "the transfer was stopped"
        try:
            with self._scope:
                self._fetch = self._make(self)
                self._fetch.set_donors(self._donors)
                self.sink = await self._fetch.run()
                self.failure = ""
        except StateError as error:
            self.failure = str(error)
        finally:
            self._fetch = None
            self._ended.set()


class SnapshotTransfer(Transfer):
    """A snapshot on its way."""

    offer: SnapshotOffer

    @contextlib.contextmanager
    def data(self) -> Iterator[memoryview]:
        """Lend the bytes of the snapshot, which has succeeded. The memory, or the file, goes with the block."""
        assert self.sink is not None
        sink, self.sink = self.sink, None
        try:
            yield sink.take()
        finally:
            sink.close()
            if isinstance(sink, FileSink):
                sink.remove()


class AverageTransfer(Transfer):
    """An average of the log on its way."""

    group_id: bytes
    _proof: ProvenAverage | None = None
    _run: SharedRun
    _codec_of: Expected

    @property
    def proof(self) -> ProvenAverage | None:
        """The certificate's content, as soon as it is here and checked."""
        return self._proof

    def proven(self) -> ProvenAverage:
        """Return the certificate's content, after the transfer has succeeded."""
        assert self._proof is not None
        return self._proof

    def _parts(self) -> tuple[memoryview, ...]:
        assert self.sink is not None
        data, at, parts = self.sink.take(), 0, []
        for size in self.proven().sizes:
            parts.append(data[at : at + size])
            at += size
        return tuple(parts)

    def decode(self) -> list[torch.Tensor]:
        """Return the averaged tensors.

        Raises:
            RemoteProtocolError: the bytes do not decode.
        """
        vector = torch.empty(self._run.elements)
        decode(self.proven(), self._parts(), self._codec_of.codec, vector)
        return self._run.unflatten(vector)

    def logged(self) -> LoggedAverage:
        """Return it as an entry of this peer's own log."""
        proof = self.proven()
        return LoggedAverage(
            proof.state,
            proof.group_id,
            proof.certificate,
            EncodedAverage(self._parts(), proof.digests),
        )


class StateSharing:
    """The states of one run at one peer.

    Args:
        run: the run.
        board: the run's board of states.
        shelf: what this peer offers.
        sessions: this peer's sessions with donors.
        directory: folder for a download that survives this process; ``None``: downloads are kept in memory.
        nursery: lives as long as the averager.
    """

    def __init__(
        self,
        run: SharedRun,
        board: Board,
        shelf: Shelf,
        sessions: Sessions,
        directory: Path | None,
        nursery: trio.Nursery,
    ) -> None:
        self.shelf = shelf
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
        self.average_bytes = run.expected(bytes(32)).codec.encoded_nbytes(run.elements)
        """Bytes of one average on the wire."""

    # ------------------------------------------------------------------ records

    @property
    def version(self) -> int:
        """A number that grows whenever another peer's record changes."""
        return self._board.version

    def news(self) -> dict[str, StateNews]:
        """Return the records of the other peers."""
        return read_all({peer_id: said.value for peer_id, said in self._board.entries.items()})

    def deciding(self, news: Mapping[str, StateNews], companions: Collection[str]) -> frozenset[str]:
        """Return the peers whose offers decide; see :func:`~p2pavg.state.choice.voters`."""
        return voters(
            news,
            members_only=self._run.members_only,
            companions=companions,
            bootstrap=self._run.bootstrap,
        )

    def addresses_of(
        self, news: Mapping[str, StateNews], donors: Iterable[str]
    ) -> dict[PeerId, tuple[str, ...]]:
        """Return the addresses of donors."""
        return {peer_id: news[peer_id].addresses for peer_id in donors}

    def say(self, *, wants: bool, epoch: int) -> None:
        """Publish this peer's record.

        Args:
            wants: true if it asks for a snapshot.
            epoch: update of its parameters.
        """
        snapshot, log = self.shelf.snapshot, self.shelf.log if self.shelf.epoch == epoch else ()
        usable = (text for text in self._run.addresses() if len(text) <= MAX_ADDRESS_LENGTH)
        offer = None if snapshot is None or snapshot.offer.epoch > epoch else snapshot.offer
        said = StateNews(
            wants=wants,
            epoch=epoch,
            snapshot=offer,
            log=log,
            addresses=tuple(usable)[:MAX_ADDRESSES],
        )
        if said != self._said:
            self._said = said
            self._board.publish(encode_news(said))

    # ------------------------------------------------------------------ this peer's own states

    def committed(self, average: LoggedAverage) -> None:
        """Keep the average of one of this peer's rounds until the optimizer takes it; called in trio's thread."""
        self._logged[average.group_id] = average
        while len(self._logged) > MAX_LOGGED:
            self._logged.popitem(last=False)

    def took(self, group_id: bytes, epoch: int) -> None:
        """Note that the optimizer has taken an update by the average of one of this peer's rounds."""
        average = self._logged.pop(group_id, None)
        if average is None:  # it committed nothing that could be passed on
            self.shelf.begin(epoch)
        else:
            self.shelf.took(average, epoch)

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
            digests = chunk_digests(data)
            offer = SnapshotOffer(epoch=epoch, state=state, root=root_of(digests, len(data)), size=len(data))
            self.shelf.put(HeldSnapshot(offer, data, digests))

        self.in_background(prepare)

    def in_background(self, work: Callable[[], None]) -> None:
        """Run a function in a thread of its own, one at a time; the averager's end waits for it."""
        self._working.set()
        self._soon(self._work, work, otherwise=self._working.clear)

    async def _work(self, work: Callable[[], None]) -> None:
        try:
            with trio.CancelScope(
                shield=True
            ):  # a checkpoint that was begun is written, also if the averager closes
                await in_own_thread(work, stop=lambda: None, name="p2pavg-state")
        finally:
            self._working.clear()

    # ------------------------------------------------------------------ states of others

    def fetch_snapshot(self, offer: SnapshotOffer) -> SnapshotTransfer:
        """Begin to fetch a snapshot."""
        count = chunk_count(offer.size)

        def read(data: bytes) -> Manifest:
            digests = [data[start : start + 32] for start in range(0, len(data), 32)]
            if len(data) != 32 * count or root_of(digests, offer.size) != offer.root:
                raise RemoteProtocolError("the digests of another snapshot than it offers")
            last = offer.size - CHUNK_BYTES * (count - 1)
            return Manifest(sizes=[CHUNK_BYTES] * (count - 1) + [last], digests=digests)

        def make(manifest: Manifest) -> Sink:
            if self._directory is None:
                return MemorySink(manifest.sizes)
            return FileSink(self._directory / DOWNLOAD_NAME, manifest.sizes, manifest.digests)

        wanted = Wanted(BlobKind.SNAPSHOT, offer.root, 32 * count, read)
        transfer = SnapshotTransfer(
            lambda it: Fetch(self._sessions, wanted, make, on_progress=it.note), self._token
        )
        transfer.offer = offer
        self._start(transfer)
        return transfer

    def fetch_average(self, group_id: bytes) -> AverageTransfer:
        """Begin to fetch an average of the log."""
        expected = self._run.expected(group_id)

        def read(data: bytes) -> Manifest:
            proof = read_manifest(data, expected)
            transfer._proof = proof
            return Manifest(sizes=proof.sizes, digests=proof.digests)

        wanted = Wanted(BlobKind.AVERAGE, group_id, MAX_MANIFEST_BYTES, read)
        transfer = AverageTransfer(
            lambda it: Fetch(
                self._sessions, wanted, lambda manifest: MemorySink(manifest.sizes), on_progress=it.note
            ),
            self._token,
        )
        transfer.group_id, transfer._run, transfer._codec_of = group_id, self._run, expected
        self._start(transfer)
        return transfer

    def _start(self, transfer: Transfer) -> None:
        self._soon(transfer.run, otherwise=transfer.abandon)

    def end(self) -> None:
        """End for another one, which takes its place; called in trio's thread."""
        self.close()
        self.ended.set()

    def close(self) -> None:
        """Begin no more work; called in trio's thread."""
        self._closed = True

    def _soon(
        self, work: Callable[..., Awaitable[None]], *args: object, otherwise: Callable[[], None]
    ) -> None:
        """Start a task in trio's thread, from any thread; call ``otherwise`` if the averager has closed."""

        def start() -> None:
            if self._closed:
                otherwise()
            else:
                self._nursery.start_soon(work, *args)

        try:
            self._token.run_sync_soon(start)
        except trio.RunFinishedError:
            otherwise()

    def look(self) -> None:
        """Look for new records now, without waiting for the next regular look."""
        self._board.look()

    def wait(self, version: int, timeout: float) -> None:
        """Block until :attr:`version` is above ``version``, for at most ``timeout`` seconds.

        Raises:
            ClosedError: the averager is closed.
        """
        self._board.wait(version, timeout)


def now() -> float:
    """Return the time that :attr:`Shelf.read_at` counts in."""
    return time.monotonic()
