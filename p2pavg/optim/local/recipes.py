"""Published algorithms of local updates, each :class:`LocalUpdates` with the paper's defaults."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch.optim import Optimizer

from p2pavg.blocking import Averager
from p2pavg.optim.local.anchor import Outer
from p2pavg.optim.local.local import LocalUpdates
from p2pavg.optim.local.local_options import SyncEvery
from p2pavg.optim.local.outer import AutoSGD, FedAdagrad, FedAdam, FedYogi
from p2pavg.optim.mixing.mixed import MixedUpdates
from p2pavg.optim.mixing.mixing import check_rates, group_size_in

Inner = Optimizer | Sequence[Optimizer]
Rate: TypeAlias = float | Literal["auto"]


def sgd(lr: Rate, momentum: float, *, auto: float = 0.7) -> Outer:
    """Return a factory of SGD with Nesterov momentum: of :class:`AutoSGD` if the rate is ``"auto"``.

    Args:
        auto: rate of the latter for uncorrelated averages.

    Raises:
        ValueError: the rate is neither a number nor "auto".
    """
    if lr == "auto":
        return partial(AutoSGD, lr=auto, momentum=momentum)
    if isinstance(lr, bool) or not isinstance(lr, int | float):
        raise ValueError(f'lr must be a number or "auto", got {lr!r}')  # noqa: TRY004 - as for a number out of range
    return partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)


def diloco(
    inner: Inner,
    averager: Averager,
    *,
    sync_every: SyncEvery = 500,
    lr: Rate = "auto",
    momentum: float = 0.9,
    **options: Any,
) -> LocalUpdates:
    """DiLoCo: an outer SGD with Nesterov momentum (Douillard et al. 2023, section 2 and table 5; inner: AdamW).

    Args:
        lr: ``"auto"``: the paper's 0.7 for averages that are uncorrelated, and less for others; see
            :class:`AutoSGD`. A number is the rate of torch's SGD.
        options: further options of :class:`LocalUpdates`; all functions of this module have them.
    """
    return LocalUpdates(inner, sgd(lr, momentum), averager, sync_every=sync_every, **options)


def sparseloco(
    inner: Inner, averager: Averager, *, sync_every: SyncEvery = 30, lr: float = 2.0, **options: Any
) -> LocalUpdates:
    """SparseLoCo: DiLoCo with few values in few bits (Sarfi et al. 2025, algorithm 1; inner: AdamW).

    The outer optimizer is SGD without momentum: the decay of the feedback's residual takes its place. For
    ``AveragingConfig(compression="topk")``, with the :class:`ErrorFeedback` that goes with it.

    Args:
        lr: the paper has 1. With the default ``"topk"`` an average has 1 of 32 values, so a value waits for T = 32
            averages or so, and a residual that decays by b = 0.95 keeps (1 - b^T) / (T (1 - b)) of it: half. A rate of
            2 makes up for that. The noise of a higher one goes only when the inner rate falls.
    """
    return LocalUpdates(inner, partial(torch.optim.SGD, lr=lr), averager, sync_every=sync_every, **options)


def fedavg(inner: Inner, averager: Averager, *, sync_every: SyncEvery, **options: Any) -> LocalUpdates:
    """FedAvg: the parameters' mean, weighted by samples (McMahan et al. 2017, algorithm 1; inner: SGD)."""
    return LocalUpdates(inner, partial(torch.optim.SGD, lr=1.0), averager, sync_every=sync_every, **options)


def fedprox(
    inner: Inner, averager: Averager, *, sync_every: SyncEvery, mu: float, **options: Any
) -> LocalUpdates:
    """FedProx: FedAvg whose inner steps are pulled towards the anchor (Li et al. 2020, algorithm 2).

    Args:
        mu: strength of the pull; the paper tries 0.001 to 1.
    """
    return fedavg(inner, averager, sync_every=sync_every, proximal=mu, **options)


def fedadagrad(
    inner: Inner,
    averager: Averager,
    *,
    sync_every: SyncEvery,
    lr: float = 1e-2,
    tau: float = 1e-3,
    **options: Any,
) -> LocalUpdates:
    """FedAdagrad (Reddi et al. 2021, algorithm 2)."""
    return LocalUpdates(
        inner, partial(FedAdagrad, lr=lr, tau=tau), averager, sync_every=sync_every, **options
    )


def fedadam(
    inner: Inner,
    averager: Averager,
    *,
    sync_every: SyncEvery,
    lr: float = 1e-2,
    betas: tuple[float, float] = (0.9, 0.99),
    tau: float = 1e-3,
    **options: Any,
) -> LocalUpdates:
    """FedAdam (Reddi et al. 2021, algorithm 2)."""
    outer = partial(FedAdam, lr=lr, betas=betas, tau=tau)
    return LocalUpdates(inner, outer, averager, sync_every=sync_every, **options)


def fedyogi(
    inner: Inner,
    averager: Averager,
    *,
    sync_every: SyncEvery,
    lr: float = 1e-2,
    betas: tuple[float, float] = (0.9, 0.99),
    tau: float = 1e-3,
    **options: Any,
) -> LocalUpdates:
    """FedYogi (Reddi et al. 2021, algorithm 2)."""
    outer = partial(FedYogi, lr=lr, betas=betas, tau=tau)
    return LocalUpdates(inner, outer, averager, sync_every=sync_every, **options)


def gossip(
    inner: Inner,
    averager: Averager,
    *,
    sync_every: SyncEvery = 50,
    lr: Rate = "auto",
    momentum: float = 0.5,
    **options: Any,
) -> MixedUpdates:
    """Gossip with momentum: a peer takes its group's average, and goes on in the direction of its averages.

    The groups are drawn anew for each round (Boyd et al. 2006, "Randomized Gossip Algorithms"; Ryabinin et al. 2021).
    The momentum is that of GASLoC (Cagnasso et al. 2026, arXiv 2606.11081), of the groups' averages in place of the
    peer's own parameters.

    Args:
        lr: ``"auto"``: 1 if the peer's steps are uncorrelated, and less for others; see :class:`AutoSGD`.
        momentum: 0 for plain gossip.
        options: further options of :class:`MixedUpdates`, such as ``group_size``.

    Raises:
        ValueError: a number is out of range, or the anchors would not come together.
    """
    size = group_size_in(averager.config, options.get("group_size"))
    check_rates(1.0 if lr == "auto" else lr, momentum, size, nesterov=True)
    return MixedUpdates(inner, sgd(lr, momentum, auto=1.0), averager, sync_every=sync_every, **options)


def noloco(
    inner: Inner,
    averager: Averager,
    *,
    sync_every: SyncEvery = 50,
    lr: float = 0.7,
    momentum: float = 0.5,
    **options: Any,
) -> MixedUpdates:
    """NoLoCo: DiLoCo's outer step with one random peer, and a pull to its anchor (Kolehmainen et al. 2025, section 3).

    Args:
        lr: beta, the rate of the pseudo-gradients, and gamma, that at which a peer's anchor goes to its group's: the
            authors' program has one number for both.
        momentum: alpha.
        options: further options of :class:`MixedUpdates`, such as ``group_size``.

    Raises:
        ValueError: a number is out of range, or the anchors would not come together.
    """
    check_rates(lr, momentum, group_size_in(averager.config, options.get("group_size")))
    outer = partial(torch.optim.SGD, lr=lr, momentum=momentum)
    return MixedUpdates(inner, outer, averager, sync_every=sync_every, **options)
