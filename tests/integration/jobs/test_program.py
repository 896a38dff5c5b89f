"""`p2pavg.job()` in a process of its own, behind a gate, and its exit codes: only a failure starts a program again."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trio

from p2pavg.net.gate.server import open_gate
from p2pavg.peer.peer import PEER_PROTOCOLS
from p2pavg.runs.membership.armour import certificate_text
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.strategies.job import CERTIFICATE, GATE, GPU_MEMORY, RUN_FILE, SCRATCH, job
from p2pavg.testing import MemoryNetwork
from tests.programs import run_python
from tests.unit.runs.membership.runs import SECRET, Authority, signer

pytestmark = pytest.mark.processes

WATCHDOG_SECONDS = 120.0
BODY = """
import p2pavg
with p2pavg.job() as job:
    {}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("print(job.min_peers, job.strategy, job.scratch.name)", 0, "2 None scratch"),
        ("raise p2pavg.RunEndedError('the run has ended')", 0, "the run has ended"),
        ("raise KeyboardInterrupt", 0, ""),
        ("raise ValueError('a bug')", 1, "ValueError: a bug"),
    ],
)
async def test_exit_codes(folder: Path, body: str, code: int, said: str) -> None:
    authority, mine = Authority(), signer(7)
    run = RunFile(run_id="lab", authority=authority.public, secret=SECRET)
    (folder / "job.run").write_text(run.text)
    certificate = authority.certify(mine.peer_id, not_before=time.time() - 1.0, expires=time.time() + 1e4)
    (folder / "job.cert").write_text(certificate_text(certificate))
    environment = {
        **os.environ,
        GATE: str(folder / "gate"),
        RUN_FILE: str(folder / "job.run"),
        CERTIFICATE: str(folder / "job.cert"),
        SCRATCH: str(folder / "scratch"),
    }
    async with (
        MemoryNetwork().transport(mine) as network,
        open_gate(network, mine, folder / "gate", PEER_PROTOCOLS, lambda _: True),
    ):
        run_body = partial(run_python, "-c", BODY.format(body), env=environment, timeout=WATCHDOG_SECONDS)
        done = await trio.to_thread.run_sync(run_body)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert code or "Traceback" not in done.stderr


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
