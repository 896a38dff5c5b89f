"""The gate: the conformance suite through it, and what a hostile program gets of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import trio

from p2pavg.base.errors import (
    BusyError,
    ControlError,
    RemoteProtocolError,
    StreamBrokenError,
    UnreachableError,
)
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.net.gate.client import GateSigner, open_gate_transport
from p2pavg.net.gate.messages import (
    AskSignature,
    AskStream,
    Attach,
    ServeProtocol,
    Signature,
    TellNotice,
    news_of,
)
from p2pavg.net.gate.server import MAX_TOLD, Gate, open_gate
from p2pavg.net.limits.rate import RateLimit
from p2pavg.net.nat.reach.reachability import NOT_ASKED
from p2pavg.net.transport import Stream, Transport, receive_message, send_message
from p2pavg.net.unix import UnixStream, connect_unix, open_unix_listener, serve_unix
from p2pavg.testing import MemoryNetwork
from p2pavg_dht import Ed25519Signer
from tests.transport_conformance import CHECKS, ECHO, Check, echo
from tests.transport_conformance.tools import OTHER, eventually, receive_all


class EverythingNamed(frozenset[str]):
    """Stands for the addresses that a user has named, so that the suite can dial any."""

    def __contains__(self, _address: object) -> bool:
        return True


class BehindAGate:
    """Peers whose transport is in memory, behind a socket on the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._network = MemoryNetwork()
        self._signers = (Ed25519Signer(number.to_bytes(32, "big")) for number in count(1))
        self._paths = (folder / f"gate{number}" for number in count(1))

    @asynccontextmanager
    async def _transport(self, listening: bool) -> AsyncIterator[Transport]:
        signer = next(self._signers)
        path = next(self._paths)
        inbound = self._network.transport(signer, inbound="accepted" if listening else "refused")
        async with (
            inbound as network,
            open_gate(network, signer, path, {ECHO, OTHER}, (), named=EverythingNamed()),
            open_gate_transport(path) as transport,
        ):
            yield transport

    def transport(self, *, listening: bool = True) -> AbstractAsyncContextManager[Transport]:
        return self._transport(listening)

    def unused_address(self) -> str:
        return f"/ip4/10.255.255.255/tcp/4001/p2p/{next(self._signers).peer_id}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check: Check, folder: Path) -> None:
    await check(BehindAGate(folder))


ALLOWED = b"p2pavg-record/"


@asynccontextmanager
async def open_gate_alone(folder: Path) -> AsyncIterator[tuple[Path, Gate, Ed25519Signer]]:
    signer = Ed25519Signer(b"\x07" * 32)
    path = folder / "gate"
    async with (
        MemoryNetwork().transport(signer) as network,
        open_gate(network, signer, path, {ECHO}, (ALLOWED,)) as gate,
    ):
        yield path, gate, signer


async def test_one_program_at_a_time(folder: Path) -> None:
    async with open_gate_alone(folder) as (path, gate, _):
        async with open_gate_transport(path):
            assert gate.attached
            with pytest.raises(BusyError, match="another program"):
                async with open_gate_transport(path):
                    pass
        while gate.attached:
            await trio.sleep(0.01)
        async with open_gate_transport(path):
            assert gate.attached


async def test_a_program_without_its_gate_ends_with_an_error(folder: Path) -> None:
    opened, scope = trio.Event(), trio.CancelScope()

    async def hold() -> None:
        with scope:
            async with open_gate_alone(folder):
                opened.set()
                await trio.sleep_forever()

    async def use() -> None:
        await opened.wait()
        async with open_gate_transport(folder / "gate"):
            scope.cancel()
            await trio.sleep(10)

    async def both() -> None:
        with bare_exceptions():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hold)
                nursery.start_soon(use)

    with pytest.raises(ControlError, match="is gone"):
        await both()


async def test_only_what_the_gate_allows_is_signed(folder: Path) -> None:
    async with open_gate_alone(folder) as (path, _, signer):

        def ask() -> None:
            mine = GateSigner(path, signer.peer_id)
            try:
                assert mine.sign(ALLOWED + b"1") == signer.sign(ALLOWED + b"1")
                for message in (b"noise-libp2p-static-key:" + bytes(32), b"p2pavg-member/1\0", b""):
                    with pytest.raises(RemoteProtocolError, match="does not sign"):
                        mine.sign(message)
                assert mine.sign(ALLOWED) == signer.sign(ALLOWED)
            finally:
                mine.close()

        await trio.to_thread.run_sync(ask)


