"""The sessions of one run's joiner with its donors: each is kept for the next blob, until its donor ends it."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType

import trio

from p2pavg.allreduce.movers.lobby import StreamRouter
from p2pavg.base.limits import RETRY_SECONDS
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.net.limits.rate import UNLIMITED, RateLimit
from p2pavg.net.transport import PeerId
from p2pavg.runs.context import PeerContext
from p2pavg.state.joiner.session import JoinerSession, open_session

logger = logging.getLogger(__name__)

MAX_FETCHES = 4
"""Blobs that are fetched at once. A donor answers a bounded number of requests of one session."""


class Sessions:
    """Made by :func:`open_sessions`, and closed with its block."""

    def __init__(
        self,
        context: PeerContext,
        lobby: StreamRouter,
        nursery: trio.Nursery,
        *,
        key: bytes,
        certificate: bytes,
        download: RateLimit,
    ) -> None:
        self.context = context
        self.places = trio.CapacityLimiter(MAX_FETCHES)
        """One for each blob that is fetched."""
        self._lobby = lobby
        self._nursery = nursery
        self._key = key
        self._certificate = certificate
        self._download = download
        self._open: dict[PeerId, JoinerSession] = {}
        self._turns: dict[PeerId, trio.Lock] = {}
        # The moment of the last failure, and that until which streams are used.
        self._lanes_failed: dict[PeerId, tuple[float, float]] = {}
        self._excluded: dict[PeerId, str] = {}

    @property
    def excluded(self) -> Mapping[PeerId, str]:
        """Donors that sent something wrong, each with the reason. They are never asked again."""
        return MappingProxyType(self._excluded)

    def exclude(self, donor: PeerId, reason: str) -> None:
        """Never ask a donor again, for this reason."""
        if donor not in self._excluded:
            logger.warning("%s is asked for no state any more: it %s", donor, reason)
            self._excluded[donor] = reason

    async def get(self, donor: PeerId, addresses: Sequence[str]) -> JoinerSession:
        """Return the session with a donor, which is opened if there is none.

        Raises:
            UnreachableError: there is no way to the donor, or it does not answer or refuses.
        """
        async with self._turns.setdefault(donor, trio.Lock()):
            session = self._open.get(donor)
            if session is None or session.ended.is_set():
                session = await open_session(
                    self.context,
                    self._lobby,
                    donor,
                    addresses,
                    key=self._key,
                    certificate=self._certificate,
                    download=self._download,
                    wants_lane=self._wants_lane(donor),
                )
                self._open[donor] = session
                self._nursery.start_soon(self._attend, session)
        return session

    async def _attend(self, session: JoinerSession) -> None:
        try:
            await session.run()
        finally:
            if session.lane_failed:
                self._note_failed_lane(session.remote)
            if self._open.get(session.remote) is session:
                del self._open[session.remote]

    def _note_failed_lane(self, donor: PeerId) -> None:
        now = trio.current_time()
        before, _ = self._lanes_failed.get(donor, (-math.inf, -math.inf))
        until = now + RETRY_SECONDS if now < before + RETRY_SECONDS else -math.inf
        self._lanes_failed[donor] = (now, until)

    def _wants_lane(self, donor: PeerId) -> bool:
        _, until = self._lanes_failed.get(donor, (-math.inf, -math.inf))
        return trio.current_time() >= until

    def close(self) -> None:
        """End every session soon. Direct lanes on which nothing is on its way are left to others."""
        for session in [*self._open.values()]:
            session.close()


@asynccontextmanager
async def open_sessions(
    context: PeerContext,
    lobby: StreamRouter,
    *,
    key: bytes,
    certificate: bytes = b"",
    download: RateLimit = UNLIMITED,
) -> AsyncIterator[Sessions]:
    """Open the sessions of one run's joiner, which end with the block.

    Args:
        key: names the run in hellos: :func:`p2pavg.state.donor.service.stored_key`.
        certificate: this peer's; empty if the run is open to anybody.
        download: the limit of everything that is downloaded.
    """
    with bare_exceptions():
        async with trio.open_nursery() as nursery:
            sessions = Sessions(context, lobby, nursery, key=key, certificate=certificate, download=download)
            try:
                yield sessions
            finally:
                sessions.close()
