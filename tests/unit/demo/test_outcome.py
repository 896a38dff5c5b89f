"""The demo's output: rows, failures, sentences, the JSON object and the chart."""

import io
import json
import signal
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from scripts.demo_gpt.chart import save_chart
from scripts.demo_gpt.display import render
from scripts.demo_gpt.events import (
    Done,
    Event,
    Failed,
    HeldOutLoss,
    Ready,
    Retry,
    Round,
    TrainLoss,
    from_line,
    to_line,
)
from scripts.demo_gpt.progress import Progress, Run, State
from scripts.demo_gpt.report import sentences, to_json
from scripts.demo_gpt.settings import Settings

STEPS = 4


def round_of(step: int, peers: int) -> Round:
    return Round(
        step=step,
        peers=[f"id {index}" for index in range(peers)],
        seconds=0.25,
        exchange_seconds=0.2,
        waited_seconds=0.3,
        attempts=1,
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
            progress.apply(round_of(step, group))
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
    killed.exited(-signal.SIGKILL, "")
    run.peers[1] = killed
    return run


def plain(renderable: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def coloured(renderable: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


EVENTS: list[Event] = [
    Ready(parameters=3, peer_id="id", address="/ip4/127.0.0.1/tcp/1/p2p/id"),
    TrainLoss(step=1, loss=4.5),
    round_of(1, 2),
    Retry(step=1, result="NoPeers", reason="no other peer is ready"),
    HeldOutLoss(step=0, loss=4.6),
    Failed(reason="why"),
    Done(digest="ab"),
]


@pytest.mark.parametrize("event", EVENTS)
def test_events_survive_their_line(event: Event) -> None:
    assert from_line(to_line(event)) == event


@pytest.mark.parametrize("line", ["", "{", "[]", "{}", '{"event": "Done"}', '{"event": "Nothing"}', "1"])
def test_malformed_event_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        from_line(line)


def test_a_peer_has_its_row() -> None:
    row = next(line for line in plain(render(finished_run())).splitlines() if line.startswith("peer 0"))
    for figure in ("4/4", "1.000", "2.0200", "2/2", "0.30 s", "6.0/6.4", "done"):
        assert figure in row


def test_every_row_fits_a_narrow_terminal() -> None:
    lines = plain(render(finished_run())).splitlines()
    assert [line.split()[0] for line in lines[2:6] if line] == ["peer", "peer", "reference"]


def test_a_killed_peer_stands_out() -> None:
    run = run_with_a_killed_peer()
    assert "killed by SIGKILL (at step 2)" in plain(render(run))
    row = next(line for line in coloured(render(run)).splitlines() if "peer 1" in line)
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


def test_leaving_when_done_or_told_to_is_no_failure() -> None:
    for progress in (finished_run().peers[0], Progress(name="stopped")):
        progress.stop()
        progress.exited(0, "")
        assert progress.state in (State.DONE, State.STOPPED)


def test_a_peer_that_tries_again_says_why() -> None:
    run = finished_run()
    run.peers[1].state = State.TRAINING
    run.peers[1].apply(Retry(step=3, result="NoPeers", reason="no other peer is ready"))
    assert "peer 1 tries again. NoPeers: no other peer is ready" in plain(render(run))


def test_the_sentence_has_both_final_losses() -> None:
    assert sentences(finished_run()) == (
        "2 peers that shared only gradients ended at a held-out loss of 2.0200; "
        "one process that trained on the batches of all 2 together ended at 2.0000, 1.00% apart. "
        "All of them hold the same parameters, bit for bit."
    )


def test_the_sentence_names_the_failed_peer() -> None:
    text = sentences(run_with_a_killed_peer())
    assert text.startswith("1 of 2 peers that shared only gradients")
    assert text.endswith("Peer 1 failed at step 2: killed by SIGKILL.")


def test_the_sentence_admits_that_parameters_differ() -> None:
    run = finished_run()
    run.peers[1].digest = "different"
    assert "Their parameters differ" in sentences(run)


def test_the_json_object_has_the_figures() -> None:
    report = json.loads(json.dumps(to_json(finished_run(), Path("loss.png"))))
    assert report["config"]["peers"] == 2
    assert report["seconds"] == pytest.approx(12.0)
    assert report["relative_difference"] == pytest.approx(0.01)
    assert report["identical_parameters"] is True
    assert [len(peer["train_losses"]) for peer in report["peers"]] == [STEPS, STEPS]
    assert [entry["group_sizes"] for entry in report["rounds"]] == [[2, 2]] * STEPS
    assert report["png"] == "loss.png"


def test_the_json_object_of_a_run_with_a_failure() -> None:
    report = to_json(run_with_a_killed_peer(), None)
    assert report["peers"][1]["final_loss"] is None
    assert report["peers"][1]["reason"] == "killed by SIGKILL"
    assert report["rounds"][-1]["group_sizes"] == [2, 0]


@pytest.mark.parametrize("run", [finished_run(), run_with_a_killed_peer(), Run.planned(Settings())])
def test_the_chart_is_a_png(run: Run, tmp_path: Path) -> None:
    save_chart(run, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
