"""The entrance of a transport: it applies :mod:`p2pavg.net.limits.admission`, and drops or refuses connections."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from p2pavg.base.errors import P2PAvgError
from p2pavg.net.limits.admission import Admission, ConnectionArrival

logger = logging.getLogger(__name__)


class NoPlaceError(P2PAvgError):
    """A connection was refused: there are too many, and all others have a better claim."""


class Entrance:
    """The connections of one transport, each with a function that drops it."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self._drops: dict[ConnectionArrival, Callable[[], None]] = {}

    @contextmanager
    def arriving(self, host: str) -> Iterator[ConnectionArrival]:
        """Count an inbound connection while the block runs. The block is cancelled if the connection must give way."""
        arrival, victims = self.admission.arrive(host)
        with trio.CancelScope() as scope:
            self._drops[arrival] = scope.cancel
            self._drop(victims)
            try:
                yield arrival
            finally:
                self.left(arrival)

    def admit(self, arrival: ConnectionArrival, peer_id: str) -> None:
        """Count an inbound connection that has proved ``peer_id``.

        Raises:
            NoPlaceError: the connection is refused.
        """
        victims = self.admission.connect(arrival, peer_id)
        if victims is None:
            raise NoPlaceError(f"no place for a connection of {peer_id} from {arrival.host}")
        self._drop(victims)

    def dialled(self, host: str, peer_id: str, drop: Callable[[], None]) -> ConnectionArrival:
        """Count a connection that this process made; ``drop`` ends it without waiting."""
        arrival, victims = self.admission.dialled(host, peer_id)
        self._drops[arrival] = drop
        self._drop(victims)
        return arrival

    def left(self, arrival: ConnectionArrival) -> None:
        """Forget a connection that has ended."""
        self._drops.pop(arrival, None)
        self.admission.leave(arrival)

    def _drop(self, victims: list[ConnectionArrival]) -> None:
        for victim in victims:
            logger.debug("a connection of %s from %s gives way", victim.peer_id or "a stranger", victim.host)
            if (drop := self._drops.pop(victim, None)) is not None:
                drop()
