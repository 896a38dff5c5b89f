"""Blobs on their way to this peer: snapshots, and averages of the log.

A training loop looks at a transfer from its own thread, where no call waits for the network. The transfer itself runs
in trio's thread.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import trio

from p2pavg.allreduce.averages import EncodedAverage
from p2pavg.base.errors import StateError
from p2pavg.base.result import Success
from p2pavg.net.transport import PeerId
from p2pavg.state.average import (
    MAX_MANIFEST_BYTES,
    Expected,
    LoggedAverage,
    ProvenAverage,
    decode,
    read_manifest,
)
from p2pavg.state.choice import SnapshotOffer
from p2pavg.state.joiner.fetching import BlobDownload, DownloadProgress, Wanted, chunked
from p2pavg.state.joiner.sessions import Sessions
from p2pavg.state.joiner.sink import FileSink, MemorySink, Sink
from p2pavg.state.messages import BlobManifest
from p2pavg.state.progress import StateProgress, amount, span
from p2pavg.state.tree import BlobKind

DOWNLOAD_NAME = "download"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRun:
    """A run, as states need to know it.

    Args:
        addresses: returns the addresses at which other peers can dial this one.
        elements: length of the vector.
        unflatten: turns a vector into the tensors that the averager averages.
        members_only: true if the run has an authority.
        bootstrap: the peers through which this one joined the network.
        expected: returns the average of a group that this peer can check, by its group id.
    """

    addresses: Callable[[], Sequence[str]]
    elements: int
    unflatten: Callable[[torch.Tensor], list[torch.Tensor]]
    members_only: bool
    bootstrap: frozenset[str]
    expected: Callable[[bytes], Expected]


class Transfer:
    """A blob on its way to this peer. Calls may come from any thread, :meth:`run` belongs to trio.

    Args:
        directory: folder for a download that survives this process; ``None``: it is kept in memory.
    """

    def __init__(
        self,
        sessions: Sessions,
        wanted: Wanted,
        token: trio.lowlevel.TrioToken,
        directory: Path | None = None,
    ) -> None:
        self._sessions = sessions
        self._wanted = wanted
        self._token = token
        self._directory = directory
        self._scope = trio.CancelScope()
        self._fetch: BlobDownload | None = None
        self._donors: Mapping[PeerId, Sequence[str]] = {}
        self._ended = threading.Event()
        self._progress: DownloadProgress | None = None
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
        # The training loop calls this several times a second, mostly with the same donors.
        if donors != self._donors:
            self._donors = donors

            def tell() -> None:
                # It may come before the download begins, which then reads the donors itself, or after its end.
                if self._fetch is not None:
                    self._fetch.set_donors(self._donors)

            # In trio's thread, where the download runs. If the averager is closed, its next call raises ClosedError.
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(tell)

    def cancel(self) -> None:
        """Stop it."""
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._scope.cancel)

    def _note(self, progress: DownloadProgress) -> None:
        self._progress = progress

    def _room(self, manifest: BlobManifest) -> Sink:
        if self._directory is None:
            return MemorySink(manifest.sizes)
        return FileSink(self._directory / DOWNLOAD_NAME, manifest.sizes, manifest.digests)

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
        # Set first: a cancellation leaves it as it is.
        self.failure = "the transfer was stopped"
        try:
            with self._scope:
                self._fetch = BlobDownload(self._sessions, self._wanted, self._room, on_progress=self._note)
                # Those that were named before this task ran.
                self._fetch.set_donors(self._donors)
                self.sink = await self._fetch.run()
                self.failure = ""
        except StateError as error:
            self.failure = str(error)
        finally:
            self._fetch = None
            # Last of all: a thread that sees the end reads the sink and the failure at once.
            self._ended.set()


class SnapshotTransfer(Transfer):
    """A snapshot on its way."""

    def __init__(
        self, offer: SnapshotOffer, sessions: Sessions, token: trio.lowlevel.TrioToken, directory: Path | None
    ) -> None:
        super().__init__(sessions, chunked(BlobKind.SNAPSHOT, offer.root, offer.size), token, directory)
        self.offer = offer

    @contextlib.contextmanager
    def data(self) -> Iterator[memoryview]:
        """Lend the bytes of the snapshot, which has succeeded. The memory, or the file, goes with the block."""
        assert self.sink is not None
        # Lent once. With the block, nothing refers to memory of the state's size any more.
        sink, self.sink = self.sink, None
        try:
            yield sink.take()
        finally:
            sink.close()
            # The state is loaded, or refused for good. Its file would only take room on the disk.
            if isinstance(sink, FileSink):
                sink.remove()


class AverageTransfer(Transfer):
    """An average of the log on its way."""

    def __init__(
        self, group_id: bytes, run: SharedRun, sessions: Sessions, token: trio.lowlevel.TrioToken
    ) -> None:
        wanted = Wanted(BlobKind.AVERAGE, group_id, MAX_MANIFEST_BYTES, self._read_manifest)
        super().__init__(sessions, wanted, token)
        self.group_id = group_id
        self._run = run
        self._expected = run.expected(group_id)
        self._proof: ProvenAverage | None = None

    def _read_manifest(self, data: bytes) -> BlobManifest:
        # Its signatures are checked before a single piece is fetched.
        self._proof = read_manifest(data, self._expected)
        return BlobManifest(sizes=self._proof.sizes, digests=self._proof.digests)

    @property
    def before(self) -> bytes | None:
        """State of the lineage before the update, as soon as the certificate is here and checked."""
        return None if self._proof is None else self._proof.state

    def proven(self) -> ProvenAverage:
        """Return the certificate's content, once :attr:`before` is known."""
        assert self._proof is not None
        return self._proof

    def success(self, averaged: list[torch.Tensor]) -> Success:
        """Return the result of the round, of which this peer was no member; ``averaged`` is from :meth:`decode`."""
        return replayed_success(self.proven(), averaged)

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
        vector = torch.empty(self._run.elements, dtype=torch.float32, device="cpu")
        decode(self.proven(), self._parts(), self._expected.codec, vector)
        return self._run.unflatten(vector)

    def logged(self, numbers: bytes) -> LoggedAverage:
        """Return it as an entry of this peer's own log; ``numbers`` are the hyperparameters that this peer has used."""
        proof = self.proven()
        return LoggedAverage(
            proof.state,
            proof.group_id,
            proof.certificate,
            EncodedAverage(self._parts(), proof.digests),
            numbers,
        )


def replayed_success(proven: ProvenAverage, averaged: list[torch.Tensor]) -> Success:
    """Return the result of a round of which this peer was no member, as its certificate describes it."""
    roster = proven.roster
    return Success(
        averaged=averaged,
        peers=tuple(member.peer_id for member in roster.contributors),
        weights={member.peer_id: member.weight for member in roster.contributors},
        total_weight=roster.total_weight,
        # This peer took part in no exchange, so what it has sent and how long it took is not known.
        compression_ratio=1.0,
        bytes_sent=0,
        bytes_received=sum(proven.sizes),
        duration=0.0,
        exchange_duration=0.0,
        group_id=proven.group_id.hex(),
        share=(0, 0),
        metrics=roster.metrics_by(robust=proven.robust),
        observers=tuple(m.peer_id for m in roster.holders if m.peer_id in roster.observers),
        auxiliaries=tuple(member.peer_id for member in roster.members if member.auxiliary),
        certificate=proven.certificate,
    )
