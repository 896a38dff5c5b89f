"""Cells: a run of more peers than one group, as synchronous runs that average with each other. No I/O, no clock.

Theory of operation
-------------------

**The problem.** A round has 64 members at most, so :class:`~p2pavg.optim.AveragedOptimizer` trains at most 64 peers.
More of them divide into cells. The peers of a cell take every update together and hold the same bits. After ``every``
updates, the cells average their parameters: local SGD (Stich 2019) among cells, in two levels as in Lin et al. 2020
("Don't Use Large Mini-batches, Use Local SGD").

**Nothing passes through one member.** The parameters are one flat vector of ``shares`` shares. In each cell, one member
holds each share; which one follows from the roster of the cell's last update (:func:`holders`). The holders of share j
in all cells average it in a round of their own. So each holder moves a part of the vector, and the loss of a holder
costs this mix its share.

**The mix.** Back in the cell, the members take one more update, the *mix*. Each contributes, for its shares, the outer
average minus the values that it contributed to it, and zeros elsewhere. The weighted sum of the contributions is what
the outer averages change. All members add it to their parameters. The mix is an update like any other: the agreement of
its round gives all members the same bits or none of them anything, it has an epoch, and the log of averages has it, so
a peer that comes late replays it. Which updates are mixes follows from the epoch alone (:meth:`Cells.is_mix`).

**Which cell a newcomer takes.** A few members of each cell publish its size (:func:`speakers`), and newcomers publish
what they have chosen. A newcomer fills the cell that is too small to train. It opens an empty cell if enough newcomers
come with it, and takes the smallest cell otherwise (:func:`choose_cell`). Newcomers that choose at once take turns in
the order of a hash of their ids.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from p2pavg.base.errors import ConfigError
from p2pavg.base.limits import MAX_GROUP_SIZE
from p2pavg.base.messages import Message, decoded_all, pack
from p2pavg.group.aggregation import RobustRule, resolve_rule
from p2pavg.optim.base.recipe import Settings
from p2pavg.optim.base.state import checked_amount, checked_count

MAX_SHARES = 64
SPEAKERS = 3
"""Members of each cell that publish its size: few records for newcomers, and one that lies is outvoted by two."""
UNDECIDED = -1
_ORDER = "p2pavg/cells/order/1"
_HOLDER = "p2pavg/cells/holder/1"
_SPEAKER = "p2pavg/cells/speaker/1"
_OUTER = "p2pavg/cells/outer/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """The cells of a synchronous run; all peers of the run give the same, but for ``timeout`` and ``patience``.

    Args:
        count: number of cells, 2 to 64. A cell has at most 64 peers.
        every: number of updates of a cell between two mixes.
        shares: number of parts of the parameters whose holders average with their counterparts, 1 to 64. A cell with
            fewer members gives some of them several shares.
        delay: number of updates between the beginning of the outer averages and the mix that applies them, 0 to
            below ``every``. With 0, training waits for the outer averages; otherwise they run in the background.
        timeout: seconds from the beginning of the outer averages after which a mix waits for them no longer. A share
            whose average is not there is not mixed this time.
        patience: seconds for which a cell may have too few peers before they move to another cell.
        robust: rule that combines the values of the cells in the outer averages, as in :class:`p2pavg.AveragingConfig`;
            ``None``: their mean. Against one cell's holder that lies, three cells are needed, and better five.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    count: int
    every: int = 50
    shares: int = 8
    delay: int = 0
    timeout: float = 15.0
    patience: float = 60.0
    robust: str | RobustRule | None = None

    def __post_init__(self) -> None:
        if not 2 <= checked_count("count", self.count) <= MAX_GROUP_SIZE:
            raise ValueError(
                f"count must be a number of cells from 2 to {MAX_GROUP_SIZE}, got {self.count}: one cell is an"
                " AveragedOptimizer, and more than 64 holders of a share cannot be one group"
            )
        checked_count("every", self.every)
        if checked_count("shares", self.shares) > MAX_SHARES:
            raise ValueError(f"shares must be from 1 to {MAX_SHARES}, got {self.shares}")
        if type(self.delay) is not int or not 0 <= self.delay < self.every:
            raise ValueError(
                f"delay must be a whole number from 0 to below every, {self.every}, got {self.delay!r}: the outer"
                " averages begin after an update with gradients"
            )
        checked_amount("timeout", self.timeout)
        checked_amount("patience", self.patience)
        try:
            resolve_rule(self.robust)
        except ConfigError as error:
            raise ConfigError(f"robust: {error}") from None

    @property
    def rules(self) -> Settings:
        """The settings that all peers of a run share, for the recipe."""
        return (
            ("cells", self.count),
            ("mix every", self.every),
            ("shares", self.shares),
            ("mix delay", self.delay),
            ("mix rule", "mean" if (rule := resolve_rule(self.robust)) is None else rule.text),
        )

    def is_mix(self, epoch: int) -> bool:
        """Return whether the update that leads to this epoch is a mix: one follows ``every`` updates."""
        # The mix is an update itself, so the period is one longer than the updates between two mixes.
        return epoch > 0 and epoch % (self.every + 1) == 0

    def begins_outer(self, epoch: int) -> bool:
        """Return whether the outer averages begin with the parameters of this epoch."""
        return epoch > 0 and self.is_mix(epoch + 1 + self.delay)


