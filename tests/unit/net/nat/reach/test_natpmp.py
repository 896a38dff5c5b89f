"""The client of NAT-PMP against a router on loopback that answers well, badly, or not at all."""

from __future__ import annotations

import errno
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
from p2pavg.net.nat.reach.natpmp import NatPmp, encode_map, read_address, read_map

LOOPBACK = "127.0.0.1"
ADDRESS = b"\0\x80\0\0" + (100).to_bytes(4, "big") + bytes([5, 0, 0, 1])
PORT, LEASE = 4001, 3600


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
        await NatPmp(gateway=lambda: LOOPBACK).add(PORT, PORT, LEASE)


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
async def router() -> AsyncIterator[tuple[Router, NatPmp]]:
    """Open a router, and a client for it."""
    found = Router()
    opened = trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    await opened.bind((LOOPBACK, 0))

    async def serve() -> None:
        while True:
            request, asker = await opened.recvfrom(2000)
            found.requests.append(request)
            for answer in found.answers(request):
                await opened.sendto(answer, asker)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        yield found, NatPmp(lambda: LOOPBACK, opened.getsockname()[1])
        nursery.cancel_scope.cancel()
    opened.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test of silence take a few milliseconds."""
    monkeypatch.setattr(gateway, "PAUSES", (0.05, 0.1))


class TestMapping:
    async def test_port_is_mapped_and_removed(self) -> None:
        async with router() as (found, client):
            assert await client.add(PORT, PORT, LEASE) == ("5.0.0.1", Granted(4777, LEASE))
            await client.remove(PORT, Granted(4777, LEASE))
            assert found.requests == [b"\0\0", encode_map(PORT, PORT, LEASE), encode_map(PORT, 0, 0)]

    @pytest.mark.parametrize(
        ("change", "value"),
        [("clock", 0), ("clock", 100 + LEASE), ("host", bytes([5, 0, 0, 2]))],
        ids=["restarted", "slept over its lease", "new address"],
    )
    async def test_lost_mapping_is_recognized(self, change: str, value: object) -> None:
        async with router() as (found, client):
            host, granted = await client.add(PORT, PORT, LEASE)
            assert await client.still_has(PORT, host, granted)
            setattr(found, change, value)
            assert not await client.still_has(PORT, host, granted)

    async def test_lost_packet_is_sent_again(self) -> None:
        async with router() as (found, client):
            found.answers = lambda request: found.well(request) if len(found.requests) > 1 else []
            assert (await client.add(PORT, PORT, LEASE))[0] == "5.0.0.1"


class TestHostileRouters:
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
        async with router() as (found, client):
            found.answers = lambda request: [junk, *found.well(request)]
            assert await client.add(PORT, PORT, LEASE) == ("5.0.0.1", Granted(4777, LEASE))

    @pytest.mark.parametrize("junk", [[], [b"\0\x81junk"] * 3], ids=["nothing", "junk"])
    async def test_silence_ends(self, junk: list[bytes]) -> None:
        async with router() as (found, client):
            found.answers = lambda _: junk
            with pytest.raises(UnreachableError, match="does not answer"):
                await client.add(PORT, PORT, LEASE)
            assert len(found.requests) == len(gateway.PAUSES)

    @pytest.mark.parametrize(
        ("result", "reason"), [(1, "version"), (2, "forbid"), (3, "no connection"), (4, "room"), (77, "77")]
    )
    async def test_refusal_has_a_reason(self, result: int, reason: str) -> None:
        async with router() as (found, client):
            found.answers = lambda _: [b"\0\x80" + result.to_bytes(2, "big") + bytes(8)]
            with pytest.raises(UnreachableError, match=reason):
                await client.add(PORT, PORT, LEASE)

    async def test_router_of_a_later_version_is_a_refusal(self) -> None:
        async with router() as (found, client):
            assert not client.other_version
            found.answers = lambda _: [b"\2\x80\0\1" + bytes(20)]
            with pytest.raises(UnreachableError, match="version"):
                await client.add(PORT, PORT, LEASE)
            assert client.other_version

    async def test_router_without_an_address_maps_nothing(self) -> None:
        async with router() as (found, client):
            found.host = bytes(4)
            with pytest.raises(UnreachableError, match="no outer address"):
                await client.add(PORT, PORT, LEASE)

    async def test_machine_without_a_router_is_an_error(self) -> None:
        with pytest.raises(UnreachableError, match="no router is known"):
            await NatPmp(lambda: None).add(PORT, PORT, LEASE)

    async def test_closed_port_of_the_router_is_an_error_at_once(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
            free.bind((LOOPBACK, 0))
            closed = free.getsockname()[1]
        with pytest.raises(UnreachableError, match="refused"):
            await NatPmp(lambda: LOOPBACK, closed).add(PORT, PORT, LEASE)

    @given(st.binary(max_size=40) | st.binary(max_size=16).map(lambda rest: b"\0\x82\0\0" + rest))
    def test_any_bytes_are_an_answer_or_an_error(self, answer: bytes) -> None:
        for read in (read_address, lambda found: read_map(found, PORT, lease=LEASE)):
            try:
                clock, found = read(answer)
            except (RemoteProtocolError, UnreachableError):
                continue
            assert 0 <= clock < 2**32
            if isinstance(found, Granted):
                assert 0 < found.outer_port < 65536
                assert 0 < found.lease <= LEASE
