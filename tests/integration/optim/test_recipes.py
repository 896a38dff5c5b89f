"""Each algorithm compared with a plain implementation in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from p2pavg.blocking import Averager
from p2pavg.optim import LocalUpdates, diloco, fedadagrad, fedadam, fedavg, fedprox, fedyogi
from tests.integration.optim.company import Batches, loss_of, small_model, train_together, until, vector_of

PEERS = 3
OUTER_STEPS = 10
SYNC_EVERY = 4
SIZES = (2, 4, 6)  # of the peers' batches; they differ, and so do the peers' weights
MU = 0.3

Recipe = Callable[[Optimizer, Averager], LocalUpdates]
OuterStep = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function from the anchor and the averaged pseudo-gradient to the next anchor."""


def sgd(model: torch.nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05)


def adamw(model: torch.nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=3e-3)


def load(model: torch.nn.Module, vector: torch.Tensor) -> None:
    torch.nn.utils.vector_to_parameters(vector.clone(), model.parameters())


def reference(
    inner: Callable[[torch.nn.Module], Optimizer], outer: OuterStep, mu: float = 0.0
) -> torch.Tensor:
    """Run the algorithm in one process, in float64 between the inner steps; return the final anchor."""
    models = [small_model() for _ in range(PEERS)]
    optimizers = [inner(model) for model in models]
    batches = [Batches(peer, SIZES[peer]) for peer in range(PEERS)]
    anchor = vector_of(models[0]).double()
    for _ in range(OUTER_STEPS):
        pseudo = torch.zeros_like(anchor)
        for model, optimizer, mine in zip(models, optimizers, batches, strict=True):
            load(model, anchor.float())
            for _ in range(SYNC_EVERY):
                optimizer.zero_grad()
                loss = loss_of(model, mine.next())
                away = torch.nn.utils.parameters_to_vector(model.parameters()) - anchor.float()
                torch.autograd.backward(loss + mu / 2 * away.square().sum())
                optimizer.step()
            pseudo += (anchor - vector_of(model).double()) * mine.size / sum(SIZES)
        anchor = outer(anchor, pseudo)
    return anchor


def together(inner: Callable[[torch.nn.Module], Optimizer], recipe: Recipe) -> list[torch.Tensor]:
    """Run the algorithm with real peers; return the final parameters of all."""

    def work(peer: int, averager: Averager) -> torch.Tensor:
        model, batches = small_model(), Batches(peer, SIZES[peer])
        optimizer = recipe(inner(model), averager)
        for _ in until(optimizer, OUTER_STEPS):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, batches.next()))
            report = optimizer.step(samples=batches.size)
            assert report.behind is None
        return vector_of(model)

    return train_together(work, PEERS)


class Nesterov:
    """Nesterov momentum (Sutskever et al. 2013), in torch's form."""

    def __init__(self, lr: float, momentum: float) -> None:
        self._lr, self._momentum = lr, momentum
        self._velocity: torch.Tensor | None = None

    def __call__(self, anchor: torch.Tensor, pseudo: torch.Tensor) -> torch.Tensor:
        before = torch.zeros_like(pseudo) if self._velocity is None else self._velocity
        self._velocity = self._momentum * before + pseudo
        return anchor - self._lr * (pseudo + self._momentum * self._velocity)


class Auto:
    """The same with the rate, and with the memory, of AutoSGD."""

    def __init__(self, lr: float, momentum: float) -> None:
        self._lr, self._momentum = lr, momentum
        self._velocity: torch.Tensor | float = 0.0
        self._before: torch.Tensor | None = None
        self._correlation = 0.0

    def __call__(self, anchor: torch.Tensor, pseudo: torch.Tensor) -> torch.Tensor:
        kept = self._momentum
        if self._before is not None:
            length, before = float(pseudo.norm()), float(self._before.norm())
            kept *= round(4096 * min(length / before, 1.0)) / 4096
            newest = round(4096 * float(pseudo @ self._before) / (length * before)) / 4096
            self._correlation = 0.8 * self._correlation + 0.2 * newest
        self._velocity, self._before = kept * self._velocity + pseudo, pseudo
        rate = self._lr * (1 - self._momentum * max(self._correlation, 0.0))
        return anchor - rate * (pseudo + self._momentum * self._velocity)


class Adaptive:
    """Algorithm 2 of Reddi et al. 2021, with Delta = -pseudo."""

    def __init__(self, kind: str, lr: float = 1e-2, beta1: float = 0.9, beta2: float = 0.99) -> None:
        self._kind, self._lr, self._beta1, self._beta2 = kind, lr, beta1, beta2
        self._tau = 1e-3
        self._m: torch.Tensor | float = 0.0
        self._v: torch.Tensor | float = self._tau**2

    def __call__(self, anchor: torch.Tensor, pseudo: torch.Tensor) -> torch.Tensor:
        delta = -pseudo
        self._m = self._beta1 * self._m + (1 - self._beta1) * delta
        squared = delta.square()
        if self._kind == "adagrad":
            self._v = self._v + squared
        elif self._kind == "adam":
            self._v = self._beta2 * self._v + (1 - self._beta2) * squared
        else:
            self._v = self._v - (1 - self._beta2) * squared * torch.sign(self._v - squared)
        return anchor + self._lr * self._m / (torch.as_tensor(self._v).sqrt() + self._tau)


CASES: list[tuple[str, Callable[[torch.nn.Module], Optimizer], Recipe, OuterStep, float]] = [
    (
        "fedavg",
        sgd,
        lambda inner, a: fedavg(inner, a, sync_every=SYNC_EVERY, peers_to_start=PEERS),
        lambda a, p: a - p,
        0.0,
    ),
    (
        "fedprox",
        sgd,
        lambda inner, a: fedprox(inner, a, sync_every=SYNC_EVERY, mu=MU, peers_to_start=PEERS),
        lambda a, p: a - p,
        MU,
    ),
    (
        "diloco",
        adamw,
        lambda inner, a: diloco(inner, a, sync_every=SYNC_EVERY, peers_to_start=PEERS),
        Auto(0.7, 0.9),
        0.0,
    ),
    (
        "diloco with a fixed rate",
        adamw,
        lambda inner, a: diloco(inner, a, sync_every=SYNC_EVERY, lr=0.7, peers_to_start=PEERS),
        Nesterov(0.7, 0.9),
        0.0,
    ),
    (
        "fedadagrad",
        sgd,
        lambda inner, a: fedadagrad(inner, a, sync_every=SYNC_EVERY, peers_to_start=PEERS),
        Adaptive("adagrad"),
        0.0,
    ),
    (
        "fedadam",
        sgd,
        lambda inner, a: fedadam(inner, a, sync_every=SYNC_EVERY, peers_to_start=PEERS),
        Adaptive("adam"),
        0.0,
    ),
    (
        "fedyogi",
        sgd,
        lambda inner, a: fedyogi(inner, a, sync_every=SYNC_EVERY, peers_to_start=PEERS),
        Adaptive("yogi"),
        0.0,
    ),
]


@pytest.mark.parametrize(
    ("inner", "recipe", "outer", "mu"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_recipe_matches_one_process(
    inner: Callable[[torch.nn.Module], Optimizer], recipe: Recipe, outer: OuterStep, mu: float
) -> None:
    expected = reference(inner, outer, mu)
    found = together(inner, recipe)
    assert all(torch.equal(one, found[0]) for one in found), "peers with different parameters"
    assert (found[0].double() - expected).abs().max() < 1e-5
    assert (expected - vector_of(small_model()).double()).abs().max() > 1e-2, "nothing was learned"
