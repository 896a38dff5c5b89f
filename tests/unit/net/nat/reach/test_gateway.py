"""The default router in Linux' routing table, and NAT-PMP and PCP with routers that answer well, badly or never."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import RemoteProtocolError, UnreachableError
from p2pavg.net.nat.reach import gateway
from p2pavg.net.nat.reach.gateway import (
    NONCE_BYTES,
    Granted,
    NatPmp,
    NatPmpAddress,
    NatPmpMap,
    Pcp,
    PcpMap,
    default_gateway,
    gateway_in,
)

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


LOOPBACK, PORT, LEASE = "127.0.0.1", 4001, 3600


@asynccontextmanager
async def udp_router(answers: Callable[[bytes], list[bytes]]) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Open a router on loopback that answers each request with packets. Give its port, and the requests that come."""
    requests: list[bytes] = []
    opened = trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    await opened.bind((LOOPBACK, 0))

    async def serve() -> None:
        while True:
            request, asker = await opened.recvfrom(2000)
            requests.append(request)
            for answer in answers(request):
                await opened.sendto(answer, asker)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        yield opened.getsockname()[1], requests
        nursery.cancel_scope.cancel()
    opened.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test of silence take a few milliseconds."""
    monkeypatch.setattr(gateway, "PAUSES", (0.05, 0.1))


# NAT-PMP

ADDRESS = b"\0\x80\0\0" + (100).to_bytes(4, "big") + bytes([5, 0, 0, 1])


def mapped(port: int = PORT, outer: int = 4777, lease: int = LEASE, *, clock: int = 100) -> bytes:
    """Return the answer of a router that has mapped a port."""
    return (
        b"\0\x82\0\0"
        + clock.to_bytes(4, "big")
        + port.to_bytes(2, "big")
        + outer.to_bytes(2, "big")
        + lease.to_bytes(4, "big")
    )


async def test_a_machine_without_a_file_to_open_asks_no_router(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(trio.socket, "socket", fail)
    with pytest.raises(UnreachableError, match="Too many open files"):
        await NatPmp(LOOPBACK).add(PORT, PORT, LEASE)


class Router:
    """A router on loopback: it answers each request with packets that a test chooses."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.clock = 100
        self.host = bytes([5, 0, 0, 1])
        self.answers: Callable[[bytes], list[bytes]] = self.well

    def well(self, request: bytes) -> list[bytes]:
        """Answer like a router that grants everything."""
        if request == b"\0\0":
            return [b"\0\x80\0\0" + self.clock.to_bytes(4, "big") + self.host]
        lease = int.from_bytes(request[8:12], "big")
        return [mapped(int.from_bytes(request[4:6], "big"), 4777 if lease else 0, lease, clock=self.clock)]


@asynccontextmanager
async def natpmp_router() -> AsyncIterator[tuple[Router, NatPmp]]:
    """Open a router, and a client for it."""
    found = Router()
    async with udp_router(lambda request: found.answers(request)) as (port, found.requests):
        yield found, NatPmp(LOOPBACK, port)


class TestNatPmp:
    async def test_port_is_mapped_and_removed(self) -> None:
        async with natpmp_router() as (found, client):
            assert await client.add(PORT, PORT, LEASE) == ("5.0.0.1", Granted(4777, LEASE))
            await client.remove(PORT, Granted(4777, LEASE))
            assert found.requests == [
                b"\0\0",
                NatPmpMap(PORT, PORT, LEASE).packet(LOOPBACK),
                NatPmpMap(PORT, 0, 0).packet(LOOPBACK),
            ]

    @pytest.mark.parametrize(
        ("change", "value"),
        [("clock", 0), ("clock", 100 + LEASE), ("host", bytes([5, 0, 0, 2]))],
        ids=["restarted", "slept over its lease", "new address"],
    )
    async def test_lost_mapping_is_recognized(self, change: str, value: object) -> None:
        async with natpmp_router() as (found, client):
            host, granted = await client.add(PORT, PORT, LEASE)
            assert await client.still_has(PORT, host, granted)
            setattr(found, change, value)
            assert not await client.still_has(PORT, host, granted)

    async def test_no_more_than_the_wanted_lease_is_believed(self) -> None:
        async with natpmp_router() as (found, client):
            found.answers = lambda request: [ADDRESS if request == b"\0\0" else mapped(lease=2**32 - 1)]
            assert (await client.add(PORT, PORT, LEASE))[1].lease == LEASE

    async def test_lost_packet_is_sent_again(self) -> None:
        async with natpmp_router() as (found, client):
            found.answers = lambda request: found.well(request) if len(found.requests) > 1 else []
            assert (await client.add(PORT, PORT, LEASE))[0] == "5.0.0.1"


