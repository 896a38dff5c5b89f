"""Published algorithms of local updates, each :class:`LocalUpdates` with the paper's defaults."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from p2pavg.blocking import Averager
from p2pavg.optim.local import LocalUpdates
from p2pavg.optim.outer import FedAdagrad, FedAdam, FedYogi


def diloco(
    inner: Optimizer,
    averager: Averager,
    *,
    sync_every: int = 500,
    lr: float = 0.7,
    momentum: float = 0.9,
    **options: Any,
) -> LocalUpdates:
    """DiLoCo: an outer SGD with Nesterov momentum (Douillard et al. 2023, section 2 and table 5; inner: AdamW).

    Args:
        options: further options of :class:`LocalUpdates`; all functions of this module have them.
    """
    outer = partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)
    return LocalUpdates(inner, outer, averager, sync_every=sync_every, **options)


def fedavg(inner: Optimizer, averager: Averager, *, sync_every: int, **options: Any) -> LocalUpdates:
    """FedAvg: the parameters' mean, weighted by samples (McMahan et al. 2017, algorithm 1; inner: SGD)."""
    return LocalUpdates(inner, partial(torch.optim.SGD, lr=1.0), averager, sync_every=sync_every, **options)


def fedprox(
    inner: Optimizer, averager: Averager, *, sync_every: int, mu: float, **options: Any
) -> LocalUpdates:
    """FedProx: FedAvg whose inner steps are pulled towards the anchor (Li et al. 2020, algorithm 2).

    Args:
        mu: strength of the pull; the paper tries 0.001 to 1.
    """
    return fedavg(inner, averager, sync_every=sync_every, proximal=mu, **options)


def fedadagrad(
    inner: Optimizer,
    averager: Averager,
    *,
    sync_every: int,
    lr: float = 1e-2,
    tau: float = 1e-3,
    **options: Any,
) -> LocalUpdates:
    """FedAdagrad (Reddi et al. 2021, algorithm 2)."""
    return LocalUpdates(
        inner, partial(FedAdagrad, lr=lr, tau=tau), averager, sync_every=sync_every, **options
    )


def fedadam(
    inner: Optimizer,
    averager: Averager,
    *,
    sync_every: int,
    lr: float = 1e-2,
    betas: tuple[float, float] = (0.9, 0.99),
    tau: float = 1e-3,
    **options: Any,
) -> LocalUpdates:
    """FedAdam (Reddi et al. 2021, algorithm 2)."""
    outer = partial(FedAdam, lr=lr, betas=betas, tau=tau)
    return LocalUpdates(inner, outer, averager, sync_every=sync_every, **options)


def fedyogi(
    inner: Optimizer,
    averager: Averager,
    *,
    sync_every: int,
    lr: float = 1e-2,
    betas: tuple[float, float] = (0.9, 0.99),
    tau: float = 1e-3,
    **options: Any,
) -> LocalUpdates:
    """FedYogi (Reddi et al. 2021, algorithm 2)."""
    outer = partial(FedYogi, lr=lr, betas=betas, tau=tau)
    return LocalUpdates(inner, outer, averager, sync_every=sync_every, **options)
