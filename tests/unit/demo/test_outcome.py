"""The demo's output: rows, failures, sentences, the JSON object and the chart."""

import io
import json
import math
import signal
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console, RenderableType

from scripts.demo_gpt.chart import save_chart, with_gaps
from scripts.demo_gpt.display import Display, progress_line, render
from scripts.demo_gpt.events import Done, Failed, HeldOutLoss, Ready, TrainLoss, Update, Waits, from_line
from scripts.demo_gpt.plan import MOST_STARTS, fail_if_killed_too_often
from scripts.demo_gpt.progress import Progress, Run, State
from scripts.demo_gpt.report import sentences, to_json
from scripts.demo_gpt.settings import Settings

STEPS = 4


def update_of(step: int, peers: int) -> Update:
    return Update(
        step=step,
        samples={f"id of peer {index}": 16.0 for index in range(peers)},
        seconds=0.25,
        exchange_seconds=0.2,
        bytes_sent=1_500_000,
        bytes_received=1_600_000,
        compression_ratio=3.9,
    )


def train(progress: Progress, steps: int, *, loss: float, group: int = 0) -> None:
    progress.apply(Ready(parameters=1_000_000, peer_id=f"id of {progress.name}"))
    progress.apply(HeldOutLoss(step=0, loss=4.6))
    for step in range(1, steps + 1):
        progress.apply(TrainLoss(step=step, loss=5 - step))
        if group:
            progress.apply(update_of(step, group))
        progress.apply(HeldOutLoss(step=step, loss=loss + (STEPS - step) / 2))


def finished_run() -> Run:
    run = Run.planned(Settings(peers=2, steps=STEPS))
    for peer in run.peers:
        train(peer, STEPS, loss=2.02, group=2)
        peer.apply(Done(digest="same"))
    train(run.reference, STEPS, loss=2.0)
    run.reference.apply(Done(digest="other"))
    run.finished = run.started + 12.0
    return run


def run_with_a_killed_peer() -> Run:
    run = finished_run()
    killed = Progress(name="peer 1")
    train(killed, 2, loss=2.0, group=2)
    for _ in range(MOST_STARTS):
        killed.starts()
        killed.exited(-signal.SIGKILL, "")
    run.peers[1] = killed
    fail_if_killed_too_often(run)
    return run


def plain(renderable: RenderableType, color: Literal["standard"] | None = None) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=color is not None, color_system=color)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("line", ["", "{", "[]", "{}", '{"event": "Done"}', '{"event": "Nothing"}', "1"])
def test_malformed_event_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        from_line(line)


def test_a_peer_has_its_row_also_in_a_narrow_terminal() -> None:
    lines = plain(render(finished_run())).splitlines()
    assert [line.split()[0] for line in lines[2:6] if line] == ["peer", "peer", "reference"]
    row = next(line for line in lines if line.startswith("peer 0"))
    for figure in ("4/4", "1.000", "2.0200", "2/2", "0.25 s", "6.0/6.4", "done"):
        assert figure in row


def test_a_killed_peer_stands_out() -> None:
    run = run_with_a_killed_peer()
    assert "killed by SIGKILL, for the 4th time (at step 2)" in plain(render(run))
    row = next(line for line in plain(render(run), "standard").splitlines() if "peer 1" in line)
    assert "31m" in row


def test_a_crash_shows_the_end_of_its_log() -> None:
    run = finished_run()
    run.peers[0].state = State.TRAINING
    run.peers[0].exited(1, "Traceback (most recent call last):\n  somewhere\nValueError: [what] went wrong\n")
    assert run.peers[0].reason == "ValueError: [what] went wrong"
    assert "somewhere" in plain(render(run))


def test_first_reason_of_a_peer_is_kept() -> None:
    peer = Progress(name="peer 0")
    peer.apply(Failed(reason="no round succeeded in 60 s"))
    peer.exited(1, "noise\n")
    assert peer.reason == "no round succeeded in 60 s"


def test_a_peer_that_waits_says_why() -> None:
    run = finished_run()
    run.peers[1].state = State.TRAINING
    run.peers[1].apply(Waits(reason="no other peer is ready"))
    assert "peer 1 waits: no other peer is ready" in plain(render(run))
    assert "peer 1: 4/4 waiting (no other peer is ready)" in progress_line(run)


def test_progress_is_printed_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=80)
    run = Run.planned(Settings(peers=2, steps=STEPS))
    run.peers[0].starts()
    with Display(run, console) as display:
        display.refresh()
        display.refresh()  # too soon for a second line
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "0 s: peer 0: 0/4 starting\n"


def test_the_sentence_names_the_failed_peer() -> None:
    text = sentences(run_with_a_killed_peer())
    assert text.startswith("1 of 2 peers that shared only gradients")
    assert text.endswith("Peer 1 failed at step 2: killed by SIGKILL, for the 4th time.")
    assert "hold the same parameters" not in text


def test_the_sentence_does_not_speak_for_a_peer_that_failed() -> None:
    run = finished_run()
    run.peers.append(Progress(name="peer 2"))
    run.peers[2].apply(Failed(reason="no luck"))
    text = sentences(run)
    assert "Those 2 hold the same parameters, bit for bit." in text
    assert text.endswith("Peer 2 failed before the first step: no luck.")
    run.peers[1].digest = "different"
    assert "Their parameters differ" in sentences(run)


def test_the_sentences_tell_of_the_late_and_the_killed_peer() -> None:
    run = Run.planned(Settings(peers=3, steps=STEPS))
    for peer in run.peers:
        train(peer, STEPS, loss=2.02, group=3)
    run.peers[1].kills.append(2)
    for peer in run.peers:
        peer.apply(Done(digest="same"))
    text = sentences(run)
    assert "Peer 2 started late, and fetched what it had missed." in text
    assert "Peer 1 was killed at step 2, started again, and caught up." in text


def test_the_json_object_of_a_run_with_a_failure() -> None:
    assert to_json(finished_run(), None)["relative_difference"] == pytest.approx(0.01)
    report = json.loads(json.dumps(to_json(run_with_a_killed_peer(), None)))
    assert report["peers"][1]["final_loss"] is None
    assert report["peers"][1]["reason"].startswith("killed by SIGKILL")
    assert report["peers"][1]["kills"] == [2] * MOST_STARTS
    assert report["rounds"][-1]["group_sizes"] == [2, 0]


@pytest.mark.parametrize("run", [run_with_a_killed_peer(), Run.planned(Settings())])
def test_the_chart_is_a_png(run: Run, tmp_path: Path) -> None:
    save_chart(run, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_curve_is_broken_where_the_peer_was_gone() -> None:
    steps, losses = with_gaps({0: 4.0, 5: 3.0, 10: 2.5, 20: 2.0}, 5)
    assert steps == [0, 5, 10, 10, 20]
    assert [math.isnan(loss) for loss in losses] == [False, False, False, True, False]
