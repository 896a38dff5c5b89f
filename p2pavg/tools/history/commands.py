"""The work of the commands ``p2pavg history …``."""

from __future__ import annotations

import hashlib
import html
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import trio
import typer

from p2pavg.base.errors import ConfigError, StateError
from p2pavg.base.files import PUBLIC, create_file, keep_file, naming_errors, replacing
from p2pavg.runs.membership.run_file import read_run_file
from p2pavg.runs.records.identity import load_seed
from p2pavg.state.history.receipts import Receipt, read_receipt, read_same, receipt_part, same_peers
from p2pavg.state.history.segments import SUFFIX, RecoveredSegment, read_segment, segment_files
from p2pavg.state.layout import read_header
from p2pavg.state.snapshot import tensors_in
from p2pavg.tools.history.checking import CheckOptions, check_history
from p2pavg.tools.history.credits_page import (
    CreditedPeer,
    as_csv,
    as_html,
    as_json,
    as_table,
    contributors,
    date_text,
)
from p2pavg.tools.history.reading import HistoryReport
from p2pavg.tools.history.replica import Replica
from p2pavg.tools.jobs.environment import cache_folder
from p2pavg_dht import Ed25519Signer

_SHOWN_HOLES = 5
_PIECE_BYTES = 2**20
_MODEL_PREFIXES = ("common/parameter/", "common/anchor/", "common/buffer/")


def run_in(file: Path | None) -> tuple[str, bytes] | None:
    """Return the id and the authority of a run file."""
    if file is None:
        return None
    run = read_run_file(file)
    return run.run_id, run.authority


