"""One session at the donor: it reads the joiner's requests, and sends what they ask for.

The limits are the donor's own: a joiner has a bounded number of open requests, each request a bounded number of pieces,
and each piece of :data:`SEND_BYTES` must have left within :data:`STALL_SECONDS`. A session has a copy of the one
piece that it sends: otherwise a slow joiner would keep a whole snapshot in memory that its donor has dropped.

Rounds have priority: while one needs the link, as many bytes as it carries in :data:`SPARED_SECONDS`, and
:data:`SEND_BYTES` at most, wait for up to :data:`YIELD_SECONDS`, and fewer bytes for as much less.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import trio

from p2pavg.allreduce.messages import Lane, LaneHeader
from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import LOOK_SECONDS, QUICK_REPLY_SECONDS, STALL_SECONDS
from p2pavg.base.threads.workers import in_own_thread
from p2pavg.net.limits.rate import UNLIMITED, RateLimit
from p2pavg.net.transport import LENGTH_BYTES, Buffer, DirectLane, PeerId, Stream, receive_message
from p2pavg.runs.context import PeerContext
from p2pavg.state.donor.uploads import OnSent
from p2pavg.state.messages import (
    MAX_REQUEST_BYTES,
    AskManifest,
    AskPieces,
    Cancel,
    Frame,
    FrameKind,
    SessionHello,
    encode_frame,
    encode_refusal,
    of_the_remote,
    read_request,
)

logger = logging.getLogger(__name__)

MAX_REQUESTS = 16
"""Requests of one session that are not answered yet. A joiner needs three for each blob that it fetches at once."""
SEND_BYTES = 256 * 1024
YIELD_SECONDS = 1.0
SPARED_SECONDS = 0.1
"""Of each second of a round that states may use of the link. With as many bytes on every link, states would take half
of a slow one, and the round would be longer by as much."""
UNSENT_BYTES = 128 * 1024  # that the system may hold: bytes of a round do not wait behind more
_BUSY_SECONDS = 0.05
_LIMITED_BYTES = 16 * 1024  # under a limit: more at once would be a burst, and look like silence to joiners


class Holdings(Protocol):
    """The blobs that one user of a run can give to others. Its methods may be called from any thread."""

    def manifest(self, kind: int, blob_id: bytes) -> bytes | None:
        """Return the manifest of a blob; ``None`` if it is not held."""

    def piece(self, kind: int, blob_id: bytes, index: int) -> Buffer | None:
        """Return a piece; ``None`` if it is not held, or not held any more."""


@dataclass(frozen=True, slots=True, eq=False)
class Offered:
    """The holdings of one user of a run, and the conditions on which they are sent."""

    holdings: Holdings
    upload: RateLimit = UNLIMITED
    """The averager's limit, which its rounds share."""
    is_busy: Callable[[], bool] = lambda: False
    """Returns true while a round exchanges, from any thread. Then pieces wait, for a second at most."""
    bandwidth: Callable[[], float] = lambda: 0.0
    """Returns what this peer's link carries, in Mbit/s, from any thread; 0 if it is not known."""
    on_sent: OnSent = lambda _peer_id, _count: None
    """Is told of the bytes of pieces that were sent, from any thread."""


_Outgoing = tuple[bytes, Buffer, Offered | None]
"""The header of a frame, what follows it, and whose it is."""


class OfferedStates(Protocol):
    """The states of this peer's runs: :class:`p2pavg.state.donor.service.StateService`."""

    def offered(self, hello: SessionHello) -> tuple[Offered, ...]:
        """Return what the run of a hello holds now; nothing when its last user has left. From any thread."""

    def unfit(self, peer_id: PeerId, hello: SessionHello) -> str:
        """Return the reason for which a peer may not have the states of the run; empty if it may."""