class TestHostileNatPmp:
    @pytest.mark.parametrize(
        "junk",
        [
            b"",
            b"\0",
            ADDRESS[:-1],
            ADDRESS + b"\0",
            mapped(4002, 9999),
            mapped(outer=0),
            mapped(lease=0),
            bytes(1500),
        ],
        ids=["empty", "short", "cut", "long", "other port", "no port", "no lease", "zeros"],
    )
    async def test_packets_that_are_no_answer_are_dropped(self, junk: bytes) -> None:
        async with natpmp_router() as (found, client):
            found.answers = lambda request: [junk, *found.well(request)]
            assert await client.add(PORT, PORT, LEASE) == ("5.0.0.1", Granted(4777, LEASE))

    @pytest.mark.parametrize("junk", [[], [b"\0\x81junk"] * 3], ids=["nothing", "junk"])
    async def test_silence_ends(self, junk: list[bytes]) -> None:
        async with natpmp_router() as (found, client):
            found.answers = lambda _: junk
            with pytest.raises(UnreachableError, match="does not answer"):
                await client.add(PORT, PORT, LEASE)
            assert len(found.requests) == len(gateway.PAUSES)

    @pytest.mark.parametrize(
        ("result", "reason"), [(1, "version"), (2, "forbid"), (3, "no connection"), (4, "room"), (77, "77")]
    )
    async def test_refusal_has_a_reason(self, result: int, reason: str) -> None:
        async with natpmp_router() as (found, client):
            found.answers = lambda _: [b"\0\x80" + result.to_bytes(2, "big") + bytes(8)]
            with pytest.raises(UnreachableError, match=reason):
                await client.add(PORT, PORT, LEASE)

    async def test_router_of_a_later_version_is_a_refusal(self) -> None:
        async with natpmp_router() as (found, client):
            assert not client.other_version
            found.answers = lambda _: [b"\2\x80\0\1" + bytes(20)]
            with pytest.raises(UnreachableError, match="version"):
                await client.add(PORT, PORT, LEASE)
            assert client.other_version

    async def test_router_without_an_address_maps_nothing(self) -> None:
        async with natpmp_router() as (found, client):
            found.host = bytes(4)
            with pytest.raises(UnreachableError, match="no outer address"):
                await client.add(PORT, PORT, LEASE)

    async def test_machine_without_a_router_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gateway, "default_gateway", lambda: None)
        with pytest.raises(UnreachableError, match="no router is known"):
            await NatPmp().add(PORT, PORT, LEASE)

    async def test_closed_port_of_the_router_is_an_error_at_once(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
            free.bind((LOOPBACK, 0))
            closed = free.getsockname()[1]
        with pytest.raises(UnreachableError, match="refused"):
            await NatPmp(LOOPBACK, closed).add(PORT, PORT, LEASE)

    @given(st.binary(max_size=40) | st.binary(max_size=16).map(lambda rest: b"\0\x82\0\0" + rest))
    def test_any_bytes_are_an_answer_or_an_error(self, answer: bytes) -> None:
        requests: tuple[NatPmpAddress | NatPmpMap, ...] = (NatPmpAddress(), NatPmpMap(PORT, PORT, LEASE))
        for request in requests:
            try:
                clock, found = request.read(answer)
            except (RemoteProtocolError, UnreachableError):
                continue
            assert 0 <= clock < 2**32
            if isinstance(found, Granted):
                assert 0 < found.outer_port < 65536
                assert 0 < found.lease <= LEASE


# PCP

NONCE = bytes(range(NONCE_BYTES))


def answer_to(
    request: bytes, *, host: str = "5.0.0.1", outer: int = 4777, result: int = 0, lease: int | None = None
) -> bytes:
    """Return a router's answer to a request."""
    granted = request[4:8] if lease is None else lease.to_bytes(4, "big")
    head = bytes([2, 0x81, 0, result]) + granted + (100).to_bytes(4, "big") + bytes(12)
    outer_host = ipaddress.IPv6Address(f"::ffff:{host}").packed
    return head + request[24:42] + outer.to_bytes(2, "big") + outer_host


@asynccontextmanager
async def pcp_router(answers: Callable[[bytes], list[bytes]]) -> AsyncIterator[tuple[list[bytes], Pcp]]:
    """Open a router; give the requests that come, and a client."""
    async with udp_router(answers) as (port, requests):
        natpmp = NatPmp(LOOPBACK, port)
        natpmp.other_version = True
        yield requests, Pcp(natpmp)


REQUEST = PcpMap(NONCE, PORT, PORT, LEASE)
GENUINE = answer_to(REQUEST.packet(LOOPBACK))


class TestPcp:
    async def test_port_is_mapped_checked_and_removed_with_one_nonce(self) -> None:
        async with pcp_router(lambda request: [answer_to(request)]) as (requests, client):
            assert await client.add(PORT, PORT, LEASE) == ("5.0.0.1", Granted(4777, LEASE))
            assert await client.still_has(PORT, "5.0.0.1", Granted(4777, LEASE))
            assert not await client.still_has(PORT, "5.0.0.2", Granted(4777, LEASE))
            await client.remove(PORT, Granted(4777, LEASE))
            assert {len(request) for request in requests} == {60}
            assert len({request[24:36] for request in requests}) == 1
            assert requests[-1][4:8] == bytes(4)
            assert requests[0][8:24] == ipaddress.IPv6Address("::ffff:127.0.0.1").packed

    async def test_no_more_than_the_wanted_lease_is_believed(self) -> None:
        async with pcp_router(lambda request: [answer_to(request, lease=2**32 - 1)]) as (_, client):
            assert (await client.add(PORT, PORT, LEASE))[1].lease == LEASE

    async def test_nothing_is_sent_to_routers_of_another_version(self) -> None:
        with pytest.raises(UnreachableError, match="not spoken"):
            await Pcp(NatPmp(LOOPBACK)).add(PORT, PORT, LEASE)

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda answer: answer[:-1],
            lambda answer: answer + b"\0",
            lambda _: b"",
            lambda answer: answer[:24] + bytes(NONCE_BYTES) + answer[36:],
            lambda answer: answer[:40] + b"\0\1" + answer[42:],
            lambda answer: answer[:42] + b"\0\0" + answer[44:],
            lambda answer: answer[:4] + bytes(4) + answer[8:],
            lambda answer: answer[:36] + b"\x11" + answer[37:],
        ],
        ids=["cut", "long", "empty", "nonce", "port", "no port", "no lease", "udp"],
    )
    async def test_packets_that_are_no_answer_are_dropped(self, spoil: Callable[[bytes], bytes]) -> None:
        async with pcp_router(lambda request: [spoil(answer_to(request)), answer_to(request)]) as (_, client):
            assert await client.add(PORT, PORT, LEASE) == ("5.0.0.1", Granted(4777, LEASE))
        async with pcp_router(lambda request: [spoil(answer_to(request))]) as (_, client):
            with pytest.raises(UnreachableError, match="does not answer"):
                await client.add(PORT, PORT, LEASE)

    @pytest.mark.parametrize(("result", "reason"), [(1, "version"), (2, "forbid"), (8, "room"), (200, "200")])
    async def test_refusal_has_a_reason(self, result: int, reason: str) -> None:
        async with pcp_router(lambda request: [answer_to(request, result=result)]) as (_, client):
            with pytest.raises(UnreachableError, match=reason):
                await client.add(PORT, PORT, LEASE)

    @given(st.binary(max_size=70) | st.binary(max_size=30).map(lambda rest: GENUINE[: 60 - len(rest)] + rest))
    def test_any_bytes_are_an_answer_or_an_error(self, answer: bytes) -> None:
        try:
            host, granted = REQUEST.read(answer)
        except (RemoteProtocolError, UnreachableError):
            return
        assert host == "" or ipaddress.ip_address(host)
        assert 0 < granted.outer_port < 65536
        assert 0 < granted.lease <= LEASE