@pytest.mark.parametrize(
    "said",
    [
        b"\xff" * 100,
        b"\x90",
        Attach().encode() + b"x",
        AskStream("x", ECHO, ("nonsense",), 1.0, False).encode(),
    ],
)
async def test_a_program_that_asks_for_what_it_may_not_have_costs_itself_only(
    folder: Path, said: bytes
) -> None:
    async with open_gate_alone(folder) as (path, _, _):
        async with connect_unix(path) as socket:
            await send_message(socket, said)
            answer = await receive_message(socket)
            assert answer is None or b"Error" in answer
        async with open_gate_transport(path):
            pass


async def test_a_chunk_that_is_too_long_ends_its_stream_only(folder: Path) -> None:
    around = BehindAGate(folder)
    async with around.transport() as there:
        there.serve(ECHO, echo)
        async with around.transport() as here:
            async with connect_unix(folder / "gate2") as socket:
                await send_message(
                    socket, AskStream(there.peer_id, ECHO, there.addresses, 5.0, False).encode()
                )
                assert await receive_message(socket) is not None
                await socket.send_all(b"\xff\xff\xff\xff" + bytes(1000))
                with pytest.raises(StreamBrokenError):
                    await receive_all(socket)
            stream = await here.open_stream(there.peer_id, ECHO, addresses=there.addresses, timeout=5.0)
            await send_message(stream, b"still here?")
            assert await receive_message(stream) == b"still here?"


async def test_a_program_uses_no_protocol_that_the_gate_does_not_name(folder: Path) -> None:
    network, signer = MemoryNetwork(), Ed25519Signer(b"\x07" * 32)
    async with (
        network.transport(signer) as mine,
        network.transport(Ed25519Signer(b"\x08" * 32)) as there,
        open_gate(mine, signer, folder / "gate", {ECHO}, ()) as gate,
    ):
        there.serve(ECHO, echo)
        there.serve(OTHER, echo)
        async with open_gate_transport(folder / "gate") as program:
            peer = partial(program.open_stream, there.peer_id, addresses=there.addresses, timeout=5.0)
            await (await peer(ECHO)).aclose()
            with pytest.raises(UnreachableError, match="none that a program may use"):
                await peer(OTHER)
        await eventually(lambda: not gate.attached)
        async with connect_unix(folder / "gate") as socket:
            await send_message(socket, Attach().encode())
            await eventually(lambda: gate.attached)
            await send_message(socket, ServeProtocol(OTHER).encode())
            with trio.fail_after(10.0):
                await eventually(lambda: not gate.attached)


async def test_only_what_the_user_has_named_is_dialled(folder: Path) -> None:
    """Else a program could look which ports of this machine, and of its network, are open."""
    network = MemoryNetwork()
    async with network.transport(Ed25519Signer(b"\x08" * 32)) as there:
        for named in ((), there.addresses):
            signer = Ed25519Signer(b"\x07" * 32)
            async with (
                network.transport(signer) as mine,
                open_gate(mine, signer, folder / "gate", {ECHO}, (), named=named),
                open_gate_transport(folder / "gate") as program,
            ):
                if named:
                    assert await program.dial(there.addresses[0], timeout=5.0) == there.peer_id
                    continue
                with pytest.raises(UnreachableError, match="none of the run's"):
                    await program.dial(there.addresses[0], timeout=5.0)


async def test_a_program_that_reads_no_news_is_detached(folder: Path) -> None:
    network = MemoryNetwork()
    signer = Ed25519Signer(b"\x07" * 32)
    async with (
        network.transport(signer) as mine,
        network.transport(Ed25519Signer(b"\x08" * 32)) as there,
        open_gate(mine, signer, folder / "gate", {ECHO}, ()) as gate,
        connect_unix(folder / "gate") as socket,
    ):
        await send_message(socket, Attach().encode())
        assert await receive_message(socket) is not None
        while gate.attached:
            gate.stop_program()  # news that the program does not read
            await trio.lowlevel.checkpoint()
        await trio.sleep(0.1)
        assert not gate.stop_program()
        # The other peer still connects, and another program may attach.
        await there.dial(mine.addresses[0], timeout=5.0)
        async with open_gate_transport(folder / "gate"):
            assert gate.attached


async def test_the_users_limit_holds_for_what_a_program_sends(folder: Path) -> None:
    signer = Ed25519Signer(b"\x07" * 32)
    network = MemoryNetwork()
    moment = 0.0
    upload = RateLimit(80.0, clock=lambda: moment)
    async with (
        network.transport(Ed25519Signer(b"\x08" * 32)) as there,
        network.transport(signer) as mine,
        open_gate(mine, signer, folder / "gate", {ECHO}, (), upload=upload),
        open_gate_transport(folder / "gate") as program,
    ):
        there.serve(ECHO, echo)
        stream = await program.open_stream(there.peer_id, ECHO, addresses=there.addresses, timeout=5.0)
        await send_message(stream, bytes(1_000_000))
        await receive_message(stream, max_bytes=2_000_000)
        # All of it was taken from the limit, whatever the program's own run file says.
        assert upload.delay(0) > 0.05


