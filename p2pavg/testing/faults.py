"""Fault plans for a :class:`~p2pavg.testing.MemoryNetwork`: a test or a seed determines each fault and its moment.

A fault happens at a moment, or when a peer has reached a milestone of a round for the n-th time:

    FaultPlan(
        (
            Fault(Crash(2), After(Milestone.AVERAGE_SENT, count=3)),  # in the middle of its share
            Fault(Stop(0, seconds=20.0), At(1.5)),
            Fault(Partition((0, 1), seconds=5.0), After(Milestone.FORMED, of=0, seconds=0.01)),
        )
    )

Peers are named by their index.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import trio

from p2pavg.group.milestones import Milestone
from p2pavg.net.transport import PeerId
from p2pavg.testing.memory import MemoryNetwork


@dataclass(frozen=True, slots=True)
class At:
    """The moment ``seconds`` after the plan began."""

    seconds: float


@dataclass(frozen=True, slots=True)
class After:
    """The moment ``seconds`` after a peer has reached a milestone for the ``count``-th time.

    ``of`` is that peer; ``None`` stands for the peer that the fault happens to.
    """

    milestone: Milestone
    count: int = 1
    of: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Crash:
    """Kill a peer, like SIGKILL. Its work is cancelled (:func:`~p2pavg.testing.run_peers`)."""

    peer: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Freeze a peer, like SIGSTOP, and resume it after ``seconds``; ``None`` is never."""

    peer: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Break the connections between two peers. They may make new ones."""

    peer: int
    other: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Cut the link between two peers for ``seconds``. Neither peer is told."""

    peer: int
    other: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Partition:
    """Cut the links between these peers and all others for ``seconds``. No peer is told."""

    peers: tuple[int, ...]
    seconds: float | None = None

    @property
    def peer(self) -> int:
        """The peer whose milestones count."""
        return self.peers[0]


@dataclass(frozen=True, slots=True)
class Throttle:
    """Limit a peer to ``bandwidth`` bytes/s for ``seconds``."""

    peer: int
    bandwidth: float
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Delay:
    """Delay the frames from and to a peer for ``seconds``, by a one-way latency that is drawn evenly."""

    peer: int
    latency: tuple[float, float]
    seconds: float | None = None


Happening: TypeAlias = Crash | Stop | Disconnect | Cut | Partition | Throttle | Delay


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, and the moment of it."""

    what: Happening
    when: At | After


class FaultPlan:
    """The faults of one run."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self.faults = tuple(faults)

    def __repr__(self) -> str:
        return f"FaultPlan({list(self.faults)!r})"

    @classmethod
    def draw(cls, seed: int, *, peers: int, faults: int, parts: int = 4, seconds: float = 60.0) -> FaultPlan:
        """Draw faults of any kind, at any point of a round of ``peers`` peers. Equal arguments give equal plans.

        Args:
            parts: about how many parts of each kind a member sends.
            seconds: the longest duration of a fault that ends.
        """
        dice = random.Random(f"faults/{seed}")
        return cls([_draw_fault(dice, peers, parts, seconds) for _ in range(faults)])

    async def carry_out(self, network: MemoryNetwork, peer_ids: Sequence[PeerId]) -> None:
        """Cause the faults, until cancelled."""
        indices = {peer_id: index for index, peer_id in enumerate(peer_ids)}
        reached: Counter[tuple[int, Milestone]] = Counter()
        async with trio.open_nursery() as nursery:

            def count(peer_id: PeerId, milestone: Milestone) -> None:
                if peer_id not in indices:
                    return
                index = indices[peer_id]
                reached[index, milestone] += 1
                for fault in self.faults:
                    when = fault.when
                    if isinstance(when, At) or when.milestone is not milestone:
                        continue
                    of = fault.what.peer if when.of is None else when.of
                    if (of, when.count) == (index, reached[index, milestone]):
                        if when.seconds:
                            nursery.start_soon(
                                _happen_later, network, peer_ids, fault.what, when.seconds, nursery
                            )
                        else:
                            _happen(network, peer_ids, fault.what, nursery)

            network.watchers.append(count)
            for fault in self.faults:
                if isinstance(fault.when, At):
                    nursery.start_soon(
                        _happen_later, network, peer_ids, fault.what, fault.when.seconds, nursery
                    )
            try:
                await trio.sleep_forever()
            finally:
                network.watchers.remove(count)


