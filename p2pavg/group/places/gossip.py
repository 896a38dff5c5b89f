"""Places of gossip: where a peer looks for a small group, another one in each round. No I/O, no clock.

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

**Rounds.** A peer counts the rounds that it has taken. Groups bring the counts together: after a round each member
continues from the count of the member that was furthest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from p2pavg.base.messages import pack

# The places where a peer looks for a group, if not among all peers of its run.

MAX_PLACE_BYTES = 32
_DOMAIN = "p2pavg/place/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlace:
    """Place, peers and time of a search for one group.

    Raises:
        ValueError: a value is out of range.
    """

    place: bytes = b""
    """Name of the place, up to 32 bytes: only peers that look in one place see each other. Empty for the common one."""
    avoid: frozenset[str] = frozenset()
    """Ids of peers with which this peer forms no group now."""
    patience: float | None = None
    """Seconds after which a smaller group will do; ``match_timeout`` if ``None``."""

    def __post_init__(self) -> None:
        if not isinstance(self.place, bytes) or len(self.place) > MAX_PLACE_BYTES:
            raise ValueError(f"place must be at most {MAX_PLACE_BYTES} bytes, got {self.place!r}")
        patience = self.patience
        if patience is not None and not 0 < patience < math.inf:
            raise ValueError(f"patience must be a number of seconds above 0, or None, got {patience!r}")


@dataclass(frozen=True, slots=True)
class SearchStage:
    """One part of a search: a place, and the time after which the next part begins."""

    meeting: SearchPlace
    seconds: float = math.inf
    """Seconds; infinite for the last stage."""


def stages_at(where: SearchPlace | Sequence[SearchStage] | None) -> tuple[SearchStage, ...]:
    """Return the stages of a search: at one place, at several in turn, or among all peers that are ready for ``None``.

    Raises:
        ValueError: there is no stage, or one but the last has no end.
    """
    if where is None or isinstance(where, SearchPlace):
        return (SearchStage(where or EVERYWHERE),)
    stages = tuple(where)
    if not stages or not all(0 < stage.seconds < math.inf for stage in stages[:-1]):
        raise ValueError(f"meeting must have at least one stage, and all but the last an end, got {stages!r}")
    return stages


EVERYWHERE = SearchPlace()
"""Among all peers of a run that are ready."""


def key_at(ready_key: bytes, place: bytes) -> bytes:
    """Return the key of the readiness records of a place; that of the common place is ``ready_key`` itself."""
    return hashlib.sha256(pack(_DOMAIN, ready_key, place)).digest() if place else ready_key


MAX_CELLS = 2**20
WIDER = 8
"""A peer without a group looks in a cell that is so many times as large: about one in eight is left over."""
ROUND = "gossip_round"
"""Metric of a contribution of an averager with this topology: the number of this peer's rounds."""
OUTER_STEP = "outer_step"
"""Metric of a contribution of :class:`~p2pavg.optim.MixedUpdates`: the number of this peer's outer steps."""
COUNTS = frozenset({ROUND, OUTER_STEP})
"""Metrics by which members decide whether their average is of use to them.

In every run they are medians (:attr:`p2pavg.group.roster.Roster.metrics`): a mean follows any one claim, so that one
member could make a whole group throw its average away.
"""
MAX_LAG = 32
"""Rounds by which the members of one group advance an averager's count at most, besides the round itself."""
SEARCH_SECONDS = 5.0
"""Time for which an averager avoids its last group, and looks in cells, in a round; at most half of the timeout."""
_CELL = "p2pavg/mixing/cell/1"
_PLACE = "p2pavg/mixing/place/1"


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


def rounds_of_others(own: float, median: float, members: Collection[str], me: str) -> float:
    """Return the other members' round number, from the median of the group's numbers.

    In a pair, the median is the mean of the two, and the partner's number follows from it. In a larger group it is the
    number of one of its members: fewer than half that lie move it no further than to another honest one.

    Args:
        own: this peer's number, as it was contributed.
        median: of the group's numbers.
        members: ids of the contributors.
        me: this peer.
    """
    return 2 * median - own if len(members) == 2 and me in members else median


def next_round(own: int, others: float, max_lag: int) -> int:
    """Return a peer's round number after a round with peers whose mean number is ``others``.

    It grows by ``max_lag + 1`` at most, whatever the others claim. ``others`` follows from their claims: it may be
    infinite, or no number.
    """
    if not others > own:
        return own + 1
    return max(own, math.ceil(min(others, own + max_lag) - 1e-6)) + 1


def stages_of(
    peer_id: str,
    round_number: int,
    peers: int,
    last_group: Iterable[str],
    *,
    group_size: int,
    seconds: float,
    patience: float,
) -> tuple[SearchStage, ...]:
    """Return the places where a peer looks for its group of a round, one after the other.

    Args:
        peers: number of peers of the run, as far as this peer knows, this one included.
        last_group: the other members of this peer's last group.
        group_size: members of a group.
        seconds: time for all stages but the last one, which has no end.
        patience: seconds after which a smaller group will do in the last stage.
    """
    widths = [cells_for(peers, group_size)]
    while widths[-1] > 1:
        widths.append(widths[-1] // WIDER)
    avoid = frozenset(last_group) if peers > group_size else frozenset()
    each = seconds / len(widths)
    searches = [
        SearchStage(
            SearchPlace(place=place_of(peer_id, round_number, max(cells, 1)), avoid=avoid, patience=each),
            each,
        )
        for cells in widths
    ]
    last = SearchStage(SearchPlace(patience=patience))
    return (*searches, last) if avoid or len(searches) > 1 else (last,)


class Rotation:
    """The rounds of one averager with the topology ``gossip``: where it looks for the next group.

    Args:
        peer_id: this peer.
        group_size: members of a group.
        match_timeout: seconds for one search.
    """

    def __init__(self, peer_id: str, group_size: int, match_timeout: float) -> None:
        self._peer_id = peer_id
        self._group_size = group_size
        self._match_timeout = match_timeout
        self._last_group: frozenset[str] = frozenset()
        self.number = 0
        """Number of rounds that this peer has taken, as its groups have brought it in line."""

    @property
    def metrics(self) -> dict[str, float]:
        """The metric that goes with this peer's next contribution."""
        return {ROUND: float(self.number)}

    def stages(self, peers: int) -> tuple[SearchStage, ...]:
        """Return the stages of the next search.

        Args:
            peers: number of peers of the run, as far as this peer knows, this one included.
        """
        seconds = min(SEARCH_SECONDS, self._match_timeout / 2)
        return stages_of(
            self._peer_id,
            self.number,
            peers,
            self._last_group,
            group_size=self._group_size,
            seconds=seconds,
            patience=self._match_timeout - seconds,
        )

    def took(self, peers: Iterable[str], weights: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Note a round that succeeded; one that was not for the rotation changes nothing.

        Args:
            peers, weights, metrics: of its :class:`p2pavg.Success`.
        """
        median = metrics.get(ROUND)
        if median is None:
            return
        others = rounds_of_others(self.number, median, weights, self._peer_id)
        self.number = next_round(self.number, others, MAX_LAG)
        self._last_group = frozenset(peers) - {self._peer_id}
