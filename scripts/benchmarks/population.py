"""Population based training beside random search of the same budget: scripts/bench population [--seeds 10].

Members train a small network on scikit-learn's digits, each with its own learning rate and weight decay. In random
search they keep those with which they began. In population based training they begin with the same, and copy the better
ones every few steps. Both have as many members, steps and batches. The member with the best validation loss at the end
is taken, and its loss on the test images is compared.

The members are peers of a simulated network on virtual time, with the real population, boards and transfers. Every
decision is repeated from the published words.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

import p2pavg
from p2pavg.population import History, LogUniform, Population, PopulationSettings, check_decision
from p2pavg.population.settings import Value
from p2pavg.testing import MemoryNetwork, SimulatedLoop, run_loops, simulate

SPACE = {"lr": LogUniform(1e-5, 1.0), "weight_decay": LogUniform(1e-6, 1e-1)}
BATCH = 32
STEP_SECONDS = 0.2  # virtual
WAIT_SECONDS = 20.0  # virtual
TRAIN, VALIDATION = 1000, 300
"""Images; the rest are for the test."""


def main() -> int:
    """Run the comparison; return the exit status, 1 if population based training wins in less than 8 of 10 seeds."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench population",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--generations", type=int, default=16)
    parser.add_argument("--interval", type=int, default=16, help="steps of a generation")
    parser.add_argument("--exploit", choices=["truncation", "tournament"], default="truncation")
    parser.add_argument("--explore", choices=["perturb", "resample"], default="perturb")
    parser.add_argument("--picture", type=Path, help="file for the learning rates of the first seed, as SVG")
    given = parser.parse_args()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    found = [compare(seed, given) for seed in seeds]
    table = Table("seed", "random search", "PBT", "test images right", "copies", "decisions repeated")
    for seed, (alone, together) in zip(seeds, found, strict=True):
        right = f"{100 * alone.right:.1f} % / {100 * together.right:.1f} %"
        table.add_row(
            str(seed),
            f"{alone.test:.3f}",
            f"{together.test:.3f}",
            right,
            str(together.copies),
            f"{together.repeated}",
        )
    won = sum(together.test < alone.test for alone, together in found)
    table.caption = f"test loss in nats; population based training is better in {won} of {len(found)} seeds"
    Console().print(table)
    history = found[0][1].history
    if given.picture is not None and history is not None:
        draw_rates(history, given.picture)
    return int(won < 0.8 * len(found))


@dataclass(frozen=True)
class Outcome:
    """One seed's best member."""

    validation: float
    test: float
    right: float
    """Fraction of the test images that it recognises."""
    copies: int = 0
    repeated: int = 0
    """Decisions that were repeated from the published words."""
    history: History | None = None
    """The words that this member has seen."""


@dataclass(frozen=True)
class Digits:
    """The images and labels, divided by a seed."""

    inputs: torch.Tensor
    """(1797, 64), float32 from 0 to 1."""
    labels: torch.Tensor
    """(1797,), int64."""

    @classmethod
    def load(cls, seed: int) -> Digits:
        """Load them in an order that follows from a seed."""
        from sklearn.datasets import load_digits  # only this benchmark needs it

        data = load_digits()
        order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
        inputs = torch.tensor(data.data, dtype=torch.float32) / 16.0
        return cls(inputs[order], torch.tensor(data.target)[order])

    def loss(self, model: nn.Module, first: int, last: int) -> float:
        """Return the mean cross entropy of some images, in nats."""
        with torch.no_grad():
            return float(functional.cross_entropy(model(self.inputs[first:last]), self.labels[first:last]))

    def outcome(self, model: nn.Module) -> Outcome:
        """Return the result of one member."""
        end = TRAIN + VALIDATION
        with torch.no_grad():
            right = (model(self.inputs[end:]).argmax(1) == self.labels[end:]).float().mean()
        return Outcome(self.loss(model, TRAIN, end), self.loss(model, end, len(self.labels)), float(right))


