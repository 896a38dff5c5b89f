"""States that optimizers share without being asked: a late peer and one that missed updates come back; virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from p2pavg import AveragingConfig, Success
from p2pavg.optim import AveragedOptimizer, LocalUpdates, RunState, StepReport, diloco
from p2pavg.optim.base.state import digest_of
from p2pavg.testing import MemoryNetwork, SimulatedLoop, run_loops
from tests.simulation.swarm import LAN

UPDATES = 16
BATCH_SECONDS = 2.0
LATE = 20.0
CONFIG = AveragingConfig(run_id="defaults", group_size=3, match_timeout=10.0, exchange_timeout=20.0)
STATES: tuple[Callable[[nn.Module], Any], ...] = (lambda _: None, lambda model: model, RunState)
"""The argument ``state`` of each peer: two know the model, and all share the same states."""

Either = AveragedOptimizer | LocalUpdates


def model(seed: int) -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in made.parameters():
            weights.uniform_(-0.4, 0.4, generator=generator)
    return made


def averaged(network: nn.Module, loop: SimulatedLoop, **options: Any) -> Either:
    inner = torch.optim.AdamW(network.parameters(), lr=0.01)
    return AveragedOptimizer(inner, loop.averager, target_batch_size=12.0, **options)


def local(network: nn.Module, loop: SimulatedLoop, **options: Any) -> Either:
    return diloco(torch.optim.AdamW(network.parameters(), lr=0.01), loop.averager, sync_every=2, **options)


def held(optimizer: Either) -> bytes:
    """Return a digest of what all peers share."""
    common = optimizer.outer if isinstance(optimizer, LocalUpdates) else optimizer.inner
    tensors = optimizer.anchor if isinstance(optimizer, LocalUpdates) else optimizer._locals()
    states = common.state_dict()["state"]
    # A state that came from another peer may have its entries in another order.
    named = [states[number][name] for number in sorted(states) for name in sorted(states[number])]
    return digest_of([*tensors, *(value for value in named if torch.is_tensor(value))])


class Course:
    """Some loops, each of which ends when all of them have taken the last update."""

    def __init__(self, make: Callable[..., Either]) -> None:
        self._make = make
        self.behind: set[int] = set()
        """Peers that could not follow."""
        self.caught_up: set[int] = set()
        """Peers that have replayed an update."""
        self._updates: dict[int, int] = dict.fromkeys(range(3), 0)

    def train(self, loop: SimulatedLoop, *, seed: int, pauses_at: int = -1, **options: Any) -> bytes:
        """Return what this peer held after the last update; nothing if it cannot follow the run."""
        network, ended = model(seed), [b""]

        def note(report: StepReport) -> None:
            assert isinstance(report.result, Success)
            if report.result.duration == 0.0:
                self.caught_up.add(loop.index)
            if report.epoch == UPDATES:
                ended[0] = held(optimizer)

        given: dict[str, Any] = {
            "state": STATES[loop.index](network),
            "sync_timeout": 60.0,
            "on_update": note,
        }
        optimizer = self._make(network, loop, **(given | options))
        generator = torch.Generator().manual_seed(loop.index)
        # A peer that has the last update trains on until all have it: the others may need its help.
        while min(self._updates.values()) < UPDATES:
            if optimizer.epoch == pauses_at:
                pauses_at = -1
                optimizer.leave()
                loop.sleep(LATE)
            loop.sleep(BATCH_SECONDS)
            optimizer.zero_grad()
            inputs = torch.randn(4, 4, generator=generator, dtype=torch.float32)
            torch.autograd.backward(network(inputs).square().mean())
            report = optimizer.step(samples=4)
            self._updates[loop.index] = optimizer.epoch
            if report.behind is not None:
                self.behind.add(loop.index)
                del self._updates[loop.index]
                break
        return ended[0]


@pytest.mark.parametrize("make", [averaged, local])
async def test_a_late_peer_and_one_that_missed_updates_end_with_the_same_bits(
    make: Callable[..., Either],
) -> None:
    course = Course(make)

    def train(loop: SimulatedLoop) -> bytes:
        if loop.index == 2:
            loop.sleep(LATE)
        return course.train(loop, seed=int(loop.index == 2), pauses_at=8 if loop.index == 0 else -1)

    found = await run_loops(MemoryNetwork(latency=LAN), 3, train, config=CONFIG)
    assert course.behind == set()
    assert course.caught_up == {0, 2}
    assert len(set(found.values())) == 1
    assert b"" not in found.values()


async def test_averages_are_replayed_in_a_process_with_another_default_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        await test_a_late_peer_and_one_that_missed_updates_end_with_the_same_bits(averaged)
    finally:
        torch.set_default_dtype(before)


async def test_a_peer_that_shares_no_states_says_that_it_is_behind() -> None:
    course = Course(local)

    def train(loop: SimulatedLoop) -> bytes:
        if loop.index == 2:
            loop.sleep(LATE)
            return course.train(loop, seed=0, state=False)
        return course.train(loop, seed=0)

    found = await run_loops(MemoryNetwork(latency=LAN), 3, train, config=CONFIG)
    assert course.behind == {2}
    assert course.caught_up == set()
    assert found[0] == found[1] != b""
