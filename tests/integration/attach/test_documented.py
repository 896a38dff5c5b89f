"""The documented program of processes that share a peer runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.attach.daemon import daemon

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.long
def test_two_processes_share_a_peer_with_the_documented_program(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/train.md").read_text(encoding="utf-8")
    [code] = (
        code for code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "p2pavg.attach(" in code
    )
    program = tmp_path / "shared.py"
    program.write_text(code, encoding="utf-8")
    with daemon(tmp_path) as peer:
        commands = [[sys.executable, str(program), f"unix:{peer.path}", name] for name in ("one", "two")]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
        printed = [process.communicate(timeout=240)[0].splitlines() for process in running]
        assert [process.returncode for process in running] == [0, 0]
    assert printed[0] == printed[1], "the same means of the losses of both"
    assert [line.partition(":")[0] for line in printed[0]] == [f"update {epoch}" for epoch in range(1, 21)]
