"""The watcher: it asks over a real protocol on a simulated network, verifies dial-backs, and tells changes."""

from __future__ import annotations

import errno
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from p2pavg.base.errors import UnreachableError
from p2pavg.base.limits import CALM_LOOK_SECONDS, REPLY_SECONDS
from p2pavg.net.nat.reach import watcher
from p2pavg.net.nat.reach.facts import Mapped, Neighbour
from p2pavg.net.nat.reach.reachability import Kind, Reachability
from p2pavg.net.nat.reach.service import ReachService
from p2pavg.net.nat.reach.watcher import Connecting, ReachWatcher, machine_hosts
from p2pavg.net.nat.reach.whoami import SeenEndpoint
from p2pavg.net.transport import Stream
from p2pavg.testing import MemoryNetwork
from p2pavg_dht import Ed25519Signer

ME, ALICE, BOB = (Ed25519Signer(bytes([number]) * 32) for number in (1, 2, 3))
HOSTS = {ALICE.peer_id: "198.51.100.1", BOB.peer_id: "192.0.2.2"}
HOME, OUTER, PORT = "192.168.1.2", "203.0.113.1", 4001


class FakeMapper:
    """A mapper that is told what to map, and remembers how it was used."""

    def __init__(self, on_mapped: Callable[[Mapped | None], None]) -> None:
        self.on_mapped = on_mapped
        self.ports: list[int] = []
        self.ended = 0

    async def run(self, port: int) -> None:
        self.ports.append(port)
        try:
            await trio.sleep_forever()
        finally:
            self.ended += 1


class Stage:
    """One watcher, and two public peers that see it behind a router. Dials to ``dialable`` arrive."""

    def __init__(self) -> None:
        self.dialable: set[tuple[str, int]] = set()
        self.outer = OUTER
        self.hosts = [HOME, "127.0.0.1"]
        self.failure: OSError | None = None
        """The error of each look at the machine's addresses, if any."""
        self.around = [Neighbour(peer_id=name, host=host, port=PORT) for name, host in HOSTS.items()]
        self.told: list[tuple[Reachability, tuple[str, ...]]] = []
        self.liars: set[str] = set()
        """Peers that say that they have dialled, and have not."""
        self.dropped = False
        """True if dials are dropped without an answer."""
        self.mapper: FakeMapper | None = None
        self.watcher: ReachWatcher

    def neighbours(self) -> list[Neighbour]:
        return self.around

    def listening(self) -> list[tuple[str, int]]:
        return [(HOME, PORT)]

    def make_mapper(self, on_mapped: Callable[[Mapped | None], None]) -> FakeMapper:
        self.mapper = FakeMapper(on_mapped)
        return self.mapper

    def poll(self) -> list[str]:
        if self.failure is not None:
            raise self.failure
        return self.hosts

    @property
    def reachability(self) -> Reachability:
        """The reachability that was told last."""
        return self.told[-1][0]

    @property
    def addresses(self) -> list[str]:
        """The addresses that were told last, without the peer id."""
        return [text.partition("/p2p/")[0] for text in self.told[-1][1]]

    def dialling_of(self, dialler: str) -> Callable[[str, str, int], object]:
        async def dial(peer_id: str, host: str, port: int) -> None:
            assert (peer_id, host) == (ME.peer_id, self.outer)
            if dialler in self.liars:
                return
            if self.dropped:
                await trio.sleep_forever()
            if (host, port) not in self.dialable:
                raise UnreachableError("refused")
            self.watcher.inbound(dialler, HOSTS[dialler])

        return dial


