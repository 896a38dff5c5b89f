"""Reads the frames that a donor sends, and checks them against what was asked. No I/O, no clock.

:meth:`PendingRequests.read` is a generator of buffers: its driver fills each one from a stream or a direct lane, and
resumes it. So both are read by the same code, a direct lane in a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from p2pavg.base.errors import P2PAvgError, RemoteProtocolError, StateError
from p2pavg.base.threads.workers import ToLoop
from p2pavg.state.messages import (
    FRAME_BYTES,
    MAX_NUMBER,
    MAX_REFUSAL_BYTES,
    Frame,
    FrameKind,
    read_frame,
    read_reason,
)

CHUNK_BYTES = 64 * 1024  # a manifest's memory grows with what arrives


class WrongPieceError(RemoteProtocolError):
    """A piece that is not the blob's. The message completes "it"."""


class DonorRefusedError(P2PAvgError):
    """A donor does not give what it was asked for. The message is its reason."""


class RequestOwner(Protocol):
    """Uses what a donor answers."""

    def take(self, index: int, piece: memoryview) -> None:
        """Keep a piece; called in the thread that reads. Raises WrongPieceError if the piece is not the blob's."""

    def came(self, request: DonorRequest, index: int) -> None:
        """Note that a piece was taken; called on the event loop, and after :meth:`ended` if the session broke then."""

    def ended(self, request: DonorRequest, error: Exception | None) -> None:
        """Note that a request has ended, with an error or without; called once for each, on the event loop."""


class DonorRequest:
    """One request to a donor."""

    def __init__(
        self,
        number: int,
        owner: RequestOwner,
        *,
        first: int = 0,
        sizes: Sequence[int] = (),
        max_manifest_bytes: int = 0,
    ) -> None:
        self.number = number
        self.owner = owner
        self.first = first
        self.sizes = sizes
        """Bytes of each piece that is asked for; empty if the manifest is."""
        self.max_manifest_bytes = max_manifest_bytes
        self.given = 0
        """Pieces that have come."""
        self.manifest = b""
        self.about: Any = None
        """For its owner alone, which finds again what it has asked for."""
        self.cancelled = False
        """True if nothing of it is used any more."""
        self.has_ended = False
        """True if its owner was told so, or is about to be."""


class PendingRequests:
    """The requests of one session that are not answered yet."""

    def __init__(self, report: ToLoop) -> None:
        self.on_idle: Callable[[], None] = lambda: None
        """Called on the event loop when nothing is asked any more."""
        self._report = report
        self._requests: dict[int, DonorRequest] = {}
        self._lock = threading.Lock()  # the stream and the direct lane are read at once
        self._next = 0

    def next_number(self) -> int:
        """Return the number of the next request."""
        self._next = (self._next + 1) % (MAX_NUMBER + 1)
        return self._next

    @property
    def waits(self) -> bool:
        """True if something is asked."""
        return bool(self._requests)

    def expect(self, request: DonorRequest) -> None:
        """Let the donor answer a request from now on."""
        with self._lock:
            self._requests[request.number] = request

    def fail(self, error: Exception) -> None:
        """End all requests, because their session has ended."""
        with self._lock:
            requests = [*self._requests.values()]
        for request in requests:
            self._end(request, error)

    def read(self) -> Generator[memoryview, None, None]:
        """Yield buffers to fill, until the other side has sent an END frame.

        Raises:
            RemoteProtocolError: the donor sent what was not asked.
            WrongPieceError: the donor sent a piece that is not the blob's.
        """
        header, scratch = bytearray(FRAME_BYTES), bytearray()
        while True:
            yield memoryview(header)
            frame = read_frame(header)
            if frame.kind is FrameKind.END:
                if frame.number or frame.index or frame.length:
                    raise RemoteProtocolError("an end with numbers")
                return
            with self._lock:
                request = self._requests.get(frame.number)
            if request is None:
                raise RemoteProtocolError("an answer to a request that is not open")
            _check(frame, request)
            if len(scratch) < frame.length and frame.kind is FrameKind.PIECE:
                scratch = bytearray(frame.length)  # the size of a piece of a verified manifest
            match frame.kind:
                case FrameKind.PIECE:
                    piece = memoryview(scratch)[: frame.length]
                    yield piece
                    self._take(request, frame.index, piece)
                case FrameKind.MANIFEST:
                    request.manifest = yield from _grown(frame.length)
                    self._end(request, None)
                case FrameKind.REFUSAL:
                    reason = read_reason((yield from _grown(frame.length)))
                    self._end(request, DonorRefusedError(reason or "it gives no reason"))
            del request  # it holds what it was for, and the next answer may be long in coming

    def _take(self, request: DonorRequest, index: int, piece: memoryview) -> None:
        request.given += 1
        if not request.cancelled:
            try:
                request.owner.take(index, piece)
            except StateError as error:  # our disk is full: not the donor's fault
                request.cancelled = True
                self._end(request, error, forget=False)
            except Exception as error:
                self._end(request, error)
                raise
            else:
                self._report(request.owner.came, request, index)
        if request.given == len(request.sizes):
            self._end(request, None)

    def _end(self, request: DonorRequest, error: Exception | None, *, forget: bool = True) -> None:
        """Tell a request's owner that it has ended, once.

        Args:
            forget: no more answers to it are expected.
        """
        if forget:
            with self._lock:
                self._requests.pop(request.number, None)
        if not request.has_ended:
            request.has_ended = True
            self._report(request.owner.ended, request, error)
        if not self._requests:
            self._report(self.on_idle)


def _check(frame: Frame, request: DonorRequest) -> None:
    """Raise RemoteProtocolError unless a frame may be the next one of the answer to a request."""
    if frame.kind is FrameKind.REFUSAL:
        if frame.index or frame.length > MAX_REFUSAL_BYTES:
            raise RemoteProtocolError(f"a refusal of {frame.length} bytes")
        return
    if frame.kind is FrameKind.MANIFEST:
        # A request for pieces allows a manifest of 0 bytes, which is none.
        if frame.index or not 0 < frame.length <= request.max_manifest_bytes:
            raise RemoteProtocolError(
                f"a manifest of {frame.length} bytes, {request.max_manifest_bytes} are allowed"
            )
        return
    if not request.sizes or frame.index != request.first + request.given:
        raise RemoteProtocolError("a piece that was not asked for")
    if frame.length != request.sizes[request.given]:
        raise RemoteProtocolError(
            f"a piece of {frame.length} bytes instead of {request.sizes[request.given]}"
        )


def _grown(count: int) -> Generator[memoryview, None, bytes]:
    """Read bytes of which only the donor knows the number, into memory that grows with what arrives."""
    received = bytearray()
    while len(received) < count:
        chunk = bytearray(min(CHUNK_BYTES, count - len(received)))
        yield memoryview(chunk)
        received += chunk
    return bytes(received)
