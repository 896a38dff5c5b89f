"""Punches of two sockets on loopback: one connection, whichever side begins, and nothing left open."""

import socket
from contextlib import suppress

import pytest
import trio

from p2pavg.base.errors import UnreachableError
from p2pavg.net.nat.punch import sockets
from p2pavg.net.nat.punch.plan import Endpoint
from p2pavg.net.nat.punch.sockets import FreshPort, punch
from tests.integration.hosts import watched
from tests.integration.lanes.company import descriptors

LOOPBACK: dict[int, str] = {4: "127.0.0.1", 6: "::1"}


async def both(a: FreshPort, b: FreshPort, *, earlier: float, later: float) -> list[socket.socket]:
    """Punch from two ports; ``a`` begins after ``earlier`` seconds, ``b`` after ``later``."""
    found: dict[int, socket.socket] = {}
    now = trio.current_time()

    async def go(mine: FreshPort, other: FreshPort, after: float) -> None:
        found[mine.port] = await punch(mine, Endpoint(LOOPBACK[mine.version], other.port), now + after)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(go, a, b, earlier)
        nursery.start_soon(go, b, a, later)
    return [found[a.port], found[b.port]]


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("offset", [0.0, 0.05])
@watched
async def test_ten_punches_of_ten_succeed(version: int, offset: float) -> None:
    for _ in range(10):
        with FreshPort(version) as a, FreshPort(version) as b:
            one, other = await both(a, b, earlier=0.0, later=offset)
        with one, other:
            assert one.getpeername()[1] == b.port
            assert other.getpeername()[1] == a.port
            assert not one.getblocking()
            assert not other.getblocking()
            one.send(b"hello")
            await trio.lowlevel.wait_readable(other.fileno())
            assert other.recv(10) == b"hello"


@watched
async def test_a_connection_that_is_refused_is_tried_again_from_the_same_port() -> None:
    """Refused like by a router that answers unexpected packets: the other port has no listener at first."""
    with FreshPort() as mine, FreshPort() as other, trio.fail_after(5.0):
        async with trio.open_nursery() as nursery:

            async def begin() -> None:
                found = await punch(mine, Endpoint("127.0.0.1", other.port), trio.current_time())
                assert found.getsockname()[1] == mine.port
                found.close()

            nursery.start_soon(begin)
            await trio.sleep(0.1)
            with other.another() as listening:
                listening.listen()
                await trio.lowlevel.wait_readable(listening.fileno())
                accepted, (_, port) = listening.accept()
                assert port == mine.port
                accepted.close()


@watched
async def test_an_endpoint_that_refuses_gets_a_bounded_number_of_packets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hostile peer may have named a third party's endpoint."""
    monkeypatch.setattr(sockets, "_PAUSE_SECONDS", (0.0, 0.0))
    opened = 0

    class Counting(FreshPort):
        def another(self) -> socket.socket:
            nonlocal opened
            opened += 1
            return super().another()

    with Counting() as mine, FreshPort() as other, pytest.raises(UnreachableError, match=r"refused"):
        await punch(mine, Endpoint("127.0.0.1", other.port), trio.current_time(), within=1.0)
    assert opened == sockets.MOST_CONNECTS + 1, "and one for the listener"


@watched
async def test_a_connection_from_another_endpoint_is_closed() -> None:
    with FreshPort() as mine, FreshPort() as other, FreshPort() as wrong:
        async with trio.open_nursery() as nursery:

            async def refused() -> None:
                with pytest.raises(UnreachableError):
                    await punch(mine, Endpoint("127.0.0.1", other.port), trio.current_time(), within=0.5)

            nursery.start_soon(refused)
            with wrong.another() as stranger:
                stranger.setblocking(True)
                stranger.settimeout(5.0)
                while stranger.connect_ex(("127.0.0.1", mine.port)):
                    await trio.sleep(0.01)
                assert await trio.to_thread.run_sync(end_of, stranger) == b""


def end_of(stranger: socket.socket) -> bytes:
    with suppress(ConnectionResetError):
        return stranger.recv(1)
    return b""


@watched
async def test_nothing_stays_open_after_failures_and_cancellations() -> None:
    before = descriptors()
    for within in (0.0, 0.05):
        with FreshPort() as mine, FreshPort() as other:
            remote = Endpoint("127.0.0.1", other.port)
            with pytest.raises(UnreachableError):
                await punch(mine, remote, trio.current_time(), within=within)
            with trio.move_on_after(0.02):
                await punch(mine, remote, trio.current_time())
    assert descriptors() == before


@watched
async def test_a_connection_that_is_made_as_its_caller_gives_up_is_closed() -> None:
    made: list[socket.socket] = []

    class Late(socket.socket):
        def getsockopt(self, level: int, option: int) -> int:  # type: ignore[override]
            made.append(self)
            scope.cancel()
            return super().getsockopt(level, option)

    class LatePort(FreshPort):
        def another(self) -> socket.socket:
            late = Late(fileno=super().another().detach())
            late.setblocking(False)
            return late

    with socket.create_server(("127.0.0.1", 0)) as server, LatePort() as mine:
        remote = Endpoint("127.0.0.1", server.getsockname()[1])
        with trio.CancelScope() as scope:
            await punch(mine, remote, trio.current_time())
    assert scope.cancelled_caught
    assert [each.fileno() for each in made] == [-1]


@watched
async def test_of_two_connections_at_once_one_is_closed() -> None:
    """Between two ports there are two connections if a machine has two addresses."""
    made: list[socket.socket] = []

    class TwoPorts(FreshPort):
        def another(self) -> socket.socket:
            made.append(super().another())
            if len(made) == 2:  # the first one listens
                with suppress(BlockingIOError):
                    comes.connect(("127.0.0.2", self.port))
            return made[-1]

    with FreshPort() as other, other.another() as listening, other.another() as comes, TwoPorts() as mine:
        listening.listen()
        before = descriptors()
        found = await punch(mine, Endpoint("127.0.0.1", other.port), trio.current_time())
        assert descriptors() == before + 1
        found.close()


def test_fresh_ports_are_different() -> None:
    found = [FreshPort() for _ in range(200)]
    assert len({each.port for each in found}) == 200
    for each in found:
        each.close()


def test_a_probe_may_connect_from_a_fresh_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, FreshPort() as mine, socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        probe.bind(("0.0.0.0", mine.port))
        probe.connect(server.getsockname())
        with server.accept()[0] as accepted:
            assert accepted.getpeername()[1] == mine.port
