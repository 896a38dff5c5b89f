"""Leaving the averager's block: after errors, forks and Ctrl-C, the thread ends and its sockets are closed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import trio
from torch.utils.data import DataLoader, TensorDataset

from p2pavg import AddressError, BootstrapError, ClosedError, InProgress, NoPeers, Success
from p2pavg.blocking import Averager, open_averager
from p2pavg_dht import Ed25519Signer, RecordNode
from tests.integration.loopback import LOOPBACK, WATCHDOG_SECONDS, config, step_together, two_averagers

pytestmark = pytest.mark.processes

SOME_PEER = Ed25519Signer(b"s" * 32).peer_id


class BoomError(Exception):
    pass


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """Restore the default handler of SIGINT, because a shell makes background jobs and their children ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def open_sockets() -> set[int]:
    return {found.fd for found in psutil.Process().net_connections("tcp") if found.status != psutil.CONN_NONE}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = open_sockets()
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "p2pavg"] == []
    assert open_sockets() <= before


class TestLeaving:
    def test_the_thread_and_its_sockets_end_with_the_block(self) -> None:
        before = open_sockets()
        with open_averager(config(), listen=LOOPBACK):
            assert [thread.name for thread in threading.enumerate()].count("p2pavg") == 1
            assert len(open_sockets() - before) >= 1

    def test_leaving_during_a_round(self) -> None:
        with open_averager(config(), listen=LOOPBACK) as averager:
            averager.accumulate([torch.full((3,), 2.0)], weight=4.0)
            assert isinstance(averager.step(wait=0), InProgress)
            assert averager.weight == 0
        assert averager.weight == 4.0, "the round has taken the contribution"
        assert torch.equal(averager.accumulated[0], torch.full((3,), 2.0))  # type: ignore[index]

    def test_calls_after_the_block_raise_closed_error(self) -> None:
        with open_averager(config(), listen=LOOPBACK) as averager:
            averager.accumulate([torch.ones(3)])
        with pytest.raises(ClosedError, match="the averager is closed"):
            averager.accumulate([torch.ones(3)])
        for wait in (0, 1.0, None):
            with pytest.raises(ClosedError, match="the averager is closed"):
                averager.step(wait=wait)
        assert averager.weight == 1.0

    def test_a_waiting_step_of_another_thread_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        waiting = threading.Event()
        seen: list[BaseException] = []
        when_waiting_for_a_round(monkeypatch, waiting.set)

        def step() -> None:
            try:
                averager.step(wait=None)
            except ClosedError as error:
                seen.append(error)

        with open_averager(config(), listen=LOOPBACK) as averager:
            averager.accumulate([torch.ones(3)])
            stepping = threading.Thread(target=step)
            stepping.start()
            assert waiting.wait(WATCHDOG_SECONDS)
        stepping.join(WATCHDOG_SECONDS)
        assert len(seen) == 1
        assert "closed" in str(seen[0])


def when_waiting_for_a_round(monkeypatch: pytest.MonkeyPatch, function: Callable[[], object]) -> None:
    """A function that is called in the background thread whenever a step begins to wait there."""
    from p2pavg.round.round import Round

    changed = Round.changed

    async def noticed(self: Round[Any]) -> None:
        function()
        await changed(self)

    monkeypatch.setattr(Round, "changed", noticed)


