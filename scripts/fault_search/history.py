"""Histories that are tampered with, and archivists that are killed: what is found, and what is kept.

scripts/faults history                            1,000 tamperings, 100 kills
scripts/faults history --tamper 50 --kills 5      fewer
scripts/faults history --seed 7                   other ones

Each tampering changes a copy of one good history, of which nothing may be reported. It must be found: by one who has
no keys, and by an archivist that lies and seals what it has changed. Not among them is a history that ends earlier, or
begins later: it is a history of less.

An archivist writes as fast as it can and is killed at a random moment, again and again in one folder. What is whole
must be kept, and go on; at the end everything is verified and replayed. The same with a file that may not grow.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from p2pavg.base.errors import StateError
from p2pavg.state.history.entries import MAGIC, Entry, Seal, Snapshot, Update
from p2pavg.state.history.segments import recover, segment_files
from p2pavg.state.tree import chunk_digests, root_of
from p2pavg.tools.history.checking import CheckOptions, check_history
from p2pavg.tools.history.reading import HistoryReport
from scripts.fault_search.made_history import (
    ARCHIVIST,
    RUN_ID,
    MadeArchivist,
    MadeRun,
    Piece,
    first_link,
    put_together,
    raw_entries,
    record,
    taken_apart,
    updates_in,
)

SEGMENTS, UPDATES = 3, 8
STRANGER = 77
"""Number of a signer that is in no round."""
_SMALL_FILE = 200_000  # bytes, in which some tens of updates fit
_KILLS_OF_ONE = 20
"""Kills of one history: each writer makes all of its updates again, so a long one takes ever more time."""

Tampering = Callable[[list[Path], random.Random], str]
"""Changes a history, and returns a part of what must be reported."""


def good_history(directory: Path) -> MadeRun:
    """Make a history of three segments of eight updates; return its run."""
    run = MadeRun()
    for _ in range(SEGMENTS):
        record(run, directory, UPDATES)
    return run


def _update(path: Path, rng: random.Random) -> tuple[list[Piece], int, Update]:
    pieces = taken_apart(path)
    place = rng.choice(list(updates_in(pieces)))
    entry = pieces[place].entry
    assert isinstance(entry, Update)
    return pieces, place, entry


def _again(path: Path, pieces: list[Piece], *, number: int | None = ARCHIVIST, lie: bytes = b"") -> None:
    """Write a segment with a chain that is right; one who has the archivist's key seals it, too."""
    put_together(path, pieces, first_link(path), number, lie=lie)


def flip_a_bit(files: list[Path], rng: random.Random) -> str:
    """Change one bit anywhere."""
    path = rng.choice(files)
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return path.name


def flip_a_bit_of_an_average(files: list[Path], rng: random.Random) -> str:
    """Change one bit of an average."""
    path = rng.choice(files)
    pieces, place, update = _update(path, rng)
    payload = bytearray(pieces[place].payload)
    payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
    pieces[place] = Piece(update, bytes(payload))
    _again(path, pieces, number=None)
    return f"update {update.epoch}: part"


def swap_entries(files: list[Path], rng: random.Random) -> str:
    """Swap two entries as they are."""
    path = rng.choice(files)
    entries = raw_entries(path)
    first, second = rng.sample(range(1, len(entries)), 2)
    entries[first], entries[second] = entries[second], entries[first]
    path.write_bytes(MAGIC + b"".join(entries))
    return f"entry {min(first, second)}"


def remove_an_entry(files: list[Path], rng: random.Random) -> str:
    """Remove an entry, and leave the others as they are."""
    path = rng.choice(files)
    entries = raw_entries(path)
    place = rng.randrange(1, len(entries) - 1)
    path.write_bytes(MAGIC + b"".join([*entries[:place], *entries[place + 1 :]]))
    return f"entry {place}"


def remove_an_update_and_seal(files: list[Path], rng: random.Random) -> str:
    """Remove an update between others, with a new chain and the archivist's seal."""
    path = rng.choice(files)
    pieces = taken_apart(path)
    place = rng.choice(list(updates_in(pieces))[:-1])
    entry = pieces[place].entry
    assert isinstance(entry, Update)
    _again(path, [*pieces[:place], *pieces[place + 1 :]])
    return f"update {entry.epoch}"  # as a hole, or as what does not follow


def swap_updates_and_seal(files: list[Path], rng: random.Random) -> str:
    """Give two updates each other's certificate and average, with a new chain and the archivist's seal."""
    path = rng.choice(files)
    pieces = taken_apart(path)
    first, second = sorted(rng.sample(list(updates_in(pieces)), 2))
    one, other = pieces[first], pieces[second]
    assert isinstance(one.entry, Update)
    assert isinstance(other.entry, Update)
    pieces[first] = Piece(
        _with(one.entry, other.entry, "certificate", "digests", "numbers", "digest", "size"), other.payload
    )
    pieces[second] = Piece(
        _with(other.entry, one.entry, "certificate", "digests", "numbers", "digest", "size"), one.payload
    )
    _again(path, pieces)
    return f"update {one.entry.epoch}"