def outer_state(cells: Cells, elements: int) -> bytes:
    """Return the state of outer averages: holders of runs with other settings do not meet."""
    return hashlib.sha256(
        pack(_OUTER, cells.count, cells.every, cells.shares, cells.delay, elements)
    ).digest()


def bounds_of(share: int, shares: int, elements: int) -> tuple[int, int]:
    """Return start and stop of a share in the flat vector of the parameters."""
    # In whole numbers, so that all members cut the vector at the same places.
    return elements * share // shares, elements * (share + 1) // shares


def holders(roster: Collection[str], shares: int) -> tuple[str, ...]:
    """Return the holder of each share: the same at all members, and few change when a peer comes or goes.

    Each share goes to the peer with room for it that has the smallest hash of both (rendezvous hashing, Thaler and
    Ravishankar 1998, with bounded loads).

    Args:
        roster: ids of the contributors of a cell's update, at least one.
    """
    # No member holds more shares than the most that an even division gives.
    most = -(-shares // len(set(roster)))
    load: dict[str, int] = dict.fromkeys(roster, 0)
    found = []
    for share in range(shares):
        free = [peer for peer, count in load.items() if count < most]
        holder = min(free, key=lambda peer: _hash(_HOLDER, share, peer))
        load[holder] += 1
        found.append(holder)
    return tuple(found)


def speakers(roster: Collection[str]) -> frozenset[str]:
    """Return the members of a cell that publish its size."""
    return frozenset(sorted(roster, key=lambda peer: _hash(_SPEAKER, peer))[:SPEAKERS])


# ---------------------------------------------------------------------- what peers say of cells


class CellNews(Message, frozen=True, kw_only=True, tag=2):
    """The news that one peer publishes of its cell."""

    cell: Annotated[int, Meta(ge=UNDECIDED, lt=MAX_GROUP_SIZE)]
    """Its cell, or :data:`UNDECIDED`."""
    members: Annotated[int, Meta(ge=0, le=MAX_GROUP_SIZE)]
    """Contributors of the cell's last update; 0 from a newcomer, which has taken none yet."""
    rules: tuple[int, int, int, int]
    """``count``, ``every``, ``shares`` and ``delay`` of its :class:`Cells`."""

    def __post_init__(self) -> None:
        if self.cell == UNDECIDED and self.members:
            raise ValueError("news of the size of no cell")


def news_of(cells: Cells, cell: int, members: int) -> CellNews:
    """Return what a peer with these settings publishes."""
    return CellNews(cell=cell, members=members, rules=_numbers(cells))


def read_news(said: Mapping[str, bytes], cells: Cells) -> tuple[dict[str, CellNews], int]:
    """Return each peer's news, and the number of peers with other settings; leave out what is malformed."""
    heard = decoded_all(said, CellNews)
    # Peers with other settings would mix at other updates. They are counted, so that the user can be told.
    same = {
        peer: news
        for peer, news in heard.items()
        if news.rules == _numbers(cells) and news.cell < cells.count
    }
    return same, len(heard) - len(same)


def _numbers(cells: Cells) -> tuple[int, int, int, int]:
    return cells.count, cells.every, cells.shares, cells.delay


def reported(news: Iterable[CellNews]) -> dict[int, int]:
    """Return the number of members of each cell that trains: the median of what its members say."""
    said: dict[int, list[int]] = {}
    for each in news:
        if each.members:
            said.setdefault(each.cell, []).append(each.members)
    # A member that claims a false size is outvoted by two others.
    return {cell: statistics.median_low(sizes) for cell, sizes in said.items()}


def sizes_of(news: Iterable[CellNews], count: int) -> list[int]:
    """Return the size of each cell, with the newcomers that have chosen it."""
    each = list(news)
    found = reported(each)
    sizes = [found.get(cell, 0) for cell in range(count)]
    for one in each:
        if one.cell != UNDECIDED and not one.members:
            # They take no update yet, so no member of the cell counts them.
            sizes[one.cell] += 1
    return sizes


def choose_cell(me: str, news: Mapping[str, CellNews], *, count: int, least: int) -> int | None:
    """Return the cell that a newcomer takes; ``None`` if all are full.

    All newcomers that are undecided take turns, in the order of a hash of their ids, so peers that see the same choose
    different cells. Before any cell trains, all newcomers take turns again: so those that start together need to have
    seen the same peers, and not the same choices.

    Args:
        me: id of the newcomer.
        news: news of the other peers.
        least: number of peers that a cell needs to train.
    """
    others = {peer: each for peer, each in news.items() if peer != me}
    trains = bool(reported(others.values()))
    # Before any cell trains, choices do not count: peers that start together hear of them at different times.
    sizes = sizes_of(others.values(), count) if trains else [0] * count
    undecided = [peer for peer, each in others.items() if each.cell == UNDECIDED or not trains]
    turns = sorted([me, *undecided], key=lambda peer: _hash(_ORDER, peer))
    # This peer plays the turns of all before it, and so knows what they choose without a word of theirs.
    for turn, peer in enumerate(turns):
        cell = _next_cell(peer, sizes, coming=len(turns) - turn, least=least)
        if peer == me or cell is None:
            return cell
        sizes[cell] += 1
    raise AssertionError("unreachable: this peer has a turn")


def _next_cell(peer: str, sizes: Sequence[int], *, coming: int, least: int) -> int | None:
    def first(cells: Sequence[int]) -> int:
        # Different newcomers choose differently among cells that are equally good.
        return min(cells, key=lambda cell: _hash(_ORDER, peer, cell))

    small = [cell for cell, size in enumerate(sizes) if 0 < size < least]
    if small:
        # The cell that lacks the fewest peers can train soonest.
        most = max(sizes[cell] for cell in small)
        return first([cell for cell in small if sizes[cell] == most])
    empty = [cell for cell, size in enumerate(sizes) if size == 0]
    there = [cell for cell, size in enumerate(sizes) if least <= size < MAX_GROUP_SIZE]
    # A newcomer that opens a cell alone could not train there.
    if empty and (coming >= least or not there):
        return first(empty)
    if not there:
        return None
    fewest = min(sizes[cell] for cell in there)
    return first([cell for cell in there if sizes[cell] == fewest])


def refuge(mine: int, news: Iterable[CellNews], *, count: int, least: int) -> int | None:
    """Return the cell to which the members of a cell that is too small move; ``None`` if they stay.

    They move to the smallest cell that trains. If none does, those of all small cells meet in the first one.
    """
    each = list(news)
    there = {cell: size for cell, size in reported(each).items() if cell != mine}
    trains = {cell: size for cell, size in there.items() if least <= size < MAX_GROUP_SIZE}
    if trains:
        return min(trains, key=lambda cell: (trains[cell], cell))
    sizes = sizes_of(each, count)
    # Only to a cell before their own, so that the members of two small cells do not change places.
    peopled = [cell for cell, size in enumerate(sizes) if 0 < size < MAX_GROUP_SIZE and cell < mine]
    return peopled[0] if peopled else None


def _hash(*fields: str | int) -> bytes:
    return hashlib.sha256(pack(*fields)).digest()
