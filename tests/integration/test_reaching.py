"""Real connections to a peer: their settings, the choice between several, and the effects of a change of networks."""

from __future__ import annotations

import errno
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2pavg.net.libp2p import reaching
from p2pavg.net.libp2p.guarded_swarm import GuardedSwarm
from p2pavg.net.libp2p.transport import Libp2pTransport
from p2pavg.net.limits import dial_policy
from p2pavg.net.nat.reach.reachability import Kind
from tests.integration.hosts import (
    LOOPBACK,
    TIMEOUT,
    assert_checked_while_idle,
    assert_serves,
    eventually,
    hide,
    open_host,
    watched,
)
from tests.integration.relay.meeting import connections_to, echoed, open_echo, open_relay


@watched
async def test_the_system_watches_both_ends_of_a_connection() -> None:
    async with open_host(LOOPBACK) as here, open_host(LOOPBACK) as there:
        await here.dial(there.addresses[0], timeout=TIMEOUT)
        await eventually(lambda: there.is_connected(here.peer_id))
        for host, peer in ((here, there), (there, here)):
            (muxed,) = connections_to(host, peer)
            assert muxed.socket is not None
            assert_checked_while_idle(muxed.socket)


class TestFirstAnnouncement:
    @watched
    async def test_a_peer_of_a_local_network_waits_for_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reaching, "SETTLE_DIAL_SECONDS", math.inf)
        async with open_host(LOOPBACK) as here, open_host(LOOPBACK) as there:
            await there.dial(here.addresses[0], timeout=TIMEOUT)
            await there.settle()

    @watched
    async def test_a_peer_that_listens_nowhere_waits_for_a_relay(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reaching, "SETTLE_DIAL_SECONDS", math.inf)
        async with open_relay() as relay, open_host() as here:
            await here.dial(relay.addresses[0], timeout=TIMEOUT)
            assert not here.addresses
            await here.settle()
            assert relay.peer_id in here.addresses[0]

    @watched
    async def test_a_peer_that_no_relay_takes_does_not_wait_without_end(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reaching, "SETTLE_DIAL_SECONDS", 0.1)
        async with open_host() as here:
            await here.settle()
            assert not here.addresses


class TestChangeOfNetworks:
    @watched
    async def test_connections_from_an_address_that_is_gone_are_dropped(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with open_host(LOOPBACK) as here, open_host(LOOPBACK) as there:
            await here.dial(there.addresses[0], timeout=TIMEOUT)
            monkeypatch.setattr(reaching, "machine_hosts", lambda: ["127.0.0.1", "192.0.2.1"])
            await here._reaching._drop_dead_connections()
            await assert_serves(here, there)
            monkeypatch.setattr(reaching, "machine_hosts", lambda: ["192.0.2.1"])
            await here._reaching._drop_dead_connections()
            await eventually(lambda: not here.is_connected(there.peer_id))

    @watched
    async def test_a_machine_without_a_file_to_open_drops_no_connection(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail() -> list[str]:
            raise OSError(errno.EMFILE, "Too many open files")

        async with open_host(LOOPBACK) as here, open_host(LOOPBACK) as there:
            await here.dial(there.addresses[0], timeout=TIMEOUT)
            monkeypatch.setattr(reaching, "machine_hosts", fail)
            await here._reaching._drop_dead_connections()
            await assert_serves(here, there)

    @watched
    async def test_a_peer_that_can_be_dialled_now_tells_those_that_reach_it_through_relays(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Loopback stands for the internet: at a private address, no peer is dialled that asks through a relay.
        monkeypatch.setattr(dial_policy, "is_private", lambda _host: False)
        async with open_relay() as relay, open_host() as here, open_host(LOOPBACK) as there:
            found = there.addresses
            hide(there)
            await there.dial(relay.addresses[0], timeout=TIMEOUT)
            await eventually(lambda: bool(there.addresses))
            assert await echoed(await open_echo(here, there), b"through the relay") == b"through the relay"
            assert here.path_to(there.peer_id) == "relayed"
            become_dialable(there, found)
            await eventually(lambda: here.path_to(there.peer_id) == "direct")


def become_dialable(host: Libp2pTransport, addresses: tuple[str, ...]) -> None:
    """Let a host conclude that its router refuses all, and then that others can dial it."""
    host._reaching._watcher._on_change = lambda *_: None  # it would conclude something else on loopback
    for kind, announced in ((Kind.RELAYED, host.addresses), (Kind.PUBLIC, addresses)):
        host._reaching._conclude(replace(host.reachability, kind=kind), announced)


class FakeConnection:
    def __init__(self, host: str, relay: str = "") -> None:
        self.muxed_conn = SimpleNamespace(remote_host=host, relay=relay)


class TestChoiceOfConnection:
    def best(self, *connections: Any) -> Any:
        return GuardedSwarm._best_connection(cast(GuardedSwarm, None), list(connections))

    def test_the_oldest_connection_is_taken(self) -> None:
        old, new = FakeConnection("198.51.100.1"), FakeConnection("198.51.100.1")
        assert self.best(old, new) is old

    def test_a_direct_connection_comes_before_a_relayed_one(self) -> None:
        relayed, direct = FakeConnection("198.51.100.9", relay="R"), FakeConnection("198.51.100.1")
        assert self.best(relayed, direct) is direct
        assert self.best(relayed) is relayed

    def test_a_connection_to_the_host_that_a_peer_has_left_comes_last(self) -> None:
        left, old, new = (
            FakeConnection("198.51.100.1"),
            FakeConnection("203.0.113.5"),
            FakeConnection("203.0.113.5"),
        )
        assert self.best(left, old, new) is old
