""":class:`p2pavg.testing.LocalSwarm` and its processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from p2pavg.testing import LocalSwarm, SwarmProcess
from tests.integration.swarm_work import start_another, stay, talk

WORK = "tests.integration.swarm_work:stay"


def test_a_restarted_process_has_its_index_its_arguments_and_its_peer_id(tmp_path: Path) -> None:
    with LocalSwarm(WORK, peers=0, arguments={"color": "red"}) as swarm:
        first = swarm.add(arguments={"identity": str(tmp_path / "first.key")})
        second = swarm.add(arguments={"color": "blue"})
        assert first.event(60.0) == {"bootstrap": [], "arguments": first.arguments}
        assert second.event(60.0) == {"bootstrap": [first.address], "arguments": {"color": "blue"}}

        again = swarm.restart(
            0, arguments={"life": 1}
        )  # the process from which the other bootstrapped, which still runs
        assert not first.running
        assert swarm.processes == [again, second]
        assert (again.index, again.peer_id) == (0, first.peer_id)
        assert again.address != first.address
        assert again.event(60.0) == {
            "bootstrap": [second.address],
            "arguments": {"color": "red", "identity": str(tmp_path / "first.key"), "life": 1},
        }

        third = swarm.add(wait=False)
        assert third.peer_id == ""
        assert third.wait_joined() == third.address
        assert third.event(60.0)["bootstrap"] == [again.address, second.address]

        second.kill()
        second.process.wait()
        assert swarm.bootstrap == [again.address, third.address]
        again.tell(word="first")
        again.tell(word="second")
        assert [again.event(60.0)["heard"]["word"] for _ in range(2)] == ["first", "second"]
        second.tell(word="to the dead")
        with pytest.raises(EOFError):
            second.event(60.0)
    assert not any(process.running for process in (first, second, again, third))


def test_an_incomplete_report_of_a_killed_process_is_dropped() -> None:
    command = "print('{\"whole\": 1}'); print('{\"half', end='', flush=True)"
    process = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert list(SwarmProcess(0, process).events(60.0)) == [{"whole": 1}]


def test_a_process_that_never_joins_differs_from_one_that_has_ended(tmp_path: Path) -> None:
    with LocalSwarm(WORK, peers=0) as swarm:
        process = swarm.add(wait=False)
        process.stop()
        with pytest.raises(TimeoutError):
            process.wait_joined(0.2)
        process.kill()
        with pytest.raises(EOFError):
            process.wait_joined()
        assert swarm.bootstrap == []


SCRIPT = """
from __future__ import annotations

from dataclasses import dataclass

from beside import WORD
from p2pavg.testing import LocalSwarm

@dataclass
class Said:
    word: str

def work(member):
    member.report(word=Said(WORD).word, index=member.index)
    raise SystemExit(member.arguments["code"])

if __name__ == "__main__":
    with LocalSwarm(work, peers=0, arguments={"code": 0}) as swarm:
        print(swarm.add(wait=False).event(60.0))
        swarm.wait_ended(60.0)
        swarm.add(wait=False, arguments={"code": 3})
        try:
            swarm.wait_ended(60.0)
        except RuntimeError as error:
            print(error)
"""


def test_a_function_of_a_script_is_found(tmp_path: Path) -> None:
    """The script is imported from another folder, with the modules beside it, and is not run again."""
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=180)
    assert run.stdout.splitlines() == [
        "{'word': 'found', 'index': 0}",
        "process 1 ended with 3",
    ], run.stderr


def test_a_function_of_a_module_is_its_name() -> None:
    assert LocalSwarm(stay, peers=0).work == WORK


def test_a_function_that_cannot_be_imported_is_refused() -> None:
    with pytest.raises(ValueError, match="top level"):
        LocalSwarm(lambda _: None, peers=0)


def test_a_process_that_does_not_end_is_reported() -> None:
    with LocalSwarm(stay, peers=0) as swarm:
        swarm.add()
        with pytest.raises(TimeoutError, match="process 0 still runs"):
            swarm.wait_ended(0.1)


def test_output_of_a_process_is_no_report() -> None:
    with LocalSwarm(talk, peers=0) as swarm:
        process = swarm.add()
        assert process.event(60.0) == {"before": 1}
        assert process.event(60.0) == {"after": 2}


def test_a_failed_process_is_reported_while_others_run() -> None:
    with LocalSwarm(stay, peers=0) as swarm:
        swarm.add()
        swarm.add().kill()
        with pytest.raises(RuntimeError, match="process 1 ended with -9"):
            swarm.wait_ended(60.0)


def test_leaving_ends_the_children_of_the_processes() -> None:
    with LocalSwarm(start_another, peers=0) as swarm:
        child = psutil.Process(swarm.add(wait=False).event(60.0)["pid"])
        assert child.is_running()
    psutil.wait_procs([child], timeout=30.0)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
