"""The protocol of looks and dial-backs: limits, hostile askers, and answers that lie."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from p2pavg.base.errors import UnreachableError
from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.base.messages import pack
from p2pavg.net.limits.dial_policy import NOT_REACHED
from p2pavg.net.nat.reach import service
from p2pavg.net.nat.reach.service import (
    NONCE_BYTES,
    PROTOCOL,
    DialBackOutcome,
    DialledBack,
    Look,
    Observed,
    ReachService,
    ask_dial_back,
    ask_to_look,
)
from p2pavg.net.transport import Stream, receive_message, send_message
from p2pavg.testing import MemoryNetwork, MemoryTransport
from p2pavg_dht import Ed25519Signer

HOST, PORT = "198.51.100.9", 50123
ME, SERVER = (Ed25519Signer(bytes([number]) * 32) for number in (1, 2))
OTHERS = [Ed25519Signer(bytes([number]) * 32) for number in range(3, 200)]


class Dials:
    """Dials that are recorded, and fail or hang if told so."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str, int]] = []
        self.error: Exception | None = None
        self.hang = False
        self.most_at_once = 0
        self._at_once = 0

    async def __call__(self, peer_id: str, host: str, port: int) -> None:
        self.made.append((peer_id, host, port))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if self.hang:
                await trio.sleep_forever()
            if self.error is not None:
                raise self.error
        finally:
            self._at_once -= 1


class Stage:
    """One server, and peers that ask it. Streams at the server look as if they came from :attr:`host`."""

    def __init__(self, network: MemoryNetwork, server: MemoryTransport) -> None:
        self.network = network
        self.server = server
        self.dials = Dials()
        self.host: str = HOST
        self.port = PORT
        self.relayed = False
        serve = server.serve

        def serve_as_seen(protocol: str, handler: Callable[[Stream], object]) -> None:
            async def handle(stream: Stream) -> None:
                stream.remote_host, stream.remote_port, stream.relayed = self.host, self.port, self.relayed
                await handler(stream)  # type: ignore[misc]

            serve(protocol, handle)

        server.serve = serve_as_seen  # type: ignore[method-assign]
        self.service = ReachService(server, self.dials)

    @asynccontextmanager
    async def asker(self, signer: Ed25519Signer = ME) -> AsyncIterator[MemoryTransport]:
        """Connect one more peer to the server."""
        async with self.network.transport(signer) as mine:
            await mine.dial(self.server.addresses[0], timeout=5.0)
            yield mine

    async def outcome(self, mine: MemoryTransport, port: int = 4001) -> DialBackOutcome:
        """Return the outcome of one dial-back."""
        return (await ask_dial_back(mine, SERVER.peer_id, port)).outcome


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    """Open a server."""
    network = MemoryNetwork(latency=(0.0, 0.0))
    async with network.transport(SERVER) as server:
        yield Stage(network, server)


class TestLook:
    async def test_asker_learns_how_its_connection_is_seen(self, autojump_clock: MockClock) -> None:
        async with stage() as found, found.asker() as mine:
            assert await ask_to_look(mine, SERVER.peer_id) == Observed(HOST, PORT)
            found.host = "::ffff:198.51.100.9"
            assert await ask_to_look(mine, SERVER.peer_id) == Observed(HOST, PORT)

    @pytest.mark.parametrize(("name", "value"), [("relayed", True), ("port", 0), ("host", "")])
    async def test_unknown_or_relayed_connections_get_no_answer(
        self, autojump_clock: MockClock, name: str, value: object
    ) -> None:
        async with stage() as found, found.asker() as mine:
            setattr(found, name, value)
            with pytest.raises(UnreachableError, match="gave no answer"):
                await ask_to_look(mine, SERVER.peer_id)

    async def test_a_peer_gets_a_bounded_number_of_answers(self, autojump_clock: MockClock) -> None:
        async with stage() as found, found.asker() as mine:
            answered = 0
            for _ in range(100):
                try:
                    await ask_to_look(mine, SERVER.peer_id)
                    answered += 1
                except UnreachableError:
                    pass
            assert answered <= service.PEER_LOOKS + 1


