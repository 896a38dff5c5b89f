"""Our negotiation of protocols agrees on the same protocols as libp2p's, with fewer writes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectError
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_client import MULTISELECT_PROTOCOL_ID, MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.utils.varint import encode_delim
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from p2pavg.net.libp2p import speed
from p2pavg.net.libp2p.speed import EagerMultiselectClient, OneAnswerMultiselect

WATCHDOG_SECONDS = 120.0
SPOKEN, OTHER, UNKNOWN = TProtocol("/spoken/1"), TProtocol("/other/1"), TProtocol("/unknown/1")


# -- the negotiation


class Pipe(ReadWriteCloser):
    """A stream with the interface of libp2p's, over one in memory."""

    def __init__(self, stream: trio.StapledStream) -> None:
        self.stream = stream
        self.writes: list[bytes] = []

    async def read(self, n: int | None = None) -> bytes:
        return bytes(await self.stream.receive_some(n))

    async def write(self, data: bytes) -> None:
        self.writes.append(data)
        try:
            await self.stream.send_all(data)
        except trio.BrokenResourceError as error:
            raise ConnectionClosedError("it has closed") from error

    async def close(self) -> None:
        await self.stream.aclose()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


def delimited(*lines: str | bytes) -> bytes:
    return b"".join(encode_delim(line if isinstance(line, bytes) else line.encode()) for line in lines)


@asynccontextmanager
async def answered(answer: Callable[[Pipe], Awaitable[object]]) -> AsyncIterator[Pipe]:
    """Open a stream to a peer that runs ``answer`` and then keeps the stream open."""
    near, far = memory_stream_pair()
    with trio.fail_after(WATCHDOG_SECONDS * 10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer, Pipe(far))
            yield Pipe(near)
            nursery.cancel_scope.cancel()


async def speak(pipe: Pipe) -> None:
    """Run libp2p's own server, and send one more word after it."""
    server = Multiselect({SPOKEN: None, OTHER: None})
    try:
        await server.negotiate(MultiselectCommunicator(pipe))
    except MultiselectError:
        return
    await pipe.write(b"served")


def saying(*lines: str | bytes, end: bool = False) -> Callable[[Pipe], Awaitable[object]]:
    async def answer(pipe: Pipe) -> None:
        await pipe.write(delimited(*lines))
        if end:
            await pipe.close()

    return answer


CLIENT = EagerMultiselectClient()


async def test_a_served_protocol_is_agreed_and_later_bytes_stay_unread() -> None:
    async with answered(speak) as pipe:
        assert await CLIENT.select_one_of([SPOKEN], MultiselectCommunicator(pipe)) == SPOKEN
        assert await pipe.read(100) == b"served"


async def test_the_client_sends_everything_in_one_write() -> None:
    async with answered(speak) as pipe:
        await CLIENT.select_one_of([SPOKEN], MultiselectCommunicator(pipe))
        assert pipe.writes == [delimited(MULTISELECT_PROTOCOL_ID, SPOKEN)]


NONSENSE: dict[str, Sequence[str | bytes]] = {
    "another version": ["/multistream/2.0.0", SPOKEN],
    "another protocol": [MULTISELECT_PROTOCOL_ID, OTHER],
    "the wrong way round": [SPOKEN, MULTISELECT_PROTOCOL_ID],
    "nothing twice": ["", ""],
    "a long text": [MULTISELECT_PROTOCOL_ID, "x" * 10_000],
}


@pytest.mark.parametrize("lines", NONSENSE.values(), ids=NONSENSE)
async def test_malformed_answers_agree_on_no_protocol(lines: Sequence[str | bytes]) -> None:
    async with answered(saying(*lines)) as pipe:
        with pytest.raises(MultiselectClientError) as found:
            await CLIENT.select_one_of([SPOKEN], MultiselectCommunicator(pipe))
        assert len(str(found.value)) < 200, "a stranger's words must not fill the log"


async def garbage(pipe: Pipe) -> None:
    await pipe.write(b"\xff" * 100)


@pytest.mark.parametrize(
    "answer",
    [saying(end=True), saying(MULTISELECT_PROTOCOL_ID, end=True), garbage],
    ids=["at once", "half-way", "with garbage"],
)
async def test_an_end_before_the_answer_raises(answer: Callable[[Pipe], Awaitable[object]]) -> None:
    async with answered(answer) as pipe:
        with pytest.raises(MultiselectClientError):
            await CLIENT.select_one_of([SPOKEN], MultiselectCommunicator(pipe))