def certificate_of_another_round(files: list[Path], rng: random.Random) -> str:
    """Give an update the certificate of another one, with a new chain and the archivist's seal."""
    path = rng.choice(files)
    pieces, place, update = _update(path, rng)
    others = [piece.entry for piece in taken_apart(path) if isinstance(piece.entry, Update)]
    other = rng.choice([each for each in others if each.epoch != update.epoch])
    pieces[place] = Piece(_with(update, other, "certificate"), pieces[place].payload)
    _again(path, pieces)
    return f"update {update.epoch}"


def other_rates(files: list[Path], rng: random.Random) -> str:
    """Say that an update was taken with other rates."""
    path = rng.choice(files)
    pieces, place, update = _update(path, rng)
    changed = MadeRun()
    changed.optimizer.param_groups[0]["lr"] = 0.011
    average, _ = changed.round()
    pieces[place] = Piece(_with(update, None, numbers=average.numbers), pieces[place].payload)
    _again(path, pieces)
    return f"update {update.epoch}: the state after it"


def exchange_a_snapshot(files: list[Path], rng: random.Random) -> str:
    """Put another snapshot with a root of its own in the place of one, with the archivist's seal."""
    path = rng.choice(files)
    pieces = taken_apart(path)
    run = MadeRun(seed=1 + rng.randrange(1000))
    data = bytes(run.snapshot())
    entry = pieces[1].entry
    assert isinstance(entry, Snapshot)
    root = root_of(chunk_digests(data), len(data))
    pieces[1] = Piece(_with(entry, None, root=root, size=len(data)), data)
    _again(path, pieces)
    return "snapshot"


def change_a_snapshot(files: list[Path], rng: random.Random) -> str:
    """Change one bit of a parameter in a snapshot, with the right root and the archivist's seal."""
    path = rng.choice(files)
    pieces = taken_apart(path)
    entry = pieces[1].entry
    assert isinstance(entry, Snapshot)
    data = bytearray(pieces[1].payload)
    # The tensors are behind the header. The lowest bit of a value stays finite.
    at = len(data) - 4 * (1 + rng.randrange(400))
    data[at] ^= 1
    root = root_of(chunk_digests(data), len(data))
    pieces[1] = Piece(_with(entry, None, root=root), bytes(data))
    _again(path, pieces)
    return "snapshot" if path != files[0] else ""


def forge_a_seal(files: list[Path], rng: random.Random) -> str:
    """Seal a segment with another key than the archivist's."""
    path = rng.choice(files)
    pieces = taken_apart(path)
    entry = pieces[-1].entry
    assert isinstance(entry, Seal)
    pieces[-1] = Piece(_with(entry, None, signature=rng.randbytes(64)), b"")
    _again(path, pieces, number=None)
    return f"{path.name}: its seal is forged"


def seal_by_a_stranger(files: list[Path], rng: random.Random) -> str:
    """Seal a segment in the name of one that is no archivist of it."""
    path = rng.choice(files)
    _again(path, taken_apart(path), number=STRANGER)
    return f"{path.name}: its seal is that of another segment"


def edit_credits(files: list[Path], rng: random.Random) -> str:
    """Let the archivist seal other credits than the certificates give."""
    path = rng.choice(files)
    _again(path, taken_apart(path), lie=rng.randbytes(32))
    return f"{path.name}: its seal names other credits"


def remove_a_segment(files: list[Path], _rng: random.Random) -> str:
    """Remove a segment between others."""
    files[1].unlink()
    return f"updates {UPDATES + 1} to {2 * UPDATES}"


def another_runs_segment(files: list[Path], _rng: random.Random) -> str:
    """Put a segment of another run among the others."""
    with tempfile.TemporaryDirectory() as folder:
        record(MadeRun(has_authority=False), Path(folder), 2)
        (found,) = segment_files(Path(folder))
        shutil.copyfile(found, files[-1])
    return f"{files[-1].name}: it is of another run"


def cut_a_segment(files: list[Path], rng: random.Random) -> str:
    """Cut off the end of a segment between others."""
    path = rng.choice(files[:-1])
    data = path.read_bytes()
    # Behind its snapshot. Without that, nothing of it is left, and a history without its first segment begins later.
    begin = len(MAGIC) + sum(map(len, raw_entries(path)[:2]))
    path.write_bytes(data[: rng.randrange(begin, len(data) - 1)])
    return ""


def _with(entry: Entry, other: Entry | None, *names: str, **values: object) -> Entry:
    """Return an entry with some fields of another one, or with other values."""
    changed: Entry = msgspec.structs.replace(
        entry, **({name: getattr(other, name) for name in names} | values)
    )
    return changed


TAMPERINGS: dict[str, Tampering] = {
    tamper.__name__.replace("_", " "): tamper
    for tamper in (
        flip_a_bit,
        flip_a_bit_of_an_average,
        swap_entries,
        remove_an_entry,
        remove_an_update_and_seal,
        swap_updates_and_seal,
        certificate_of_another_round,
        other_rates,
        exchange_a_snapshot,
        change_a_snapshot,
        forge_a_seal,
        seal_by_a_stranger,
        edit_credits,
        remove_a_segment,
        another_runs_segment,
        cut_a_segment,
    )
}


