"""The progress of a run, by the words of members of which a few may lie."""

from __future__ import annotations

import pytest

from p2pavg.optim.coordination.progress import PeerProgress
from p2pavg.runs.membership.job_release import SeenProgress
from p2pavg.tools.jobs.releases import seen_progress


@pytest.mark.parametrize(
    ("words", "version", "epoch"),
    [
        ([], 0, 0),
        ([(1, 5)], 1, 5),
        ([(1, 5), (1, 6), (1, 2**50)], 1, 6),  # one that claims too much
        ([(1, 5), (2**50, 9)], 1, 5),  # as many as the honest ones do not decide
        ([(1, 5), (2, 9), (2, 8), (2, 1)], 2, 8),
        ([(0, 5)], 0, 5),
    ],
)
def test_most_peers_decide(words: list[tuple[int, int]], version: int, epoch: int) -> None:
    said = [
        PeerProgress(
            epoch=at, state=b"s" * 32, samples=0.0, samples_per_second=0.0, waiting=False, version=number
        )
        for number, at in words
    ]
    assert seen_progress(said) == SeenProgress(version, epoch)
