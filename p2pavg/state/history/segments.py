"""The files of a history: segments that are read entry by entry, and appended to. A crash costs the last entry."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from p2pavg.base.errors import RemoteProtocolError, StateError
from p2pavg.base.files import PUBLIC, naming_errors
from p2pavg.net.transport import Buffer
from p2pavg.state.average import PART_DIGEST_BYTES, Expected, ProvenAverage, manifest_of, read_manifest
from p2pavg.state.history.entries import (
    FIRST,
    FRAME_BYTES,
    MAGIC,
    Entry,
    HistoryNotice,
    Seal,
    SegmentBeginning,
    Snapshot,
    Update,
    framed,
    hash_of,
    payload_size,
    read_entry,
    read_frame,
)
from p2pavg.state.history.rules import SegmentRules, rules_of
from p2pavg.state.tree import chunk_digests, root_of

SUFFIX = ".history"
LOCK_NAME = "lock"
_NAME = re.compile(r"([0-9]{8})-([0-9A-Za-z]{8})\.history")


def segment_name(number: int, archivist: str) -> str:
    """Return the name of a segment's file. The end of the archivist's id keeps those of several archivists apart."""
    return f"{number:08}-{archivist[-8:]}{SUFFIX}"


def segment_files(directory: Path) -> list[Path]:
    """Return the files of a history, in the order of their names.

    Raises:
        StateError: the folder cannot be read, or one of these names is no plain file.
    """
    with naming_errors(f"cannot read the history {directory}", directory, StateError):
        found = sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name))
        # A link would lead out of the folder, which may be a stranger's.
        odd = [path.name for path in found if path.is_symlink() or not path.is_file()]
    if odd:
        raise StateError(f"{directory / odd[0]} is no plain file, as a segment of a history is")
    return found


@dataclass(frozen=True, slots=True)
class PlacedEntry:
    """An entry, and where it stands."""

    entry: Entry
    hash: bytes
    """Of the entry; it stands for all entries before, too."""
    previous: bytes
    at: int
    """Its first byte, counted from the beginning of the file."""
    payload: int
    """The first byte of its payload."""
    end: int
    """The first byte of the next entry."""


class TornSegmentError(StateError):
    """A segment's file ends within an entry, as one does whose archivist was killed."""


class Segment:
    """A segment's file, mapped into memory for reading.

    Args:
        path: of the file.

    Raises:
        TornSegmentError: it ends within its first bytes.
        StateError: it cannot be read, or begins with something else than a segment of this version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with naming_errors(f"cannot read {path}", path, StateError):
            # Not followed: the folder may be a stranger's.
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
            with os.fdopen(descriptor, "rb") as opened:
                self.size = os.fstat(opened.fileno()).st_size
                self._map = (
                    mmap.mmap(opened.fileno(), self.size, access=mmap.ACCESS_READ) if self.size else None
                )
        self._data = memoryview(self._map if self._map is not None else b"")
        begin = bytes(self._data[: len(MAGIC)])
        if begin != MAGIC:
            self.close()
            if MAGIC.startswith(begin):
                raise TornSegmentError(f"{path.name}: the file ends within its first bytes")
            raise StateError(f"{path} is no segment of a history of version 1: it begins with something else")

    def close(self) -> None:
        """Let go of the file."""
        # A view of a payload, such as in the traceback of a check that failed, keeps the map until it goes.
        with suppress(BufferError):
            self._data.release()
            if self._map is not None:
                self._map.close()

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def entries(self) -> Iterator[PlacedEntry]:
        """Yield the entries in their order; check that each names the one before, and that it is where it may be.

        Raises:
            TornSegmentError: the file ends within an entry.
            StateError: an entry is malformed, or does not follow on the one before. The message names the file and the
                number of the entry.
        """
        at, number, previous, last = len(MAGIC), 0, FIRST, None
        while at < self.size:
            try:
                found = self.entry_at(at)
                _check_order(number, found, previous, last)
            except StateError as error:
                after = f", after update {last.epoch}," if isinstance(last, Update) else ""
                raise type(error)(f"{self.path.name}: entry {number}{after}: {error}") from None
            yield found
            at, number, previous, last = found.end, number + 1, found.hash, found.entry

    def entry_at(self, at: int) -> PlacedEntry:
        """Return the entry that begins at a place.

        Raises:
            StateError: it is malformed, or the file ends within it.
        """
        if at + FRAME_BYTES > self.size:
            raise TornSegmentError("the file ends within it")
        length, previous = read_frame(bytes(self._data[at : at + FRAME_BYTES]))
        begin = at + FRAME_BYTES
        # Compared with the file before anything of this length is read.
        if begin + length > self.size:
            raise TornSegmentError("the file ends within it")
        body = bytes(self._data[begin : begin + length])
        entry = read_entry(body)
        payload = begin + length
        end = payload + payload_size(entry)
        if end > self.size:
            raise TornSegmentError("the file ends within its payload")
        return PlacedEntry(entry, hash_of(previous, body), previous, at, payload, end)

    def forget(self) -> None:
        """Let the system take back the memory of what was read; it is read again when it is needed."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def payload(self, placed: PlacedEntry) -> memoryview:
        """Return a view of an entry's payload."""
        return self._data[placed.payload : placed.end]


