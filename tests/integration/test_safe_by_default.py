"""A peer without a certificate stays on its machine, unless its user asks for an open run by name."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import closing
from typing import Any

import psutil
import pytest
import trio

import p2pavg
from p2pavg.base.errors import UnreachableError
from p2pavg.base.hosts import is_loopback
from p2pavg.blocking import open_averager
from p2pavg.net.addresses import reachable_hosts
from p2pavg.net.libp2p.transport import Libp2pTransport
from p2pavg.tools.cli.daemon import DaemonOptions
from p2pavg.tools.cli.options import DisplayOptions, NetworkOptions, ServiceOptions
from p2pavg_dht import Ed25519Signer

LISTEN_ELSEWHERE: list[dict[str, Any]] = [
    {"listen": ["/ip4/0.0.0.0/tcp/0"]},
    {"listen": []},
    {"announce": ["/ip4/203.0.113.7/tcp/4001"]},
    {"bootstrap": ["/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X"]},
]


def config(**changes: Any) -> p2pavg.AveragingConfig:
    return p2pavg.AveragingConfig(run_id="here", match_timeout=60.0, **changes)


def listening_hosts() -> set[str]:
    found = psutil.Process().net_connections(kind="tcp")
    return {str(each.laddr[0]) for each in found if each.status == psutil.CONN_LISTEN}


def outer_hosts() -> list[str]:
    return [host for host in reachable_hosts("0.0.0.0") if not is_loopback(host)]


def test_a_stranger_finds_no_open_port_of_a_default_peer() -> None:
    before = listening_hosts()
    with open_averager(config()) as averager:
        assert listening_hosts() - before == {"127.0.0.1"}
        assert all(address.startswith("/ip4/127.0.0.1/tcp/") for address in averager.addresses)
        port = int(averager.addresses[0].split("/")[4])
        for host in outer_hosts():
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((host, port), timeout=5.0)


@pytest.mark.parametrize("arguments", LISTEN_ELSEWHERE, ids=str)
def test_leaving_the_machine_needs_a_certificate_or_an_open_run(arguments: dict[str, Any]) -> None:
    before = listening_hosts()
    with (
        pytest.raises(p2pavg.ConfigError, match="leads out of it") as found,
        open_averager(config(), **arguments),
    ):
        pass
    assert "p2pavg run create" in found.value.remedy
    assert "open_run=True" in found.value.remedy
    assert listening_hosts() == before


def test_an_averager_of_a_peer_that_others_reach_needs_the_same() -> None:
    async def main() -> None:
        async with (
            p2pavg.open_peer(listen=["/ip4/0.0.0.0/tcp/0"], port_mapping=False) as peer,
            peer.averager(config(open_run=True)) as averager,
        ):
            with pytest.raises(p2pavg.ConfigError, match=r"the listen address .* leads out"):
                async with averager.sibling(p2pavg.AveragingConfig(run_id="other")):
                    pass

    trio.run(main)


def test_a_default_peer_asks_no_router_and_no_relay() -> None:
    async def main() -> None:
        async with p2pavg.open_peer() as peer:
            transport = peer.context.transport
            assert isinstance(transport, Libp2pTransport)
            options = transport._reaching._options
            assert (options.port_mapping, options.reachable, options.only_here) == (False, False, True)

    trio.run(main)


def test_a_default_peer_dials_no_other_machine_that_a_process_of_this_one_names() -> None:
    """The other process is in an open network, in which strangers can be."""

    async def main() -> None:
        hosts = outer_hosts()
        if not hosts:
            pytest.skip("this machine has only a loopback interface")
        with closing(socket.create_server((hosts[0], 0))) as outer:
            async with p2pavg.open_peer() as first, p2pavg.open_peer(bootstrap=first.addresses) as peer:
                stranger = Ed25519Signer(os.urandom(32)).peer_id
                address = f"/ip4/{hosts[0]}/tcp/{outer.getsockname()[1]}/p2p/{stranger}"
                for wanted in (address, f"{first.addresses[0]}/p2p-circuit/p2p/{stranger}"):
                    with pytest.raises(UnreachableError, match="only with processes of this machine"):
                        await peer.context.transport.open_stream(
                            stranger, "/x", addresses=[wanted], timeout=30.0
                        )
            outer.settimeout(0.0)
            with pytest.raises(BlockingIOError):
                outer.accept()

    trio.run(main)


def test_an_open_run_listens_everywhere_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "p2pavg"),
        open_averager(config(open_run=True), port_mapping=False, relay_mbps=0),
    ):
        assert "0.0.0.0" in listening_hosts()
    said = [record.getMessage() for record in caplog.records if "is open" in record.getMessage()]
    assert said == ["the run 'here' is open: any peer that knows this name can read and change its averages"]


def test_a_run_is_open_or_has_an_authority() -> None:
    for wrong in ("yes", 1, None):
        with pytest.raises(p2pavg.ConfigError, match="open_run must be True or False"):
            config(open_run=wrong)


def options(*, open_run: bool = False, announce: list[str] = [], **network: Any) -> DaemonOptions:  # noqa: B006
    service, display = ServiceOptions(announce=announce), DisplayOptions()
    given: dict[str, Any] = {"network": NetworkOptions(**network), "service": service, "display": display}
    return DaemonOptions(**given, identity=None, run_id="here", open_run=open_run)


def test_a_daemon_stays_on_its_machine_without_open_or_a_certificate() -> None:
    assert options().listens == ("/ip4/127.0.0.1/tcp/0",)
    options().check()
    for arguments in LISTEN_ELSEWHERE:
        if arguments.get("listen") != []:  # a daemon that names no address has the usual ones
            with pytest.raises(p2pavg.ConfigError, match="neither a run with an authority nor --open"):
                options(**arguments).check()
            options(open_run=True, **arguments).check()
    assert options(open_run=True).listens == ("/ip4/0.0.0.0/tcp/0",)
