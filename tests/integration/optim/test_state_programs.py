"""The documented program in processes: a peer starts late, and one with a directory is stopped and started again."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.fault_search.starts import Program, running

QUICKSTART = Path(__file__).parents[3] / "docs/tutorial/quickstart.md"
LATE_SECONDS = 10.0  # a peer that starts this late has missed updates
WATCHDOG_SECONDS = 600.0
DIGEST = """
    import hashlib
    print("ended with", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest())
"""
LOGGED = """
import logging, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stdout)
logging.getLogger("p2pavg.optim").setLevel(logging.INFO)
"""


def program(folder: Path, name: str, state: str = "", identity: bool = False) -> Path:
    """Write the documented program, with this state if there is one; return its path.

    The programs end at the first update of all three in which one of them has seen the file ``end``. The metric of that
    update is the same for its members, so they all end at this one, however late each of them sees the file.
    """
    found = re.search(r"```python\n(.*?)```", QUICKSTART.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found is not None
    text = found.group(1)
    for was, becomes in (
        ("import AveragedOptimizer", "import AveragedOptimizer, RunState"),
        (
            "target_batch_size=256)",
            f"target_batch_size=256, state={state})" if state else "target_batch_size=256)",
        ),
        ("    while optimizer.epoch < 20:", "    ended = False\n    while not ended:"),
        (
            '{"loss": loss.item()}',
            f'{{"loss": loss.item(), "end": float(os.path.exists({str(folder / "end")!r}))}}',
        ),
        (
            "        if report.updated:",
            "        if report.updated:\n"
            '            ended = len(report.result.peers) == 3 and report.metrics["end"] > 0',
        ),
        (
            "bootstrap=sys.argv[1:])",
            f"bootstrap=sys.argv[1:], identity={str(folder / (name + '.key')) if identity else None!r})",
        ),
    ):
        assert text.count(was) == 1, f"docs/tutorial/quickstart.md has no longer: {was}"
        text = text.replace(was, becomes)
    path = folder / f"{name}.py"
    path.write_text(LOGGED + text + DIGEST, encoding="utf-8")
    return path


def wait_for(started: Program, found: Callable[[str], object], what: str) -> str:
    """Wait for a line of a program, and return it."""
    end = time.monotonic() + WATCHDOG_SECONDS
    while time.monotonic() < end and started.process.poll() is None:
        for _, line in list(started.lines):
            if found(line):
                return line
        time.sleep(0.05)
    raise AssertionError(f"no {what}:\n" + output(started))


def output(started: Program) -> str:
    """Return the output of a program."""
    return "\n".join(line for _, line in started.lines)


def is_update_of(peers: int, line: str) -> bool:
    """Return whether a line reports an update of so many peers."""
    return line.startswith("update") and f" of {peers} peers" in line


def update_in(line: str) -> int:
    """Return the number of the update that a line reports."""
    return int(line.split()[1])


@pytest.mark.long
def test_a_late_and_a_restarted_process_end_with_the_same_parameters(tmp_path: Path) -> None:
    """Nothing is done by hand: the third process starts late, and the second one is stopped and started again."""
    plain = program(tmp_path, "plain")
    state = f"RunState(model, directory={str(tmp_path / 'state')!r}, every=10)"
    kept = program(tmp_path, "kept", state, identity=True)
    with ExitStack() as stack:
        first = stack.enter_context(running([str(plain)]))
        address = wait_for(first, lambda line: "others join with" in line, "address").split()[-1]
        second = stack.enter_context(running([str(kept), address]))
        began = wait_for(first, lambda line: is_update_of(2, line), "update of two peers")
        time.sleep(LATE_SECONDS)
        third = stack.enter_context(running([str(plain), address]))
        wait_for(third, lambda line: is_update_of(3, line), "update of three peers")
        second.process.send_signal(signal.SIGINT)
        assert second.wait(time.monotonic() + WATCHDOG_SECONDS), output(second)
        again = stack.enter_context(running([str(kept), address]))
        wait_for(again, lambda line: is_update_of(3, line), "update of three peers after the restart")
        (tmp_path / "end").touch()
        programs = (first, third, again)
        for started in programs:
            assert started.wait(time.monotonic() + WATCHDOG_SECONDS), output(started)
    logs = "\n---\n".join(output(started) for started in (first, second, third, again))
    assert [started.process.returncode for started in programs] == [0, 0, 0], logs
    ends = [[line for _, line in started.lines if line.startswith("ended with")] for started in programs]
    assert all(len(end) == 1 and end == ends[0] for end in ends), logs
    assert update_in(began) == 1
    assert "has loaded the state of update" in output(third)
    assert "this peer continues from its checkpoint of update" in output(again)
    assert "Traceback" not in output(first) + output(third) + output(again), logs
    assert "Error" not in output(first) + output(third) + output(again), logs
    warned = [line for line in logs.splitlines() if line.startswith("WARNING")]
    # Of a busy machine: peers that wait for a process to start, and the end of a peer that tells its last result.
    of_load = ("has waited", "closing p2pavg takes longer")
    assert not [line for line in warned if not any(text in line for text in of_load)], logs