def reported(directory: Path, authority: bytes) -> list[str]:
    """Return everything that is wrong or missing in a history, as a reader sees it."""
    try:
        report = check_history(directory, CheckOptions(run=(RUN_ID, authority)))
    except StateError as error:
        return [str(error)]
    holes = [
        f"missing: update {first}" if first == last else f"missing: updates {first} to {last}"
        for first, last in report.holes
    ]
    return [*report.faults, *holes]


def tamper(count: int, seed: int) -> int:
    """Tamper with copies of a good history; return how often it was not found."""
    missed, found = 0, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        good = Path(folder) / "good"
        run = good_history(good)
        if wrong := reported(good, run.authority):
            print(f"WRONG: reported of a good history: {wrong}")
            return 1
        names = list(TAMPERINGS)
        for number in range(count):
            rng = random.Random(f"{seed}/{number}")
            name = names[number % len(names)]
            copy = Path(folder) / "copy"
            shutil.copytree(good, copy)
            expected = TAMPERINGS[name](segment_files(copy), rng)
            said = reported(copy, run.authority)
            shutil.rmtree(copy)
            if not said or not any(expected in each for each in said):
                missed += 1
                print(
                    f"WRONG: tampering {number} of seed {seed} ({name}): {expected!r} was expected, found {said}"
                )
            found[name] += 1
    print(
        f"{count} tamperings: {count - missed} found; "
        + ", ".join(f"{name} {n}" for name, n in found.items())
    )
    return missed


# Kills.


def write_for_ever(directory: Path) -> None:
    """Go on with a history as fast as possible, until this process is killed."""
    run = MadeRun(elements=4096)
    with MadeArchivist(directory, run) as archivist:
        # As a peer does that begins again: it has the state of the last update that it knows.
        known = check_history(directory, CheckOptions(sample=0.0)).last if segment_files(directory) else 0
        for _ in range(known):
            run.round()
        print("writes", flush=True)
        while True:
            archivist.before()
            archivist.take(*run.round())


def _written(directory: Path, seconds: float, file_bytes: int | None = None) -> None:
    def limit() -> None:
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

    command = [sys.executable, "-m", "scripts.fault_search.history", "--write", str(directory)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=limit
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)


@dataclass
class _Kills:
    """Counts of what the kills have done."""

    wrong: int = 0
    cut: int = 0
    kept: int = 0
    replayed: int = 0
    holes: int = 0


def kill(count: int, seed: int) -> int:
    """Kill an archivist again and again; return what was wrong."""
    seen, rng = _Kills(), random.Random(seed)
    for first in range(0, count, _KILLS_OF_ONE):
        with tempfile.TemporaryDirectory() as folder:
            _kill_one(Path(folder), range(first, min(first + _KILLS_OF_ONE, count)), rng, seen)
        print(f"after {min(first + _KILLS_OF_ONE, count)} kills: {seen.wrong} wrong", flush=True)
    print(
        f"{count} kills: {seen.kept} updates kept, {seen.replayed} replayed, {seen.holes} holes from full disks;"
        f" {seen.cut} times an unfinished entry was cut off"
    )
    return seen.wrong


def _kill_one(directory: Path, kills: range, rng: random.Random, seen: _Kills) -> None:
    last = holes = 0
    for number in kills:
        limited = number % 10 == 9
        # Every tenth one runs into the limit of a file first, as on a full disk.
        size = None
        if limited:
            size = max((path.stat().st_size for path in segment_files(directory)), default=0) + _SMALL_FILE
        _written(directory, rng.random() * 0.3 + (1.0 if limited else 0.0), size)
        before = {path.name: path.stat().st_size for path in segment_files(directory)}
        for path in segment_files(directory)[-2:]:
            recover(path)
        after = {path.name: path.stat().st_size for path in segment_files(directory)}
        seen.cut += before != after
        if not after:
            continue  # killed before there was a snapshot
        report = check_history(directory, CheckOptions(sample=0.05, seed=number))
        if report.faults or report.last < last or (len(report.holes) > holes and not limited):
            seen.wrong += 1
            print(
                f"WRONG: after kill {number}: {report.faults} {report.holes}, update {report.last} after {last}"
            )
        last, holes = report.last, len(report.holes)
    report = check_history(directory) if segment_files(directory) else HistoryReport()
    if report.faults:
        seen.wrong += 1
        print(f"WRONG: {report.faults}")
    seen.kept += last
    seen.replayed += report.replayed
    seen.holes += holes


def main() -> int:
    """See the top of this file."""
    parser = argparse.ArgumentParser(
        prog="scripts/faults history",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    parser.add_argument("--tamper", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write is not None:
        write_for_ever(arguments.write)
    wrong = tamper(arguments.tamper, arguments.seed) + kill(arguments.kills, arguments.seed)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
