"""Many simulated peers: the real matchmaker and record node on a virtual clock, over a network in memory.

The peers join the network one after the other, and then open their averagers one after the other. When all have done
so, the rounds begin. All peers want groups of one size. In each round, each becomes ready at a random moment within a
second. Seconds are virtual; ``wall time`` is the duration of the simulation. Calls and bytes of a round are those of
the calls that a peer makes from the begin of the rounds until its own results; those of the start are until the rounds
begin.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import trio

import p2pavg
from p2pavg.peer.peer import Peer
from p2pavg.testing import MemoryNetwork, run_peers, simulate
from scripts.benchmarks.figures import Report

NAME = "scale"
LATENCY = (0.005, 0.05)
READY_WITHIN = 1.0
STAYS_OPEN = 5.0
"""Seconds until a peer with its result closes its averager. Its readiness record is withdrawn by then, as it is in a
run that trains on; and it answers those that still read it."""
ELEMENTS = 64
RARE_COLLECTIONS = (200_000, 50, 100)
"""Thresholds of the garbage collector. With Python's own, it looks through a thousand peers all the time."""


@dataclass(slots=True)
class Traffic:
    """Calls of record nodes, and their bytes both ways."""

    calls: int = 0
    bytes: int = 0


class Swarm:
    """One run with a number of peers, and its counters."""

    def __init__(self, peers: int, arguments: argparse.Namespace) -> None:
        self.peers = peers
        self.every = arguments.join_every
        self.rounds = arguments.rounds
        self.dice = random.Random(arguments.seed)
        self.network = MemoryNetwork(seed=arguments.seed, latency=LATENCY)
        self.config = p2pavg.AveragingConfig(
            run_id="scale",
            group_size=arguments.group_size,
            min_group_size=2,
            match_timeout=arguments.match_timeout,
        )
        self.start = Traffic()
        self.traffic = self.start
        """What is counted now."""
        self.counts: set[str] = set()
        """Peers whose calls are counted, by their ids."""
        self._open = 0
        self._all_open = trio.Event()
        self.to_group: list[float] = []
        self.sizes: list[int] = []
        self.held: list[int] = []
        self.without: int = 0
        """Number of steps without a group or without a result."""

    async def live(self, peer: Peer, index: int) -> None:
        """Run the rounds of one peer."""
        answer: Callable[[str, bytes], bytes] = peer.records.answer
        vars(peer.records)["answer"] = partial(self.counted, answer)
        self.counts.add(peer.id)
        values = torch.full((ELEMENTS,), float(index))
        await trio.sleep(self.every * index)
        async with peer.averager(self.config) as averager:
            averager.declare([values])
            await self.all_open()
            for _ in range(self.rounds):
                await trio.sleep(self.dice.uniform(0.0, READY_WITHIN))
                averager.accumulate([values])
                result = await averager.step(wait=None)
                while isinstance(result, p2pavg.InProgress):
                    result = await averager.step(wait=None)
                if isinstance(result, p2pavg.Success):
                    self.to_group.append(result.duration - result.exchange_duration)
                    self.sizes.append(len(result.peers))
                else:
                    self.without += 1
            self.counts.discard(peer.id)
            # Counted while the others' records are alive: the load of a peer in the middle of a run.
            self.held.append(records_held(peer))
            await trio.sleep(STAYS_OPEN)

    async def all_open(self) -> None:
        """Wait until all peers have opened their averagers. What they send from then on is that of the rounds."""
        self._open += 1
        if self._open == self.peers:
            self.traffic = Traffic()
            self._all_open.set()
        await self._all_open.wait()

    def counted(self, answer: Callable[[str, bytes], bytes], sender: str, request: bytes) -> bytes:
        """Count a call from one peer's record node to another's, and its bytes both ways."""
        answered = answer(sender, request)
        if sender in self.counts:
            self.traffic.calls += 1
            self.traffic.bytes += len(request) + len(answered)
        return answered


def records_held(peer: Peer) -> int:
    """Number of records that each peer keeps for the network."""
    return len(peer.records._store)


def add_arguments(parser: argparse.ArgumentParser, *, small: bool) -> None:
    """The options of this benchmark."""
    parser.add_argument("--peers", default="6" if small else "10,100", help="one run for each number")
    parser.add_argument("--group-size", type=int, default=3 if small else 8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--match-timeout", type=float, default=30.0)
    parser.add_argument(
        "--join-every", type=float, default=0.02, help="virtual seconds between the starts of two peers"
    )
    parser.add_argument("--seed", type=int, default=0)


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Simulate, and report."""
    threads, thresholds = torch.get_num_threads(), gc.get_threshold()
    torch.set_num_threads(1)
    gc.set_threshold(*RARE_COLLECTIONS)
    try:
        for peers in map(int, arguments.peers.split(",")):
            report.note(f"{NAME}: {peers} peers")
            simulate_one(peers, arguments, report)
    finally:
        torch.set_num_threads(threads)
        gc.set_threshold(*thresholds)


def simulate_one(peers: int, arguments: argparse.Namespace, report: Report) -> None:
    """Simulate one number of peers."""
    began = time.monotonic()

    async def main() -> Swarm:
        swarm = Swarm(peers, arguments)
        await run_peers(swarm.network, peers, swarm.live, join_every=swarm.every)
        return swarm

    swarm = simulate(main, seed=arguments.seed)
    wall = time.monotonic() - began
    if not swarm.to_group:
        report.error(NAME, "p2pavg", f"{peers} peers: no group was formed")
        return
    found = sorted(swarm.to_group)
    sizes = {"peers": peers, "group_size": arguments.group_size}
    report.figure(NAME, "ready to group", "s, virtual", found, **sizes)
    late = found[min(int(0.95 * len(found)), len(found) - 1)]
    report.figure(NAME, "ready to group, 95th percentile", "s, virtual", found, median=late, **sizes)
    report.figure(NAME, "group's members", "", swarm.sizes, **sizes)
    report.figure(NAME, "records held by a peer", "", swarm.held, **sizes)
    for what, traffic, times in (("round", swarm.traffic, arguments.rounds), ("start", swarm.start, 1)):
        report.figure(NAME, f"record calls per peer and {what}", "", [traffic.calls / peers / times], **sizes)
        kilobytes = traffic.bytes / 1000 / peers / times
        report.figure(NAME, f"record bytes per peer and {what}", "kB", [kilobytes], **sizes)
    report.figure(NAME, "steps without a result", "", [swarm.without], **sizes)
    report.figure(NAME, "wall time", "s", [wall], **sizes)
