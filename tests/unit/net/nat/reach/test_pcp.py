"""The client of PCP: what it sends and believes, from routers that answer well or badly."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import RemoteProtocolError, UnreachableError
from p2pavg.net.nat.reach import gateway
from p2pavg.net.nat.reach.gateway import Granted
from p2pavg.net.nat.reach.pcp import NONCE_BYTES, Pcp, encode_map, read_map

LOOPBACK, PORT, LEASE = "127.0.0.1", 4001, 3600
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
async def router(answers: Callable[[bytes], list[bytes]]) -> AsyncIterator[tuple[list[bytes], Pcp]]:
    """Open a router on loopback; give the requests that come, and a client."""
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
        yield requests, Pcp(lambda: True, lambda: LOOPBACK, opened.getsockname()[1])
        nursery.cancel_scope.cancel()
    opened.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test of silence take a few milliseconds."""
    monkeypatch.setattr(gateway, "PAUSES", (0.05, 0.1))


async def test_port_is_mapped_checked_and_removed_with_one_nonce() -> None:
    async with router(lambda request: [answer_to(request)]) as (requests, client):
        assert await client.add(PORT, PORT, LEASE) == ("5.0.0.1", Granted(4777, LEASE))
        assert await client.still_has(PORT, "5.0.0.1", Granted(4777, LEASE))
        assert not await client.still_has(PORT, "5.0.0.2", Granted(4777, LEASE))
        await client.remove(PORT, Granted(4777, LEASE))
        assert {len(request) for request in requests} == {60}
        assert len({request[24:36] for request in requests}) == 1
        assert requests[-1][4:8] == bytes(4)
        assert requests[0][8:24] == ipaddress.IPv6Address("::ffff:127.0.0.1").packed


async def test_nothing_is_sent_to_routers_of_another_version() -> None:
    with pytest.raises(UnreachableError, match="not spoken"):
        await Pcp(lambda: False, lambda: LOOPBACK).add(PORT, PORT, LEASE)


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
async def test_packets_that_are_no_answer_are_dropped(spoil: Callable[[bytes], bytes]) -> None:
    async with router(lambda request: [spoil(answer_to(request)), answer_to(request)]) as (_, client):
        assert await client.add(PORT, PORT, LEASE) == ("5.0.0.1", Granted(4777, LEASE))
    async with router(lambda request: [spoil(answer_to(request))]) as (_, client):
        with pytest.raises(UnreachableError, match="does not answer"):
            await client.add(PORT, PORT, LEASE)


@pytest.mark.parametrize(("result", "reason"), [(1, "version"), (2, "forbid"), (8, "room"), (200, "200")])
async def test_refusal_has_a_reason(result: int, reason: str) -> None:
    async with router(lambda request: [answer_to(request, result=result)]) as (_, client):
        with pytest.raises(UnreachableError, match=reason):
            await client.add(PORT, PORT, LEASE)


GENUINE = answer_to(encode_map(LOOPBACK, NONCE, PORT, PORT, LEASE))


@given(st.binary(max_size=70) | st.binary(max_size=30).map(lambda rest: GENUINE[: 60 - len(rest)] + rest))
def test_any_bytes_are_an_answer_or_an_error(answer: bytes) -> None:
    try:
        host, granted = read_map(answer, NONCE, PORT, lease=LEASE)
    except (RemoteProtocolError, UnreachableError):
        return
    assert host == "" or ipaddress.ip_address(host)
    assert 0 < granted.outer_port < 65536
    assert 0 < granted.lease <= LEASE