class DonorSession:
    """Serves one joiner that was welcomed.

    Args:
        hello: the joiner's. With a ticket in it, the joiner waits for a direct lane.
    """

    def __init__(
        self, context: PeerContext, stream: Stream, hello: SessionHello, states: OfferedStates
    ) -> None:
        self._context = context
        self._stream = stream
        self._hello = hello
        self._states = states
        self._pending: dict[int, AskManifest | AskPieces] = {}
        self._sending = trio.Lock()
        self._used_at = trio.current_time()
        self._use: LaneUse | None = None

    async def run(self) -> None:
        """Serve until the joiner closes its half of the stream, or goes beyond a limit.

        Raises:
            RemoteProtocolError, StreamBrokenError: the joiner, or its connection, ended the session.
        """
        # Two queues, so that a manifest does not wait behind the pieces that were asked for before it.
        ask_manifest, manifests = trio.open_memory_channel[AskManifest](MAX_REQUESTS)
        ask_pieces, pieces = trio.open_memory_channel[AskPieces](MAX_REQUESTS)
        with of_the_remote():
            async with trio.open_nursery() as nursery:
                # The watch looks for as long as the others work. It is cancelled when they have ended.
                nursery.start_soon(self._watch, nursery.cancel_scope)
                async with trio.open_nursery() as working:
                    working.start_soon(self._read, ask_manifest, ask_pieces)
                    working.start_soon(self._send_manifests, manifests)
                    working.start_soon(self._send_pieces, pieces)
                nursery.cancel_scope.cancel()
        await self._stream.aclose()

    async def _watch(self, scope: trio.CancelScope) -> None:
        """End the session when nothing is asked, when the joiner takes nothing, or may no longer have it."""
        while True:
            await trio.sleep(LOOK_SECONDS)
            if why := self._states.unfit(self._stream.remote, self._hello):
                logger.info("%s is sent no more of a state: %s", self._stream.remote, why)
                scope.cancel()
            now = trio.current_time()
            # A request without its answer keeps the session in use, however slowly the answer goes.
            if self._pending:
                self._used_at = now
            # A session on which nothing is asked for so long is ended.
            if now - self._used_at >= STALL_SECONDS:
                scope.cancel()
            # The thread that sends on the lane is blocked meanwhile, so this task looks in its place.
            if self._use is not None and self._use.stuck_seconds >= STALL_SECONDS:
                logger.info("%s takes the pieces of a state too slowly", self._stream.remote)
                scope.cancel()

    # ------------------------------------------------------------------ requests

    async def _read(
        self, ask_manifest: trio.MemorySendChannel[AskManifest], ask_pieces: trio.MemorySendChannel[AskPieces]
    ) -> None:
        # When the joiner closes its half, the senders answer what is left in the queues, and end.
        with ask_manifest, ask_pieces:
            while (data := await receive_message(self._stream, max_bytes=MAX_REQUEST_BYTES)) is not None:
                self._used_at = trio.current_time()
                request = read_request(data)
                if isinstance(request, Cancel):
                    self._pending.pop(request.number, None)
                    continue
                if request.number in self._pending:
                    raise RemoteProtocolError("it asks twice under one number")
                self._pending[request.number] = request
                try:
                    if isinstance(request, AskManifest):
                        ask_manifest.send_nowait(request)
                    else:
                        ask_pieces.send_nowait(request)
                # A cancelled request is pending no more, but stays in its queue until its turn.
                except trio.WouldBlock:
                    raise RemoteProtocolError("it asks for more at once than a joiner needs") from None

    async def _send_manifests(self, requests: trio.MemoryReceiveChannel[AskManifest]) -> None:
        async for request in requests:
            manifest, offered = await self._context.run_in_thread(self._manifest, request)
            if manifest is None or offered is None:
                await self._send_on_stream(encode_refusal(request.number, "it does not hold this state"))
            else:
                header = encode_frame(Frame(FrameKind.MANIFEST, request.number, 0, len(manifest)))
                await self._send_on_stream(header, manifest, offered)
            self._pending.pop(request.number, None)

    def _manifest(self, request: AskManifest) -> tuple[bytes | None, Offered | None]:
        for offered in self._states.offered(self._hello):
            if found := offered.holdings.manifest(request.kind, request.blob_id):
                return found, offered
        return None, None

    # ------------------------------------------------------------------ pieces

    async def _send_pieces(self, requests: trio.MemoryReceiveChannel[AskPieces]) -> None:
        lane = await self._open_lane()
        if lane is not None:
            await self._over_lane(lane, requests)
            return
        async for request in requests:
            frames = self.frames(request)
            while (frame := await self._context.run_in_thread(next, frames, None)) is not None:
                await self._send_on_stream(*frame)
            self.answered(request)

    def frames(self, request: AskPieces) -> Iterator[_Outgoing]:
        """Yield the answer to a request, one piece at a time, in any thread."""
        for index in range(request.first, request.first + request.count):
            # Looked at before each piece: the joiner may have cancelled, because another donor was faster.
            if request.number not in self._pending:
                yield encode_refusal(request.number, "the joiner does not want it"), b"", None
                return
            found = self._piece(request, index)
            if found is None:
                yield encode_refusal(request.number, f"it does not hold piece {index}"), b"", None
                return
            piece, offered = found
            yield encode_frame(Frame(FrameKind.PIECE, request.number, index, len(piece))), piece, offered

    def answered(self, request: AskPieces) -> None:
        """Note that all of an answer was sent. From any thread."""
        self._pending.pop(request.number, None)

    def _piece(self, request: AskPieces, index: int) -> tuple[memoryview, Offered] | None:
        for offered in self._states.offered(self._hello):
            piece = offered.holdings.piece(request.kind, request.blob_id, index)
            if piece is not None:
                # A copy of one piece: with a view, a slow joiner would keep the whole snapshot in memory
                # after its donor has dropped it.
                return memoryview(bytes(memoryview(piece).cast("B"))), offered
        return None

    async def _send_on_stream(
        self, header: bytes, data: Buffer = b"", offered: Offered | None = None
    ) -> None:
        """Send one frame."""
        # Manifests and pieces may share the stream: a frame must not begin within another one.
        async with self._sending:
            await self._send_in_time(header)
            if offered is None:
                await self._send_in_time(data)
                return
            for piece, seconds in _in_steps(data, offered):
                # While a round exchanges, for some seconds at most.
                until = trio.current_time() + seconds
                while trio.current_time() < until and offered.is_busy():  # noqa: ASYNC110 - only a function tells
                    await trio.sleep(_BUSY_SECONDS)
                # Taken after the wait for a round, because rounds take their bytes from the same limit.
                await trio.sleep(offered.upload.delay(len(piece)))
                await self._send_in_time(piece)
                offered.on_sent(self._stream.remote, len(piece))

    async def _send_in_time(self, data: Buffer) -> None:
        with trio.move_on_after(STALL_SECONDS) as scope:
            await self._stream.send_all(data)
        if scope.cancelled_caught:
            raise StreamBrokenError(f"{self._stream.remote} takes the pieces of a state too slowly")

    async def _open_lane(self) -> DirectLane | None:
        if not self._hello.ticket:
            return None
        try:
            # For a direct lane to come about; then the pieces go over the stream.
            return await self._context.transport.open_lane(self._stream.remote, timeout=QUICK_REPLY_SECONDS)
        except UnreachableError as error:
            logger.debug("no direct lane to %s: %s", self._stream.remote, error)
            return None

    async def _over_lane(self, lane: DirectLane, requests: trio.MemoryReceiveChannel[AskPieces]) -> None:
        use = self._use = LaneUse(lane, self)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(use.hand_over, requests)
                await in_own_thread(
                    lambda: use.run(self._hello.ticket), stop=use.stop, name="p2pavg-state-send"
                )
            # The session does not wait for long:
            # the transport awaits the acknowledgement of a lane that it gets back without it.
            with trio.move_on_after(QUICK_REPLY_SECONDS):
                await lane.acknowledged()
        finally:
            self._use = None
            # A lane that ended within a frame is of no use to the next session.
            if use.finished:
                self._context.transport.keep_lane(lane)
            else:
                lane.abort()


