"""The boards of one averager: one for each topic, and the entries of peers whose process has ended."""

from __future__ import annotations

from collections.abc import Callable

import trio

from p2pavg.net.transport import Transport
from p2pavg.runs.records.board import Board, Lasting, board_key
from p2pavg.runs.records.departures import Departures
from p2pavg.runs.records.run_records import RunRecords
from p2pavg.runs.records.spread_records import SpreadRecords
from p2pavg.telemetry.status import TOPIC as STATUS
from p2pavg_dht.limits import Limits

SAMPLED = frozenset({STATUS})
"""Topics of which a peer of a large run reads the entries of some others only."""


class Boards:
    """Opens the boards of a run.

    Args:
        records: of the run.
        run_id: the run.
        peer_id: this peer.
        nursery: runs the boards; it lives as long as the averager.
    """

    def __init__(
        self,
        transport: Transport,
        records: RunRecords,
        *,
        run_id: str,
        peer_id: str,
        wall_clock: Callable[[], float],
        nursery: trio.Nursery,
    ) -> None:
        self._records = records
        self._spread = SpreadRecords(records, peer_id)
        self._run_id = run_id
        self._peer_id = peer_id
        self._wall_clock = wall_clock
        self._nursery = nursery
        self._boards: dict[str, Board] = {}
        self._departures = Departures(transport, companions=lambda: records.companions, departed=self._depart)

    def open(self, topic: str, look_seconds: float, lasts: float | None = None) -> Board:
        """Return the board of a topic; the first call for a topic begins to look for its entries.

        Args:
            lasts: seconds for which entries outlive their publishers; ``None``: not at all.
        """
        if not self._boards:
            self._nursery.start_soon(self._departures.run)
        if topic not in self._boards:
            self._boards[topic] = Board(
                self._spread if topic in SAMPLED else self._records,
                key=board_key(self._run_id, topic),
                peer_id=self._peer_id,
                wall_clock=self._wall_clock,
                look_seconds=look_seconds,
                lasting=None
                if lasts is None
                else Lasting(min(lasts, Limits().max_ttl), self._records.release),
            )
            self._nursery.start_soon(self._boards[topic].run)
        return self._boards[topic]

    def _depart(self, peer_id: str) -> None:
        for board in self._boards.values():
            board.depart(peer_id)

    def close(self, nursery: trio.Nursery) -> None:
        """Withdraw this peer's entries, in tasks of a nursery."""
        for board in self._boards.values():
            nursery.start_soon(board.aclose)
