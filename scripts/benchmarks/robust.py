"""Robust rules beside the mean while some members lie, with plain gradient descent: the table of
contributions-that-lie.md.

scripts/bench robust                     3 of 8 members lie
scripts/bench robust --liars 1,2,3       tables for one, two and three liars

Eight members train a perceptron of 754 parameters for 80 steps of plain gradient descent on points of ten overlapping
classes, eight points a batch. Each cell is the test loss at the end, in nats: the median of the seeds, and the range.
Plain gradient descent hides nothing: an optimizer that divides gradients by their size makes up for those that are too
long, as AdamW does in ``scripts/bench attack``.

* ``sign x10``: minus ten times the own gradient.
* ``ipm``: minus three times the mean of the honest gradients (inner-product manipulation, Xie et al. 2019).
* ``bias``: the mean of the honest gradients, and in each coordinate two of their standard deviations more or less, with
  the same signs in every step. No value of it stands out in a step; what it adds never averages out.
* ``label flip``: the gradient of a batch whose labels are c -> 9 - c.
* ``alie``: "a little is enough" (Baruch et al. 2019), as in ``scripts/bench attack``.

One process plays all members, without a network. It combines with the function that a reducer uses.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from p2pavg.group.aggregation import Aggregation, read_aggregation
from scripts.benchmarks.attack import MEAN, Known, a_little, combine_shares

MEMBERS = 8
STEPS = 80
BATCH = 8
RATE = 0.2
INPUTS, HIDDEN, CLASSES = 20, 24, 10
TEST_POINTS = 4000
RULES = f"{MEAN},trimmed_mean:0.25,median,centered_clip:1.0:3"
SHAPES = [(HIDDEN, INPUTS), (HIDDEN,), (CLASSES, HIDDEN), (CLASSES,)]
PARAMETERS = sum(math.prod(shape) for shape in SHAPES)
DEVIATIONS = 2.0

Attack = Callable[[Known, torch.Tensor], torch.Tensor]
"""Returns what the liars send, given what they know and the signs that each run draws once."""

ATTACKS: dict[str, Attack] = {
    "sign x10": lambda known, _: -10 * known.own,
    "ipm": lambda known, _: (-3 * known.honest.mean(0)).expand_as(known.own),
    "bias": lambda known, signs: (known.honest.mean(0) + DEVIATIONS * signs * known.honest.std(0)).expand_as(
        known.own
    ),
    "label flip": lambda known, _: known.flipped,
    "alie": lambda known, _: a_little(known),
}


def loss_of(flat: torch.Tensor, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of the perceptron whose parameters are ``flat``."""
    one, bias, two, offset = (
        piece.view(shape)
        for piece, shape in zip(torch.split(flat, [math.prod(each) for each in SHAPES]), SHAPES, strict=True)
    )
    hidden = torch.tanh(functional.linear(points, one, bias))
    return functional.cross_entropy(functional.linear(hidden, two, offset), labels)


def gradient(flat: torch.Tensor, points: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the loss."""
    (found,) = torch.autograd.grad(loss_of(flat.requires_grad_(), points, labels), flat)
    return found


def train(attack: Attack | None, liars: int, aggregation: Aggregation, seed: int) -> float:
    """Train, and return the test loss; infinity if the parameters are not finite."""
    dice = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, INPUTS, generator=dice)

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(CLASSES, (count,), generator=dice)
        return centres[labels] + 1.5 * torch.randn(count, INPUTS, generator=dice), labels

    test = draw(TEST_POINTS)
    flat = 0.3 * torch.randn(PARAMETERS, generator=dice)
    signs = torch.randint(2, (PARAMETERS,), generator=dice).float() * 2 - 1
    for _ in range(STEPS):
        batches = [draw(BATCH) for _ in range(MEMBERS)]
        rows = torch.stack([gradient(flat, *batch) for batch in batches])
        if attack is not None and liars:
            flipped = torch.stack(
                [gradient(flat, points, CLASSES - 1 - labels) for points, labels in batches[:liars]]
            )
            rows[:liars] = attack(Known(rows[:liars].clone(), flipped, rows[liars:]), signs)
        flat = flat.detach() - RATE * combine_shares(rows, aggregation)
        if not bool(flat.isfinite().all()) or float(flat.abs().max()) > 1e18:
            return math.inf  # a peer that sent such values would be left out of the round
    return float(loss_of(flat, *test))


def cell(losses: Sequence[float]) -> str:
    """Return the median and the range of some losses."""

    def short(loss: float) -> str:
        return f"{loss:.2f}" if loss < 100 else f"{loss:.0e}".replace("e+0", "e").replace("e+", "e")

    return f"{short(statistics.median(losses))} ({short(min(losses))} to {short(max(losses))})"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a table for each number of liars."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--liars", default="3", help="numbers of members that lie")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rules", default=RULES, help=f"texts of rules, and {MEAN}")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rules = arguments.rules.split(",")
    for liars in map(int, arguments.liars.split(",")):
        table = Table(title=f"test loss with {liars} of {MEMBERS} liars, {arguments.seeds} seeds")
        for head in ("attack", *rules):
            table.add_column(head)
        for name, attack in {"none": None, **ATTACKS}.items():
            found = [
                [
                    train(attack, liars, read_aggregation("" if rule == MEAN else rule), seed)
                    for seed in range(arguments.seeds)
                ]
                for rule in rules
            ]
            table.add_row(name, *map(cell, found))
        Console(width=150).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
