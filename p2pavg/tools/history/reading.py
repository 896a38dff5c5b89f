"""Reads the files of a history: chain, notices and seals, and the line of updates through them.

Everything in a history may be a stranger's. Nothing here raises for what it finds: each fault is reported with its
place, and the rest is read.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
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
from p2pavg.state.history.segments import PlacedEntry, Segment, TornSegmentError, check_payload, segment_files
from p2pavg.tools.history.replica import Replica
from p2pavg.verification.evidence.accusation import read_accusation

REVOKED_GRACE_SECONDS = 120.0
"""A list of revoked certificates reaches all members within a minute, and a round that has begun by then may end."""
MAX_OPEN = 8  # files
MAX_FORKS = 20  # that are told


class Revocations:
    """The revoked certificates that a history tells of, and since when."""

    def __init__(self) -> None:
        self._lists: dict[int, tuple[int, frozenset[bytes]]] = {}
        self._since: dict[int, float] = {}

    def note(self, number: int, identifiers: frozenset[bytes], epoch: int) -> None:
        """Note a list that stands behind an update. It holds in all segments, also in those that do not repeat it."""
        known = self._lists.get(number, (epoch, identifiers))
        self._lists[number] = (min(epoch, known[0]), identifiers)

    def at(self, epoch: int, time: float) -> frozenset[bytes]:
        """Return the certificates that no member of an update may have shown.

        The clock of the archivist does not count, and that of a single member neither: a list holds from the first
        update behind it on, by the median of what its members have signed, and :data:`REVOKED_GRACE_SECONDS` later.

        Args:
            epoch: of the update.
            time: the median of the moments that its members have signed.
        """
        behind = [number for number, (since, _) in self._lists.items() if since < epoch]
        holding = []
        for number in behind:
            self._since[number] = min(self._since.get(number, time), time)
            if time > self._since[number] + REVOKED_GRACE_SECONDS:
                holding.append(number)
        # The newest list is complete.
        return self._lists[max(holding)][1] if holding else frozenset()


@dataclass(frozen=True, slots=True)
class Place:
    """One update in the files of a history. A history has many, so it has no more than is needed to find it."""

    segment: int
    at: int
    """Place of the entry in the file."""
    epoch: int
    before: bytes
    """State of the lineage before it, as the entry says. It is not checked yet."""
    after: bytes


@dataclass(slots=True)
class ReadSegment:
    """The content of the entries of one segment."""

    path: Path
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
        return self.path.name

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
    """The faults that were found, with their places."""
    remarks: list[str] = field(default_factory=list)
    """Sentences that a reader should know, and that are no faults."""
    replica: Replica | None = None
    """The state after the last update that was replayed."""
    contributed: CreditSums = field(default_factory=CreditSums)
    """Of the updates on the line. Of updates that are missing there is nothing."""
    sealed: list[SealedCredits] = field(default_factory=list)
    """Of each sealed segment of which all updates were checked."""
    verified: list[str] = field(default_factory=list)
    """Names of the segments of which everything was verified and replayed."""


class HistoryReader:
    """The segments of a history, and where each update stands.

    Args:
        directory: of the history.
        run: id and authority of the run, if they are known.

    Raises:
        StateError: there is no history in this folder.
    """

    def __init__(self, directory: Path, run: tuple[str, bytes] | None) -> None:
        self._run = run
        self.report = HistoryReport()
        self.revocations = Revocations()
        self._opened: OrderedDict[Path, Segment] = OrderedDict()
        self._opening = threading.Lock()
        self._forks = 0
        self._marks: set[int] = set()
        """Of each archivist's updates: its seals count each update once."""
        self.segments: list[ReadSegment] = []
        self.places: list[Place] = []
        files = segment_files(directory)
        if not files:
            raise StateError(f"there is no history in {directory}: it has no file that ends in .history")
        for path in files:
            self._read(path)
        self._check_links()

    def file(self, path: Path) -> Segment:
        """Return the file of a segment. A few stay open: a long run has more segments than a process may have files.

        Raises:
            StateError: it cannot be read, or not any more.
        """
        with self._opening:
            found = self._opened.pop(path, None) or Segment(path)
            self._opened[path] = found
            if len(self._opened) > MAX_OPEN:
                self._opened.popitem(last=False)[1].close()
            return found

    def close(self) -> None:
        """Close the files."""
        while self._opened:
            self._opened.popitem()[1].close()

    def _fault(self, why: object) -> None:
        # Never raised: one fault must not hide what comes behind it, or in other files.
        self.report.faults.append(str(why))

    # ------------------------------------------------------------------ the files

    def _read(self, path: Path) -> None:
        """Read the entries of a segment; check its chain, its notices and its seal."""
        try:
            segment = self.file(path)
        except TornSegmentError as error:
            self._cut(path, error)
            return
        except StateError as error:
            self._fault(error)
            return
        entries = segment.entries()
        try:
            begin, snapshot = next(entries), next(entries)
            beginning = begin.entry
            assert isinstance(beginning, SegmentBeginning)
            found = ReadSegment(path, beginning, rules_of(beginning), snapshot, [begin.hash, snapshot.hash])
            found.previous, found.last = begin.previous, snapshot.hash
            self._check_beginning(found)
        except (StopIteration, TornSegmentError) as error:
            self._cut(path, str(error) or "it ends before its snapshot")
            return
        except StateError as error:
            self._fault(error if path.name in str(error) else f"{path.name}: {error}")
            return
        if any(
            (each.beginning.archivist, each.beginning.number) == (beginning.archivist, beginning.number)
            for each in self.segments
        ):
            # Each seal counts its updates, so one that stood twice would be credited twice.
            self._fault(f"{path.name}: another file has the same segment of its archivist")
            return
        self.segments.append(found)
        number, epoch = len(self.segments) - 1, found.said.epoch
        try:
            for placed in entries:
                found.last, entry = placed.hash, placed.entry
                if isinstance(entry, Seal):
                    found.seal = entry
                    self._check_seal(found)
                    continue
                found.hashes.append(placed.hash)
                if isinstance(entry, HistoryNotice):
                    self._read_notice(found, entry, segment.payload(placed), epoch)
                elif isinstance(entry, Update):
                    found.updates += 1
                    epoch = entry.epoch
                    # The seals of an archivist add up what is under them, so that an update may stand there once.
                    mark = hash((found.beginning.archivist, entry.before, entry.after))
                    if mark in self._marks:
                        self._fault(
                            f"{found.name}: update {epoch} stands twice in the segments of its archivist"
                        )
                    self._marks.add(mark)
                    self.places.append(Place(number, placed.at, epoch, entry.before, entry.after))
        except TornSegmentError as error:
            self._cut(path, error)
        except StateError as error:
            self._fault(f"{error}; what comes behind it in this file is left out")
        if found.seal is None:
            self.report.remarks.append(
                f"{found.name}: it has no seal, so its archivist has not signed it yet"
            )
        segment.forget()

    def _cut(self, path: Path, error: object) -> None:
        # A process that was killed leaves its last entry unfinished. One that cuts off what it does not like gives a
        # history of less: if anything follows, a hole or the chain shows it.
        why = str(error)
        where = why if path.name in why else f"{path.name}: {why}"
        self.report.remarks.append(f"{where}: its archivist was killed, or still writes")

    def _check_beginning(self, found: ReadSegment) -> None:
        begin, report, where = found.beginning, self.report, found.name
        # Nothing of the size of the vector is made before there is a file of this size.
        if 2 * found.rules.schema.elements > found.said.size:
            raise StateError(f"{where}: it averages more values than its snapshot has")
        if self._run is None:
            self._run = (begin.run_id, begin.authority)
        report.run_id, report.authority = self._run
        if self._run != (begin.run_id, begin.authority):
            authority = begin.authority.hex() or "none"
            raise StateError(
                f"{where}: it is of another run, {begin.run_id!r} with the authority {authority}"
            )
        if begin.authority:
            why = refusal(
                begin.certificate, authority=begin.authority, peer_id=begin.archivist, now=begin.time
            )
            if why is not None:
                raise StateError(f"{where}: its archivist {begin.archivist} is no member of the run: {why}")

    def _read_notice(
        self, found: ReadSegment, notice: HistoryNotice, payload: memoryview, epoch: int
    ) -> None:
        """Check a notice that stands behind an update."""
        try:
            check_payload(notice, payload)
            if notice.kind == REVOKED:
                said = read_revocations(bytes(payload), found.beginning.authority)
                self.revocations.note(said.number, said.identifiers, epoch)
            if notice.kind == EXCLUDED:
                accusation = read_accusation(bytes(payload))
                self.report.excluded[accusation.peer_id] = accusation.reason
        except (StateError, RemoteProtocolError) as error:
            self._fault(f"{found.name}: {error}")

    def _check_seal(self, found: ReadSegment) -> None:
        seal, begin = found.seal, found.beginning
        assert seal is not None
        if (seal.archivist, seal.run_id, seal.number) != (begin.archivist, begin.run_id, begin.number):
            self._fault(f"{found.name}: its seal is that of another segment")
        elif seal.entries != len(found.hashes) or seal.root != merkle_root(found.hashes):
            self._fault(f"{found.name}: its seal is on other entries")
        elif not is_signed(seal.archivist, seal.signature, seal.statement):
            self._fault(f"{found.name}: its seal is forged: {seal.archivist} has not signed it")
        else:
            # Anyone can write a name into a segment without their signature.
            self.report.archivists.add(seal.archivist)

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
        # By the state before and the one after: several archivists have the same update, which is walked once. With its
        # number, as a hostile history may lead back to an earlier state.
        following: dict[tuple[int, bytes], dict[bytes, Place]] = {}
        for place in self.places:
            following.setdefault((place.epoch - 1, place.before), {}).setdefault(place.after, place)
        lengths = _lengths(following)
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
                ways = following.get((epoch, state))
                if not ways:
                    break
                place = self._chosen(ways, lengths)
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

    def _chosen(self, ways: Mapping[bytes, Place], lengths: Mapping[tuple[int, bytes], int]) -> Place:
        """Return the update that follows; of several, the one that leads furthest."""
        epoch = next(iter(ways.values())).epoch
        if len(ways) > 1:
            self._forks += 1
            if self._forks <= MAX_FORKS:
                self.report.remarks.append(
                    f"update {epoch}: {len(ways)} different updates follow on the one before. The run fell into parts,"
                    " or began again at an earlier checkpoint; the part that leads furthest is replayed"
                )
        return ways[max(ways, key=lambda after: (lengths.get((epoch, after), 0), after))]


def _lengths(following: Mapping[tuple[int, bytes], Mapping[bytes, Place]]) -> dict[tuple[int, bytes], int]:
    """Return how many updates follow on each state, at most."""
    found: dict[tuple[int, bytes], int] = {}
    for epoch, state in sorted(following, reverse=True):
        found[epoch, state] = 1 + max(found.get((epoch + 1, after), 0) for after in following[epoch, state])
    return found
