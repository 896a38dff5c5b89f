"""Local updates by codec: the bits of an exchange against the loss, with workers in one process.

A worker trains as a peer does. What the peers do together is called without a network: error feedback, encoding, the
reducer's average and its encoding, and the outer step, also of fragments and with a delay. The bits are those of real
peers on this machine.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from p2pavg.allreduce.reduction import PartContribution, average_part
from p2pavg.optim.base.joined import joined
from p2pavg.optim.local.anchor import Anchor
from p2pavg.optim.local.feedback import feedback_for
from p2pavg.optim.local.local_options import fragments_of
from p2pavg.testing import LocalSwarm
from p2pavg_compression import Codec, resolve_codec
from scripts.benchmarks.training_work import LR, SIZES, Task, in_one_process

SYNC_EVERY = 30
ELEMENTS = 2**24
LAST_FRACTION = 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    codec: str
    lr: float = 1.0
    momentum: float = 0.0
    feedback: bool | None = None
    fragments: int = 1
    delay: int = 0
    """Inner steps between a contribution and its average."""
    inner: str = "adamw"
    nesterov: bool = True
    """Of the outer step's momentum."""
    every: int = SYNC_EVERY
    """Inner steps for one outer step."""


ROWS = (
    Row("DiLoCo", "fp32", 0.7, 0.9),
    Row("outer SGD, rate 1", "fp32"),
    Row("outer SGD, rate 1", "blockwise8"),
    Row("outer SGD, rate 1, with feedback", "int4", feedback=True),
    Row("SparseLoCo, 3 %", "topk:4096:123"),
    Row("SparseLoCo, 1.6 %", "topk:4096:64"),
    Row("SparseLoCo, 1 %", "topk:4096:41"),
    Row("outer SGD, rate 1, 3 fragments, delay 5", "fp32", fragments=3, delay=5),
    Row("SparseLoCo, 1.6 %, 3 fragments, delay 5", "topk:4096:64", fragments=3, delay=5),
    Row("outer SGD, rate 1, Muon inside", "fp32", inner="muon"),
    Row("SparseLoCo, 1.6 %, Muon inside", "topk:4096:64", inner="muon"),
    Row("SparseLoCo, 1.6 %, rate 2, every 10", "topk:4096:64", 2.0, every=10),
    Row("SparseLoCo, 1.6 %, rate 4, every 5", "topk:4096:64", 4.0, every=5),
    Row("SparseLoCo, 1.6 %, rate 6, every 5", "topk:4096:64", 6.0, every=5),
    Row("SparseLoCo, 1.6 %, rate 4, every 5, Muon inside", "topk:4096:64", 4.0, every=5, inner="muon"),
    Row("SparseLoCo, 1.6 %, rate 4, every 10, Muon inside", "topk:4096:64", 4.0, every=10, inner="muon"),
    Row("DiLoCo, Muon inside", "fp32", 0.7, 0.9, inner="muon"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this comparison alone."""
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, for bits and feedback")
    parser.add_argument(
        "--checkpoint", help="file of a model to begin from, instead of first steps, for bits"
    )
    parser.add_argument("--processes", type=int, default=2, help="at a time, for bits")
    parser.add_argument("--size", choices=list(SIZES), default="small", help="of the GPT, for bits [small]")
    parser.add_argument(
        "--rows", help="numbers of the rows after the first one, for example 2,6; default: all, for bits"
    )
    parser.add_argument(
        "--decay", action="store_true", help="let the inner rate fall to a tenth by a cosine, for bits"
    )


def bits(given: argparse.Namespace) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Return title, columns and rows of the comparison."""
    peers, steps = given.peers or 4, given.steps or 600
    chosen: list[Row | None] = (
        [*ROWS, None]
        if given.rows is None
        else [ROWS[0], *(ROWS[int(number) - 1] for number in given.rows.split(","))]
    )
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
        seeds = range(1, given.seeds + 1)
        jobs: dict[Row | None, list[Future[float]]] = {
            row: [
                pool.submit(
                    held_out,
                    row,
                    peers,
                    steps,
                    given.first_steps,
                    checkpoint,
                    seed,
                    given.size,
                    decay=given.decay,
                )
                for seed in seeds
            ]
            for row in chosen
        }
        losses = {row: [job.result() for job in _told(row, found)] for row, found in jobs.items()}
    dense = statistics.fmean(losses[ROWS[0]])
    rows = [
        (
            "one process, every step" if row is None else row.name,
            "" if row is None else row.codec,
            "" if row is None else f"{bits_a_parameter(peers, row.codec):.4g}",
            f"{statistics.fmean(found):.4f}",
            f"{min(found):.4f} .. {max(found):.4f}",
            f"{100 * (statistics.fmean(found) / dense - 1):+.2f} %",
        )
        for row, found in losses.items()
    ]
    title = (
        f"a {given.size} GPT, {peers} workers, {steps} batches each from a checkpoint of {given.first_steps},"
        f" averages every {SYNC_EVERY} steps if not said otherwise, {given.seeds} seeds"
        f"{', inner rate falling to a tenth' if given.decay else ''}"
    )
    columns = ("", "codec", "bits a parameter", "held-out loss", "from .. to", "against DiLoCo")
    return title, columns, rows


def _told(row: Row | None, jobs: list[Future[float]]) -> list[Future[float]]:
    print(row, [job.result() for job in jobs], flush=True, file=sys.stderr)
    return jobs


def held_out(
    row: Row | None,
    peers: int,
    steps: int,
    first: int,
    checkpoint: str,
    seed: int,
    size: str,
    *,
    decay: bool = False,
) -> float:
    """Train; return the held-out loss. Without a row, one process takes all batches step by step."""
    torch.set_num_threads(1)
    fractions = [cosine(done / steps) if decay else 1.0 for done in range(steps)]
    if row is None:
        return in_one_process(
            peers, steps, first=first, checkpoint=checkpoint, seed=seed, size=size, fractions=fractions
        )[1]
    workers = [Worker(index, Task(peers, checkpoint, seed, size), row) for index in range(peers)]
    every = row.every // row.fragments
    running: tuple[int, int, torch.Tensor] | None = None  # the step that takes it, its fragment, the average
    for done in range(1, steps + 1):
        for worker in workers:
            worker.train(first + done - 1, fractions[done - 1])
        if done % every == 0:
            fragment = (done // every - 1) % row.fragments
            running = (done + row.delay, fragment, average(row, workers, fragment))
        if running is not None and (running[0] == done or done == steps):
            for worker in workers:
                worker.take(*running[1:])
            running = None
    workers[0].anchor.give()
    return workers[0].task.held_out_loss()


def cosine(done: float) -> float:
    """Return the fraction of the inner rate after a fraction of the steps: from 1 down to :data:`LAST_FRACTION`."""
    return LAST_FRACTION + (1 - LAST_FRACTION) * (1 + math.cos(math.pi * done)) / 2


def average(row: Row, workers: Sequence[Worker], fragment: int) -> torch.Tensor:
    """Return the workers' average of a fragment."""
    return combined(resolve_codec(row.codec), [worker.contribute(fragment) for worker in workers])


def combined(codec: Codec, vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the average of vectors as a round gives it: each is encoded, and so is the average."""
    contributions = [
        PartContribution(str(index), 1.0, codec.encode(vector)) for index, vector in enumerate(vectors)
    ]
    averaged = torch.empty(vectors[0].numel())
    average_part(codec, contributions, float(len(vectors)), averaged)
    return averaged


class Worker:
    """One peer's model, inner optimizer, anchor and feedback."""

    def __init__(self, index: int, task: Task, row: Row) -> None:
        self.index = index
        self.task = task
        self.row = row
        self._inner = joined(task.optimizers(row.inner), task.model)
        names, parameters = zip(*task.model.named_parameters(), strict=True)
        pieces = fragments_of(names, [tuple(parameter.shape) for parameter in parameters], row.fragments)

        def outer(tensors: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
            nesterov = row.nesterov and row.momentum > 0
            return torch.optim.SGD(tensors, lr=row.lr, momentum=row.momentum, nesterov=nesterov)

        self.anchor = Anchor(parameters, outer, pieces)
        codec = resolve_codec(row.codec)
        self._feedback = [feedback_for(codec, row.feedback) for _ in range(row.fragments)]
        self._sent: list[torch.Tensor] = []
        """The fragment's parameters as they were when it was contributed."""

    def train(self, step: int, fraction: float = 1.0) -> None:
        """Take an inner step, at a fraction of the rate."""
        for group in self._inner.param_groups:
            group["lr"] = fraction * LR
        self._inner.zero_grad()
        torch.autograd.backward(self.task.loss(self.task.batches.of_peer(self.index, step)))
        torch.nn.utils.clip_grad_norm_(self.task.model.parameters(), 1.0)
        self._inner.step()

    def contribute(self, fragment: int) -> torch.Tensor:
        """Return the pseudo-gradient of a fragment, flat."""
        self._sent = self.anchor.copy(fragment)
        pseudo = torch.cat([tensor.reshape(-1) for tensor in self.anchor.contribution(fragment)])
        feedback = self._feedback[fragment]
        return pseudo if feedback is None else feedback.compensate([pseudo])[0]

    def take(self, fragment: int, averaged: torch.Tensor) -> None:
        """Take the outer step of a fragment, and keep the inner steps since the contribution."""
        feedback = self._feedback[fragment]
        if feedback is not None:
            feedback.delivered(0, 0, averaged=[averaged])
        later = self.anchor.since(fragment, self._sent)
        like = self.anchor.like
        cut = torch.split(averaged.clone(), [tensor.numel() for tensor in like])
        gradients = [part.view(tensor.shape) for part, tensor in zip(cut, like, strict=True)]
        self.anchor.step(
            fragment, gradients, _step, lambda tensors: float(torch.nn.utils.get_total_norm(tensors))
        )
        self.anchor.settle(fragment, later)


def _step(pieces: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    del pieces  # those of the other fragments have no gradients
    optimizer.step()


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
