"""Archivists that lie with their own key, and hostile folders: what an attacker has tried, and must not succeed in."""

from __future__ import annotations

import mmap
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from p2pavg.base.errors import StateError
from p2pavg.optim.base.state import pack_origin
from p2pavg.state.history.entries import (
    FIRST,
    MAGIC,
    CreditSums,
    HistoryNotice,
    Seal,
    SegmentBeginning,
    Snapshot,
    Update,
    credits_root,
    framed,
    read_entry,
)
from p2pavg.state.history.segments import segment_files
from p2pavg.state.snapshot import Content, copy_of, read
from p2pavg.state.tree import chunk_digests, root_of
from p2pavg.testing.simulation import simulated_signer
from p2pavg.tools.history.commands import merge
from p2pavg.tools.history.credits_page import contributors
from p2pavg.tools.history.reading import HistoryReport
from scripts.fault_search.made_history import (
    ARCHIVIST,
    MadeArchivist,
    MadeRun,
    Piece,
    first_link,
    put_together,
    record,
    taken_apart,
)
from tests.unit.history.test_checking import change_entry, check, is_the_state_of


def with_snapshot(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> None:
    """Change the snapshot of a segment, with the right root, chain and seal."""
    pieces = taken_apart(path)
    content = read(memoryview(pieces[1].payload))
    tensors = {name: tensor.clone() for name, tensor in content.tensors.items()}
    values = dict(content.values)
    change(tensors, values)
    data = bytes(copy_of(Content(tensors, values)))
    entry = pieces[1].entry
    assert isinstance(entry, Snapshot)
    changed = msgspec.structs.replace(entry, root=root_of(chunk_digests(data), len(data)), size=len(data))
    put_together(path, [pieces[0], Piece(changed, data), *pieces[2:]], first_link(path), ARCHIVIST)


def history(
    directory: Path, *, segments_of: int = 1, updates: int = 4, **options: Any
) -> tuple[MadeRun, list[Path]]:
    run = MadeRun(**options)
    for _ in range(segments_of):
        record(run, directory, updates)
    return run, segment_files(directory)


def other_recipe(_: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
    values["origin"] = pack_origin(MadeRun(max_grad_norm=0.01).origin)


def other_kind(tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
    values["kind"] = "anchor/"
    for number in range(2):
        tensors[f"anchor/parameter {number}"] = tensors.pop(f"parameter/parameter {number}") * 0 + 123.0


def other_texts(_: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
    values["origin"]["fields"] = [["max_grad_norm", "0.01"], ["inner", "SGD"]]


def no_recipe(_: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
    values["origin"]["settings"] = b""


@pytest.mark.parametrize("change", [other_recipe, other_kind, no_recipe])
def test_the_recipe_is_that_of_the_lineage(tmp_path: Path, change: Callable[..., None]) -> None:
    """Else the archivist could choose what the updates give."""
    _, (path,) = history(tmp_path)
    with_snapshot(path, change)
    report = check(tmp_path)
    assert report.faults
    assert report.replayed == 0


def test_texts_of_the_recipe_decide_nothing(tmp_path: Path) -> None:
    run, (path,) = history(tmp_path)
    with_snapshot(path, other_texts)
    report = check(tmp_path)
    assert is_the_state_of(run, report)


def test_a_first_state_of_the_optimizer_is_its_archivists_word(tmp_path: Path) -> None:
    run = MadeRun()
    with MadeArchivist(tmp_path / "before", run) as archivist:
        archivist.before()
        archivist.take(*run.round())
    tensors = read(run.snapshot()).tensors

    def preload(its: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
        its |= {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer/")}

    _, (path,) = history(tmp_path / "now")
    with_snapshot(path, preload)
    (remark,) = check(tmp_path / "now").remarks
    assert "the optimizer's state before the first update is its archivist's word" in remark


def test_a_snapshot_in_the_middle_has_the_same_recipe(tmp_path: Path) -> None:
    _, files = history(tmp_path, segments_of=2)
    with_snapshot(files[1], other_texts)
    (fault,) = check(tmp_path).faults
    assert "it has another origin" in fault


SWITCHES = dict.fromkeys(("capturable", "differentiable", "foreach", "fused"), True)


@pytest.mark.parametrize(
    "change",
    [{"params": 5}, {7: 1}, {"lr": "fast"}, {"betas": [[0.9], {}]}, SWITCHES, {"params": [2**40]}, {}],
)
def test_options_of_any_kind_are_a_fault_and_no_error(tmp_path: Path, change: dict[Any, Any]) -> None:
    _, (path,) = history(tmp_path)

    def hostile(_: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        group = values["optimizer"]["param_groups"][0]
        values["optimizer"]["param_groups"] = [{**group, **change} if change else {}]

    with_snapshot(path, hostile)
    report = check(tmp_path)
    # Which implementation takes a step is the reader's choice, and each update has its own rate.
    is_harmless = "capturable" in change or "lr" in change
    assert bool(report.faults) != is_harmless


def test_a_line_that_leads_back_ends(tmp_path: Path) -> None:
    _, (path,) = history(tmp_path)
    first = taken_apart(path)[2].entry
    assert isinstance(first, Update)
    change_entry(path, 5, after=first.before)
    assert check(tmp_path).faults


def test_many_forks_take_no_long_time(tmp_path: Path) -> None:
    _, (path,) = history(tmp_path)
    pieces = taken_apart(path)
    update = pieces[2].entry
    assert isinstance(update, Update)
    states = [number.to_bytes(32, "big") for number in range(3000)]
    empty = msgspec.structs.replace(update, size=0, certificate=b"x")
    made = [
        Piece(msgspec.structs.replace(empty, epoch=number + 1, before=states[number], after=after), b"")
        for number in range(2999)
        for after in (states[number + 1], bytes([7]) * 32)
    ]
    snapshot = msgspec.structs.replace(pieces[1].entry, state=states[0])
    put_together(path, [pieces[0], Piece(snapshot, pieces[1].payload), *made], FIRST, None)
    began = time.thread_time()
    report = check(tmp_path, sample=0.0)
    assert len(report.remarks) < 30
    assert time.thread_time() - began < 60.0  # it was minutes when each fork was followed to its end


# Credits.


def lie(peer_id: str) -> bytes:
    sums = CreditSums()
    sums.add(0.0, {peer_id: 1e9})
    return credits_root(sums.credited())


def test_a_seal_on_no_update_has_no_credits(tmp_path: Path) -> None:
    _, (path,) = history(tmp_path)
    pieces = taken_apart(path)
    put_together(path, [*pieces[:2], pieces[-1]], FIRST, ARCHIVIST, lie=lie(simulated_signer(9).peer_id))
    (fault,) = check(tmp_path).faults
    assert "its seal names other credits than its certificates give" in fault


def test_an_update_that_stands_twice_is_credited_once(tmp_path: Path) -> None:
    run, (path,) = history(tmp_path)
    pieces = taken_apart(path)
    put_together(path, [*pieces[:-1], *pieces[2:-1], pieces[-1]], FIRST, ARCHIVIST)
    report = check(tmp_path, averages=False)
    assert any("stands twice in the segments of its archivist" in fault for fault in report.faults)
    assert {sum(day.updates for day in each.days) for each in report.contributed.credited()} == {4}
    assert run.lineage.epoch == 4


def test_a_certificate_stands_for_one_update(tmp_path: Path) -> None:
    _, (path,) = history(tmp_path)
    pieces = taken_apart(path)
    last = pieces[-2].entry
    assert isinstance(last, Update)
    again = msgspec.structs.replace(last, epoch=last.epoch + 1, before=last.after, after=bytes([7]) * 32)
    put_together(path, [*pieces[:-1], Piece(again, pieces[-2].payload), pieces[-1]], FIRST, ARCHIVIST)
    report = check(tmp_path, averages=False)
    assert any("have signed another state before it" in fault for fault in report.faults)
    assert {sum(day.updates for day in each.days) for each in report.contributed.credited()} == {4}


def test_a_segment_that_stands_twice_is_told(tmp_path: Path) -> None:
    _, (path,) = history(tmp_path)
    path.with_name("00000007-" + path.name[9:]).write_bytes(path.read_bytes())
    (fault,) = check(tmp_path).faults
    assert "another file has the same segment of its archivist" in fault


def test_one_signature_is_no_certificate(tmp_path: Path) -> None:
    """One member can make a group of itself and of records that others have published."""
    run = MadeRun()
    run.signs = [0]
    with MadeArchivist(tmp_path, run) as archivist:
        archivist.before()
        archivist.take(*run.round())
    record(run, tmp_path, 0)
    assert not any(check(tmp_path, averages=False).contributed.credited())


def test_an_archivist_that_begins_again_at_an_older_checkpoint_records_nothing_twice(tmp_path: Path) -> None:
    run, taken = MadeRun(), []
    for _ in range(3):
        with MadeArchivist(tmp_path, run) as archivist:
            for _ in range(3):
                archivist.before()
                taken.append(run.round())
                archivist.take(*taken[-1])
    with MadeArchivist(tmp_path, run) as archivist:
        for average, after in taken[1:]:
            assert not archivist.recorder.needs_snapshot(average.state)
            archivist.take(average, after)
        archivist.before()
        archivist.take(*run.round())
    report = check(tmp_path)
    assert (report.faults, report.updates, report.replayed) == ([], 10, 10)


def test_identities_of_overlapping_statements_are_one() -> None:
    sums = CreditSums()
    for letter in "abc":
        sums.add(0.0, {letter * 52: 1.0})
    found = sums.credited()
    a, b, c = (letter * 52 for letter in "abc")
    for same in ([(a, c), (b, c)], [(b, c), (a, c)]):
        (one,) = contributors(found, {a: "it lied"}, same)
        assert one.peers == (a, b, c)
        assert one.struck_out == "it lied"


# Members.


@pytest.mark.parametrize("way", ["another segment", "the archivist's clock", "its own clock"])
def test_a_revoked_member_is_found_whatever_the_clocks_say(tmp_path: Path, way: str) -> None:
    run = MadeRun()
    with MadeArchivist(tmp_path, run) as archivist:
        archivist.before()
        archivist.take(*run.round())
        # The writing thread reads the clock, and the beginning is to have the right time.
        archivist.wait()
        wrong = 1e9 if way == "the archivist's clock" else 0.0
        run.now += wrong
        archivist.recorder.note([run.revocation([run.members[1]])])
        archivist.wait()
        run.now -= wrong
        archivist.take(*run.round())
    if way == "its own clock":
        run.clocks[1] = -5000.0
    record(run, tmp_path, 3)
    if way == "another segment":  # one that does not repeat the list
        path = segment_files(tmp_path)[1]
        pieces = [piece for piece in taken_apart(path) if not isinstance(piece.entry, HistoryNotice)]
        put_together(path, pieces, first_link(path), ARCHIVIST)
    assert any("its certificate was revoked" in fault for fault in check(tmp_path).faults)


# Files.


@pytest.mark.parametrize("damage", ["later version", "first update", "cannot be read"])
def test_a_new_start_removes_nothing_that_it_cannot_read(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, files = history(tmp_path, segments_of=2)
    last = files[-1]
    data = bytearray(last.read_bytes())
    if damage == "later version":
        data[: len(MAGIC)] = b"p2pavg-history/2\n"
    elif damage == "first update":
        data[len(data) // 3] ^= 1
    last.write_bytes(data)
    if damage == "cannot be read":

        def fail(*_: object, **__: object) -> None:
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(mmap, "mmap", fail)
    before = {path: path.read_bytes() for path in files}
    try:
        with MadeArchivist(tmp_path, run) as archivist:
            archivist.before()
    except StateError:
        pass  # it says so, and leaves the folder as it is
    assert {path: path.read_bytes() for path in files} == before


def test_there_may_be_more_segments_than_open_files(tmp_path: Path) -> None:
    history(tmp_path, segments_of=24, updates=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 16, hard))
    try:
        report = check(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (report.faults, report.replayed) == ([], 24)


def test_a_new_file_is_not_believed_for_the_sake_of_old_ones(tmp_path: Path) -> None:
    run, _ = history(tmp_path, segments_of=2)
    verified = check(tmp_path).verified
    record(run, tmp_path, 4)

    def other(tensors: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
        tensors["parameter/parameter 1"] += 1.0

    with_snapshot(segment_files(tmp_path)[2], other)
    report = check(tmp_path, verified=frozenset(verified))
    assert any("is not what the updates before it give" in fault for fault in report.faults)


def test_a_snapshot_that_no_update_leads_to_is_told_and_checked(tmp_path: Path) -> None:
    _, files = history(tmp_path, segments_of=2)
    pieces = taken_apart(files[1])
    entry = pieces[1].entry
    assert isinstance(entry, Snapshot)
    changed = msgspec.structs.replace(entry, epoch=2, state=bytes([7]) * 32)
    put_together(
        files[1], [pieces[0], Piece(changed, b"\0" * entry.size), pieces[-1]], first_link(files[1]), ARCHIVIST
    )
    report = check(tmp_path)
    assert any("no update leads to its snapshot of update 2" in remark for remark in report.remarks)
    assert any("other bytes than its entry names" in fault for fault in report.faults)


def test_names_that_a_terminal_obeys_are_refused(tmp_path: Path) -> None:
    _, (path,) = history(tmp_path, has_authority=False)
    pieces = taken_apart(path)
    for field, value in (("archivist", "\x1b[2J" * 13), ("run_id", "\x1b[2J")):
        with pytest.raises((ValueError, msgspec.ValidationError)):
            msgspec.structs.replace(pieces[0].entry, **{field: value})
    with pytest.raises(StateError):
        read_entry(HistoryNotice(time=0.0, kind="\x1b[31m", digest=bytes(32), size=1).encode())


def test_a_name_without_a_seal_is_no_archivist(tmp_path: Path) -> None:
    _, (path,) = history(tmp_path)
    put_together(path, taken_apart(path)[:-1], FIRST, None)
    report: HistoryReport = check(tmp_path)
    assert report.archivists == set()
    assert any("it has no seal" in remark for remark in report.remarks)


# Merging.


def test_merging_replaces_nothing_but_what_goes_on(tmp_path: Path) -> None:
    _, (path,) = history(tmp_path / "mine")
    # By the same archivist, of the same updates, and with another seal.
    history(tmp_path / "longer", updates=6)
    before = path.read_bytes()
    merge(tmp_path / "mine", [tmp_path / "longer"])
    assert path.read_bytes() == before
    put_together(path, taken_apart(path)[:-1], FIRST, None)  # as it was before its seal
    path.replace(tmp_path / "older")
    merge(tmp_path / "mine", [tmp_path / "longer"])
    assert check(tmp_path / "mine").updates == 6


def test_updates_that_nobody_signed_are_not_merged(tmp_path: Path) -> None:
    _, (path,) = history(tmp_path / "honest")
    _, (fake,) = history(tmp_path / "fake", updates=1)
    change_entry(fake, 2, certificate=b"x")
    with pytest.raises(StateError, match="is not merged"):
        merge(tmp_path / "both", [tmp_path / "fake", tmp_path / "honest"])
    assert path.exists()


def test_merging_follows_no_link_and_skips_what_a_crash_has_left(tmp_path: Path) -> None:
    _, (path,) = history(tmp_path / "one")
    (tmp_path / "one" / "00000001-abcdefgh.history").write_bytes(MAGIC)
    (tmp_path / "both").mkdir()
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "both" / f".{path.name}.draft").symlink_to(victim)
    assert "copied 1 segments" in merge(tmp_path / "both", [tmp_path / "one"])[0]
    assert victim.read_bytes() == b"mine"


def test_a_segment_under_this_archivists_name_is_not_gone_on_with(tmp_path: Path) -> None:
    run, (path,) = history(tmp_path)
    pieces = taken_apart(path)
    beginning = pieces[0].entry
    assert isinstance(beginning, SegmentBeginning)
    stranger = msgspec.structs.replace(
        beginning, archivist=simulated_signer(77).peer_id, certificate=run.certificate(77), number=1
    )
    forged = path.with_name("00000001-" + path.name[9:])
    put_together(forged, [Piece(stranger, b""), *pieces[1:-1]], FIRST, None)
    with pytest.raises(StateError, match="under the name of this one"):
        MadeArchivist(tmp_path, run)


def test_framing_alone_is_no_history(tmp_path: Path) -> None:
    _, (path,) = history(tmp_path)
    seal = taken_apart(path)[-1].entry
    assert isinstance(seal, Seal)
    path.write_bytes(MAGIC + framed(FIRST, seal.encode()))
    (fault,) = check(tmp_path).faults
    assert path.name in fault
