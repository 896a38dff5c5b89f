"""Processes of the command with a job, for tests: their words go to files."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from pathlib import Path

import psutil
from typer.testing import CliRunner

from p2pavg.tools.cli.main import app

COMMAND = [sys.executable, "-m", "p2pavg"]
WATCHDOG_SECONDS = 240.0
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
from p2pavg.optim import AveragedOptimizer, RunState

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
torch.seed()
with p2pavg.job() as job:
    print("sees the home folder's files:", os.path.exists(os.path.join("{Path.home()}", ".bashrc")), flush=True)
    print("sees the folder that it was started in:", os.path.exists("FOLDER/line.job"), flush=True)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = AveragedOptimizer(
        inner,
        job.averager,
        target_batch_size=64,
        state=RunState(model, job.scratch / "checkpoints", every=10),
        min_peers=job.min_peers,
    )
    # Without end, unless a test says so: a volunteer that a busy machine starts late still finds the others.
    while optimizer.epoch < int(os.environ.get("UPDATES", "1000000")):
        inputs = torch.randn(16, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        report = optimizer.step(samples=len(inputs), metrics={{"loss": loss.item()}})
        time.sleep(0.05)
        if report.updated:
            digest = sum(p.double().abs().sum().item() for p in model.parameters()).hex()
            print(f"update {{report.epoch}} of {{len(report.result.peers)}} peers: {{digest}}", flush=True)
    job.averager.end()
    print("ended with", digest, flush=True)
"""


class Started:
    """A process of the command, whose words go to a file."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *arguments: str,
        before: tuple[str, ...] = (),
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.words = folder / f"{name}.txt"
        self._file = self.words.open("w")
        self.process = subprocess.Popen(
            [*before, *command, *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "XDG_DATA_HOME": str(folder / "data"), "PYTHONUNBUFFERED": "1"},
        )

    @property
    def updates(self) -> dict[int, str]:
        """The digest of the parameters after each update that it has taken."""
        found = re.findall(r"update (\d+) of \d+ peers: (\S+)$", self.text, re.MULTILINE)
        return {int(number): digest for number, digest in found}

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
            # faketime and its like start the command as a child.
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            self.process.kill()
            self.process.wait()
        self._file.close()


@contextmanager
def started(folder: Path, name: str, *arguments: str, before: tuple[str, ...] = ()) -> Iterator[Started]:
    """Start the command until the end of the block.

    Args:
        before: words before it, such as those that enter a namespace.
    """
    found = Started(folder, name, *arguments, before=before)
    try:
        yield found
    finally:
        found.close()


def call(folder: Path, *arguments: str, code: int = 0) -> str:
    """Run the command to its end, in this process; return what it prints."""
    with chdir(folder):
        done = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


def eventually(found: Callable[[], object]) -> None:
    end = time.monotonic() + WATCHDOG_SECONDS
    while not found():
        assert time.monotonic() < end
        time.sleep(0.1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def make_run(
    tmp_path: Path, *, address: str = "127.0.0.1", count: int = 2, job: Path | None = None
) -> tuple[str, list[str]]:
    """Make a run with a job in a folder; return the job's hash, and links.

    Args:
        job: its folder; ``None``: a new one of a job that finds a straight line.
    """
    if job is None:
        job = tmp_path / "job"
        job.mkdir()
        (job / "job.toml").write_text(MANIFEST)
        (job / "train.py").write_text(TRAIN.replace("FOLDER", str(tmp_path)))
    root = re.search(r"root ([0-9a-f]{64})", call(tmp_path, "job", "pack", str(job), "-o", "line.job"))
    assert root is not None
    made = call(
        tmp_path, "run", "create", "lab", "--job", "line.job", "--address", address, "--count", str(count)
    )
    return root.group(1), re.findall(r"join (p2pavg:\S+)", made)
