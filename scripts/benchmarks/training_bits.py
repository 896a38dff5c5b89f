"""Local updates by recipe and codec: the bits of an exchange against the loss, with workers in one process.

A worker trains as a peer does. What the peers do together is called without a network: error feedback, encoding, the
reducer's average and its encoding, and the outer step, also of fragments, with a delay, and in small groups. Each round
has other groups, drawn from the seed, and all workers are equally fast, so the losses do not depend on the machine's
load. The bits are those of real peers on this machine. Rates and momenta are the recipes' defaults if a row does not
say otherwise.
"""

from __future__ import annotations

import argparse
import inspect
import math
import multiprocessing
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from p2pavg.allreduce.reduction import PartContribution, average_part
from p2pavg.optim import diloco, fedavg, gossip, noloco, sparseloco
from p2pavg.optim.base.joined import joined
from p2pavg.optim.local.anchor import Anchor, Outer
from p2pavg.optim.local.feedback import feedback_for
from p2pavg.optim.local.local_options import fragments_of
from p2pavg.optim.local.recipes import sgd
from p2pavg.optim.ranks.shards import total_norm
from p2pavg.testing import LocalSwarm
from p2pavg_compression import Codec, resolve_codec
from scripts.benchmarks.training_work import LR, SIZES, Task, in_one_process

