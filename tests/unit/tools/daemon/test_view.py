"""A volunteer's view: how far the run is, what this machine gives and with whom, whatever peers claim."""

from __future__ import annotations

import io
import logging
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from msgspec.structs import replace
from rich.console import Console
from trio.testing import MockClock

from p2pavg.base.formats import bars
from p2pavg.telemetry.status import Activity, PeerStatus
from p2pavg.tools.control.messages import DaemonStatus
from p2pavg.tools.daemon.life import DaemonProcess
from p2pavg.tools.daemon.view import LogLines, showing, view
from p2pavg.tools.daemon.words import TrainingProgress, in_words, progress_of
from tests.unit.tools.control.statuses import STATUS, status

LINEAGE = b"l" * 8


def trains(epoch: int = 100, *, loss: float = 2.0, speed: float = 50.0, name: str = "") -> PeerStatus:
    return PeerStatus(
        name=name,
        epoch=epoch,
        lineage=LINEAGE,
        samples_per_second=speed,
        metrics=(("loss", loss), ("accuracy", 0.5)),
        history_of="loss",
        history=((1, 4.0), (epoch // 2, 3.0), (epoch, loss)),
    )


class TestProgress:
    def test_peers_that_train_say_how_far_the_run_is(self) -> None:
        found = progress_of([trains(100, loss=2.0), trains(101, loss=2.2), PeerStatus(role="auxiliary")])
        assert (found.peers, found.update, found.samples_per_second) == (2, 100, 100.0)
        assert (found.metric, found.value, found.history) == ("loss", 2.1, (4.0, 3.0, 2.0))
        assert in_words(found) == "update 100, 100 samples/s, loss 2.1, 2 peers train"

    def test_one_peer_that_lies_does_not_decide(self) -> None:
        liar = replace(
            trains(2**53, loss=-1e99, speed=1e15),
            history_of="owned",
            history=((1, 1.0), (2, 2.0)),
            metrics=(("owned", 1.0),),
        )
        found = progress_of([liar, trains(), trains()])
        assert (found.update, found.metric, found.value) == (100, "loss", 2.0)
        assert found.samples_per_second == 150.0

    def test_a_run_without_a_word(self) -> None:
        assert progress_of([PeerStatus()]) == TrainingProgress()
        assert "no peer that trains" in in_words(TrainingProgress())

    def test_peers_that_are_behind_are_counted(self) -> None:
        found = progress_of([trains(), replace(trains(30), activity=Activity.FOLLOWING)])
        assert in_words(found).endswith("2 peers train, 1 behind")

    def test_a_sparkline_spans_its_values(self) -> None:
        assert bars([3.0, 2.0, 1.0], 32) == "█▅▁"
        assert bars([], 32) == ""
        assert bars([1.0, 1.0], 32) == "▄▄"
        assert len(bars(range(100), 32)) == 32


def shown(
    status: DaemonStatus,
    statuses: dict[str, PeerStatus] | None = None,
    log: tuple[str, ...] = (),
    width: int = 110,
) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(view(status, statuses or {}, log))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class TestView:
    def test_it_says_what_is_given_and_with_whom_and_how_far_the_run_is(self) -> None:
        text = shown(
            STATUS, {"12D3KooWone": trains(name="ann"), "12D3KooWother": trains()}, ("12:00:00 INFO hello",)
        )
        for part in (
            "p2pavg 0.1.0 in the run lab",
            "17 rounds in 1 h 2 min; 123.5 MB sent, 987 B received",
            "1 round failed",
            "ann, …12D3KooWtwo"[:4],
            "in the last round",
            "update 100, 100 samples/s, loss 2, 2 peers train",
            "loss over the run",
            "public",
            "3 other peers of the network, 2 of the run",
            "12:00:00 INFO hello",
            "Ctrl-C ends after the round",
        ):
            assert part in text, part

    def test_a_daemon_that_waits_or_is_refused_says_so(self) -> None:
        text = shown(status(round_peers=(), refusal="its certificate was revoked", leaving=True))
        assert "it waits for a round" in text
        assert "its certificate was revoked" in text
        assert "Ctrl-C again ends at once" in text

    def test_names_of_peers_and_metrics_are_no_markup(self) -> None:
        """Other peers choose them, and an error here would end the view of each volunteer."""
        named = replace(trains(name="[bold red]x[/]"), history_of="[/x]", metrics=(("[/x]", 1.0),))
        text = shown(STATUS, {"12D3KooWone": named})
        assert "[bold red]x[/]" in text
        assert "[/x] over the run" in text

    def test_many_partners_are_counted(self) -> None:
        assert "and 12 more" in shown(status(round_peers=tuple(f"12D3KooW{i}" for i in range(20))))


async def test_log_lines_are_part_of_the_view_and_come_back_to_their_place(autojump_clock: MockClock) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    root = logging.getLogger()
    before = root.handlers[:]
    life = cast(DaemonProcess, SimpleNamespace(status=lambda: STATUS, run_statuses=dict))
    async with showing(console, life):
        assert len(root.handlers) == 1
        logging.getLogger("p2pavg.test").warning("look at \x1b[2J this\nsecond line")
        await trio.sleep(2.5)
    assert root.handlers == before
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "WARNING look at ?[2J this" in text
    assert "second line" not in text


def test_only_the_last_log_lines_are_kept() -> None:
    log = LogLines(2)
    for number in range(5):
        log.handle(logging.LogRecord("p2pavg", logging.INFO, "", 0, f"line {number}", None, None))
    assert [line.rpartition(" ")[2] for line in log.lines] == ["3", "4"]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_width_of_a_terminal_is_enough(width: int) -> None:
    text = shown(STATUS, {"12D3KooWone": trains()}, ("a long log line " * 20,), width)
    assert max(map(len, text.splitlines())) <= width
