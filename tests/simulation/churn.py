"""A run whose peers are killed and replaced, on virtual time: the real optimizers, states and averagers.

All peers have links like those of homes, slower one way. Each kill is that of a process: the peer's connections break,
and it says nothing. Each peer that begins has the run's first parameters, and fetches the run's state from the others.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import trio

import p2pavg
from p2pavg.base.result import Success
from p2pavg.data import SharedSampler
from p2pavg.net.addresses import with_peer_id
from p2pavg.optim import AveragedOptimizer, RunState
from p2pavg.optim.base.state import Lineage, digest_of
from p2pavg.peer.averager import DecentralizedAverager
from p2pavg.testing.loops import LoopThread, virtual_threads
from p2pavg.testing.memory import MemoryNetwork
from p2pavg.testing.simulation import cancel_when_crashed, simulate, simulated_peer, simulated_signer

MBIT = 1e6 / 8
STATE_VECTORS = 3
"""Of Adam: the parameters, and two means of their gradients."""
BATCHES = 4
"""Batches that each peer computes between two updates, if all are equally fast."""

UPDATES = 2
"""Updates that a peer may miss, beside those in the time that a snapshot takes on its link."""
CHECK_EVERY = 5
"""Updates between two comparisons of the peers' bits; they are compared at the end too."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A run with churn."""

    peers: int
    seconds: float
    """Of virtual time that are measured, after the start."""
    seed: int = 0
    every: float | None = 20.0
    """Seconds between two kills; each is followed by a join. ``None``: the peers stay."""
    elements: int = 1_000_000
    length: int = 1000
    """Samples of the data, of which each batch has one."""
    log_updates: int = 8
    """Averages that each peer keeps: so few that a peer needs a snapshot, as in a run of days."""
    batch_seconds: tuple[float, float] = (0.1, 0.3)
    """The time that a peer takes for a batch is drawn from this range, once."""
    upload: float = 5.0
    """Mbit/s."""
    download: float = 20.0
    latency: tuple[float, float] = (0.01, 0.04)

    @property
    def fetch_seconds(self) -> float:
        """Time in which the bytes of a snapshot pass through a peer's link."""
        return STATE_VECTORS * 4 * self.elements / (self.download * MBIT)


@dataclass(frozen=True)
class Update:
    """One update of one peer, taken in a round."""

    at: float
    epoch: int
    contributed: bool


@dataclass(frozen=True)
class Followed:
    """A time in which one peer was behind, from its start or its last update to its next one."""

    since: float
    until: float
    missed: int
    """Updates that others took meanwhile."""
    replayed: int
    """Those that it replayed; a snapshot had the others."""

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.until - self.since


@dataclass
class Life:
    """One peer, from its start to its end."""

    index: int
    peer_id: str
    began: float
    updates: list[Update] = field(default_factory=list)
    """Those that it took in a round."""
    followed: list[Followed] = field(default_factory=list)
    """Times in which it missed updates."""
    drawn: list[tuple[int, int]] = field(default_factory=list)
    """Epoch of the data and sample of its batches since the last update that it contributed to."""
    ended: float | None = None
    killed: bool = False

    @property
    def behind_seconds(self) -> float | None:
        """Time from its start to its first update."""
        return self.updates[0].at - self.began if self.updates else None


@dataclass
class Course:
    """Everything that happened in one run."""

    setting: Setting
    lives: list[Life] = field(default_factory=list)
    samples: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Of each update: the time at which the first peer took it, and its samples."""
    weights: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """Of each update: the samples of each member."""
    counted: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Epoch of the data and sample, of all that updates have counted."""
    lineages: dict[int, set[bytes]] = field(default_factory=dict)
    """Of each update: the states of the lineages of all peers that took it."""
    bits: dict[bytes, set[bytes]] = field(default_factory=dict)
    """Of each state of a lineage: digests of parameters and optimizer of the peers that hold it."""
    measured_from: float = 0.0
    ended: float = 0.0

    def goodput(self) -> float:
        """Return the samples in updates per second, while it was measured."""
        counted = sum(
            samples for at, samples in self.samples.values() if self.measured_from < at <= self.ended
        )
        return counted / (self.ended - self.measured_from)

    def update_seconds(self) -> float:
        """Return the mean time between two updates, while it was measured."""
        times = sorted(at for at, _ in self.samples.values() if self.measured_from < at <= self.ended)
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else float("inf")

    def joiners(self) -> list[Life]:
        """Return the peers that began while others trained."""
        return [life for life in self.lives if life.began > self.measured_from]

    def bound(self, updates: float = UPDATES) -> float:
        """Return the time that a peer may be behind: that of a snapshot, and a few updates."""
        return self.setting.fetch_seconds + updates * self.update_seconds()