SYNC_EVERY = 30
ELEMENTS = 2**24
LAST_FRACTION = 0.1
RECIPES: Mapping[str, Callable[..., Any]] = {
    each.__name__: each for each in (diloco, fedavg, gossip, noloco, sparseloco)
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table."""

    recipe: str
    """Name of the recipe; empty: one process takes all batches step by step."""
    codec: str = "fp32"
    inner: str = "adamw"
    group_size: int | None = None
    """Of groups that mix; ``None`` for one group of all, with one anchor."""
    feedback: bool | None = None
    every: int = SYNC_EVERY
    """Inner steps for one outer step."""
    fragments: int = 1
    delay: int = 0
    """Inner steps between a contribution and its average."""
    lr: float | None = None
    momentum: float | None = None

    @property
    def name(self) -> str:
        """Return the row in words."""
        words = [self.recipe or "one process, every step"]
        words += ["Muon inside"] if self.inner == "muon" else []
        words += [f"groups of {self.group_size}"] if self.group_size else []
        words += [f"every {self.every}"] if self.every != SYNC_EVERY else []
        words += [f"{self.fragments} fragments"] if self.fragments > 1 else []
        words += [f"delay {self.delay}"] if self.delay else []
        words += [f"rate {self.lr:g}"] if self.lr is not None else []
        words += [f"momentum {self.momentum:g}"] if self.momentum is not None else []
        return ", ".join(words)

    @property
    def outer(self) -> Outer:
        """Return the recipe's outer optimizer, with its defaults."""
        options = {
            name: each.default for name, each in inspect.signature(RECIPES[self.recipe]).parameters.items()
        }
        lr = options.get("lr", 1.0) if self.lr is None else self.lr
        momentum = options.get("momentum", 0.0) if self.momentum is None else self.momentum
        if self.recipe == "noloco":
            return partial(torch.optim.SGD, lr=lr, momentum=momentum)
        return sgd(lr, momentum, auto=1.0) if self.recipe == "gossip" else sgd(lr, momentum)


BITS = (
    Row("diloco"),
    Row(""),
    Row("diloco", inner="muon"),
    Row("", inner="muon"),
    Row("diloco", "int4", feedback=True),
    Row("diloco", "int4", "muon", feedback=True),
    Row("diloco", "ternary"),
    Row("diloco", "ternary", "muon"),
    Row("sparseloco", "topk"),
    Row("sparseloco", "topk", "muon"),
    Row("noloco", group_size=2),
    Row("noloco", group_size=4),
    Row("gossip", group_size=2),
    Row("gossip", group_size=4),
    Row("diloco", fragments=3, delay=5),
    Row("diloco", "ternary", fragments=3, delay=5),
)
"""The table of codecs and groups; the first row is what others are compared with, and the third with Muon inside."""
RATES = tuple(
    Row("diloco", every=every, lr=lr, momentum=momentum)
    for every in (10, 30, 100)
    for lr, momentum in ((None, None), (0.1, 0.9), (0.2, 0.9), (0.4, 0.9), (0.7, 0.9), (1.0, 0.9), (1.0, 0.0))
)
"""Rates by hand beside the default, at three intervals; the last one is plain averaging."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of these comparisons alone."""
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, for bits, rates and feedback")
    parser.add_argument(
        "--checkpoint", help="file of a model to begin from, instead of first steps, for bits and rates"
    )
    parser.add_argument("--processes", type=int, default=2, help="at a time, for bits and rates")
    parser.add_argument(
        "--size", choices=list(SIZES), default="small", help="of the GPT, for bits and rates [small]"
    )
    parser.add_argument(
        "--rows", help="numbers of the rows, for example 1,7, for bits and rates; default: all"
    )
    parser.add_argument(
        "--steady",
        action="store_true",
        help="let the inner rate stay, instead of falling to a tenth by a cosine",
    )


@dataclass(frozen=True, slots=True)
class Losses:
    """Held-out losses at the end of one run."""

    mean: float
    """Of the workers' own parameters."""
    together: float
    """Of the mean of all workers' parameters."""


def table(
    rows: Sequence[Row], given: argparse.Namespace, *, with_bits: bool
) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Return title, columns and rows of a comparison."""
    peers, steps = given.peers or 4, given.steps or 2400
    numbers = range(1, len(rows) + 1) if given.rows is None else map(int, given.rows.split(","))
    chosen = [rows[number - 1] for number in numbers]
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(given.processes, mp_context=context) as pool,
    ):
        checkpoint = given.checkpoint or f"{folder}/checkpoint"
        if not given.checkpoint:
            pool.submit(
                in_one_process, peers, given.first_steps, save_to=checkpoint, size=given.size
            ).result()
        jobs = [
            [
                pool.submit(
                    held_out,
                    row,
                    peers,
                    steps,
                    given.first_steps,
                    Task(peers, checkpoint, seed, given.size),
                    decay=not given.steady,
                )
                for seed in range(1, given.seeds + 1)
            ]
            for row in chosen
        ]
        found = {row: _told(row, each) for row, each in zip(chosen, jobs, strict=True)}
    lines = [_line(row, found, peers, with_bits=with_bits) for row in chosen]
    title = (
        f"a {given.size} GPT, {peers} workers, {steps} batches each from a checkpoint of {given.first_steps}, an outer"
        f" step every {SYNC_EVERY} if not said otherwise, {given.seeds} seeds,"
        f" {'a steady inner rate' if given.steady else 'an inner rate that falls to a tenth'}"
    )
    columns = ("", "codec", "bits", "held-out loss", "from .. to", "against diloco", "of the workers' mean")
    return title, columns, lines


def _told(row: Row, jobs: Sequence[Future[Losses]]) -> list[Losses]:
    found = [job.result() for job in jobs]
    print(row.name, row.codec, found, flush=True, file=sys.stderr)
    return found


def _line(row: Row, found: Mapping[Row, list[Losses]], peers: int, *, with_bits: bool) -> tuple[str, ...]:
    losses = [each.mean for each in found[row]]
    dense = next(
        (
            [each.mean for each in other]
            for plain, other in found.items()
            if plain == Row("diloco", inner=row.inner, every=row.every)
        ),
        None,
    )
    # Seed by seed: the seeds differ more than the rows do.
    against = [100 * (one / other - 1) for one, other in zip(losses, dense or losses, strict=True)]
    return (
        row.name,
        row.codec,
        f"{bits_a_parameter(peers, row.codec):.4g}" if with_bits and row.recipe else "",
        f"{statistics.fmean(losses):.4f}",
        f"{min(losses):.4f} .. {max(losses):.4f}",
        f"{statistics.fmean(against):+.2f} % ({min(against):+.2f} .. {max(against):+.2f})" if dense else "",
        f"{statistics.fmean(each.together for each in found[row]):.4f}",
    )


def held_out(row: Row, peers: int, steps: int, first: int, task: Task, *, decay: bool) -> Losses:
    """Train; return the held-out losses. ``task`` is that of each worker."""
    torch.set_num_threads(1)
    fractions = [cosine(done / steps) if decay else 1.0 for done in range(steps)]
    workers = [
        Worker(index, Task(peers, task.checkpoint, task.seed, task.size), row) for index in range(peers)
    ]
    if not row.recipe:
        loss = step_by_step(workers, steps, first, fractions)
        return Losses(loss, loss)
    every = row.every // row.fragments
    running: tuple[int, int, list[GroupAverage]] | None = (
        None  # the step that takes it, its fragment, the averages
    )
    for done in range(1, steps + 1):
        for worker in workers:
            worker.train(first + done - 1, fractions[done - 1])
        if done % every == 0:
            fragment = (done // every - 1) % row.fragments
            groups = groups_of(workers, row.group_size, f"{task.seed} {done}")
            running = (done + row.delay, fragment, [average_of(row, group, fragment) for group in groups])
        if running is not None and (running[0] == done or done == steps):
            for average in running[2]:
                average.taken(running[1])
            running = None
    if row.group_size is None:
        workers[0].anchor.give()
        losses = [workers[0].task.held_out_loss()]
    else:
        losses = [worker.task.held_out_loss() for worker in workers]
    return Losses(statistics.fmean(losses), loss_of_mean(workers))


def step_by_step(workers: Sequence[Worker], steps: int, first: int, fractions: Sequence[float]) -> float:
    """Let the first worker take the batches of all, step by step; return the held-out loss."""
    one = workers[0]
    for done in range(steps):
        batches = [worker.task.batches.of_peer(worker.index, first + done) for worker in workers]
        one.step(torch.cat(batches), fractions[done])
    return one.task.held_out_loss()


def cosine(done: float) -> float:
    """Return the fraction of the inner rate after a fraction of the steps: from 1 down to :data:`LAST_FRACTION`."""
    return LAST_FRACTION + (1 - LAST_FRACTION) * (1 + math.cos(math.pi * done)) / 2


def groups_of(workers: Sequence[Worker], size: int | None, seed: str) -> Iterator[list[Worker]]:
    """Draw the groups of a round. Workers that are left over have none."""
    if size is None:
        yield list(workers)
        return
    drawn = random.Random(seed).sample(list(workers), len(workers))
    for start in range(0, len(drawn) - size + 1, size):
        yield drawn[start : start + size]


@dataclass(frozen=True, slots=True)
class GroupAverage:
    """The average of a group, and what each member takes of it."""

    members: Sequence[Worker]
    gradients: Sequence[torch.Tensor]
    reduced: Reduced

    def taken(self, fragment: int) -> None:
        """Let each member take its outer step."""
        for number, (worker, gradient) in enumerate(zip(self.members, self.gradients, strict=True)):
            first, last = self.reduced.shares[number]
            worker.take(fragment, gradient, (first, last), self.reduced.left_out[first:last])


def average_of(row: Row, group: Sequence[Worker], fragment: int) -> GroupAverage:
    """Average a group's pseudo-gradients, or their points if it mixes: then each has an anchor of its own."""
    codec = resolve_codec(row.codec)
    pseudo = [worker.contribute(fragment) for worker in group]
    if row.group_size is None:
        reduced = reduced_by(codec, pseudo)
        return GroupAverage(group, [reduced.averaged] * len(group), reduced)
    anchors = [torch.cat([tensor.reshape(-1) for tensor in worker.anchor.tensors]) for worker in group]
    reduced = reduced_by(codec, [anchor - away for anchor, away in zip(anchors, pseudo, strict=True)])
    return GroupAverage(group, [anchor - reduced.averaged for anchor in anchors], reduced)


@dataclass(frozen=True, slots=True)
class Reduced:
    """The average of vectors as a round gives it, in shares that the members reduce."""

    averaged: torch.Tensor
    shares: Sequence[tuple[int, int]]
    left_out: torch.Tensor
    """The loss of the averages by their encoding, times the number of members."""


def reduced_by(codec: Codec, vectors: Sequence[torch.Tensor]) -> Reduced:
    """Average vectors: what goes to another member is encoded, and so are the averages."""
    count, elements = len(vectors), vectors[0].numel()
    size = -(-elements // (count * codec.granularity)) * codec.granularity
    shares = [(min(size * index, elements), min(size * (index + 1), elements)) for index in range(count)]
    averaged, left_out = torch.empty(elements), torch.zeros(elements)
    for reducer, (first, last) in enumerate(shares):
        contributions = [
            PartContribution(
                str(index),
                1.0,
                vector[first:last]
                if index == reducer and not codec.is_sparse
                else codec.encode(vector[first:last].contiguous()),
            )
            for index, vector in enumerate(vectors)
        ]
        average_part(codec, contributions, float(count), averaged[first:last], left_out=left_out[first:last])
    return Reduced(averaged, shares, left_out.mul_(count))


class Worker:
    """One peer's model, inner optimizer, anchor and feedback."""

    def __init__(self, index: int, task: Task, row: Row) -> None:
        self.index = index
        self.task = task
        self._inner = joined(task.optimizers(row.inner), task.model)
        if not row.recipe:
            return
        names, parameters = zip(*task.model.named_parameters(), strict=True)
        pieces = fragments_of(names, [tuple(parameter.shape) for parameter in parameters], row.fragments)
        self.anchor = Anchor(parameters, row.outer, pieces)
        codec = resolve_codec(row.codec)
        self._feedback = [feedback_for(codec, row.feedback) for _ in range(row.fragments)]
        self._sent: list[torch.Tensor] = []
        """The fragment's parameters as they were when it was contributed."""

    def train(self, step: int, fraction: float = 1.0) -> None:
        """Take an inner step with this worker's batch, at a fraction of the rate."""
        self.step(self.task.batches.of_peer(self.index, step), fraction)

    def step(self, batch: torch.Tensor, fraction: float) -> None:
        """Take an inner step."""
        for group in self._inner.param_groups:
            group["lr"] = fraction * LR
        self._inner.zero_grad()
        torch.autograd.backward(self.task.loss(batch))
        torch.nn.utils.clip_grad_norm_(self.task.model.parameters(), 1.0)
        self._inner.step()

    def contribute(self, fragment: int) -> torch.Tensor:
        """Return the pseudo-gradient of a fragment, flat."""
        self._sent = self.anchor.copy(fragment)
        pseudo = torch.cat([tensor.reshape(-1) for tensor in self.anchor.contribution(fragment)])
        feedback = self._feedback[fragment]
        return pseudo if feedback is None else feedback.compensate([pseudo])[0]

    def take(
        self, fragment: int, averaged: torch.Tensor, share: tuple[int, int], left_out: torch.Tensor
    ) -> None:
        """Take the outer step of a fragment, and keep the inner steps since the contribution."""
        feedback = self._feedback[fragment]
        if feedback is not None:
            codec = feedback.codec
            counts = codec.needs_feedback and not codec.is_sparse
            feedback.delivered(*share, averaged=[averaged], left_out=left_out if counts else None)
        later = self.anchor.since(fragment, self._sent)
        like = self.anchor.like
        cut = torch.split(averaged.clone(), [tensor.numel() for tensor in like])
        gradients = [part.view(tensor.shape) for part, tensor in zip(cut, like, strict=True)]
        self.anchor.step(fragment, gradients, _step, total_norm)
        self.anchor.settle(fragment, later)


def _step(pieces: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    del pieces  # those of the other fragments have no gradients
    optimizer.step()


@torch.no_grad()
def loss_of_mean(workers: Sequence[Worker]) -> float:
    """Return the held-out loss of the mean of all workers' parameters, which the first worker then has."""
    models = [list(worker.task.model.parameters()) for worker in workers]
    for parameters in zip(*models, strict=True):
        parameters[0].copy_(torch.stack(parameters).mean(0))
    return workers[0].task.held_out_loss()


@cache
def bits_a_parameter(peers: int, codec: str) -> float:
    """Return the bits that a peer sends for each element in one exchange of 16 M, frames and signatures included.

    An exchange moves each element 2 (n - 1) / n times from each of n peers. The bits are those of one time.
    """
    arguments: dict[str, Any] = {"peers": peers, "codec": codec, "elements": ELEMENTS}
    work = "scripts.benchmarks.training_work:exchange"
    with LocalSwarm(work, peers=peers, arguments=arguments) as swarm:
        swarm.start()
        sent: list[int] = [list(process.events(600))[-1]["bytes_sent"] for process in swarm.processes]
    return 8 * sum(sent) / (2 * (peers - 1) * ELEMENTS)
