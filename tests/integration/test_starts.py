"""The documented program, started as by a user: three DiLoCo peers at once, and one that is too late."""

from __future__ import annotations

from pathlib import Path

from scripts.fault_search import starts


def test_three_peers_end_in_one_lineage_and_a_late_one_reports_that_it_cannot_follow(tmp_path: Path) -> None:
    """The other peers are in the middle of their updates when the late one starts.

    On a slow machine they may still wait for it. ``scripts/faults starts`` starts peers sixty times.
    """
    path = tmp_path / "train.py"
    path.write_text(starts.program(), encoding="utf-8")
    ended = starts.start(7.0, path, at_once=3)
    assert ended.told or ended.together, "\n---\n".join(ended.logs)
    assert ended.stuck == 0
    if ended.told:
        assert "peers are at epoch" in ended.said