def verify(
    folder: Path,
    *,
    run: Path | None = None,
    model: Path | None = None,
    first: int | None = None,
    last: int | None = None,
    sample: float | None = None,
    again: bool = False,
    device: str = "cpu",
) -> tuple[list[str], bool]:
    """Verify a history; return what was found, line by line, and whether nothing is wrong.

    Raises:
        StateError: there is no history in the folder.
        ConfigError: an option cannot be used; the message says why.
    """
    if model is not None and sample is not None:
        raise ConfigError("--model needs a replay: leave out --sample")
    if first is not None and last is not None and first > last:
        raise ConfigError(f"--from {first} is behind --to {last}")
    try:
        torch.empty(0, dtype=torch.float32, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {device} cannot be used: {error}") from None
    kept = VerifiedSegments(folder)
    with _progress() as on_progress:
        options = CheckOptions(
            first=first,
            last=last,
            sample=sample,
            run=run_in(run),
            verified=frozenset() if again or sample is not None else kept.names(),
            device=device,
            on_progress=on_progress,
        )
        report = check_history(folder, options)
    if not report.faults:
        kept.keep(report.verified)
    lines = list(_said(report, options))
    if model is not None:
        differences = _differences(report.replica, model)
        lines += differences or [f"the parameters in {model} are these"]
        return lines, not report.faults and not differences
    return lines, not report.faults


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    with typer.progressbar(length=1, file=sys.stderr, label="updates") as bar:

        def show(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        yield show


def _said(report: HistoryReport, options: CheckOptions) -> Iterator[str]:
    authority = f"authority {report.authority.hex()}" if report.authority else "without an authority"
    yield f"run {report.run_id!r}, {authority}; sealed by {', '.join(sorted(report.archivists)) or 'no archivist'}"
    if options.verified and report.begins_later:
        yield "segments that this machine has verified before are not verified again; --again does so"
    how = f"replayed to {report.replica.digest().hex()}" if report.replica is not None else "not replayed"
    if report.replica is not None and report.replayed < report.updates:
        how = f"{report.replayed:,} of them {how}"
    first = "none" if report.first is None else f"{report.first:,}"
    yield (
        f"{report.updates:,} updates of {len(report.peers)} peers, from the snapshot of update {first} to update"
        f" {report.last:,}: {how}"
    )
    for peer_id, reason in sorted(report.excluded.items()):
        yield f"{peer_id} was excluded: {reason}"
    for begin, end in report.holes[:_SHOWN_HOLES]:
        yield f"missing: {f'update {begin}' if begin == end else f'updates {begin} to {end}'}"
    if len(report.holes) > _SHOWN_HOLES:
        yield f"missing: {len(report.holes) - _SHOWN_HOLES} more holes"
    if report.holes:
        yield "the snapshot behind a hole is its archivist's word: no update leads to it"
    yield from report.remarks
    yield from (f"WRONG: {fault}" for fault in report.faults)
    if not report.faults:
        yield (
            "nothing is wrong. This proves what the members of each round have averaged and signed. It does not prove"
            " that gradients came from honest data, or that two peers are two people"
        )


def _differences(replica: Replica | None, file: Path) -> list[str]:
    """Return what is different between the replayed state and a model's file."""
    if replica is None:
        return [f"{file} is not compared: the history could not be replayed to its end"]
    data = memoryview(_bytes_of(file))
    try:
        found = tensors_in(data, read_header(data))
    except StateError as error:
        raise ConfigError(f"{file} is no file of safetensors: {error}") from None
    if any(name.startswith("common/") for name in found):
        # A checkpoint has also what is its peer's own.
        found = {
            name.removeprefix(prefix): tensor
            for prefix in _MODEL_PREFIXES
            for name, tensor in found.items()
            if name.startswith(prefix)
        }
    mine: dict[str, torch.Tensor] = dict(zip(replica.names, replica.parameters, strict=True))
    mine |= {name.removeprefix("buffer/"): tensor for name, tensor in replica.buffers.items()}
    if all(name.startswith("parameter ") for name in mine if not name.startswith("buffer")):
        return _without_names(list(mine.values()), found)
    lines = [f"{file} has no {name!r}" for name in mine if name not in found]
    lines += [
        f"{file}: {name!r} is not what the history gives"
        for name, tensor in mine.items()
        if name in found and not _is_same(tensor, found[name])
    ]
    if more := sorted(found.keys() - mine.keys()):
        lines += [
            f"{file}: {name!r} is in no history: it was not trained, or is named twice" for name in more
        ]
    return lines


def _without_names(mine: list[torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    """Compare tensors by their values alone: the archivist did not know the model."""
    left = dict(found)
    lines = []
    for number, tensor in enumerate(mine):
        name = next((name for name, its in left.items() if _is_same(tensor, its)), None)
        if name is None:
            lines.append(f"parameter {number}, of shape {tuple(tensor.shape)}, is not in the file")
        else:
            del left[name]
    return lines + [f"{name!r} is not what the history gives" for name in left]


def _is_same(mine: torch.Tensor, its: torch.Tensor) -> bool:
    # An exported model may have another dtype.
    mine = mine.detach().cpu().to(its.dtype)
    return mine.shape == its.shape and torch.equal(
        mine.contiguous().reshape(-1).view(torch.uint8), its.contiguous().reshape(-1).view(torch.uint8)
    )


class VerifiedSegments:
    """The segments of a history that were verified on this machine before.

    They are remembered in this user's cache, and not beside the history: a stranger may have made that.
    """

    def __init__(self, folder: Path) -> None:
        # Taken before the check: what an archivist appends meanwhile was not verified. The time of the last change
        # cannot be set by a program, unlike that of the last write.
        self._marks: dict[str, list[int]] = {}
        for path in folder.glob(f"*{SUFFIX}"):
            with suppress(OSError):  # it was removed meanwhile
                found = path.lstat()
                mark = [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
                self._marks[path.name] = mark
        name = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()
        self._file = cache_folder() / "history" / f"{name}.json"
        self._kept: dict[str, list[int]] = {}
        try:
            said = json.loads(self._file.read_text(encoding="utf-8"))
            self._kept = {str(name): list(map(int, mark)) for name, mark in said.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            self._kept = {}  # then everything is verified again

    def names(self) -> frozenset[str]:
        """Return those that have not changed since."""
        return frozenset(name for name, mark in self._kept.items() if self._marks.get(name) == mark)

    def keep(self, names: Sequence[str]) -> None:
        """Remember some more."""
        self._kept |= {name: self._marks[name] for name in names if name in self._marks}
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            keep_file(self._file, json.dumps(self._kept).encode(), mode=0o600)
        except (OSError, ConfigError) as error:
            typer.echo(f"p2pavg: the next call verifies everything again: {error}", err=True)


# Credits.


def _credited(
    folder: Path, run: Path | None, same: Sequence[Path]
) -> tuple[HistoryReport, list[CreditedPeer]]:
    statements = [read_same(_bytes_of(file)) for file in same]
    with _progress() as on_progress:
        options = CheckOptions(run=run_in(run), averages=False, on_progress=on_progress)
        report = check_history(folder, options)
    found = report.contributed.credited()
    return report, contributors(found, report.excluded, statements)


def write_credits(
    folder: Path, form: str, output: Path | None, *, run: Path | None = None, same: Sequence[Path] = ()
) -> tuple[str, list[str]]:
    """Return the credits as text, unless they are written to a file, and what is wrong in the history.

    Raises:
        StateError: there is no history in the folder, or a statement is not genuine.
        ConfigError: the format is unknown, or the file cannot be written.
    """
    if form not in ("table", "csv", "json", "html"):
        raise ConfigError(f"--format must be table, csv, json or html, got {form!r}")
    report, found = _credited(folder, run, same)
    if form == "json":
        text = as_json(report.run_id, report.authority, report.first or 0, report.last, found)
    elif form == "html":
        text = as_html(report.run_id, found)
    else:
        text = as_csv(found) if form == "csv" else as_table(found)
    if output is None:
        return text, report.faults
    keep_file(output, text.encode(), mode=PUBLIC)
    return f"made {output}: {len(found)} contributors\n", report.faults


def compare_credits(
    folder: Path, file: Path, *, run: Path | None = None, same: Sequence[Path] = ()
) -> list[str]:
    """Return the differences between credits in JSON and those of a history."""
    report, found = _credited(folder, run, same)
    try:
        said = json.loads(_bytes_of(file))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} has no credits in JSON: {error!r}") from None
    mine = json.loads(as_json(report.run_id, report.authority, report.first or 0, report.last, found))
    if said == mine:
        return list(report.faults)
    lines = list(report.faults)
    listed = said.get("contributors") if type(said) is dict else None
    its = listed if type(listed) is list else []
    own = mine["contributors"]
    lines += [
        f"{file}: {each['peers'][0]} has other credits than the history gives"
        for each in own
        if each not in its
    ]
    if more := sum(each not in own for each in its):
        lines.append(f"{file}: {more} of its entries are not in the history")
    return lines if lines != report.faults else [*lines, f"{file} differs from the credits of the history"]


class CreditsPage:
    """The page of a monitor with the credits of a history, made anew when its files have changed.

    Args:
        folder: of the history.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: tuple[list[tuple[str, int]], bytes] | None = None
        self._turn = trio.Lock()

    async def __call__(self) -> tuple[str, bytes]:
        """Return the media type and the content."""
        # One at a time, in a thread: certificates of many updates take seconds.
        async with self._turn:
            return "text/html", await trio.to_thread.run_sync(self._content)

    def _content(self) -> bytes:
        try:
            files = [(path.name, path.stat().st_size) for path in segment_files(self._folder)]
            if self._made is None or self._made[0] != files:
                report, found = _credited(self._folder, None, ())
                text = as_html(report.run_id, found, '<link rel="stylesheet" href="monitor.css">')
                faults = "".join(f"<p>{html.escape(fault)}</p>" for fault in report.faults)
                self._made = (files, f"{text}{faults}".encode())
        except (StateError, OSError) as error:
            return f"<!doctype html><p>{html.escape(str(error))}</p>".encode()
        return self._made[1]


# Receipts.


def write_receipt(peer_id: str, folder: Path, output: Path | None) -> list[str]:
    """Write the receipt of a peer from the archivist that has most of it; return what it says.

    Raises:
        StateError: the history has faults, or no sealed segment with a contribution of this peer.
    """
    report = check_history(folder, CheckOptions(averages=False))
    if report.faults:
        raise StateError(f"no receipt from a history that is wrong: {report.faults[0]}")
    best: Receipt | None = None
    for archivist in sorted(report.archivists):
        sealed = (each for each in report.sealed if each.seal.archivist == archivist)
        segments = sorted(sealed, key=lambda each: each.seal.number)
        parts = [receipt_part(each.seal, each.credited, peer_id) for each in segments]
        given = tuple(part for part in parts if part is not None)
        if given and (best is None or len(given) > len(best.parts)):
            best = Receipt(
                run_id=report.run_id,
                authority=report.authority,
                archivist=archivist,
                certificate=segments[0].beginning.certificate,
                peer_id=peer_id,
                parts=given,
            )
    if best is None:
        raise StateError(
            f"no sealed segment has a contribution of {peer_id}. An archivist seals 1,024 entries at a time, and the"
            " rest when it ends"
        )
    file = Path(f"{peer_id}.receipt") if output is None else output
    data = best.encode()
    keep_file(file, data, mode=PUBLIC)
    return [f"made {file}: {len(data):,} bytes", *_of_receipt(best)]


def check_receipt(file: Path) -> list[str]:
    """Check a receipt, and return what it proves.

    Raises:
        StateError: something in it is wrong.
    """
    return _of_receipt(read_receipt(_bytes_of(file)))


def _of_receipt(receipt: Receipt) -> list[str]:
    days = [day for part in receipt.parts for day in part.credit.days]
    updates, samples = sum(day.updates for day in days), sum(day.samples for day in days)
    first, last = min(day.day for day in days), max(day.day for day in days)
    authority = receipt.authority.hex()
    of = f"with the authority {authority}" if authority else "without an authority"
    return [
        f"{receipt.peer_id} contributed {samples:,.0f} samples to {updates:,} updates of run {receipt.run_id!r},"
        f" {of}, from {date_text(first)} to {date_text(last)}",
        f"signed by the archivist {receipt.archivist} with {len(receipt.parts)} seals",
    ]


def _bytes_of(file: Path) -> bytes:
    with naming_errors(f"cannot read {file}", file):
        return file.read_bytes()


# Several archivists.


def merge(output: Path, folders: Sequence[Path]) -> list[str]:
    """Copy segments of several histories into one folder, as far as they have updates that are not there yet.

    Raises:
        StateError: a folder has no history, one in which something is wrong, or they are of different runs.
        ConfigError: the folder cannot be written.
    """
    with naming_errors(f"cannot make {output}", output):
        output.mkdir(parents=True, exist_ok=True)
    known: set[tuple[bytes, bytes]] = set()
    there = {path.name: path for path in segment_files(output)}
    for path in there.values():
        if (held := read_segment(path)) is not None:
            known |= _updates_in(held)
    runs: set[tuple[str, bytes]] = set()
    waiting: list[tuple[Path, bool]] = []
    for folder in [*([output] if there else []), *folders]:
        # Updates count only if their members have signed them: made-up ones would keep the genuine ones out.
        report = check_history(folder, CheckOptions(averages=False))
        if report.faults:
            raise StateError(f"{folder} is not merged: {report.faults[0]}")
        runs.add((report.run_id, report.authority))
        if folder is not output:
            for path in segment_files(folder):
                if (found := read_segment(path)) is not None:  # else it has not even a snapshot
                    waiting.append((path, bool(found.beginning.names)))
    if len(runs) > 1:
        raise StateError(
            f"these histories are of {len(runs)} different runs: {', '.join(sorted(run for run, _ in runs))}"
        )
    copied = 0
    # Those that know the model's names come first, and of the same segment the longest.
    waiting.sort(key=lambda each: (not each[1], each[0].name, -each[0].stat().st_size))
    for path, _ in waiting:
        # Read again: the updates of all folders together may need more memory than there is.
        found = read_segment(path)
        more = set() if found is None else _updates_in(found)
        if path.name in there:
            # The same segment may be there from an earlier time, when it was shorter. Nothing else is replaced.
            if not _goes_on(there[path.name], path):
                continue
        elif more <= known:
            continue
        known |= more
        target = output / path.name
        with (
            naming_errors(f"cannot copy to {target}", target),
            path.open("rb") as opened,
            replacing(target, mode=PUBLIC) as copy,
        ):
            shutil.copyfileobj(opened, copy)
        there[path.name] = target
        copied += 1
    report = check_history(output, CheckOptions(averages=False))
    missing = [f"missing: updates {first} to {last}" for first, last in report.holes]
    first = 0 if report.first is None else report.first
    return [
        f"copied {copied} segments; {output} has updates {first} to {report.last}",
        *(missing or ["no update between these is missing"]),
        *(f"WRONG: {fault}" for fault in report.faults),
    ]


def _updates_in(found: RecoveredSegment) -> set[tuple[bytes, bytes]]:
    """Return the updates of a segment, by the states before and after."""
    return {(update.before, update.after) for update in found.updates}


def _goes_on(one: Path, other: Path) -> bool:
    """Return whether a file begins with all bytes of another one, and is longer."""
    size = one.stat().st_size
    if other.stat().st_size <= size:
        return False
    with one.open("rb") as shorter, other.open("rb") as longer:
        return all(
            shorter.read(_PIECE_BYTES) == longer.read(min(_PIECE_BYTES, size - at))
            for at in range(0, size, _PIECE_BYTES)
        )


def write_same(output: Path, identities: Sequence[Path]) -> str:
    """Write the statement that several identities are one contributor; return a line about it.

    Raises:
        IdentityError: a file holds no key.
        ConfigError: the file exists or cannot be written.
    """
    said = same_peers([Ed25519Signer(load_seed(file)) for file in identities])
    with naming_errors(f"cannot write {output}", output):
        try:
            create_file(output, said.encode(), mode=PUBLIC)
        except FileExistsError:
            raise ConfigError(f"{output} exists; choose another name") from None
    return f"made {output}: {len(said.peers)} identities of one contributor"
