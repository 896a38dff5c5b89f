"""Checks a history: its chain and seals, each certificate and average, the lineage, and a replay of all updates.

Everything in a history may be a stranger's. A check never raises for what it finds: it reports each fault with its
place, and goes on with what is left.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from p2pavg.base.errors import P2PAvgError, RemoteProtocolError, StateError
from p2pavg.group.candidate import Candidate
from p2pavg.optim.base.recipe import Settings, numbers_digest
from p2pavg.optim.base.state import Lineage, digest_of
from p2pavg.runs.membership.certificate import refusal
from p2pavg.runs.membership.revocation import read_revocations
from p2pavg.state.average import decode, read_numbers
from p2pavg.state.history.entries import (
    EXCLUDED,
    REVOKED,
    Credit,
    HistoryNotice,
    Seal,
    SegmentBeginning,
    Snapshot,
    Update,
    credits_of,
    credits_root,
    merkle_root,
)
from p2pavg.state.history.receipts import is_signed
from p2pavg.state.history.rules import Contributions, SegmentRules, rules_of
from p2pavg.state.history.segments import (
    PlacedEntry,
    Segment,
    check_payload,
    parts_of,
    proven_average,
    segment_files,
)
from p2pavg.state.snapshot import Content, read
from p2pavg.tools.history.replica import Replica
from p2pavg.verification.evidence.accusation import read_accusation

REVOKED_GRACE_SECONDS = 120.0
"""A list of revoked certificates reaches all members within a minute, and a round that has begun by then may end."""
AHEAD = 2  # updates that are read and checked while one is replayed


@dataclass(frozen=True, slots=True)
class Place:
    """One update in the files of a history."""

    segment: int
    placed: PlacedEntry
    update: Update
    revoked: frozenset[bytes]
    """Identifiers of the certificates that the members knew to be revoked."""
    revoked_at: float


@dataclass(frozen=True, slots=True)
class CheckedUpdate:
    """An update whose proofs were checked."""

    averaged: list[torch.Tensor]
    numbers: Settings
    after: Lineage
    contributions: Contributions


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
    contributed: list[tuple[float, Mapping[str, float]]] = field(default_factory=list)
    """Time of each update, and the samples of its contributors; of updates that are missing there is nothing."""
    sealed: list[SealedCredits] = field(default_factory=list)
    """Of each sealed segment of which all updates were checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """What is checked.

    Args:
        first, last: updates; ``None``: all.
        sample: fraction of the updates of which certificate and average are checked, and nothing is replayed; ``None``:
            all, and they are replayed.
        averages: false to check certificates alone, and neither averages nor what they lead to.
        seed: of the choice of a sample.
        authority: the run's authority, if it is known: 32 bytes.
        verified: names of segments that were verified before, and have not changed since.
        device: on which the updates are replayed.
    """

    first: int | None = None
    last: int | None = None
    sample: float | None = None
    averages: bool = True
    seed: int | None = None
    authority: bytes | None = None
    verified: frozenset[str] = frozenset()
    device: str = "cpu"


def check_history(
    directory: Path,
    options: CheckOptions = CheckOptions(),
    *,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    on_verified: Callable[[str], None] = lambda _name: None,
) -> HistoryReport:
    """Check a history.

    Args:
        on_progress: called with the number of updates that are done, and that of all.
        on_verified: called with the name of each segment of which everything was verified and replayed.

    Raises:
        StateError: there is no history in this folder.
    """
    with ExitStack() as stack:
        return _Check(directory, options, stack, on_progress, on_verified).run()


