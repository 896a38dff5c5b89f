"""Runs from start to end on virtual time, whose peers nap, stop and are killed: the real optimizers and averagers.

A nap is a pause of the training loop; the peer's own thread runs on. A stop is that of the whole process, as by
SIGSTOP: it computes nothing, sends nothing and hears nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
import trio

import p2pavg
from p2pavg.net.addresses import with_peer_id
from p2pavg.optim import AveragedOptimizer, LocalUpdates, RunState, diloco
from p2pavg.optim.base.state import digest_of
from p2pavg.peer.averager import DecentralizedAverager
from p2pavg.testing.loops import LoopThread, virtual_threads
from p2pavg.testing.memory import MemoryNetwork
from p2pavg.testing.simulation import cancel_when_crashed, simulate, simulated_peer, simulated_signer

UPDATES = 8
LAST = 3
"""The last updates, after which most of the incidents happen."""
TOLD_SECONDS = 10.0
"""A peer that comes too late learns of the end within this time."""
HORIZON = 240.0
"""A run in which a peer is still there at this time has failed."""


@dataclass(frozen=True, slots=True)
class Incident:
    """A thing that happens to one peer, after one of its updates."""

    kind: str
    """``nap``, ``stop`` or ``kill``."""
    epoch: int
    seconds: float = 0.0
    """Its duration."""
    after: float = 0.0
    """Seconds after the update: a stop and a kill may come in the midst of the next round."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One peer of a run."""

    delay: float
    batch_seconds: float
    incidents: tuple[Incident, ...]
    updates: int = UPDATES
    """It ends its loop after this one."""


@dataclass(frozen=True, slots=True)
class EndSetting:
    """A run."""

    seed: int
    local: bool
    """Trains with :func:`~p2pavg.optim.diloco`; with :class:`~p2pavg.optim.AveragedOptimizer` if false."""
    peers: tuple[Plan, ...]
    match_timeout: float = 30.0


@dataclass(slots=True)
class EndOf:
    """The end of one peer."""

    index: int
    killed: bool = False
    epoch: int = 0
    state: bytes = b""
    bits: bytes = b""
    told: str = ""
    """The text of its RunEndedError."""
    woke_at: float = 0.0
    """The time at which its last incident was over."""
    last_at: float = 0.0
    """The time of its last update, or at which it was told."""
    ended_at: float | None = None


@dataclass(slots=True)
class Ends:
    """The ends of all peers of a run."""

    setting: EndSetting
    peers: list[EndOf] = field(default_factory=list)

    def findings(self) -> list[str]:
        """Return a sentence for each thing that is wrong."""
        found = []
        lived = [peer for peer in self.peers if not peer.killed]
        done = [peer for peer in lived if peer.ended_at is not None and not peer.told]
        for peer in lived:
            if peer.ended_at is None:
                found.append(f"peer {peer.index} is still there, at update {peer.epoch}")
            elif peer.told and peer.last_at > max(peer.woke_at, self._left_at(peer)) + TOLD_SECONDS:
                found.append(f"peer {peer.index} was told {peer.last_at - peer.woke_at:.1f} s after it woke")
        updates = [plan.updates for plan in self.setting.peers]
        found += [f"peer {p.index} ended at update {p.epoch}" for p in done if p.epoch != updates[p.index]]
        if len({(peer.state, peer.bits) for peer in done}) > len(set(updates)):
            found.append("peers ended with different parameters")
        if not done:
            found.append("no peer reached the last update")
        return found

    def _left_at(self, told: EndOf) -> float:
        """Return the time at which the last of the peers that could have helped had gone."""
        return max((p.ended_at or 0.0 for p in self.peers if p is not told and not p.told), default=0.0)


def draw_incident(dice: random.Random, updates: int) -> Incident:
    """Draw an incident; most come at the last updates."""
    late = dice.random() < 0.7
    epoch = dice.randint(updates - LAST, updates) if late else dice.randint(1, updates - LAST - 1)
    kind = dice.choice(("nap", "nap", "stop", "stop", "kill"))
    return Incident(
        kind,
        epoch,
        seconds=0.0 if kind == "kill" else dice.uniform(0.0, 30.0),
        after=0.0 if kind == "nap" else dice.choice((0.0, dice.uniform(0.0, 2.0))),
    )


def draw_setting(seed: int, updates: int = UPDATES) -> EndSetting:
    """Draw a run of 2 to 6 peers; at least two of them are not killed."""
    dice = random.Random(f"ends/{seed}")
    count = dice.choice((2, 3, 3, 4, 4, 5, 6))  # a run of six costs ten times as much as one of two
    peers, killed = [], 0
    for _ in range(count):
        incidents = tuple(draw_incident(dice, updates) for _ in range(dice.choice((0, 1, 1, 2))))
        if any(incident.kind == "kill" for incident in incidents):
            killed += 1
            if killed > count - 2:
                incidents = tuple(incident for incident in incidents if incident.kind != "kill")
                killed -= 1
        pace = dice.choice((0.2, 0.5, 1.0))
        peers.append(Plan(dice.uniform(0.0, 3.0), pace, incidents, updates))
    return EndSetting(seed, dice.random() < 0.5, tuple(peers))


