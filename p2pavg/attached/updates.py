"""Updates of the processes of one peer, each told once. No I/O, no clock."""

from __future__ import annotations

from collections import deque

from p2pavg.telemetry.events import UpdateTaken

MAX_REMEMBERED = 64


class Updates:
    """The last updates of a peer. Its processes take the same ones, one after the other."""

    def __init__(self) -> None:
        self._told: deque[tuple[int, bytes]] = deque(maxlen=MAX_REMEMBERED)
        self._epoch = 0

    def is_new(self, update: UpdateTaken) -> bool:
        """Return whether no process has told of an update yet. One that only catches up tells of none."""
        mark = (update.epoch, update.lineage)
        if mark in self._told or (update.replayed and update.epoch <= self._epoch):
            return False
        self._told.append(mark)
        self._epoch = update.epoch
        return True
