"""Loggers: the same figures of reports and of events, in TensorBoard and in Weights & Biases."""

from __future__ import annotations

import importlib.util
import sys
import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from p2pavg.base.result import NoPeers
from p2pavg.optim.logging.loggers import FiguresLog, TensorBoardLog, WandbLog
from p2pavg.telemetry.events import PeerGone, RoundKind
from tests.programs import run_python
from tests.unit.metrics.fakes import PEERS, ended, updated
from tests.unit.optim.logging.test_display import needs_tensorboard, report, success
from tests.unit.telemetry.statuses import HOSTILE_TEXTS


class Notes(FiguresLog):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[int, dict[str, float]]] = []

    def write(self, figures: Mapping[str, float], epoch: int) -> None:
        self.written.append((epoch, dict(figures)))


def test_an_update_of_events_has_the_figures_of_its_round() -> None:
    log = Notes()
    with log:
        log(ended(lost={PEERS[4]: "gone"}))
        log(updated())
        log(PeerGone(time=1.0, run_id="lab", peer_id=PEERS[1]))
    assert log.written == [
        (
            7,
            {
                "metrics/loss": 2.5,
                "grad_norm": 1.5,
                "learning_rate/0": 0.1,
                "learning_rate/1": 0.01,
                "round/peers": 4,
                "round/samples": 64.0,
                "round/seconds": 2.0,
                "round/bytes_sent": 1010,
                "round/bytes_received": 2000,
                "round/lost": 1,
                "round/clipped": 0,
            },
        )
    ]


def test_an_update_of_another_round_has_no_figures_of_the_last_one() -> None:
    log = Notes()
    log(ended())
    log(ended(RoundKind.FAILED, group_id="ff"))
    log(updated(group_id="ff" * 32, replayed=True))
    [(_, figures)] = log.written
    assert not [name for name in figures if name.startswith("round/")]


def test_reports_and_events_of_one_update_have_the_same_curves() -> None:
    of_report, of_events = Notes(), Notes()
    of_report(report(epoch=7, result=success(), grad_norm=1.5, metrics={"loss": 2.5}))
    of_events(ended())
    of_events(updated(learning_rates=()))
    names = [set(log.written[0][1]) for log in (of_report, of_events)]
    assert names[0] == names[1] - {"round/lost", "round/clipped"}
    assert of_report.written[0][0] == of_events.written[0][0] == 7


def test_rates_and_the_size_of_the_update_are_written_where_the_report_has_them() -> None:
    log = Notes()
    log(report(epoch=1, result=success(), learning_rates=(0.5,), update_norm=0.25))
    [(_, figures)] = log.written
    assert (figures["learning_rate"], figures["update_norm"]) == (0.5, 0.25)


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


@needs_tensorboard
def test_a_metrics_name_of_a_peer_takes_no_other_curve_of_tensorboard(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        metrics = {**dict.fromkeys(HOSTILE_TEXTS, 9.0), "loss": 0.5}
        with TensorBoardLog(tmp_path / "peer") as log:
            log(report(epoch=1, result=success(), grad_norm=2.0, metrics=metrics))
        events = EventAccumulator(str(tmp_path / "peer"))
        events.Reload()
    written = {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert (written["grad_norm"], written["metrics/loss"]) == ([2.0], [0.5])
    assert sum(values == [9.0] for values in written.values()) == len(HOSTILE_TEXTS)
    assert all(name.startswith("metrics/") for name, values in written.items() if values == [9.0])
    assert [path.name for path in tmp_path.iterdir()] == ["peer"]


@dataclass
class FakeRun:
    """A run with the signatures of wandb's."""

    defined: dict[str, str | None] = field(default_factory=dict)
    logged: list[dict[str, Any]] = field(default_factory=list)
    finished: int = 0

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.defined[name] = step_metric

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.logged.append(data)

    def finish(self, exit_code: int | None = None) -> None:
        self.finished += 1


class TestWandb:
    def test_a_run_of_its_own_is_finished(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made, given = FakeRun(), {}

        def init(**arguments: Any) -> FakeRun:
            given.update(arguments)
            return made

        monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
        with WandbLog(project="gpt", mode="offline") as log:
            log(ended())
            log(updated(learning_rates=(0.1,)))
            log.write({"held_out/loss": 2.1}, 7)
        assert given == {"project": "gpt", "mode": "offline"}
        assert made.finished == 1
        assert made.logged[0]["metrics/loss"] == 2.5
        assert made.logged[0]["epoch"] == 7
        assert made.logged[1] == {"held_out/loss": 2.1, "epoch": 7}
        assert made.defined["epoch"] is None
        assert made.defined["metrics/*"] == made.defined["held_out/*"] == "epoch"

    @pytest.mark.parametrize("name", [*HOSTILE_TEXTS, "epoch", "grad_norm"])
    def test_a_metrics_name_of_a_peer_takes_no_other_curve(self, name: str) -> None:
        run = FakeRun()
        with WandbLog(run) as log:
            log(updated(metrics={name: 9.0}))
        [logged] = run.logged
        assert (logged["epoch"], logged["grad_norm"]) == (7, 1.5)
        assert [each for each, value in logged.items() if value == 9.0] == [f"metrics/{name}"]

    def test_a_run_of_the_caller_goes_on(self) -> None:
        run = FakeRun()
        with WandbLog(run) as log:
            log(updated())
        assert (len(run.logged), run.finished) == (1, 0)
        with pytest.raises(ValueError, match="run and project exclude each other"):
            WandbLog(run, project="gpt")

    def test_missing_wandb_error_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "wandb", None)
        with pytest.raises(ImportError, match="pip install wandb"):
            WandbLog()

    @pytest.mark.long
    @pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
    def test_an_offline_run_of_wandb_itself(self, tmp_path: Path) -> None:
        """In a process of its own, because wandb starts threads and processes."""
        code = (
            "from p2pavg.optim.logging.loggers import WandbLog\n"
            "from tests.unit.metrics.fakes import ended, updated\n"
            f"with WandbLog(project='p2pavg', mode='offline', dir={str(tmp_path)!r}) as log:\n"
            "    log(ended()); log(updated()); log.write({'held_out/loss': 2.1}, 7)\n"
            "    print(dict(log._run.summary))\n"
        )
        done = run_python("-c", code)
        assert done.returncode == 0, done.stderr
        assert "'metrics/loss': 2.5" in done.stdout
        assert "'held_out/loss': 2.1" in done.stdout
        assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
