"""The messages of ``/p2pavg/state/3``, with which a joiner fetches blobs from a donor. No I/O, no clock.

A *blob* is a snapshot or one average of a run's log. Its *manifest* says of which *pieces* it consists.

A *session* is one stream. The joiner begins it with a :class:`SessionHello`, and the donor answers with a welcome,
which is a refusal or empty. Then the joiner sends requests, and the donor answers each one with frames: a header of 13
bytes, and as many bytes as the header says.

* A request for a manifest is answered on the stream.
* A request for consecutive pieces is answered piece by piece, in their order, and requests in the order in which they
  came: over a direct lane if the joiner's hello had a ticket and the lane could be made, otherwise on the stream.
* A refusal ends the answer to a request.
* After a :class:`Cancel`, the donor ends the answer with a refusal, unless all of it is sent already.

When the joiner closes its half of the stream, the donor ends the direct lane with a frame of the kind ``END``. The lane
may then be used for something else.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from p2pavg.base.errors import ClosedError, P2PAvgError, RemoteProtocolError, StreamBrokenError
from p2pavg.base.formats import PeerText
from p2pavg.base.limits import MAX_CERTIFICATE_BYTES
from p2pavg.base.messages import Hash, Message, cut, decoded, pack

PROTOCOL = "/p2pavg/state/3"
TICKET_BYTES = 32
DIGEST_BYTES = 32
MAX_KIND = 15
MAX_PIECE_BYTES = 4 * 1024 * 1024
"""A chunk of a snapshot has 1 MiB, an encoded part of an average at most 2 MiB."""
MAX_PIECES = 1 << 24
"""Pieces of one blob: 16 TiB of a snapshot."""
MAX_RANGE = 8
"""Pieces that one request asks for."""
MAX_HELLO_BYTES = MAX_CERTIFICATE_BYTES + 128
MAX_WELCOME_BYTES = 1024
MAX_REQUEST_BYTES = 128
MAX_REFUSAL_BYTES = 800  # 200 characters
MAX_NUMBER = (1 << 32) - 1
_MAX_REASON_CHARS = 200
_KEY_DOMAIN = "p2pavg/state/1"
_FRAME = struct.Struct(">BIII")
FRAME_BYTES = _FRAME.size


def state_key(run_id: str) -> bytes:
    """Return the name of a run in hellos, 32 bytes, among the run's peers."""
    return hashlib.sha256(pack(_KEY_DOMAIN, run_id)).digest()


class SessionHello(Message, frozen=True, tag=1):
    """The first message of a session."""

    key: Hash
    """:func:`state_key` of the run; in a run with an authority, sealed like the keys of its records."""
    certificate: Annotated[bytes, Meta(max_length=MAX_CERTIFICATE_BYTES)]
    """Of the joiner; empty if the run is open to anybody."""
    ticket: bytes
    """32 random bytes by which the joiner knows the session's direct lane; empty if it wants none."""

    def __post_init__(self) -> None:
        if len(self.ticket) not in (0, TICKET_BYTES):
            raise ValueError(f"a ticket of {len(self.ticket)} bytes")


class Welcome(Message, frozen=True, tag=1):
    """The answer to a hello."""

    refusal: str
    """The reason for which the donor serves the joiner nothing; empty if it does."""

    def __post_init__(self) -> None:
        cut(self, refusal=_MAX_REASON_CHARS)


# ---------------------------------------------------------------------- requests

_Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
_Kind = Annotated[int, Meta(ge=0, le=MAX_KIND)]


class AskManifest(Message, frozen=True, tag=0):
    """A request for the manifest of a blob."""

    number: _Number
    """Of the request; the joiner counts."""
    kind: _Kind
    blob_id: Hash


class AskPieces(Message, frozen=True, tag=1):
    """A request for consecutive pieces of a blob."""

    number: _Number
    kind: _Kind
    blob_id: Hash
    first: Annotated[int, Meta(ge=0)]
    count: Annotated[int, Meta(gt=0, le=MAX_RANGE)]

    def __post_init__(self) -> None:
        if self.first > MAX_PIECES - self.count:
            raise ValueError(f"a request for pieces from {self.first}")


