"""Mixing between small groups, simulated: how fast the anchors of 10 to 1,000 peers come together.

Each peer has a vector of random values. In each round it draws its cell as p2pavg does, peers of a cell form groups in
the order in which they happen to arrive, and those left over form groups in the common place. Members take their
group's average, or NoLoCo's step towards it. The figure is the factor by which a round multiplies the mean squared
distance from the mean of all peers, over --rounds rounds.

The last column has peers that keep their coordinates on a grid of one more dimension than necessary for lines of 16, as
in Moshpit, but in pairs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from p2pavg.group.places.gossip import stages_of
from p2pavg.optim.mixing.mixing import contraction

PEERS = (10, 30, 100, 300, 1000)
VALUES = 64
Vectors = NDArray[np.float64]


@dataclass
class Mixing:
    """A simulated run.

    Args:
        peers: number of peers.
        group_size: of a group.
        momentum, lr: of the outer step; 0 and 1 for averages alone.
        side: peers along a line of a fixed grid; 0 for cells that are drawn anew for each round.
        seed: of the vectors and of the peers' order of arrival.
    """

    peers: int
    group_size: int = 2
    momentum: float = 0.0
    lr: float = 1.0
    side: int = 0
    seed: int = 0
    left_over: list[float] = field(default_factory=list)
    """Part of the peers that found no group in each round."""
    crowd: int = 0
    """Largest number of peers that looked in one place."""

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self.ids = [f"peer {index}" for index in range(self.peers)]
        self.anchors: Vectors = self._random.standard_normal((self.peers, VALUES))
        self._momenta: Vectors = np.zeros_like(self.anchors)
        self._last: list[tuple[int, ...]] = [()] * self.peers

    @property
    def distance(self) -> float:
        """The mean squared distance from the mean of all peers."""
        away = self.anchors - self.anchors.mean(0)
        return float(np.square(away).sum(1).mean())

    def run(self, rounds: int) -> list[float]:
        """Return the distance before the first round and after each."""
        found = [self.distance]
        for number in range(rounds):
            self._round(number)
            found.append(self.distance)
        return found

    def _round(self, number: int) -> None:
        searches = [
            stages_of(
                peer,
                number,
                self.peers,
                [self.ids[one] for one in self._last[index]],
                group_size=self.group_size,
                seconds=1.0,
                patience=1.0,
            )
            for index, peer in enumerate(self.ids)
        ]
        waiting = list(self._random.permutation(self.peers))
        for stage in range(1 if self.side else max(map(len, searches))):
            places: dict[Hashable, list[int]] = {}
            for index in waiting:
                chosen = searches[index][min(stage, len(searches[index]) - 1)]
                place = self._line(number, index) if self.side else chosen.meeting.place
                places.setdefault(place, []).append(int(index))
            self.crowd = max([self.crowd, *map(len, places.values())])
            met = [group for there in places.values() for group in self._groups(there, searches, stage)]
            for group in met:
                self._step(group)
            gone = {index for group in met for index in group}
            waiting = [index for index in waiting if index not in gone]
        self.left_over.append(len(waiting) / self.peers)

    def _line(self, number: int, index: int) -> Hashable:
        axes = max(int(np.ceil(np.log(self.peers) / np.log(self.side))), 1)
        point = [index // self.side**axis % self.side for axis in range(axes)]
        point[number % axes] = -1
        return tuple(point)

    def _groups(self, there: Sequence[int], searches: Sequence[Any], stage: int) -> list[tuple[int, ...]]:
        """Return the groups that peers form in the order of their arrival; the last ones may be left over."""
        groups: list[list[int]] = []
        for index in there:
            own = searches[index]
            avoid = own[min(stage, len(own) - 1)].meeting.avoid if not self.side else frozenset()
            open_ones = (
                group
                for group in groups
                if len(group) < self.group_size and not avoid & {self.ids[one] for one in group}
            )
            group = next(open_ones, None)
            if group is None:
                groups.append([index])
            else:
                group.append(index)
        least = 2 if stage or self.side else self.group_size
        return [tuple(group) for group in groups if len(group) >= least]

    def _step(self, group: Iterable[int]) -> None:
        members = list(group)
        away = self.anchors[members] - self.anchors[members].mean(0)
        self._momenta[members] = self.momentum * self._momenta[members] - self.lr * away
        self.anchors[members] += self._momenta[members]
        for index in members:
            self._last[index] = tuple(one for one in members if one != index)


def factor(distances: Sequence[float]) -> float:
    """Return the factor of a round, as the geometric mean over all."""
    return float((distances[-1] / distances[0]) ** (1 / (len(distances) - 1)))


def measured(peers: int, rounds: int, **options: Any) -> tuple[float, Mixing]:
    """Return the factor of a round, and the run."""
    run = Mixing(peers, **options)
    return factor(run.run(rounds)), run


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench mixing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default=",".join(map(str, PEERS)))
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    columns = (
        "peers",
        "pairs",
        "left over",
        "most in one place",
        "groups of 4",
        "of 8",
        "NoLoCo",
        "fixed grid",
    )
    table = Table(
        *columns, title=f"factor of the mean squared distance in a round, over {given.rounds} rounds"
    )
    noloco = {"momentum": 0.5, "lr": 0.7}
    for peers in map(int, given.peers.split(",")):
        pairs, run = measured(peers, given.rounds)
        four, eight = (measured(peers, given.rounds, group_size=size)[0] for size in (4, 8))
        slower = measured(peers, given.rounds, **noloco)[0]
        fixed = measured(peers, given.rounds, side=max(round(peers ** (1 / 3)), 2))[0]
        left = 100 * float(np.mean(run.left_over))
        table.add_row(
            str(peers),
            f"{pairs:.3f}",
            f"{left:.1f} %",
            str(run.crowd),
            *(f"{value:.3f}" for value in (four, eight, slower, fixed)),
        )
    theory = [contraction(0.0, 1.0, size) for size in (2, 4, 8)] + [contraction(0.5, 0.7, 2)]
    two, *others = (f"{value:.3f}" for value in theory)
    table.add_row("theory", two, "", "", *others, "")
    Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
