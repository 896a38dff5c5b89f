"""A run of synchronous cells whose peers are killed and replaced, on virtual time, with the real optimizers.

Each peer draws batches of its own from a teacher's labels, and trains a small network. Kills and joins are those of
:mod:`tests.simulation.churn`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
import trio
from torch.nn import functional

import p2pavg
from p2pavg.base.result import Success
from p2pavg.optim import CellOptimizer, Cells, RunState, StepReport
from p2pavg.optim.base.state import digest_of
from p2pavg.peer.averager import DecentralizedAverager
from p2pavg.testing.loops import LoopThread, virtual_threads
from p2pavg.testing.simulation import simulate
from tests.simulation.churn import Churn, Course, Life, Setting, Update

INPUTS, CLASSES = 16, 4
HELD_OUT = 4096


@dataclass(frozen=True, kw_only=True)
class CellSetting(Setting):
    """A run of cells."""

    cells: Cells
    batch: int = 32
    batches: float = 2.0
    """Batches of each peer in an update, if all are equally fast."""
    hidden: int = 16
    lr: float = 0.1
    batch_seconds: tuple[float, float] = (0.8, 1.2)
    upload: float = 50.0
    download: float = 50.0
    sinks: int | None = None
    """A cell of which all peers but one are killed after its first mix, instead of other kills."""


@dataclass(frozen=True)
class Mix:
    """One mix, as the first peer saw it."""

    at: float
    cell: int
    epoch: int
    mixed: float
    distance: float


@dataclass
class CellCourse(Course):
    """Everything that happened in one run of cells."""

    cells: dict[str, int] = field(default_factory=dict)
    """The cell of each peer that has begun, by id."""
    mixes: dict[tuple[int, int], Mix] = field(default_factory=dict)
    """By cell and epoch."""
    states: dict[tuple[int, int], set[bytes]] = field(default_factory=dict)
    """States of the lineages of all peers that took an update, by cell and epoch."""
    sizes: dict[tuple[int, int], int] = field(default_factory=dict)
    """Contributors of each update, by cell and epoch."""
    losses: list[tuple[float, int, int, float]] = field(default_factory=list)
    """Time, cell, epoch and held-out loss after each mix, of its first peer."""
    after_mix: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """The parameters after each mix, by cell and epoch."""

    survivor: Life | None = None
    """The last peer of the cell that sinks."""

    def loss_at(self, epoch: int) -> list[float]:
        """Return the held-out loss of each cell after the mix of an epoch."""
        return [loss for _, _, at, loss in self.losses if at == epoch]

    def newcomers(self) -> list[Life]:
        """Return the peers that began after the start and took an update with others."""
        return [life for life in self.joiners() if life.updates]


class Network(torch.nn.Module):
    """Two layers."""

    def __init__(self, hidden: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first = torch.nn.Linear(INPUTS, hidden)
            self.second = torch.nn.Linear(hidden, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.second(torch.tanh(self.first(inputs)))
        return logits


class Task:
    """Labels of a wider network, drawn by its logits: they have noise of their own, so no loss is near 0."""

    def __init__(self, seed: int) -> None:
        self._teacher = Network(64, 1000 + seed)
        self.held_out = self.draw(torch.Generator().manual_seed(7), HELD_OUT)

    @torch.no_grad()
    def draw(self, dice: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and labels."""
        inputs = torch.randn(count, INPUTS, generator=dice)
        chances = torch.softmax(12.0 * self._teacher(inputs), 1)
        return inputs, torch.multinomial(chances, 1, generator=dice).squeeze(1)

    @torch.no_grad()
    def loss(self, model: Network) -> float:
        """Return the mean loss over the held-out samples."""
        inputs, labels = self.held_out
        return float(functional.cross_entropy(model(inputs), labels))


