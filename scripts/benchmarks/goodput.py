"""Cost of peer deaths in a large run, on virtual time: scripts/bench goodput [--peers 64 --group-size 8 --rounds 12].

Every peer trains for a while, averages, and repeats. In every other round, one peer dies during an exchange and returns
without state after a while. Goodput is the number of samples in some peer's ``Success``, compared with the same run
without deaths.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
import trio

import p2pavg
from p2pavg.allreduce import reduction
from p2pavg.testing import MemoryNetwork, Milestone, simulate, simulated_peer
from p2pavg.testing.simulation import cancel_when_crashed, simulated_signer

TRAIN_SECONDS = (18.0, 20.0)
ABSENT_SECONDS = 10.0
ELEMENTS = 4_000
SAMPLES_PER_SECOND = 10.0


class Run:
    """One run, with or without deaths."""

    def __init__(self, peers: int, group_size: int, rounds: int, *, deaths: bool, seed: int) -> None:
        self.peers = peers
        self.rounds = rounds
        self.deaths = deaths
        self.config = p2pavg.AveragingConfig(
            run_id="goodput",
            group_size=group_size,
            min_group_size=2,
            match_timeout=8.0,
            exchange_timeout=30.0,
            compression=None,
        )
        self.network = MemoryNetwork(seed=seed, latency=(0.005, 0.05), bandwidth=1e6)
        self.dice = random.Random(seed)
        self.samples = 0.0
        self.counted: set[tuple[str, str]] = set()
        self.died = 0
        self.results: dict[str, int] = {}

    async def main(self) -> None:
        """Run until all peers have had time for their rounds."""
        doomed: set[str] = set()

        def reached(peer_id: str, milestone: Milestone) -> None:
            if peer_id in doomed and milestone is Milestone.CONTRIBUTION_SENT:
                doomed.discard(peer_id)
                self.died += 1
                self.network.crash(peer_id)

        self.network.watchers.append(reached)
        seconds = self.rounds * (sum(TRAIN_SECONDS) / 2 + 1.0)
        with trio.move_on_after(seconds + 5.0):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.live, 0, ())
                await trio.sleep(1.0)
                for index in range(1, self.peers):
                    nursery.start_soon(self.live, index, self.addresses(0))
                while self.deaths:
                    await trio.sleep(2 * sum(TRAIN_SECONDS) / 2 + 2.0)
                    doomed.add(simulated_signer(self.dice.randrange(1, self.peers)).peer_id)

    def addresses(self, index: int) -> list[str]:
        """Return the addresses of a peer of this network, at any time."""
        peer_id = simulated_signer(index).peer_id
        return [f"{self.network._location(peer_id)}/p2p/{peer_id}"]

    async def live(self, index: int, bootstrap: list[str]) -> None:
        """Run one peer, restarting it after each death."""
        while True:
            with trio.CancelScope() as scope:
                async with (
                    simulated_peer(self.network, index, bootstrap=bootstrap) as peer,
                    trio.open_nursery() as nursery,
                ):
                    nursery.start_soon(cancel_when_crashed, peer, scope)
                    await self.train(peer, index)
            await trio.sleep(ABSENT_SECONDS)

    async def train(self, peer: p2pavg.Peer, index: int) -> None:
        """Run rounds without end."""
        values = torch.full((ELEMENTS,), float(index))
        async with peer.averager(self.config) as averager:
            while True:
                seconds = self.dice.uniform(*TRAIN_SECONDS)
                await trio.sleep(seconds)
                averager.accumulate([values], weight=seconds * SAMPLES_PER_SECOND)
                result = await averager.step(wait=None)
                while isinstance(result, p2pavg.InProgress):
                    result = await averager.step(wait=None)
                name = type(result).__name__
                self.results[name] = self.results.get(name, 0) + 1
                if isinstance(result, p2pavg.Success):
                    for member, weight in result.weights.items():
                        if (result.group_id, member) not in self.counted:
                            self.counted.add((result.group_id, member))
                            self.samples += weight


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench goodput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--peers", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    vars(reduction)["part_size"] = lambda _elements, _reducers: 64
    samples = []
    for deaths in (False, True):
        began = time.monotonic()
        run = Run(arguments.peers, arguments.group_size, arguments.rounds, deaths=deaths, seed=arguments.seed)
        simulate(run.main, seed=arguments.seed)
        samples.append(run.samples)
        what = f"{run.died} deaths" if deaths else "calm"
        took = time.monotonic() - began
        print(
            f"{what}: {run.samples:.0f} samples averaged; {run.results}; simulated in {took:.0f} s",
            flush=True,
        )
    print(f"goodput with deaths: {100 * samples[1] / samples[0]:.1f} % of the calm run's")


if __name__ == "__main__":
    main()
