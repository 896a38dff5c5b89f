"""The demo as a user runs it: real processes, real sockets, few steps."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scripts.demo_gpt.__main__ import app
from tests.programs import run_python

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
PEERS, STEPS = 3, 12


def run_demo(output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    given = ["--json", "--output", output, "--batch-size", "4", *options]
    return run_python("-m", "scripts.demo_gpt", *given, cwd=ROOT, timeout=480.0)


def test_a_late_peer_and_a_killed_one_end_with_the_same_parameters_as_the_reference(tmp_path: Path) -> None:
    result = run_demo(tmp_path, "--peers", str(PEERS), "--steps", str(STEPS), "--compression", "fp32")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["identical_parameters"] is True
    assert report["relative_difference"] <= 1e-4
    for process in [*report["peers"], report["reference"]]:
        assert process["state"] == "done"
        assert process["final_loss"] < process["held_out_losses"][0][1] - 0.3
    for process in (report["peers"][0], report["reference"]):
        assert len(process["train_losses"]) == STEPS
    assert len(report["peers"][1]["kills"]) == 1
    assert report["rounds"][0]["group_sizes"][:2] == [2, 2]  # the late peer was not there
    assert len(report["rounds"]) == STEPS
    assert all(entry["bytes_sent"] > 0 and entry["seconds"] > 0 for entry in report["rounds"])
    assert Path(report["png"]).name == "loss.png"


def test_an_unknown_codec_fails_with_its_name(tmp_path: Path) -> None:
    """The launcher runs in this process, and the peer that fails in its own."""
    at_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        given = ["--json", "--output", str(tmp_path), "--peers", "2", "--compression", "no-such-codec"]
        result = CliRunner().invoke(app, given)
    finally:
        signal.signal(signal.SIGTERM, at_sigterm)
    assert result.exit_code == 1
    assert "no-such-codec" in json.loads(result.stdout)["peers"][0]["reason"]
