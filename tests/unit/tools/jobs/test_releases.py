"""The releases that a member's folder keeps: those that are genuine, and no more than two."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pavg.peer.joining.home import Home
from p2pavg.runs.membership.job_release import JobRelease, sign_release
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.tools.jobs.releases import keep_releases, kept_releases
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