class TestDialBack:
    async def test_the_host_that_the_server_sees_is_dialled(self, autojump_clock: MockClock) -> None:
        async with stage() as found, found.asker() as mine:
            assert await found.outcome(mine, 4001) is DialBackOutcome.REACHED
            assert found.dials.made == [(ME.peer_id, HOST, 4001)]

    async def test_every_failure_gets_the_same_answer(self, autojump_clock: MockClock) -> None:
        """An error's text would let an asker scan the ports of the host, such as a router, that it shares."""
        reasons = set()
        async with stage() as found, found.asker() as mine:
            for text in ("connection refused", "no route to host", "expected 72, got 68\n" + "x" * 1000):
                found.dials.error = UnreachableError(text)
                answer = await ask_dial_back(mine, SERVER.peer_id, 4001)
                assert answer.outcome is DialBackOutcome.FAILED
                reasons.add(answer.reason)
            found.dials.hang = True
            reasons.add((await ask_dial_back(mine, SERVER.peer_id, 4001)).reason)
        assert reasons == {NOT_REACHED}

    async def test_nothing_is_dialled_over_a_relayed_connection(self, autojump_clock: MockClock) -> None:
        async with stage() as found, found.asker() as mine:
            found.relayed = True
            assert await found.outcome(mine) is DialBackOutcome.REFUSED
            assert not found.dials.made

    async def test_dials_of_one_peer_are_limited(self, autojump_clock: MockClock) -> None:
        async with stage() as found, found.asker() as mine:
            for _ in range(50):
                await found.outcome(mine)
            assert len(found.dials.made) <= service.PEER_DIALS + 1
            await trio.sleep(60.0)
            assert await found.outcome(mine) is DialBackOutcome.REACHED

    async def test_dials_to_one_host_are_limited(self, autojump_clock: MockClock) -> None:
        async with stage() as found:
            await self.ask_with_many(found, lambda _: HOST)
            assert len(found.dials.made) <= service.HOST_DIALS + 1

    async def test_dials_in_all_are_limited(self, autojump_clock: MockClock) -> None:
        async with stage() as found:
            await self.ask_with_many(found, lambda number: f"5.6.7.{number}")
            assert service.HOST_DIALS + 1 < len(found.dials.made) <= service.ALL_DIALS + 2

    async def ask_with_many(self, found: Stage, host: Callable[[int], str]) -> None:
        for number, signer in enumerate(OTHERS[:100]):
            found.host = host(number)
            async with found.asker(signer) as mine:
                await found.outcome(mine)

    async def test_dials_at_once_are_limited(self, autojump_clock: MockClock) -> None:
        async with stage() as found, trio.open_nursery() as nursery:
            found.dials.hang = True

            async def ask(number: int) -> None:
                async with found.asker(OTHERS[number]) as mine:
                    await found.outcome(mine)

            for number in range(30):
                found.host = f"5.6.7.{number}"
                nursery.start_soon(ask, number)
                await trio.sleep(0.01)
            await trio.sleep(20.0)
            nursery.cancel_scope.cancel()
        assert found.dials.most_at_once == service.MAX_DIALS_AT_ONCE

    async def test_one_peer_has_one_dial_at_once(self, autojump_clock: MockClock) -> None:
        async with stage() as found, found.asker() as mine, trio.open_nursery() as nursery:
            found.dials.hang = True
            for _ in range(5):
                nursery.start_soon(found.outcome, mine)
                await trio.sleep(0.01)
                found.service._serving.clear()  # the limit of streams is another test's
            await trio.sleep(1.0)
            assert len(found.dials.made) == 1


