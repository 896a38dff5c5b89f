"""The code of ``docs/how-to/change-your-loop.md`` runs as it stands."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import p2pavg
from p2pavg.blocking import open_averager
from p2pavg.optim import AveragedOptimizer, diloco
from p2pavg.optim.coordination import attendance
from tests.programs import run_python

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "change-your-loop.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_program_trains_alone_and_ends(tmp_path: Path) -> None:
    """Also its peer ends: with the interpreter, without an error."""
    path = tmp_path / "train.py"
    path.write_text(SNIPPETS[0], encoding="utf-8")
    run = run_python(path, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "updates: 5\n"
    assert run.stderr == ""


def test_the_other_snippets_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance, "SETTLE_START_SECONDS", 0.0)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    loss_of = torch.nn.functional.mse_loss
    batches = [(torch.randn(32, 4), torch.randn(32, 1)) for _ in range(8)]
    config = p2pavg.AveragingConfig(run_id="your-loop")
    with open_averager(config, listen=["/ip4/127.0.0.1/tcp/0"]) as averager:
        names: dict[str, Any] = {
            "torch": torch,
            "model": model,
            "inner": torch.optim.AdamW(model.parameters(), lr=1e-3),
            "averager": averager,
            "batches": batches,
            "loss_of": loss_of,
            "AveragedOptimizer": partial(AveragedOptimizer, min_peers=1),
            "diloco": partial(diloco, min_peers=1),
        }
        epochs = []
        for code in SNIPPETS[1:]:
            exec(code, names)
            epochs.append(names["optimizer"].epoch)
    assert len(epochs) == len(SNIPPETS) - 1
    assert epochs[:2] == [1, 1], "8 batches of 32, and 256 samples an update"
    assert max(epochs[2:]) >= 1
