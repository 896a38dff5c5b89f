"""The guards around py-libp2p that need a virtual clock, or a link that is slower than loopback."""

import random
import struct
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from libp2p.io.exceptions import IncompleteReadError
from libp2p.io.msgio import FixedSizeLenMsgReadWriter
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.stream_muxer.yamux.yamux import HEADER_SIZE, TYPE_DATA, YAMUX_HEADER_FORMAT, YamuxStream
from trio.testing import MockClock

from p2pavg.net.libp2p import guarded_yamux
from p2pavg.net.libp2p import host as guards
from p2pavg.net.libp2p.patient_stream import PatientStream


class Wire:
    """The part of a connection that a stream needs for writing."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.largest = 0

    async def _write_frame(self, frame: bytes) -> None:
        await trio.lowlevel.checkpoint()
        version, kind, flags, stream_id, length = struct.unpack(YAMUX_HEADER_FORMAT, frame[:HEADER_SIZE])
        assert (version, kind, flags, stream_id) == (0, TYPE_DATA, 0, 1)
        assert length == len(frame) - HEADER_SIZE
        self.largest = max(self.largest, length)
        self.written += frame[HEADER_SIZE:]


def stream_on(wire: Wire) -> PatientStream:
    """Make a stream as libp2p does: an object of its own class, put among the streams of a connection."""
    streams = guarded_yamux._Streams()
    streams[1] = YamuxStream(1, cast(Any, wire), True)
    found = streams[1]
    assert isinstance(found, PatientStream)
    return found


async def test_a_writer_waits_for_its_window_for_minutes(autojump_clock: MockClock) -> None:
    wire = Wire()
    stream = stream_on(wire)
    data = bytes(range(256)) * 4096
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.write, data)
        await trio.sleep(300.0)
        assert bytes(wire.written) == data[: 256 * 1024], "more or less than one window was sent"
        while len(wire.written) < len(data):
            stream.send_window += 100_000
            await trio.sleep(10.0)
    assert bytes(wire.written) == data
    assert wire.largest <= 64 * 1024
    assert stream.send_window == 256 * 1024 + 8 * 100_000 - len(data)


@pytest.mark.parametrize("seed", range(2))
async def test_no_sender_is_allowed_more_than_its_window(seed: int, autojump_clock: MockClock) -> None:
    """The test reads pieces of random sizes while data arrives."""
    dice = random.Random(seed)
    stream = stream_on(Wire())
    buffer = bytearray()
    conn = SimpleNamespace(stream_buffers={1: buffer}, _nursery=None, rtt=0.05)
    stream.conn = cast(Any, conn)
    monkeyed = cast(Any, stream)
    monkeyed._effective_rtt = lambda: 0.05
    read = 0
    for _ in range(3000):
        if stream.recv_window and dice.random() < 0.6:
            count = min(stream.recv_window, dice.choice([1, 5, 4096, 32 * 1024, 64 * 1024]))
            buffer += bytes(count)
            stream.recv_window -= count
        taken = min(len(buffer), dice.choice([4, 4096, 64 * 1024, 256 * 1024]))
        del buffer[:taken]
        read += taken
        await monkeyed._auto_tune_and_send_window_update(bytes_read=taken)
        await trio.sleep(dice.uniform(0.0, 0.05))
        assert stream.recv_window + len(buffer) <= stream.target_recv_window <= guarded_yamux.MAX_WINDOW_BYTES
    assert read > 20 * 1024 * 1024, "the window did not open again"


@pytest.mark.parametrize("end", ["closed", "send_closed"])
async def test_a_writer_without_a_window_notices_the_end(end: str, autojump_clock: MockClock) -> None:
    stream = stream_on(Wire())
    async with trio.open_nursery() as nursery:

        async def write() -> None:
            with pytest.raises(MuxedStreamError):
                await stream.write(bytes(1024 * 1024))

        nursery.start_soon(write)
        await trio.sleep(300.0)
        setattr(stream, end, True)


class Drops:
    """A link that delivers one byte at a time."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self, n: int | None = None) -> bytes:
        assert n is None or n > 0
        piece, self._data = self._data[:1], self._data[1:]
        return piece


async def test_a_frame_may_come_in_any_number_of_pieces() -> None:
    guards.install()
    body = bytes(range(250)) * 4
    reader = FixedSizeLenMsgReadWriter(cast(Any, Drops(len(body).to_bytes(2, "big") + body)))
    reader.size_len_bytes = 2
    assert await reader.read_msg() == body


async def test_a_frame_that_ends_early_is_incomplete() -> None:
    with pytest.raises(IncompleteReadError, match="2 bytes early") as caught:
        await guards.read_exactly(cast(Any, Drops(b"abc")), 5)
    assert (caught.value.is_clean_close, caught.value.received_bytes) == (False, 3)
    with pytest.raises(IncompleteReadError) as caught:
        await guards.read_exactly(cast(Any, Drops(b"")), 5)
    assert caught.value.is_clean_close
