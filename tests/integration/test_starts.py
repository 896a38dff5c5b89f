"""The documented program, started as by a user: three DiLoCo peers at once, and one that is too late."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.fault_search import starts

pytestmark = pytest.mark.processes


@pytest.mark.long
@pytest.mark.alone
def test_three_peers_end_in_one_lineage_and_a_late_one_reports_that_it_cannot_follow(tmp_path: Path) -> None:
    """The other peers are in the middle of their updates when the late one starts.

    On a slow machine they may still wait for it, and one of the three may be late too: it then takes seconds longer to
    import torch. With twenty updates, the others may end before they can tell it; with a hundred, they take minutes on
    a busy machine, and a start is given two. ``scripts/faults starts`` starts
    peers sixty times.
    """
    path = tmp_path / "train.py"
    path.write_text(starts.program(epochs=30), encoding="utf-8")
    ended = starts.start(7.0, path, at_once=3)
    assert len(ended.lineages) >= 2, "\n---\n".join(ended.logs)
    assert len(set(ended.lineages)) == 1, "\n---\n".join(ended.logs)
    assert ended.unexplained == ended.stuck == 0, "\n---\n".join(ended.logs)
    if not ended.together:
        assert "peers are at epoch" in "".join(ended.logs)
