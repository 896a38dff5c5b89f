"""Two peers that listen nowhere meet through a third one, which can neither read, change nor pretend anything."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import trio

from p2pavg.base.errors import RefusedError, StreamBrokenError, UnreachableError
from p2pavg.net.libp2p.transport import Libp2pTransport
from p2pavg.net.nat.relay.messages import (
    CIRCUIT_PROTOCOL,
    PROTOCOL,
    Connected,
    Incoming,
    RelayRefusal,
    decode,
)
from p2pavg.net.transport import Stream, receive_message, send_message
from tests.integration.hosts import LOOPBACK, TIMEOUT, assert_serves, eventually, open_host, watched
from tests.integration.libp2p_hosts import hold
from tests.integration.relay.meeting import (
    Change,
    ask,
    behind,
    change_bytes,
    connections_to,
    echoed,
    give_up_relays,
    open_echo,
    open_relay,
    refusal,
    relay_and_two,
    service_of,
)
from tests.transport_conformance import ECHO

SECRET = b"a secret that no relay may read. " * 8


def assert_not_connected(host: Libp2pTransport, peer: Libp2pTransport) -> None:
    assert not host.is_connected(peer.peer_id)


@watched
async def test_two_peers_that_listen_nowhere_meet_through_a_third() -> None:
    async with relay_and_two() as (relay, here, there):
        assert all(relay.peer_id in address for address in (*here.addresses, *there.addresses))
        stream = await open_echo(here, there)
        assert stream.remote == there.peer_id
        assert stream.relayed
        assert here.path_to(there.peer_id) == there.path_to(here.peer_id) == "relayed"
        assert here.path_to(relay.peer_id) == "direct"
        for size in (1, 1000, 250_000):
            assert await echoed(stream, SECRET[:1] * size) == SECRET[:1] * size
        await assert_serves(there, here)
        assert len(connections_to(here, there)) == 1


@watched
async def test_a_relay_sees_only_what_is_encrypted() -> None:
    async with relay_and_two() as (relay, here, there):
        seen = {"to target": b"", "to source": b""}

        def look(direction: str) -> Callable[[bytes], bytes]:
            def keep(piece: bytes) -> bytes:
                seen[direction] += piece
                return piece

            return keep

        change_bytes(relay, lambda: look("to target"), lambda: look("to source"))
        stream = await open_echo(here, there)
        assert await echoed(stream, SECRET) == SECRET
        for found in seen.values():
            assert len(found) > len(SECRET)
            assert SECRET[:33] not in found
            assert there.peer_id.encode() not in found


def at(offset: int, change: Callable[[bytes, int], bytes]) -> Callable[[], Change]:
    """Change the piece of each circuit in which the byte at ``offset`` is."""

    def begin() -> Change:
        passed = 0

        def changed(piece: bytes) -> bytes:
            nonlocal passed
            start, passed = passed, passed + len(piece)
            return change(piece, offset - start) if start <= offset < passed else piece

        return changed

    return begin


CHANGES: dict[str, Callable[[bytes, int], bytes]] = {
    "changed": lambda piece, i: piece[:i] + bytes([piece[i] ^ 1]) + piece[i + 1 :],
    "dropped": lambda piece, i: piece[:i] + piece[i + 1 :],
    "repeated": lambda piece, i: piece[:i] + piece[i : i + 1] + piece[i:],
    "a piece dropped": lambda _piece, _i: b"",
    "a piece repeated": lambda piece, _i: piece + piece,
    "a piece invented": lambda piece, _i: b"\x00\x10" + bytes(16) + piece,
}


def assert_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    """A hostile relay is no bug of this process."""
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR and "p2pavg" in each.name]


async def until_apart(here: Libp2pTransport, there: Libp2pTransport) -> None:
    await eventually(lambda: not here.is_connected(there.peer_id))
    await eventually(lambda: not there.is_connected(here.peer_id))


@pytest.mark.parametrize("direction", ["to_target", "to_source"])
@watched
async def test_bytes_that_a_relay_changes_end_the_connection_and_nothing_false_arrives(
    direction: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with relay_and_two() as (relay, here, there):
        for change in CHANGES.values():
            # The handshakes take fewer than 2000 bytes, so the change comes within the messages.
            change_bytes(relay, **{direction: at(6000, change)})
            stream = await open_echo(here, there)
            with pytest.raises(StreamBrokenError):
                await exchange(stream, 20)
            await until_apart(here, there)
        await eventually(lambda: not service_of(relay).budget.circuits)
        assert here.is_connected(relay.peer_id)
        assert there.is_connected(relay.peer_id)
        change_bytes(relay)
        await assert_serves(here, there)
    assert_no_errors(caplog)


async def exchange(stream: Stream, count: int) -> None:
    for number in range(count):
        message = bytes([number]) * 1000
        assert await echoed(stream, message) == message


@pytest.mark.parametrize("direction", ["to_target", "to_source"])
@watched
async def test_bytes_that_a_relay_changes_in_a_handshake_cost_the_circuit(
    direction: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def try_it(here: Libp2pTransport, there: Libp2pTransport) -> None:
        await exchange(await open_echo(here, there), 3)

    async with relay_and_two() as (relay, here, there):
        for offset in (0, 1, 25, 60, 130, 200, 301):
            change_bytes(relay, **{direction: at(offset, CHANGES["changed"])})
            with pytest.raises((UnreachableError, StreamBrokenError)):
                await try_it(here, there)
            await until_apart(here, there)
        change_bytes(relay)
        await assert_serves(here, there)
    assert_no_errors(caplog)


@watched
async def test_another_peer_at_the_end_of_a_circuit_is_refused() -> None:
    """The relay joins the asking peer with itself, or with another peer behind it."""
    async with relay_and_two() as (relay, here, there), behind(relay) as impostor:
        service: Any = service_of(relay)
        reach = service._reach
        service._reach = lambda _target, source: reach(impostor.peer_id, source)
        with pytest.raises(UnreachableError):
            await open_echo(here, there)
        await eventually(lambda: not service.budget.circuits)
        for peer in (there, impostor):
            assert_not_connected(here, peer)
            assert_not_connected(peer, here)


@watched
async def test_a_circuit_of_another_peer_than_the_named_one_is_refused() -> None:
    async with relay_and_two() as (relay, here, there), behind(relay) as named:
        service: Any = service_of(relay)
        reach = service._reach
        service._reach = lambda target, _source: reach(target, named.peer_id)
        with pytest.raises((UnreachableError, StreamBrokenError)):
            await echoed(await open_echo(here, there), SECRET)
        await eventually(lambda: not here.is_connected(there.peer_id))
        assert_not_connected(there, here)
        assert_not_connected(there, named)


@watched
async def test_a_circuit_to_a_peer_without_a_reservation_is_refused() -> None:
    async with relay_and_two() as (relay, here, there), open_host() as visitor:
        await visitor.dial(relay.addresses[0], timeout=TIMEOUT)
        give_up_relays(there)
        await eventually(lambda: there.peer_id not in service_of(relay).budget.reserved)
        assert "no reservation" in await refusal(here, relay, there.peer_id)
        assert "no reservation" in await refusal(here, relay, relay.peer_id)
        address = f"{relay.addresses[0]}/p2p-circuit/p2p/{there.peer_id}"
        with pytest.raises(UnreachableError, match="has no reservation at this relay"):
            await visitor.dial(address, timeout=TIMEOUT)


@watched
async def test_chains_of_relays_are_refused() -> None:
    async with relay_and_two() as (_, here, there):
        stream = await here.open_stream(there.peer_id, PROTOCOL, addresses=there.addresses, timeout=TIMEOUT)
        assert stream.relayed
        await send_message(stream, Incoming(here.peer_id).encode())
        answer = decode(await receive_message(stream) or b"")
        assert answer == RelayRefusal("a relay is not asked through a relay")
        stream = await here.open_stream(there.peer_id, CIRCUIT_PROTOCOL, timeout=TIMEOUT)
        await send_message(stream, Incoming(here.peer_id).encode())
        assert isinstance(decode(await receive_message(stream) or b""), RelayRefusal)


@watched
async def test_a_peer_that_cannot_be_dialled_is_no_relay() -> None:
    async with relay_and_two() as (relay, here, _), open_host() as hidden:
        await hidden.dial(relay.addresses[0], timeout=TIMEOUT)
        assert await refusal(relay, here, hidden.peer_id) == "this peer cannot be dialled itself"


@watched
async def test_a_circuit_from_a_peer_that_is_no_relay_of_this_one_is_refused() -> None:
    async with open_relay() as relay, behind(relay) as here, open_host(LOOPBACK) as stranger:
        await here.dial(stranger.addresses[0], timeout=TIMEOUT)
        give_up_relays(here)
        await eventually(lambda: not here.addresses)
        stream = await stranger.open_stream(here.peer_id, CIRCUIT_PROTOCOL, timeout=TIMEOUT)
        await send_message(stream, Incoming(relay.peer_id).encode())
        assert decode(await receive_message(stream) or b"") == RelayRefusal(
            "this peer has no reservation there"
        )


@watched
async def test_a_stream_to_a_relay_that_begins_with_anything_else_is_dropped() -> None:
    async with relay_and_two() as (relay, here, there):
        for first in (Connected().encode(), Incoming(there.peer_id).encode(), b"\xc1"):
            stream = await here.open_stream(relay.peer_id, PROTOCOL, timeout=TIMEOUT)
            await send_message(stream, first)
            with pytest.raises(StreamBrokenError):
                await receive_message(stream)
        await assert_serves(here, there)


@watched
async def test_what_was_sent_before_a_close_arrives() -> None:
    """As over TCP, although the relay still holds most of it when the sender closes."""
    arrived = b""
    done = trio.Event()

    async def take(stream: Stream) -> None:
        nonlocal arrived
        await receive_message(stream)
        await send_message(stream, Connected().encode())
        while piece := await stream.receive_some(4096):
            arrived += piece
        done.set()

    async with relay_and_two(mbps=1.0) as (relay, here, there):
        there.serve(CIRCUIT_PROTOCOL, take)
        stream, answer = await ask(here, relay, there.peer_id)
        assert answer == Connected()
        sent = bytes(range(256)) * 400
        await stream.send_all(sent)
        await stream.aclose()
        await done.wait()
        assert arrived == sent
        await eventually(lambda: not service_of(relay).budget.circuits)


@watched
async def test_a_transport_closes_its_circuits_before_the_connections_that_carry_them() -> None:
    """Otherwise its last words would be lost at the relay."""
    orderly: list[bool] = []
    async with open_relay(mbps=1.0) as relay, behind(relay) as there:
        service: Any = service_of(relay)
        join = service._join

        async def joined(*args: Any) -> list[Stream]:
            complete: list[Stream] = await join(*args)
            orderly.append([stream.remote for stream in complete] == [there.peer_id])
            return complete

        service._join = joined
        async with behind(relay) as here:
            there.serve("/silent/1", hold)
            stream = await here.open_stream(
                there.peer_id, "/silent/1", addresses=there.addresses, timeout=TIMEOUT
            )
            await send_message(stream, bytes(50_000))
        await eventually(lambda: bool(orderly))
        assert orderly == [True]


@watched
async def test_a_relay_counts_what_it_carries_for_others() -> None:
    async with relay_and_two() as (relay, here, there):
        before = relay.relayed_bytes
        stream = await open_echo(here, there)
        assert await echoed(stream, b"x" * 100_000) == b"x" * 100_000
        assert relay.relayed_bytes >= before + 200_000, "both directions"
        assert here.relayed_bytes == 0


@watched
async def test_a_relay_whose_process_has_ended_is_no_proof_of_its_peers_end() -> None:
    end, ended = trio.Event(), trio.Event()

    async def relaying(*, task_status: Any) -> None:
        async with open_relay() as relay:
            task_status.started(relay)
            await end.wait()
        ended.set()

    async with trio.open_nursery() as nursery:
        relay = await nursery.start(relaying)
        async with behind(relay) as here, behind(relay) as there:
            addresses = list(there.addresses)
            end.set()
            await ended.wait()
            await eventually(lambda: not here.is_connected(relay.peer_id))
            with pytest.raises(UnreachableError) as raised:
                await here.open_stream(there.peer_id, ECHO, addresses=addresses, timeout=TIMEOUT)
            assert not isinstance(raised.value, RefusedError)
