"""Display of reports, in the terminal and for TensorBoard."""

from __future__ import annotations

import importlib.util
import io
from typing import Any

import pytest
import torch
from rich.console import Console

from p2pavg.base.result import Success
from p2pavg.optim import StepReport
from p2pavg.optim.logging.display import RunProgress
from p2pavg.telemetry.events import StateMoved, Waits
from tests.programs import run_python
from tests.unit.metrics.fakes import FakeAverager

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


HOSTILE = ("[/b] no", "[bold]no", "[link=file:///etc/passwd]no", ":skull:", "{0} %s")


@pytest.mark.parametrize("text", HOSTILE)
def test_words_of_other_peers_are_shown_as_they_are(text: str) -> None:
    """A leader declines with "[/b] no", and the reason is in the report: a MarkupError would end the training."""
    assert f"behind: {text}" in drawn(report(behind=text), target=10)
    assert f"epoch 7  {text} 0.25" in drawn(report(result=success(), metrics={text: 0.25}), metric=text)


@pytest.mark.parametrize("text", HOSTILE)
def test_the_reason_of_a_wait_is_shown_as_it_is(text: str) -> None:
    screen, averager = Screen(), FakeAverager()
    with RunProgress(console=screen, averager=averager) as progress:
        for seconds in (1.0, 12.4):
            averager.events.emit(Waits(time=1.0, run_id="lab", reason=text, seconds=seconds))
        progress._progress.refresh()
        assert f"waits 12 s: {text}" in screen.text


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
        "import sys; before = set(sys.modules); import p2pavg.optim.logging.display;"
        "print({'rich.progress', 'tensorboard', 'torch.utils.tensorboard'} & (set(sys.modules) - before))"
    )
    found = run_python("-c", code, check=True)
    assert found.stdout.strip() == "set()"


class Screen(Console):
    """A terminal of 120 columns that writes to a string."""

    def __init__(self, *, terminal: bool = True) -> None:
        super().__init__(file=io.StringIO(), force_terminal=terminal, width=120)

    @property
    def text(self) -> str:
        assert isinstance(self.file, io.StringIO)
        return self.file.getvalue()


def moved(done: int, total: int = 4_000_000, direction: Any = "download") -> StateMoved:
    return StateMoved(
        time=1.0,
        run_id="lab",
        direction=direction,
        done=done,
        total=total,
        bytes_per_second=1_500_000.0,
        peers=2,
    )


def test_a_transfer_of_a_state_has_a_bar_while_it_runs() -> None:
    screen, averager = Screen(), FakeAverager()
    with RunProgress(console=screen, averager=averager) as progress:
        averager.events.emit(moved(1_000_000))
        averager.events.emit(moved(10, 0, "upload"))
        progress._progress.refresh()
        assert "fetching a state" in screen.text
        assert "1.0 MB of 4.0 MB  1.5 MB/s  2 peers" in screen.text
        assert "sending a state" in screen.text
        averager.events.emit(moved(4_000_000))
        assert [task.description for task in progress._progress.tasks] == [
            "waiting for the first batch",
            "sending a state",
        ]
    averager.events.emit(moved(1))
    assert len(progress._progress.tasks) == 2, "no events after the end"


def test_no_bars_of_transfers_outside_a_terminal() -> None:
    screen, averager = Screen(terminal=False), FakeAverager()
    with RunProgress(console=screen, averager=averager):
        averager.events.emit(moved(1_000_000))
    assert "fetching" not in screen.text
