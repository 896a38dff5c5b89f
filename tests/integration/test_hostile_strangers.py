"""Attacks by strangers on real peers over loopback: their cost is bounded, and honest peers are still served."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from hashlib import sha256

import psutil
import pytest
import trio
import trio.lowlevel

from p2pavg.base.errors import ClosedError, StreamBrokenError, UnreachableError
from p2pavg.base.hosts import prefix_of
from p2pavg.net.libp2p.carriers import RelayedStream
from p2pavg.net.libp2p.transport import Libp2pTransport, open_libp2p_transport
from p2pavg.net.limits import memory_budget
from p2pavg.net.limits.call_budget import CallBudget, CallRates
from p2pavg.net.limits.dial_policy import HOST_FAILURES, HOST_FAILURES_PER_SECOND
from p2pavg.net.limits.first_messages import Handshakes
from p2pavg.net.transport import Stream, receive_message, send_message
from p2pavg.peer.peer import Peer, peer_over
from p2pavg_dht import MAX_MESSAGE_BYTES, PROTOCOL, Contact, Ed25519Signer
from p2pavg_dht.messages import (
    Find,
    Found,
    Locate,
    LocateAnswer,
    Request,
    Store,
    Stored,
    decode_request,
    encode,
)
from tests.integration.hosts import (
    LOOPBACK,
    TIMEOUT,
    assert_serves,
    eventually,
    open_host,
    port_of,
    seeds,
    watched,
)

MIB = 1024 * 1024


@asynccontextmanager
async def open_peer(*bootstrap: str) -> AsyncIterator[tuple[Peer, Libp2pTransport]]:
    seed = next(seeds)
    async with (
        open_libp2p_transport(seed=seed, listen=[LOOPBACK]) as transport,
        peer_over(transport, Ed25519Signer(seed), bootstrap=bootstrap) as peer,
    ):
        yield peer, transport


# -- connections


HALF_OF_A_HANDSHAKE = b"\x13/multistream/1.0.0\n\x07/noise\n\x00\x20" + bytes(range(32))


@watched
async def test_unfinished_connections_do_not_keep_a_new_peer_out() -> None:
    """The attacker holds 512 connections from the new peer's own address, and renews each closed one."""
    async with open_host(LOOPBACK) as host, trio.open_nursery() as attackers:
        opened = 0

        async def hold_a_place() -> None:
            nonlocal opened
            while True:
                async with await trio.open_tcp_stream("127.0.0.1", port_of(host)) as tcp:
                    await tcp.send_all(HALF_OF_A_HANDSHAKE)
                    opened += 1
                    await until_closed(tcp)
                await trio.sleep(0.2)

        for _ in range(512):
            attackers.start_soon(hold_a_place)
        await eventually(lambda: opened >= 512)
        for _ in range(2):
            async with open_host() as newcomer:
                await assert_serves(newcomer, host)
        attackers.cancel_scope.cancel()


async def answer_to_half_of_a_handshake(host: Libp2pTransport, source: str) -> bytes:
    """Send the first message of a handshake from an address, and return the first bytes of the answer to it."""
    async with await trio.open_tcp_stream("127.0.0.1", port_of(host), local_address=source) as tcp:
        await tcp.send_all(HALF_OF_A_HANDSHAKE)
        return bytes(await tcp.receive_some(1000))


def owes(budget: CallBudget) -> bool:
    return budget.delay(trio.current_time(), "", prefix_of("127.0.0.1")) != 0.0


@watched
async def test_unfinished_handshakes_use_up_the_budget_of_their_network_only() -> None:
    """Each of them costs this peer several times the processor time of its sender."""
    budget = CallBudget(CallRates(peer_seconds=1e-6, peer_burst_seconds=1e-6, prefix_factor=1.0))
    async with open_host(LOOPBACK) as host, open_host() as honest:
        host._swarm.handshakes = Handshakes(budget)
        await assert_serves(honest, host)
        assert not owes(budget), "a handshake that is finished is free"
        assert await answer_to_half_of_a_handshake(host, "127.0.0.1")
        await eventually(lambda: owes(budget))
        with trio.move_on_after(1.0) as scope:
            await answer_to_half_of_a_handshake(host, "127.0.0.2")
        assert scope.cancelled_caught, "its network has to wait"
        assert await answer_to_half_of_a_handshake(host, "127.0.1.1")
        await assert_serves(honest, host)


