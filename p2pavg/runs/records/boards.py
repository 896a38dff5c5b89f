"""The boards of one averager: one for each topic, and the entries of peers whose process has ended."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import trio

from p2pavg.base.errors import ClosedError, RefusedError, UnreachableError
from p2pavg.base.limits import GLANCE_SECONDS, QUICK_REPLY_SECONDS
from p2pavg.net.transport import PeerId, Transport
from p2pavg.runs.context import PeerContext
from p2pavg.runs.records.board import Board, Lasting, board_key
from p2pavg.runs.records.run_records import RunRecords
from p2pavg.runs.records.spread_records import SpreadRecords
from p2pavg.telemetry.status import TOPIC as STATUS
from p2pavg_dht import PROTOCOL, Contact
from p2pavg_dht.storage import Limits

logger = logging.getLogger(__name__)

# Notices that the process of a companion has ended, long before its entries on the boards expire.
#
# A peer that is killed cannot withdraw its entries, and the others would wait for its next batch. Its operating
# system closes its connections, though, and refuses new ones. We trust the operating system at an address where that
# peer was met, as rounds do. A peer that only loses its connection, or cannot be reached, is dialled once, and keeps
# its entries.

MAX_CHECKS = 4  # at once


class Companions(Protocol):
    """Peers that this one has met: :class:`RunRecords` knows the members of the last round."""

    @property
    def companions(self) -> Sequence[Contact]:
        """The peers with their addresses; the same object until others take their place."""


class Departures:
    """Watches companions, and tells boards of those whose process has ended.

    Args:
        boards: by topic; more may come.
    """

    def __init__(self, transport: Transport, met: Companions, boards: Mapping[str, Board]) -> None:
        self._transport = transport
        self._met = met
        self._boards = boards
        self._checking = trio.CapacityLimiter(MAX_CHECKS)

    async def run(self) -> None:
        """Watch until cancelled."""
        watched: Sequence[Contact] = ()
        checked: set[PeerId] = set()
        async with trio.open_nursery() as nursery:
            while True:
                if (present := self._met.companions) is not watched:
                    watched, checked = present, set()
                for companion in watched:
                    if companion.peer_id not in checked and not self._transport.is_connected(
                        companion.peer_id
                    ):
                        checked.add(companion.peer_id)
                        nursery.start_soon(self._check, companion, checked)
                await trio.sleep(GLANCE_SECONDS)

    async def _check(self, companion: Contact, checked: set[PeerId]) -> None:
        """Dial a companion once, and again only if it answers and loses its connection once more."""
        async with self._checking:
            try:
                stream = await self._transport.open_stream(
                    companion.peer_id, PROTOCOL, addresses=companion.addresses, timeout=QUICK_REPLY_SECONDS
                )
            except RefusedError as error:
                logger.debug("%s has ended: %s", companion.peer_id, error)
                for board in self._boards.values():
                    board.depart(companion.peer_id)
            except (UnreachableError, ClosedError) as error:
                logger.debug("%s cannot be reached: %s", companion.peer_id, error)
            else:
                checked.discard(companion.peer_id)
                await stream.reset()


SAMPLED = frozenset({STATUS})
"""Topics of which a peer of a large run reads the entries of some others only."""


class Boards:
    """Opens the boards of a run.

    Args:
        records: of the run.
        run_id: the run.
        nursery: runs the boards; it lives as long as the averager.
    """

    def __init__(
        self, context: PeerContext, records: RunRecords, *, run_id: str, nursery: trio.Nursery
    ) -> None:
        self._context = context
        self._records = records
        self._spread = SpreadRecords(records, context.signer.peer_id)
        self._run_id = run_id
        self._nursery = nursery
        self._boards: dict[str, Board] = {}
        self._departures = Departures(context.transport, records, self._boards)

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
                peer_id=self._context.signer.peer_id,
                wall_clock=self._context.wall_clock,
                look_seconds=look_seconds,
                lasting=None
                if lasts is None
                else Lasting(min(lasts, Limits().max_ttl), self._records.release),
            )
            self._nursery.start_soon(self._boards[topic].run)
        return self._boards[topic]

    def close(self, nursery: trio.Nursery) -> None:
        """Withdraw this peer's entries, in tasks of a nursery."""
        for board in self._boards.values():
            nursery.start_soon(board.aclose)
