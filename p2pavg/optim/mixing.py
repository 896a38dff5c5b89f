"""Mixing: peers whose parameters differ average in small groups, with other peers in each round. No I/O, no clock.

Theory of operation
-------------------

**The problem.** A run of many peers cannot be one group: a group has 64 members at most, and waits for its slowest. In
gossip, each peer averages with a few others in each round, and with others in the next. The peers' anchors differ, and
each round brings them nearer: groups of g random peers divide the mean squared distance from the mean by g.

**Cells.** No coordinator says who meets whom. A peer draws its cell of a round from its id and the round's number, and
looks for a group among the readiness records of this cell. The number of cells is a power of two that leaves two to
four groups' worth of peers in each. All peers with about the same view of the run's size compute the same one. A peer's
coordinates on the grid of Moshpit (Ryabinin et al. 2021, arXiv 2103.03239) do not change: with whole lines as groups
that is exact after d rounds, but with pairs the differences between lines shrink in one round of d only. So
the coordinates are drawn anew for each round (``scripts/bench mixing`` compares the two).

**Leftovers.** A cell may have one peer, or an odd one, or peers that count other cells. A peer without a partner after
a while looks in a cell eight times as large, among all that did the same, and so on until the common place of the
run. So few peers look in any one place, and a free peer finds any other one in the end. It avoids the members of its
last group for as long: otherwise peers of one speed would meet each other only.

**Rounds.** A peer counts its outer steps. Groups bring the counts together: after a step each member continues from the
count of the member that was furthest. Peers that are more than ``max_lag`` rounds apart do not average: a peer that
comes with the first parameters would pull its partner half the way back.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from p2pavg.encoding import pack
from p2pavg.group.limits import MAX_GROUP_SIZE
from p2pavg.group.meeting import Meeting
from p2pavg.optim.recipe import Settings
from p2pavg.optim.state import checked_amount, checked_count

ROUND = "outer_step"
"""Metric of a contribution: the number of this peer's outer steps."""
MAX_CELLS = 2**20
WIDER = 8
"""A peer without a group looks in a cell that is so many times as large: about one in eight is left over."""
_CELL = "p2pavg/mixing/cell/1"
_PLACE = "p2pavg/mixing/place/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingOptions:
    """Options of :class:`~p2pavg.optim.MixedUpdates`, which documents them."""

    group_size: int
    partner_timeout: float
    max_lag: int
    ahead: float
    """Multiple of a peer's own progress since its anchor that it contributes beyond the anchor."""

    @property
    def rules(self) -> Settings:
        """The settings that all peers of a run share, for the recipe."""
        return (("mixing", "groups"), ("group_size", self.group_size), ("ahead", self.ahead))


def checked_mixing(
    *, group_size: int, partner_timeout: float, max_lag: int, ahead: float, least: int
) -> MixingOptions:
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
        ahead=checked_amount("ahead", ahead),
    )


def contraction(momentum: float, pull: float, group_size: int) -> float:
    """Return the factor by which a round multiplies the anchors' mean squared distance, in the long run.

    An anchor x that is u away from its group's mean takes the step d <- momentum * d - pull * u. Members of a large run
    are independent of each other, so with k = 1 - 1/g a round takes the means of x*x, x*d and d*d to linear
    combinations of themselves; the factor is the largest absolute eigenvalue. It is 1/g for gossip, which has no
    momentum and a pull of 1.
    """
    k, a, c = 1 - 1 / group_size, momentum, pull
    steps = torch.tensor([c * c * k, -2 * a * c * k, a * a], dtype=torch.float64)
    products = torch.tensor([-c * k, a, 0.0], dtype=torch.float64) + steps
    squares = torch.tensor([1 - 2 * c * k, 2 * a, 0.0], dtype=torch.float64) + steps
    return float(torch.linalg.eigvals(torch.stack([squares, products, steps])).abs().max())


def check_rates(lr: float, momentum: float, pull: float, group_size: int) -> None:
    """Raise ValueError if rates of an outer step are out of range, or the anchors would not come together."""
    checked_amount("lr", lr)
    checked_amount("pull", pull)
    if isinstance(momentum, bool) or not isinstance(momentum, int | float) or not 0 <= momentum < 1:
        raise ValueError(f"momentum must be a number from 0 to below 1, got {momentum!r}")
    factor = contraction(momentum, pull, max(checked_count("group_size", group_size), 2))
    if factor >= 1:
        raise ValueError(
            f"with a pull of {pull:g} and a momentum of {momentum:g} the anchors of groups of {group_size} do not come"
            f" together: each round multiplies their mean squared distance by {factor:.2f}"
        )


def cells_for(peers: int, group_size: int) -> int:
    """Return the number of cells for a number of peers: a power of two, with two to four groups' worth in each.

    A cell with an average of m peers leaves about 1/(2m) of them over if groups are pairs. One cell is enough until
    there are four groups.
    """
    groups = max(peers, 1) / max(group_size, 2)
    return 1 if groups < 4 else min(2 ** int(math.log2(groups / 2)), MAX_CELLS)


def cell_of(peer_id: str, round_number: int, cells: int) -> int:
    """Return the cell of a peer in a round, from 0 to ``cells - 1``."""
    digest = hashlib.sha256(pack(_CELL, peer_id, round_number)).digest()
    return int.from_bytes(digest[:16], "big") % cells


def place_of(peer_id: str, round_number: int, cells: int) -> bytes:
    """Return the name of the place where a peer looks for its group of a round; empty if there is one cell only."""
    if cells == 1:
        return b""
    return hashlib.sha256(pack(_PLACE, round_number, cells, cell_of(peer_id, round_number, cells))).digest()


def rounds_of_others(own: float, mean: float, weights: Mapping[str, float], me: str) -> float:
    """Return the weighted mean of the other members' round numbers, from that of all members.

    Args:
        own: this peer's number, as it was contributed.
        mean: weighted mean of the group's numbers.
        weights: weight of each contributor, by peer id.
        me: this peer.
    """
    total = math.fsum(weights.values())
    others = math.fsum(weight for peer, weight in weights.items() if peer != me)
    return (mean * total - own * weights.get(me, 0.0)) / others if others > 0 else own


def next_round(own: int, others: float, max_lag: int) -> int:
    """Return a peer's round number after a round with peers whose mean number is ``others``.

    It grows by ``max_lag + 1`` at most, whatever the others claim.
    """
    return max(own, min(math.ceil(others - 1e-6), own + max_lag)) + 1


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


@dataclass(frozen=True, slots=True)
class Stage:
    """One part of a peer's search for its group."""

    meeting: Meeting
    seconds: float
    """Time after which the next stage begins; infinite for the last one."""


def stages_of(
    peer_id: str,
    round_number: int,
    peers: int,
    last_group: Iterable[str],
    options: MixingOptions,
) -> tuple[Stage, ...]:
    """Return the places where a peer looks for its group of a round, one after the other.

    Args:
        peers: number of peers of the run, as far as this peer knows, this one included.
        last_group: the other members of this peer's last group.
    """
    widths = [cells_for(peers, options.group_size)]
    while widths[-1] > 1:
        widths.append(widths[-1] // WIDER)
    avoid = frozenset(last_group) if peers > options.group_size else frozenset()
    seconds = options.partner_timeout / len(widths)
    searches = [
        Stage(
            Meeting(place=place_of(peer_id, round_number, max(cells, 1)), avoid=avoid, patience=seconds),
            seconds,
        )
        for cells in widths
    ]
    last = Stage(Meeting(patience=options.partner_timeout), math.inf)
    return (*searches, last) if avoid or len(searches) > 1 else (last,)
