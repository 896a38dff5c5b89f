"""`p2pavg.job()` behind a gate, and its exit codes: only a failure starts a program again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import trio

from p2pavg.base.errors import RunEndedError
from p2pavg.net.gate.server import open_gate
from p2pavg.peer.peer import PEER_PROTOCOLS
from p2pavg.runs.membership.armour import certificate_text
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.strategies.job import CERTIFICATE, GATE, GPU_MEMORY, RUN_FILE, SCRATCH, Job, job
from p2pavg.testing import MemoryNetwork
from p2pavg.tools.jobs.running import JobProgram
from tests.unit.runs.membership.runs import SECRET, Authority, signer

WATCHDOG_SECONDS = 120.0


async def behind_a_gate(folder: Path, monkeypatch: pytest.MonkeyPatch, body: Callable[[Job], None]) -> None:
    """Run the part of a program that is in its run, as `p2pavg join` starts it."""
    authority, mine = Authority(), signer(7)
    run = RunFile(run_id="lab", authority=authority.public, secret=SECRET)
    (folder / "job.run").write_text(run.text)
    certificate = authority.certify(mine.peer_id, not_before=time.time() - 1.0, expires=time.time() + 1e4)
    (folder / "job.cert").write_text(certificate_text(certificate))
    files = {GATE: "gate", RUN_FILE: "job.run", CERTIFICATE: "job.cert", SCRATCH: "scratch"}
    for name, file in files.items():
        monkeypatch.setenv(name, str(folder / file))

    def program() -> None:
        with job() as found:
            body(found)

    async with (
        MemoryNetwork().transport(mine) as network,
        open_gate(network, mine, folder / "gate", PEER_PROTOCOLS, (b"",)),
    ):
        with trio.fail_after(WATCHDOG_SECONDS):
            await trio.to_thread.run_sync(program)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


async def test_a_program_finds_its_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Job] = []
    await behind_a_gate(folder, monkeypatch, seen.append)
    assert (seen[0].min_peers, seen[0].strategy, seen[0].scratch) == (2, None, folder / "scratch")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RunEndedError("the run has ended"), 0, "the run has ended"),
        (KeyboardInterrupt(), 0, ""),
        (ValueError("a bug"), None, ""),
    ],
    ids=["the run's end", "the user's wish", "a bug"],
)
async def test_exit_codes(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int | None,
    said: str,
) -> None:
    def body(_: Job) -> None:
        raise error

    with pytest.raises((SystemExit, ValueError)) as caught:
        await behind_a_gate(folder, monkeypatch, body)
    assert getattr(caught.value, "code", None) == code
    assert capsys.readouterr().out.strip() == said


@pytest.mark.parametrize(("declared", "share"), [("4", 0.25), ("64", 1.0), ("0", None), (None, None)])
def test_torch_keeps_to_the_gpu_memory_of_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declared: str | None, share: float | None
) -> None:
    bounds: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=16 * 2**30)
    )
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *fraction: bounds.append(fraction)
    )
    monkeypatch.setenv(SCRATCH, str(tmp_path))
    if declared is not None:
        monkeypatch.setenv(GPU_MEMORY, declared)
    with job():
        assert bounds == ([] if share is None else [(share, 0), (share, 1)])


async def test_what_a_program_without_a_fence_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    """In a fence, the kernel ends it."""
    # The parent prints the number: it ends at once, which may be before the child has had any time.
    source = "import os, time\nif child := os.fork():\n  print(child, flush=True)\nelse:\n  time.sleep(600)\n"
    said: list[str] = []
    program = JobProgram([sys.executable, "-c", source], {}, None, tmp_path, None, said.append)
    with trio.fail_after(WATCHDOG_SECONDS):
        assert not (await program.run()).is_error
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(said[0])).status() == psutil.STATUS_ZOMBIE
