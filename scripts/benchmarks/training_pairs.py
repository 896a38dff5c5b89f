"""Local updates that mix in small groups beside DiLoCo: held-out loss against bytes, with workers in one process.

A worker trains as a peer does. What the peers of a group do together is called without a network. Each round has other
groups, drawn from the seed, and all workers are equally fast, so the losses do not depend on the machine's load.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import torch

from p2pavg_compression import resolve_codec
from scripts.benchmarks.training_bits import SYNC_EVERY, Row, Worker, combined
from scripts.benchmarks.training_work import Task, in_one_process


@dataclass(frozen=True, slots=True)
class Mix:
    """One line of the table."""

    row: Row
    group_size: int | None = None
    """Of groups that mix; ``None`` for one group of all, with one anchor."""


ROWS = (
    Mix(Row("diloco", "fp32", 0.7, 0.9)),
    Mix(Row("diloco", "bf16", 0.7, 0.9)),
    Mix(Row("fedavg", "fp32")),
    Mix(Row("noloco", "fp32", 0.7, 0.5, nesterov=False), 2),
    Mix(Row("noloco", "bf16", 0.7, 0.5, nesterov=False), 2),
    Mix(Row("noloco", "fp32", 0.7, 0.5, nesterov=False), 4),
    Mix(Row("gossip", "fp32"), 2),
    Mix(Row("gossip", "bf16"), 2),
    Mix(Row("gossip", "fp32"), 4),
)


@dataclass(frozen=True, slots=True)
class Losses:
    """Held-out losses at the end of one run."""

    mean: float
    """Of the workers' own parameters."""
    spread: float
    """Largest minus smallest."""
    together: float
    """Of the mean of all workers' parameters."""


def pairs(given: argparse.Namespace) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Return title, columns and rows of the comparison."""
    peers, steps = given.peers or 8, given.steps or 1000
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(given.processes, mp_context=context) as pool,
    ):
        checkpoint = f"{folder}/checkpoint"
        pool.submit(in_one_process, peers, given.first_steps, save_to=checkpoint).result()
        seeds = range(1, given.seeds + 1)
        jobs = {
            mix: [pool.submit(held_out, mix, peers, steps, given.first_steps, checkpoint, s) for s in seeds]
            for mix in ROWS
        }
        found = {mix: _told(mix, runs) for mix, runs in jobs.items()}
    base = statistics.fmean(run.mean for run in found[ROWS[0]])
    title = (
        f"{peers} workers, {steps} batches each from a checkpoint of {given.first_steps}, outer step every"
        f" {SYNC_EVERY}, {given.seeds} seeds"
    )
    columns = (
        "recipe",
        "group of",
        "codec",
        "vectors sent",
        "held-out loss",
        "range of seeds",
        "against diloco",
        "spread of workers",
        "of their mean",
    )
    return title, columns, [_line(mix, runs, peers, base) for mix, runs in found.items()]


def _told(mix: Mix, jobs: Sequence[Future[Losses]]) -> list[Losses]:
    found = [job.result() for job in jobs]
    print(mix, found, flush=True, file=sys.stderr)
    return found


def _line(mix: Mix, runs: Sequence[Losses], peers: int, base: float) -> tuple[str, ...]:
    members = mix.group_size or peers
    means = [run.mean for run in runs]
    # Each element goes out and comes back once, except between a member and itself.
    vectors = 2 * (members - 1) / members * (2 if mix.row.codec == "bf16" else 4) / 4
    return (
        mix.row.name,
        str(members),
        mix.row.codec,
        f"{vectors:.2f}",
        f"{statistics.fmean(means):.4f}",
        f"{min(means):.4f} .. {max(means):.4f}",
        f"{100 * (statistics.fmean(means) / base - 1):+.2f} %",
        f"{max(run.spread for run in runs):.4f}",
        f"{statistics.fmean(run.together for run in runs):.4f}",
    )


def held_out(mix: Mix, peers: int, steps: int, first: int, checkpoint: str, seed: int) -> Losses:
    """Train; return the held-out losses."""
    torch.set_num_threads(1)
    workers = [Worker(index, Task(peers, checkpoint, seed), mix.row) for index in range(peers)]
    for done in range(1, steps + 1):
        for worker in workers:
            worker.train(first + done - 1)
        if done % SYNC_EVERY == 0:
            for group in groups_of(workers, mix.group_size, f"{seed} {done}"):
                take_together(mix, group)
    losses = [worker.task.held_out_loss() for worker in workers]
    return Losses(statistics.fmean(losses), max(losses) - min(losses), loss_of_mean(workers))


def groups_of(workers: Sequence[Worker], size: int | None, seed: str) -> Iterator[list[Worker]]:
    """Draw the groups of a round. Workers that are left over have none."""
    if size is None:
        yield list(workers)
        return
    drawn = random.Random(seed).sample(list(workers), len(workers))
    for start in range(0, len(drawn) - size + 1, size):
        yield drawn[start : start + size]


def take_together(mix: Mix, group: Sequence[Worker]) -> None:
    """Let the members of a group take an outer step: from one anchor, or each from its own."""
    codec = resolve_codec(mix.row.codec)
    pseudo = [worker.contribute(0) for worker in group]
    if mix.group_size is None:
        averaged = combined(codec, pseudo)
        for worker in group:
            worker.take(0, averaged)
        return
    anchors = [torch.cat([tensor.reshape(-1) for tensor in worker.anchor.tensors]) for worker in group]
    point = combined(codec, [anchor - away for anchor, away in zip(anchors, pseudo, strict=True)])
    for worker, anchor in zip(group, anchors, strict=True):
        worker.take(0, anchor - point)


@torch.no_grad()
def loss_of_mean(workers: Sequence[Worker]) -> float:
    """Return the held-out loss of the mean of all workers' parameters, which the first worker then has."""
    models = [list(worker.task.model.parameters()) for worker in workers]
    for parameters in zip(*models, strict=True):
        parameters[0].copy_(torch.stack(parameters).mean(0))
    return workers[0].task.held_out_loss()