def _check_order(number: int, found: PlacedEntry, previous: bytes, last: Entry | None) -> None:
    """Check that an entry follows on the one before, and stands where its kind may stand."""
    entry = found.entry
    if number and found.previous != previous:
        raise StateError("it does not follow on the entry before")
    wanted = {0: SegmentBeginning, 1: Snapshot}.get(number)
    if wanted is not None and not isinstance(entry, wanted):
        raise StateError(f"it is no {wanted.__name__.lower()}")
    if number > 1 and isinstance(entry, SegmentBeginning | Snapshot):
        raise StateError(f"a {type(entry).__name__.lower()} within a segment")
    if isinstance(last, Seal):
        raise StateError("it stands behind the seal")


def check_payload(entry: Entry, payload: Buffer) -> None:
    """Check the payload of any entry against the digest that the entry names.

    Raises:
        StateError: it has other bytes; the message says of what.
    """
    if isinstance(entry, Snapshot) and root_of(chunk_digests(payload), len(payload)) != entry.root:
        raise StateError(f"the snapshot of update {entry.epoch} has other bytes than its entry names")
    if isinstance(entry, Update) and blake3(payload).digest() != entry.digest:
        raise StateError(f"update {entry.epoch}: its average has other bytes than its entry names")
    if isinstance(entry, HistoryNotice) and blake3(payload).digest() != entry.digest:
        raise StateError(f"a notice ({entry.kind}) has other bytes than its entry names")


def proven_average(update: Update, expected: Expected) -> ProvenAverage:
    """Check the certificate of an update.

    Raises:
        StateError: it is not genuine, or of another run, round or average than the entry says.
    """
    digests = update.digests
    if len(digests) % PART_DIGEST_BYTES:
        raise StateError(f"update {update.epoch}: digests of an impossible length")
    try:
        proven = read_manifest(manifest_of(update.certificate, update.numbers, digests), expected)
    except (RemoteProtocolError, StateError) as error:
        raise StateError(f"update {update.epoch}: {error}") from None
    if sum(proven.sizes) != update.size:
        raise StateError(f"update {update.epoch}: an average of {update.size} bytes, not {sum(proven.sizes)}")
    return proven


def parts_of(proven: ProvenAverage, payload: memoryview, epoch: int) -> list[memoryview]:
    """Cut an average into its parts, and check each.

    Raises:
        StateError: a part has other bytes than the members have signed.
    """
    at, parts = 0, []
    for number, (size, digest) in enumerate(zip(proven.sizes, proven.digests, strict=True)):
        part = payload[at : at + size]
        if blake3(part).digest() != digest:
            raise StateError(
                f"update {epoch}: part {number} of the average has other bytes than its members signed"
            )
        parts.append(part)
        at += size
    return parts


