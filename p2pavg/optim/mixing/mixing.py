"""Mixing: peers whose parameters differ average in small groups, with other peers in each round. No I/O, no clock.

The peers' anchors differ, and each round brings them nearer: groups of g random peers divide the mean squared distance
from the mean by g. :mod:`p2pavg.group.places.gossip` has the places where groups are found, and counts the rounds.

Peers that are more than ``max_lag`` rounds apart do not average: a peer that comes with the first parameters would pull
its partner half the way back.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from p2pavg.base.limits import MAX_GROUP_SIZE
from p2pavg.group.places.gossip import OUTER_STEP
from p2pavg.group.topology import Gossip
from p2pavg.optim.base.recipe import Settings
from p2pavg.optim.base.state import checked_amount, checked_count
from p2pavg.runs.config import AveragingConfig

ROUND = OUTER_STEP
"""Metric of a contribution: the number of this peer's outer steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingOptions:
    """Options of :class:`~p2pavg.optim.MixedUpdates`, which documents them."""

    group_size: int
    partner_timeout: float
    max_lag: int

    @property
    def rules(self) -> Settings:
        """The settings that all peers of a run share, for the recipe."""
        return (("mixing", "groups"), ("group_size", self.group_size))


def checked_mixing(*, group_size: int, partner_timeout: float, max_lag: int, least: int) -> MixingOptions:
    """Return the options; raise ValueError, with the argument's name, if one is out of range.

    Args:
        least: the run's ``min_group_size``.
    """
    if not max(least, 2) <= checked_count("group_size", group_size) <= MAX_GROUP_SIZE:
        raise ValueError(
            f"group_size must be from {max(least, 2)}, the config's min_group_size, to {MAX_GROUP_SIZE},"
            f" got {group_size}"
        )
    return MixingOptions(
        group_size=group_size,
        partner_timeout=checked_amount("partner_timeout", partner_timeout),
        max_lag=checked_count("max_lag", max_lag),
    )


def group_size_in(config: AveragingConfig, given: int | None) -> int:
    """Return the members of a group: as given, by the topology, or 2.

    Raises:
        ValueError: the topology says another number.
    """
    topology = config.aggregation.topology
    if not isinstance(topology, Gossip):
        return 2 if given is None else given
    if given not in (None, topology.group_size):
        raise ValueError(
            f"group_size is {given}, and groups of the averager's topology {topology.text!r} have"
            f" {topology.group_size}: leave group_size out, or give a degree that is one less"
        )
    return topology.group_size


def contraction(lr: float, momentum: float, group_size: int, *, nesterov: bool = False) -> float:
    """Return the factor by which a round multiplies the anchors' mean squared distance, in the long run.

    An anchor x that is e away from its group's mean takes a step of SGD with the gradient e: m <- momentum m + e, and x
    <- x - lr m, or x - lr (e + momentum m) with Nesterov's momentum. Members of a large run are independent of each
    other, so with k = 1 - 1/g a round takes the means of x*x, x*m and m*m to linear combinations of themselves: e*x and
    e*e have the mean k x*x, and e*m has k x*m. The factor is the largest absolute eigenvalue. It is 1/g for a rate of 1
    without momentum.
    """
    k, a = 1 - 1 / group_size, momentum
    # x <- x - s e - q m
    s, q = (lr * (1 + a), lr * a * a) if nesterov else (lr, lr * a)
    squares = [1 - 2 * s * k + s * s * k, 2 * q * (s * k - 1), q * q]
    products = [k * (1 - s), a - s * a * k - q * k, -q * a]
    momenta = [k, 2 * a * k, a * a]
    matrix = torch.tensor([squares, products, momenta], dtype=torch.float64, device="cpu")
    return float(torch.linalg.eigvals(matrix).abs().max())


def check_rates(lr: float, momentum: float, group_size: int, *, nesterov: bool = False) -> None:
    """Raise ValueError if rates of an outer step are out of range, or the anchors would not come together."""
    checked_amount("lr", lr)
    if isinstance(momentum, bool) or not isinstance(momentum, int | float) or not 0 <= momentum < 1:
        raise ValueError(f"momentum must be a number from 0 to below 1, got {momentum!r}")
    size = max(checked_count("group_size", group_size), 2)
    factor = contraction(lr, momentum, size, nesterov=nesterov)
    if factor >= 1:
        raise ValueError(
            f"with an lr of {lr:g} and a momentum of {momentum:g} the anchors of groups of {group_size} do not come"
            f" together: each round multiplies their mean squared distance by {factor:.2f}"
        )


def is_too_far(own: float, others: float, max_lag: int) -> bool:
    """Return whether the other members of a group are so many rounds away that their average is of no use."""
    return not abs(others - own) <= max_lag


def lag_behind(own: int, others: Iterable[int], max_lag: int) -> int:
    """Return the number of rounds by which a peer is behind the run; 0 if it may average.

    Args:
        own: this peer's round number.
        others: those that others say. Half of them have to be more than ``max_lag`` ahead.
    """
    found = list(others)
    lag = statistics.median_low(found) - own if found else 0
    return int(lag) if lag > max_lag else 0
