"""Reads the files of a history: chain, notices and seals, and the line of updates through them.

Everything in a history may be a stranger's. Nothing here raises for what it finds: each fault is reported with its
place, and the rest is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from p2pavg.base.errors import RemoteProtocolError, StateError
from p2pavg.runs.membership.certificate import refusal
from p2pavg.runs.membership.revocation import read_revocations
from p2pavg.state.history.entries import (
    EXCLUDED,
    REVOKED,
    Credit,
    CreditSums,
    HistoryNotice,
    Seal,
    SegmentBeginning,
    Snapshot,
    Update,
    merkle_root,
)
from p2pavg.state.history.receipts import is_signed
from p2pavg.state.history.rules import Contributions, SegmentRules, rules_of
from p2pavg.state.history.segments import (
    PlacedEntry,
    Segment,
    check_payload,
    segment_files,
)
from p2pavg.tools.history.replica import Replica
from p2pavg.verification.evidence.accusation import read_accusation


@dataclass(frozen=True, slots=True)
class Revocations:
    """The certificates that the members knew to be revoked at an update."""

    identifiers: frozenset[bytes] = frozenset()
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """One update in the files of a history. A history has many, so it has no more than is needed to find it."""

    segment: int
    at: int
    """Where the entry begins in the file."""
    epoch: int
    before: bytes
    """State of the lineage before it, as the entry says. It is not checked yet."""
    after: bytes
    revoked: Revocations


@dataclass(slots=True)
class ReadSegment:
    """What the entries of one segment say."""

    segment: Segment
    beginning: SegmentBeginning
    rules: SegmentRules
    snapshot: PlacedEntry
    hashes: list[bytes] = field(default_factory=list)
    seal: Seal | None = None
    previous: bytes = b""
    """Hash of the last entry of the segment before, as this one says."""
    last: bytes = b""
    """Hash of the last entry that could be read."""
    updates: int = 0
    contributed: dict[int, Contributions] = field(default_factory=dict)
    """By the place of the update in the file; until all of them are there."""

    @property
    def name(self) -> str:
        """Name of the file."""
        return self.segment.path.name

    @property
    def said(self) -> Snapshot:
        """The entry of the snapshot."""
        assert isinstance(self.snapshot.entry, Snapshot)
        return self.snapshot.entry


@dataclass(frozen=True, slots=True)
class SealedCredits:
    """The credits of one segment, which are those under its seal."""

    beginning: SegmentBeginning
    seal: Seal
    credited: tuple[Credit, ...]


@dataclass(slots=True)
class HistoryReport:
    """The result of a check."""

    run_id: str = ""
    authority: bytes = b""
    archivists: set[str] = field(default_factory=set)
    updates: int = 0
    """Updates that were checked, each counted once."""
    replayed: int = 0
    first: int | None = None
    """Update of the first snapshot from which the history was replayed."""
    begins_later: bool = False
    """True if the history has earlier updates, which were not asked for, or verified before."""
    last: int = 0
    """The last update."""
    peers: set[str] = field(default_factory=set)
    """Contributors."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Reasons of those that evidence in the history proves to have lied."""
    holes: list[tuple[int, int]] = field(default_factory=list)
    """First and last of the updates that are missing between two that are there."""
    faults: list[str] = field(default_factory=list)
    """What is wrong, with its place."""
    remarks: list[str] = field(default_factory=list)
    """What a reader should know, and no fault."""
    replica: Replica | None = None
    """The state after the last update that was replayed."""
    contributed: CreditSums = field(default_factory=CreditSums)
    """Of the updates on the line. Of updates that are missing there is nothing."""
    sealed: list[SealedCredits] = field(default_factory=list)
    """Of each sealed segment of which all updates were checked."""


