"""Helpers: peers that average round after round, of which one may send false averages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import trio

import p2pavg
from p2pavg.allreduce.values import AttemptData, Combiner
from p2pavg.net.transport import Buffer
from p2pavg.peer.peer import Peer
from p2pavg.testing import MemoryNetwork, simulated_peers
from tests.simulation.liars import name
from tests.simulation.swarm import LAN, config, values

PAUSE = 1.0

Falsify = Callable[[torch.Tensor], None]
"""Changes a part's average, float32, in place."""


def nudge(average: torch.Tensor) -> None:
    """Change the first hundredth of a part, at least one value, by the size of a typical value."""
    average[: max(len(average) // 100, 1)] += 0.5


def lie(monkeypatch: pytest.MonkeyPatch, liar: int, falsify: Falsify = nudge) -> None:
    """Let one peer change each average that it sends."""
    init, combine = AttemptData.__init__, Combiner.combine

    def note(self: AttemptData, **arguments: Any) -> None:
        init(self, **arguments)
        self._combiner.lies = self._ledger.me == name(liar)  # type: ignore[attr-defined]

    def false(
        self: Combiner,
        given: Mapping[str, torch.Tensor | Buffer],
        out: torch.Tensor,
        left_out: torch.Tensor | None = None,
    ) -> memoryview:
        encoded = combine(self, given, out, left_out)
        if not self.lies:  # type: ignore[attr-defined]
            return encoded
        falsify(out)
        if not self._codec.is_identity:
            encoded = self._codec.averages.encode(out)
            self._codec.averages.decode(encoded, len(out), out)
        return encoded

    monkeypatch.setattr(AttemptData, "__init__", note)
    monkeypatch.setattr(Combiner, "combine", false)


class Rounds:
    """The results of peers that average round after round.

    Args:
        elements: length of each vector.
        until: ends the rounds before all are done.
    """

    def __init__(
        self,
        size: int,
        rounds: int,
        *,
        elements: int = 700,
        until: Callable[[Rounds], bool] = lambda _rounds: False,
        **changes: object,
    ) -> None:
        self.results: dict[int, list[p2pavg.RoundResult]] = {index: [] for index in range(size)}
        self.excluded: dict[int, Mapping[str, str]] = {}
        """By peer: the peers that it has excluded with evidence, and why."""
        self._rounds = rounds
        self._elements = elements
        self._until = until
        self._how = config(group_size=size, **{"match_timeout": 3.0, **changes})

    async def run(self, network: MemoryNetwork | None = None) -> None:
        """Let all peers take their rounds."""
        network = network or MemoryNetwork(latency=LAN)
        async with simulated_peers(network, len(self.results)) as peers, trio.open_nursery() as nursery:
            for index, peer in enumerate(peers):
                nursery.start_soon(partial(self._average, peer, index))

    async def _average(self, peer: Peer, index: int) -> None:
        async with peer.averager(self._how) as averager:
            for _ in range(self._rounds):
                averager.clear()
                averager.accumulate([values(index, self._elements)])
                result = await averager.step(wait=None)
                self.results[index].append(result)
                await trio.sleep(PAUSE)  # an audit after the round ends meanwhile
                self.excluded[index] = averager.excluded
                if self._until(self):
                    break

    def rounds_with(self, index: int, other: int) -> int:
        """Return the number of a peer's rounds whose result has another one in it."""
        return sum(name(other) in peers for peers in self.partners(index))

    def is_met(self, index: int, other: int) -> bool:
        """Return whether another peer was in all of a peer's rounds."""
        return self.rounds_with(index, other) == len(self.results[index])

    def partners(self, index: int) -> list[tuple[str, ...]]:
        """Return, for each of a peer's rounds, the ids of the peers that were in its result."""
        return [result.peers if isinstance(result, p2pavg.Success) else () for result in self.results[index]]
