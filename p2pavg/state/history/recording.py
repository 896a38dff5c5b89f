"""Records the history of a run at one peer: what it takes part in, or replays, goes to the disk in a thread of its own.

The training thread gives an update, and goes on at once. A disk that fails, or that is slower than the run, costs a
*hole*: some updates are missing, and the next segment begins with a new snapshot. It never stops the training.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from blake3 import blake3

from p2pavg.base.errors import P2PAvgError, RemoteProtocolError, StateError
from p2pavg.base.files import locked, naming_errors
from p2pavg.base.limits import STALL_SECONDS
from p2pavg.net.transport import Buffer
from p2pavg.state.average import LoggedAverage
from p2pavg.state.history.entries import (
    FIRST,
    REVOKED,
    SEGMENT_ENTRIES,
    SEGMENT_SNAPSHOTS,
    Entry,
    HistoryNotice,
    Seal,
    SegmentBeginning,
    Snapshot,
    Update,
    credits_of,
    credits_root,
    merkle_root,
    sealed,
)
from p2pavg.state.history.rules import SegmentRules, rules_of
from p2pavg.state.history.segments import (
    LOCK_NAME,
    RecoveredSegment,
    Segment,
    SegmentWriter,
    read_segment,
    recover,
    segment_files,
    segment_name,
)
from p2pavg.state.tree import chunk_digests, root_of
from p2pavg_dht import Signer

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 2**28
"""Averages that wait for the disk. With more, the disk is slower than the run, and a hole is better than no memory."""


@dataclass(frozen=True, slots=True)
class HistorySettings:
    """The folder in which a peer keeps the history of its run.

    Args:
        directory: folder of this history alone, made if it is missing.
        keep: updates that stay; older segments are removed. ``None``: all of them.
        names: of the trained parameters, if they are known.
    """

    directory: Path
    keep: int | None = None
    names: tuple[str, ...] = ()


_Task = Callable[[], None]


class HistoryRecorder:
    """The history of one run at one peer. Its owner calls :meth:`open`, and then :meth:`run` in a thread of its own.

    Args:
        settings: of the folder.
        like: what each segment begins with, besides its number and time. Its archivist is ``signer``.
        signer: this peer's, which seals the segments.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        settings: HistorySettings,
        like: SegmentBeginning,
        signer: Signer,
        wall_clock: Callable[[], float],
    ) -> None:
        self._settings, self._like, self._signer, self._wall_clock = settings, like, signer, wall_clock
        self._resources = ExitStack()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # Held while work is given, so that entries stand in that order: notices come from trio's thread.
        self._lock = threading.RLock()
        # What the training thread knows: the end of what it has given, not of what is on the disk.
        self._tip: bytes | None = None
        self._is_open = False
        """True while the last segment can be appended to."""
        self._known: set[bytes] = set()
        """All states of the lineage that are recorded, 32 bytes each. A peer that began again at a checkpoint passes
        them again, and an update that stood twice would be credited twice."""
        self._given: set[bytes] = set()
        """Those of the segment that is open."""
        self._entries = self._averages = self._snapshot_bytes = self._queued = 0
        self._failed_at = -STALL_SECONDS
        self._proofs: list[tuple[str, bytes]] = []
        """The proofs that the members have now."""
        self._said: set[bytes] = set()
        """Digests of the proofs that are recorded."""
        # What the writing thread knows.
        self._number = 0
        self._previous = self._before = FIRST
        """Hashes of the last entry, and of the last one before this segment."""
        self._writer: SegmentWriter | None = None
        self._path: Path | None = None
        self._rules: SegmentRules | None = None
        self._leaves: list[bytes] = []
        self._contributed: list[tuple[float, dict[str, float]]] = []

    # ------------------------------------------------------------------ the beginning

    def open(self) -> None:
        """Lock the folder, and mend what a crash has left in it.

        Raises:
            StateError: the folder cannot be used, or has the history of another run.
            BusyError: another process uses it.
        """
        directory = self._settings.directory
        with naming_errors(f"cannot keep a history in {directory}", directory, StateError):
            directory.mkdir(parents=True, exist_ok=True)
            self._resources.enter_context(locked(directory / LOCK_NAME))
        try:
            self._continue()
        except BaseException:
            self._resources.close()
            raise

    def _continue(self) -> None:
        files = segment_files(self._settings.directory)
        for path in files:
            self._check_run(path)
        own = [path for path in files if path.stem[9:] == self._signer.peer_id[-8:]]
        if own:
            self._number = int(own[-1].stem[:8]) + 1
        newest: RecoveredSegment | None = None
        last: Path | None = None
        # One after the other: together, the certificates of a long run are more than a machine has memory for.
        for path in own:
            # Only the last segment can be unfinished: each was sealed, or given up, before the next one began.
            found = recover(path) if path == own[-1] else read_segment(path)
            if found is None:
                continue
            if found.beginning.archivist != self._signer.peer_id:
                raise StateError(
                    f"{self._settings.directory} has a segment of {found.beginning.archivist} under the name of this"
                    " one"
                )
            self._known |= found.states
            newest, last = found, path
        if newest is None or last is None:
            return
        # The chain goes on from there, also in a new file: a segment that is taken away between others is missed.
        self._previous = newest.placed[-1].hash
        updates = list(newest.updates)
        self._tip = updates[-1].after if updates else newest.snapshot.state
        if last != own[-1] or not newest.can_go_on:
            return
        # A run that has changed its rules meanwhile needs another beginning.
        like = self._like
        begin = msgspec.structs.replace(
            newest.beginning, number=like.number, time=like.time, certificate=like.certificate
        )
        if begin == like:
            self._go_on(last, newest)

    def _check_run(self, path: Path) -> None:
        """Check that a segment is of this run: one folder has the history of one run."""
        try:
            with Segment(path) as segment:
                beginning = next(segment.entries()).entry
        except (StateError, StopIteration):
            return  # it is damaged; `p2pavg history verify` reports it
        assert isinstance(beginning, SegmentBeginning)
        if (beginning.run_id, beginning.authority) != (self._like.run_id, self._like.authority):
            raise StateError(
                f"{self._settings.directory} has the history of another run, {beginning.run_id!r}: name another folder"
            )

    def _go_on(self, path: Path, found: RecoveredSegment) -> None:
        with naming_errors(f"cannot append to {path}", path, StateError):
            self._writer = SegmentWriter.go_on(path)
        self._path, self._rules, self._is_open = path, found.rules, True
        self._before = found.placed[0].previous
        self._leaves = [placed.hash for placed in found.placed]
        try:
            said = [found.rules.contributions(update.certificate) for update in found.updates]
        except RemoteProtocolError as error:
            raise StateError(f"{path}: {error}") from None
        self._contributed = [(each.time, each.samples) for each in said]
        self._entries, self._snapshot_bytes = len(found.placed), found.snapshot.size
        self._averages = sum(update.size for update in found.updates)
        self._said = {
            placed.entry.digest for placed in found.placed if isinstance(placed.entry, HistoryNotice)
        }
        if self._is_full:
            self._end_segment()

    # ------------------------------------------------------------------ what the training thread calls

    def needs_snapshot(self, state: bytes) -> bool:
        """Return whether an update from a state of the lineage can be recorded only behind a snapshot of it."""
        with self._lock:
            if self._is_open and state == self._tip:
                return False
            # On its way again through updates that are recorded: only their end is of use.
            if state in self._known and state != self._tip:
                return False
            # Also a clock that was set back ends the rest.
            rests = 0 <= self._wall_clock() - self._failed_at < STALL_SECONDS
            return self._queued <= MAX_QUEUED_BYTES // 2 and not rests

    @property
    def waits(self) -> bool:
        """True while something waits for the disk."""
        return self._queued > 0

    def begin(self, data: memoryview, epoch: int, state: bytes) -> None:
        """Begin a segment with a snapshot, whose bytes nothing changes any more."""
        with self._lock:
            # From here on updates may be given, although the snapshot may not be on the disk for a while.
            self._tip, self._is_open = state, True
            self._known.add(state)
            self._given = {state}
            self._entries, self._averages, self._snapshot_bytes = 2, 0, len(data)
            # A segment stands alone, so the present list is in each. Evidence may be large, and is recorded once.
            self._said -= {blake3(proof).digest() for kind, proof in self._proofs if kind == REVOKED}
            self._give(partial(self._begin_segment, data, epoch, state), len(data))
            self.note(self._proofs)

    def took(self, average: LoggedAverage | None, epoch: int, after: bytes) -> None:
        """Record an update.

        Args:
            average: ``None`` if it has no proof, such as that of a peer that was alone.
            epoch: updates since the run began, this one included.
            after: state of the lineage after it.
        """
        with self._lock:
            # Decided at once, by what was given before: the training thread never waits for the disk.
            if average is None or not self._is_open or average.state != self._tip:
                if after not in self._known:
                    self._tip, self._is_open = None, False  # the next one needs a snapshot
                return
            if self._queued > MAX_QUEUED_BYTES:
                self._tip, self._is_open = None, False
                logger.warning(
                    "the disk of the history is slower than the run: updates from %d on are missing in it",
                    epoch,
                )
                return
            self._tip = after
            self._known.add(after)
            self._given.add(after)
            self._entries += 1
            self._averages += average.encoded.nbytes
            ends = self._is_full
            self._is_open = not ends
            self._give(partial(self._append_update, average, epoch, after), average.encoded.nbytes)
            if ends:
                self._give(self._end_segment, 0)

    @property
    def _is_full(self) -> bool:
        # The seal is an entry, too.
        return self._entries >= SEGMENT_ENTRIES - 1 or self._averages >= SEGMENT_SNAPSHOTS * max(
            self._snapshot_bytes, 2**16
        )

    def note(self, proofs: list[tuple[str, bytes]]) -> None:
        """Record what members may not take part any more, by the kind of its proof; recorded proofs are left out.

        Args:
            proofs: all that are known now.
        """
        with self._lock:
            self._proofs = proofs
            for kind, proof in proofs:
                digest = blake3(proof).digest()
                if not self._is_open or digest in self._said:
                    continue
                self._said.add(digest)
                self._entries += 1
                notice = HistoryNotice(time=self._wall_clock(), kind=kind, digest=digest, size=len(proof))
                self._give(partial(self._append, notice, [proof]), len(proof))

    def _give(self, task: _Task, nbytes: int) -> None:
        """Give work to the writing thread."""

        def work() -> None:
            try:
                self._guarded(task)
            finally:
                with self._lock:
                    self._queued -= nbytes + 1

        with self._lock:
            self._queued += nbytes + 1
        self._tasks.put(work)

    # ------------------------------------------------------------------ the writing thread

    def run(self) -> None:
        """Write until :meth:`stop`; then seal the segment, and let go of the folder."""
        try:
            while (task := self._tasks.get()) is not None:
                task()
                if self._tasks.empty() and self._writer is not None:
                    # Once for all that came meanwhile: a disk takes as long for one update as for many.
                    self._guarded(self._writer.store)
            self._guarded(self._end_segment)
        finally:
            self._resources.close()

    def stop(self) -> None:
        """Let :meth:`run` end when it has written what it was given."""
        self._tasks.put(None)

    def _guarded(self, task: _Task) -> None:
        try:
            task()
        except OSError as error:
            why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
            self._fail(f"cannot write the history in {self._settings.directory}: {why}")
        except P2PAvgError as error:
            self._fail(f"the history cannot record an update: {error}")

    def _fail(self, why: str) -> None:
        logger.error(
            "%s; the training goes on, and updates are missing in the history until it can be written", why
        )
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):  # the error of the disk, once more
                writer.close()
        with self._lock:
            self._tip, self._is_open = None, False
            self._known -= self._given  # what was given last may not be on the disk
            self._given.clear()
            # A disk that is full stays so for a while, and each try costs a snapshot.
            self._failed_at = self._wall_clock()

    def _begin_segment(self, data: memoryview, epoch: int, state: bytes) -> None:
        self._end_segment()
        if self._path is not None:
            # It could not be written to its end. What is whole of it stays, without a seal.
            found = recover(self._path)
            self._previous = self._before if found is None else found.placed[-1].hash
        self._before = self._previous
        beginning = msgspec.structs.replace(self._like, number=self._number, time=self._wall_clock())
        # A number is never used twice: the file of a segment that failed stays, with what is whole of it.
        path = self._settings.directory / segment_name(self._number, self._signer.peer_id)
        self._path, self._rules = path, None
        self._writer = SegmentWriter.create(path)
        self._number += 1
        self._leaves, self._contributed = [], []
        self._append(beginning)
        # Hashed here and not by the caller: a snapshot of a gigabyte takes a third of a second.
        root = root_of(chunk_digests(data), len(data))
        self._append(
            Snapshot(time=beginning.time, epoch=epoch, state=state, root=root, size=len(data)), [data]
        )
        self._rules = rules_of(beginning)
        self._prune(epoch)

    def _append_update(self, average: LoggedAverage, epoch: int, after: bytes) -> None:
        if self._writer is None or self._rules is None:
            return  # the segment could not be written
        try:
            said = self._rules.contributions(average.certificate)
        except RemoteProtocolError as error:
            raise StateError(f"update {epoch}: {error}") from None
        digest = blake3()
        for part in average.encoded.parts:
            digest.update(part)
        update = Update(
            time=self._wall_clock(),
            epoch=epoch,
            before=average.state,
            after=after,
            certificate=average.certificate,
            digests=b"".join(average.encoded.digests),
            numbers=average.numbers,
            digest=digest.digest(),
            size=average.encoded.nbytes,
        )
        self._append(update, average.encoded.parts)
        self._contributed.append((said.time, said.samples))

    def _append(self, entry: Entry, payload: Sequence[Buffer] = ()) -> None:
        if self._writer is None:
            return
        self._previous = self._writer.append(self._previous, entry, payload)
        self._leaves.append(self._previous)

    def _end_segment(self) -> None:
        """Seal the segment, if one is open."""
        if self._writer is None or self._rules is None:
            return
        assert self._path is not None
        seal = Seal(
            time=self._wall_clock(),
            archivist=self._signer.peer_id,
            run_id=self._like.run_id,
            number=int(self._path.stem[:8]),
            entries=len(self._leaves),
            root=merkle_root(self._leaves),
            credits=credits_root(credits_of(self._contributed)),
        )
        self._append(sealed(self._signer, seal))
        self._writer.store()
        self._writer.close()
        self._writer = self._path = None

    def _prune(self, epoch: int) -> None:
        """Remove the oldest segments that are of earlier updates than those that stay."""
        if self._settings.keep is None:
            return
        # Those of other archivists may have what is missing here.
        mine = self._signer.peer_id[-8:]
        files = [path for path in segment_files(self._settings.directory) if path.stem[9:] == mine]
        firsts = [_first_epoch(path) for path in files]
        for path, following in zip(files, firsts[1:], strict=False):
            # A segment ends where the next one begins.
            if following is None or following > epoch - self._settings.keep:
                break
            path.unlink(missing_ok=True)


def _first_epoch(path: Path) -> int | None:
    try:
        with Segment(path) as segment:
            entries = segment.entries()
            next(entries)
            entry = next(entries).entry
    except (StateError, StopIteration):
        return None
    assert isinstance(entry, Snapshot)
    return entry.epoch
