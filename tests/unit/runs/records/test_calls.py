"""Record calls over kept streams: a call's stream and its answer.

All times are virtual.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from p2pavg.base.errors import StreamBrokenError
from p2pavg.base.limits import IDLE_STREAM_SECONDS, REPLY_SECONDS
from p2pavg.net.transport import Stream, receive_message, send_message
from p2pavg.runs.records import calls
from p2pavg.runs.records.calls import MAX_KEPT, RecordCalls
from p2pavg.testing import MemoryNetwork, MemoryTransport
from p2pavg.testing.simulation import simulated_peer
from p2pavg_dht import MAX_MESSAGE_BYTES, PROTOCOL, RPC_TIMEOUT, Contact, Ed25519Signer, RpcError
from p2pavg_dht.messages import Locate, encode

HERE, *THERE = [Ed25519Signer(bytes([number + 1] * 32)) for number in range(6)]
KEPT_SECONDS = IDLE_STREAM_SECONDS / 2

Serve = Callable[[Stream], Awaitable[None]]


async def answers(stream: Stream) -> None:
    """Answer every call until the other side closes the stream."""
    while (request := await receive_message(stream)) is not None:
        await send_message(stream, b"answer to " + request)


async def answers_once(stream: Stream) -> None:
    """Answer once and close the stream."""
    request = await receive_message(stream)
    assert request is not None
    await send_message(stream, b"answer to " + request)
    await stream.aclose()


class Peers:
    """One calling peer and some serving ones; ``streams`` are the accepted ones by serving peer."""

    def __init__(self, network: MemoryNetwork, here: MemoryTransport, there: list[MemoryTransport]) -> None:
        self.network = network
        self.here = here
        self.there = there
        self.calls = RecordCalls(here)
        self.streams: list[tuple[int, Stream]] = []

    def serve(self, handler: Serve) -> None:
        """Serve again on all of them."""
        for index, transport in enumerate(self.there):

            async def note(stream: Stream, index: int = index) -> None:
                self.streams.append((index, stream))
                await handler(stream)

            transport.serve(PROTOCOL, note)

    def contact(self, index: int = 0) -> Contact:
        return Contact(self.there[index].peer_id, self.there[index].addresses)

    async def call(self, request: bytes = b"hello", index: int = 0) -> bytes:
        with trio.fail_after(RPC_TIMEOUT):
            return await self.calls.call(self.contact(index), request)

    async def answered(self, request: bytes = b"hello", index: int = 0) -> bool:
        return await self.call(request, index) == b"answer to " + request

    @property
    def kept(self) -> list[str]:
        return list(self.calls._kept)


@asynccontextmanager
async def peers(count: int = 1, handler: Serve = answers) -> AsyncIterator[Peers]:
    network = MemoryNetwork()
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(network.transport(HERE))
        there = [await stack.enter_async_context(network.transport(signer)) for signer in THERE[:count]]
        found = Peers(network, here, there)
        found.serve(handler)
        yield found


async def test_each_peer_has_a_stream_of_its_own(autojump_clock: MockClock) -> None:
    async with peers(2) as found:
        for turn in range(4):
            assert await found.answered(index=turn % 2)
        assert [index for index, _ in found.streams] == [0, 1]


async def test_consecutive_calls_keep_the_stream_open(autojump_clock: MockClock) -> None:
    async with peers() as found:
        for _ in range(10):
            assert await found.answered()
            await trio.sleep(0.9 * KEPT_SECONDS)
        assert len(found.streams) == 1


async def test_an_old_stream_is_not_used(autojump_clock: MockClock) -> None:
    """The other side may close it at any moment, which would cost the call a round trip."""
    async with peers() as found:
        assert await found.answered()
        await trio.sleep(KEPT_SECONDS + 0.1)
        assert await found.answered()
        assert len(found.streams) == 2
        await wait_all_tasks_blocked()
        await trio.sleep(1.0)
        [(end,)] = [tuple(ends) for ends in [found.here.ends(found.there[0].peer_id)]]
        assert len(end.streams) == 1, "the old one was closed"


async def closes_after(seconds: float, stream: Stream) -> None:
    request = await receive_message(stream)
    assert request is not None
    await send_message(stream, b"answer to " + request)
    await trio.sleep(seconds)


async def resets(stream: Stream) -> None:
    await closes_after(5.0, stream)
    await stream.reset()


async def closes(stream: Stream) -> None:
    await closes_after(5.0, stream)
    await stream.aclose()


async def takes_one_more_and_closes(stream: Stream) -> None:
    await closes_after(5.0, stream)
    await receive_message(stream)
    await stream.aclose()


async def takes_one_more_and_resets(stream: Stream) -> None:
    await closes_after(5.0, stream)
    await receive_message(stream)
    await stream.reset()


async def answers_half(stream: Stream) -> None:
    await closes_after(5.0, stream)
    await receive_message(stream)
    await stream.send_all(b"\0\0\0\x09half")
    await stream.aclose()


@pytest.mark.parametrize(
    "handler",
    [answers_once, closes, resets, takes_one_more_and_closes, takes_one_more_and_resets, answers_half],
)
async def test_stream_closed_by_the_other_side_is_replaced_within_the_call(
    handler: Serve, autojump_clock: MockClock
) -> None:
    async with peers(handler=handler) as found:
        for _ in range(4):
            assert await found.answered()
            await trio.sleep(6.0)
        assert len(found.streams) == 4


async def test_a_connection_that_broke_is_replaced_within_the_call(autojump_clock: MockClock) -> None:
    async with peers() as found:
        assert await found.answered()
        found.network.disconnect(found.here.peer_id, found.there[0].peer_id)
        assert await found.answered()
        assert len(found.streams) == 2


async def test_calls_at_the_same_time_get_their_own_answers(autojump_clock: MockClock) -> None:
    """One of their streams is kept."""

    async def slowly(stream: Stream) -> None:
        while (request := await receive_message(stream)) is not None:
            await trio.sleep(int.from_bytes(request, "big") % 7 / 10)
            await send_message(stream, b"answer to " + request)

    async with peers(2, slowly) as found:
        wrong: list[tuple[int, int]] = []

        async def call(number: int, index: int) -> None:
            if not await found.answered(number.to_bytes(2, "big"), index):
                wrong.append((number, index))

        for _ in range(3):
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    for index in range(2):
                        nursery.start_soon(call, number, index)
            assert wrong == []
            assert sorted(found.kept) == sorted(transport.peer_id for transport in found.there)
            await trio.sleep(1.0)
            for transport in found.there:
                [end] = found.here.ends(transport.peer_id)
                assert len(end.streams) == 1, "the others were closed"


async def test_number_of_kept_streams_is_limited(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least recently used one is closed."""
    assert MAX_KEPT < 128, "streams that a connection may have, if all were of one"
    monkeypatch.setattr(calls, "MAX_KEPT", 2)
    async with peers(3) as found:
        ids = [transport.peer_id for transport in found.there]
        for index in (0, 1, 0, 2):
            assert await found.answered(index=index)
        assert found.kept == [ids[0], ids[2]]
        await trio.sleep(1.0)
        assert [len(end.streams) for peer_id in ids for end in found.here.ends(peer_id)] == [1, 0, 1]
        assert await found.answered(index=0)
        assert len(found.streams) == 3
        assert await found.answered(index=1)
        assert found.kept == [ids[0], ids[1]]