@watched
async def test_a_peer_behind_the_router_of_an_attacker_gets_in_once_the_debt_is_paid() -> None:
    rates = CallRates(peer_seconds=0.01, peer_burst_seconds=1e-6, prefix_factor=1.0)
    budget = CallBudget(rates)
    async with open_host(LOOPBACK) as host, open_host() as newcomer:
        host._swarm.handshakes = Handshakes(budget)
        await answer_to_half_of_a_handshake(host, "127.0.0.1")
        await eventually(lambda: owes(budget))
        await assert_serves(newcomer, host)


@watched
async def test_a_relay_pays_for_handshakes_that_come_through_its_circuits() -> None:
    budget = CallBudget(CallRates(peer_seconds=1e-6, peer_burst_seconds=1e-6, prefix_factor=1.0))
    async with open_host(LOOPBACK) as host, open_host() as relay:
        host._swarm.handshakes = Handshakes(budget)

        async def accept(stream: Stream) -> None:
            with suppress(UnreachableError):
                await host._connections.adopt(RelayedStream(stream), relay.peer_id, initiator=False)

        async def answer_through_a_circuit() -> bytes:
            stream = await relay.open_stream(host.peer_id, "/c/1", addresses=host.addresses, timeout=TIMEOUT)
            try:
                await stream.send_all(HALF_OF_A_HANDSHAKE)
                return await stream.receive_some(1000)
            finally:
                await stream.reset()

        host.serve("/c/1", accept)
        assert await answer_through_a_circuit()
        await eventually(lambda: budget.delay(trio.current_time(), "", relay.peer_id) != 0.0)
        assert not owes(budget), "direct connections from the relay's network are others"
        with trio.move_on_after(1.0) as scope:
            await answer_through_a_circuit()
        assert scope.cancelled_caught, "the relay has to wait"


async def until_closed(tcp: trio.SocketStream) -> None:
    try:
        while await tcp.receive_some(1000):
            pass
    except trio.BrokenResourceError:
        pass


# -- memory


async def send_unfinished(stream: Stream) -> None:
    """Return a record message of the largest size without its last byte."""
    try:
        await stream.send_all(MAX_MESSAGE_BYTES.to_bytes(4, "big"))
        await stream.send_all(bytes(MAX_MESSAGE_BYTES - 1))
    except (StreamBrokenError, ClosedError):
        pass


async def open_and_send(attacker: Libp2pTransport, host: Libp2pTransport, protocol: str) -> None:
    try:
        stream = await attacker.open_stream(host.peer_id, protocol, addresses=host.addresses, timeout=TIMEOUT)
    except UnreachableError:
        return
    await send_unfinished(stream)


async def flood_with_unfinished(
    attackers: list[Libp2pTransport], host: Libp2pTransport, protocol: str
) -> None:
    """Open 120 streams for each attacker. Return when every byte was sent, or its stream was reset."""
    for attacker in attackers:
        await attacker.dial(host.addresses[0], timeout=TIMEOUT)
    async with trio.open_nursery() as nursery:
        for attacker in attackers:
            for _ in range(120):
                nursery.start_soon(open_and_send, attacker, host, protocol)


@watched
async def test_unfinished_record_messages_hold_little_memory() -> None:
    """Two connections have 120 streams each: 240 MiB, if all were held."""
    async with open_peer() as (_, host), open_host() as one, open_host() as other:
        before = psutil.Process().memory_info().rss
        await flood_with_unfinished([one, other], host, PROTOCOL)
        assert psutil.Process().memory_info().rss - before < 120 * MIB
        assert host._connections.memory.held() <= 2 * 8 * MIB + 2 * MIB
        async with open_peer(host.addresses[0]) as (newcomer, _):
            assert [contact.peer_id for contact in newcomer.records.contacts] == [host.peer_id]


