"""Local updates by codec: the bits of an exchange against the loss, with workers in one process.

A worker trains as a peer does. What the peers do together is called without a network: error feedback, encoding, the
reducer's average and its encoding, and the outer step. The bits are those of real peers on this machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from p2pavg.allreduce.reduction import Contribution, average_part
from p2pavg.optim.feedback import feedback_for
from p2pavg.testing import LocalSwarm
from p2pavg_compression import resolve_codec
from scripts.benchmarks.training_work import Task, in_one_process

SYNC_EVERY = 30
ELEMENTS = 2**24


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    codec: str
    lr: float = 1.0
    momentum: float = 0.0
    feedback: bool | None = None


ROWS = (
    Row("DiLoCo", "fp32", 0.7, 0.9),
    Row("outer SGD, rate 1", "fp32"),
    Row("SparseLoCo, 1.6 %", "topk:4096:64"),
    Row("SparseLoCo, 1 %", "topk:4096:41"),
    Row("SparseLoCo, 3 %", "topk:4096:123"),
    Row("outer SGD, rate 1, with feedback", "int4", feedback=True),
    Row("outer SGD, rate 1", "blockwise8"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this comparison alone."""
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, for bits and feedback")
    parser.add_argument(
        "--checkpoint", help="file of a model to begin from, instead of first steps, for bits"
    )
    parser.add_argument("--processes", type=int, default=2, help="at a time, for bits")


def bits(given: argparse.Namespace) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """Return title, columns and rows of the comparison."""
    peers, steps = given.peers or 4, given.steps or 600
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(given.processes, mp_context=context) as pool,
    ):
        checkpoint = given.checkpoint or f"{folder}/checkpoint"
        if not given.checkpoint:
            pool.submit(in_one_process, peers, given.first_steps, save_to=checkpoint).result()
        seeds = range(1, given.seeds + 1)
        jobs: dict[Row | None, list[Future[float]]] = {
            row: [
                pool.submit(held_out, row, peers, steps, given.first_steps, checkpoint, seed)
                for seed in seeds
            ]
            for row in (*ROWS, None)
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
        f"{peers} workers, {steps} batches each from a checkpoint of {given.first_steps}, averages every"
        f" {SYNC_EVERY} steps, {given.seeds} seeds"
    )
    columns = ("", "codec", "bits a parameter", "held-out loss", "from .. to", "against DiLoCo")
    return title, columns, rows


def _told(row: Row | None, jobs: list[Future[float]]) -> list[Future[float]]:
    print(row, [job.result() for job in jobs], flush=True, file=sys.stderr)
    return jobs


def held_out(row: Row | None, peers: int, steps: int, first: int, checkpoint: str, seed: int) -> float:
    """Train; return the held-out loss. Without a row, one process takes all batches step by step."""
    torch.set_num_threads(1)
    if row is None:
        return in_one_process(peers, steps, first=first, checkpoint=checkpoint, seed=seed)[1]
    workers = [Worker(peers, index, checkpoint, seed, row) for index in range(peers)]
    codec = resolve_codec(row.codec)
    anchor = workers[0].vector().requires_grad_()
    outer = torch.optim.SGD([anchor], lr=row.lr, momentum=row.momentum, nesterov=row.momentum > 0)
    averaged = torch.empty(anchor.numel())
    for start in range(first, first + steps, SYNC_EVERY):
        contributions = []
        for worker in workers:
            pseudo = worker.train(anchor.detach(), start)
            contributions.append(Contribution(str(worker.index), 1.0, codec.encode(pseudo)))
        average_part(codec, contributions, float(peers), averaged)
        for worker in workers:
            if worker.feedback is not None:
                worker.feedback.delivered(0, 0, averaged=[averaged])
        anchor.grad = averaged.clone()
        outer.step()
    workers[0].set(anchor.detach())
    return workers[0].task.held_out_loss()


class Worker:
    """One peer's model, inner optimizer and feedback."""

    def __init__(self, peers: int, index: int, checkpoint: str, seed: int, row: Row) -> None:
        self.index = index
        self.task = Task(peers, checkpoint, seed)
        self.feedback = feedback_for(resolve_codec(row.codec), row.feedback)
        self._inner = self.task.optimizer()

    def vector(self) -> torch.Tensor:
        """Return a copy of the parameters, flat."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.task.model.parameters()])

    @torch.no_grad()
    def set(self, vector: torch.Tensor) -> None:
        """Copy a flat vector into the parameters."""
        parameters = list(self.task.model.parameters())
        pieces = torch.split(vector, [parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.copy_(piece.view_as(parameter))

    def train(self, anchor: torch.Tensor, start: int) -> torch.Tensor:
        """Take the inner steps from the anchor; return the contribution."""
        self.set(anchor)
        for step in range(start, start + SYNC_EVERY):
            self._inner.zero_grad()
            torch.autograd.backward(self.task.loss(self.task.batches.of_peer(self.index, step)))
            torch.nn.utils.clip_grad_norm_(self.task.model.parameters(), 1.0)
            self._inner.step()
        pseudo = anchor - self.vector()
        return pseudo if self.feedback is None else self.feedback.compensate([pseudo])[0]


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