@asynccontextmanager
async def stage(
    change: Callable[[Stage], None] = lambda _: None, announce: tuple[str, ...] = ()
) -> AsyncIterator[Stage]:
    """Run a watcher. ``change`` may change the stage before it starts."""
    found = Stage()
    change(found)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(watcher, "machine_hosts", found.poll)
        patched.setattr(watcher, "PortMapper", found.make_mapper)
        network = MemoryNetwork(latency=(0.0, 0.0))
        async with (
            network.transport(ME) as mine,
            network.transport(ALICE) as alice,
            network.transport(BOB) as bob,
            trio.open_nursery() as nursery,
        ):
            for server in (alice, bob):
                serve = server.serve

                def serve_as_seen(protocol: str, handler: Callable[[Stream], object], serve=serve) -> None:  # type: ignore[no-untyped-def]
                    async def handle(stream: Stream) -> None:
                        stream.remote_host, stream.remote_port = found.outer, 50000
                        await handler(stream)  # type: ignore[misc]

                    serve(protocol, handle)

                server.serve = serve_as_seen  # type: ignore[method-assign]
                ReachService(server, found.dialling_of(server.peer_id))  # type: ignore[arg-type]
                await mine.dial(server.addresses[0], timeout=5.0)
            found.watcher = ReachWatcher(
                mine,
                cast(Connecting, found),
                on_change=lambda reachability, addresses: found.told.append((reachability, addresses)),
                announce=announce,
            )
            nursery.start_soon(found.watcher.run)
            yield found
            nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def whoami(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Answer whoami probes like a symmetric router, and return the servers that were asked."""
    asked: list[tuple[str, int]] = []

    async def ask(host: str, port: int, *, local_port: int | None, timeout: float) -> SeenEndpoint:
        asked.append((host, port))
        return SeenEndpoint(host=OUTER, port=60000 + len(asked), local_port=local_port or 50000)

    monkeypatch.setattr(watcher, "ask", ask)
    return asked


class TestFindingOut:
    async def test_own_addresses_are_told_at_once(self, autojump_clock: MockClock) -> None:
        async with stage() as found:
            await trio.testing.wait_all_tasks_blocked()
            assert found.told[0][0].kind is Kind.UNKNOWN
            assert found.told[0][1] == (f"/ip4/{HOME}/tcp/{PORT}/p2p/{ME.peer_id}",)

    async def test_forwarded_port_is_found(self, autojump_clock: MockClock) -> None:
        async with stage(lambda found: found.dialable.add((OUTER, PORT))) as found:
            await trio.sleep(3.0)
            assert found.reachability.kind is Kind.PUBLIC
            assert found.addresses == [f"/ip4/{OUTER}/tcp/{PORT}", f"/ip4/{HOME}/tcp/{PORT}"]
            assert not found.watcher.relays_wanted

    async def test_symmetric_router_is_found(
        self, autojump_clock: MockClock, whoami: list[tuple[str, int]]
    ) -> None:
        async with stage() as found:
            await trio.sleep(20.0)
            assert found.reachability.sentence == "behind a symmetric router; no relay is known yet"
            assert found.watcher.relays_wanted
            assert sorted(whoami) == sorted((host, PORT) for host in HOSTS.values())

    async def test_claimed_dial_back_without_a_connection_counts_for_nothing(
        self, autojump_clock: MockClock
    ) -> None:
        async with stage(lambda found: found.liars.update(HOSTS)) as found:
            await trio.sleep(30.0)
            assert found.reachability.kind is Kind.RELAYED
            assert f"/ip4/{OUTER}/tcp/{PORT}" not in found.addresses

    async def test_connection_from_another_network_is_no_dial_back(self, autojump_clock: MockClock) -> None:
        async with stage(lambda found: found.liars.update(HOSTS)) as found:
            with trio.move_on_after(30.0):
                while True:
                    for name in HOSTS:
                        found.watcher.inbound(name, "192.168.1.77")
                    await trio.sleep(0.01)
            assert not found.reachability.dialable

    async def test_changes_are_told_and_logged_once(
        self, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "p2pavg")
        async with stage(lambda found: found.dialable.add((OUTER, PORT))) as found:
            await trio.sleep(10.0)
            told = len(found.told)
            await trio.sleep(700.0)
            assert len(found.told) == told
        assert [record.getMessage() for record in caplog.records] == ["reachability: public"]

    async def test_changed_machine_is_noticed_within_seconds(self, autojump_clock: MockClock) -> None:
        async with stage(lambda found: found.dialable.add((OUTER, PORT))) as found:
            await trio.sleep(3.0)
            found.hosts, found.outer = ["10.0.0.9"], "8.7.6.5"
            await trio.sleep(2 * CALM_LOOK_SECONDS)
            assert found.reachability.outer_hosts == ("8.7.6.5",)
            assert not found.reachability.dialable

    async def test_dial_backs_after_a_move_wait_for_those_before(self, autojump_clock: MockClock) -> None:
        def drops(found: Stage) -> None:
            found.dropped = True

        async with stage(drops) as found:
            await trio.sleep(4.0)  # the peers are dialling the old address
            found.hosts, found.outer, found.dropped = ["10.0.0.9"], "8.7.6.5", False
            found.dialable.add(("8.7.6.5", PORT))
            await trio.sleep(20.0)
            assert found.reachability.kind is Kind.PUBLIC


class TestMapping:
    async def test_port_is_mapped_behind_a_router(self, autojump_clock: MockClock) -> None:
        async with stage() as found:
            await trio.sleep(3.0)
            assert found.mapper is not None
            assert found.mapper.ports == [PORT]
            found.dialable.add((OUTER, 4777))
            found.mapper.on_mapped(Mapped(port=4777, protocol="UPnP", host=OUTER))
            await trio.sleep(3.0)
            assert found.reachability.sentence == "port 4777 is mapped by UPnP"
            assert found.addresses[0] == f"/ip4/{OUTER}/tcp/4777"
        assert found.mapper.ended == 1

    async def test_nothing_is_mapped_on_one_machine(self, autojump_clock: MockClock) -> None:
        def local(found: Stage) -> None:
            found.around = [Neighbour(peer_id=ALICE.peer_id, host="127.0.0.1")]

        async with stage(local) as found:
            await trio.sleep(1000.0)
            assert found.mapper is not None
            assert not found.mapper.ports

    async def test_peer_that_stays_alone_maps_its_port(self, autojump_clock: MockClock) -> None:
        async with stage(lambda found: found.around.clear()) as found:
            await trio.sleep(REPLY_SECONDS / 2)
            assert found.mapper is not None
            assert not found.mapper.ports
            await trio.sleep(REPLY_SECONDS)
            assert found.mapper.ports == [PORT]

    async def test_peer_with_a_public_address_maps_nothing(self, autojump_clock: MockClock) -> None:
        def public(found: Stage) -> None:
            found.around.clear()
            found.hosts = [OUTER]

        async with stage(public) as found:
            await trio.sleep(100.0)
            assert found.mapper is not None
            assert not found.mapper.ports

    async def test_mapping_is_made_anew_in_another_network(self, autojump_clock: MockClock) -> None:
        async with stage() as found:
            await trio.sleep(3.0)
            found.hosts, found.outer = ["10.0.0.9"], "8.7.6.5"
            await trio.sleep(30.0)
            assert found.mapper is not None
            assert found.mapper.ports == [PORT, PORT]
            assert found.mapper.ended == 1

    async def test_announced_addresses_need_no_mapping(self, autojump_clock: MockClock) -> None:
        async with stage(announce=("/ip4/5.5.5.5/tcp/80",)) as found:
            await trio.sleep(100.0)
            assert found.mapper is None
            assert found.reachability.kind is Kind.ANNOUNCED


class TestShortages:
    async def test_a_machine_without_a_file_to_open_keeps_the_known_addresses(
        self, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with stage() as found:
            await trio.sleep(100.0)
            told = list(found.told)
            found.failure = OSError(errno.EMFILE, "Too many open files")
            await trio.sleep(2 * CALM_LOOK_SECONDS)
            assert found.told == told
            assert "cannot look at this machine's addresses: Too many open files" in caplog.text
            found.failure, found.hosts = None, ["10.0.0.9"]
            await trio.sleep(2 * CALM_LOOK_SECONDS)
            assert found.told != told

    async def test_a_lonely_peer_without_a_file_to_open_keeps_looking(
        self, autojump_clock: MockClock
    ) -> None:
        """A peer that is alone asks whether it has a public address, before it maps a port."""

        def alone(found: Stage) -> None:
            found.around.clear()

        async with stage(alone) as found:
            await trio.sleep(CALM_LOOK_SECONDS)
            found.failure = OSError(errno.EMFILE, "Too many open files")
            await trio.sleep(3 * REPLY_SECONDS)
            assert found.mapper is not None
            assert found.mapper.ports == [PORT]

    async def test_any_other_failure_of_the_system_is_not_hidden(self, autojump_clock: MockClock) -> None:
        def fail(found: Stage) -> None:
            found.failure = OSError(errno.EBADF, "bad descriptor")

        async def watch() -> None:
            async with stage(fail):
                await trio.sleep(CALM_LOOK_SECONDS)

        with pytest.raises(OSError, match="bad descriptor"):
            await watch()

    def test_a_shortage_is_not_taken_for_a_machine_without_ipv6(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr("p2pavg.net.nat.reach.watcher.socket.socket", fail)
        with pytest.raises(OSError, match="Too many"):
            watcher.machine_source6()


class TestOuterPort:
    """The outer port of a fresh port, which a punch tells the other peer before it connects."""

    async def test_a_router_that_keeps_ports_is_not_asked(
        self, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def keeps(*_: object, **__: object) -> SeenEndpoint:
            return SeenEndpoint(host=OUTER, port=50000, local_port=50000)

        monkeypatch.setattr(watcher, "ask", keeps)
        async with stage() as found:
            await trio.sleep(20.0)
            assert found.reachability.kind is Kind.PUNCHABLE
            monkeypatch.setattr(watcher, "ask", None)
            assert await found.watcher.outer_port(4, 7777) == 7777

    async def test_two_peers_of_other_machines_are_asked_from_that_very_port(
        self, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        async def ask(host: str, port: int, *, local_port: int | None, timeout: float) -> SeenEndpoint:
            asked.append((host, port, local_port))
            if host != answers:
                raise UnreachableError(f"{host} is silent")
            return SeenEndpoint(host=OUTER, port=61234, local_port=local_port or 0)

        async with stage() as found:
            await trio.sleep(20.0)  # by then, its router is known to be symmetric
            monkeypatch.setattr(watcher, "ask", ask)
            others = [("127.0.0.1", PORT), ("2001:db8::1", PORT), ("192.0.2.9", 0)]
            found.around = [Neighbour(peer_id="other", host=host, port=port) for host, port in others]
            found.around += [Neighbour(peer_id=name, host=host, port=PORT) for name, host in HOSTS.items()]
            answers = HOSTS[BOB.peer_id]
            assert await found.watcher.outer_port(4, 7777) == 61234
            assert asked == [(host, PORT, 7777) for host in HOSTS.values()]
            found.around.append(Neighbour(peer_id="a third", host="203.0.113.99", port=PORT))
            answers = "203.0.113.99"
            with pytest.raises(UnreachableError, match=r"198\.51\.100\.1 is silent; 192\.0\.2\.2 is silent"):
                await found.watcher.outer_port(4, 7777)
            found.around = []
            with pytest.raises(UnreachableError, match="no peer can be asked"):
                await found.watcher.outer_port(4, 7777)


def test_machine_has_normal_ip_addresses() -> None:
    assert machine_hosts()
    assert all("%" not in host for host in machine_hosts())
