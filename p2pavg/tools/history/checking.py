"""Checks a history: each certificate and average, the lineage, and a replay of all updates.

:mod:`p2pavg.tools.history.reading` has checked the chain and the seals before. A check never raises for what it finds:
it reports each fault with its place, and goes on with what is left.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from p2pavg.base.errors import P2PAvgError, RemoteProtocolError, StateError
from p2pavg.group.roster import Roster
from p2pavg.optim.base.recipe import Settings, numbers_digest
from p2pavg.optim.base.state import Lineage, digest_of
from p2pavg.runs.membership.certificate import refusal
from p2pavg.state.average import ProvenAverage, decode, read_numbers
from p2pavg.state.history.entries import Update, credits_of, credits_root
from p2pavg.state.history.rules import Contributions
from p2pavg.state.history.segments import check_payload, parts_of, proven_average
from p2pavg.state.snapshot import Content, read
from p2pavg.tools.history.reading import HistoryReader, HistoryReport, Place, ReadSegment, SealedCredits
from p2pavg.tools.history.replica import Replica

AHEAD = 2  # updates that are read and checked while one is replayed


@dataclass(frozen=True, slots=True)
class CheckedUpdate:
    """An update whose proofs were checked."""

    averaged: list[torch.Tensor]
    numbers: Settings
    after: Lineage
    contributions: Contributions


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The choice of the updates to check, and of the checks.

    Args:
        first, last: updates; ``None``: all.
        sample: fraction of the updates of which certificate and average are checked, and nothing is replayed; ``None``:
            all, and they are replayed.
        averages: false to check certificates alone, and neither averages nor what they lead to.
        seed: of the choice of a sample.
        run: id of the run and public key of its authority, if they are known.
        verified: names of segments that were verified before, and have not changed since.
        device: on which the updates are replayed.
        on_progress: called with the number of updates that are done, and that of all.
    """

    first: int | None = None
    last: int | None = None
    sample: float | None = None
    averages: bool = True
    seed: int | None = None
    run: tuple[str, bytes] | None = None
    verified: frozenset[str] = frozenset()
    device: str = "cpu"
    on_progress: Callable[[int, int], None] = lambda _done, _total: None


def check_history(directory: Path, options: CheckOptions = CheckOptions()) -> HistoryReport:
    """Check a history.

    Raises:
        StateError: there is no history in this folder.
    """
    with closing(HistoryReader(directory, options.run)) as reader:
        return _Check(reader, options).run()


