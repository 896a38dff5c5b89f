"""Programs of the processes that the tests of attached processes start."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import p2pavg
from p2pavg.blocking import Averager, open_averager
from p2pavg.optim import AveragedOptimizer, RunState, diloco
from p2pavg.telemetry.events import AnyEvent, RoundEnded, StateMoved, UpdateTaken
from p2pavg.testing.swarm import Member
from tests.integration.attach.daemon import WATCHDOG_SECONDS, attached
from tests.integration.optim.company import LISTEN, Batches, config, loss_of, small_model, vector_of

BATCH = 4


@contextmanager
def opened(member: Member) -> Iterator[Averager]:
    """Open the averager of this process.

    It is attached to the daemon at ``path``, if there is one and this process is among the first ``attached`` ones;
    otherwise it is of a peer of its own, which bootstraps from the daemon or from the swarm's first process.
    """
    torch.set_num_threads(1)
    how = config(member.arguments["peers"])
    if is_attached(member):
        with attached(member, how) as averager:
            yield averager
    elif "address" in member.arguments:
        with open_averager(how, bootstrap=[member.arguments["address"]], listen=LISTEN) as averager:
            member.report(address=averager.addresses[0], peer_id=averager.peer_id)
            yield averager
    else:
        with member.averager(how) as averager:
            yield averager


def is_attached(member: Member) -> bool:
    """Return whether this process shares the daemon's peer."""
    return "path" in member.arguments and member.index < member.arguments.get("attached", 64)


def digest(model: torch.nn.Module) -> str:
    """Return a text that is the same for the same parameters only."""
    return hashlib.sha256(vector_of(model).numpy().tobytes()).hexdigest()


def averaged(member: Member, model: torch.nn.Module, averager: Averager) -> AveragedOptimizer:
    """Return the optimizer of a process whose updates always hold one batch of each process."""
    peers = member.arguments["peers"]
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def note(report: Any) -> None:
        assert isinstance(report.result, p2pavg.Success)
        member.report(update=report.epoch, digest=digest(model), weights=dict(report.result.weights))

    return AveragedOptimizer(
        inner,
        averager,
        target_batch_size=peers * BATCH,
        max_samples_per_peer=BATCH,
        # A peer of its own sees one other peer, whatever the number of that one's processes.
        peers_to_start=peers if is_attached(member) or "attached" not in member.arguments else 2,
        on_update=note,
        check_every=1,
    )


def train(member: Member) -> None:
    """Train until ``updates`` updates are taken; report the parameters after each."""
    with opened(member) as averager:
        model, batches = small_model(), Batches(member.index, BATCH)
        optimizer = averaged(member, model, averager)
        end = time.monotonic() + WATCHDOG_SECONDS
        while optimizer.epoch < member.arguments["updates"]:
            assert time.monotonic() < end
            optimizer.zero_grad()
            loss = loss_of(model, batches.next())
            torch.autograd.backward(loss)
            report = optimizer.step(samples=BATCH, metrics={"loss": loss.item()})
            time.sleep(member.arguments.get("pause", 0.0))
            if report.drifted is not None:
                member.report(drifted=report.drifted)
            if report.behind is not None:
                member.report(behind=report.behind)
        member.report(done=True, digest=digest(model))
        member.told(WATCHDOG_SECONDS)  # until the test has seen all: other processes may need this one


def train_locally(member: Member) -> None:
    """Train by local updates until ``updates`` outer steps are taken; report the anchor after each."""
    with opened(member) as averager:
        model, batches = small_model(), Batches(member.index, BATCH)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = diloco(inner, averager, sync_every=3, peers_to_start=member.arguments["peers"])
        end = time.monotonic() + WATCHDOG_SECONDS
        while optimizer.epoch < member.arguments["updates"]:
            assert time.monotonic() < end
            optimizer.zero_grad()
            loss = loss_of(model, batches.next())
            torch.autograd.backward(loss)
            if optimizer.step(samples=BATCH, metrics={"loss": loss.item()}).updated:
                member.report(update=optimizer.epoch, digest=digest(model), weights={})
        member.report(done=True)
        member.told(WATCHDOG_SECONDS)


def train_with_state(member: Member) -> None:
    """Train until told to stop, by gradients or by local updates; begin with parameters of one's own if late.

    Reports each update, and each event of another kind once.
    """
    told: set[str] = set()

    def note(event: AnyEvent) -> None:
        kind = type(event).__name__
        if isinstance(event, RoundEnded | UpdateTaken | StateMoved) and kind not in told:
            told.add(kind)
            member.report(event=kind)

    with opened(member) as averager:
        model, batches = small_model(), Batches(member.index, BATCH)
        if member.arguments.get("late"):
            torch.manual_seed(1000 + member.index)
            torch.nn.utils.vector_to_parameters(torch.randn(vector_of(model).numel()), model.parameters())
        averager.subscribe(note)
        state = RunState(model)
        if member.arguments.get("local"):
            inner: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            optimizer: Any = diloco(inner, averager, sync_every=3, min_peers=1, state=state)
        else:
            inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            optimizer = AveragedOptimizer(
                inner, averager, target_batch_size=4 * BATCH, min_peers=1, state=state, sync_timeout=10.0
            )
        end = time.monotonic() + WATCHDOG_SECONDS
        while member.told(0.0) is None:
            assert time.monotonic() < end
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, batches.next()))
            report = optimizer.step(samples=BATCH)
            time.sleep(0.02)
            if report.updated:
                assert isinstance(report.result, p2pavg.Success)
                member.report(
                    update=report.epoch,
                    digest=digest(model)
                    if not member.arguments.get("local")
                    else optimizer.lineage.state.hex(),
                    members=[*report.result.peers, *report.result.observers],
                )
