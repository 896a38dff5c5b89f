"""An archivist's files: what is recorded, what a crash leaves, and what is named as missing."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from p2pavg.base.errors import BusyError, StateError
from p2pavg.state.history import recording
from p2pavg.state.history.entries import MAGIC, SEGMENT_ENTRIES, HistoryNotice, Seal, SegmentBeginning
from p2pavg.state.history.segments import SegmentWriter, recover, segment_files
from p2pavg.tools.history.checking import CheckOptions, check_history
from p2pavg.tools.history.reading import HistoryReport
from scripts.fault_search.made_history import (
    ARCHIVIST,
    MadeArchivist,
    MadeRun,
    raw_entries,
    record,
    taken_apart,
)


def good(directory: Path, **options: Any) -> HistoryReport:
    """Check a history in which nothing is wrong; return what was found."""
    report = check_history(directory, CheckOptions(**options))
    assert not report.faults
    return report


def test_a_new_process_begins_a_segment_that_follows(tmp_path: Path) -> None:
    run = MadeRun()
    for _ in range(3):
        record(run, tmp_path, 4)
    files = segment_files(tmp_path)
    assert [path.name[:9] for path in files] == ["00000000-", "00000001-", "00000002-"]
    report = good(tmp_path)
    assert (report.replayed, report.holes, report.remarks) == (12, [], [])


def test_a_segment_ends_after_so_many_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "SEGMENT_ENTRIES", 8)
    record(MadeRun(), tmp_path, 13)
    files = segment_files(tmp_path)
    # The beginning, the snapshot and the seal are entries, too.
    assert [len(taken_apart(path)) for path in files] == [8, 8, 6]
    assert all(isinstance(taken_apart(path)[-1].entry, Seal) for path in files)
    assert good(tmp_path).replayed == 13
    assert SEGMENT_ENTRIES == 1024


def test_a_segment_ends_when_its_averages_weigh_as_much_as_some_snapshots(tmp_path: Path) -> None:
    record(MadeRun(elements=16384, codec="fp32", make=lambda p: torch.optim.SGD(p, lr=0.1)), tmp_path, 40)
    sizes = [path.stat().st_size for path in segment_files(tmp_path)]
    assert len(sizes) == 3
    assert max(sizes) < 20 * 2**16


def test_an_update_without_a_proof_is_a_hole(tmp_path: Path) -> None:
    run = MadeRun()
    with MadeArchivist(tmp_path, run) as archivist:
        for number in range(9):
            archivist.before()
            average, after = run.round()
            if number == 3:
                archivist.recorder.took(None, after.epoch, after.state)  # it was alone
            elif number != 5:  # it was not there
                archivist.take(average, after)
    report = good(tmp_path)
    assert (report.holes, report.replayed, report.last) == ([(4, 4), (6, 6)], 7, 9)


def test_each_segment_has_the_present_list_of_revoked_certificates_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "SEGMENT_ENTRIES", 8)
    run = MadeRun()
    with MadeArchivist(tmp_path, run) as archivist:
        archivist.recorder.note([run.revocation([7])])  # before there is a segment
        for _ in range(10):
            archivist.before()
            archivist.take(*run.round())
            archivist.recorder.note([run.revocation([7])])  # again
    for path in segment_files(tmp_path):
        notices = [isinstance(piece.entry, HistoryNotice) for piece in taken_apart(path)]
        assert (notices[2], notices.count(True)) == (True, 1)
    good(tmp_path)


def test_old_segments_are_removed(tmp_path: Path) -> None:
    run = MadeRun()
    for _ in range(6):
        with MadeArchivist(tmp_path, run, keep=5) as archivist:
            for _ in range(3):
                archivist.before()
                archivist.take(*run.round())
    report = good(tmp_path)
    assert (report.first, report.last, report.holes) == (9, 18, [])
    assert len(segment_files(tmp_path)) == 3


# Crashes.


def torn(tmp_path: Path) -> tuple[MadeRun, Path, list[int]]:
    """Make a segment without a seal; return where each of its entries ends."""
    run = MadeRun()
    record(run, tmp_path, 5)
    (path,) = segment_files(tmp_path)
    entries = raw_entries(path)[:-1]
    path.write_bytes(MAGIC + b"".join(entries))
    ends = [len(MAGIC)]
    for entry in entries:
        ends.append(ends[-1] + len(entry))
    return run, path, ends


@pytest.mark.parametrize("seed", range(8))
def test_a_crash_at_any_byte_costs_the_last_entry(tmp_path: Path, seed: int) -> None:
    run, path, ends = torn(tmp_path)
    size = random.Random(seed).randrange(ends[2], ends[-1] + 1)
    os.truncate(path, size)
    kept = sum(end <= size for end in ends) - 1
    with MadeArchivist(tmp_path, run) as archivist:
        assert path.stat().st_size == ends[kept]
        archivist.before()
        archivist.take(*run.round())
    report = good(tmp_path)
    assert report.updates == kept - 2 + 1
    lost = 5 - (kept - 2)
    assert report.holes == ([] if not lost else [(6 - lost, 5)])


def test_a_file_that_kept_its_length_and_not_its_bytes_is_cut(tmp_path: Path) -> None:
    _, path, ends = torn(tmp_path)
    data = bytearray(path.read_bytes())
    data[-40:] = bytes(40)  # the last payload was not written when the power went
    path.write_bytes(data)
    found = recover(path)
    assert found is not None
    assert path.stat().st_size == ends[-2]
    assert found.can_go_on


def test_a_file_without_a_whole_snapshot_is_removed(tmp_path: Path) -> None:
    run, path, ends = torn(tmp_path)
    os.truncate(path, ends[2] - 1)
    record(run, tmp_path, 2)
    assert not path.exists()
    assert good(tmp_path).replayed == 2


def test_a_process_goes_on_in_the_segment_that_a_crash_has_left(tmp_path: Path) -> None:
    run, path, _ = torn(tmp_path)
    record(run, tmp_path, 2)
    assert segment_files(tmp_path) == [path]
    assert good(tmp_path).replayed == 7


def test_a_process_with_other_rules_begins_a_segment(tmp_path: Path) -> None:
    run, _, _ = torn(tmp_path)
    run.recorded = msgspec.structs.replace(run.recorded, version=1)
    record(run, tmp_path, 2)
    beginnings = [taken_apart(path)[0].entry for path in segment_files(tmp_path)]
    assert [each.version for each in beginnings if isinstance(each, SegmentBeginning)] == [0, 1]
    assert good(tmp_path).replayed == 7


class Disk:
    """Lets the first writes through, and then reports an error."""

    def __init__(self, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number, self.left = number, 10**9
        self._write: Callable[..., None] = SegmentWriter.append  # type: ignore[assignment]
        monkeypatch.setattr(SegmentWriter, "append", lambda *arguments: self.append(*arguments))

    def append(self, *arguments: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise OSError(self.number, os.strerror(self.number))
        return self._write(*arguments)


def test_a_full_disk_costs_a_hole_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, run = Disk(28, monkeypatch), MadeRun()
    with caplog.at_level(logging.ERROR), MadeArchivist(tmp_path, run) as archivist:
        for number in range(12):
            archivist.before()
            archivist.wait()
            archivist.take(*run.round())
            archivist.wait()
            disk.left = {4: 0, 7: 10**9}.get(number, disk.left)
    assert "the disk is full; the training goes on" in caplog.text
    report = good(tmp_path)
    assert report.last == 12
    assert report.holes == [(6, 8)]
    assert report.replayed == 9


def test_it_rests_after_an_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, run = Disk(5, monkeypatch), MadeRun()
    with MadeArchivist(tmp_path, run) as archivist:
        disk.left = 0
        archivist.before()
        archivist.wait()
        assert not archivist.recorder.needs_snapshot(run.lineage.state)
        run.now -= 3600.0  # a clock that was set back
        assert archivist.recorder.needs_snapshot(run.lineage.state)


def test_a_disk_that_is_too_slow_costs_a_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MadeRun()
    archivist = MadeArchivist(tmp_path, run, starts=False)
    archivist.before()
    monkeypatch.setattr(recording, "MAX_QUEUED_BYTES", 0)
    for _ in range(3):
        archivist.take(*run.round())
    monkeypatch.undo()
    with archivist:
        archivist.wait()
        archivist.before()
        archivist.take(*run.round())
    report = good(tmp_path)
    assert (report.holes, report.replayed) == ([(1, 3)], 1)


# Folders.


def test_a_folder_has_the_history_of_one_run(tmp_path: Path) -> None:
    record(MadeRun(), tmp_path, 1)
    with pytest.raises(StateError, match="history of another run, 'made'"):
        record(MadeRun(has_authority=False), tmp_path, 1)


def test_a_folder_has_one_archivist_at_a_time(tmp_path: Path) -> None:
    run = MadeRun()
    with MadeArchivist(tmp_path, run), pytest.raises(BusyError):
        MadeArchivist(tmp_path, run)
    record(run, tmp_path, 1)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StateError, match="cannot keep a history in"):
        MadeArchivist(tmp_path / "file" / "history", MadeRun())


def test_another_archivist_begins_a_chain_of_its_own(tmp_path: Path) -> None:
    run = MadeRun()
    record(run, tmp_path, 2)
    record(run, tmp_path, 2, number=ARCHIVIST + 1)
    record(run, tmp_path, 2)
    report = good(tmp_path)
    assert (report.replayed, len(report.archivists)) == (6, 2)
