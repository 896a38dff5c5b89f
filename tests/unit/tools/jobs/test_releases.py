"""The releases that a member's folder keeps: those that are genuine, and no more than two."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pavg.optim.coordination.progress import PeerProgress
from p2pavg.peer.joining.home import Home
from p2pavg.runs.membership.job_release import JobRelease, SeenProgress, sign_release
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.tools.jobs.releases import keep_releases, kept_releases, seen_progress
from tests.unit.runs.membership.test_job_release import AUTHORITY, KEY, OTHER


def release(number: int, *, run_id: str = "lab", key: object = KEY) -> JobRelease:
    sign = getattr(key, "sign")  # noqa: B009
    return sign_release(
        sign, authority=AUTHORITY, run_id=run_id, number=number, root=b"r" * 32, size=9, since=number
    )


RUN = RunFile(run_id="lab", authority=AUTHORITY, secret=b"s" * 32, job=release(1).text)


def test_the_newest_two_come_back_beside_that_of_the_run_file(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert [each.number for each in kept_releases(home, RUN)] == [1]
    keep_releases(home, [release(3), release(1), release(2)])
    assert len((tmp_path / "releases").read_text().splitlines()) == 2
    assert kept_releases(home, RUN) == [release(1), release(2), release(3)]
    keep_releases(home, [release(3), release(4)])
    assert [each.number for each in kept_releases(home, RUN)] == [1, 3, 4]


def test_what_the_authority_has_not_signed_for_this_run_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [release(5, key=OTHER).text, release(6, run_id="other").text, "nonsense", release(2).text]
    for line in lines:
        (tmp_path / "releases").write_text(f"{line}\n")
        kept = [each.number for each in kept_releases(Home(tmp_path), RUN)]
        assert kept == ([1, 2] if line == lines[-1] else [1])
    assert caplog.text.count("is left out") == len(lines) - 1


# The progress of a run, by the words of members of which a few may lie.


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
