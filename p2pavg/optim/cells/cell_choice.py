"""The board on which the peers of a run name their cells: newcomers choose by it, and cells hear of others."""

from __future__ import annotations

import logging
import time

from p2pavg.base.limits import CALM_LOOK_SECONDS, LOOK_SECONDS
from p2pavg.base.result import Success
from p2pavg.blocking import Averager
from p2pavg.optim.cells.cells import (
    UNDECIDED,
    CellNews,
    Cells,
    choose_cell,
    news_of,
    read_news,
    refuge,
    reported,
    sizes_of,
    speakers,
)

logger = logging.getLogger(__name__)

TOPIC = "cells"
SETTLE_CELL_SECONDS = 3.0
"""A newcomer listens for this long before it chooses. The peers of a start listen until none has come for as long."""


class CellBoard:
    """The news that one peer tells of its cell, and hears of all cells; not thread-safe.

    Args:
        averager: averager of the whole run.
        cells: the run's settings.
    """

    def __init__(self, averager: Averager, cells: Cells) -> None:
        self._me = averager.peer_id
        self._least = averager.config.min_group_size
        self._cells = cells
        self._board = averager.board(TOPIC, CALM_LOOK_SECONDS)
        self._said: CellNews | None = None
        self.others = 0
        """Number of peers whose cells have other settings, at the last look."""

    def news(self) -> dict[str, CellNews]:
        """Return what the other peers say."""
        said = {peer: entry.value for peer, entry in self._board.entries.items()}
        found, self.others = read_news(said, self._cells)
        return found

    def publish(self, cell: int, members: int) -> None:
        """Say that this peer is in a cell.

        Args:
            members: contributors of the cell's last update: newcomers fill a cell that has too few to train. 0 if this
                peer is a newcomer itself.
        """
        news = news_of(self._cells, cell, members)
        if news != self._said:
            self._said = news
            self._board.publish(news.encode(), now=True)

    # ------------------------------------------------------------------ choosing

    def choose(self, *, peers_to_start: int, timeout: float) -> int:
        """Wait until this peer can choose its cell; return it, and tell the others.

        Args:
            peers_to_start: number of peers, this one included, that a run waits for that does not train yet.
            timeout: seconds after which this peer chooses whatever it sees.

        Raises:
            ValueError: all cells are full.
        """
        self.publish(UNDECIDED, 0)
        began = quiet_since = time.monotonic()
        before: frozenset[str] = frozenset()
        while True:
            version = self._board.version
            news, now = self.news(), time.monotonic()
            if not before.issuperset(news):
                quiet_since = now
            before = frozenset(news)
            trains = bool(reported(news.values()))
            is_start = len(news) + 1 >= peers_to_start and now >= quiet_since + SETTLE_CELL_SECONDS
            is_due = now >= began + SETTLE_CELL_SECONDS and (trains or is_start)
            cell = choose_cell(self._me, news, count=self._cells.count, least=self._least)
            if cell is not None and (is_due or now >= began + timeout):
                self.publish(cell, 0)
                logger.info("this peer is in cell %d of %d", cell, self._cells.count)
                return cell
            if now >= began + timeout:
                self._board.withdraw()
                raise ValueError(
                    f"cells: all {self._cells.count} cells of the run are full; begin the run with a larger count"
                )
            self._board.poll()
            self._board.wait(version, LOOK_SECONDS)

    # ------------------------------------------------------------------ as a member

    def updated(self, cell: int, success: Success) -> None:
        """Say how large this peer's cell is after an update, if that is this peer's task."""
        if self._me not in success.peers:
            return
        if self._me in speakers(success.peers):
            self.publish(cell, len(success.peers))
        elif self._said is not None:
            self._said = None
            self._board.withdraw()

    def live(self, cell: int) -> int:
        """Return the number of cells that have enough peers to train, as far as this peer knows, and its own."""
        sizes = sizes_of(self.news().values(), self._cells.count)
        return len({cell, *(each for each, size in enumerate(sizes) if size >= self._least)})

    def refuge(self, cell: int) -> int | None:
        """Return the cell to which this one's members move if it is too small; ``None`` if there is none."""
        return refuge(cell, self.news().values(), count=self._cells.count, least=self._least)

    def leave(self) -> None:
        """Say nothing any more."""
        self._said = None
        self._board.withdraw()
