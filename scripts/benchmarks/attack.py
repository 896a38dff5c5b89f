"""Training under attack: the held-out loss of robust rules, relative to a run without attackers.

Workers compute gradients of a small GPT on Python's documentation, four sequences a batch. Some of them send something
else. One process plays all workers, without a network. It cuts each gradient into one share per worker, as a group of
equal links does, and combines each share with the function that a reducer uses. The optimizer is AdamW.

* ``sign_flip``: the negative of the own gradient.
* ``scale``: a hundred times the own gradient.
* ``little``: "a little is enough" (Baruch et al. 2019, arXiv:1902.06156, algorithm 3). The mean of the honest gradients
  minus z of their standard deviations in each coordinate, with the paper's z for the numbers of workers.
* ``inner_product``: inner-product manipulation (Xie et al. 2019, arXiv:1903.03936). Minus half of the mean of the
  honest gradients.
* ``label_flip``: the gradient of a batch whose targets are c -> V - 1 - c, of V characters.

With ``--strangers``: the processor time that a stranger takes by its first message, on each protocol
(:mod:`scripts.benchmarks.strangers`).

The last three need to know all honest gradients, or the other workers' data; the attackers of this benchmark do.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from p2pavg.allreduce.reduction import PartContribution, average_part
from p2pavg.group.aggregation import Aggregation, read_aggregation
from p2pavg.group.shares import cut_into_parts, part_size
from p2pavg_compression import Fp32
from scripts.benchmarks import strangers
from scripts.benchmarks.figures import Report
from scripts.demo_gpt.batches import Batches, held_out_windows
from scripts.demo_gpt.model import GPT, ModelConfig
from scripts.demo_gpt.text import load_text

NAME = "attack"
MEAN = "mean"
CONTEXT = 32
BATCH = 4
HELD_OUT = 256
LEARNING_RATE = 3e-3
SCALE = 100.0
INNER_PRODUCT = 0.5
RULES = "mean,trimmed_mean:0.2,trimmed_mean:0.45,median,centered_clip:1.0:3"


def add_arguments(parser: argparse.ArgumentParser, *, small: bool) -> None:
    """The options of this benchmark."""
    parser.add_argument("--workers", type=int, default=5 if small else 16)
    parser.add_argument("--attackers", default="1" if small else "3,7", help="numbers of workers that attack")
    parser.add_argument("--steps", type=int, default=2 if small else 200)
    parser.add_argument(
        "--rules", default="mean,median" if small else RULES, help=f"texts of rules, and {MEAN}"
    )
    parser.add_argument("--attacks", default="scale,little" if small else ",".join(ATTACKS))
    parser.add_argument(
        "--momentum",
        type=float,
        default=0.0,
        help="of each worker, which sends the running mean of its gradients",
    )
    parser.add_argument("--seeds", default="1", help="of first weights and batches")
    strangers.add_arguments(parser, small=small)


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Train without attackers, then with each attack against each rule."""
    if arguments.strangers:
        strangers.run(arguments.messages, [each for each in arguments.protocols.split(",") if each], report)
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _run(arguments, report)
    finally:
        torch.set_num_threads(threads)


def _run(arguments: argparse.Namespace, report: Report) -> None:
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    rules = arguments.rules.split(",")
    counts = [int(count) for count in arguments.attackers.split(",")]

    def losses(rule: str, attack: str, attackers: int) -> list[float]:
        began = time.perf_counter()
        found = [
            Run(arguments.workers, attackers, attack, rule, arguments.momentum, seed).train(arguments.steps)
            for seed in seeds
        ]
        report.note(f"{rule}, {attackers} {attack}: {found} ({time.perf_counter() - began:.0f} s)")
        return found

    conditions = {"workers": arguments.workers, "steps": arguments.steps, "momentum": arguments.momentum}
    clean = losses(MEAN, "none", 0)
    report.figure(NAME, "held-out loss", "nats", clean, system=MEAN, attack="none", attackers=0, **conditions)

    def tell(rule: str, attack: str, attackers: int) -> None:
        above = [
            100 * (loss / base - 1) for loss, base in zip(losses(rule, attack, attackers), clean, strict=True)
        ]
        report.figure(
            NAME, "held-out loss above the clean run", "%", above, system=rule, attack=attack, attackers=attackers,
            **conditions,
        )  # fmt: skip

    for rule in rules:
        if rule != MEAN:
            tell(rule, "none", 0)
    for count, attack, rule in itertools.product(counts, arguments.attacks.split(","), rules):
        tell(rule, attack, count)


# ---------------------------------------------------------------------- attacks


@dataclass(frozen=True)
class Known:
    """Everything that the attackers know in a step. Rows are workers, columns are parameters."""

    own: torch.Tensor
    """The attackers' own gradients, (attackers, parameters)."""
    flipped: torch.Tensor
    """Their gradients with flipped labels, likewise."""
    honest: torch.Tensor
    """The honest workers' gradients, (honest workers, parameters)."""