async def test_cancelled_call_resets_its_stream(autojump_clock: MockClock) -> None:
    """Otherwise the next call would read its answer."""
    late: list[bytes] = []

    async def slowly(stream: Stream) -> None:
        while (request := await receive_message(stream)) is not None:
            await trio.sleep(1.0 if request == b"slow" else 0.0)
            late.append(request)
            await send_message(stream, b"answer to " + request)

    async with peers(handler=slowly) as found:
        for kept in (False, True):
            if kept:
                assert await found.answered(b"first")
            with trio.move_on_after(0.5) as scope:
                await found.call(b"slow")
            assert scope.cancelled_caught
            assert found.kept == []
            assert await found.answered(b"quick")
            await trio.sleep(5.0)
            assert await found.answered(b"quick again")


# -- what goes wrong


async def says_nothing(stream: Stream) -> None:
    await receive_message(stream)
    await stream.aclose()


async def says_too_much(stream: Stream) -> None:
    await receive_message(stream)
    await stream.send_all((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))
    await trio.sleep_forever()


async def says_an_empty_message(stream: Stream) -> None:
    await receive_message(stream)
    await stream.send_all(bytes(4))
    await trio.sleep_forever()


async def says_half(stream: Stream) -> None:
    await receive_message(stream)
    await stream.send_all(b"\0\0\0\x09half")
    await stream.aclose()


async def resets_at_once(stream: Stream) -> None:
    await stream.reset()


HOSTILE = [says_nothing, says_too_much, says_an_empty_message, says_half, resets_at_once]


