"""Display of reports, in the terminal and for TensorBoard."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from p2pavg.optim import StepReport
from p2pavg.optim.display import RunProgress, TensorBoardLog
from p2pavg.result import NoPeers, Success

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)


def success(**changes: Any) -> Success:
    fields: dict[str, Any] = {
        "averaged": [torch.zeros(1)],
        "peers": ("one", "two"),
        "weights": {"one": 30.0, "two": 10.0},
        "total_weight": 40.0,
        "compression_ratio": 3.0,
        "bytes_sent": 1000,
        "bytes_received": 1100,
        "duration": 0.5,
        "exchange_duration": 0.25,
        "group_id": "00",
        "share": (0, 1),
    }
    return Success(**(fields | changes))


def report(**changes: Any) -> StepReport:
    fields: dict[str, Any] = {
        "epoch": 7,
        "peers": 3,
        "others": 0,
        "samples": 1024.0,
        "samples_per_second": 1234.4,
    }
    return StepReport(**(fields | changes))


def drawn(*reports: StepReport, **options: Any) -> str:
    """Return the final screen."""
    screen = io.StringIO()
    with RunProgress(console=Console(file=screen, width=160), **options) as progress:
        for each in reports:
            progress.show(each)
    return screen.getvalue()


def test_line_shows_the_progress_of_the_run() -> None:
    text = drawn(report(), target=4096)
    assert "epoch 7 " in text
    assert "1,024/4,096 samples  3 peers  1,234 samples/s" in text
    assert "loss" not in text, "no update has told it yet"


def test_loss_is_that_of_the_last_update() -> None:
    update = report(result=success(), metrics={"loss": 0.25, "error": 0.5})
    assert "epoch 8  loss 0.25" in drawn(update, report(epoch=8))
    assert "epoch 8  error 0.5" in drawn(update, report(epoch=8), metric="error")


def test_without_a_target_it_counts_samples() -> None:
    text = drawn(report(peers=1))
    assert " 1,024 samples  1 peer " in text
    assert "━" not in text


def test_more_samples_than_the_target_are_shown() -> None:
    assert "5,000/4,096 samples" in drawn(report(samples=5000.0), target=4096)


def test_a_peer_that_is_behind_is_told_so() -> None:
    assert "behind: 2 peers are at epoch 9" in drawn(report(behind="2 peers are at epoch 9"), target=10)


@pytest.mark.parametrize("target", [0, -1, float("inf"), float("nan")])
def test_a_target_out_of_range_is_named(target: float) -> None:
    with pytest.raises(ValueError, match="target must be"):
        RunProgress(target=target)


def test_an_exception_in_the_loop_leaves_the_screen_as_it_was() -> None:
    screen = io.StringIO()
    progress = RunProgress(console=Console(file=screen, force_terminal=True, width=80))
    with pytest.raises(ZeroDivisionError), progress:
        raise ZeroDivisionError
    assert screen.getvalue().endswith("\x1b[?25h"), "the cursor stays hidden"


def test_importing_the_module_imports_neither_rich_nor_tensorboard() -> None:
    code = (
        "import sys; before = set(sys.modules); import p2pavg.optim.display;"
        "print({'rich.progress', 'tensorboard', 'torch.utils.tensorboard'} & (set(sys.modules) - before))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_missing_tensorboard_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        TensorBoardLog(tmp_path)


@needs_tensorboard
def test_updates_are_written_for_tensorboard(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        with TensorBoardLog(tmp_path / "peer") as log:
            log(report(epoch=1, result=success(), grad_norm=2.0, metrics={"loss": 0.5}))
            log(report(epoch=1))
            log(report(epoch=1, result=NoPeers()))
            log(report(epoch=2, result=success(total_weight=44.0), grad_norm=1.0, metrics={"loss": 0.25}))
        events = EventAccumulator(str(tmp_path / "peer"))
        events.Reload()
    found = {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    assert found == {
        "metrics/loss": [(1, 0.5), (2, 0.25)],
        "grad_norm": [(1, 2.0), (2, 1.0)],
        "round/peers": [(1, 2.0), (2, 2.0)],
        "round/samples": [(1, 40.0), (2, 44.0)],
        "round/seconds": [(1, 0.5), (2, 0.5)],
        "round/bytes_sent": [(1, 1000.0), (2, 1000.0)],
        "round/bytes_received": [(1, 1100.0), (2, 1100.0)],
    }