class Trainee:
    """One member's model and batches."""

    def __init__(self, digits: Digits, seed: int, index: int) -> None:
        self.digits = digits
        with torch.random.fork_rng():
            torch.manual_seed(1000 * seed + index)
            self.model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self._generator = torch.Generator().manual_seed(1000 * seed + index)

    def step(self) -> None:
        """Take one step on a batch."""
        rows = torch.randint(TRAIN, (BATCH,), generator=self._generator)
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(self.digits.inputs[rows]), self.digits.labels[rows])
        torch.autograd.backward(loss)
        self.optimizer.step()

    def score(self) -> float:
        """Return the validation loss."""
        return self.digits.loss(self.model, TRAIN, TRAIN + VALIDATION)


def settings_of(seed: int, given: argparse.Namespace) -> PopulationSettings:
    """Return the settings of one seed's population."""
    return PopulationSettings(
        space=SPACE, interval=given.interval, exploit=given.exploit, explore=given.explore, seed=seed
    )


def first_of(settings: PopulationSettings, index: int) -> dict[str, Value]:
    """Return the hyperparameters with which a member begins, the same in both."""
    return settings.first(f"member {index}")


def compare(seed: int, given: argparse.Namespace) -> tuple[Outcome, Outcome]:
    """Return the outcomes of random search and of population based training."""
    torch.set_num_threads(1)
    digits, settings = Digits.load(seed), settings_of(seed, given)
    alone = search(digits, settings, seed, given)
    network = MemoryNetwork(latency=(0.002, 0.01), seed=seed)
    config = p2pavg.AveragingConfig(run_id="digits")
    work = partial(train, digits=digits, settings=settings, seed=seed, given=given)
    found = simulate(partial(run_loops, network, given.members, work, config=config), seed=seed)
    best = min(found.values(), key=lambda outcome: outcome.validation)
    return alone, Outcome(
        best.validation,
        best.test,
        best.right,
        copies=found[0].copies,
        repeated=found[0].repeated,
        history=found[0].history,
    )


def search(digits: Digits, settings: PopulationSettings, seed: int, given: argparse.Namespace) -> Outcome:
    """Train each member with its first hyperparameters; return the best member's outcome."""
    found = []
    for index in range(given.members):
        trainee = Trainee(digits, seed, index)
        for group in trainee.optimizer.param_groups:
            group.update(first_of(settings, index))
        for _ in range(given.generations * given.interval):
            trainee.step()
        found.append(digits.outcome(trainee.model))
    return min(found, key=lambda outcome: outcome.validation)


def train(
    loop: SimulatedLoop, *, digits: Digits, settings: PopulationSettings, seed: int, given: argparse.Namespace
) -> Outcome:
    """Train one member of the population."""
    trainee = Trainee(digits, seed, loop.index)
    population = Population(
        loop.averager,
        trainee.model,
        trainee.optimizer,
        settings,
        member=f"member {loop.index}",
        wait=WAIT_SECONDS,
        members=given.members,
    )
    # The score of the last step is the last decision's: the search trains as many steps, and decides nothing.
    for _ in range(given.generations * given.interval - 1):
        trainee.step()
        loop.sleep(STEP_SECONDS)
        population.step(trainee.score)
    trainee.step()
    outcome = digits.outcome(trainee.model)
    loop.sleep(WAIT_SECONDS)
    known, copies, repeated = population.history.known(), 0, 0
    for peer, word in population.history.words():
        if word.decision is None or not set(word.decision.basis) <= known.keys():
            continue
        if why := check_decision(peer, word, known, settings):
            raise AssertionError(f"a decision of {peer} does not follow from the words: {why}")
        repeated += 1
        copies += bool(word.decision.donor)
    return Outcome(outcome.validation, outcome.test, outcome.right, copies, repeated, population.history)


def draw_rates(history: History, path: Path) -> None:
    """Draw the learning rate of each member, and an arrow for each copy: from the donor's rate to the next one."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    rates: dict[str, dict[int, float]] = {}
    for each in history.generations:
        rates.setdefault(each.peer_id, {})[each.generation] = float(each.hyperparameters["lr"])
    for curve in rates.values():
        axes.plot(list(curve), list(curve.values()))
    known = history.known()
    for _, word in history.words():
        if word.decision is not None and word.decision.donor in known:
            donor = known[word.decision.donor][1]
            start = donor.generation, float(dict(donor.hyperparameters)["lr"])
            end = word.standing.generation + 1, float(dict(word.decision.hyperparameters)["lr"])
            axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "grey"})
    axes.set(xlabel="generation", ylabel="lr", yscale="log")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