def a_little(known: Known) -> torch.Tensor:
    """Return what all attackers send: as far from the mean as enough honest workers are."""
    mean, deviation = known.honest.mean(0), known.honest.std(0)
    return (mean - little_z(len(known.honest) + len(known.own), len(known.own)) * deviation).expand_as(
        known.own
    )


def little_z(workers: int, attackers: int) -> float:
    """Return the number of standard deviations: s honest workers are further from the mean than the attackers.

    Baruch et al. 2019, algorithm 3: s = floor(n / 2 + 1) - m, and z is the largest with Phi(z) < (n - m - s) / (n - m).
    """
    supporters = workers // 2 + 1 - attackers
    honest = workers - attackers
    return statistics.NormalDist().inv_cdf(min(max((honest - supporters) / honest, 0.5), 0.999))


ATTACKS: dict[str, Callable[[Known], torch.Tensor]] = {
    "sign_flip": lambda known: -known.own,
    "scale": lambda known: SCALE * known.own,
    "little": a_little,
    "inner_product": lambda known: (-INNER_PRODUCT * known.honest.mean(0)).expand_as(known.own),
    "label_flip": lambda known: known.flipped,
}


# ---------------------------------------------------------------------- one run

_text = cache(load_text)


class Run:
    """One training run of all workers.

    Args:
        attackers: the first so many workers attack.
        rule: text of a robust rule, or ``mean``.
        momentum: each worker sends m <- momentum * m + (1 - momentum) * gradient.
    """

    def __init__(
        self, workers: int, attackers: int, attack: str, rule: str, momentum: float, seed: int
    ) -> None:
        self._attackers, self._workers = attackers, workers
        self._attack = ATTACKS.get(attack)
        self._aggregation = read_aggregation("" if rule == MEAN else rule)
        self._momentum = momentum
        text = _text()
        self._characters = len(text.vocabulary)
        config = ModelConfig(vocabulary_size=self._characters, context=CONTEXT, width=32, heads=4, layers=1)
        self._model = GPT(config, seed=seed)
        self._names = [name for name, _ in self._model.named_parameters()]
        self._batches = Batches(text.train, context=CONTEXT, batch_size=BATCH, peers=workers, seed=seed)
        self._held_out = held_out_windows(text.held_out, context=CONTEXT, count=HELD_OUT)
        self._sent: torch.Tensor | None = None

    def train(self, steps: int) -> float:
        """Train, and return the held-out loss in nats per character; infinity if the parameters are not finite."""
        parameters = list(self._model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95))
        with sdpa_kernel(SDPBackend.MATH):  # the only one that computes all workers' gradients at once
            for step in range(steps):
                combined = combine_shares(self._contributions(step), self._aggregation)
                pieces = torch.split(combined, [each.numel() for each in parameters])
                for parameter, piece in zip(parameters, pieces, strict=True):
                    parameter.grad = piece.view_as(parameter)
                optimizer.step()
            with torch.no_grad():
                loss = float(self._model.loss(self._held_out))
        return loss if math.isfinite(loss) else math.inf

    def _contributions(self, step: int) -> torch.Tensor:
        """Return what the workers send, (workers, parameters)."""
        windows = torch.stack([self._batches.of_peer(worker, step) for worker in range(self._workers)])
        inputs, targets = windows[:, :, :-1], windows[:, :, 1:]
        gradients = self._gradients(inputs, targets)
        if self._momentum:
            before = torch.zeros_like(gradients) if self._sent is None else self._sent
            gradients = self._sent = self._momentum * before + (1 - self._momentum) * gradients
        if self._attack is None or not self._attackers:
            return gradients
        count = self._attackers
        flipped = gradients[:count]
        if self._attack is ATTACKS["label_flip"]:
            flipped = self._gradients(inputs[:count], self._characters - 1 - targets[:count])
        gradients = gradients.clone()
        gradients[:count] = self._attack(Known(gradients[:count].clone(), flipped, gradients[count:]))
        return gradients

    def _gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return each worker's gradient, (workers, parameters), of int64 (workers, BATCH, CONTEXT)."""
        parameters = {name: each.detach() for name, each in self._model.named_parameters()}

        def loss(given: dict[str, torch.Tensor], seen: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            logits = functional_call(self._model, given, (seen,))
            return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())

        found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, targets)
        return torch.cat([found[name].flatten(1) for name in self._names], 1)


def combine_shares(rows: torch.Tensor, aggregation: Aggregation) -> torch.Tensor:
    """Return the result of a group whose members contribute the rows, float32 (members, n), with equal weights."""
    members, elements = rows.shape
    out, codec = torch.empty(elements), Fp32()
    size = part_size(elements, members)
    for start, stop in _bounds(elements, members):
        for part in cut_into_parts(start, stop, codec.granularity, size):
            span = slice(part.start, part.stop)
            contributions = [PartContribution(str(index), 1.0, row[span]) for index, row in enumerate(rows)]
            average_part(codec, contributions, float(members), out[span], robust=aggregation.robust)
    return out


def _bounds(elements: int, members: int) -> Sequence[tuple[int, int]]:
    edges = [elements * index // members for index in range(members + 1)]
    return list(itertools.pairwise(edges))
