"""What :class:`p2pavg.testing.LocalSwarm` does with its processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from p2pavg.testing import LocalSwarm, SwarmProcess

WORK = "tests.integration.swarm_work:stay"


def test_a_restarted_process_has_its_index_its_arguments_and_its_peer_id(tmp_path: Path) -> None:
    with LocalSwarm(WORK, peers=0, arguments={"color": "red"}) as swarm:
        first = swarm.add(arguments={"identity": str(tmp_path / "first.key")})
        second = swarm.add(arguments={"color": "blue"})
        assert first.event(60.0) == {"bootstrap": [], "arguments": first.arguments}
        assert second.event(60.0) == {"bootstrap": [first.address], "arguments": {"color": "blue"}}

        again = swarm.restart(0, arguments={"life": 1})  # the one that the other bootstrapped from, and alive
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


def test_half_a_report_of_a_process_that_was_killed_is_no_report() -> None:
    command = "print('{\"whole\": 1}'); print('{\"half', end='', flush=True)"
    process = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert list(SwarmProcess(0, process).events(60.0)) == [{"whole": 1}]


def test_a_process_that_never_joins_is_told_from_one_that_has_ended(tmp_path: Path) -> None:
    with LocalSwarm(WORK, peers=0) as swarm:
        process = swarm.add(wait=False)
        process.stop()
        with pytest.raises(TimeoutError):
            process.wait_joined(0.2)
        process.kill()
        with pytest.raises(EOFError):
            process.wait_joined()
        assert swarm.bootstrap == []
