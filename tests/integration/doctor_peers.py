"""The networks that the doctor's tests look at: a process with several peers. It runs until its input ends.

It takes one argument, JSON with ``keys`` (names of peers and their key files), ``run`` and ``certificates`` (the files
of a run with an authority). It prints one line of JSON when all peers have published: the first address of each peer.

* ``one`` and ``two`` are one network. They average in the runs of RUNS, and in the run with an authority.
* ``late`` is a network of its own, whose clock is LATE_SECONDS behind.
* ``old`` is a network of its own, and says that it speaks older protocols.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

import torch
import trio

from p2pavg import AveragingConfig, Peer
from p2pavg.group.candidate import ready_key, sign_candidate
from p2pavg.net.libp2p.transport import open_libp2p_transport
from p2pavg.optim.coordination.word import TOPIC, RecipeRecord, encode_word
from p2pavg.peer.peer import peer_over
from p2pavg.runs.membership.run_file import read_run_file
from p2pavg.runs.membership.sealing import sealed_key
from p2pavg.runs.records.board import board_key
from p2pavg.runs.records.calls import RecordCalls
from p2pavg.runs.records.identity import load_seed
from p2pavg.runs.records.run_entry import RunEntry, run_key
from p2pavg_dht import Contact, Ed25519Signer, RecordNode

LATE_SECONDS = 600.0
RUNS = {
    "healthy": ((100, "fp32"), (100, "fp32")),
    "schemas": ((100, "fp32"), (200, "fp32")),
    "codecs": ((100, "fp32"), (100, "fp16")),
}
"""Elements and codec of each peer in each run."""
RECIPES = "recipes"
LATE_RUN = "late"
ABSENT_RUN = "absent"


async def peer(
    stack: AsyncExitStack, key: str, bootstrap: Sequence[str] = (), clock_error: float = 0.0
) -> Peer:
    seed = load_seed(key)
    transport = await stack.enter_async_context(
        open_libp2p_transport(seed=seed, listen=["/ip4/127.0.0.1/tcp/0"])
    )
    opened = peer_over(
        transport, Ed25519Signer(seed), bootstrap=bootstrap, wall_clock=lambda: time.time() + clock_error
    )
    return await stack.enter_async_context(opened)


async def average(peer: Peer, config: AveragingConfig, elements: int) -> None:
    """Begin a round, whose peer publishes its entry; then stay in the run."""
    async with peer.averager(config) as averager:
        averager.accumulate([torch.ones(elements)])
        await averager.step(wait=1.0)
        await trio.sleep_forever()


async def publish_recipes(peers: Sequence[Peer]) -> None:
    """Publish a recipe of each peer, which differ in the learning rate."""
    for number, each in enumerate(peers):
        word = RecipeRecord(
            recipe=bytes([number]) * 32,
            origin=bytes(32),
            tensors=1,
            elements=100,
            fields=(("optimizer", "SGD"), ("lr", f"0.{number + 1}")),
        )
        entry = RunEntry(
            schema_hash=bytes(32),
            tensors=1,
            elements=100,
            codec="fp32",
            group_size=4,
            rule="",
            aggregation="",
        )
        await each.records.publish(run_key(RECIPES), entry.encode(), ttl=600.0)
        await each.records.publish(board_key(RECIPES, TOPIC), encode_word(word), ttl=60.0)


class Unreachable(RecordCalls):
    """The calls of a peer that cannot be reached itself."""

    addresses = ()


async def publish_absent(one: Peer, two: Peer, seed: bytes) -> None:
    """Publish the readiness of a peer that is not there, as it stays behind when a process is killed."""
    gone = Ed25519Signer(seed)
    entry = RunEntry(
        schema_hash=bytes(32), tensors=1, elements=9, codec="fp32", group_size=2, rule="", aggregation=""
    )
    node = RecordNode(signer=gone, rpc=Unreachable(one.context.transport))
    await node.join([Contact(two.id, tuple(two.addresses))])
    now = time.time()
    ready = sign_candidate(
        gone,
        key=ready_key(ABSENT_RUN, entry.schema_hash),
        deadline=now + 60.0,
        expiration_time=now + 120.0,
        weight=1.0,
        bandwidth=10.0,
        codec=entry.codec,
        auxiliary=False,
        addresses=[f"/ip4/127.0.0.1/tcp/1/p2p/{gone.peer_id}"],
    )
    await node.publish(run_key(ABSENT_RUN), entry.encode(), ttl=600.0)
    await node.publish(ready.record.key, ready.record.value, ttl=120.0)


async def published(peer: Peer, key: bytes, count: int) -> None:
    while len(await peer.records.find(key)) < count:
        await trio.sleep(0.05)


async def main(arguments: dict[str, dict[str, str]], run_path: str) -> None:
    keys, certificates, run = arguments["keys"], arguments["certificates"], read_run_file(run_path)
    async with AsyncExitStack() as stack:
        one = await peer(stack, keys["one"])
        two = await peer(stack, keys["two"], one.addresses)
        late = await peer(stack, keys["late"], clock_error=-LATE_SECONDS)
        old = await peer(stack, keys["old"])
        old.greeter._protocols = ("/p2pavg/match/1.0.0", "/p2pavg/records/1.0.0")
        nursery = await stack.enter_async_context(trio.open_nursery())
        for name, each in (("one", one), ("two", two)):
            for run_id, settings in RUNS.items():
                elements, codec = settings[each is two]
                config = AveragingConfig(run_id=run_id, group_size=2, match_timeout=1.0, compression=codec)
                nursery.start_soon(average, each, config, elements)
            sealed = AveragingConfig.from_run(run_path, certificate=certificates[name])
            nursery.start_soon(average, each, sealed, 100)
        await publish_recipes([one, two])
        await publish_absent(one, two, secrets.token_bytes(32))
        await published(one, sealed_key(run.secret, run_key(run.run_id)), 2)
        for run_id in RUNS:
            await published(one, run_key(run_id), 2)
        late_entry = RunEntry(
            schema_hash=bytes(32), tensors=1, elements=9, codec="fp32", group_size=2, rule="", aggregation=""
        )
        await late.records.publish(run_key(LATE_RUN), late_entry.encode(), ttl=500.0)
        peers = {"one": one, "two": two, "late": late, "old": old}
        print(json.dumps({name: each.addresses[0] for name, each in peers.items()}), flush=True)
        await trio.to_thread.run_sync(partial(sys.stdin.read))
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    trio.run(main, given, given["run"])
