"""The sessions of one run's joiner with its donors: each is kept for the next blob, until its donor ends it.

A session sends requests to one donor, and reads the answers from a stream and a direct lane.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType

import trio

from p2pavg.allreduce.movers.lobby import StreamRouter
from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import REPLY_SECONDS, RETRY_SECONDS, TAIL_SECONDS
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.base.threads.workers import ToLoop, in_own_thread
from p2pavg.net.blame import guarded
from p2pavg.net.limits.rate import UNLIMITED, RateLimit
from p2pavg.net.transport import DirectLane, PeerId, Stream, receive_message, send_message
from p2pavg.runs.context import PeerContext
from p2pavg.state.joiner.answers import DonorRequest, PendingRequests, RequestOwner
from p2pavg.state.messages import (
    ENDINGS,
    MAX_WELCOME_BYTES,
    PROTOCOL,
    TICKET_BYTES,
    AskManifest,
    AskPieces,
    Cancel,
    Request,
    SessionHello,
    Welcome,
    of_the_remote,
)

logger = logging.getLogger(__name__)

READ_BYTES = 64 * 1024
LIMITED_BYTES = 16 * 1024
"""Bytes that are read at once under a rate limit. Several donors share it, and each must show signs of life."""


class JoinerSession:
    """One joiner's session with one donor. Made by :meth:`Sessions.get`; its owner starts :meth:`run` at once.

    Args:
        download: the limit of all that this peer downloads.
    """

    def __init__(
        self, context: PeerContext, lobby: StreamRouter, stream: Stream, ticket: bytes, download: RateLimit
    ) -> None:
        self.remote = stream.remote
        self.ended = trio.Event()
        """Set when the donor sends nothing more."""
        self.error: Exception = ClosedError("this peer closed the session")
        """The reason for its end."""
        self._context = context
        self._lobby = lobby
        self._stream = stream
        self._ticket = ticket
        self._download = download
        self._answers = PendingRequests(ToLoop())
        self._idle = trio.Event()
        self._ask, self._asked = trio.open_memory_channel[Request | None](math.inf)  # its owner bounds them
        self._streamed = 0
        self._lane: _LaneReading | None = None
        self._lane_done = trio.Event()
        self._left = False  # the donor is told that this is the end
        self._scope = trio.CancelScope()

    @property
    def received(self) -> int:
        """Bytes of answers that have come."""
        return self._streamed + (0 if self._lane is None else self._lane.received)

    @property
    def over_lane(self) -> bool:
        """True if the donor has opened a direct lane."""
        return self._lane is not None

    # ------------------------------------------------------------------ requests

    def ask_manifest(self, owner: RequestOwner, kind: int, blob_id: bytes, max_bytes: int) -> DonorRequest:
        """Ask for a manifest of at most ``max_bytes``, which the request has when it has ended without an error."""
        request = DonorRequest(self._answers.next_number(), owner, max_manifest_bytes=max_bytes)
        self._begin(request, AskManifest(request.number, kind, blob_id))
        return request

    def ask_pieces(
        self, owner: RequestOwner, kind: int, blob_id: bytes, first: int, sizes: Sequence[int]
    ) -> DonorRequest:
        """Ask for consecutive pieces of these sizes."""
        request = DonorRequest(self._answers.next_number(), owner, first=first, sizes=sizes)
        self._begin(request, AskPieces(request.number, kind, blob_id, first, len(sizes)))
        return request

    def cancel(self, request: DonorRequest) -> None:
        """Use nothing of a request any more, and ask the donor to send no more of it."""
        # The request stays expected: the donor may have sent its answer before it reads this.
        if not request.cancelled and not self.ended.is_set():
            request.cancelled = True
            self._ask.send_nowait(Cancel(request.number))

    def _begin(self, request: DonorRequest, message: Request) -> None:
        if self.ended.is_set():
            raise StreamBrokenError(f"the session with {self.remote} has ended: {self.error}")
        # Expected before it is sent, so that even an immediate answer finds it.
        self._answers.expect(request)
        self._ask.send_nowait(message)

    # ------------------------------------------------------------------ life

    async def run(self) -> None:
        """Send requests and read answers until the session ends. Raises nothing."""
        try:
            with (
                self._scope,
                guarded(self.remote, self._fault, what="a state", expected=ENDINGS),
                of_the_remote(),
            ):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send)
                    await self._read_stream()
        except ENDINGS as error:
            self._over(error)
        finally:
            self._over(self.error)
            # Also when the whole peer is stopped: a donor that is told nothing would keep the session's
            # place.
            with trio.CancelScope(shield=True):
                await self._end_lane()
                await self._stream.reset()
            del self._lobby.tickets[self._ticket]

    def _fault(self, _peer_id: PeerId, error: Exception) -> None:
        self.drop(RemoteProtocolError(f"handling what it sent failed: {error!r}"))

    def _over(self, error: Exception) -> None:
        # Only the first reason counts. The ends of the stream and the lane follow from it.
        if not self.ended.is_set():
            self.error = error
            self.ended.set()
            self._answers.fail(StreamBrokenError(f"the session ended: {error}"))

    def drop(self, error: Exception) -> None:
        """End the session at once, for this reason."""
        self._over(error)
        self._scope.cancel()
        if self._lane is not None:
            self._lane.stop()

    def close(self) -> None:
        """End the session soon. Its direct lane is left to others, if what was asked comes within two seconds."""
        self._answers.on_idle = self._idle.set
        if not self._answers.waits:
            self._idle.set()
        # Behind the requests that are on their way, so that cancellations still go out before the end.
        self._ask.send_nowait(None)

    async def _send(self) -> None:
        async for message in self._asked:
            if message is None:
                await self._leave()
                return
            await send_message(self._stream, message.encode())

    async def _leave(self) -> None:
        with trio.move_on_after(TAIL_SECONDS):
            await self._idle.wait()
        # What was asked did not come in time. Bytes of it may still be on the lane, so the lane goes with the
        # session.
        if self._answers.waits:
            self.drop(self.error)
        else:
            self._over(self.error)
            # Before the stream is closed: the donor's answer to that ends the reading, and must not cost the lane.
            self._left = True
            await self._stream.aclose()
            self._scope.cancel()

    # ------------------------------------------------------------------ the stream

    async def _read_stream(self) -> None:
        in_thread, reading = self._context.run_in_thread, self._answers.read()
        most = READ_BYTES if self._download.unlimited else LIMITED_BYTES
        buffer = await in_thread(next, reading, None)
        while buffer is not None:
            filled = 0
            while filled < len(buffer):
                wanted = min(len(buffer) - filled, most)
                # Before the read: the limit works by leaving bytes unread, which holds the donor back.
                await trio.sleep(self._download.delay(wanted))
                chunk = await self._stream.receive_some(wanted)
                if not chunk:
                    raise StreamBrokenError(f"{self.remote} ended the session")
                buffer[filled : filled + len(chunk)] = chunk
                filled += len(chunk)
                self._streamed += len(chunk)
            # In a worker thread: resuming the generator verifies and keeps the piece that the last buffer
            # completed.
            buffer = await in_thread(next, reading, None)
        # Only a direct lane has an end frame, since it is used again. A stream is closed.
        raise RemoteProtocolError("an end on a stream")

    # ------------------------------------------------------------------ the direct lane

    async def serve_lane(self, lane: DirectLane) -> bool:
        """Read a direct lane until the donor ends it; return whether it may be used again."""
        # One ticket is for one lane. A second one would be a thread that this session does not count.
        if self._lane is not None or self.ended.is_set():
            raise RemoteProtocolError("a second direct lane for one session, or one after its end")
        reading = self._lane = _LaneReading(lane, self._answers, self._download)
        try:
            with guarded(self.remote, self._fault, what="a state", expected=ENDINGS):
                await in_own_thread(reading.run, stop=reading.stop, name="p2pavg-state-receive")
        except ENDINGS as error:
            self.drop(error)
        else:
            if not self.ended.is_set():
                self.drop(StreamBrokenError(f"{self.remote} ended its direct lane"))
        finally:
            self._lane_done.set()
        return reading.clean

    async def _end_lane(self) -> None:
        if self._lane is not None:
            # After a graceful end, the donor ends the lane soon, and the two can use it again. Otherwise it
            # is dropped.
            if self._left:
                with trio.move_on_after(TAIL_SECONDS):
                    await self._lane_done.wait()
            self._lane.stop()


class _LaneReading:
    """Reads a direct lane, in a thread of its own."""

    def __init__(self, lane: DirectLane, answers: PendingRequests, download: RateLimit) -> None:
        self.clean = False
        """True when everything was read, and acknowledged."""
        self._lane = lane
        self._answers = answers
        self._download = download
        self._before = lane.bytes_received  # of former uses
        self._stopped = threading.Event()

    @property
    def received(self) -> int:
        return self._lane.bytes_received - self._before

    def stop(self) -> None:
        """Make :meth:`run` end soon. From any thread."""
        self._stopped.set()
        if not self.clean:
            self._lane.abort()

    def run(self) -> None:
        """Read until the donor ends the lane.

        Raises:
            StreamBrokenError: the lane broke.
            RemoteProtocolError, WrongPieceError: the donor sent what it must not.
        """
        for buffer in self._answers.read():
            if self._download.unlimited:
                self._lane.receive_into(buffer)
                continue
            for start in range(0, len(buffer), LIMITED_BYTES):
                piece = buffer[start : start + LIMITED_BYTES]
                seconds = self._download.delay(len(piece))
                # A sleep that `stop` can end: a low limit can make it long.
                if seconds and self._stopped.wait(seconds):
                    raise StreamBrokenError("the session is over")
                self._lane.receive_into(piece)
        # The donor waits for this before it uses the lane again: nothing of this use is left on it.
        self._lane.acknowledge()
        self.clean = True


# All sessions of one run's joiner.

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
        self.slow: set[PeerId] = set()
        """Donors that have let a download wait for a manifest, and have sent none since: others are asked first."""

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
                session = self._open[donor] = await self._opened(donor, addresses)
                self._nursery.start_soon(self._attend, session)
        return session

    async def _opened(self, donor: PeerId, addresses: Sequence[str]) -> JoinerSession:
        """Open a session with a donor; it takes a direct lane, unless those of this donor broke lately."""
        _, until = self._lanes_failed.get(donor, (-math.inf, -math.inf))
        wants_lane = trio.current_time() >= until
        ticket = secrets.token_bytes(TICKET_BYTES)
        stream: Stream | None = None
        with trio.move_on_after(REPLY_SECONDS):
            try:
                stream = await self.context.transport.open_stream(
                    donor, PROTOCOL, addresses=addresses, timeout=REPLY_SECONDS, wait_inbound=True
                )
                session = JoinerSession(self.context, self._lobby, stream, ticket, self._download)
                # Before the donor knows the ticket: a lane that it has kept may come sooner than the answer.
                self._lobby.tickets[ticket] = (donor, session.serve_lane)
                hello = SessionHello(self._key, self._certificate, ticket if wants_lane else b"")
                await send_message(stream, hello.encode())
                answer = await receive_message(stream, max_bytes=MAX_WELCOME_BYTES)
                refusal = "it closed the stream" if answer is None else Welcome.decode(answer).refusal
                # From here on, the session owns the stream and the ticket, and gives both up at its end.
                if not refusal:
                    stream = None
                    return session
                raise UnreachableError(f"it refuses: {refusal}")
            except ENDINGS as error:
                raise UnreachableError(f"it gave no session: {error}") from None
            finally:
                if stream is not None:
                    self._lobby.tickets.pop(ticket, None)
                    await stream.reset()
        raise UnreachableError(f"it did not answer within {REPLY_SECONDS:.0f} s")

    async def _attend(self, session: JoinerSession) -> None:
        try:
            await session.run()
        finally:
            # The session broke while it had a direct lane, which may be the reason. After the second time within
            # RETRY_SECONDS, streams are used for as long.
            if session.over_lane and isinstance(session.error, StreamBrokenError):
                now = trio.current_time()
                before, _ = self._lanes_failed.get(session.remote, (-math.inf, -math.inf))
                until = now + RETRY_SECONDS if now < before + RETRY_SECONDS else -math.inf
                self._lanes_failed[session.remote] = (now, until)
            if self._open.get(session.remote) is session:
                del self._open[session.remote]

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
