"""Serves the blobs of this peer's runs to joiners: ``/p2pavg/state/3``.

In a run with an authority, states are shown to members only: the joiner is authenticated by its stream, and sends its
certificate. A peer that evidence excludes from the run is refused in every run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.net.transport import PeerId, Stream, receive_message, send_message
from p2pavg.runs.context import PeerContext
from p2pavg.runs.membership.membership import Membership
from p2pavg.runs.membership.sealing import sealed_key
from p2pavg.state.donor.serving import DonorSession, Holdings, Offered
from p2pavg.state.messages import MAX_HELLO_BYTES, SessionHello, Welcome, state_key

logger = logging.getLogger(__name__)

MAX_SESSIONS = 16
"""Joiners that are served at once."""
MAX_SESSIONS_PER_PEER = 2
"""A joiner opens a new session when the old one has broken, which this peer may hear later."""
MAX_GREETED = 32
"""Streams whose hello is read at once, two of each peer."""

Excluded = Callable[[str, Membership | None, PeerId], str | None]
"""Returns the reason for which a peer is excluded from a run, or ``None``."""


@dataclass(slots=True)
class _StateRun:
    run_id: str
    membership: Membership | None
    offered: list[Offered] = field(default_factory=list)


class StateService:
    """The states that one peer can give to others, of all its runs.

    Args:
        excluded: looks up the run's exclusions.
    """

    def __init__(self, context: PeerContext, excluded: Excluded) -> None:
        self._context = context
        self._excluded = excluded
        self._runs: dict[bytes, _StateRun] = {}
        self._greeted: Counter[PeerId] = Counter()
        self._served: Counter[PeerId] = Counter()

    def join(self, run_id: str, membership: Membership | None, offered: Offered) -> None:
        """Serve what one user of a run holds from now on. Several averagers of one run may each call it once.

        Args:
            membership: ``None`` if the run is open to anybody.
        """
        run = self._runs.setdefault(stored_key(run_id, membership), _StateRun(run_id, membership))
        run.offered.append(offered)

    def leave(self, run_id: str, membership: Membership | None, holdings: Holdings) -> None:
        """Take back the :meth:`join` with these holdings. Running sessions find nothing of them any more."""
        key = stored_key(run_id, membership)
        run = self._runs[key]
        run.offered = [each for each in run.offered if each.holdings is not holdings]
        if not run.offered:
            del self._runs[key]

    async def serve(self, stream: Stream) -> None:
        """Serve one joiner. A peer beyond the limits hears so, or loses its stream.

        Raises:
            RemoteProtocolError: the joiner sent what none sends.
            StreamBrokenError: the connection ended.
        """
        peer_id = stream.remote
        hello, refusal = None, ""
        if self._greeted.total() >= MAX_GREETED or self._greeted[peer_id] >= MAX_SESSIONS_PER_PEER:
            return
        with _counted(self._greeted, peer_id), trio.move_on_after(REPLY_SECONDS):
            data = await receive_message(stream, max_bytes=MAX_HELLO_BYTES)
            if data is None:
                return
            await self._context.messages.admit(stream)
            with self._context.messages.charged(stream):
                hello = SessionHello.decode(data)
                refusal = self._refusal(peer_id, hello)
            if refusal:
                await send_message(stream, Welcome(refusal).encode())
                await stream.aclose()
        if hello is None or refusal:
            return
        with _counted(self._served, peer_id):
            welcomed = False
            with trio.move_on_after(REPLY_SECONDS):
                await send_message(stream, Welcome("").encode())
                welcomed = True
            if welcomed:
                await DonorSession(self._context, stream, hello, self).run()

    def offered(self, hello: SessionHello) -> tuple[Offered, ...]:
        """Return what the run of a hello holds now. From any thread."""
        run = self._runs.get(hello.key)
        return () if run is None else tuple(run.offered)

    def _refusal(self, peer_id: PeerId, hello: SessionHello) -> str:
        """Return the reason for which a joiner is not welcomed; empty if it is."""
        if why := self.unfit(peer_id, hello):
            return why
        if self._served[peer_id] >= MAX_SESSIONS_PER_PEER:
            return f"it has {MAX_SESSIONS_PER_PEER} sessions already"
        if self._served.total() >= MAX_SESSIONS:
            return f"this peer serves {MAX_SESSIONS} joiners already"
        return ""

    def unfit(self, peer_id: PeerId, hello: SessionHello) -> str:
        """Return the reason for which a peer may not have the states of a run; empty if it may."""
        run = self._runs.get(hello.key)
        if run is None:
            return "this peer holds no states of that run"
        if run.membership is not None:
            why = run.membership.refusal(peer_id, hello.certificate, self._context.wall_clock())
            if why is not None:
                return why
        return self._excluded(run.run_id, run.membership, peer_id) or ""


@contextmanager
def _counted(counter: Counter[PeerId], peer_id: PeerId) -> Iterator[None]:
    counter[peer_id] += 1
    try:
        yield
    finally:
        counter[peer_id] -= 1
        if not counter[peer_id]:
            del counter[peer_id]


def stored_key(run_id: str, membership: Membership | None) -> bytes:
    """Return the name of a run in hellos."""
    key = state_key(run_id)
    return key if membership is None else sealed_key(membership.access.secret, key)