@dataclass(frozen=True, slots=True)
class RecoveredSegment:
    """The content of a segment, as far as it can be read."""

    beginning: SegmentBeginning
    rules: SegmentRules
    snapshot: Snapshot
    placed: tuple[PlacedEntry, ...]
    """The entries that could be read; the last one is whole."""
    can_go_on: bool
    """True if it has no seal, and nothing in it is damaged."""

    @property
    def updates(self) -> Iterator[Update]:
        """The updates in their order."""
        return (each.entry for each in self.placed if isinstance(each.entry, Update))

    @property
    def states(self) -> set[bytes]:
        """The states of the lineage that it leads through."""
        return {self.snapshot.state, *(update.after for update in self.updates)}


def read_segment(path: Path) -> RecoveredSegment | None:
    """Return what a segment holds, without a change of the file; ``None`` if it has not even a whole snapshot.

    Raises:
        StateError: the file cannot be read, or is no segment of this version.
    """
    kept: list[PlacedEntry] = []
    is_torn = is_damaged = False
    try:
        with Segment(path) as segment:
            try:
                for placed in segment.entries():
                    kept.append(placed)
            except TornSegmentError:
                is_torn = True
            except StateError:
                is_damaged = True
            # A file system may have kept the length of a file, and not its last bytes.
            if kept and not is_torn and not is_damaged and not isinstance(kept[-1].entry, Seal):
                try:
                    check_payload(kept[-1].entry, segment.payload(kept[-1]))
                except StateError:
                    kept.pop()
    except TornSegmentError:
        return None
    if len(kept) < 2:
        if is_damaged:
            raise StateError(f"{path} is damaged in its first entries")
        return None
    beginning, snapshot = kept[0].entry, kept[1].entry
    assert isinstance(beginning, SegmentBeginning)
    assert isinstance(snapshot, Snapshot)
    can_go_on = not is_damaged and not isinstance(kept[-1].entry, Seal)
    return RecoveredSegment(beginning, rules_of(beginning), snapshot, tuple(kept), can_go_on)


def recover(path: Path) -> RecoveredSegment | None:
    """Return what a segment holds, after cutting off what a crash has left behind its last whole entry.

    Only the unfinished end of a segment without a seal is cut. A file with other damage stays as it is.

    Returns:
        ``None`` if it has not even a whole snapshot. Then the file is removed.

    Raises:
        StateError: the file cannot be read or shortened, or is no segment of this version.
    """
    found = read_segment(path)
    with naming_errors(f"cannot shorten {path}", path, StateError):
        if found is None:
            path.unlink()
        elif found.can_go_on and path.stat().st_size != found.placed[-1].end:
            with path.open("r+b") as opened:
                opened.truncate(found.placed[-1].end)
                os.fsync(opened.fileno())
    return found


class SegmentWriter:
    """Appends entries to a segment.

    Args:
        opened: the file, at its end.
    """

    def __init__(self, opened: BinaryIO) -> None:
        self._opened = opened

    @classmethod
    def create(cls, path: Path) -> SegmentWriter:
        """Begin a segment; raise OSError if there is one of this name, or if it cannot be written."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PUBLIC)
        opened = os.fdopen(descriptor, "wb", buffering=0)
        _write_all(opened, MAGIC)
        return cls(opened)

    @classmethod
    def go_on(cls, path: Path) -> SegmentWriter:
        """Append to a segment that :func:`recover` has read; raise OSError if it cannot be written."""
        return cls(path.open("ab", buffering=0))

    def append(self, previous: bytes, entry: Entry, payload: Sequence[Buffer] = ()) -> bytes:
        """Write an entry; return its hash. After an OSError the file may end within it: :func:`recover` mends that.

        Args:
            previous: hash of the last entry.
        """
        body = entry.encode()
        for part in (framed(previous, body), *payload):
            _write_all(self._opened, part)
        return hash_of(previous, body)

    def store(self) -> None:
        """Wait until everything is on the disk; raise OSError if it cannot be written."""
        os.fdatasync(self._opened.fileno())

    def close(self) -> None:
        """Close the file."""
        self._opened.close()


def _write_all(opened: BinaryIO, data: Buffer) -> None:
    view = memoryview(data).cast("B")
    # An unbuffered file may take a part of what it is given, such as the last bytes that a disk has room for.
    while view:
        view = view[opened.write(view) :]
