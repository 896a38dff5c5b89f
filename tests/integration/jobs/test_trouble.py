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
from tests.integration.jobs.join_work import Started, make_run, started

pytestmark = [pytest.mark.processes, pytest.mark.long, needs_fence]

TRAINS = "update [0-9]+ of 2 peers"
STAGES = ("p2pavg|12D3", "the job is here", "the environment is ready", "sees the home folder", TRAINS)
"""Words of the command, after each of which it is killed."""


@contextmanager
def operator(folder: Path, root: str) -> Iterator[Started]:
    with started(folder, "operator", "join", "lab", "--yes", "--job", root) as found:
        found.until("environment is ready")
        yield found


def without_network() -> tuple[str, ...]:
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare, for a namespace without a network")
    return ("unshare", "--net")


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


def test_it_is_killed_at_each_stage_and_the_same_command_goes_on(tmp_path: Path) -> None:
    root, links = make_run(tmp_path, count=1)
    words = ("join", links[0], "--home", "one", "--yes", "--job", root)
    with operator(tmp_path, root):
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


@pytest.mark.parametrize("trouble", ["few files", "fast clock"])
def test_it_trains_all_the_same(tmp_path: Path, trouble: str) -> None:
    before = ("prlimit", "--nofile=256:256") if trouble == "few files" else ("faketime", "-f", "+1h")
    if shutil.which(before[0]) is None:
        pytest.skip(f"needs {before[0]}")
    root, links = make_run(tmp_path, count=1)
    with (
        operator(tmp_path, root),
        started(
            tmp_path, "one", "join", links[0], "--home", "one", "--yes", "--job", root, before=before
        ) as one,
    ):
        one.until(TRAINS)


def test_a_clock_that_is_slow_by_an_hour_is_named(tmp_path: Path) -> None:
    if shutil.which("faketime") is None:
        pytest.skip("needs faketime")
    root, links = make_run(tmp_path, count=1)
    words = ("join", links[0], "--home", "one", "--yes", "--job", root)
    with operator(tmp_path, root):
        with started(tmp_path, "slow", *words, before=("faketime", "-f", "-1h")) as one:
            assert one.end() not in (0, 70)
            assert "set the clock, and start the command again: the link is still this peer's" in one.text
            assert "Traceback" not in one.text
        with started(tmp_path, "right", *words) as one:
            one.until(TRAINS)


def test_without_a_network_it_says_so_and_the_link_is_still_good(tmp_path: Path) -> None:
    root, links = make_run(tmp_path, count=1)
    words = ("join", links[0], "--home", "one", "--yes", "--job", root)
    with operator(tmp_path, root):
        with started(tmp_path, "alone", *words, before=without_network()) as one:
            assert one.end() not in (0, 70)
            assert "the peer that made the link did not answer" in one.text
            assert "and then this one again" in one.text
            assert "Traceback" not in one.text
        with started(tmp_path, "online", *words) as one:
            one.until(TRAINS)


def test_a_full_disk_is_named_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    root, links = make_run(tmp_path, count=1)
    words = ("--yes", "--job", root)
    with small_disk(tmp_path / "full") as full, operator(tmp_path, root):
        (full / "ballast").write_bytes(bytes(24 * 1024))
        with started(tmp_path, "first", "join", links[0], "--home", str(full / "one"), *words) as one:
            assert one.end() not in (0, 70)
            assert str(full) in one.text
            assert "Traceback" not in one.text
        (full / "ballast").unlink()
        subprocess.run(["mount", "-o", "remount,size=64m", str(full)], check=True)
        with started(tmp_path, "second", "join", links[0], "--home", str(full / "one"), *words) as one:
            one.until(TRAINS)


@pytest.mark.parametrize("what", ["damaged", "used"])
def test_a_link_that_is_of_no_use_is_named(tmp_path: Path, what: str) -> None:
    root, links = make_run(tmp_path, count=1)
    words = ("--yes", "--job", root)
    with operator(tmp_path, root):
        link = links[0]
        if what == "damaged":
            link = link[:-5] + ("aaaaa" if link[-5:] != "aaaaa" else "bbbbb")
        else:
            with started(tmp_path, "other", "join", link, "--home", "other", *words) as other:
                other.until("the job is here")
        with started(tmp_path, "one", "join", link, "--home", "one", *words) as one:
            assert one.end() not in (0, 70), one.text
            assert "link" in one.text
            assert "Traceback" not in one.text
