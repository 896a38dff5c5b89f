"""Shows evidence to other peers of its run, and keeps one :class:`Accusations` for each run of this peer.

Evidence may contain contributions of members. In a run with an authority, it is shown to members only: the peer that
asks is authenticated by its stream, and sends its certificate.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import trio

from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.net.limits.rate import TokenBucket
from p2pavg.net.transport import PeerId, Stream, receive_message, send_message
from p2pavg.runs.context import PeerContext
from p2pavg.runs.membership.membership import Membership
from p2pavg.runs.membership.sealing import sealed_key
from p2pavg.verification.evidence.accusation import (
    MAX_REQUEST_BYTES,
    EvidenceAnswer,
    EvidenceRequest,
    accusations_key,
)
from p2pavg.verification.evidence.spreading import Accusations, transfer_seconds

MAX_SERVED = 8
"""Streams that are served at once, one of each peer."""
TIMES, TIMES_SECONDS = 4, 900.0
"""One peer gets one piece of evidence so many times, and once more each time these seconds have passed. A peer that
starts again has forgotten what it was shown."""
MAX_SHOWN = 4096
"""Pairs of a peer and a piece of evidence whose times are counted; the oldest pair is forgotten."""
_CHUNK_BYTES = 256 * 1024


@dataclass(slots=True)
class _EvidenceRun:
    accusations: Accusations
    users: list[Membership | None] = field(default_factory=list)  # one of each averager and auxiliary


class EvidenceService:
    """The evidence of one peer, of all its runs."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._runs: dict[bytes, _EvidenceRun] = {}
        self._served: set[PeerId] = set()
        self._shown: OrderedDict[tuple[PeerId, bytes], TokenBucket] = OrderedDict()

    def join(self, run_id: str, membership: Membership | None) -> Accusations:
        """Return the accusations of a run; each averager and auxiliary of the run calls it once.

        Args:
            membership: ``None`` if the run is open to anybody.
        """
        key = accusations_key(run_id)
        run = self._runs.setdefault(
            _stored(key, membership), _EvidenceRun(Accusations(self._context, run_id, key))
        )
        run.users.append(membership)
        return run.accusations

    def leave(self, run_id: str, membership: Membership | None) -> None:
        """Take back one :meth:`join`. After the last one, what was learned in the run is forgotten."""
        stored = _stored(accusations_key(run_id), membership)
        users = self._runs[stored].users
        users.pop(next(index for index, user in enumerate(users) if user is membership))
        if not users:
            del self._runs[stored]

    def refusal(self, run_id: str, membership: Membership | None, peer_id: PeerId) -> str | None:
        """Return the reason for which evidence excludes a peer from a run, or ``None``. From any thread."""
        run = self._runs.get(_stored(accusations_key(run_id), membership))
        return None if run is None else run.accusations.exclusions.refusal(peer_id)

    async def serve(self, stream: Stream) -> None:
        """Show one piece of evidence to one peer. A peer beyond the limits loses its stream.

        Raises:
            RemoteProtocolError: the request is malformed.
        """
        if len(self._served) >= MAX_SERVED or stream.remote in self._served:
            return
        self._served.add(stream.remote)
        try:
            await self._show(stream)
        finally:
            self._served.discard(stream.remote)

    async def _show(self, stream: Stream) -> None:
        data = None
        with trio.move_on_after(REPLY_SECONDS):
            data = await receive_message(stream, max_bytes=MAX_REQUEST_BYTES)
        if data is None:
            return
        await self._context.messages.admit(stream)
        with self._context.messages.charged(stream):
            found = self._find(stream.remote, EvidenceRequest.decode(data))
        refusal, evidence = (found, b"") if isinstance(found, str) else ("", found)
        with trio.move_on_after(transfer_seconds(len(evidence))):
            await send_message(stream, EvidenceAnswer(refusal).encode())
            for start in range(0, len(evidence), _CHUNK_BYTES):
                await stream.send_all(memoryview(evidence)[start : start + _CHUNK_BYTES])
            await stream.aclose()

    def _find(self, peer_id: PeerId, request: EvidenceRequest) -> bytes | str:
        """Return the evidence that a peer asks for, or the reason for which it gets none."""
        run = self._runs.get(request.key)
        if run is None:
            return "this peer takes no part in that run"
        membership = run.users[0]
        if membership is not None:
            why = membership.refusal(peer_id, request.certificate, self._context.wall_clock())
            if why is not None:
                return why
        exclusions = run.accusations.exclusions
        evidence = exclusions.evidence(request.digest)
        if evidence is None:
            return "this peer has no such evidence"
        # An excluded peer may see what excludes it, and nothing else: another process may use its identity.
        why = exclusions.refusal(peer_id)
        if why is not None and not exclusions.accuses(peer_id, request.digest):
            return why
        if not self._may_see(peer_id, request.digest):
            return "it was shown this evidence several times already"
        return evidence

    def _may_see(self, peer_id: PeerId, digest: bytes) -> bool:
        pair = (peer_id, digest)
        times = self._shown.setdefault(pair, TokenBucket(1 / TIMES_SECONDS, TIMES))
        if len(self._shown) > MAX_SHOWN:
            self._shown.popitem(last=False)
        now = trio.current_time()
        if times.level(now) < 1:
            return False
        times.take(now, 1)
        return True


def _stored(key: bytes, membership: Membership | None) -> bytes:
    return key if membership is None else sealed_key(membership.access.secret, key)
