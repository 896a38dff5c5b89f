"""Each algorithm of local updates compared with a plain implementation in one process; on virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from p2pavg.optim import LocalUpdates, diloco, fedadagrad, fedadam, fedavg, fedprox, fedyogi
from p2pavg.testing import SimulatedLoop
from tests.integration.optim.company import Batches, loss_of, small_model, until, vector_of
from tests.simulation.training import one_step, train_together

PEERS = 3
OUTER_STEPS = 4
SYNC_EVERY = 3
SIZES = (2, 4, 6)  # of the peers' batches; they differ, and so do the peers' weights
MU = 0.3

Recipe = Callable[..., LocalUpdates]
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


def together(
    inner: Callable[[torch.nn.Module], Optimizer], recipe: Recipe, options: dict[str, Any]
) -> list[torch.Tensor]:
    """Run the algorithm with peers on a simulated network; return the final parameters of all."""

    def work(loop: SimulatedLoop) -> torch.Tensor:
        model, batches = small_model(), Batches(loop.index, SIZES[loop.index])
        optimizer = recipe(
            inner(model), loop.averager, sync_every=SYNC_EVERY, peers_to_start=PEERS, **options
        )
        for _ in until(optimizer, OUTER_STEPS):
            assert one_step(loop, model, batches, optimizer).behind is None
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


def move(anchor: torch.Tensor, pseudo: torch.Tensor) -> torch.Tensor:
    """Take the outer step of federated averaging."""
    return anchor - pseudo


CASES: dict[str, tuple[Callable[[torch.nn.Module], Optimizer], Recipe, dict[str, Any], OuterStep]] = {
    "fedavg": (sgd, fedavg, {}, move),
    "fedprox": (sgd, fedprox, {"mu": MU}, move),
    "diloco": (adamw, diloco, {}, Auto(0.7, 0.9)),
    "diloco with a fixed rate": (adamw, diloco, {"lr": 0.7}, Nesterov(0.7, 0.9)),
    "fedadagrad": (sgd, fedadagrad, {}, Adaptive("adagrad")),
    "fedadam": (sgd, fedadam, {}, Adaptive("adam")),
    "fedyogi": (sgd, fedyogi, {}, Adaptive("yogi")),
}


@pytest.mark.parametrize(("inner", "recipe", "options", "outer"), CASES.values(), ids=CASES)
def test_recipe_matches_one_process(
    inner: Callable[[torch.nn.Module], Optimizer], recipe: Recipe, options: dict[str, Any], outer: OuterStep
) -> None:
    expected = reference(inner, outer, options.get("mu", 0.0))
    found = together(inner, recipe, options)
    assert all(torch.equal(one, found[0]) for one in found), "peers with different parameters"
    assert (found[0].double() - expected).abs().max() < 1e-5
    assert (expected - vector_of(small_model()).double()).abs().max() > 5e-3, "nothing was learned"
