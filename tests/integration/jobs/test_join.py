"""`p2pavg join LINK` as three people use it: processes, a link, a job, the question, and a comeback."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.jobs.fences import needs_fence

pytestmark = pytest.mark.processes

COMMAND = [sys.executable, "-m", "p2pavg"]
WATCHDOG_SECONDS = 240.0
UPDATES = 80
"""Of the run with volunteers: it must not end before the last of them is there, on a busy machine either."""
FEW_UPDATES = 12
MANIFEST = """
name = "line"
author = "Ada"
about = "Finds a straight line."
program = "train.py"
[needs]
memory_gb = 2
disk_gb = 0.1
"""
TRAIN = f"""
import os, time, torch, p2pavg
from p2pavg.optim import AveragedOptimizer

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
torch.seed()
with p2pavg.job() as job:
    print("sees the home folder's files:", os.path.exists(os.path.join("{Path.home()}", ".bashrc")), flush=True)
    print("sees the folder that it was started in:", os.path.exists("FOLDER/line.job"), flush=True)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = AveragedOptimizer(
        inner, job.averager, target_batch_size=64, state=model, min_peers=job.min_peers
    )
    while optimizer.epoch < int(os.environ.get("UPDATES", "{UPDATES}")):
        inputs = torch.randn(16, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        report = optimizer.step(samples=len(inputs), metrics={{"loss": loss.item()}})
        time.sleep(0.05)
        if report.updated:
            print(f"update {{report.epoch}} of {{len(report.result.peers)}} peers", flush=True)
    job.averager.end()
    digest = sum(p.double().abs().sum().item() for p in model.parameters())
    print(f"ended with {{digest.hex()}}", flush=True)
"""


class Started:
    """A process of the command, whose words go to a file."""

    def __init__(self, folder: Path, name: str, *arguments: str, before: tuple[str, ...] = ()) -> None:
        self.words = folder / f"{name}.txt"
        self._file = self.words.open("w")
        self.process = subprocess.Popen(
            [*before, *COMMAND, *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "XDG_DATA_HOME": str(folder / "data"), "PYTHONUNBUFFERED": "1"},
        )

    @property
    def text(self) -> str:
        return self.words.read_text()

    def until(self, pattern: str) -> re.Match[str]:
        """Wait until it has said something; fail if it ends before."""
        end = time.monotonic() + WATCHDOG_SECONDS
        while time.monotonic() < end:
            ended = self.process.poll() is not None
            if found := re.search(pattern, self.text):
                return found
            assert not ended, self.text
            time.sleep(0.1)
        raise AssertionError(f"no {pattern!r} in\n{self.text}")

    def end(self) -> int:
        return self.process.wait(WATCHDOG_SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._file.close()


@contextmanager
def started(folder: Path, name: str, *arguments: str) -> Iterator[Started]:
    found = Started(folder, name, *arguments)
    try:
        yield found
    finally:
        found.close()


def call(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [*COMMAND, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
        env={**os.environ, "COLUMNS": "200"},
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, str, list[str]]:
    """A folder in which a run was made: the folder, the job's hash, the links."""
    job = tmp_path / "job"
    job.mkdir()
    (job / "job.toml").write_text(MANIFEST)
    (job / "train.py").write_text(TRAIN.replace("FOLDER", str(tmp_path)))
    root = re.search(r"root ([0-9a-f]{64})", call(tmp_path, "job", "pack", "job", "-o", "line.job"))
    assert root is not None
    made = call(
        tmp_path, "run", "create", "lab", "--job", "line.job", "--address", "127.0.0.1", "--count", "2"
    )
    return tmp_path, root.group(1), re.findall(r"join (p2pavg:\S+)", made)


@needs_fence
def test_two_volunteers_join_by_links_and_one_comes_back(run: tuple[Path, str, list[str]]) -> None:
    folder, root, links = run
    agree = ("--yes", "--job", root)
    with started(folder, "operator", "join", "lab", *agree) as operator:
        operator.until("waited|environment is ready")
        with started(folder, "first", "join", links[0], "--home", "first", *agree) as first:
            first.until("update [0-9]+ of 2 peers")
            assert "the job is here" in first.text
            assert "lab: sees the home folder's files: False" in first.text
            assert "lab: sees the folder that it was started in: False" in first.text
            # Ctrl-C: the program hears of it through the gate, and ends in order.
            first.process.send_signal(signal.SIGINT)
            assert first.end() == 0
            assert "stopped by its user" in first.text
            assert "Traceback" not in first.text
        # The same command again, with the link that was used: the agreement was kept, and needs no option.
        with (
            started(folder, "again", "join", links[0], "--home", "first") as again,
            started(folder, "second", "join", links[1], "--home", "second", *agree) as second,
        ):
            ends = [each.until("ended with (.*)").group(1) for each in (operator, again, second)]
            assert [each.end() for each in (operator, again, second)] == [0, 0, 0]
            assert "you have agreed to this job before" in again.text
            assert len(set(ends)) == 1
    # The key is in the folder, and not in what was handed to the program.
    assert (folder / "first" / "identity.key").exists()
    assert not list((folder / "first" / "handed").rglob("*.key"))


@needs_fence
def test_without_agreement_nothing_runs(run: tuple[Path, str, list[str]]) -> None:
    folder, root, links = run
    with started(folder, "operator", "join", "lab", "--only-help") as operator:
        operator.until("/p2p/")
        with started(folder, "wrong", "join", links[0], "--home", "h", "--yes", "--job", "0" * 64) as wrong:
            assert wrong.end() == 1
            assert f"the run's job is {root}, and --job allows {'0' * 64} only" in wrong.text
        # The link was used, and its certificate is kept: the same folder needs no new one.
        with started(folder, "mute", "join", links[0], "--home", "h") as mute:
            assert mute.end() == 1
            assert "its hash" in mute.text
            assert "there is no terminal to ask on" in mute.text
            assert f"--yes --job {root}" in mute.text
        assert not (folder / "h" / "scratch").exists()
        # What was changed on the disk is not what was signed: it is fetched again.
        (folder / "h" / "jobs" / f"{root}.job").write_bytes(b"x")
        with started(folder, "again", "join", links[0], "--home", "h") as again:
            assert again.end() == 1
            assert "there is no terminal to ask on" in again.text
        assert (folder / "h" / "jobs" / f"{root}.job").read_bytes() == (folder / "line.job").read_bytes()


def test_a_machine_without_a_fence_runs_nothing_by_itself(
    run: tuple[Path, str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, root, _ = run
    bare = folder / "programs"
    bare.mkdir()
    monkeypatch.setenv("PATH", str(bare))
    with started(folder, "bare", "join", "lab", "--yes", "--job", root) as bare_start:
        assert bare_start.end() == 1
        assert "THERE IS NO FENCE AROUND THIS PROGRAM: the program bwrap is not installed" in bare_start.text
        assert "--yes runs a job behind a fence only" in bare_start.text
    assert not (folder / "lab" / "scratch").exists()
    with started(folder, "forced", "join", "lab", "--yes", "--job", root, "--no-fence") as forced:
        forced.until("sees the home folder")
        forced.process.send_signal(signal.SIGINT)
        assert forced.end() == 0


@needs_fence
def test_a_packed_job_trains_in_launch_as_on_the_desk(
    run: tuple[Path, str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = run
    monkeypatch.setenv("UPDATES", str(FEW_UPDATES))
    with started(folder, "launched", "launch", "-n", "2", "--job", "job") as launched:
        assert launched.end() == 0
    ends = re.findall(r"^\[([01])\] ended with (.*)$", launched.text, re.MULTILINE)
    assert sorted(number for number, _ in ends) == ["0", "1"]
    assert len({digest for _, digest in ends}) == 1
    shutil.rmtree(folder / "job" / ".scratch")
    alone = subprocess.run(
        [sys.executable, "job/train.py"], cwd=folder, capture_output=True, text=True, check=True
    )
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
    with started(tmp_path, "out", "launch", "-n", "2", "fails.py") as out:
        assert out.end() == 1
        assert "[1] the program ended with exit code 3" in out.text
    shutil.rmtree(tmp_path / ".scratch")
    monkeypatch.setenv("SHORT", "1")
    with started(tmp_path, "elastic", "launch", "-n", "2", "--elastic", "fails.py") as out:
        assert out.end() == 0
        assert "[1] again" in out.text
