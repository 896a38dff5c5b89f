"""The reader in the documents, which needs nothing of p2pavg."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from p2pavg.state.history.segments import segment_files
from scripts.fault_search.history import TAMPERINGS
from scripts.fault_search.made_history import MadeRun
from tests.programs import run_python

READER = Path(__file__).parents[3] / "docs" / "examples" / "read_history.py"


def read(directory: Path) -> subprocess.CompletedProcess[str]:
    # Isolated: neither this folder nor a variable of the environment leads to p2pavg's own code.
    return run_python("-I", "-W", "error", READER, directory)


def test_it_reads_what_the_format_says(tmp_path: Path, good_run: MadeRun) -> None:
    found = read(tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    lines = found.stdout.splitlines()
    assert [line.split()[1].rstrip(":") for line in lines if line.startswith("update")] == [
        str(number) for number in range(1, 25)
    ]
    assert all(line.count(":8") == len(good_run.members) for line in lines if line.startswith("update"))
    assert sum(line.startswith("sealed by 12D3Koo") for line in lines) == 3
    assert "p2pavg" not in {
        line.split()[1] for line in READER.read_text().splitlines() if line.startswith("import ")
    }


@pytest.mark.usefixtures("good_run")
@pytest.mark.parametrize(
    "name", ["flip a bit of an average", "swap entries", "forge a seal", "exchange a snapshot"]
)
def test_it_finds_what_breaks_the_chain(tmp_path: Path, name: str) -> None:
    TAMPERINGS[name](segment_files(tmp_path), random.Random(2))
    found = read(tmp_path)
    # An archivist that lies seals another snapshot: only a replay finds that.
    assert (found.returncode == 0) == (name == "exchange a snapshot"), found.stderr
