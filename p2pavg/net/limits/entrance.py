"""The entrance of a transport: it applies :mod:`p2pavg.net.limits.admission`, and drops or refuses connections."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from p2pavg.base.errors import P2PAvgError
from p2pavg.net.limits.admission import Admission, ConnectionArrival

if sys.platform != "win32":
    import resource


# The limit of open files, and the share of it that connections may use.

# Far above the needs of this library, and the value that servers such as nginx and etcd ask for. Some systems allow
# 2^20 or more. With such a limit, a program that closes all descriptors before it starts another program takes seconds.
WANTED_FILES = 65536

# Files left to the program: data sets, worker processes, log files. A DataLoader with 16 workers takes about 100.
RESERVED_FILES = 256


def raise_file_limit() -> int | None:
    """Raise the soft limit of open files as far as the system allows, WANTED_FILES at most, and return it.

    Return ``None`` if the system has no such limit. The limit is never lowered.
    """
    if sys.platform == "win32":
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if wanted <= soft:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # e.g. macOS, where kern.maxfilesperproc is lower still
        logger.debug("the limit of open files stays at %d: %s", soft, error)
        return soft
    logger.debug("the limit of open files was raised from %d to %d", soft, wanted)
    return wanted


def share_of_files(limit: int | None, wanted: int) -> float:
    """Return the share of ``wanted`` files that connections may use, above 0 and at most 1.

    The program keeps half of a low limit, and RESERVED_FILES of a high one.
    """
    if limit is None:
        return 1.0
    available = max(limit - RESERVED_FILES, limit // 2)
    return min(1.0, available / wanted)


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