class EndingRun:
    """Plays one run; see :func:`play_ends`."""

    def __init__(self, setting: EndSetting) -> None:
        self.ends = Ends(setting)
        self._how = setting
        self._network = MemoryNetwork(seed=setting.seed, latency=(0.01, 0.04))
        self._config = p2pavg.AveragingConfig(
            run_id="ends", match_timeout=setting.match_timeout, exchange_timeout=2 * setting.match_timeout
        )
        self._clock = trio.lowlevel.current_clock()
        self._token = trio.lowlevel.current_trio_token()
        self._first: str | None = None

    async def play(self) -> Ends:
        """Run it."""
        with trio.move_on_after(HORIZON):
            async with trio.open_nursery() as nursery:
                for index in range(len(self._how.peers)):
                    self.ends.peers.append(EndOf(index))
                    nursery.start_soon(self._live, index, nursery)
        return self.ends

    async def _live(self, index: int, incidents: trio.Nursery) -> None:
        plan, end = self._how.peers[index], self.ends.peers[index]
        await trio.sleep(plan.delay)
        bootstrap = (
            []
            if self._first is None
            else list(with_peer_id([self._network.location_of(self._first)], self._first))
        )
        if self._first is None:
            self._first = simulated_signer(index).peer_id
        with trio.CancelScope() as scope:
            async with (
                simulated_peer(self._network, index, bootstrap=bootstrap) as peer,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(cancel_when_crashed, peer, scope)
                async with peer.averager(self._config) as averager:
                    await LoopThread(lambda thread: self._train(thread, averager, plan, end, incidents)).run()
                nursery.cancel_scope.cancel()
        if not end.killed:
            end.ended_at = trio.current_time()

    def _train(
        self,
        thread: LoopThread[None],
        averager: DecentralizedAverager,
        plan: Plan,
        end: EndOf,
        incidents: trio.Nursery,
    ) -> None:
        model = torch.nn.Linear(4, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        optimizer = self._optimizer(thread, averager, model)
        pending = list(plan.incidents)
        while optimizer.epoch < plan.updates:
            thread.sleep(plan.batch_seconds)
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.01 * (end.index + 1))
            try:
                optimizer.step(samples=8.0)
            except p2pavg.RunEndedError as error:
                end.told, end.last_at = str(error), self._clock.current_time()
                return
            if optimizer.epoch > end.epoch:
                end.epoch, end.last_at = optimizer.epoch, self._clock.current_time()
                end.state = optimizer.lineage.state
            for incident in [each for each in pending if each.epoch <= optimizer.epoch]:
                pending.remove(incident)
                self._suffer(thread, averager.peer_id, incident, end, incidents)
        held = optimizer.anchor if isinstance(optimizer, LocalUpdates) else list(model.parameters())
        end.bits = digest_of(held)

    def _optimizer(
        self, thread: LoopThread[None], averager: DecentralizedAverager, model: torch.nn.Module
    ) -> AveragedOptimizer | LocalUpdates:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        blocking = thread.averager(averager)
        if self._how.local:
            return diloco(inner, blocking, sync_every=4, state=RunState(model))
        target = 16.0 * len(self._how.peers)
        return AveragedOptimizer(inner, blocking, target_batch_size=target, state=RunState(model))

    def _suffer(
        self, thread: LoopThread[None], peer_id: str, incident: Incident, end: EndOf, incidents: trio.Nursery
    ) -> None:
        end.woke_at = self._clock.current_time() + incident.after + incident.seconds
        if incident.kind == "nap":
            thread.sleep(incident.seconds)
            return

        async def happen() -> None:
            await trio.sleep(incident.after)
            if not self._network.has(peer_id) or end.ended_at is not None:
                return
            if incident.kind == "kill":
                end.killed = True
                self._network.crash(peer_id)
                return
            self._network.stop(peer_id)
            await trio.sleep(incident.seconds)
            if self._network.has(peer_id):
                self._network.resume(peer_id)

        async def begin() -> None:
            incidents.start_soon(happen)
            await trio.lowlevel.checkpoint()

        thread.call(begin)
        if incident.kind == "stop" and not incident.after:
            thread.sleep(incident.seconds)  # a stopped process computes nothing


def play_ends(setting: EndSetting) -> Ends:
    """Play a run from its start to its end."""

    async def main() -> Ends:
        with virtual_threads(trio.lowlevel.current_clock()):
            return await EndingRun(setting).play()

    torch.set_num_threads(1)
    return simulate(main, seed=setting.seed)