class Cancel(Message, frozen=True, tag=2):
    """The joiner needs the rest of an answer no longer."""

    number: _Number


Request = AskManifest | AskPieces | Cancel


def read_request(data: bytes) -> Request:
    """Read a request. Raises RemoteProtocolError for anything else."""
    request: Request = decoded(data, Request)
    return request


# ---------------------------------------------------------------------- frames


class FrameKind(enum.IntEnum):
    """The content of a frame."""

    MANIFEST = 0
    PIECE = 1
    REFUSAL = 2
    """Ends the answer to a request; the bytes are the reason."""
    END = 3
    """The last frame of a direct lane."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The header of a frame."""

    kind: FrameKind
    number: int
    """Of the request that is answered."""
    index: int
    """Of a piece."""
    length: int
    """Bytes that follow."""


def encode_frame(frame: Frame) -> bytes:
    """Return a frame's header as bytes."""
    return _FRAME.pack(int(frame.kind), frame.number, frame.index, frame.length)


def read_frame(data: bytes | bytearray) -> Frame:
    """Read the header of a frame; raise RemoteProtocolError for anything that :func:`encode_frame` does not make.

    The length is not checked: the reader knows which one it expects.
    """
    if len(data) != FRAME_BYTES:
        raise RemoteProtocolError(f"a frame's header of {len(data)} bytes")
    kind, number, index, length = _FRAME.unpack(data)
    if kind not in list(FrameKind):
        raise RemoteProtocolError(f"a frame of the unknown kind {kind}")
    return Frame(FrameKind(kind), number, index, length)


def encode_refusal(number: int, reason: str) -> bytes:
    """Return a whole frame that ends the answer to a request."""
    text = reason[:_MAX_REASON_CHARS].encode()
    return encode_frame(Frame(FrameKind.REFUSAL, number, 0, len(text))) + text


def read_reason(text: bytes | bytearray) -> PeerText:
    """Return the reason of a refusal; raise RemoteProtocolError if it is no short printable text."""
    try:
        reason = bytes(text).decode()
    except UnicodeDecodeError:
        raise RemoteProtocolError("a refusal that is no text") from None
    if len(reason) > _MAX_REASON_CHARS or not reason.isprintable():
        raise RemoteProtocolError("a refusal that is no short text")
    return PeerText(reason)


# The pieces of a blob.


@dataclass(frozen=True)
class BlobManifest:
    """The pieces of a blob.

    Raises:
        RemoteProtocolError: there are too many, or they are too large.
    """

    sizes: Sequence[int]
    """Bytes of each piece, above 0."""
    digests: Sequence[bytes]
    """Of each piece, 32 bytes of BLAKE3."""

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.digests) or len(self.sizes) > MAX_PIECES:
            raise RemoteProtocolError(f"a manifest of {len(self.sizes)} pieces")
        if any(not 0 < size <= MAX_PIECE_BYTES for size in self.sizes):
            raise RemoteProtocolError("a manifest with a piece of an impossible size")
        if any(len(digest) != DIGEST_BYTES for digest in self.digests):
            raise RemoteProtocolError("a manifest with a digest of another length")


# The errors with which a session ends: several of its tasks may raise at once, because one connection broke.

ENDINGS = (RemoteProtocolError, StreamBrokenError, ClosedError)


@contextmanager
def of_the_remote() -> Iterator[None]:
    """Raise one error of the other side or its connection instead of a group of several. All others are raised too."""
    endings: list[P2PAvgError] = []
    try:
        yield
    except* ENDINGS as group:
        endings += _leaves(group)
    if endings:
        raise next((error for error in endings if isinstance(error, RemoteProtocolError)), endings[0])


def _leaves(error: BaseException) -> Iterator[P2PAvgError]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    elif isinstance(error, P2PAvgError):
        yield error
