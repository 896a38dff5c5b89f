"""Record calls beyond their budget, on the virtual clock: delays, refusals, and no effect on other peers."""

from contextlib import AsyncExitStack

import torch
import trio

import p2pavg
from p2pavg.base.errors import StreamBrokenError
from p2pavg.net.limits.call_budget import CallRates
from p2pavg.net.transport import receive_message, send_message
from p2pavg.runs.records.calls import MAX_STREAMS_PER_PEER
from p2pavg.testing import MemoryNetwork, MemoryTransport
from p2pavg.testing.simulation import simulated_clock, simulated_peer, simulated_signer
from p2pavg_dht import MAX_MESSAGE_BYTES, PROTOCOL, Ed25519Signer, sign_record
from p2pavg_dht.messages import Find, Store, encode
from tests.simulation.swarm import config

SERVER, HONEST = 0, 1
SERVER_ID = simulated_signer(SERVER).peer_id
ATTACKER, *PUBLISHERS = [Ed25519Signer(bytes([number + 1] * 32)) for number in range(21)]
KEY = b"k" * 32
SECONDS = 20.0
RATES = CallRates()


async def flood(attacker: MemoryTransport, question: bytes) -> int:
    """Send questions on the maximum number of streams, each renewed after a reset; return the received bytes."""
    received = 0

    async def ask_on_one_stream() -> None:
        nonlocal received
        stream = await attacker.open_stream(SERVER_ID, PROTOCOL, timeout=10.0)
        try:
            while True:
                await send_message(stream, question)
                answer = await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)
                if answer is None:
                    return
                received += len(answer)
        except StreamBrokenError:
            return

    async def ask_on_and_on() -> None:
        while True:
            await ask_on_one_stream()
            await trio.sleep(0.01)

    with trio.move_on_after(SECONDS):
        async with trio.open_nursery() as nursery:
            for _ in range(MAX_STREAMS_PER_PEER):
                nursery.start_soon(ask_on_and_on)
    return received


async def test_flood_is_limited_and_an_honest_peer_is_answered() -> None:
    network = MemoryNetwork(seed=1)
    async with simulated_peer(network, SERVER) as server, network.transport(ATTACKER) as attacker:
        for publisher in PUBLISHERS:
            record = sign_record(
                publisher, key=KEY, sequence=1, expiration_time=simulated_clock() + 600.0, value=bytes(3200)
            )
            server.records.answer(publisher.peer_id, encode(Store((), (record,))))
        await attacker.dial(server.addresses[0], timeout=10.0)
        totals: list[int] = []

        async def attack() -> None:
            totals.append(await flood(attacker, encode(Find((), KEY))))

        async with (
            simulated_peer(network, HONEST, bootstrap=server.addresses) as honest,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(attack)
            while not totals:
                began = trio.current_time()
                assert len(await honest.records.find(KEY)) == len(PUBLISHERS)
                assert trio.current_time() - began < 1.0
                await trio.sleep(2.0)
    one_answer = 70_000
    assert totals[0] > RATES.peer_burst_bytes
    assert (
        totals[0] <= RATES.peer_burst_bytes + RATES.peer_bytes * SECONDS + MAX_STREAMS_PER_PEER * one_answer
    )


async def test_record_streams_of_a_peer_are_limited() -> None:
    network = MemoryNetwork(seed=1)
    async with simulated_peer(network, SERVER) as server, network.transport(ATTACKER) as attacker:
        await attacker.dial(server.addresses[0], timeout=10.0)
        streams = [
            await attacker.open_stream(SERVER_ID, PROTOCOL, timeout=10.0)
            for _ in range(MAX_STREAMS_PER_PEER + 5)
        ]
        await trio.sleep(1.0)
        question, answered = encode(Find((), KEY)), 0
        for stream in streams:
            try:
                await send_message(stream, question)
                answered += await receive_message(stream) is not None
            except StreamBrokenError:
                continue
        assert answered == MAX_STREAMS_PER_PEER


async def test_peers_with_an_averager_for_each_of_many_buckets_find_each_other_for_all() -> None:
    """Each averager has records of its own, and a peer's records are limited. With 64, the last ones found no peer."""
    network = MemoryNetwork(seed=1)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(simulated_peer(network, 0))
        second = await stack.enter_async_context(simulated_peer(network, 1, bootstrap=first.addresses))

        async def step(averager: p2pavg.DecentralizedAverager) -> None:
            averager.accumulate([torch.ones(8)], weight=1.0)
            assert isinstance(await averager.step(wait=None), p2pavg.Success)

        for bucket in range(33):
            how = config(run_id=f"bucket {bucket}", group_size=2)
            averagers = [await stack.enter_async_context(peer.averager(how)) for peer in (first, second)]
            async with trio.open_nursery() as nursery:
                for averager in averagers:
                    nursery.start_soon(step, averager)
            await trio.sleep(1.0)  # the statuses are published