class TestHostileAskers:
    async def ask_raw(self, mine: MemoryTransport, message: bytes) -> bytes | None:
        stream = await mine.open_stream(SERVER.peer_id, PROTOCOL, timeout=5.0)
        try:
            await send_message(stream, message)
            with trio.move_on_after(60.0):
                try:
                    return await receive_message(stream)
                except Exception:  # noqa: BLE001 - the stream was reset
                    return None
        finally:
            await stream.reset()
        raise AssertionError("the stream was kept")

    @pytest.mark.parametrize(
        "message",
        [
            b"\xc1",
            pack("look", 1),
            pack("dial back", 0, bytes(NONCE_BYTES)),
            pack("dial back", 65536, bytes(NONCE_BYTES)),
            pack("dial back", 4001, bytes(NONCE_BYTES + 1)),
            pack("dial back", "10.0.0.1", bytes(NONCE_BYTES)),
            pack("dial back", 4001, bytes(NONCE_BYTES), "10.0.0.1"),
            pack("what"),
            bytes(600),
        ],
    )
    async def test_invalid_questions_cost_their_stream_only(
        self, autojump_clock: MockClock, message: bytes
    ) -> None:
        async with stage() as found, found.asker() as mine:
            assert await self.ask_raw(mine, message) is None
            assert not found.dials.made
            assert await ask_to_look(mine, SERVER.peer_id) == Observed(HOST, PORT)

    async def test_streams_without_a_question_end_and_are_few(self, autojump_clock: MockClock) -> None:
        async with stage() as found, found.asker() as mine:
            streams = [await mine.open_stream(SERVER.peer_id, PROTOCOL, timeout=5.0) for _ in range(10)]
            await trio.sleep(1.0)
            assert sum(found.service._serving.values()) <= service.MAX_SERVED_PER_PEER
            await trio.sleep(REPLY_SECONDS)
            assert not found.service._serving
            for stream in streams:
                await stream.reset()


class TestHostileServers:
    async def served(
        self, answer: Callable[[bytes], bytes | None], ask: Callable[[MemoryTransport], object]
    ) -> object:
        network = MemoryNetwork(latency=(0.0, 0.0))

        async def handle(stream: Stream) -> None:
            question = await receive_message(stream)
            assert question is not None
            reply = answer(question)
            if reply is None:
                await trio.sleep_forever()
            else:
                await send_message(stream, reply)
                await stream.aclose()

        async with network.transport(SERVER) as server, network.transport(ME) as mine:
            server.serve(PROTOCOL, handle)
            await mine.dial(server.addresses[0], timeout=5.0)
            return await ask(mine)  # type: ignore[misc]

    @pytest.mark.parametrize(
        "answer",
        [
            None,
            b"\xc1",
            pack("observed", "no host", 1),
            pack("observed", "None", 1),
            pack("observed", "1.2.3.4", 0),
            pack("observed", "0.0.0.0", 1),
            pack("observed", "::ffff:1.2.3.4", 1),
            pack("observed", "1" * 4000, 1),
            Look().encode(),
            DialledBack(bytes(NONCE_BYTES), DialBackOutcome.REACHED).encode(),
        ],
    )
    async def test_invalid_observations_are_errors(
        self, autojump_clock: MockClock, answer: bytes | None
    ) -> None:
        with pytest.raises(UnreachableError):
            await self.served(lambda _: answer, lambda mine: ask_to_look(mine, SERVER.peer_id))

    @pytest.mark.parametrize(
        "answer",
        [
            None,
            Observed("1.2.3.4", 1).encode(),
            DialledBack(bytes(NONCE_BYTES), DialBackOutcome.REACHED).encode(),
            pack("dialled back", bytes(NONCE_BYTES), "perhaps", ""),
        ],
    )
    async def test_invalid_results_are_errors(self, autojump_clock: MockClock, answer: bytes | None) -> None:
        with pytest.raises(UnreachableError):
            await self.served(lambda _: answer, lambda mine: ask_dial_back(mine, SERVER.peer_id, 4001))
