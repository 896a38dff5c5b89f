"""A history's check: each tampering is found and named, and what is genuine is replayed."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
import torch
from torch.optim import Optimizer

from p2pavg.base.errors import StateError
from p2pavg.group.aggregation import Aggregation, CenteredClip
from p2pavg.state.history.entries import EXCLUDED, FIRST, MAGIC, framed
from p2pavg.state.history.segments import segment_files
from p2pavg.testing.simulation import simulated_signer
from p2pavg.tools.history.checking import CheckOptions, check_history
from p2pavg.tools.history.reading import HistoryReport
from scripts.fault_search.history import SEGMENTS, TAMPERINGS, UPDATES, reported
from scripts.fault_search.made_history import (
    ARCHIVIST,
    RUN_ID,
    MadeArchivist,
    MadeRun,
    Piece,
    first_link,
    put_together,
    record,
    taken_apart,
)
from tests.unit.verification.evidence.samples import LIAR, contradiction


def check(directory: Path, **options: Any) -> HistoryReport:
    return check_history(directory, CheckOptions(**options))


def is_the_state_of(run: MadeRun, report: HistoryReport) -> bool:
    return report.replica is not None and all(map(torch.equal, report.replica.parameters, run.parameters))


def change_entry(path: Path, index: int, **fields: Any) -> None:
    """Change an entry of a segment, with the right chain and seal."""
    pieces = taken_apart(path)
    pieces[index] = Piece(msgspec.structs.replace(pieces[index].entry, **fields), pieces[index].payload)
    put_together(path, pieces, first_link(path), ARCHIVIST)


@pytest.mark.parametrize("name", TAMPERINGS)
def test_what_was_tampered_with_is_found_and_named(tmp_path: Path, good_run: MadeRun, name: str) -> None:
    expected = TAMPERINGS[name](segment_files(tmp_path), random.Random(1))
    found = reported(tmp_path, good_run.authority)
    assert any(expected in each for each in found), found


# What is replayed.


def sgd(parameters: Sequence[torch.Tensor]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def muon_and_adamw(parameters: Sequence[torch.Tensor]) -> list[Optimizer]:
    muon = torch.optim.Muon([parameters[0]], lr=0.02, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW([parameters[1]], lr=0.01)]


def two_groups(parameters: Sequence[torch.Tensor]) -> Optimizer:
    groups: list[dict[str, Any]] = [{"params": [parameters[0]], "lr": 0.1}, {"params": [parameters[1]]}]
    return torch.optim.Adam(groups, amsgrad=True)


@pytest.mark.parametrize(
    "make", [sgd, muon_and_adamw, two_groups, torch.optim.Adafactor, torch.optim.RMSprop]
)
def test_optimizers_of_torch_are_replayed(tmp_path: Path, make: Callable[..., Any]) -> None:
    run = MadeRun(make=make)
    record(run, tmp_path, 4)
    record(run, tmp_path, 4)  # from a snapshot with the optimizer's state
    report = check(tmp_path)
    assert (report.faults, report.replayed) == ([], 8)
    assert is_the_state_of(run, report)


def test_rates_that_change_are_replayed_without_their_schedule(tmp_path: Path) -> None:
    run = MadeRun()
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 1.0 / (1 + step))
    with MadeArchivist(tmp_path, run) as archivist:
        for _ in range(6):
            archivist.before()
            archivist.take(*run.round())
            schedule.step()
    report = check(tmp_path)
    assert (report.faults, report.replayed) == ([], 6)
    assert is_the_state_of(run, report)


def test_an_optimizer_that_is_not_known_is_checked_and_not_replayed(tmp_path: Path) -> None:
    class Mine(torch.optim.SGD):
        pass

    record(MadeRun(make=lambda parameters: Mine(parameters, lr=0.1)), tmp_path, 4)
    report = check(tmp_path)
    assert (report.updates, report.replayed) == (4, 0)
    assert ["Mine" in fault and "not be replayed" in fault for fault in report.faults] == [True]


def test_the_number_of_threads_does_not_matter(tmp_path: Path) -> None:
    run = MadeRun(elements=65536)
    record(run, tmp_path, 6)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if before > 1 else 3)
        report = check(tmp_path)
    finally:
        torch.set_num_threads(before)
    assert (report.faults, report.replayed) == ([], 6)
    assert is_the_state_of(run, report)


# Parts of a history.


@pytest.mark.usefixtures("good_run")
def test_a_part_is_checked(tmp_path: Path) -> None:
    report = check(tmp_path, first=UPDATES + 3, last=2 * UPDATES + 2)
    assert (report.faults, report.replayed) == ([], UPDATES + 2)
    assert report.replica is not None
    assert report.replica.lineage.epoch == 2 * UPDATES + 2


def test_a_sample_finds_damage_now_and_then(tmp_path: Path, good_run: MadeRun) -> None:
    TAMPERINGS["flip a bit of an average"](segment_files(tmp_path), random.Random(1))
    known = (RUN_ID, good_run.authority)
    found = [bool(check(tmp_path, sample=0.5, seed=seed, run=known).faults) for seed in range(12)]
    assert 2 < sum(found) < 10
    assert not check(tmp_path, sample=0.0).faults
    assert check(tmp_path, sample=1.0).faults


def test_what_was_verified_before_is_not_verified_again(tmp_path: Path, good_run: MadeRun) -> None:
    assert reported(tmp_path, good_run.authority) == []
    first = check(tmp_path)
    assert len(first.verified) == SEGMENTS
    # The last of them again: what comes behind begins with a snapshot that nothing else proves.
    again = check(tmp_path, verified=frozenset(first.verified[:2]))
    assert (first.replayed, again.replayed) == (SEGMENTS * UPDATES, 2 * UPDATES)
    assert again.replica is not None
    assert first.replica is not None
    assert again.replica.digest() == first.replica.digest()


# Who takes part.


def test_a_member_that_was_revoked_before_is_found(tmp_path: Path) -> None:
    run = MadeRun()
    with MadeArchivist(tmp_path, run) as archivist:
        for number in range(6):
            archivist.before()
            archivist.take(*run.round())
            if number == 2:
                archivist.recorder.note([run.revocation([run.members[1]])])
                archivist.wait()
    faults = check(tmp_path).faults
    # The fourth is the first behind the list. By its members' clocks the list counts from then on.
    assert [f"update {number}: " in fault for number, fault in zip((5, 6), faults, strict=True)] == [True] * 2
    assert all("was no member of the run: its certificate was revoked" in fault for fault in faults)


def test_a_round_that_has_begun_when_a_member_is_revoked_may_end(tmp_path: Path) -> None:
    run = MadeRun()
    with MadeArchivist(tmp_path, run) as archivist:
        archivist.before()
        archivist.recorder.note([run.revocation([run.members[1]])])
        run.now -= 590.0  # the next one begins ten seconds later
        archivist.take(*run.round())
        run.members.remove(1)
        archivist.take(*run.round())
    assert check(tmp_path).faults == []


def test_a_stranger_is_no_member(tmp_path: Path) -> None:
    run, other = MadeRun(), MadeRun(authority=901)
    with MadeArchivist(tmp_path, run) as archivist:
        archivist.before()
        run.shown[2] = other.certificate(2)
        archivist.take(*run.round())
    (fault, *_) = check(tmp_path).faults
    assert "update 1" in fault
    assert "was no member of the run: its certificate is forged" in fault


def test_an_archivist_is_a_member(tmp_path: Path) -> None:
    run = MadeRun()
    record(run, tmp_path, 2)
    (path,) = segment_files(tmp_path)
    change_entry(path, 0, certificate=run.certificate(3))
    (fault,) = check(tmp_path).faults
    assert "its archivist" in fault
    assert "is no member of the run: its certificate is for another peer" in fault


def test_a_history_of_another_authority_is_refused(tmp_path: Path) -> None:
    run = MadeRun()
    record(run, tmp_path, 2)
    record(run, tmp_path, 2)
    assert not check(tmp_path, run=(RUN_ID, run.authority)).faults
    for other in ((RUN_ID, bytes(32)), ("another", run.authority)):
        report = check(tmp_path, run=other)
        assert len(report.faults) == 2  # each of its files
        assert all("it is of another run, 'made' with the authority" in fault for fault in report.faults)
        assert report.updates == 0


def test_evidence_of_a_lie_is_verified(tmp_path: Path) -> None:
    run = MadeRun()
    evidence = contradiction()
    with MadeArchivist(tmp_path, run) as archivist:
        archivist.before()
        archivist.take(*run.round())
        archivist.recorder.note([(EXCLUDED, evidence)])
    report = check(tmp_path)
    assert report.faults == []
    assert "two results" in report.excluded[LIAR.peer_id]
    with MadeArchivist(tmp_path, run) as archivist:
        archivist.before()
        archivist.recorder.note([(EXCLUDED, evidence[:-1] + b"\0")])
        archivist.take(*run.round())
    assert len(check(tmp_path).faults) == 1


# Several archivists, and forks.


def test_one_archivist_fills_the_holes_of_another(tmp_path: Path) -> None:
    run = MadeRun()
    with MadeArchivist(tmp_path / "a", run) as one, MadeArchivist(tmp_path / "b", run, 501) as other:
        for number in range(12):
            present = [each for each, away in ((one, (3, 4)), (other, (7, 8, 9))) if number not in away]
            for archivist in present:
                archivist.before()
            update = run.round()
            for archivist in present:
                archivist.take(*update)
    assert check(tmp_path / "a").holes == [(4, 5)]
    assert check(tmp_path / "b").holes == [(8, 10)]
    for path in segment_files(tmp_path / "b"):
        path.rename(tmp_path / "a" / path.name)
    report = check(tmp_path / "a")
    assert (report.faults, report.holes, report.replayed) == ([], [], 12)
    assert len(report.archivists) == 2


def test_a_fork_is_told(tmp_path: Path) -> None:
    one, other = MadeRun(), MadeRun()
    record(one, tmp_path, 3)
    for _ in range(2):
        other.round()
    other.weights[1] = 9.0  # it averages something else from here on
    record(other, tmp_path, 4, number=501)
    report = check(tmp_path)
    (remark,) = report.remarks
    assert "update 3: 2 different updates follow on the one before" in remark
    assert (report.faults, report.last) == ([], 6)  # the one that leads further


def test_a_run_that_goes_on_with_other_rules_is_replayed(tmp_path: Path) -> None:
    run = MadeRun()
    record(run, tmp_path, 3)
    run.change_rules()
    record(run, tmp_path, 3)
    report = check(tmp_path)
    assert (report.faults, report.holes, report.replayed) == ([], [], 6)
    assert report.remarks == ["the run goes on with other settings from update 3"]


def test_a_run_that_goes_on_from_nowhere_is_a_fault(tmp_path: Path) -> None:
    run = MadeRun()
    record(run, tmp_path, 3)
    run.lineage = run.lineage.with_rules(bytes(32))  # its origin says something else
    record(run, tmp_path, 3)
    (fault,) = check(tmp_path).faults
    assert "the state of update 3 is not what the updates before it give" in fault


def test_a_contribution_is_credited_as_the_rule_counts_it(tmp_path: Path) -> None:
    for name, aggregation, credited in (
        ("mean", Aggregation(), 1e5),
        ("robust", Aggregation(robust=CenteredClip()), 8.0),
        ("max_norm", Aggregation(max_norm=1.0), 1e4),
    ):
        run = MadeRun(aggregation=aggregation)
        run.weights[3] = 1e5
        run.norms = {0: 1.0, 1: 1.0, 2: 1.0, 3: 10.0}
        record(run, tmp_path / name, 1)
        found = {
            credit.peer_id: credit.days[0].samples for credit in check(tmp_path / name).contributed.credited()
        }
        assert found[simulated_signer(3).peer_id] == credited
        assert found[simulated_signer(0).peer_id] == 8.0


# Hostile files.


def test_a_folder_without_a_history_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="there is no history in"):
        check(tmp_path)
    with pytest.raises(StateError, match="cannot read the history"):
        check(tmp_path / "missing")


def test_a_link_is_no_segment(tmp_path: Path) -> None:
    record(MadeRun(), tmp_path / "good", 1)
    (path,) = segment_files(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / path.name).symlink_to(path)
    with pytest.raises(StateError, match="no plain file"):
        check(tmp_path / "bad")


HOSTILE = {
    "empty": b"",
    "nothing": MAGIC,
    "short": MAGIC[:-1],
    "cut": MAGIC + bytes(3),
    "huge": MAGIC + struct.pack(">I", 2**32 - 1) + bytes(132),
    "large": MAGIC + struct.pack(">I", 2**24) + bytes(132),
    "deep": MAGIC + framed(FIRST, b"\x91" * 100_000 + b"\xc0"),
    "wrong": MAGIC + framed(FIRST, msgpack.packb(["begin"] + [0] * 12)),
    "count": MAGIC + framed(FIRST, b"\xdd\xff\xff\xff\xff"),
    "seal": MAGIC + framed(FIRST, msgpack.packb(["seal"])),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_bytes_are_a_fault_with_their_place(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "00000000-abcdefgh.history"
    path.write_bytes(data)
    report = check(tmp_path)
    # What ends too early may be what a crash has left.
    (said,) = [*report.faults, *report.remarks]
    assert path.name in said


def test_nothing_larger_than_the_file_is_made(tmp_path: Path) -> None:
    """Shapes are claims: a vector of a tebibyte must not be tried for a file of some kilobytes."""
    record(MadeRun(codec="fp32"), tmp_path, 1)
    (path,) = segment_files(tmp_path)
    change_entry(path, 0, shapes=((2**40,), (2**40,)))
    (fault,) = check(tmp_path).faults
    assert "it averages more values than its snapshot has" in fault


@pytest.mark.parametrize("seed", range(10))
def test_random_damage_never_ends_the_check(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    record(MadeRun(), tmp_path, 3)
    (path,) = segment_files(tmp_path)
    data = bytearray(path.read_bytes())
    for _ in range(rng.randrange(1, 20)):
        at = rng.randrange(len(data))
        data[at : at + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(0, 9))
    path.write_bytes(data)
    assert check(tmp_path).faults
