"""Cells that stop and begin again: from their checkpoints, and from states that a program has saved itself."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from p2pavg import AveragingConfig
from p2pavg.optim import CellOptimizer, Cells, RunState, StepReport
from p2pavg.testing import MemoryNetwork, SimulatedLoop, run_loops
from tests.simulation.swarm import LAN

PEERS = 4
CELLS = Cells(count=2, every=2, shares=3)
CONFIG = AveragingConfig(run_id="cells", group_size=8, match_timeout=30.0, compression=None)
BATCH = 8
RATE = 0.05
SHARED = ("shared", "optimizer", "epoch", "lineage")
"""What the peers of a cell have in common: not the number of batches that a layer has seen."""


def check_same(one: Any, other: Any, path: str = "") -> None:
    """Check that two nested values are the same, down to the bits of the tensors in them."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, path
        assert torch.equal(one, other), path
    elif isinstance(one, Mapping):
        assert one.keys() == other.keys(), path
        for name, value in one.items():
            check_same(value, other[name], f"{path}/{name}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, value in enumerate(one):
            check_same(value, other[index], f"{path}/{index}")
    else:
        assert one == other, path


class Peer:
    """One peer of a run of cells, which trains a linear model with momentum."""

    def __init__(self, loop: SimulatedLoop, seed: int, directory: Path | None = None) -> None:
        self.loop = loop
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = torch.nn.Sequential(
                torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)
            )
        self.inner = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9)
        self.state = RunState(self.model, directory, every=None if directory is None else 2)
        self.optimizer = CellOptimizer(
            self.inner,
            loop.averager,
            cells=CELLS,
            target_batch_size=PEERS // CELLS.count * BATCH,
            peers_to_start=PEERS,
            sync_timeout=60.0,
            state=self.state,
            on_update=self._note,
        )
        self._generator = torch.Generator().manual_seed(loop.index)
        self.seen: dict[int, dict[str, Any]] = {}
        """Everything that this peer holds, after each update."""

    def holds(self) -> dict[str, Any]:
        """Return a copy of everything that the run's peers of a cell share, and of this peer's extras."""
        buffer = io.BytesIO()
        held = {
            "model": self.model.state_dict(),
            "shared": {n: t for n, t in self.model.state_dict().items() if t.is_floating_point()},
            "optimizer": self.inner.state_dict()["state"],
            "epoch": self.optimizer.epoch,
            "lineage": self.optimizer.lineage.state,
            "extras": self.state.extras,
        }
        torch.save(held, buffer)
        buffer.seek(0)
        found: dict[str, Any] = torch.load(buffer, weights_only=True)
        return found

    def train(self, until: int) -> None:
        """Train until this peer has taken an update of this number, or a later one."""
        while self.optimizer.epoch < until:
            self.loop.sleep(0.5)
            self.state.extras["batches"] = self.state.extras.get("batches", 0) + 1
            inputs = torch.randn(BATCH, 4, generator=self._generator)
            self.optimizer.zero_grad()
            torch.autograd.backward((self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean())
            self.optimizer.step(samples=BATCH)

    def _note(self, report: StepReport) -> None:
        self.seen[report.epoch] = self.holds()


@dataclass
class Run:
    """What the peers of one run held, by the number of the peer."""

    cells: dict[int, int] = field(default_factory=dict)
    first: dict[int, dict[str, Any]] = field(default_factory=dict)
    """When they began."""
    seen: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    """After each update."""
    saved: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What their programs saved at the end."""
    mixed: set[int] = field(default_factory=set)
    """Updates after which a report said that values were mixed."""

    def check_cells(self) -> None:
        """Check that the peers of a cell held the same bits after each update that both have taken."""
        for index, seen in self.seen.items():
            for other, seen_by_other in self.seen.items():
                if self.cells[index] != self.cells[other]:
                    continue
                for epoch in seen.keys() & seen_by_other.keys():
                    for part in SHARED:
                        check_same(seen[epoch][part], seen_by_other[epoch][part], f"{epoch} {part}")


async def run(
    until: int, *, seed: int, folder: Path | None = None, shift: int = 0, load: Run | None = None
) -> Run:
    """Train all peers; they begin with the parameters of a seed, unless there are others to continue from.

    Args:
        folder: has a directory of each peer.
        shift: each peer has the directory of the one that comes so many places after it.
        load: an earlier run, whose states the peers load in another order.
    """
    found = Run()

    def train(loop: SimulatedLoop) -> None:
        directory = None if folder is None else folder / f"peer-{(loop.index + shift) % PEERS}"
        peer = Peer(loop, seed, directory)
        if load is not None:
            saved = load.saved[(loop.index + 1) % PEERS]
            peer.model.load_state_dict(saved["model"])
            peer.optimizer.load_state_dict(saved["optimizer"])
            check_same(peer.optimizer.state_dict(), saved["optimizer"])
        found.cells[loop.index], found.first[loop.index] = peer.optimizer.cell, peer.holds()
        peer.train(until)
        found.seen[loop.index] = peer.seen
        buffer = io.BytesIO()
        torch.save({"model": peer.model.state_dict(), "optimizer": peer.optimizer.state_dict()}, buffer)
        buffer.seek(0)
        found.saved[loop.index] = torch.load(buffer, weights_only=True)
        loop.sleep(5.0)  # the others take their last update

    await run_loops(MemoryNetwork(latency=LAN), PEERS, train, config=CONFIG)
    assert sorted(found.cells.values()) == [0, 0, 1, 1]
    found.check_cells()
    return found


async def test_a_stopped_run_goes_on_from_its_checkpoints_and_from_states_that_its_programs_saved(
    tmp_path: Path,
) -> None:
    """Each peer takes the checkpoint or the state of another one, so some of them move to its cell."""
    before = await run(4, seed=0, folder=tmp_path)
    # Peers with other ids would choose other cells, if they had no checkpoints.
    after = await run(6, seed=1, folder=tmp_path, shift=1)
    for index, held in after.first.items():
        source = (index + 1) % PEERS
        assert after.cells[index] == before.cells[source]
        assert held["epoch"] == 4
        check_same(held, before.seen[source][held["epoch"]])
        assert max(after.seen[index]) >= 6
    after = await run(6, seed=1, load=before)
    for index, held in after.first.items():
        source = (index + 1) % PEERS
        assert after.cells[index] == before.cells[source]
        for part in SHARED:
            check_same(held[part], before.seen[source][held["epoch"]][part], part)