@pytest.mark.parametrize("lines", [[], [MULTISELECT_PROTOCOL_ID]], ids=["nothing", "half of it"])
async def test_a_silent_server_times_out(lines: list[str], autojump_clock: MockClock) -> None:
    async with answered(saying(*lines)) as pipe:
        began = trio.current_time()
        with pytest.raises(MultiselectClientError):
            await CLIENT.select_one_of([SPOKEN], MultiselectCommunicator(pipe), 7)
        assert trio.current_time() - began == pytest.approx(7.0)


FAILURES = pytest.mark.parametrize(
    "error",
    [ConnectionClosedError("gone"), ValueError("shut"), AssertionError()],
    ids=["gone", "a value", "an assertion"],
)


@FAILURES
async def test_a_failed_write_raises(error: Exception) -> None:
    class Shut(Pipe):
        async def write(self, data: bytes) -> None:
            raise error

    near, _far = memory_stream_pair()
    with pytest.raises(MultiselectClientError):
        await CLIENT.select_one_of([SPOKEN], MultiselectCommunicator(Shut(near)))


# -- the answer


async def answer(pipe: Pipe) -> tuple[TProtocol | None, object]:
    """Return the protocol on which our server agrees."""
    server = OneAnswerMultiselect({SPOKEN: None, OTHER: None})
    return await server.negotiate(MultiselectCommunicator(pipe))


@pytest.fixture(autouse=True)
def _pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server see what has arrived in a pipe, which has no stream of yamux."""

    def holds_more(pipe: Any) -> bool:
        return bool(pipe.stream.receive_stream._incoming._data)

    monkeypatch.setattr(speed, "holds_more", holds_more)


async def asked(said: bytes, kind: type[Pipe] = Pipe) -> Pipe:
    """Return a stream of a peer that has sent these bytes before it reads anything."""
    near, far = memory_stream_pair()
    await near.send_all(said)
    return kind(far)


@pytest.mark.parametrize(
    "client",
    [pytest.param(EagerMultiselectClient(), id="ours"), pytest.param(MultiselectClient(), id="libp2p's")],
)
async def test_the_answer_agrees_and_later_bytes_stay_unread(
    client: MultiselectClient, autojump_clock: MockClock
) -> None:
    async def serve(pipe: Pipe) -> None:
        assert await answer(pipe) == (SPOKEN, None)
        await pipe.write(b"served " + await pipe.read(100))

    async with answered(serve) as pipe:
        assert await client.select_one_of([SPOKEN], MultiselectCommunicator(pipe), 7) == SPOKEN
        await pipe.write(b"somebody")
        assert await pipe.read(100) == b"served somebody"


async def test_both_lines_of_the_answer_are_one_write() -> None:
    pipe = await asked(delimited(MULTISELECT_PROTOCOL_ID, SPOKEN) + b"and more")
    assert await answer(pipe) == (SPOKEN, None)
    assert pipe.writes == [delimited(MULTISELECT_PROTOCOL_ID, SPOKEN)]
    assert await pipe.read(100) == b"and more"


async def test_a_client_that_waits_for_the_greeting_gets_it() -> None:
    near, far = memory_stream_pair()
    pipe = Pipe(far)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer, pipe)
        await near.send_all(delimited(MULTISELECT_PROTOCOL_ID))
        await wait_all_tasks_blocked()
        assert pipe.writes == [delimited(MULTISELECT_PROTOCOL_ID)]
        await near.send_all(delimited(SPOKEN))
    assert pipe.writes == [delimited(MULTISELECT_PROTOCOL_ID), delimited(SPOKEN)]


async def test_after_a_refusal_another_request_may_be_agreed() -> None:
    """The greeting is sent only once."""
    pipe = await asked(delimited(MULTISELECT_PROTOCOL_ID, UNKNOWN, UNKNOWN, OTHER))
    assert await answer(pipe) == (OTHER, None)
    assert pipe.writes == [delimited(MULTISELECT_PROTOCOL_ID, "na"), delimited("na"), delimited(OTHER)]


@FAILURES
async def test_a_failed_write_of_the_answer_raises(error: Exception) -> None:
    class Shut(Pipe):
        async def write(self, data: bytes) -> None:
            raise error

    pipe = await asked(delimited(MULTISELECT_PROTOCOL_ID, SPOKEN), Shut)
    with pytest.raises(MultiselectError):
        await answer(pipe)


@pytest.mark.parametrize(
    "said",
    [delimited("/multistream/2.0.0", SPOKEN), delimited(SPOKEN, SPOKEN), delimited("", ""), b"\xff" * 100],
    ids=["another version", "no greeting", "nothing twice", "garbage"],
)
async def test_malformed_requests_are_not_answered(said: bytes) -> None:
    pipe = await asked(said)
    with pytest.raises(MultiselectError):
        await answer(pipe)
    assert pipe.writes == []
