"""The rules of a job that runs, and the page that asks a volunteer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from p2pavg.base.errors import ConfigError
from p2pavg.base.limits import ASK_AGAIN_SECONDS, MAX_BACKOFF_SECONDS
from p2pavg.peer.joining.home import Home
from p2pavg.runs.membership.job_release import JobRelease
from p2pavg.tools.jobs.limits import (
    GIB,
    MAX_PROCESSES,
    MAX_SCRATCH_FILES,
    JobEnd,
    JobUsage,
    Restart,
    after_exit,
    beyond,
)
from p2pavg.tools.jobs.manifest import JobManifest, LargeFile, Needs
from p2pavg.tools.jobs.page import JobPage, agreed
from p2pavg.tools.jobs.versions import TrainingOptions, agree

NEEDS = Needs(memory_gb=2.0, disk_gb=1.0)
RELEASE = JobRelease(authority=b"a" * 32, number=3, root=b"r" * 32, size=1000)


def page(
    *,
    no_fence: str = "",
    network: bool = False,
    max_upload_mbps: float | None = None,
    larger: tuple[LargeFile, ...] = (),
) -> JobPage:
    return JobPage(
        run_id="lab",
        release=RELEASE,
        manifest=JobManifest(
            name="tiny",
            author="Ada \x1b[2J",
            about="One line.\nAnother.",
            program="train.py",
            needs=NEEDS,
            network=network,
            files=larger,
        ),
        files=2,
        packages=0,
        no_fence=no_fence,
        kept_files="/home/v/.cache/files",
        scratch="/home/v/scratch",
        max_upload_mbps=max_upload_mbps,
    )


@pytest.mark.parametrize(
    ("usage", "said"),
    [
        (JobUsage(memory=2 * GIB, processes=MAX_PROCESSES, scratch=GIB, files=MAX_SCRATCH_FILES), ""),
        (
            JobUsage(memory=2 * GIB + 1, processes=1, scratch=0),
            "2.00 GB of memory, and its manifest says 2 GB",
        ),
        (JobUsage(memory=0, processes=1, scratch=GIB + 1), "1.00 GB of the disk"),
        (JobUsage(memory=0, processes=MAX_PROCESSES + 1, scratch=0), "257 processes at once"),
        (JobUsage(memory=0, processes=1, scratch=0, files=MAX_SCRATCH_FILES + 1), "more than 100000 files"),
    ],
)
def test_what_is_beyond_the_manifest(usage: JobUsage, said: str) -> None:
    assert said in beyond(NEEDS, usage)
    assert bool(said) == bool(beyond(NEEDS, usage))


def test_a_program_that_has_ended_well_is_over() -> None:
    decision = after_exit(0, ran=1.0, failures=3)
    assert isinstance(decision, JobEnd)
    assert not decision.is_error


@given(failures=st.integers(0, 60), ran=st.floats(0.0, MAX_BACKOFF_SECONDS, exclude_max=True))
def test_pauses_grow_and_are_bounded(failures: int, ran: float) -> None:
    first = after_exit(1, ran=ran, failures=failures)
    assert isinstance(first, Restart)
    assert first.failures == failures + 1
    second = after_exit(-9, ran=ran, failures=first.failures)
    assert isinstance(second, Restart)
    assert ASK_AGAIN_SECONDS <= first.pause <= second.pause <= MAX_BACKOFF_SECONDS
    assert second.pause > first.pause or first.pause == MAX_BACKOFF_SECONDS


def test_a_program_that_ran_for_long_begins_with_the_first_pause() -> None:
    assert after_exit(1, ran=MAX_BACKOFF_SECONDS, failures=7) == Restart(ASK_AGAIN_SECONDS, 1)


def test_the_page_says_what_will_run() -> None:
    lines = "\n".join(page(max_upload_mbps=8.0).lines)
    assert "Ada ?[2J" in lines
    assert "\x1b" not in lines
    assert RELEASE.root.hex() in lines
    assert "up to 2 GB of memory and 1 GB of the disk; no GPU" in lines
    assert "at most 3.6 GB an hour" in lines
    assert "no other file, no other process" in lines
    assert page().default


def test_the_page_says_from_where_larger_files_come() -> None:
    assert "fetches" not in "\n".join(page().lines)
    urls = ("https://models.example/a", "http://user@10.0.0.1:80/a")
    larger = [LargeFile(name=name, bytes=10**9, sha256="0" * 64, urls=urls) for name in ("a", "b")]
    (row,) = [line for line in page(larger=tuple(larger)).lines if "fetches" in line]
    servers = "https://models.example, http://10.0.0.1:80"
    assert row == f"  fetches   2 larger files, 2.0 GB, from {servers}; kept in /home/v/.cache/files"
    # However many there are, what the page says before them stays in sight.
    most = tuple(f"https://{'a' * 60}.{number}.example/" for number in range(8))
    many = [
        LargeFile(name=str(number), bytes=10, sha256="0" * 64, urls=most if number else ())
        for number in range(9)
    ]
    (row,) = [line for line in page(larger=tuple(many)).lines if "fetches" in line]
    assert len(row) < 600
    assert "others, your --files; kept" in row


def test_a_machine_without_a_fence_says_so_first_and_its_answer_is_no() -> None:
    bare = page(no_fence="bwrap is not installed")
    assert bare.lines[0].startswith("THERE IS NO FENCE AROUND THIS PROGRAM: bwrap is not installed")
    assert "all files of this user" in "\n".join(bare.lines)
    assert not bare.default
    assert bare.question == "There is no fence around it. Train with it? [y/N] "


def test_a_job_with_connections_of_its_own_has_to_be_agreed_to() -> None:
    assert not page(network=True).default
    assert "all of the network with this machine's own programs, as it asks for" in "\n".join(
        page(network=True).lines
    )


def test_only_a_clear_yes_is_one() -> None:
    for default in (True, False):
        assert agreed("", default=default) is default
        assert all(agreed(answer, default=default) for answer in ("y", " Yes "))
        assert not any(agreed(answer, default=default) for answer in ("n", "yess", "what?"))


async def test_a_yes_is_about_one_job_and_its_fence(tmp_path: Path) -> None:
    home = Home(tmp_path)
    allowed = TrainingOptions(
        hashes=(RELEASE.root.hex(),),
        without_fence=False,
        files=None,
        max_upload_mbps=None,
        max_download_mbps=None,
        bandwidth=None,
    )
    asked = replace(allowed, hashes=())
    with pytest.raises(ConfigError, match="no terminal to ask on"):
        await agree(page(), home, asked)
    await agree(page(), home, allowed)
    await agree(page(), home, asked)
    another = replace(page(), release=structs.replace(RELEASE, root=b"o" * 32))
    for other in (another, page(no_fence="bwrap is not installed"), page(network=True)):
        with pytest.raises(ConfigError, match="no terminal to ask on"):
            await agree(other, home, asked)
