"""Framing over arbitrary bytes in arbitrary pieces."""

import tracemalloc
from collections.abc import Sequence

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError
from p2pavg.net.transport import (
    LENGTH_BYTES,
    Buffer,
    Stream,
    receive_exactly_into,
    receive_message,
    send_message,
)

MAX_BYTES = 300


class Recorded(Stream):
    """A stream whose other side has sent bytes in pieces, and has then closed its half or reset it."""

    remote = "somebody"

    def __init__(self, pieces: Sequence[bytes] = (), *, reset: bool = False) -> None:
        self._pieces = [piece for piece in pieces if piece]
        self._reset = reset
        self.sent = bytearray()

    async def send_all(self, data: Buffer) -> None:
        self.sent += data

    async def receive_some(self, max_bytes: int) -> bytes:
        assert max_bytes > 0
        if not self._pieces and self._reset:
            raise StreamBrokenError("reset")
        piece = self._pieces.pop(0) if self._pieces else b""
        if len(piece) > max_bytes:
            self._pieces.insert(0, piece[max_bytes:])
        return piece[:max_bytes]

    async def aclose(self) -> None:
        raise AssertionError("framing closes nothing")

    async def reset(self) -> None:
        raise AssertionError("framing closes nothing")


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


async def receive_all(stream: Stream) -> tuple[list[bytes], type[Exception] | None]:
    messages: list[bytes] = []
    try:
        while (message := await receive_message(stream, max_bytes=MAX_BYTES)) is not None:
            messages.append(message)
    except (RemoteProtocolError, StreamBrokenError) as error:
        return messages, type(error)
    return messages, None


places = st.lists(st.integers(0, 2000), max_size=40)
contents = st.binary(min_size=1, max_size=MAX_BYTES)


@given(st.lists(contents, max_size=5), places)
def test_messages_survive_any_fragmentation(messages: list[bytes], places: list[int]) -> None:
    async def main() -> None:
        sender = Recorded()
        for message in messages:
            await send_message(sender, message)
        assert await receive_all(Recorded(cut(bytes(sender.sent), places))) == (messages, None)

    trio.run(main)


@given(st.lists(contents, min_size=1, max_size=4), places, st.data())
def test_a_stream_that_ends_early_is_broken(
    messages: list[bytes], places: list[int], data: st.DataObject
) -> None:
    async def main() -> None:
        sender = Recorded()
        boundaries = [0]
        for message in messages:
            await send_message(sender, message)
            boundaries.append(len(sender.sent))
        length = data.draw(st.integers(0, len(sender.sent)))
        whole = sum(boundary <= length for boundary in boundaries) - 1
        expected = None if length in boundaries else StreamBrokenError
        pieces = cut(bytes(sender.sent[:length]), places)
        assert await receive_all(Recorded(pieces)) == (messages[:whole], expected)
        assert await receive_all(Recorded(pieces, reset=True)) == (messages[:whole], StreamBrokenError)

    trio.run(main)


@given(st.binary(max_size=2000), places, st.booleans())
def test_arbitrary_bytes_are_messages_or_one_of_two_errors(
    noise: bytes, places: list[int], reset: bool
) -> None:
    async def main() -> None:
        messages, error = await receive_all(Recorded(cut(noise, places), reset=reset))
        assert all(0 < len(message) <= MAX_BYTES for message in messages)
        used = sum(LENGTH_BYTES + len(message) for message in messages)
        if error is None:
            assert used == len(noise)
        elif error is RemoteProtocolError:
            assert not 0 < int.from_bytes(noise[used : used + LENGTH_BYTES], "big") <= MAX_BYTES

    trio.run(main)


@given(st.integers(0, 2**32 - 1).filter(lambda length: not 0 < length <= MAX_BYTES), st.binary(max_size=50))
def test_a_length_out_of_bounds_is_refused_before_more_is_read(length: int, rest: bytes) -> None:
    async def main() -> None:
        stream = Recorded([length.to_bytes(LENGTH_BYTES, "big") + rest])
        with pytest.raises(RemoteProtocolError, match=f"{length} bytes"):
            await receive_message(stream, max_bytes=MAX_BYTES)
        assert await stream.receive_some(100) == rest

    trio.run(main)


def test_memory_grows_with_arrived_not_with_announced_bytes() -> None:
    announced = 256 * 1024 * 1024

    async def main() -> None:
        stream = Recorded([announced.to_bytes(LENGTH_BYTES, "big"), bytes(1000)])
        with pytest.raises(StreamBrokenError, match="early"):
            await receive_message(stream, max_bytes=announced)

    tracemalloc.start()
    try:
        trio.run(main)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < announced / 16


@given(st.binary(max_size=1000), st.integers(0, 1000), places)
def test_reading_into_a_buffer_fills_it_exactly(data: bytes, wanted: int, places: list[int]) -> None:
    async def main() -> None:
        stream = Recorded(cut(data, places))
        buffer = bytearray(wanted)
        if wanted > len(data):
            with pytest.raises(StreamBrokenError, match="early"):
                await receive_exactly_into(stream, memoryview(buffer))
            return
        await receive_exactly_into(stream, memoryview(buffer))
        assert buffer == data[:wanted]
        assert await stream.receive_some(1) == data[wanted : wanted + 1]

    trio.run(main)
