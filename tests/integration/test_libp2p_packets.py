"""Frames that go without a task: what the kernel does not take of them goes next, in order, or ends the connection."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import trio

from p2pavg.errors import StreamBrokenError
from p2pavg.net.framing import receive_message, send_message
from p2pavg.net.libp2p import guarded_yamux
from p2pavg.net.libp2p.guarded_yamux import GuardedYamux
from p2pavg.net.libp2p.speed import ReadAheadStream
from p2pavg.testing.transport_conformance import ECHO
from tests.integration.hosts import TIMEOUT, eventually, watched
from tests.integration.libp2p_hosts import connection_of, open_host

MESSAGES = 60
STREAMS = 4


def kernel(monkeypatch: pytest.MonkeyPatch, write: Callable[[int, bytes], int]) -> None:
    """Let a function write the packets that go without a task."""
    monkeypatch.setattr("p2pavg.net.libp2p.packets.os", SimpleNamespace(write=write))


@pytest.mark.parametrize("seed", range(4))
@watched
async def test_messages_arrive_whatever_the_kernel_takes_at_once(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    dice, taken = random.Random(seed), {"all": 0, "some": 0, "none": 0}

    def write(descriptor: int, packet: bytes) -> int:
        how = dice.choice(list(taken))
        taken[how] += 1
        if how == "none":
            raise BlockingIOError
        return os.write(descriptor, packet if how == "all" else packet[: dice.randrange(1, len(packet))])

    kernel(monkeypatch, write)
    async with open_host() as here, open_host() as there:

        async def talk(number: int) -> None:
            lengths = random.Random(number)
            stream = await here.open_stream(there.peer_id, ECHO, addresses=there.addresses, timeout=TIMEOUT)
            for _ in range(MESSAGES):
                message = bytes([number]) * lengths.choice([1, 50, 3_000, 70_000])
                await send_message(stream, message)
                assert await receive_message(stream, max_bytes=100_000) == message
            await stream.aclose()

        async with trio.open_nursery() as nursery:
            for number in range(STREAMS):
                nursery.start_soon(talk, number)
    assert min(taken.values()) > MESSAGES


@watched
async def test_a_packet_whose_end_is_never_taken_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_yamux, "FLUSH_SECONDS", 0.2)
    async with open_host() as here, open_host() as there:
        stream = await here.open_stream(there.peer_id, ECHO, addresses=there.addresses, timeout=TIMEOUT)
        kernel(monkeypatch, lambda descriptor, packet: os.write(descriptor, packet[:1]))

        async def stuck(_stream: ReadAheadStream, _data: bytes) -> None:
            await trio.sleep_forever()

        monkeypatch.setattr(ReadAheadStream, "write", stuck)
        await send_message(stream, b"hello")
        await eventually(lambda: not here.is_connected(there.peer_id))
        with pytest.raises(StreamBrokenError):
            await stream.receive_some(1)


@watched
async def test_the_rest_of_a_packet_goes_before_the_next_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_host() as here, open_host() as there:
        stream = await here.open_stream(there.peer_id, ECHO, addresses=there.addresses, timeout=TIMEOUT)
        muxed = connection_of(here, there.peer_id)
        kernel(monkeypatch, lambda descriptor, packet: os.write(descriptor, packet[:1]))
        await send_message(stream, b"first")
        assert not muxed.write_now(b"second"), "the first one is not sent yet"
        await send_message(stream, b"second")
        assert await receive_message(stream) == b"first"
        assert await receive_message(stream) == b"second"


@watched
async def test_a_write_to_a_connection_that_is_gone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_descriptor: int, _packet: bytes) -> int:
        raise BrokenPipeError("gone")

    async with open_host() as here, open_host() as there:
        stream = await here.open_stream(there.peer_id, ECHO, addresses=there.addresses, timeout=TIMEOUT)
        muxed = connection_of(here, there.peer_id)
        kernel(monkeypatch, gone)
        assert not muxed.write_now(bytes(12))
        assert not muxed._unsent
        assert isinstance(muxed, GuardedYamux)
        await stream.reset()