@watched
async def test_strangers_share_one_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget covers all protocols. The peers that hold most lose streams, and an honest message arrives."""
    monkeypatch.setattr(
        memory_budget.MemoryBudget.__init__,
        "__kwdefaults__",
        {"strangers_bytes": 8 * MIB, "total_bytes": 32 * MIB},
    )
    most = 0

    async def receive(stream: Stream) -> None:
        nonlocal most
        message = await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)
        most = max(most, host._connections.memory.held())
        assert message is not None
        await send_message(stream, len(message).to_bytes(4, "big"))

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, host._connections.memory.held())
            await trio.lowlevel.checkpoint()

    async with open_host(LOOPBACK) as host, open_host() as one, open_host() as other, open_host() as honest:
        host.serve("/receives/1", receive)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await flood_with_unfinished([one, other], host, "/receives/1")
            stream = await honest.open_stream(
                host.peer_id, "/receives/1", addresses=host.addresses, timeout=TIMEOUT
            )
            await send_message(stream, bytes(MIB // 2))
            assert await receive_message(stream) == (MIB // 2).to_bytes(4, "big")
            nursery.cancel_scope.cancel()
        assert MIB < most <= 8 * MIB + 64 * 1024


# -- dials


class Liar:
    """Answer each record call with eight invented peers, each with many addresses at a third party."""

    def __init__(self, port: int) -> None:
        self.answers = 0
        self._port = port

    def _invented(self) -> tuple[Contact, ...]:
        ids = [Ed25519Signer(next(seeds)).peer_id for _ in range(8)]
        return tuple(
            Contact(peer_id, tuple(f"/ip4/127.0.0.1/tcp/{self._port}/p2p/{peer_id}" for _ in range(6)))
            for peer_id in ids
        )

    def _answer(self, request: Request) -> Stored | Found | LocateAnswer:
        self.answers += 1
        match request:
            case Store(_, records):
                return Stored(self._invented(), records[:1], ("",) * len(records), 0)
            case Find():
                return Found(self._invented(), ())
            case Locate():
                return LocateAnswer(self._invented())

    async def serve(self, stream: Stream) -> None:
        while (message := await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)) is not None:
            await send_message(stream, encode(self._answer(decode_request(message))))


@watched
async def test_dials_of_invented_contacts_are_bounded() -> None:
    """Without the budget, six answers caused 206 connections to the third party."""
    connections = 0

    async def count(tcp: trio.SocketStream) -> None:
        nonlocal connections
        connections += 1
        await tcp.aclose()

    async with trio.open_nursery() as nursery, open_host(LOOPBACK) as attacker:
        listeners = await nursery.start(partial(trio.serve_tcp, host="127.0.0.1"), count, 0)
        liar = Liar(listeners[0].socket.getsockname()[1])
        attacker.serve(PROTOCOL, liar.serve)
        began = trio.current_time()
        async with open_peer(attacker.addresses[0]) as (victim, _):
            while liar.answers < 12:
                await victim.records.find(sha256(bytes([liar.answers])).digest())
        elapsed = trio.current_time() - began
        assert 0 < connections <= HOST_FAILURES + HOST_FAILURES_PER_SECOND * elapsed + 1
        nursery.cancel_scope.cancel()


@watched
async def test_names_from_strangers_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[object] = []

    def look_up(*arguments: object) -> list[object]:
        looked_up.append(arguments[0])
        raise OSError("no name server here")

    async with open_host(LOOPBACK) as host, open_host(LOOPBACK) as other:
        await host.dial(other.addresses[0], timeout=TIMEOUT)
        stranger = Ed25519Signer(next(seeds)).peer_id
        monkeypatch.setattr("socket.getaddrinfo", look_up)
        for kind in ("dns", "dns4", "dns6"):
            address = f"/{kind}/slow.example/tcp/4001/p2p/{stranger}"
            with pytest.raises(UnreachableError, match="not looked up"):
                await host.open_stream(stranger, PROTOCOL, addresses=[address], timeout=TIMEOUT)
        assert looked_up == []
        with pytest.raises(UnreachableError, match=r"slow\.example is not known"):
            await host.dial(f"/dns4/slow.example/tcp/4001/p2p/{stranger}", timeout=TIMEOUT)
        assert looked_up == ["slow.example"]
