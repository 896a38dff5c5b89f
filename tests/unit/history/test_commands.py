"""The commands ``p2pavg history …``: what they print, and their exit codes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from p2pavg.runs.records.identity import make_seed
from p2pavg.state.checkpoint import write_checkpoint
from p2pavg.state.history.entries import EXCLUDED
from p2pavg.state.history.segments import segment_files
from p2pavg.state.snapshot import Content
from p2pavg.testing.simulation import simulated_signer
from p2pavg.tools.cli.main import app
from p2pavg.tools.history import commands
from p2pavg.tools.history.checking import check_history
from p2pavg.tools.history.commands import CreditsPage
from p2pavg.tools.history.credits_page import CreditedPeer, as_html, as_table
from p2pavg.tools.history.reading import HistoryReport
from p2pavg_dht import Ed25519Signer
from scripts.fault_search.history import TAMPERINGS
from scripts.fault_search.made_history import MadeArchivist, MadeRun, record
from tests.unit.verification.evidence.samples import contradiction


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def call(*words: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["history", *map(str, words)])
    assert result.exit_code == code, result.output
    return result


def error(*words: object) -> str:
    """Call the command; return the error with which it ends."""
    return str(CliRunner().invoke(app, ["history", *map(str, words)]).exception)


def made(tmp_path: Path, updates: int = 6) -> tuple[MadeRun, Path]:
    run, directory = MadeRun(), tmp_path / "history"
    record(run, directory, updates)
    return run, directory


def test_verify_says_what_is_proven_and_what_is_not(tmp_path: Path) -> None:
    run, directory = made(tmp_path)
    said = call("verify", directory).output
    assert f"run 'made', authority {run.authority.hex()}" in said
    assert "6 updates of 4 peers, from the snapshot of update 0 to update 6: replayed to " in said
    assert "It does not prove that gradients came from honest data" in " ".join(said.split())


def test_verify_names_what_is_wrong(tmp_path: Path) -> None:
    _, directory = made(tmp_path)
    TAMPERINGS["flip a bit of an average"](segment_files(directory), random.Random(1))
    said = call("verify", directory, code=1).output
    assert "WRONG: " in said
    assert "other bytes than its members signed" in said
    assert "nothing is wrong" not in said


def test_verify_goes_on_where_it_was(tmp_path: Path) -> None:
    run, directory = made(tmp_path)
    record(run, directory, 2)
    # A part of it is no proof of the rest of its files.
    call("verify", directory, "--to", "3")
    assert "8 updates of 4 peers" in call("verify", directory).output
    record(run, directory, 3)
    said = call("verify", directory).output
    assert "not verified again" in said
    assert "5 updates of 4 peers, from the snapshot of update 6" in said
    assert "11 updates of 4 peers" in call("verify", directory, "--again").output
    # A file that has changed since is verified again.
    TAMPERINGS["flip a bit of an average"]([segment_files(directory)[0]], random.Random(1))
    call("verify", directory, code=1)


def test_what_comes_while_it_verifies_is_verified_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, directory = made(tmp_path)
    record(run, directory, 2)
    first = segment_files(directory)[0]

    def check_and_change(*arguments: Any, **options: Any) -> HistoryReport:
        report = check_history(directory, *arguments[1:], **options)
        first.write_bytes(first.read_bytes())
        return report

    with monkeypatch.context() as patched:
        patched.setattr(commands, "check_history", check_and_change)
        call("verify", directory)
    assert "8 updates of 4 peers" in call("verify", directory).output
    assert "2 updates of 4 peers" in call("verify", directory).output


@pytest.mark.parametrize("kind", ["model", "checkpoint"])
def test_verify_compares_a_model(tmp_path: Path, kind: str) -> None:
    run, directory = made(tmp_path)
    file = tmp_path / "model.safetensors"
    named = {"weight": run.parameters[0].detach(), "bias": run.parameters[1].detach()}

    def write(tensors: dict[str, torch.Tensor]) -> None:
        if kind == "model":
            save_file(tensors, file)
        else:
            common = Content({f"parameter/{name}": tensor for name, tensor in tensors.items()}, {})
            write_checkpoint(file, 6, common, Content({"optimizer/x": torch.ones(1)}, {}))

    write(named)
    said = call("verify", directory, "--model", file).output
    assert f"the parameters in {file} are these" in said.replace("\n", "")
    write({**named, "bias": named["bias"] + 1e-6})
    assert "'bias' is not what the history gives" in call("verify", directory, "--model", file, code=1).output
    write({"weight": named["weight"], "more": named["bias"]})
    said = call("verify", directory, "--model", file, code=1).output
    assert "has no 'bias'" in said
    assert "'more' is in no history" in said


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--from", "5", "--to", "3"], "--from 5 is behind --to 3"),
        (["--sample", "0.5", "--model", "x"], "--model needs a replay"),
        (["--device", "nowhere"], "--device nowhere cannot be used"),
    ],
)
def test_options_that_do_not_fit_are_named(tmp_path: Path, words: list[str], match: str) -> None:
    _, directory = made(tmp_path, 1)
    assert match in error("verify", directory, *words)


def test_credits_are_a_table_csv_json_and_a_page(tmp_path: Path) -> None:
    run, directory = made(tmp_path)
    with MadeArchivist(directory, run) as archivist:
        run.now += 86400.0
        run.weights[0] = 100.0
        archivist.before()
        archivist.take(*run.round())
    peer = simulated_signer(0).peer_id
    table = call("credits", directory).output
    assert table.splitlines()[1].split()[:4] == [peer, "7", "148", "46.8%"]
    lines = call("credits", directory, "--format", "csv").output.splitlines()
    assert len(lines) == 1 + 4 * 2
    file = tmp_path / "credits.json"
    call("credits", directory, "--format", "json", "-o", file)
    said = json.loads(file.read_text())
    assert said["contributors"][0]["peers"] == [peer]
    assert [day["samples"] for day in said["contributors"][0]["days"]] == [48.0, 100.0]
    page = call("credits", directory, "--format", "html").output
    assert page.count("<rect") == 8
    assert peer in page
    call("credits", directory, "--against", file)
    said["contributors"][1]["samples"] += 1
    file.write_text(json.dumps(said))
    differences = call("credits", directory, "--against", file, code=1).output
    assert "has other credits than the history gives" in differences


def test_credits_of_a_history_that_is_wrong_are_not_good(tmp_path: Path) -> None:
    _, directory = made(tmp_path)
    TAMPERINGS["certificate of another round"](segment_files(directory), random.Random(1))
    call("credits", directory, code=1)


def test_a_peer_that_lied_is_credited_with_nothing(tmp_path: Path) -> None:
    run, directory = MadeRun(), tmp_path / "history"
    with MadeArchivist(directory, run) as archivist:
        archivist.before()
        archivist.take(*run.round())
        archivist.recorder.note([(EXCLUDED, contradiction(by=simulated_signer(1)))])
    said = call("credits", directory).output
    assert "33.3%" in said
    credited = f"{simulated_signer(1).peer_id} is credited with nothing: it signed that it holds two"
    assert said.splitlines()[-1].startswith(credited)


def test_identities_of_one_contributor_are_counted_together(tmp_path: Path) -> None:
    keys = [tmp_path / f"key{number}" for number in range(2)]
    ids = sorted(Ed25519Signer(make_seed(key, what="identity")).peer_id for key in keys)
    statement = tmp_path / "same"
    assert "2 identities of one contributor" in call("same", statement, *keys).output
    assert "exists" in error("same", statement, *keys)
    _, directory = made(tmp_path)
    call("credits", directory, "--same", statement)
    found = CreditedPeer(tuple(ids), {0: (2, 4.0)})
    rows = [line.split()[:2] for line in as_table([found]).splitlines()[1:]]
    assert rows == [[ids[0], "2"], ["and", ids[1]]]


async def test_the_monitor_shows_the_credits(tmp_path: Path) -> None:
    run, directory = made(tmp_path)
    page = CreditsPage(directory)
    kind, first = await page()
    assert (kind, first.count(b"<rect")) == ("text/html", 4)
    # The guard of the monitor's pages allows no style of their own.
    assert b"<style" not in first
    record(run, directory, 2)
    assert (await page())[1] != first
    assert b"there is no history in" in (await CreditsPage(tmp_path)())[1]


def test_a_page_of_many_days_stays_small() -> None:
    """Ten years of a hundred peers."""
    found = [CreditedPeer((f"{n}",), dict.fromkeys(range(3650), (1, 1.0 + n))) for n in range(100)]
    page = as_html("<run>", found)
    assert "&lt;run&gt;" in page
    assert len(page) < 600_000


def test_a_receipt_is_written_and_checked(tmp_path: Path) -> None:
    _, directory = made(tmp_path)
    peer, file = simulated_signer(1).peer_id, tmp_path / "receipt"
    said = call("receipt", peer, directory, "-o", file).output
    assert f"{peer} contributed 48 samples to 6 updates of run 'made'" in said
    assert said.splitlines()[1:] == call("receipt", "--check", file).output.splitlines()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    call("receipt", "--check", file, code=1)
    assert "no sealed segment has a contribution" in error("receipt", simulated_signer(9).peer_id, directory)
    call("receipt", peer, code=2)


def test_histories_are_merged(tmp_path: Path) -> None:
    run = MadeRun()
    record(run, tmp_path / "a", 3)
    record(run, tmp_path / "b", 3, number=501)
    record(run, tmp_path / "a", 3)
    assert "missing: updates 4 to 6" in call("verify", tmp_path / "a").output
    said = call("merge", tmp_path / "both", tmp_path / "a", tmp_path / "b").output
    assert "copied 3 segments" in said
    assert "no update between these is missing" in said
    assert "9 updates" in call("verify", tmp_path / "both").output
    # Nothing new, and a segment that has grown.
    assert "copied 0 segments" in call("merge", tmp_path / "both", tmp_path / "a").output
    record(run, tmp_path / "a", 1)
    assert "copied 1 segments" in call("merge", tmp_path / "both", tmp_path / "a").output


def test_histories_of_two_runs_are_not_merged(tmp_path: Path) -> None:
    record(MadeRun(), tmp_path / "a", 1)
    record(MadeRun(has_authority=False), tmp_path / "b", 1)
    folders = (tmp_path / name for name in ("both", "a", "b"))
    assert "these histories are of 2 different runs" in error("merge", *folders)
