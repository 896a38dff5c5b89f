"""Helpers: peers with a :class:`RunState`, each in its own thread, of which some begin late or pause."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from p2pavg.base.result import Success
from p2pavg.blocking import Averager, open_averager
from p2pavg.optim import AveragedOptimizer, LocalUpdates, RunState, StepReport, diloco, fedyogi
from tests.integration.optim.company import LISTEN, WATCHDOG_SECONDS, Batches, config

BATCH = 8
UPDATES = 100
MORE_UPDATES = 6
"""Updates that the peers take together after the last one of them has joined."""


def normalised_model(seed: int) -> torch.nn.Module:
    """Return a model with averaged buffers, and with first parameters that follow from ``seed``."""
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    generator = torch.Generator().manual_seed(seed)  # its own: the peers' threads share the global one
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.4, 0.4, generator=generator)
    return model


AnyOptimizer = AveragedOptimizer | LocalUpdates
Maker = Callable[[torch.nn.Module, Averager, RunState, dict[str, Any]], AnyOptimizer]


def sgd(model: torch.nn.Module, averager: Averager, state: RunState, options: dict[str, Any]) -> AnyOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return AveragedOptimizer(inner, averager, target_batch_size=3 * BATCH, state=state, **options)


def adamw(
    model: torch.nn.Module, averager: Averager, state: RunState, options: dict[str, Any]
) -> AnyOptimizer:
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = CosineAnnealingLR(inner, T_max=60)
    return AveragedOptimizer(
        inner, averager, target_batch_size=3 * BATCH, scheduler=schedule, state=state, **options
    )


def by_diloco(
    model: torch.nn.Module, averager: Averager, state: RunState, options: dict[str, Any]
) -> AnyOptimizer:
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = CosineAnnealingLR(inner, T_max=150)
    return diloco(inner, averager, sync_every=2, scheduler=schedule, state=state, **options)


def by_fragments(
    model: torch.nn.Module, averager: Averager, state: RunState, options: dict[str, Any]
) -> AnyOptimizer:
    """Make local updates of two fragments, with two inner optimizers."""
    matrices = [weights for weights in model.parameters() if weights.ndim == 2]
    others = [weights for weights in model.parameters() if weights.ndim != 2]
    inner = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]
    return diloco(inner, averager, sync_every=4, fragments=2, state=state, offload=True, **options)


def by_fedyogi(
    model: torch.nn.Module, averager: Averager, state: RunState, options: dict[str, Any]
) -> AnyOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    return fedyogi(inner, averager, sync_every=2, state=state, **options)


@dataclass
class Seen:
    """The updates of one peer, and its state at the end."""

    replayed: list[int] = field(default_factory=list)
    """Updates that came from the log."""
    together: list[int] = field(default_factory=list)
    """Updates in whose rounds this peer was."""
    final: dict[str, torch.Tensor] = field(default_factory=dict)
    """All tensors that the peers of one lineage share."""
    plain: dict[str, Any] = field(default_factory=dict)
    """The plain values that they share."""
    schedule: int = 0
    """Steps of the schedule."""

    def note(self, report: StepReport) -> None:
        """Note an update; called as ``on_update``."""
        assert isinstance(report.result, Success)
        replayed = report.result.bytes_sent == 0 and report.result.duration == 0.0
        (self.replayed if replayed else self.together).append(report.epoch)


def common_tensors(optimizer: AnyOptimizer, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all tensors that the peers of one lineage share."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if isinstance(optimizer, LocalUpdates):
        found = {}  # a peer that was late has inner steps that no average has yet, and so have other fragments
    found |= {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    common = optimizer.inner
    if isinstance(optimizer, LocalUpdates):
        common = optimizer.outer
        found |= {f"anchor {index}": tensor for index, tensor in enumerate(optimizer.anchor)}
    for number, state in common.state_dict()["state"].items():
        found |= {f"{name} {number}": value for name, value in state.items() if torch.is_tensor(value)}
    return {name: tensor.clone() for name, tensor in found.items()}


def common_values(optimizer: AnyOptimizer) -> dict[str, Any]:
    """Return the lineage, the hyperparameters and the place in the schedule.

    With local updates, each peer has an inner schedule of its own: its steps are not those of the other peers.
    """
    common = optimizer.outer if isinstance(optimizer, LocalUpdates) else optimizer.inner
    schedule: LRScheduler | None = None if isinstance(optimizer, LocalUpdates) else optimizer.scheduler
    return {
        "epoch": optimizer.epoch,
        "state": optimizer.lineage.state.hex(),
        "groups": common.state_dict()["param_groups"],
        "schedule": None if schedule is None else (schedule.last_epoch, schedule.get_last_lr()),
    }


class Story:
    """A run of peers in threads, of which the last one joins late or pauses.

    Args:
        make: makes each peer's optimizer.
        peers: number of peers.
        updates: the run takes at least so many.
    """

    def __init__(self, make: Maker, *, peers: int = 3, updates: int = UPDATES, **changes: object) -> None:
        self.make = make
        self.peers = peers
        self.config = config(peers, compression="blockwise8", **changes)
        self.seen = [Seen() for _ in range(peers)]
        self.epochs = [0] * peers
        self._updates = updates
        self._end: int | None = None
        self._moved = threading.Condition()
        self._failed = False
        self._ended = threading.Barrier(peers)
        self._first = threading.Event()
        self._addresses: list[str] = []

    def wait_for_epoch(self, peer: int, epoch: int) -> None:
        """Wait until a peer has taken an update."""
        with self._moved:
            assert self._moved.wait_for(lambda: self.epochs[peer] >= epoch or self._failed, WATCHDOG_SECONDS)
            assert not self._failed, "another peer has failed"

    def is_over(self, peer: int, epoch: int) -> bool:
        """Note the epoch of a peer; return whether it is the run's last one."""
        with self._moved:
            self.epochs[peer] = epoch
            self._moved.notify_all()
            assert not self._failed, "another peer has failed"
            return self._end is not None and epoch >= self._end

    def may_end(self, epoch: int) -> None:
        """Note that the last peer has joined, at this epoch."""
        with self._moved:
            if self._end is None:
                self._end = max(self._updates, epoch + MORE_UPDATES)

    def fail(self) -> None:
        """End the other peers too."""
        with self._moved:
            self._failed = True
            self._moved.notify_all()
        self._ended.abort()

    def run(self, act: Callable[[Story, int, Sequence[str]], None]) -> list[Seen]:
        """Call ``act(story, index, bootstrap)`` for each peer in a thread, ``peer INDEX``; return what they saw."""
        first = self._first
        errors: list[BaseException] = []

        def work(index: int) -> None:
            try:
                if index:
                    assert first.wait(WATCHDOG_SECONDS)
                act(self, index, self._addresses)
            except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
                errors.append(error)
                self.fail()
                first.set()

        threads = [threading.Thread(target=work, args=(i,), name=f"peer {i}") for i in range(self.peers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return self.seen

    def train(
        self,
        index: int,
        bootstrap: Sequence[str],
        *,
        seed: int = 5,
        then: Callable[[AnyOptimizer], None] = lambda _: None,
        **options: Any,
    ) -> None:
        """Train until the run's end.

        Args:
            seed: of the first parameters.
            then: called before every batch.
            options: of the optimizer.
        """
        model, seen, batches = normalised_model(seed), self.seen[index], Batches(index, BATCH)
        with ExitStack() as stack:
            averager = stack.enter_context(open_averager(self.config, listen=LISTEN, bootstrap=bootstrap))
            if not bootstrap:
                self._addresses.extend(averager.addresses)
                self._first.set()
            optimizer = self.make(
                model, averager, RunState(model), {"on_update": seen.note, "check_every": 5, **options}
            )
            end = time.monotonic() + WATCHDOG_SECONDS
            while not self.is_over(index, optimizer.epoch):
                assert time.monotonic() < end, "the run never ended"
                then(optimizer)
                inputs, targets = batches.next()
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                torch.autograd.backward(loss)
                report = optimizer.step(samples=BATCH, metrics={"loss": loss.item()})
                assert report.behind is None, report.behind
                assert report.drifted is None, report.drifted
            if optimizer.scheduler is not None:
                seen.schedule = optimizer.scheduler.last_epoch
            seen.final, seen.plain = common_tensors(optimizer, model), common_values(optimizer)
            # A peer that hears of the last update late may need another one.
            self._ended.wait(WATCHDOG_SECONDS)
