"""The default router in Linux' routing table."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pavg.net.nat.reach.gateway import default_gateway, gateway_in

HEAD = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
DEFAULT = "lan\t00000000\t0101A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
WIFI = "wifi\t00000000\tFE02A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0\n"
LOCAL = "lan\t0001A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"


def test_default_route_names_the_router() -> None:
    assert gateway_in(HEAD + LOCAL + DEFAULT, little_endian=True) == "192.168.1.1"
    assert gateway_in(HEAD + DEFAULT, little_endian=False) == "1.1.168.192"


def test_route_with_the_lowest_metric_counts() -> None:
    assert gateway_in(HEAD + WIFI + DEFAULT, little_endian=True) == "192.168.1.1"
    assert gateway_in(HEAD + WIFI, little_endian=True) == "192.168.2.254"


@pytest.mark.parametrize(
    "text",
    [
        "",
        HEAD,
        HEAD + LOCAL,
        HEAD + "a b c\n",
        HEAD + DEFAULT.replace("0101A8C0", "router"),
        HEAD + "x " * 20,
    ],
)
def test_tables_without_a_router(text: str) -> None:
    assert gateway_in(text, little_endian=True) is None


def test_systems_without_the_table_have_no_known_router(tmp_path: Path) -> None:
    assert default_gateway(tmp_path / "route") is None
    table = tmp_path / "table"
    table.write_bytes(b"\xff\xfe")
    assert default_gateway(table) is None
