"""The metrics of a daemon, over real sockets."""

from __future__ import annotations

import importlib
import logging
import sys
import urllib.request

import pytest
import trio

import p2pavg
from p2pavg.base.errors import ConfigError, ListenError
from p2pavg.tools.cli.daemon import serving_metrics

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]


def read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=20.0) as answer:
        text: str = answer.read().decode()
        return text


async def test_a_daemon_serves_its_place_in_the_network(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    with trio.fail_after(60.0), caplog.at_level(logging.INFO, "p2pavg.tools.cli.daemon"):
        async with (
            p2pavg.open_peer(listen=LOOPBACK) as first,
            p2pavg.open_peer(listen=LOOPBACK, bootstrap=first.addresses) as second,
            serving_metrics(second, 0, ["lab"]),
        ):
            [line] = [record.getMessage() for record in caplog.records]
            text = await trio.to_thread.run_sync(read, line.rpartition(" ")[2])
            port = int(line.rpartition(":")[2].removesuffix("/metrics"))
            with pytest.raises(ListenError, match=f"127.0.0.1:{port}"):
                async with serving_metrics(first, port, []):
                    pass
    assert "p2pavg_network_peers 1.0" in text
    assert "p2pavg_relayed_bytes_total 0.0" in text
    assert 'p2pavg_rounds_total{result="success",run="lab"} 0.0' in text
    assert 'p2pavg_reachability{kind="relayed"} 0.0' in text


async def test_a_missing_library_is_a_mistake_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("p2pavg.net.libp2p.transport")  # libp2p imports the library too
    for name in [name for name in sys.modules if name.startswith(("prometheus_client", "p2pavg.metrics."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    async with p2pavg.open_peer(listen=LOOPBACK) as peer:
        with pytest.raises(ConfigError, match="metrics need prometheus-client") as caught:
            async with serving_metrics(peer, 0, []):
                pass
    assert caught.value.remedy == "pip install 'p2pavg[prometheus]'"
