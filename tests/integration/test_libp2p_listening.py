"""Listening, the announced addresses, and the process around a transport."""

import os
import socket

import psutil
import pytest
import trio.testing

from p2pavg.base.errors import ListenError
from p2pavg.net.libp2p import transport
from p2pavg.net.nat.reach import watcher
from tests.integration.hosts import TIMEOUT, watched
from tests.integration.libp2p_hosts import assert_serves_strangers, open_host
from tests.programs import run_python


@watched
async def test_a_wildcard_announces_the_machines_interfaces() -> None:
    async with open_host("/ip4/0.0.0.0/tcp/0") as host, open_host() as stranger:
        hosts = [address.split("/")[2] for address in host.addresses]
        own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
        assert "127.0.0.1" in hosts
        assert set(hosts) <= own
        assert hosts[-1].startswith("127."), "loopback must come last"
        await stranger.dial(host.addresses[-1], timeout=TIMEOUT)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
@watched
async def test_listening_on_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback here")
    async with open_host("/ip6/::1/tcp/0") as host:
        assert host.addresses[0].startswith("/ip6/::1/tcp/")
        await assert_serves_strangers(host)


@watched
async def test_a_busy_port_is_named() -> None:
    async with open_host() as host:
        listen = host.addresses[0].partition("/p2p/")[0]
        with pytest.raises(ListenError, match=f"{listen}.*in use"):
            async with open_host(listen):
                pass


@watched
async def test_an_address_of_another_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    listen = "/ip4/203.0.113.7/tcp/0"
    for check_free in (transport.check_free, lambda _: None):
        monkeypatch.setattr(transport, "check_free", check_free)
        with pytest.raises(ListenError, match=listen):
            async with open_host(listen):
                pass


# -- the process around the transport

# Without a guard, libp2p logs a refused dial as an error, and calls logging.warning() on the root logger.
SCRIPT = """
import logging, os, sys, trio
from p2pavg.net.libp2p.transport import open_libp2p_transport
from tests.transport_conformance import ECHO, echo
from p2pavg.net.transport import receive_message, send_message
LISTEN = ["/ip4/127.0.0.1/tcp/0"]
async def assert_serves(here, there):
    stream = await here.open_stream(there.peer_id, ECHO, addresses=there.addresses, timeout=20)
    await send_message(stream, b"x")
    assert await receive_message(stream) == b"x"
    await stream.aclose()
async def main():
    async with (
        open_libp2p_transport(seed=bytes(31) + b"1", listen=LISTEN) as here,
        open_libp2p_transport(seed=bytes(31) + b"2", listen=LISTEN) as there,
    ):
        there.serve(ECHO, echo)
        await assert_serves(here, there)
        sockets = [found.fileno() for peer in (here, there) for found in peer.sockets()]
        assert len(sockets) == 4, sockets
        child = os.fork()
        if child == 0:
            still_open = []
            for descriptor in sockets:
                try:
                    os.fstat(descriptor)
                except OSError:
                    continue
                still_open.append(descriptor)
            here_too = [found.fileno() for peer in (here, there) for found in peer.sockets()]
            os._exit(0 if not still_open and here_too == [-1] * 4 else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, "the child holds sockets"
        await assert_serves(here, there)
        try:
            await here.dial("/ip4/127.0.0.1/tcp/1/p2p/12D3KooWCtP28TbfSAaThWi7cyVBp9TnvqxfcKbKoRgpDLMiTdPT", timeout=20)
        except Exception as error:
            assert type(error).__name__ == "UnreachableError", error
        await here.disconnect(there.peer_id)
trio.run(main)
assert logging.getLogger().handlers == [], logging.getLogger().handlers
assert logging.getLogger("libp2p").handlers
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_holds_no_socket_and_nothing_is_logged_by_default() -> None:
    finished = run_python("-c", SCRIPT)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""


@watched
async def test_nothing_looks_at_the_listeners_once_they_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at this machine's addresses may be due at any moment, also while the transport closes."""
    monkeypatch.setattr(watcher, "CALM_LOOK_SECONDS", 0.0)
    looks_after = 0
    async with open_host() as host:
        assert isinstance(host, transport.Libp2pTransport)
        close, listened = host._host.close, host._connections.listening

        async def close_and_look() -> None:
            nonlocal looks_after
            await close()

            def look() -> list[tuple[str, int]]:
                nonlocal looks_after
                looks_after += 1
                return []

            monkeypatch.setattr(host._connections, "listening", look)
            host._reaching._watcher.wake()
            await trio.testing.wait_all_tasks_blocked()

        monkeypatch.setattr(host._host, "close", close_and_look)
        assert listened()
    assert looks_after == 0