class TestErrorsOfTheBackground:
    @pytest.fixture
    def failing(self, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
        """A flag that makes the record node of the peer fail."""
        fail = threading.Event()

        async def run(_node: RecordNode, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
            task_status.started()
            await trio.to_thread.run_sync(fail.wait, abandon_on_cancel=True)  # type: ignore[call-arg]  # trio-typing's stubs
            raise BoomError("the record node broke")

        monkeypatch.setattr(RecordNode, "run", run)
        return fail

    def test_a_waiting_step_raises_the_error(
        self, failing: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        when_waiting_for_a_round(monkeypatch, failing.set)
        with open_averager(config(), listen=LOOPBACK) as averager:
            averager.accumulate([torch.ones(3)])
            with pytest.raises(BoomError, match="the record node broke"):
                averager.step(wait=None)
            for later in (lambda: averager.step(wait=0), lambda: averager.accumulate([torch.ones(3)])):
                with pytest.raises(BoomError):
                    later()
            assert averager.weight == 1.0

    def test_leaving_raises_an_unreported_error(self, failing: threading.Event) -> None:
        def block() -> None:
            with open_averager(config(), listen=LOOPBACK):
                failing.set()
                join("p2pavg")

        with pytest.raises(BoomError, match="the record node broke"):
            block()

    def test_an_error_during_opening_is_raised(self, failing: threading.Event) -> None:
        failing.set()
        with contextlib.suppress(BoomError), open_averager(config(), listen=LOOPBACK) as averager:
            averager.accumulate([torch.ones(3)])
            averager.step(wait=None)
            pytest.fail("it went on without its record node")


def join(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(WATCHDOG_SECONDS)
            assert not thread.is_alive()


def never_entered(**arguments: Any) -> None:
    with open_averager(config(), **({"listen": LOOPBACK} | arguments)):
        pytest.fail("the block was entered")


class TestMistakes:
    @pytest.mark.parametrize(
        ("name", "address"),
        [
            ("listen", "127.0.0.1:4001"),
            ("listen", "/ip4/127.0.0.1"),
            ("listen", "/ip4/127.0.0.1/udp/0"),
            ("listen", f"/ip4/127.0.0.1/tcp/0/p2p/{SOME_PEER}"),
            ("listen", ""),
            ("bootstrap", "nonsense"),
            ("bootstrap", "/ip4/127.0.0.1/tcp/4001"),
            ("bootstrap", "/ip4/127.0.0.1/tcp/4001/p2p/nobody"),
        ],
    )
    def test_a_bad_address(self, name: str, address: str) -> None:
        with pytest.raises(AddressError):
            never_entered(**{name: [address]})

    def test_a_bootstrap_peer_with_another_id(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("p2pavg.peer.peer.BOOTSTRAP_SECONDS", 1.0)
        with open_averager(config(), listen=LOOPBACK) as other:
            address = other.addresses[0].replace(other.peer_id, SOME_PEER)
            with pytest.raises(BootstrapError):
                never_entered(bootstrap=[address])


def test_the_identity_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "peer.key"
    with open_averager(config(), listen=LOOPBACK, identity=file) as averager:
        name = averager.peer_id
    with open_averager(config(), listen=LOOPBACK, identity=str(file)) as averager:
        assert averager.peer_id == name
    assert Ed25519Signer(file.read_bytes()).peer_id == name


class TestOtherProcesses:
    def test_a_forked_child_is_refused_and_the_parent_goes_on(self) -> None:
        def in_child(averager: Averager) -> None:
            for use in (lambda: averager.step(wait=0), lambda: averager.accumulate([torch.ones(3)])):
                with pytest.raises(
                    ClosedError, match=rf"belongs to process {os.getppid()} and cannot be used after a fork"
                ):
                    use()
            averager._thread.stop()  # as at the end of the block: nothing to do and nothing to wait for

        with two_averagers() as averagers:
            with warnings.catch_warnings():
                # Python 3.12 and later warn about forks of a process with threads, which this test is about.
                warnings.filterwarnings(
                    "ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning
                )
                pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)
                    signal.alarm(int(WATCHDOG_SECONDS))
                    in_child(averagers[0])
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            for averager in averagers:
                averager.accumulate([torch.ones(3)])
            assert all(isinstance(result, Success) for result in step_together(*averagers))

    # Python 3.12 and later warn when torch forks its workers beside our thread. The workers do not use the thread.
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
    def test_a_data_loader_with_workers(self) -> None:
        samples = TensorDataset(torch.arange(12.0).view(12, 1))
        loader = DataLoader(samples, batch_size=4, num_workers=2, multiprocessing_context="fork")
        with two_averagers() as averagers:
            seen = []
            for [batch] in loader:
                for averager in averagers:
                    averager.accumulate([batch.sum(0)], weight=len(batch))
                results = step_together(*averagers)
                assert all(isinstance(result, Success) for result in results)
                seen.append(results[0].averaged[0].item())  # type: ignore[union-attr,index]
            assert seen == [6.0, 22.0, 38.0]


INTERRUPTED = """
import threading
import torch
from p2pavg import AveragingConfig
from p2pavg.blocking import open_averager
from p2pavg.round.round import Round
from p2pavg.base.threads import trio_thread

trio_thread.STOP_SECONDS = 1000.0
changed = Round.changed

async def noticed(self):
    print("waiting", flush=True)
    await changed(self)

Round.changed = noticed
try:
    with open_averager(AveragingConfig(run_id="test", match_timeout=1800), listen=["/ip4/127.0.0.1/tcp/0"]) as averager:
        averager.accumulate([torch.ones(3)])
        averager.step(wait=None)
finally:
    print(averager.weight, [thread.name for thread in threading.enumerate() if thread.name == "p2pavg"], flush=True)
"""


def test_ctrl_c_during_a_waiting_step() -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", INTERRUPTED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=WATCHDOG_SECONDS)  # less than STOP_SECONDS
        finally:
            process.kill()
    # The interpreter ends like this after an uncaught KeyboardInterrupt.
    assert process.returncode == -signal.SIGINT
    assert out == "1.0 []\n"
    assert err.count("Traceback") == 1
    assert err.endswith("\nKeyboardInterrupt\n")
    assert "Exception" not in err


def test_ctrl_c_ends_the_wait_but_not_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    main = threading.main_thread().ident
    assert main == threading.get_ident()
    interrupt = [signal.SIGINT]

    def press_once() -> None:
        if interrupt:
            signal.pthread_kill(main, interrupt.pop())

    when_waiting_for_a_round(monkeypatch, press_once)
    with two_averagers() as (first, second):
        first.accumulate([torch.ones(3)])
        with pytest.raises(KeyboardInterrupt):
            first.step(wait=None)
        second.accumulate([torch.ones(3)])
        assert isinstance(second.step(wait=None), Success)
        assert isinstance(first.step(wait=WATCHDOG_SECONDS), Success)
        assert isinstance(first.step(wait=None), NoPeers)
