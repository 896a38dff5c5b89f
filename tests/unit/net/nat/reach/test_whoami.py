"""The whoami probe, for real on loopback: answers, limits, and askers and listeners that misbehave."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import trio
from trio.testing import MockClock

from p2pavg.base.errors import UnreachableError
from p2pavg.net.nat.reach import whoami
from p2pavg.net.nat.reach.whoami import MAGIC, NONCE_BYTES, WhoamiAnswerer, ask, bound_socket

Handler = Callable[[socket.socket], Awaitable[None]]
LOOPBACK = "127.0.0.1"


@asynccontextmanager
async def listener(handler: Handler, host: str = LOOPBACK, *, shared: bool = False) -> AsyncIterator[int]:
    """Hand each connection to ``handler``, and give the port."""
    opened = trio.socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    if shared:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    await opened.bind((host, 0))
    opened.listen(16)

    async def accept() -> None:
        while True:
            accepted, _ = await opened.accept()
            nursery.start_soon(handler, socket.socket(fileno=accepted.detach()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        yield opened.getsockname()[1]
        nursery.cancel_scope.cancel()
    opened.close()


def says(answer: Callable[[bytes], bytes]) -> Handler:
    """Return a listener's handler that answers what ``answer`` makes of the question."""

    async def handle(opened: socket.socket) -> None:
        with opened:
            opened.setblocking(False)
            stream = trio.socket.from_stdlib_socket(opened)
            question = await stream.recv(100)
            await stream.send(answer(question))

    return handle


class TestAnswers:
    @pytest.mark.parametrize("host", [LOOPBACK, "::1"])
    async def test_asker_learns_its_host_and_port(self, host: str) -> None:
        async with listener(WhoamiAnswerer().answer, host) as port:
            seen = await ask(host, port, timeout=5.0)
            assert (seen.host, seen.port) == (host, seen.local_port)

    async def test_probe_from_a_chosen_port_is_seen_from_that_port(self) -> None:
        async with listener(WhoamiAnswerer().answer) as port:
            with bound_socket(4, shared=False) as free:
                mine = free.getsockname()[1]
            for _ in range(3):  # no waiting state of TCP is left at the asker
                assert (await ask(LOOPBACK, port, local_port=mine, timeout=5.0)).port == mine

    async def test_probe_works_from_a_port_that_is_listened_on(self) -> None:
        async with (
            listener(WhoamiAnswerer().answer) as port,
            listener(WhoamiAnswerer().answer, shared=True) as mine,
        ):
            assert (await ask(LOOPBACK, port, local_port=mine, timeout=5.0)).port == mine

    async def test_ipv4_inside_ipv6_is_answered_as_ipv4(self) -> None:
        async with listener(WhoamiAnswerer().answer, "::") as port:
            assert (await ask(LOOPBACK, port, timeout=5.0)).host == LOOPBACK