class LaneUse:
    """One session's use of one direct lane. :meth:`run` blocks, in a thread of its own."""

    def __init__(self, lane: DirectLane, session: DonorSession) -> None:
        self.finished = False
        """True when everything was sent: the lane may be used again."""
        self._sends_since = math.inf
        self._lane = lane
        self._session = session
        self._requests: queue.SimpleQueue[AskPieces | None] = queue.SimpleQueue()
        self._stopped = threading.Event()

    @property
    def stuck_seconds(self) -> float:
        """Seconds for which the lane has not taken all of a piece; 0 if none is being sent."""
        return max(0.0, time.monotonic() - self._sends_since)

    async def hand_over(self, requests: trio.MemoryReceiveChannel[AskPieces]) -> None:
        """Give the thread its work, until there is no more."""
        async for request in requests:
            self._requests.put(request)
        self._requests.put(None)

    def stop(self) -> None:
        """Make :meth:`run` end soon, and the lane with it. From any thread."""
        self._stopped.set()
        # The thread is blocked in a send, which raises an error now, or it waits for a request, and finds ``None``.
        if not self.finished:
            self._lane.abort()
        self._requests.put(None)

    def run(self, ticket: bytes) -> None:
        """Send what is asked, until there is no more to be asked.

        Raises:
            StreamBrokenError: the lane broke.
        """
        # What the system has taken can no longer make way for a round.
        self._lane.keep_unsent_below(UNSENT_BYTES)
        header = LaneHeader(ticket, Lane.STATE).encode()
        self._send(len(header).to_bytes(LENGTH_BYTES, "big") + header)
        while (request := self._requests.get()) is not None:
            for frame, piece, offered in self._session.frames(request):
                self._send(frame)
                self._send_piece(piece, offered)
            self._session.answered(request)
        self._send(encode_frame(Frame(FrameKind.END, 0, 0, 0)))
        self.finished = True

    def _send_piece(self, data: Buffer, offered: Offered | None) -> None:
        if offered is None:
            return
        for piece, seconds in _in_steps(data, offered):
            waited = 0.0
            while waited < seconds and offered.is_busy():
                self._pause(_BUSY_SECONDS)
                waited += _BUSY_SECONDS
            self._pause(offered.upload.delay(len(piece)))
            self._send(piece)
            offered.on_sent(self._lane.remote, len(piece))

    def _pause(self, seconds: float) -> None:
        if seconds and self._stopped.wait(seconds):
            raise StreamBrokenError("the session is over")

    def _send(self, data: Buffer) -> None:
        self._sends_since = time.monotonic()
        self._lane.send(data)
        self._sends_since = math.inf


def spared_bytes(bandwidth: float) -> int:
    """Return the bytes that wait for :data:`YIELD_SECONDS` together while a round exchanges.

    Args:
        bandwidth: of this peer's link, in Mbit/s; 0 if it is not known.
    """
    steps = int(SPARED_SECONDS * bandwidth * 1e6 / 8 / _LIMITED_BYTES)
    return min(max(steps, 1) * _LIMITED_BYTES, SEND_BYTES) if bandwidth else SEND_BYTES


def _in_steps(data: Buffer, offered: Offered) -> Iterator[tuple[memoryview, float]]:
    """Yield data in pieces, each with the seconds for which it waits at most while a round exchanges."""
    view, spared = memoryview(data), spared_bytes(offered.bandwidth())
    # ``spared`` is a multiple of the smaller size, so each of its beginnings is the beginning of a piece too.
    size = spared if offered.upload.unlimited else _LIMITED_BYTES
    for start in range(0, len(view), size):
        waits = 0.0 if start % spared else YIELD_SECONDS * min(len(view) - start, spared) / spared
        yield view[start : start + size], waits
