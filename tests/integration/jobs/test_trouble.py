"""`p2pavg join LINK` on machines in trouble: a sentence that says what to do, and the same command begins anew."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.jobs.fences import needs_fence
from tests.integration.jobs.join_work import make_run, started

pytestmark = [pytest.mark.processes, pytest.mark.long, needs_fence]

TRAINS = "update [0-9]+ of 2 peers"
STAGES = ("p2pavg|12D3", "the job is here", "the environment is ready", "sees the home folder", TRAINS)
"""Words of the command, after each of which it is killed."""


@pytest.fixture
def words(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """The command of a volunteer of a run with which its operator trains."""
    root, (link,) = make_run(tmp_path, count=1)
    agree = ("--yes", "--job", root)
    with started(tmp_path, "operator", "join", "lab", *agree) as operator:
        operator.until("environment is ready")
        yield ("join", link, "--home", "one", *agree)


def needs(*programs: str) -> None:
    for each in programs:
        if shutil.which(each) is None:
            pytest.skip(f"needs {each}")


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    if os.geteuid():
        pytest.skip("needs root, to mount a disk of 32 kB")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "none", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("needs a machine that mounts tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_it_is_killed_at_each_stage_and_the_same_command_goes_on(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    for stage in STAGES:
        with started(tmp_path, "killed", *words) as one:
            one.until(stage)
            one.process.kill()
            one.process.wait()
    with started(tmp_path, "again", *words) as one:
        one.until(TRAINS)
        one.process.send_signal(signal.SIGINT)
        assert one.end() == 0
        assert "Traceback" not in one.text


@pytest.mark.parametrize(
    "before", [("prlimit", "--nofile=256:256"), ("faketime", "-f", "+1h")], ids=["few files", "fast clock"]
)
def test_it_trains_all_the_same(tmp_path: Path, words: tuple[str, ...], before: tuple[str, ...]) -> None:
    needs(before[0])
    with started(tmp_path, "one", *words, before=before) as one:
        one.until(TRAINS)


@pytest.mark.parametrize(
    ("before", "sentences"),
    [
        (
            ("faketime", "-f", "-1h"),
            ["set the clock, and start the command again: the link is still this peer's"],
        ),
        (
            ("unshare", "--net"),  # a namespace without a network
            ["the peer that made the link did not answer", "and then this one again"],
        ),
    ],
    ids=["slow clock", "no network"],
)
def test_what_keeps_it_out_is_named_and_the_link_is_still_good(
    tmp_path: Path, words: tuple[str, ...], before: tuple[str, ...], sentences: list[str]
) -> None:
    needs(before[0])
    if before[0] == "unshare" and os.geteuid():
        pytest.skip("needs root, for a namespace")
    with started(tmp_path, "out", *words, before=before) as one:
        assert one.end() not in (0, 70)
        assert all(sentence in one.text for sentence in sentences), one.text
        assert "Traceback" not in one.text
    with started(tmp_path, "in", *words) as one:
        one.until(TRAINS)


def test_a_full_disk_is_named_and_leaves_nothing_half_written(tmp_path: Path, words: tuple[str, ...]) -> None:
    with small_disk(tmp_path / "full") as full:
        there = [str(full / "one") if word == "one" else word for word in words]
        (full / "ballast").write_bytes(bytes(24 * 1024))
        with started(tmp_path, "first", *there) as one:
            assert one.end() not in (0, 70)
            assert str(full) in one.text
            assert "Traceback" not in one.text
        (full / "ballast").unlink()
        subprocess.run(["mount", "-o", "remount,size=64m", str(full)], check=True)
        with started(tmp_path, "second", *there) as one:
            one.until(TRAINS)


@pytest.mark.parametrize("what", ["damaged", "used"])
def test_a_link_that_is_of_no_use_is_named(tmp_path: Path, words: tuple[str, ...], what: str) -> None:
    command, link, *rest = words
    if what == "damaged":
        link = link[:-5] + ("aaaaa" if link[-5:] != "aaaaa" else "bbbbb")
    else:
        with started(tmp_path, "other", command, link, *rest) as other:
            other.until("the job is here")
    with started(tmp_path, "two", command, link, "--home", "two", *rest[2:]) as two:
        assert two.end() not in (0, 70), two.text
        assert "link" in two.text
        assert "Traceback" not in two.text
