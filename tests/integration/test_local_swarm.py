""":class:`p2pavg.testing.LocalSwarm` and its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from p2pavg.testing import LocalSwarm, SwarmProcess, forking
from p2pavg.testing.forking import ForkedProcess, ForkServer
from tests.integration.swarm_work import describe_start, end, start_another, stay, talk

pytestmark = pytest.mark.processes

WORK = "tests.integration.swarm_work:stay"
starts = pytest.mark.parametrize("fork", [True, False], ids=["forked", "new interpreter"])
only_linux = pytest.mark.skipif(not forking.can_fork(), reason="processes are forked on Linux only")


@pytest.mark.long
@starts
def test_a_restarted_process_has_its_index_its_arguments_and_its_peer_id(tmp_path: Path, fork: bool) -> None:
    if fork and not forking.can_fork():
        pytest.skip("processes are forked on Linux only")
    with LocalSwarm(WORK, peers=0, arguments={"color": "red"}, fork=fork) as swarm:
        first = swarm.add(arguments={"identity": str(tmp_path / "first.key")})
        second = swarm.add(arguments={"color": "blue"})
        assert first.event(60.0) == {"bootstrap": [], "arguments": first.arguments}
        assert second.event(60.0) == {"bootstrap": [first.address], "arguments": {"color": "blue"}}

        # The process from which the other bootstrapped, which still runs.
        again = swarm.restart(0, arguments={"life": 1})
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

import time
from dataclasses import dataclass

import psutil

from beside import WORD
from p2pavg.testing import LocalSwarm

@dataclass
class Said:
    word: str

def work(member):
    member.report(word=Said(WORD).word, index=member.index)
    if "code" in member.arguments:
        raise SystemExit(member.arguments["code"])
    time.sleep(1000)

if __name__ == "__main__":
    with LocalSwarm(work, peers=0) as swarm:
        print(swarm.add(wait=False, arguments={"code": 0}).event(60.0))
        swarm.wait_ended(60.0)
        swarm.add(wait=False, arguments={"code": 3})
        try:
            swarm.wait_ended(60.0)
        except RuntimeError as error:
            print(error)
        swarm.add(wait=False).event(60.0)
        print(*(child.pid for child in psutil.Process().children()), flush=True)
        time.sleep(1000)
"""


def test_a_function_of_a_script_is_found_and_its_processes_end_when_it_is_killed(tmp_path: Path) -> None:
    """The script is imported from another folder, with the modules beside it, and is not run again."""
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "{'word': 'found', 'index': 0}\n"
        assert run.stdout.readline() == "process 1 ended with 3\n"
        children = [psutil.Process(int(word)) for word in run.stdout.readline().split()]
        assert len(children) == (3 if forking.can_fork() else 1), "two servers, and a process"
        run.kill()
    gone, alive = psutil.wait_procs(children, timeout=120.0)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE], gone


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


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the default handler of SIGINT, because a shell makes background jobs and their children ignore it.

    The server that another test has started ignores it, too. One of another environment is started anew, and serves
    all tests of this file.
    """
    monkeypatch.setenv("P2PAVG_TEST_VARIABLE", "Ctrl-C is heard")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)  # processes have seeds of their own
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


ENDS: dict[str | int, int] = {"return": 0, "raise": 1, "interrupt": -2, 0: 0, 7: 7, "a text": 1}


@pytest.mark.long
@starts
def test_processes_end_with_their_codes_after_their_threads_and_exit_functions(fork: bool) -> None:
    if fork and not forking.can_fork():
        pytest.skip("processes are forked on Linux only")
    hows = list(ENDS) if fork else list(ENDS)[1:3]
    with LocalSwarm(end, peers=0, fork=fork) as swarm:
        for process in [swarm.add(arguments={"end": how}, wait=False) for how in hows]:
            assert [event["said"] for event in process.events(150.0)] == ["thread", "exit function"]
            assert process.process.wait(60.0) == ENDS[process.arguments["end"]]


@only_linux
class TestForkedProcesses:
    def test_they_begin_like_a_new_interpreter(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        described = []
        monkeypatch.chdir(tmp_path)
        for fork in (True, False):
            with LocalSwarm(describe_start, peers=0, fork=fork) as swarm:
                described += [_start_of(swarm) for _ in range(2 if fork else 1)]
        assert [found["variable"] for found in described] == ["Ctrl-C is heard"] * 3
        assert all(found["group"] == found["pid"] for found in described)
        assert {found["folder"] for found in described} == {str(tmp_path)}
        assert {found["first_of_path"] for found in described} == {str(tmp_path)}
        assert all(found["input"].startswith("pipe:") for found in described)
        assert len({found["open_files"] for found in described}) == 1, described
        assert len({tuple(found["threads"]) for found in described}) == 1
        for position in range(2):  # two processes draw other random numbers
            assert len({found["numbers"][position] for found in described}) == 3
        assert described[0]["hashes"] != described[1]["hashes"]  # not all orders of sets are equal

    def test_the_end_of_their_server_is_an_error_for_the_next_one_only(self) -> None:
        with LocalSwarm(stay, peers=0, fork=True) as swarm:
            first = swarm.add()
            server = forking._servers._running[0]
            server._process.kill()
            assert eventually(lambda: server.is_lost)
            with pytest.raises(RuntimeError, match="the server that forks processes has ended"):
                server.fork(WORK, [os.getcwd()])
            assert first.running
            for _ in range(2):  # the servers take turns: a new one has forked one of these
                assert swarm.add().running
            first.kill()
            assert first.process.wait(60.0) == -9

    # Python 3.12 and later warn about forks of a process with threads, which this test is about.
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
    def test_a_fork_of_the_test_leaves_the_servers_alone(self) -> None:
        with LocalSwarm(stay, peers=0, fork=True) as swarm:
            first = swarm.add(wait=False)
            pid = os.fork()
            if pid == 0:
                forking._servers.close()  # as when this process ends
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            assert swarm.add().running
            assert first.running

    def test_a_closed_server_ends_and_its_processes_go_on(self) -> None:
        server = ForkServer()
        process = server.fork(WORK, [os.getcwd()])
        server.close()
        assert server._process.poll() == 0
        assert psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE
        _close(process)

    def test_signals_do_not_reach_a_process_that_has_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its id may belong to another process."""
        with LocalSwarm(stay, peers=0, fork=True) as swarm:
            process = swarm.add(wait=False).process
            process.kill()
            assert process.wait(60.0) == -9
            monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("signalled"))
            process.kill()

    def test_a_process_for_which_something_else_has_waited_has_ended(self) -> None:
        with LocalSwarm(stay, peers=0, fork=True) as swarm:
            process = swarm.add(wait=False).process
            os.kill(process.pid, signal.SIGKILL)
            assert os.waitpid(process.pid, 0)[0] == process.pid
            process.kill()
            assert process.wait() == 0


def eventually(condition: Callable[[], bool]) -> bool:
    """Poll for a condition; return false if it does not come true within two minutes."""
    end = time.monotonic() + 120.0
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _start_of(swarm: LocalSwarm) -> dict[str, Any]:
    return swarm.add(wait=False).event(150.0)


def _close(process: ForkedProcess) -> None:
    process.stdin.close()
    process.stdout.close()
