"""Peers that listen nowhere, and relays between them, honest ones and others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from p2pavg.net.libp2p.guarded_yamux import GuardedYamux
from p2pavg.net.libp2p.transport import Libp2pTransport
from p2pavg.net.nat.reach.options import ReachOptions
from p2pavg.net.nat.relay.limits import RelayLimits
from p2pavg.net.nat.relay.messages import PROTOCOL, Connect, RelayMessage, RelayRefusal, decode
from p2pavg.net.nat.relay.service import RelayService
from p2pavg.net.transport import Stream, receive_message, send_message
from tests.integration.hosts import LOOPBACK, TIMEOUT, eventually, open_host
from tests.transport_conformance import ECHO

Change = Callable[[bytes], bytes]


def service_of(relay: Libp2pTransport) -> RelayService:
    return relay._reaching.relay


def give_up_relays(host: Libp2pTransport) -> None:
    """Let a host end its reservations, and take no others."""
    host._reaching._options = replace(host._reaching._options, reachable=False)
    host._reaching.reservations.want(False)


def connections_to(host: Libp2pTransport, peer: Libp2pTransport) -> list[GuardedYamux]:
    return host._connections.of(peer.peer_id)


@asynccontextmanager
async def open_relay(**limits: Any) -> AsyncIterator[Libp2pTransport]:
    async with open_host(LOOPBACK, options=ReachOptions(relay_limits=RelayLimits(**limits))) as relay:
        yield relay


@asynccontextmanager
async def behind(*relays: Libp2pTransport) -> AsyncIterator[Libp2pTransport]:
    """Open a host that listens nowhere, and wait until each of the relays has a reservation for it."""
    async with open_host() as host:
        for relay in relays:
            await host.dial(relay.addresses[0], timeout=TIMEOUT)
        await eventually(lambda: len(host.addresses) == len(relays))
        yield host


@asynccontextmanager
async def two_behind(relay: Libp2pTransport) -> AsyncIterator[tuple[Libp2pTransport, Libp2pTransport]]:
    async with behind(relay) as one, behind(relay) as other:
        yield one, other


@asynccontextmanager
async def relay_and_two(
    **limits: Any,
) -> AsyncIterator[tuple[Libp2pTransport, Libp2pTransport, Libp2pTransport]]:
    async with open_relay(**limits) as relay, two_behind(relay) as (one, other):
        yield relay, one, other


async def open_echo(here: Libp2pTransport, there: Libp2pTransport) -> Stream:
    return await here.open_stream(there.peer_id, ECHO, addresses=there.addresses, timeout=TIMEOUT)


async def echoed(stream: Stream, message: bytes) -> bytes | None:
    await send_message(stream, message)
    return await receive_message(stream)


async def ask(host: Libp2pTransport, relay: Libp2pTransport, target: str) -> tuple[Stream, RelayMessage]:
    """Ask for a circuit. Return its stream, and the relay's answer."""
    stream = await host.open_stream(relay.peer_id, PROTOCOL, addresses=relay.addresses, timeout=TIMEOUT)
    answer = await echoed(stream, Connect(target).encode())
    assert answer is not None
    return stream, decode(answer)


async def refusal(host: Libp2pTransport, relay: Libp2pTransport, target: str) -> str:
    """Ask for a circuit that is refused. Return the reason."""
    stream, answer = await ask(host, relay, target)
    await stream.reset()
    assert isinstance(answer, RelayRefusal)
    return answer.reason


async def open_many(
    host: Libp2pTransport, relay: Libp2pTransport, target: str, count: int
) -> list[RelayMessage]:
    """Ask for many circuits and keep them. Return the answers."""
    return [(await ask(host, relay, target))[1] for _ in range(count)]


class _Changed:
    """A stream of which every piece that is read is changed."""

    def __init__(self, stream: Stream, change: Change) -> None:
        self._stream = stream
        self._change = change

    async def receive_some(self, max_bytes: int) -> bytes:
        piece = await self._stream.receive_some(max_bytes)
        while piece and not (changed := self._change(piece)):
            piece = await self._stream.receive_some(max_bytes)
        return changed if piece else piece

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def unchanged() -> Change:
    return lambda piece: piece


def change_bytes(
    relay: Libp2pTransport,
    to_target: Callable[[], Change] = unchanged,
    to_source: Callable[[], Change] = unchanged,
) -> None:
    """Let a relay pass the bytes of new circuits through functions, each made for one circuit, in the pieces' order."""
    service: Any = service_of(relay)
    carry = partial(RelayService._carry, service)

    async def changed(circuit: Any, one: Stream, other: Stream, back: bool, *rest: Any) -> None:
        source: Any = _Changed(one, (to_source if back else to_target)())
        await carry(circuit, source, other, back, *rest)

    service._carry = changed


@asynccontextmanager
async def many_behind(relay: Libp2pTransport, count: int) -> AsyncIterator[list[Libp2pTransport]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(behind(relay)) for _ in range(count)]
