"""`p2pavg join LINK` as people use it: processes, a link, a job, the question, and a comeback."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs.fences import needs_fence
from tests.integration.jobs.join_work import (
    COMMAND,
    WATCHDOG_SECONDS,
    call,
    eventually,
    free_port,
    make_run,
    started,
)
from tests.programs import run_python

pytestmark = pytest.mark.processes

FEW_UPDATES = 4


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, str, list[str]]:
    """A folder in which a run was made: the folder, the job's hash, the links."""
    return tmp_path, *make_run(tmp_path)


def on_page(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/run.json") as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@needs_fence
def test_a_volunteer_joins_by_a_link_and_comes_back(run: tuple[Path, str, list[str]]) -> None:
    folder, root, links = run
    agree = ("--yes", "--job", root)
    with started(folder, "operator", "join", "lab", *agree) as operator:
        operator.until("waited|environment is ready")
        page = ("--monitor", str(free_port()))
        with started(folder, "first", "join", links[0], "--home", "first", *agree, *page) as first:
            first.until("update [0-9]+ of 2 peers")
            assert "the job is here" in first.text
            assert "lab: sees the home folder's files: False" in first.text
            assert "lab: sees the folder that it was started in: False" in first.text
            # The process outside of the fence hears of the update a little later than this test.
            gave = "training +update [0-9]+, loss .* this machine gave [0-9]+ samples in"
            eventually(lambda: re.search(gave, call(folder, "status", "--home", "first")))
            # The page hears of it through a status that is published now and then.
            eventually(lambda: "this machine gave" in on_page(int(page[1]))["gives"])
            # Ctrl-C: the program hears of it through the gate, and ends in order.
            first.process.send_signal(signal.SIGINT)
            assert first.end() == 0
            assert "stopped by its user" in first.text
            given = "this machine gave [0-9]+ samples in [0-9]+ updates?, [0-9]+% of theirs"
            assert re.search(given, first.text)
            assert "Traceback" not in first.text
        # The same command again, with the link that was used: the agreement was kept, and needs no option.
        with started(folder, "again", "join", links[0], "--home", "first") as again:
            again.until("update [0-9]+ of 2 peers")
            assert "you have agreed to this job before" in again.text
            for each in (operator, again):
                each.process.send_signal(signal.SIGINT)
            assert [operator.end(), again.end()] == [0, 0]
            common = operator.updates.keys() & again.updates.keys()
            assert common
            assert all(operator.updates[number] == again.updates[number] for number in common)
    # The key is in the folder, and not in what was handed to the program.
    assert (folder / "first" / "identity.key").exists()
    assert not list((folder / "first" / "handed").rglob("*.key"))


@needs_fence
def test_without_a_terminal_nothing_runs(run: tuple[Path, str, list[str]]) -> None:
    folder, root, _ = run
    with started(folder, "mute", "join", "lab") as mute:
        assert mute.end() == 1
        assert "its hash" in mute.text
        assert "there is no terminal to ask on" in mute.text
        assert f"--yes --job {root}" in mute.text
    assert not (folder / "lab" / "scratch").exists()


@needs_fence
@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (b"\x04", 1, "you did not agree to the job, so nothing of it ran"),  # Ctrl-D
        (b"\x03", 0, "stopped by its user"),  # Ctrl-C
        (b"\n", 0, "the environment is ready"),
    ],
    ids=["end", "interrupt", "enter"],
)
def test_the_question_on_a_terminal(
    run: tuple[Path, str, list[str]], answer: bytes, code: int, words: str
) -> None:
    folder, _, _ = run
    ours, theirs = pty.openpty()
    # A session of its own: the terminal is its controlling one, and turns keys into signals.
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *COMMAND, "join", "lab"],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(theirs)
    watchdog = threading.Timer(WATCHDOG_SECONDS, process.kill)
    watchdog.start()
    text, told = b"", []
    try:
        while True:
            try:
                text += os.read(ours, 65536)
            except OSError:  # the command has ended, and closed its side
                break
            for seen, typed in ((b"Train with it? [Y/n]", answer), (b"lab: sees the home", b"\x03")):
                if seen in text and seen not in told:
                    told.append(seen)
                    os.write(ours, typed)
        assert process.wait(WATCHDOG_SECONDS) == code, text.decode()
    finally:
        watchdog.cancel()
        os.close(ours)
        process.kill()
        process.wait()
    assert words in text.decode(), text.decode()
    assert b"Traceback" not in text
    assert (folder / "lab" / "scratch").exists() == (answer == b"\n")


def test_a_packed_job_trains_in_launch_as_on_the_desk(
    run: tuple[Path, str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = run
    monkeypatch.setenv("UPDATES", str(FEW_UPDATES))
    launched = call(folder, "launch", "-n", "2", "--job", "job")
    ends = re.findall(r"^\[([01])\] ended with (.*)$", launched, re.MULTILINE)
    assert sorted(number for number, _ in ends) == ["0", "1"], launched
    assert len({digest for _, digest in ends}) == 1
    shutil.rmtree(folder / "job" / ".scratch")
    alone = run_python("job/train.py", cwd=folder, check=True)
    assert alone.stdout.count("of 1 peers") == FEW_UPDATES


def test_a_peer_that_fails_ends_the_others_unless_they_are_elastic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails.py").write_text(
        "import os, pathlib, time\n"
        "mark = pathlib.Path(os.environ['P2PAVG_SCRATCH'], 'mark')\n"
        "number = mark.parent.name\n"
        "mark.parent.mkdir(parents=True, exist_ok=True)\n"
        "again = mark.exists()\n"
        "mark.touch()\n"
        "print('again' if again else 'first', flush=True)\n"
        "if number == '1' and not again: raise SystemExit(3)\n"
        "time.sleep(0 if again or os.environ.get('SHORT') else 60)\n"
    )
    assert "[1] the program ended with exit code 3" in call(tmp_path, "launch", "-n", "2", "fails.py", code=1)
    shutil.rmtree(tmp_path / ".scratch")
    monkeypatch.setenv("SHORT", "1")
    assert "[1] again" in call(tmp_path, "launch", "-n", "2", "--elastic", "fails.py")