class HistoryReader:
    """The segments of a history, and where each update stands.

    Args:
        directory: of the history.
        authority: the run's authority, if it is known: 32 bytes.
        stack: closes the files.

    Raises:
        StateError: there is no history in this folder.
    """

    def __init__(self, directory: Path, authority: bytes | None, stack: ExitStack) -> None:
        self._authority, self._stack = authority, stack
        self.report = HistoryReport()
        self.segments: list[ReadSegment] = []
        self.places: list[Place] = []
        files = segment_files(directory)
        if not files:
            raise StateError(f"there is no history in {directory}: it has no file that ends in .history")
        for path in files:
            self._read(path)
        self._check_links()

    def _fault(self, why: object) -> None:
        # Never raised: one fault must not hide what comes behind it, or in other files.
        self.report.faults.append(str(why))

    # ------------------------------------------------------------------ the files

    def _read(self, path: Path) -> None:
        """Read the entries of a segment; check its chain, its notices and its seal."""
        try:
            segment = self._stack.enter_context(Segment(path))
        except StateError as error:
            self._fault(error)
            return
        entries = segment.entries()
        try:
            begin, snapshot = next(entries), next(entries)
            beginning = begin.entry
            assert isinstance(beginning, SegmentBeginning)
            found = ReadSegment(
                segment, beginning, rules_of(beginning), snapshot, [begin.hash, snapshot.hash]
            )
            found.previous, found.last = begin.previous, snapshot.hash
            self._check_beginning(found)
        except StopIteration:
            self._fault(f"{path.name}: it ends before its snapshot")
            return
        except StateError as error:
            self._fault(error if path.name in str(error) else f"{path.name}: {error}")
            return
        self.segments.append(found)
        # A list holds for the updates behind it. Each segment repeats the present one, so it can be read alone.
        revoked = Revocations()
        try:
            for placed in entries:
                found.last = placed.hash
                if isinstance(placed.entry, Seal):
                    found.seal = placed.entry
                    self._check_seal(found)
                    continue
                found.hashes.append(placed.hash)
                if isinstance(placed.entry, HistoryNotice):
                    ids = self._check_notice(found, placed.entry, segment.payload(placed))
                    if ids is not None:
                        revoked = Revocations(ids, placed.entry.time)
                elif isinstance(placed.entry, Update):
                    found.updates += 1
                    number, said = len(self.segments) - 1, placed.entry
                    self.places.append(Place(number, placed.at, said.epoch, said.before, said.after, revoked))
        except StateError as error:
            # A process that was killed leaves its last entry unfinished; so does one that cuts off what follows.
            self._fault(f"{error}; what comes behind it in this file is left out")
        if found.seal is None:
            self.report.remarks.append(
                f"{found.name}: it has no seal yet, so its archivist has not signed it"
            )
        segment.forget()

    def _check_beginning(self, found: ReadSegment) -> None:
        begin, report, where = found.beginning, self.report, found.name
        # Nothing of the size of the vector is made before there is a file of this size.
        if 2 * found.rules.schema.elements > found.said.size:
            raise StateError(f"{where}: it averages more values than its snapshot has")
        if not report.run_id:
            report.run_id, report.authority = begin.run_id, begin.authority
            if self._authority not in (None, begin.authority):
                raise StateError(
                    f"{where}: it is of a run with another authority, {begin.authority.hex() or 'none'}"
                )
        elif (report.run_id, report.authority) != (begin.run_id, begin.authority):
            raise StateError(f"{where}: it is of another run, {begin.run_id!r}")
        report.archivists.add(begin.archivist)
        if begin.authority:
            why = refusal(
                begin.certificate, authority=begin.authority, peer_id=begin.archivist, now=begin.time
            )
            if why is not None:
                raise StateError(f"{where}: its archivist {begin.archivist} is no member of the run: {why}")

    def _check_notice(
        self, found: ReadSegment, notice: HistoryNotice, payload: memoryview
    ) -> frozenset[bytes] | None:
        """Check a notice; return the identifiers of revoked certificates, if it is such a list."""
        try:
            check_payload(notice, payload)
            if notice.kind == REVOKED:
                return read_revocations(bytes(payload), found.beginning.authority).identifiers
            if notice.kind == EXCLUDED:
                accusation = read_accusation(bytes(payload))
                self.report.excluded[accusation.peer_id] = accusation.reason
        except (StateError, RemoteProtocolError) as error:
            self._fault(f"{found.name}: {error}")
        return None

    def _check_seal(self, found: ReadSegment) -> None:
        seal, begin = found.seal, found.beginning
        assert seal is not None
        if (seal.archivist, seal.run_id, seal.number) != (begin.archivist, begin.run_id, begin.number):
            self._fault(f"{found.name}: its seal is that of another segment")
        elif seal.entries != len(found.hashes) or seal.root != merkle_root(found.hashes):
            self._fault(f"{found.name}: its seal is on other entries")
        elif not is_signed(seal.archivist, seal.signature, seal.statement):
            self._fault(f"{found.name}: its seal is forged: {seal.archivist} has not signed it")

    def _check_links(self) -> None:
        """Check that each archivist's segments follow on each other."""
        last: dict[str, ReadSegment] = {}
        for found in self.segments:
            before = last.get(found.beginning.archivist)
            last[found.beginning.archivist] = found
            if before is None:
                continue
            if found.previous != before.last:
                is_next = found.beginning.number == before.beginning.number + 1
                what = (
                    "it does not follow on it"
                    if is_next
                    else "what its archivist had between them is not here"
                )
                (self._fault if is_next else self.report.remarks.append)(
                    f"{found.name}, behind {before.name}: {what}"
                )

    # ------------------------------------------------------------------ the line of updates

    def line(self) -> Iterator[ReadSegment | Place]:
        """Yield the updates of the run in their order, and each snapshot before the first update behind it."""
        # By the state before and the one after: several archivists have the same update, which is walked once.
        following: dict[bytes, dict[bytes, Place]] = {}
        for place in self.places:
            following.setdefault(place.before, {}).setdefault(place.after, place)
        snapshots: dict[bytes, list[ReadSegment]] = {}
        for found in self.segments:
            snapshots.setdefault(found.said.state, []).append(found)
        starts = sorted(self.segments, key=lambda found: (found.said.epoch, found.beginning.time))
        passed: set[bytes] = set()
        epoch: int | None = None
        for start in starts:
            state = start.said.state
            if state in passed or (epoch is not None and start.said.epoch < epoch):
                continue
            # Nothing leads here from the updates before: either some are missing, or the run went on in another way.
            # With the same number, the run goes on with other settings, which the replay checks.
            if epoch is not None and start.said.epoch > epoch:
                self._note_gap(epoch, start.said.epoch)
            epoch = start.said.epoch
            while True:
                if state not in passed:
                    passed.add(state)
                    yield from snapshots.get(state, ())
                ways = following.get(state)
                if not ways:
                    break
                place = self._chosen(ways, following)
                yield place
                state, epoch = place.after, place.epoch
        # Updates behind the last hole have no snapshot from which they could be replayed.
        beyond = [place.epoch for place in self.places if place.epoch > (epoch or 0)]
        if beyond:
            self._note_gap(epoch or 0, min(beyond) - 1)
            epoch = max(beyond)
        self.report.last = epoch or 0

    def _note_gap(self, epoch: int, later: int) -> None:
        """Note what is missing between an update and the next one that can be reached: up to ``later``."""
        held = sorted({place.epoch for place in self.places if epoch < place.epoch <= later})
        missing = [
            (before + 1, after - 1)
            for before, after in itertools.pairwise([epoch, *held, later + 1])
            if after > before + 1
        ]
        self.report.holes += missing
        if not missing:
            self._fault(f"update {epoch + 1} does not follow on update {epoch}")

    def _chosen(self, ways: Mapping[bytes, Place], following: Mapping[bytes, Mapping[bytes, Place]]) -> Place:
        """Return the update that follows; of several, the one that leads furthest."""
        if len(ways) == 1:
            return next(iter(ways.values()))

        def length(state: bytes) -> int:
            count, seen = 0, set()
            while state not in seen and (onward := following.get(state)):
                seen.add(state)
                state = next(iter(onward))
                count += 1
            return count

        epoch = next(iter(ways.values())).epoch
        self.report.remarks.append(
            f"update {epoch}: {len(ways)} different updates follow on the one before. The run fell into parts, or began"
            " again at an earlier checkpoint; the part that leads furthest is replayed"
        )
        return ways[max(ways, key=lambda after: (length(after), after))]