class Model(torch.nn.Module):
    """One vector, which is drawn towards another one."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.vector = torch.nn.Parameter(torch.zeros(elements))


class Churn:
    """Plays one run; see :func:`play`."""

    def __init__(self, setting: Setting) -> None:
        self.course = Course(setting)
        self._how = setting
        self._dice = random.Random(f"churn/{setting.seed}")
        self._network = MemoryNetwork(
            seed=setting.seed,
            latency=setting.latency,
            bandwidth=setting.upload * MBIT,
            download=setting.download * MBIT,
        )
        self._config = p2pavg.AveragingConfig(
            run_id="churn",
            group_size=min(max(setting.peers, 2), 64),
            match_timeout=10.0,
            exchange_timeout=60.0,
        )
        self._target = torch.randn(setting.elements, generator=torch.Generator().manual_seed(setting.seed))
        self._began = 0
        self._alive: dict[int, Life] = {}
        self._started = trio.Event()
        self._clock = trio.lowlevel.current_clock()
        self._token = trio.lowlevel.current_trio_token()

    async def play(self) -> Course:
        """Run it."""
        how, course = self._how, self.course
        async with trio.open_nursery() as nursery:
            for _ in range(how.peers):
                await self._begin(nursery)
            await self._started.wait()
            course.measured_from = trio.current_time()
            with trio.move_on_after(how.seconds):
                await self._churn(nursery)
            course.ended = trio.current_time()
            nursery.cancel_scope.cancel()
        for life in course.lives:  # a peer may have been killed before it knew of an update that counts it
            last = life.updates[-1].epoch if life.updates else 0
            self._count(
                life,
                next((w for epoch, w in course.weights.items() if epoch > last and life.peer_id in w), {}),
            )
        return course

    def _count(self, life: Life, weights: Mapping[str, float]) -> None:
        """Count the samples that a peer has contributed to an update."""
        if count := round(weights.get(life.peer_id, 0.0)):
            # What it had accumulated before it fell behind was dropped.
            self.course.counted.update(life.drawn[-count:])
            life.drawn.clear()

    async def _churn(self, nursery: trio.Nursery) -> None:
        while True:
            await trio.sleep(self._how.every or self._how.seconds)
            if self._how.every is not None:
                victim = self._dice.choice(sorted(self._alive))
                life = self._alive.pop(victim)
                life.killed = True
                self._network.crash(life.peer_id)
                await self._begin(nursery)

    async def _begin(self, nursery: trio.Nursery) -> None:
        index = self._began
        self._began += 1
        others = [self._alive[each].peer_id for each in sorted(self._alive)]
        bootstrap = [
            address
            for peer_id in self._dice.sample(others, min(len(others), 2))
            for address in with_peer_id([self._network.location_of(peer_id)], peer_id)
        ]
        await nursery.start(self._live, index, bootstrap)

    async def _live(
        self,
        index: int,
        bootstrap: Sequence[str],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,  # type: ignore[name-defined]
    ) -> None:
        life = Life(index, simulated_signer(index).peer_id, trio.current_time())
        self.course.lives.append(life)
        with trio.CancelScope() as scope:
            async with (
                simulated_peer(self._network, index, bootstrap=bootstrap) as peer,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(cancel_when_crashed, peer, scope)
                self._alive[index] = life
                task_status.started()
                async with peer.averager(self._config) as averager:
                    await LoopThread(lambda thread: self._train(thread, averager, life)).run()
                nursery.cancel_scope.cancel()
        self._alive.pop(index, None)
        life.ended = trio.current_time()

    # ------------------------------------------------------------------ one training loop

    def _train(self, thread: LoopThread[None], averager: DecentralizedAverager, life: Life) -> None:
        how = self._how
        model = Model(how.elements)
        adam = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
        seconds = random.Random(f"speed/{how.seed}/{life.index}").uniform(*how.batch_seconds)
        noise = torch.randn(how.elements, generator=torch.Generator().manual_seed(life.index))
        replayed: list[int] = []
        sampler = SharedSampler(how.length, peer_id=life.peer_id)
        samples = iter(sampler)
        optimizer = AveragedOptimizer(
            adam,
            thread.averager(averager),
            target_batch_size=how.peers * BATCHES,
            peers_to_start=how.peers if life.index < how.peers else None,
            state=RunState(model, data=sampler, log_bytes=int(how.log_updates * how.elements * 1.1)),
            on_update=lambda report: replayed.append(report.epoch),
        )
        try:
            while True:
                life.drawn.append((sampler.epoch, next(samples)))
                thread.sleep(seconds)
                model.vector.grad = (model.vector.detach() - self._target).add_(noise)
                report = optimizer.step(samples=1.0)
                if isinstance(report.result, Success):
                    replayed.pop()  # the last one was taken in a round
                    self._note(life, report.result, optimizer.lineage, len(replayed))
                    replayed.clear()
                    if optimizer.epoch % CHECK_EVERY == 0:
                        self._note_bits(optimizer.lineage, model, adam)
        finally:
            if not life.killed:
                self._note_bits(optimizer.lineage, model, adam)

    def _note(self, life: Life, success: Success, lineage: Lineage, replayed: int) -> None:
        now, course = self._clock.current_time(), self.course
        since, before = (life.updates[-1].at, life.updates[-1].epoch) if life.updates else (life.began, 0)
        if lineage.epoch > before + 1:
            life.followed.append(Followed(since, now, lineage.epoch - before - 1, replayed))
        life.updates.append(Update(now, lineage.epoch, life.peer_id in success.weights))
        course.samples.setdefault(lineage.epoch, (now, success.total_weight))
        course.weights.setdefault(lineage.epoch, success.weights)
        self._count(life, success.weights)
        course.lineages.setdefault(lineage.epoch, set()).add(lineage.state)
        if not self._started.is_set():
            self._token.run_sync_soon(self._started.set)

    def _note_bits(self, lineage: Lineage, model: Model, adam: torch.optim.Adam) -> None:
        states = adam.state[model.vector]
        held = [
            model.vector.detach(),
            *(states[name] for name in ("exp_avg", "exp_avg_sq") if name in states),
        ]
        self.course.bits.setdefault(lineage.state, set()).add(digest_of(held))


def findings(course: Course, updates: float = UPDATES) -> list[str]:
    """Return a sentence for each thing that is wrong with a run, its goodput apart.

    Args:
        updates: number of updates that a peer may miss, beside those in the time that a snapshot takes.
    """
    found = [
        f"the peers of update {epoch} are of {len(states)} lineages"
        for epoch, states in course.lineages.items()
        if len(states) > 1
    ]
    found += [
        f"peers of the lineage {state.hex()[:8]}… hold {len(bits)} different states"
        for state, bits in course.bits.items()
        if len(bits) > 1
    ]
    bound = course.bound(updates)
    for life in course.lives:
        found += [
            f"peer {life.index} was behind for {each.seconds:.1f} s from {each.since:.1f} s on, and missed"
            f" {each.missed} updates; {bound:.1f} s are allowed"
            for each in life.followed
            if each.seconds > bound
        ]
        last = life.updates[-1].at if life.updates else life.began
        if not life.killed and course.ended > last + bound:
            found.append(
                f"peer {life.index} has taken no update since {last:.1f} s; the end was at {course.ended:.1f} s"
            )
    return found


def play(setting: Setting) -> Course:
    """Play a run from its start to its end."""

    async def main() -> Course:
        with virtual_threads(trio.lowlevel.current_clock()):
            return await Churn(setting).play()

    torch.set_num_threads(1)
    return simulate(main, seed=setting.seed)
