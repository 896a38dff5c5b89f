"""The replacements for parts of libp2p behave like the originals, in fewer turns of the event loop."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import libp2p.io.trio as io_trio
import libp2p.network.stream.net_stream as net_stream
import libp2p.stream_muxer.rw_lock as rw_lock
import libp2p.stream_muxer.yamux.yamux as yamux
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.custom_types import TProtocol
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectError
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_client import MULTISELECT_PROTOCOL_ID, MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.utils.varint import encode_delim
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

from p2pavg.net.libp2p.speed import (
    EagerLock,
    EagerMultiselectClient,
    OneAnswerMultiselect,
    ReadAheadStream,
    install,
)

WATCHDOG_SECONDS = 30.0
SPOKEN, OTHER, UNKNOWN = TProtocol("/spoken/1"), TProtocol("/other/1"), TProtocol("/unknown/1")


# -- the lock


async def test_a_free_lock_is_taken_at_once() -> None:
    lock = EagerLock()
    ran: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.lowlevel.checkpoint)
        nursery.start_soon(lambda: note(ran, "another"))
        for _ in range(100):
            async with lock:
                assert lock.locked()
            assert not lock.locked()
        assert ran == []


async def note(where: list[str], what: str) -> None:
    where.append(what)


async def test_only_one_task_holds_the_lock() -> None:
    lock = EagerLock()
    inside: list[int] = []
    most = [0]
    draw = random.Random(1)

    async def work(number: int) -> None:
        for _ in range(20):
            async with lock:
                inside.append(number)
                most.append(len(inside))
                for _ in range(draw.randrange(3)):
                    await trio.lowlevel.checkpoint()
                inside.remove(number)
            for _ in range(draw.randrange(3)):
                await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(work, number)
    assert max(most) == 1
    assert len(most) == 201
    assert not lock.locked()


async def test_waiters_get_the_lock_in_order_before_its_last_holder() -> None:
    """A task that releases the lock and acquires it again at once comes after the waiting tasks."""
    lock = EagerLock()
    order: list[str] = []

    async def wait(name: str) -> None:
        async with lock:
            order.append(name)

    async with trio.open_nursery() as nursery:
        await lock.acquire()
        for name in ("first", "second", "third"):
            nursery.start_soon(wait, name)
            await wait_all_tasks_blocked()
        lock.release()
        assert lock.locked(), "the first waiter has the lock already"
        await wait("last holder")
    assert order == ["first", "second", "third", "last holder"]


async def test_a_cancelled_waiter_is_skipped() -> None:
    lock = EagerLock()
    order: list[str] = []

    async def wait(name: str, scope: trio.CancelScope) -> None:
        with scope:
            async with lock:
                order.append(name)

    given_up = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        await lock.acquire()
        for name, scope in (("gone", given_up), ("stays", trio.CancelScope())):
            nursery.start_soon(wait, name, scope)
            await wait_all_tasks_blocked()
        given_up.cancel()
        await wait_all_tasks_blocked()
        lock.release()
    assert order == ["stays"]
    assert given_up.cancelled_caught
    assert not lock.locked()


async def test_a_waiter_cancelled_as_it_gets_the_lock_releases_it() -> None:
    lock = EagerLock()
    scope = trio.CancelScope()

    async def wait() -> None:
        with scope:
            async with lock:
                await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        await lock.acquire()
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        lock.release()
        scope.cancel()
    assert not lock.locked()


async def test_the_lock_is_released_when_its_block_fails_or_is_cancelled() -> None:
    lock = EagerLock()
    with pytest.raises(ValueError, match="of the block"):
        async with lock:
            raise ValueError("of the block")
    assert not lock.locked()
    with trio.CancelScope() as scope:
        async with lock:
            scope.cancel()
            await trio.lowlevel.checkpoint()
    assert not lock.locked()


async def test_only_the_holder_can_release_the_lock() -> None:
    lock = EagerLock()
    with pytest.raises(RuntimeError):
        lock.release()
    async with lock:
        with pytest.raises(RuntimeError):  # the task would wait for itself
            await lock.acquire()


async def test_libp2p_sees_all_of_trio_except_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = (yamux, net_stream, rw_lock, io_trio)
    for module in modules:
        monkeypatch.setattr(module, "trio", trio)
    install()
    install()
    for module in modules:
        seen = cast(Any, module).trio
        assert seen.Lock is EagerLock
        assert seen.Event is trio.Event
        assert seen.BrokenResourceError is trio.BrokenResourceError
        with pytest.raises(AttributeError):
            _ = seen.NothingOfThatName
    assert isinstance(trio.Lock(), trio.Lock), "trio itself must not change"
    lock = rw_lock.ReadWriteLock()
    async with lock.read_lock():
        pass
    async with lock.write_lock():
        pass


# -- the stream that reads ahead


class Counting(trio.abc.HalfCloseableStream):
    """One end of a stream in memory that counts its reads."""

    def __init__(self, stream: trio.StapledStream) -> None:
        self._stream = stream
        self.reads = 0

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(bytes(data))

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        self.reads += 1
        return bytes(await self._stream.receive_some(max_bytes))

    async def aclose(self) -> None:
        await self._stream.aclose()


def ahead(stream: trio.StapledStream) -> tuple[ReadAheadStream, Counting]:
    counting = Counting(stream)
    plain = TrioTCPStream(cast(trio.SocketStream, counting))
    found = ReadAheadStream.of(plain)
    assert cast(object, found) is plain
    return found, counting


async def read_all(stream: ReadWriteCloser, sizes: Sequence[int | None]) -> bytes:
    """Read pieces of these sizes in turn until the end, and check that none is larger than requested."""
    found = bytearray()
    for turn in range(100_000):
        size = sizes[turn % len(sizes)]
        piece = await stream.read(size)
        assert size is None or len(piece) <= size
        if not piece and size != 0:
            break
        found += piece
    assert await stream.read(5) == b"", "bytes were read after the end"
    return bytes(found)


@given(
    written=st.lists(st.binary(max_size=40), max_size=20),
    sizes=st.lists(st.one_of(st.none(), st.integers(0, 50)), min_size=1, max_size=6).filter(
        lambda sizes: any(size != 0 for size in sizes)
    ),
)
@settings(max_examples=60)
async def test_reads_of_any_size_return_the_same_bytes(written: list[bytes], sizes: list[int | None]) -> None:
    results = []
    for kind in (ReadAheadStream.of, lambda stream: stream):
        near, far = memory_stream_pair()
        stream = kind(TrioTCPStream(cast(trio.SocketStream, near)))

        async def write(far: trio.StapledStream = far) -> None:
            for piece in written:
                await far.send_all(piece)
                await trio.lowlevel.checkpoint()
            await far.send_eof()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            results.append(await read_all(stream, sizes))
    assert results == [b"".join(written)] * 2


async def test_a_frame_is_one_read_of_the_socket() -> None:
    near, far = memory_stream_pair()
    stream, counting = ahead(near)
    await far.send_all(b"\x00\x05hello\x00\x02yo")
    assert [await stream.read(n) for n in (2, 5, 2, 2)] == [b"\x00\x05", b"hello", b"\x00\x02", b"yo"]
    assert counting.reads == 1


async def test_available_bytes_are_returned_without_waiting() -> None:
    near, far = memory_stream_pair()
    stream, counting = ahead(near)
    await far.send_all(b"hello")
    with trio.fail_after(WATCHDOG_SECONDS):
        assert await stream.read(2) == b"he"
        assert await stream.read(100) == b"llo"
    assert counting.reads == 1


async def test_a_read_of_zero_bytes_reads_nothing() -> None:
    near, _far = memory_stream_pair()
    stream, counting = ahead(near)
    with trio.fail_after(WATCHDOG_SECONDS):
        assert await stream.read(0) == b""
    assert counting.reads == 0


async def test_a_read_without_a_size_returns_the_available_bytes() -> None:
    near, far = memory_stream_pair()
    stream, counting = ahead(near)
    await far.send_all(b"hello")
    assert await stream.read(1) == b"h"
    assert await stream.read(None) == b"ello"
    await far.send_all(b"more")
    assert await stream.read() == b"more"
    assert counting.reads == 2


async def test_a_read_that_is_cancelled_loses_nothing() -> None:
    near, far = memory_stream_pair()
    stream, _ = ahead(near)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.read, 3)
            await wait_all_tasks_blocked()
            scope.cancel()
    await far.send_all(b"hello")
    assert await stream.read(3) == b"hel"
    with trio.CancelScope() as scope:
        scope.cancel()
        assert await stream.read(1) == b"l", "the read neither waits nor ends"
    assert await stream.read(3) == b"o"


async def test_bytes_before_the_end_are_read_before_it() -> None:
    near, far = memory_stream_pair()
    stream, _ = ahead(near)
    await far.send_all(b"last words")
    await far.aclose()
    assert [await stream.read(5) for _ in range(4)] == [b"last ", b"words", b"", b""]


async def test_a_broken_stream_raises() -> None:
    class Broken(Counting):
        async def receive_some(self, max_bytes: int | None = None) -> bytes:
            raise trio.BrokenResourceError

    near, _far = memory_stream_pair()
    stream = ReadAheadStream.of(TrioTCPStream(cast(trio.SocketStream, Broken(near))))
    with pytest.raises(ConnectionClosedError):
        await stream.read(1)


async def test_writing_and_closing_are_unchanged() -> None:
    near, far = memory_stream_pair()
    stream, _ = ahead(near)
    await stream.write(b"hello")
    assert await far.receive_some(100) == b"hello"
    await stream.close()
    assert await far.receive_some(100) == b""
    assert await stream.read(1) == b""


async def test_two_concurrent_reads_lose_nothing() -> None:
    near, far = memory_stream_pair()
    stream, _ = ahead(near)
    found: list[bytes] = []

    async def read() -> None:
        found.append(await stream.read(2))

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(read)
            await wait_all_tasks_blocked()
        await far.send_all(b"abcd")
        await wait_all_tasks_blocked()
        await far.send_all(b"efgh")
    found.append(await stream.read(100))
    rest = b"" if b"".join(found).endswith(b"h") else await stream.read(100)
    assert b"".join([*found, rest]) == b"abcdefgh"


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


CLIENTS = pytest.mark.parametrize(
    "client", [EagerMultiselectClient(), MultiselectClient()], ids=["ours", "libp2p's"]
)


@CLIENTS
async def test_a_served_protocol_is_agreed_and_later_bytes_stay_unread(
    client: MultiselectClient,
) -> None:
    async with answered(speak) as pipe:
        assert await client.select_one_of([SPOKEN], MultiselectCommunicator(pipe)) == SPOKEN
        assert await pipe.read(100) == b"served"


async def test_the_client_sends_everything_in_one_write() -> None:
    async with answered(speak) as pipe:
        await EagerMultiselectClient().select_one_of([SPOKEN], MultiselectCommunicator(pipe))
        assert pipe.writes == [delimited(MULTISELECT_PROTOCOL_ID, SPOKEN)]


@CLIENTS
async def test_an_unserved_protocol_is_refused(client: MultiselectClient) -> None:
    async with answered(speak) as pipe:
        with pytest.raises(MultiselectClientError, match=r"not supported"):
            await client.select_one_of([UNKNOWN], MultiselectCommunicator(pipe))


@CLIENTS
async def test_the_first_served_protocol_of_several_is_agreed(client: MultiselectClient) -> None:
    async with answered(speak) as pipe:
        wanted = [UNKNOWN, OTHER, SPOKEN]
        assert await client.select_one_of(wanted, MultiselectCommunicator(pipe)) == OTHER
        assert pipe.writes == [delimited(line) for line in (MULTISELECT_PROTOCOL_ID, UNKNOWN, OTHER)]


@CLIENTS
@pytest.mark.parametrize("protocols", [[], [UNKNOWN, TProtocol("/unknown/2")]], ids=["none", "two"])
async def test_none_of_several_unserved_protocols_is_agreed(
    client: MultiselectClient, protocols: list[TProtocol]
) -> None:
    async with answered(speak) as pipe:
        with pytest.raises(MultiselectClientError):
            await client.select_one_of(protocols, MultiselectCommunicator(pipe))


NONSENSE: dict[str, Sequence[str | bytes]] = {
    "another version": ["/multistream/2.0.0", SPOKEN],
    "another protocol": [MULTISELECT_PROTOCOL_ID, OTHER],
    "the wrong way round": [SPOKEN, MULTISELECT_PROTOCOL_ID],
    "nothing twice": ["", ""],
    "a long text": [MULTISELECT_PROTOCOL_ID, "x" * 10_000],
}


@CLIENTS
@pytest.mark.parametrize("lines", NONSENSE.values(), ids=NONSENSE)
async def test_malformed_answers_agree_on_no_protocol(
    client: MultiselectClient, lines: Sequence[str | bytes]
) -> None:
    async with answered(saying(*lines)) as pipe:
        with pytest.raises(MultiselectClientError) as found:
            await client.select_one_of([SPOKEN], MultiselectCommunicator(pipe))
        if isinstance(client, EagerMultiselectClient):
            assert len(str(found.value)) < 200, "a stranger's words must not fill the log"


@CLIENTS
async def test_an_answer_that_is_no_text_costs_its_stream_only(client: MultiselectClient) -> None:
    async with answered(saying(b"\xff\xfe", b"\xff\xfe")) as pipe:
        with pytest.raises((MultiselectClientError, ValueError)):  # the transport handles either exception
            await client.select_one_of([SPOKEN], MultiselectCommunicator(pipe))


async def garbage(pipe: Pipe) -> None:
    await pipe.write(b"\xff" * 100)


@CLIENTS
@pytest.mark.parametrize(
    "answer",
    [saying(end=True), saying(MULTISELECT_PROTOCOL_ID, end=True), garbage],
    ids=["at once", "half-way", "with garbage"],
)
async def test_an_end_before_the_answer_raises(
    client: MultiselectClient, answer: Callable[[Pipe], Awaitable[object]]
) -> None:
    async with answered(answer) as pipe:
        with pytest.raises(MultiselectClientError):
            await client.select_one_of([SPOKEN], MultiselectCommunicator(pipe))


@CLIENTS
@pytest.mark.parametrize("lines", [[], [MULTISELECT_PROTOCOL_ID]], ids=["nothing", "half of it"])
async def test_a_silent_server_times_out(
    client: MultiselectClient, lines: list[str], autojump_clock: MockClock
) -> None:
    async with answered(saying(*lines)) as pipe:
        began = trio.current_time()
        with pytest.raises(MultiselectClientError):
            await client.select_one_of([SPOKEN], MultiselectCommunicator(pipe), 7)
        assert trio.current_time() - began == pytest.approx(7.0)


FAILURES = pytest.mark.parametrize(
    "error",
    [
        ConnectionClosedError("gone"),
        ValueError("shut"),
        AssertionError(),
    ],
    ids=["gone", "a value", "an assertion"],
)


@FAILURES
async def test_a_failed_write_raises(error: Exception) -> None:
    class Shut(Pipe):
        async def write(self, data: bytes) -> None:
            raise error

    near, _far = memory_stream_pair()
    for client in (MultiselectClient(), EagerMultiselectClient()):
        with pytest.raises(MultiselectClientError):
            await client.select_one_of([SPOKEN], MultiselectCommunicator(Shut(near)))


# -- the answer


async def answer(pipe: Pipe) -> tuple[TProtocol | None, object]:
    """Return the protocol on which our server agrees."""
    server = OneAnswerMultiselect({SPOKEN: None, OTHER: None}, holds_more)
    return await server.negotiate(MultiselectCommunicator(pipe))


def holds_more(pipe: Any) -> bool:
    return bool(pipe.stream.receive_stream._incoming._data)


async def asked(said: bytes, kind: type[Pipe] = Pipe) -> Pipe:
    """Return a stream of a peer that has sent these bytes before it reads anything."""
    near, far = memory_stream_pair()
    await near.send_all(said)
    return kind(far)


@pytest.mark.parametrize(
    "client",
    [
        pytest.param(EagerMultiselectClient(), id="ours"),
        pytest.param(MultiselectClient(), id="libp2p's"),
    ],
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


async def test_a_refused_client_gets_an_answer() -> None:
    async with answered(answer) as pipe:
        with pytest.raises(MultiselectClientError, match=r"not supported.*'na'"):
            await EagerMultiselectClient().select_one_of([UNKNOWN], MultiselectCommunicator(pipe))


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
