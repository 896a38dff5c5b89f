"""``scripts/bench population`` at a tiny size: it runs, and repeats every decision. The figures mean nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.benchmarks.population import main


def test_the_comparison_with_random_search_repeats_every_decision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "rates.svg"
    options = ["--seeds=1", "--members=4", "--generations=4", "--interval=8", f"--picture={picture}"]
    monkeypatch.setattr(sys, "argv", ["population", *options])
    assert main() in (0, 1), "it may lose at this size"
    out = capsys.readouterr().out
    assert "population based training is better in" in out
    (row,) = (line for line in out.splitlines() if "%" in line)
    decisions = int(row.split("│")[-2])
    assert decisions == 12, "of four members, after three generations each"
    assert "<svg" in picture.read_text(encoding="utf-8")
