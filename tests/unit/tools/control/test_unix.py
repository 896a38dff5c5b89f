"""The control socket: one owner, callers of the same user only, and callers that misbehave."""

from __future__ import annotations

import os
import resource
import socket
import stat
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from p2pavg.base.errors import BusyError, ControlError, StreamBrokenError
from p2pavg.net import unix
from p2pavg.net.transport import receive_message, send_message
from p2pavg.net.unix import NotRunningError, accept_unix, connect_unix, open_unix_listener, serve_unix
from p2pavg.tools.control import service
from p2pavg.tools.control.messages import Answer, Done, Question, encode_question
from p2pavg.tools.control.service import Answering, ask, control_handler
from tests.programs import run_python
from tests.unit.tools.control.statuses import STATUS

WATCHDOG_SECONDS = 120.0
NOBODY = 65534


async def answer(question: Question) -> Answer:
    return STATUS if question is Question.STATUS else Done()


@asynccontextmanager
async def served(path: Path, answering: Answering = answer, most: int = 64) -> AsyncIterator[None]:
    with trio.fail_after(WATCHDOG_SECONDS):
        async with open_unix_listener(path) as listener, trio.open_nursery() as nursery:
            nursery.start_soon(partial(serve_unix, listener, control_handler(answering), most=most))
            yield
            nursery.cancel_scope.cancel()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control.sock"


async def test_questions_are_answered_and_the_socket_goes_with_its_owner(path: Path) -> None:
    async with served(path):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert await ask(path, Question.STATUS) == STATUS
        assert await ask(path, Question.STOP) == Done()
        async with connect_unix(path) as stream:
            for _ in range(3):  # on one connection
                await send_message(stream, encode_question(Question.STATUS))
                assert await receive_message(stream) is not None
    assert "control.sock" not in os.listdir(path.parent)
    with pytest.raises(NotRunningError, match="no daemon listens on"):
        await ask(path, Question.STATUS)


async def test_a_second_owner_is_refused_while_the_first_lives(path: Path) -> None:
    async with served(path):
        with pytest.raises(BusyError, match="another process uses the folder"):
            async with open_unix_listener(path):
                pass
        assert await ask(path, Question.STATUS) == STATUS, "the first owner lost its socket"


async def test_the_socket_of_a_killed_process_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(NotRunningError):
        await ask(path, Question.STATUS)
    async with served(path):
        assert await ask(path, Question.STATUS) == STATUS


async def test_a_path_that_is_longer_than_an_address_allows(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120) / ("e" * 120)
    folder.mkdir(parents=True)
    async with served(folder / "control.sock"):
        assert await ask(folder / "control.sock", Question.STATUS) == STATUS


async def test_a_folder_of_others_or_none_is_refused(path: Path) -> None:
    path.parent.chmod(0o777)
    with pytest.raises(ControlError, match="other users can write to the folder"):
        async with open_unix_listener(path):
            pass
    with pytest.raises(ControlError, match=r"cannot use the folder .*missing"):
        async with open_unix_listener(path.parent / "missing" / "control.sock"):
            pass


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user, whose process only root can start")
async def test_a_process_of_another_user_gets_no_answer() -> None:
    """The modes are opened, so that only the kernel's credentials are in the way."""
    program = """if True:
        import os, socket, sys
        os.setuid(int(sys.argv[1]))
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(20)
            asking.connect(sys.argv[2])
            try:
                asking.sendall(bytes.fromhex(sys.argv[3]))
                print(len(asking.recv(100)))
            except ConnectionError:
                print(0)
    """
    question = encode_question(Question.STATUS)
    framed = (len(question).to_bytes(4, "big") + question).hex()
    with tempfile.TemporaryDirectory() as folder:  # other users may not enter the folders of pytest
        path = Path(folder) / "control.sock"

        def call(user: int) -> str:
            arguments = ("-I", "-c", program, str(user), path, framed)
            return run_python(*arguments, timeout=WATCHDOG_SECONDS, check=True).stdout.strip()

        async with served(path):
            path.chmod(0o666)
            path.parent.chmod(0o711)
            assert await trio.to_thread.run_sync(call, NOBODY) == "0"
            assert int(await trio.to_thread.run_sync(call, 0)) > 4


async def test_a_caller_that_says_nothing_is_closed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "REPLY_SECONDS", 0.05)
    async with served(path), connect_unix(path) as stream:
        assert await stream.receive_some(1) == b""


async def test_an_announced_length_above_the_limit_costs_that_caller_only(path: Path) -> None:
    async with served(path):
        async with connect_unix(path) as stream:
            await stream.send_all(b"\xff\xff\xff\xff" + bytes(100))
            with suppress(StreamBrokenError):
                assert await receive_message(stream) is None
        assert await ask(path, Question.STATUS) == STATUS


async def test_connections_above_the_limit_are_closed(path: Path) -> None:
    async with served(path, most=1), connect_unix(path) as first:
        await send_message(first, encode_question(Question.STATUS))
        assert await receive_message(first) is not None
        async with connect_unix(path) as second:
            assert await second.receive_some(1) == b""


async def test_a_machine_without_a_file_to_open_delays_a_connection(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unix, "LOOK_SECONDS", 0.01)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with trio.fail_after(WATCHDOG_SECONDS):
        async with open_unix_listener(path) as listener, connect_unix(path), trio.open_nursery() as nursery:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                accepted = trio.Event()

                async def accept() -> None:
                    await trio.aclose_forcefully(await accept_unix(listener))
                    accepted.set()

                nursery.start_soon(accept)
                while "cannot take a connection" not in caplog.text:
                    await trio.lowlevel.checkpoint()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            await accepted.wait()


async def test_an_answer_that_fails_costs_one_question_only(path: Path) -> None:
    calls = 0

    async def fail_first(_: Question) -> Answer:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError
        return STATUS

    async with served(path, fail_first):
        with pytest.raises(ControlError, match="the daemon refused: an exception, which is in its log"):
            await ask(path, Question.STATUS)
        assert await ask(path, Question.STATUS) == STATUS


async def test_a_daemon_that_does_not_answer_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_: Question) -> Answer:
        await trio.sleep_forever()
        raise AssertionError

    async with served(path, never):
        with pytest.raises(ControlError, match="did not answer within"):
            await ask(path, Question.STATUS, timeout=0.05)
        monkeypatch.setattr(service, "QUICK_REPLY_SECONDS", 0.05)
        with pytest.raises(ControlError, match="the daemon refused: no answer within"):
            await ask(path, Question.STATUS)
