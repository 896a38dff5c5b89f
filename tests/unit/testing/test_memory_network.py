"""The faults of the network in memory happen as documented. All times are virtual."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from p2pavg.base.errors import StreamBrokenError, UnreachableError
from p2pavg.net.addresses import parse_peer_address
from p2pavg.net.transport import Stream, receive_message, send_message
from p2pavg.testing import MemoryNetwork, MemoryTransport
from p2pavg.testing.memory import MAX_INBOUND_STREAMS, WINDOW_BYTES
from p2pavg_dht import Ed25519Signer

SIGNERS = [Ed25519Signer(bytes([number] * 32)) for number in range(4)]
ECHO = "/echo/1"
HOUR = 3600.0


async def echo(stream: Stream) -> None:
    while (message := await receive_message(stream)) is not None:
        await send_message(stream, message)
    await stream.aclose()


async def take_all(stream: Stream) -> None:
    while await stream.receive_some(65536):
        pass


@asynccontextmanager
async def peers(network: MemoryNetwork, count: int) -> AsyncIterator[list[MemoryTransport]]:
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(network.transport(signer)) for signer in SIGNERS[:count]]
        for peer in made:
            peer.serve(ECHO, echo)
        yield made


async def open_echo(here: MemoryTransport, there: MemoryTransport, timeout: float = 10.0) -> Stream:
    return await here.open_stream(there.peer_id, ECHO, addresses=there.addresses, timeout=timeout)


async def test_a_cut_is_silent_and_heals_in_order(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with peers(network, 2) as (here, there):
        stream = await open_echo(here, there)
        network.cut(here.peer_id, there.peer_id)
        await send_message(stream, b"first")
        await send_message(stream, b"second")
        await trio.sleep(HOUR)
        network.heal(here.peer_id, there.peer_id)
        assert [await receive_message(stream), await receive_message(stream)] == [b"first", b"second"]
        assert trio.current_time() == pytest.approx(HOUR, abs=1.0)


async def test_a_cut_in_flight_is_silent_too(autojump_clock: MockClock) -> None:
    network = MemoryNetwork(latency=(1.0, 1.0))
    async with peers(network, 2) as (here, there):
        stream = await open_echo(here, there)
        await send_message(stream, b"on its way")
        network.cut(here.peer_id, there.peer_id)
        with trio.move_on_after(HOUR) as scope:
            await receive_message(stream)
        assert scope.cancelled_caught


async def test_a_cut_is_between_two_peers_only(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with peers(network, 3) as (here, there, third):
        network.cut(here.peer_id, there.peer_id)
        with pytest.raises(UnreachableError):
            await open_echo(here, there)
        for near, far in ((here, third), (third, there)):
            stream = await open_echo(near, far)
            await send_message(stream, b"hello")
            assert await receive_message(stream) == b"hello"


async def test_a_disconnect_across_a_cut_is_not_heard(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with peers(network, 2) as (here, there):
        await open_echo(here, there)
        network.cut(here.peer_id, there.peer_id)
        await here.disconnect(there.peer_id)
        await trio.sleep(HOUR)
        assert (here.is_connected(there.peer_id), there.is_connected(here.peer_id)) == (False, True)
        network.heal(here.peer_id, there.peer_id)
        await wait_all_tasks_blocked()
        assert not there.is_connected(here.peer_id)


async def test_a_stopped_peer_takes_one_window(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with peers(network, 3) as (here, there, third):
        stream = await open_echo(here, there)
        network.stop(there.peer_id)
        await stream.send_all(bytes(WINDOW_BYTES))
        with trio.move_on_after(HOUR) as scope:
            await stream.send_all(b"x")
        assert scope.cancelled_caught
        with pytest.raises(UnreachableError, match=r"within 5\.0 s"):
            await third.dial(there.addresses[0], timeout=5.0)
        network.resume(there.peer_id)
        later = await open_echo(third, there)
        await send_message(later, b"awake")
        assert await receive_message(later) == b"awake"


async def test_held_frames_arrive_after_resume(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with peers(network, 2) as (here, there):
        stream = await open_echo(here, there)
        network.stop(here.peer_id)
        await send_message(stream, b"held")
        await trio.sleep(HOUR)
        network.resume(here.peer_id)
        assert await receive_message(stream) == b"held"


async def test_a_crash_breaks_connections_at_once(autojump_clock: MockClock) -> None:
    network = MemoryNetwork(latency=(1.0, 1.0))
    async with peers(network, 2) as (here, there):
        served = trio.Event()

        async def serve(_: Stream) -> None:
            try:
                await trio.sleep_forever()
            finally:
                served.set()

        there.serve("/held/1", serve)
        stream = await here.open_stream(there.peer_id, "/held/1", addresses=there.addresses, timeout=HOUR)
        now = trio.current_time()
        network.crash(there.peer_id)
        with pytest.raises(StreamBrokenError):
            await stream.receive_some(1)
        await served.wait()
        assert trio.current_time() == now
        assert not here.is_connected(there.peer_id)
        with pytest.raises(UnreachableError, match="refused"):
            await here.dial(there.addresses[0], timeout=HOUR)
        with pytest.raises(UnreachableError, match="crashed"):
            await there.dial(here.addresses[0], timeout=HOUR)


async def test_a_crash_across_a_cut_is_noticed_at_heal(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with peers(network, 2) as (here, there):
        stream = await open_echo(here, there)
        await send_message(stream, b"its answer is lost")
        network.cut(here.peer_id, there.peer_id)
        network.crash(there.peer_id)
        await trio.sleep(HOUR)
        assert here.is_connected(there.peer_id)
        network.heal(here.peer_id, there.peer_id)
        with pytest.raises(StreamBrokenError, match="gone"):
            await stream.receive_some(1)


async def test_a_crash_ends_a_stop(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with peers(network, 2) as (here, there):
        stream = await open_echo(here, there)
        network.stop(there.peer_id)
        network.crash(there.peer_id)
        with pytest.raises(StreamBrokenError, match="gone"):
            await stream.receive_some(1)


async def test_a_crashed_peer_returns_at_the_same_address(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with peers(network, 2) as (here, there):
        await open_echo(here, there)
        network.crash(there.peer_id)
        async with network.transport(SIGNERS[1]) as again:
            again.serve(ECHO, echo)
            assert again.addresses == there.addresses
            stream = await open_echo(here, again)
            await send_message(stream, b"back")
            assert await receive_message(stream) == b"back"


async def test_dropped_dials_wait_and_an_inbound_connection_ends_the_waiting(
    autojump_clock: MockClock,
) -> None:
    network = MemoryNetwork()
    async with peers(network, 2) as (here, there):
        there.inbound = "dropped"
        with pytest.raises(UnreachableError, match=r"within 30\.0 s"):
            await here.dial(there.addresses[0], timeout=30.0)
        assert trio.current_time() == 30.0

        async def dial_later() -> None:
            await trio.sleep(1.0)
            await there.dial(here.addresses[0], timeout=1.0)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(dial_later)
            await here.open_stream(
                there.peer_id, ECHO, addresses=there.addresses, timeout=30.0, wait_inbound=True
            )
        assert trio.current_time() < 33.0


async def test_one_of_several_addresses_may_be_silent(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with peers(network, 3) as (here, there, third):
        third.inbound = "dropped"
        silent = third.addresses[0].replace(third.peer_id, there.peer_id)
        await here.open_stream(there.peer_id, ECHO, addresses=[silent, *there.addresses], timeout=10.0)
        assert trio.current_time() < 1.0


async def test_more_streams_than_allowed_are_refused(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with peers(network, 2) as (here, there):
        streams = [await open_echo(here, there) for _ in range(MAX_INBOUND_STREAMS)]
        with pytest.raises(UnreachableError, match="at once"):
            await open_echo(here, there)
        await streams.pop().reset()
        await send_message(streams[0], b"meanwhile")
        assert await receive_message(streams[0]) == b"meanwhile"
        await open_echo(here, there)


async def test_two_tasks_may_not_receive_at_once(autojump_clock: MockClock) -> None:
    async with peers(MemoryNetwork(), 2) as (here, there), trio.open_nursery() as nursery:
        stream = await open_echo(here, there)
        nursery.start_soon(stream.receive_some, 1)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await stream.receive_some(1)
        await send_message(stream, b"x")


def note_arrivals(*peers: MemoryTransport) -> list[tuple[str, float]]:
    """Let some peers take what is sent to them; return a list that gets each sender with the time of its last byte."""
    arrived: list[tuple[str, float]] = []

    async def take(stream: Stream) -> None:
        await take_all(stream)
        arrived.append((stream.remote, trio.current_time()))

    for peer in peers:
        peer.serve("/take/1", take)
    return arrived


async def send(here: MemoryTransport, there: MemoryTransport, size: int) -> None:
    stream = await here.open_stream(there.peer_id, "/take/1", addresses=there.addresses, timeout=10.0)
    await stream.send_all(bytes(size))
    await stream.aclose()


@pytest.mark.parametrize("receives", [False, True], ids=["bandwidth", "download"])
async def test_a_link_is_shared_by_all_that_a_peer_sends_or_receives(
    receives: bool, autojump_clock: MockClock
) -> None:
    limits: dict[str, Any] = {"bandwidth": 1e7, "download": 1e6} if receives else {"bandwidth": 1e6}
    async with peers(MemoryNetwork(latency=(0.0, 0.0), **limits), 3) as (here, *others):
        arrived = note_arrivals(here, *others)
        async with trio.open_nursery() as nursery:
            for other in others:
                nursery.start_soon(send, *((other, here) if receives else (here, other)), 1_000_000)
        await trio.sleep(10.0)
        (_, first), (_, last) = arrived
        assert last == pytest.approx(2.0, abs=0.1)
        assert first > 1.5, "one stream was served after the other"


async def test_a_message_does_not_wait_until_other_streams_have_sent_all(autojump_clock: MockClock) -> None:
    network = MemoryNetwork(latency=(0.0, 0.0), bandwidth=1e6)
    async with peers(network, 3) as (here, there, third):
        there.serve("/take/1", take_all)
        echoes = await open_echo(here, third)
        bulk = await here.open_stream(there.peer_id, "/take/1", addresses=there.addresses, timeout=10.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(bulk.send_all, bytes(10_000_000))
            await trio.sleep(1.0)
            began = trio.current_time()
            await send_message(echoes, b"hello")
            assert await receive_message(echoes) == b"hello"
            assert trio.current_time() - began < 0.2
            nursery.cancel_scope.cancel()


async def test_what_a_stream_has_not_sent_is_dropped_when_it_is_reset(autojump_clock: MockClock) -> None:
    network = MemoryNetwork(latency=(0.0, 0.0), bandwidth=1e6)
    async with peers(network, 2) as (here, there):
        there.serve("/take/1", take_all)
        echoes = await open_echo(here, there)
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                bulk = await here.open_stream(
                    there.peer_id, "/take/1", addresses=there.addresses, timeout=10.0
                )
                nursery.start_soon(bulk.send_all, bytes(10_000_000))
            await trio.sleep(1.0)
            nursery.cancel_scope.cancel()
        began = trio.current_time()
        await send_message(echoes, bytes(100_000))
        await receive_message(echoes)
        assert trio.current_time() - began < 0.5, "100 kB there, and back on another link"


async def test_frames_that_wait_for_a_slow_sender_delay_no_others(autojump_clock: MockClock) -> None:
    network = MemoryNetwork(latency=(0.0, 0.0), bandwidth=1e6, download=1e6)
    async with peers(network, 3) as (here, there, third):
        arrived = note_arrivals(here)
        network.limit(there.peer_id, 1e4)
        async with trio.open_nursery() as nursery:
            for by in (there, third):
                nursery.start_soon(send, by, here, 100_000)
        await trio.sleep(20.0)
        assert dict(arrived)[third.peer_id] < 0.5
        assert dict(arrived)[there.peer_id] == pytest.approx(10.0, abs=0.5)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_seed_gives_the_same_times(seed: int) -> None:
    async def arrivals(seed: int) -> list[float]:
        times: list[float] = []
        async with peers(MemoryNetwork(seed=seed, latency=(0.01, 0.5)), 3) as (here, there, third):

            async def exchange(to: MemoryTransport) -> None:
                stream = await open_echo(here, to)
                for _ in range(20):
                    await send_message(stream, b"x")
                    await receive_message(stream)
                    times.append(trio.current_time())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(exchange, there)
                nursery.start_soon(exchange, third)
        return times

    def run(seed: int) -> list[float]:
        return trio.run(arrivals, seed, clock=MockClock(autojump_threshold=0))

    assert run(seed) == run(seed)
    assert run(seed) != run(seed + 2)


async def test_addresses_pass_the_checks_of_real_peers(autojump_clock: MockClock) -> None:
    network = MemoryNetwork()
    async with peers(network, 4) as made:
        addresses = [address for peer in made for address in peer.addresses]
        assert [parse_peer_address(address)[1] for address in addresses] == [peer.peer_id for peer in made]
        assert len(set(addresses)) == len(made)
        with pytest.raises(ValueError, match="already"):
            async with network.transport(SIGNERS[0]):
                pass


@pytest.mark.parametrize(
    "wrong", [{"latency": (0.2, 0.1)}, {"latency": (-1.0, 0.1)}, {"bandwidth": 0.0}, {"download": 0.0}]
)
def test_bad_arguments_of_a_network_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MemoryNetwork(**wrong)  # type: ignore[arg-type]