class CellChurn(Churn):
    """Plays one run; see :func:`play_cells`."""

    course: CellCourse
    _how: CellSetting

    def __init__(self, setting: CellSetting) -> None:
        super().__init__(setting)
        self.course = CellCourse(setting)
        self._task = Task(setting.seed)
        self._config = p2pavg.AveragingConfig(
            run_id="cells", group_size=64, match_timeout=30.0, exchange_timeout=60.0, compression=None
        )

    async def play(self) -> Course:
        """Run it; the peers of the start come at once."""
        how, course = self._how, self.course
        async with trio.open_nursery() as nursery:
            await self._begin(nursery)
            async with trio.open_nursery() as opening:
                for _ in range(how.peers - 1):
                    opening.start_soon(self._begin, nursery)
            await self._started.wait()
            course.measured_from = trio.current_time()
            with trio.move_on_after(how.seconds):
                await self._churn(nursery)
            course.ended = trio.current_time()
            nursery.cancel_scope.cancel()
        return course

    async def _churn(self, nursery: trio.Nursery) -> None:
        if self._how.sinks is None:
            await super()._churn(nursery)
        while not any(cell == self._how.sinks for cell, _ in self.course.mixes):
            await trio.sleep(0.1)
        members = [
            life for life in self._alive.values() if self.course.cells.get(life.peer_id) == self._how.sinks
        ]
        for life in members[1:]:
            life.killed = True
            self._network.crash(life.peer_id)
        self.course.survivor = members[0]
        await trio.sleep_forever()

    def _train(self, thread: LoopThread[None], averager: DecentralizedAverager, life: Life) -> None:
        how = self._how
        model = Network(how.hidden, how.seed)
        dice = torch.Generator().manual_seed(life.index)
        seconds = random.Random(f"speed/{how.seed}/{life.index}").uniform(*how.batch_seconds)
        per_cell = how.peers / how.cells.count
        optimizer = CellOptimizer(
            torch.optim.SGD(model.parameters(), lr=how.lr, momentum=0.9, foreach=False),
            thread.averager(averager),
            cells=how.cells,
            target_batch_size=per_cell * how.batches * how.batch,
            peers_to_start=how.peers if life.index < how.peers else None,
            sync_timeout=120.0,
            state=RunState(model),
            on_update=lambda report: self._note_mix(report, model),
        )
        try:
            while True:
                thread.sleep(seconds)
                inputs, labels = self._task.draw(dice, how.batch)
                optimizer.zero_grad()
                torch.autograd.backward(functional.cross_entropy(model(inputs), labels))
                report = optimizer.step(samples=float(how.batch))
                self.course.cells[life.peer_id] = optimizer.cell
                if report.updated:
                    self._note_update(life, report, optimizer, model)
        finally:
            if not life.killed:
                self._note_parameters(optimizer, model)

    def _note_mix(self, report: StepReport, model: Network) -> None:
        if report.mixed is None or report.cell is None or (report.cell, report.epoch) in self.course.mixes:
            return
        now, distance = self._clock.current_time(), report.consensus_distance
        assert distance is not None
        self.course.mixes[report.cell, report.epoch] = Mix(
            now, report.cell, report.epoch, report.mixed, distance
        )
        self.course.after_mix[report.cell, report.epoch] = torch.cat(
            [parameter.detach().reshape(-1) for parameter in model.parameters()]
        )
        self.course.losses.append((now, report.cell, report.epoch, self._task.loss(model)))

    def _note_update(self, life: Life, report: StepReport, optimizer: CellOptimizer, model: Network) -> None:
        assert isinstance(report.result, Success)
        where = optimizer.cell, optimizer.epoch
        self.course.states.setdefault(where, set()).add(optimizer.lineage.state)
        self.course.sizes.setdefault(where, len(report.result.peers))
        self.course.samples.setdefault(len(self.course.samples), (self._clock.current_time(), 0.0))
        life.updates.append(
            Update(self._clock.current_time(), optimizer.epoch, life.peer_id in report.result.weights)
        )
        self._note_parameters(optimizer, model)
        if not self._started.is_set():
            self._token.run_sync_soon(self._started.set)

    def _note_parameters(self, optimizer: CellOptimizer, model: Network) -> None:
        values = [parameter.detach() for parameter in model.parameters()]
        kept = [optimizer.state[parameter].get("momentum_buffer") for parameter in model.parameters()]
        momenta = [momentum for momentum in kept if momentum is not None]
        self.course.bits.setdefault(optimizer.lineage.state, set()).add(digest_of([*values, *momenta]))


def play_cells(setting: CellSetting) -> CellCourse:
    """Play a run from its start to its end."""

    async def main() -> CellCourse:
        with virtual_threads(trio.lowlevel.current_clock()):
            churn = CellChurn(setting)
            await churn.play()
            return churn.course

    torch.set_num_threads(1)
    return simulate(main, seed=setting.seed)


def cell_findings(course: CellCourse) -> list[str]:
    """Return a sentence for each cell whose peers differ."""
    found = [
        f"the peers of update {epoch} of cell {cell} are of {len(states)} lineages"
        for (cell, epoch), states in course.states.items()
        if len(states) > 1
    ]
    return found + [
        f"peers of the lineage {state.hex()[:8]}… hold {len(bits)} different states"
        for state, bits in course.bits.items()
        if len(bits) > 1
    ]


def compared(course: CellCourse, calm: CellCourse) -> list[tuple[int, float, float]]:
    """Return each epoch after whose mix both runs have losses, with the mean of the cells in each."""
    epochs = sorted({epoch for _, _, epoch, _ in course.losses} & {epoch for _, _, epoch, _ in calm.losses})
    return [(epoch, _mean(course.loss_at(epoch)), _mean(calm.loss_at(epoch))) for epoch in epochs]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
