"""The documented program, started as by a user: three DiLoCo peers at once, and one that is too late."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.fault_search import starts

pytestmark = pytest.mark.xdist_group("processes 2")  # see tests/conftest.py


def program(folder: Path, epochs: int = starts.EPOCHS) -> Path:
    path = folder / "train.py"
    path.write_text(starts.program(epochs), encoding="utf-8")
    return path


def test_three_peers_that_start_at_once_end_in_one_lineage(tmp_path: Path) -> None:
    """``scripts/faults starts`` repeats this twenty times, with more updates."""
    path = program(tmp_path, epochs=8)
    ended = starts.start(0.0, path)
    assert ended.together, "\n---\n".join(ended.logs)


def test_a_peer_that_is_too_late_reports_it_and_ends(tmp_path: Path) -> None:
    """The other peers are in the middle of their updates when it starts.

    On a slow machine they may still wait for it.
    """
    ended = starts.start(7.0, program(tmp_path))
    assert ended.told or ended.together, "\n---\n".join(ended.logs)
    assert ended.stuck == 0
    if ended.told:
        assert "peers are at epoch" in ended.said