@pytest.mark.parametrize("hostile", HOSTILE)
async def test_missing_answer_is_an_error_and_keeps_no_stream(
    hostile: Serve, autojump_clock: MockClock
) -> None:
    async with peers(handler=hostile) as found:
        with pytest.raises(RpcError):
            await found.call()
        assert found.kept == []
        assert len(found.streams) == 1
        await trio.sleep(1.0)
        assert [len(end.streams) for end in found.here.ends(found.there[0].peer_id)] == [0]


@pytest.mark.parametrize("hostile", HOSTILE)
async def test_missing_answer_on_a_kept_stream_is_an_error(hostile: Serve, autojump_clock: MockClock) -> None:
    async def then(stream: Stream) -> None:
        if len(found.streams) == 1:
            request = await receive_message(stream)
            assert request is not None
            await send_message(stream, b"answer to " + request)
        await hostile(stream)

    async with peers(handler=then) as found:
        assert await found.answered()
        with pytest.raises(RpcError):
            await found.call()
        assert found.kept == []


async def test_unanswered_call_waits_for_the_callers_timeout(autojump_clock: MockClock) -> None:
    async def deaf(stream: Stream) -> None:
        await trio.sleep_forever()

    async with peers(handler=deaf) as found:
        with pytest.raises(trio.TooSlowError):
            await found.call()
        assert found.kept == []


async def test_departed_peer_is_an_error(autojump_clock: MockClock) -> None:
    async with peers() as found:
        assert await found.answered()
        contact = found.contact()
        found.network.crash(found.there[0].peer_id)
        with pytest.raises(RpcError):
            await found.calls.call(contact, b"hello")
        assert found.kept == []


# -- the side that serves


@asynccontextmanager
async def calling() -> AsyncIterator[tuple[Stream, RecordCalls, Contact]]:
    """Open a record stream to a real peer, for calls to it."""
    network = MemoryNetwork(latency=(0.0, 0.0))
    async with network.transport(HERE) as here, simulated_peer(network, 0) as peer:
        stream = await here.open_stream(peer.id, PROTOCOL, addresses=peer.addresses, timeout=10.0)
        yield stream, RecordCalls(here), Contact(peer.id, tuple(peer.addresses))


async def seconds_until_let_go(stream: Stream) -> float:
    began = trio.current_time()
    with pytest.raises(StreamBrokenError):
        assert await stream.receive_some(1) == b"never"
    return trio.current_time() - began


REQUEST = encode(Locate(addresses=(), point=bytes(32)))


async def test_stream_is_closed_after_idle_time(autojump_clock: MockClock) -> None:
    async with calling() as (stream, _, _):
        for _ in range(5):
            await trio.sleep(0.9 * IDLE_STREAM_SECONDS)
            await send_message(stream, REQUEST)
            assert await receive_message(stream)
        assert await seconds_until_let_go(stream) == pytest.approx(IDLE_STREAM_SECONDS)


async def test_incomplete_call_is_closed(autojump_clock: MockClock) -> None:
    async with calling() as (stream, _, _):
        await stream.send_all(len(REQUEST).to_bytes(4, "big") + REQUEST[:5])
        assert await seconds_until_let_go(stream) == pytest.approx(REPLY_SECONDS)


async def test_stream_with_unread_answers_is_closed(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unread answer blocks no task for ever."""
    monkeypatch.setattr("p2pavg.testing.memory.connection.WINDOW_BYTES", 4096)  # an answer has 7 bytes
    async with calling() as (stream, _, _):

        async def call_on_and_on() -> None:
            with trio.fail_after(100 * REPLY_SECONDS):
                while True:
                    await send_message(stream, REQUEST)

        with pytest.raises(StreamBrokenError):
            await call_on_and_on()
        assert trio.current_time() == pytest.approx(REPLY_SECONDS)


async def test_malformed_request_resets_its_stream(autojump_clock: MockClock) -> None:
    async with calling() as (stream, _, _):
        await send_message(stream, b"hello")
        assert await seconds_until_let_go(stream) == pytest.approx(0.0)


async def test_kept_stream_is_still_open_on_the_other_side(autojump_clock: MockClock) -> None:
    """After any pause, a call gets its answer."""
    async with calling() as (_, calls, contact):
        for pause in (0.0, 0.9, 1.1, 1.9, 2.1, 10.0):
            await trio.sleep(pause * KEPT_SECONDS)
            assert await calls.call(contact, REQUEST)