async def test_a_late_signature_is_not_taken_for_the_next_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after Ctrl-Z and `fg` of the process that has the key."""
    monkeypatch.setattr("p2pavg.net.gate.client.REPLY_SECONDS", 0.2)
    signer = Ed25519Signer(b"\x07" * 32)
    slow = trio.Event()

    async def serve(socket: UnixStream) -> None:
        while (data := await receive_message(socket)) is not None:
            message = AskSignature.decode(data).message
            if message == b"slow":
                await slow.wait()
            await send_message(socket, Signature(signer.sign(message)).encode())

    def ask() -> None:
        mine = GateSigner(folder / "gate", signer.peer_id)
        try:
            with pytest.raises(ControlError, match="did not answer"):
                mine.sign(b"slow")
            trio.from_thread.run_sync(slow.set)
            monkeypatch.undo()  # on a busy machine, the second answer may take longer
            assert mine.sign(b"quick") == signer.sign(b"quick")
        finally:
            mine.close()

    async with open_unix_listener(folder / "gate") as listener, trio.open_nursery() as nursery:
        nursery.start_soon(serve_unix, listener, serve)
        await trio.to_thread.run_sync(ask)
        nursery.cancel_scope.cancel()


async def test_a_connection_from_before_the_program_is_known_to_end(folder: Path) -> None:
    network = MemoryNetwork()
    signer = Ed25519Signer(b"\x07" * 32)
    async with network.transport(signer) as mine, network.transport(Ed25519Signer(b"\x08" * 32)) as there:
        there.serve(ECHO, echo)
        await mine.dial(there.addresses[0], timeout=5.0)
        async with (
            open_gate(mine, signer, folder / "gate", {ECHO}, ()),
            open_gate_transport(folder / "gate") as program,
        ):
            stream = await program.open_stream(there.peer_id, ECHO, timeout=5.0)
            await stream.aclose()
            await stream.aclose()  # as often as one likes
            assert program.is_connected(there.peer_id)
            await there.disconnect(mine.peer_id)
            await eventually(lambda: not program.is_connected(there.peer_id))


async def test_while_no_program_serves_this_process_does(folder: Path) -> None:
    network = MemoryNetwork()
    signer = Ed25519Signer(b"\x07" * 32)

    async def said_here(stream: Stream) -> None:
        await send_message(stream, b"of this process")
        await stream.aclose()

    async def said_there(stream: Stream) -> None:
        await send_message(stream, b"of the program")
        await stream.aclose()

    async with (
        network.transport(signer) as mine,
        network.transport(Ed25519Signer(b"\x08" * 32)) as there,
        open_gate(mine, signer, folder / "gate", {ECHO}, (), otherwise={ECHO: said_here}) as gate,
    ):

        async def asked() -> bytes | None:
            stream = await there.open_stream(mine.peer_id, ECHO, addresses=mine.addresses, timeout=5.0)
            return await receive_message(stream)

        assert await asked() == b"of this process"
        async with open_gate_transport(folder / "gate") as program:
            program.serve(ECHO, said_there)
            with trio.fail_after(10.0):
                while await asked() != b"of the program":
                    pass
        await eventually(lambda: not gate.attached)
        assert await asked() == b"of this process"


async def test_a_gate_that_stands_still_costs_wishes_only(folder: Path) -> None:
    """As after Ctrl-Z of the process that has the network, while the program goes on."""
    signer = Ed25519Signer(b"\x07" * 32)

    async def stand_still(socket: UnixStream) -> None:
        assert await receive_message(socket) is not None
        await send_message(socket, news_of(signer.peer_id, (), NOT_ASKED).encode())
        await trio.sleep_forever()

    async with open_unix_listener(folder / "gate") as listener, trio.open_nursery() as nursery:
        nursery.start_soon(serve_unix, listener, stand_still)
        async with open_gate_transport(folder / "gate") as program:
            for _ in range(10_000):
                program.remember_peer(signer.peer_id)
            assert program.peer_id == signer.peer_id
        nursery.cancel_scope.cancel()


async def test_a_program_tells_of_notices_and_one_that_floods_fills_nothing(folder: Path) -> None:
    async with open_gate_alone(folder) as (path, gate, _), open_gate_transport(path) as transport:
        for number in range(100):
            transport.tell(TellNotice(bytes([number])))
        with trio.fail_after(10):
            assert await gate.told.receive() == TellNotice(b"\0")
        while gate.told.statistics().current_buffer_used < MAX_TOLD:
            transport.tell(TellNotice(b"more"))
            await trio.sleep(0.01)
        assert gate.attached