class TestHostileListeners:
    @pytest.mark.parametrize(
        "answer",
        [
            lambda _: b"",
            lambda question: question[len(MAGIC) :],
            lambda question: question[len(MAGIC) :] + b"\4" + bytes(12) + b"\1\2\3\4" + b"\0\0",
            lambda question: question[len(MAGIC) :] + b"\5" + bytes(12) + b"\1\2\3\4" + b"\0\1",
            lambda question: question[len(MAGIC) :] + b"\4" + bytes(11) + b"\1\1\2\3\4" + b"\0\1",
            lambda question: question[len(MAGIC) :] + b"\4" + bytes(16) + b"\0\1",
            lambda question: question[len(MAGIC) :] + b"\6" + bytes(10) + b"\xff\xff\1\2\3\4" + b"\0\1",
            lambda _: bytes(NONCE_BYTES) + b"\4" + bytes(12) + b"\1\2\3\4" + b"\0\1",
            lambda question: question[len(MAGIC) :] + b"\4" + bytes(12) + b"\1\2\3\4" + b"\0\1" + b"more",
        ],
        ids=["none", "short", "port 0", "version", "long ipv4", "no host", "mapped", "nonce", "long"],
    )
    async def test_wrong_answers_are_refused(self, answer: Callable[[bytes], bytes]) -> None:
        async with listener(says(answer)) as port:
            with pytest.raises(UnreachableError, match="no whoami answer"):
                await ask(LOOPBACK, port, timeout=5.0)

    async def test_silence_ends_with_the_timeout(self) -> None:
        async def silent(opened: socket.socket) -> None:
            with opened:
                await trio.sleep_forever()

        async with listener(silent) as port:
            with pytest.raises(UnreachableError, match=r"within 0\.1 s"):
                await ask(LOOPBACK, port, timeout=0.1)

    async def test_closed_port_and_names_are_errors(self) -> None:
        with bound_socket(4, shared=False) as free:
            closed = free.getsockname()[1]
        for host in (LOOPBACK, "localhost"):
            with pytest.raises(UnreachableError):
                await ask(host, closed, timeout=5.0)

    async def test_port_of_another_program_is_an_error(self) -> None:
        async with listener(WhoamiAnswerer().answer) as port, listener(WhoamiAnswerer().answer) as taken:
            with pytest.raises(UnreachableError, match="in use"):
                await ask(LOOPBACK, port, local_port=taken, timeout=5.0)


class TestHostileAskers:
    @pytest.mark.parametrize("question", [b"P", b"GET / HTTP/1.1\r\n\r\n....", b"P2PAVG!\n" + bytes(16)])
    async def test_other_bytes_get_no_answer(self, question: bytes) -> None:
        async with (
            listener(WhoamiAnswerer().answer) as port,
            await trio.open_tcp_stream(LOOPBACK, port) as stream,
        ):
            await stream.send_all(question)
            await stream.send_eof()
            with suppress(trio.BrokenResourceError):  # closing with unread bytes resets the connection
                assert await stream.receive_some(100) == b""

    async def test_asker_that_says_nothing_is_dropped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(whoami, "QUICK_REPLY_SECONDS", 0.05)
        async with (
            listener(WhoamiAnswerer().answer) as port,
            await trio.open_tcp_stream(LOOPBACK, port) as stream,
        ):
            await stream.send_all(MAGIC)
            with trio.fail_after(5.0):
                assert await stream.receive_some(100) == b""

    async def test_all_hosts_together_get_a_bounded_number_of_answers(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(whoami, "ALL_BURST", 3.0)
        monkeypatch.setattr(whoami, "ALL_PER_SECOND", 0.001)
        async with listener(WhoamiAnswerer().answer) as port:
            assert await self.count(port, 10) == 3

    async def test_probes_at_once_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(whoami, "MAX_AT_ONCE", 1)
        async with listener(WhoamiAnswerer().answer) as port:
            silent = await trio.open_tcp_stream(LOOPBACK, port)
            await silent.send_all(MAGIC)  # occupies the only place
            assert await self.count(port, 1) == 0
            await silent.aclose()

    async def count(self, port: int, probes: int) -> int:
        """Return how many probes are answered."""
        answered = 0
        for _ in range(probes):
            try:
                await ask(LOOPBACK, port, timeout=5.0)
                answered += 1
            except UnreachableError:
                pass
        return answered


@pytest.mark.parametrize(
    ("host", "port", "nonce"), [("x", 1, 16), ("::1", 0, 16), ("::1", 65536, 16), ("::1", 1, 15)]
)
def test_impossible_answers_are_not_made(host: str, port: int, nonce: int) -> None:
    with pytest.raises(ValueError, match="no answer"):
        whoami.encode_answer(bytes(nonce), host, port)


async def test_limits_of_a_host_come_back_with_time(autojump_clock: MockClock) -> None:
    answerer = WhoamiAnswerer()
    assert all(answerer._may_answer("192.0.2.1") for _ in range(int(whoami.HOST_BURST)))
    assert not answerer._may_answer("192.0.2.1")
    assert answerer._may_answer("192.0.2.2")
    await trio.sleep(1.0)
    assert answerer._may_answer("192.0.2.1")