class _Check:
    def __init__(self, reader: HistoryReader, options: CheckOptions) -> None:
        self._reader, self._options = reader, options
        self._segments = reader.segments
        self.report = reader.report
        self._random = random.Random(options.seed)
        self._done = 0

    def run(self) -> HistoryReport:
        """Do all of it."""
        # The files are only indexed up to here. What follows reads each average once, in the order of the updates.
        whole = list(self._reader.line())
        line = list(self._within(whole))
        on_line = {id(each) for each in whole}
        places = self._reader.places
        rest = [place for place in places if id(place) not in on_line and self._is_asked_for(place)]
        total = sum(isinstance(each, Place) for each in line) + len(rest)
        self._walk(line, total)
        # What another archivist has, or what was replaced after a fork, must be genuine, too.
        for _ in self._checked(rest):
            self._done += 1
            self._options.on_progress(self._done, total)
        self._check_rest(whole)
        return self.report

    def _check_rest(self, line: Sequence[ReadSegment | Place]) -> None:
        """Check what no update leads to: snapshots of their own, and seals on no update."""
        walked = {id(each) for each in line}
        for found in self._segments:
            if not found.updates:
                self._compare_credits(found, ())
            if id(found) not in walked:
                self.report.remarks.append(
                    f"{found.name}: no update leads to its snapshot of update {found.said.epoch}"
                )
                if self._options.sample is None and self._options.averages:
                    try:
                        self._content(found)
                    except StateError as error:
                        self._fault(f"{found.name}: {error}")

    def _is_asked_for(self, place: Place) -> bool:
        first, last = self._options.first, self._options.last
        if self._segments[place.segment].name in self._options.verified:
            return False
        return (first is None or place.epoch >= first) and (last is None or place.epoch <= last)

    def _fault(self, why: object) -> None:
        self.report.faults.append(str(why))

    def _within(self, line: Iterable[ReadSegment | Place]) -> Iterator[ReadSegment | Place]:
        """Yield the part of the line that is asked for: from the last snapshot before it, or the last verified one."""
        kept: list[ReadSegment | Place] = []
        first = self._options.first
        for each in line:
            if isinstance(each, Place):
                if self._options.last is not None and each.epoch > self._options.last:
                    break
            elif kept and (
                (first is not None and each.said.epoch <= first) or self._was_verified(each, kept)
            ):
                self.report.begins_later = True
                kept.clear()
            kept.append(each)
        if kept and isinstance(kept[0], ReadSegment):
            self.report.first = kept[0].said.epoch
        yield from kept

    def _was_verified(self, snapshot: ReadSegment, kept: list[ReadSegment | Place]) -> bool:
        """Return whether a snapshot, and all files of the line before it since the last one, were verified before."""
        # The snapshot itself, too: what comes behind it is replayed from there, and a new file may have a false one.
        if snapshot.name not in self._options.verified:
            return False
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
                # A snapshot is believed only if there is nothing before it that could be replayed.
                # All that led to this snapshot was replayed, and gave the same.
                replica = self._at_snapshot(each, replica)
                whole[each.name] = replica is not None
                continue
            found = next(checked)
            if found is not None:
                self.report.contributed.add(found.contributions.time, found.contributions.samples)
            self._done += 1
            self._options.on_progress(self._done, total)
            name = self._segments[each.segment].name
            replica = self._taken(replica, each, found)
            if replica is None:
                whole[name] = False
        self.report.replica = replica
        if self._options.last is not None or self._options.first is not None:
            return  # the rest of these files was not looked at
        self.report.verified += [name for name, is_whole in whole.items() if is_whole]

    def _at_snapshot(self, found: ReadSegment, replica: Replica | None) -> Replica | None:
        if self._options.sample is not None or not self._options.averages:
            return None
        try:
            return self._compared(found, replica)
        # A snapshot may be anything that its archivist could think of, and torch's optimizers trust what they load.
        except Exception as error:  # noqa: BLE001 - whatever it raises is the snapshot's fault, and is told as one
            self._fault(f"{found.name}: {_told(error)}")
            return None

    def _content(self, found: ReadSegment) -> Content:
        payload = self._reader.file(found.path).payload(found.snapshot)
        check_payload(found.said, payload)
        return read(payload)

    def _compared(self, found: ReadSegment, replica: Replica | None) -> Replica:
        content, here = self._content(found), Lineage(found.said.epoch, found.said.state)
        if replica is not None and replica.lineage == here:
            # Its own optimizer goes on, so that a difference here shows in all later snapshots, too.
            if why := replica.difference(content):
                what = f"the snapshot of update {here.epoch} is not what the updates before it give: {why}"
                self._fault(f"{found.name}: {what}")
            return replica
        fresh = self._replica_of(found, content)
        if replica is not None and replica.lineage.epoch == here.epoch:
            self._check_other_rules(found, replica, fresh)
        elif fresh.unproven and found.name not in self._options.verified:
            self.report.remarks.append(f"{found.name}: {fresh.unproven} is its archivist's word")
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
        if replica.lineage != Lineage(place.epoch - 1, place.before):
            self._fault(f"update {place.epoch}: it does not follow on the state before")
            return None
        try:
            replica.take(found.averaged, found.numbers, found.after)
        except Exception as error:  # noqa: BLE001 - as above: the options and rates are the archivist's, too
            self._fault(f"update {place.epoch}: it cannot be replayed: {_told(error)}")
            return None
        self.report.replayed += 1
        return replica

    def _checked(self, places: list[Place]) -> Iterator[CheckedUpdate | None]:
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
                    yield self._result(*waiting.pop(0))
            while waiting:
                yield self._result(*waiting.pop(0))

    def _result(self, place: Place, future: Future[CheckedUpdate] | None) -> CheckedUpdate | None:
        segment = self._segments[place.segment]
        if future is None:
            return None
        try:
            found = future.result()
        except P2PAvgError as error:
            why = str(error)
            where = f"update {place.epoch}"
            self._fault(f"{segment.name}: {why if where in why else f'{where}: {why}'}")
            return None
        self.report.updates += 1
        self.report.peers |= found.contributions.samples.keys()
        self._credit(segment, place, found.contributions)
        return found

    def _check_update(self, place: Place) -> CheckedUpdate:
        """Check everything that an update proves by itself."""
        # Its entry is read again: the index has only its place.
        found = self._segments[place.segment]
        placed = self._reader.file(found.path).entry_at(place.at)
        update = placed.entry
        if not isinstance(update, Update):
            raise StateError(f"update {place.epoch}: the file was changed while it was checked")
        proven: ProvenAverage | None = None
        if self._options.averages:
            proven = proven_average(update, found.rules.expected())
            roster = proven.roster
        else:
            try:
                roster = found.rules.committed(update.certificate)
            except RemoteProtocolError as error:
                raise StateError(str(error)) from None
        said = found.rules.contributions_in(roster)
        # Else one certificate could stand for many updates, and be credited as often.
        if said.before != update.before:
            raise StateError("its members have signed another state before it")
        self._check_members(roster, said.time, place)
        if proven is None:
            return CheckedUpdate([], (), Lineage(update.epoch, update.after), said)
        payload = self._reader.file(found.path).payload(placed)
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
        return CheckedUpdate(averaged, numbers, after, said)

    def _check_members(self, roster: Roster, time: float, place: Place) -> None:
        authority = self._segments[place.segment].beginning.authority
        if not authority:
            return
        revoked = self._reader.revocations.at(place.epoch, time)
        for member in roster.members:
            # By the median of all clocks: a member of its own could sign a moment at which its certificate was good.
            why = refusal(
                member.certificate, authority=authority, peer_id=member.peer_id, now=time, revoked=revoked
            )
            if why:
                raise StateError(f"{member.peer_id} was no member of the run: {why}")

    def _credit(self, segment: ReadSegment, place: Place, contributions: Contributions) -> None:
        """Compare the credits under a seal with those that the certificates give, once all of them are checked."""
        # Sums of floats depend on the order, so they are made in that of the file, as the archivist made them.
        segment.contributed[place.at] = replace(contributions, before=b"")
        if len(segment.contributed) < segment.updates:
            return
        found = [segment.contributed[at] for at in sorted(segment.contributed)]
        segment.contributed.clear()
        self._compare_credits(segment, found)

    def _compare_credits(self, segment: ReadSegment, found: Sequence[Contributions]) -> None:
        if segment.seal is None:
            return
        credited = credits_of((said.time, said.samples) for said in found)
        if segment.seal.credits != credits_root(credited):
            self._fault(f"{segment.name}: its seal names other credits than its certificates give")
        else:
            self.report.sealed.append(SealedCredits(segment.beginning, segment.seal, credited))


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, P2PAvgError) else repr(error)