def _draw_fault(dice: random.Random, peers: int, parts: int, seconds: float) -> Fault:
    peer, other = dice.sample(range(peers), 2)
    some = dice.choice([dice.uniform(0.05, 2.0), dice.uniform(2.0, seconds)])
    kinds: list[Happening] = [
        Crash(peer),
        Crash(peer),
        Stop(peer, some),
        Stop(peer, dice.choice([None, some])),
        Disconnect(peer, other),
        Cut(peer, other, some),
        Partition(tuple(sorted(dice.sample(range(peers), dice.randint(1, peers - 1)))), some),
        Throttle(peer, dice.choice([3e3, 1e4, 1e5]), some),
        Delay(peer, (0.0, dice.choice([0.05, 0.5, 3.0])), some),
    ]
    what = dice.choice(kinds)
    if dice.random() < 0.1:
        return Fault(what, At(dice.uniform(0.0, 5.0)))
    milestone = dice.choice(list(Milestone))
    often = milestone in (Milestone.CONTRIBUTION_SENT, Milestone.AVERAGE_SENT)
    later = dice.choice([0.0, 0.0, dice.uniform(0.0, 0.05), dice.uniform(0.0, 2.0)])
    count = dice.randint(1, max(1, parts * (peers - 1))) if often else 1
    return Fault(what, After(milestone, count, dice.choice([None, dice.randrange(peers)]), later))


async def _happen_later(
    network: MemoryNetwork, peer_ids: Sequence[PeerId], what: Happening, seconds: float, nursery: trio.Nursery
) -> None:
    await trio.sleep(seconds)
    _happen(network, peer_ids, what, nursery)


def _happen(
    network: MemoryNetwork, peer_ids: Sequence[PeerId], what: Happening, nursery: trio.Nursery
) -> None:
    """Cause a fault of a peer that still runs. A fault with a duration is ended by a task of the nursery."""
    here = [peer_id for peer_id in peer_ids if network.has(peer_id)]
    peer_id = peer_ids[what.peer]
    if peer_id not in here:
        return
    links: list[tuple[PeerId, PeerId]] = []
    match what:
        case Crash():
            network.crash(peer_id)
            return
        case Disconnect(_, other):
            network.disconnect(peer_id, peer_ids[other])
            return
        case Stop(_, seconds):
            network.stop(peer_id)
        case Throttle(_, bandwidth, seconds):
            network.limit(peer_id, bandwidth)
        case Delay(_, latency, seconds):
            network.delay(peer_id, latency)
        case Cut(_, other, seconds):
            links = [(peer_id, peer_ids[other])]
        case Partition(inside, seconds):
            links = [
                (peer_ids[one], peer_ids[other])
                for one in inside
                for other in range(len(peer_ids))
                if other not in inside
            ]
    for one, two in links:
        network.cut(one, two)
    if seconds is not None:
        nursery.start_soon(_end_later, network, what, peer_id, links, seconds)


async def _end_later(
    network: MemoryNetwork,
    what: Happening,
    peer_id: PeerId,
    links: Sequence[tuple[PeerId, PeerId]],
    seconds: float,
) -> None:
    await trio.sleep(seconds)
    for one, other in links:
        network.heal(one, other)
    if network.has(peer_id):
        if isinstance(what, Stop):
            network.resume(peer_id)
        if isinstance(what, Throttle):
            network.limit(peer_id, None)
        if isinstance(what, Delay):
            network.delay(peer_id, None)