class _Check:
    def __init__(
        self,
        directory: Path,
        options: CheckOptions,
        stack: ExitStack,
        on_progress: Callable[[int, int], None],
        on_verified: Callable[[str], None],
    ) -> None:
        self._options = options
        self._stack = stack
        self._on_progress, self._on_verified = on_progress, on_verified
        self.report = HistoryReport()
        self._files = segment_files(directory)
        if not self._files:
            raise StateError(f"there is no history in {directory}: it has no file that ends in .history")
        self._segments: list[ReadSegment] = []
        self._places: list[Place] = []
        self._random = random.Random(options.seed)
        self._done = 0

    def run(self) -> HistoryReport:
        """Do all of it."""
        for path in self._files:
            self._read(path)
        self._check_links()
        whole = list(self._line())
        line = list(self._within(whole))
        on_line = {id(each) for each in whole}
        rest = [place for place in self._places if id(place) not in on_line and self._is_asked_for(place)]
        total = sum(isinstance(each, Place) for each in line) + len(rest)
        self._walk(line, total)
        # What another archivist has, or what was replaced after a fork, must be genuine, too.
        for _, _ in self._checked(rest):
            self._done += 1
            self._on_progress(self._done, total)
        return self.report

    def _is_asked_for(self, place: Place) -> bool:
        first, last = self._options.first, self._options.last
        if self._segments[place.segment].name in self._options.verified:
            return False
        return (first is None or place.update.epoch >= first) and (last is None or place.update.epoch <= last)

    def _fault(self, why: object) -> None:
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
        self._segments.append(found)
        revoked, revoked_at = frozenset[bytes](), 0.0
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
                        revoked, revoked_at = ids, placed.entry.time
                elif isinstance(placed.entry, Update):
                    found.updates += 1
                    number = len(self._segments) - 1
                    self._places.append(Place(number, placed, placed.entry, revoked, revoked_at))
        except StateError as error:
            # A process that was killed leaves its last entry unfinished; so does one that cuts off what follows.
            self._fault(f"{error}; what comes behind it in this file is left out")

    def _check_beginning(self, found: ReadSegment) -> None:
        begin, report, where = found.beginning, self.report, found.name
        # Nothing of the size of the vector is made before there is a file of this size.
        if 2 * found.rules.schema.elements > found.said.size:
            raise StateError(f"{where}: it averages more values than its snapshot has")
        if not report.run_id:
            report.run_id, report.authority = begin.run_id, begin.authority
            if self._options.authority not in (None, begin.authority):
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
        for found in self._segments:
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

    def _line(self) -> Iterator[ReadSegment | Place]:
        """Yield the updates of the run in their order, and each snapshot before the first update behind it."""
        following: dict[bytes, dict[bytes, Place]] = {}
        for place in self._places:
            following.setdefault(place.update.before, {}).setdefault(place.update.after, place)
        snapshots: dict[bytes, list[ReadSegment]] = {}
        for found in self._segments:
            snapshots.setdefault(found.said.state, []).append(found)
        starts = sorted(self._segments, key=lambda found: (found.said.epoch, found.beginning.time))
        passed: set[bytes] = set()
        epoch: int | None = None
        for start in starts:
            state = start.said.state
            if state in passed or (epoch is not None and start.said.epoch < epoch):
                continue
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
                state, epoch = place.update.after, place.update.epoch
        # Updates behind the last hole have no snapshot from which they could be replayed.
        beyond = [place.update for place in self._places if place.update.epoch > (epoch or 0)]
        if beyond:
            self._note_gap(epoch or 0, min(update.epoch for update in beyond) - 1)
            epoch = max(update.epoch for update in beyond)
        self.report.last = epoch or 0

    def _note_gap(self, epoch: int, later: int) -> None:
        """Note what is missing between an update and the next one that can be reached: up to ``later``."""
        held = sorted({place.update.epoch for place in self._places if epoch < place.update.epoch <= later})
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

        epoch = next(iter(ways.values())).update.epoch
        self.report.remarks.append(
            f"update {epoch}: {len(ways)} different updates follow on the one before. The run fell into parts, or began"
            " again at an earlier checkpoint; the part that leads furthest is replayed"
        )
        return ways[max(ways, key=lambda after: (length(after), after))]

    def _within(self, line: Iterable[ReadSegment | Place]) -> Iterator[ReadSegment | Place]:
        """Yield the part of the line that is asked for: from the last snapshot before it, or the last verified one."""
        kept: list[ReadSegment | Place] = []
        first = self._options.first
        for each in line:
            if isinstance(each, Place):
                if self._options.last is not None and each.update.epoch > self._options.last:
                    break
            elif kept and ((first is not None and each.said.epoch <= first) or self._was_verified(kept)):
                self.report.begins_later = True
                kept.clear()
            kept.append(each)
        if kept and isinstance(kept[0], ReadSegment):
            self.report.first = kept[0].said.epoch
        yield from kept

    def _was_verified(self, kept: list[ReadSegment | Place]) -> bool:
        """Return whether all files of a part of the line were verified before."""
        names = {(self._segments[each.segment] if isinstance(each, Place) else each).name for each in kept}
        return names <= self._options.verified

    # ------------------------------------------------------------------ checks and replay

    def _walk(self, line: list[ReadSegment | Place], total: int) -> None:
        """Check the updates of the line, and replay them."""
        checked = self._checked([each for each in line if isinstance(each, Place)])
        replica: Replica | None = None
        whole: dict[str, bool] = {}
        for each in line:
            if isinstance(each, ReadSegment):
                # All that led to this snapshot was replayed, and gave the same.
                replica = self._at_snapshot(each, replica)
                whole[each.name] = replica is not None
                continue
            _, found = next(checked)
            if found is not None:
                self.report.contributed.append((found.contributions.time, found.contributions.samples))
            self._done += 1
            self._on_progress(self._done, total)
            name = self._segments[each.segment].name
            replica = self._taken(replica, each, found)
            if replica is None:
                whole[name] = False
        self.report.replica = replica
        for name, is_whole in whole.items():
            if is_whole:
                self._on_verified(name)

    def _at_snapshot(self, found: ReadSegment, replica: Replica | None) -> Replica | None:
        if self._options.sample is not None or not self._options.averages:
            return None
        try:
            payload = found.segment.payload(found.snapshot)
            check_payload(found.said, payload)
            content = read(payload)
            here = Lineage(found.said.epoch, found.said.state)
            if replica is not None and replica.lineage == here:
                # Its own optimizer goes on, so that a difference here shows in all later snapshots, too.
                if why := replica.difference(content):
                    what = (
                        f"the snapshot of update {here.epoch} is not what the updates before it give: {why}"
                    )
                    self._fault(f"{found.name}: {what}")
                return replica
            fresh = self._replica_of(found, content)
            if replica is not None and replica.lineage.epoch == here.epoch:
                self._check_other_rules(found, replica, fresh)
        except (StateError, ValueError, RuntimeError) as error:
            self._fault(f"{found.name}: {error}")
            return None
        return fresh

    def _check_other_rules(self, found: ReadSegment, replica: Replica, fresh: Replica) -> None:
        """Check a snapshot of the same update and another lineage: the run goes on with other settings."""
        epoch = replica.lineage.epoch
        follows = replica.lineage.with_rules(fresh.origin.rules) == fresh.lineage
        if follows and replica.digest() == fresh.digest():
            self.report.remarks.append(f"the run goes on with other settings from update {epoch}")
        else:
            self._fault(f"{found.name}: the state of update {epoch} is not what the updates before it give")

    def _replica_of(self, found: ReadSegment, content: Content) -> Replica:
        # An archivist without a program does not know the names, and another one may.
        same = (
            each.beginning.names for each in self._segments if each.beginning.shapes == found.beginning.shapes
        )
        fresh = Replica(content, next(filter(None, same), ()), self._options.device)
        if fresh.lineage != Lineage(found.said.epoch, found.said.state):
            raise StateError(f"the snapshot is not of update {found.said.epoch}, as its entry says")
        like = [(tuple(tensor.shape), tensor.dtype) for tensor in fresh.like]
        if like != list(zip(found.rules.schema.shapes, found.rules.schema.dtypes, strict=True)):
            raise StateError("it averages other tensors than its snapshot has")
        return fresh

    def _taken(self, replica: Replica | None, place: Place, found: CheckedUpdate | None) -> Replica | None:
        if replica is None or found is None:
            return None
        if replica.lineage != Lineage(place.update.epoch - 1, place.update.before):
            self._fault(f"update {place.update.epoch}: it does not follow on the state before")
            return None
        try:
            replica.take(found.averaged, found.numbers, found.after)
        except (StateError, ValueError, RuntimeError) as error:
            self._fault(f"update {place.update.epoch}: it cannot be replayed: {error}")
            return None
        self.report.replayed += 1
        return replica

    def _checked(self, places: list[Place]) -> Iterator[tuple[Place, CheckedUpdate | None]]:
        """Yield each update after its check; ``None`` for one that is left out, or in which a fault was found.

        A thread of its own checks the next ones meanwhile: most of it is hashing, which holds no lock of Python's.
        """
        sample = self._options.sample
        with ThreadPoolExecutor(1, "p2pavg-history-check") as pool:
            waiting: list[tuple[Place, Future[CheckedUpdate] | None]] = []
            for place in places:
                is_chosen = sample is None or self._random.random() < sample
                waiting.append((place, pool.submit(self._check_update, place) if is_chosen else None))
                if len(waiting) > AHEAD:
                    yield waiting[0][0], self._result(*waiting.pop(0))
            while waiting:
                yield waiting[0][0], self._result(*waiting.pop(0))

    def _result(self, place: Place, future: Future[CheckedUpdate] | None) -> CheckedUpdate | None:
        segment = self._segments[place.segment]
        if future is None:
            return None
        try:
            found = future.result()
        except P2PAvgError as error:
            why = str(error)
            where = f"update {place.update.epoch}"
            self._fault(f"{segment.name}: {why if where in why else f'{where}: {why}'}")
            return None
        self.report.updates += 1
        self.report.peers |= found.contributions.samples.keys()
        self._credit(segment, place, found.contributions)
        return found

    def _check_update(self, place: Place) -> CheckedUpdate:
        """Check everything that an update proves by itself."""
        found, update = self._segments[place.segment], place.update
        if not self._options.averages:
            return self._check_certificate(place)
        proven = proven_average(update, found.rules.expected())
        if proven.state != update.before:
            raise StateError("its members have signed another state before it")
        self._check_members(proven.roster.members, place)
        payload = found.segment.payload(place.placed)
        parts = parts_of(proven, payload, update.epoch)
        check_payload(update, payload)
        vector = torch.empty(found.rules.schema.elements, dtype=torch.float32, device="cpu")
        decode(proven, parts, found.rules.codec, vector)
        averaged = found.rules.schema.unflatten(vector)
        assert isinstance(averaged, list)
        numbers = read_numbers(update.numbers)
        before = Lineage(update.epoch - 1, proven.state)
        after = before.after(proven.group_id.hex(), digest_of(averaged), numbers_digest(numbers))
        if after.state != update.after:
            raise StateError(
                "the state after it does not follow from the one before, its average and its rates"
            )
        return CheckedUpdate(averaged, numbers, after, found.rules.contributions_in(proven.roster))

    def _check_certificate(self, place: Place) -> CheckedUpdate:
        found, update = self._segments[place.segment], place.update
        try:
            roster = found.rules.committed(update.certificate)
        except RemoteProtocolError as error:
            raise StateError(str(error)) from None
        said = found.rules.contributions_in(roster)
        # Else one certificate could stand for many updates, and be credited as often.
        if said.before != update.before:
            raise StateError("its members have signed another state before it")
        self._check_members(roster.members, place)
        return CheckedUpdate([], (), Lineage(update.epoch, update.after), said)

    def _check_members(self, members: Sequence[Candidate], place: Place) -> None:
        authority = self._segments[place.segment].beginning.authority
        for member in members:
            if why := self._refusal(member, authority, place):
                raise StateError(f"{member.peer_id} was no member of the run: {why}")

    def _refusal(self, member: Candidate, authority: bytes, place: Place) -> str | None:
        if not authority:
            return None
        late = member.deadline > place.revoked_at + REVOKED_GRACE_SECONDS
        return refusal(
            member.certificate,
            authority=authority,
            peer_id=member.peer_id,
            now=member.deadline,
            revoked=place.revoked if late else (),
        )

    def _credit(self, segment: ReadSegment, place: Place, contributions: Contributions) -> None:
        """Compare the credits under a seal with those that the certificates give, once all of them are checked."""
        segment.contributed[place.placed.payload] = replace(contributions, before=b"")
        if len(segment.contributed) < segment.updates:
            return
        found = [segment.contributed[at] for at in sorted(segment.contributed)]
        segment.contributed.clear()
        if segment.seal is None:
            return
        credited = credits_of((said.time, said.samples) for said in found)
        if segment.seal.credits != credits_root(credited):
            self._fault(f"{segment.name}: its seal names other credits than its certificates give")
        else:
            self.report.sealed.append(SealedCredits(segment.beginning, segment.seal, credited))
