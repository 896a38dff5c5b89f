"""The messages of ``/p2pavg/state/1``, with which a joiner fetches blobs from a donor. No I/O, no clock.

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
from dataclasses import dataclass

from p2pavg.base.encoding import pack, unpack
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_CERTIFICATE_BYTES
from p2pavg.base.peer_text import PeerText

PROTOCOL = "/p2pavg/state/1"
KEY_BYTES = 32
TICKET_BYTES = 32
BLOB_ID_BYTES = 32
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
_VERSION = 1
_KEY_DOMAIN = "p2pavg/state/1"
_FRAME = struct.Struct(">BIII")
FRAME_BYTES = _FRAME.size


def state_key(run_id: str) -> bytes:
    """Return the name of a run in hellos, 32 bytes, among the run's peers."""
    return hashlib.sha256(pack(_KEY_DOMAIN, run_id)).digest()


@dataclass(frozen=True, slots=True)
class SessionHello:
    """The first message of a session."""

    key: bytes
    """:func:`state_key` of the run; in a run with an authority, sealed like the keys of its records."""
    certificate: bytes
    """Of the joiner; empty if the run is open to anybody."""
    ticket: bytes
    """32 random bytes by which the joiner knows the session's direct lane; empty if it wants none."""


def encode_hello(hello: SessionHello) -> bytes:
    """Return a hello as bytes."""
    return pack(_VERSION, hello.key, hello.certificate, hello.ticket)


def read_hello(data: bytes) -> SessionHello:
    """Read a hello; raise RemoteProtocolError for anything that :func:`encode_hello` does not make."""
    version, key, certificate, ticket = unpack(data, int, bytes, bytes, bytes)
    if version != _VERSION or len(key) != KEY_BYTES:
        raise RemoteProtocolError("a hello of another version, or without a run")
    if len(certificate) > MAX_CERTIFICATE_BYTES or len(ticket) not in (0, TICKET_BYTES):
        raise RemoteProtocolError("a hello with a certificate or a ticket of another length")
    return SessionHello(key, certificate, ticket)


def encode_welcome(refusal: str) -> bytes:
    """Return the answer to a hello.

    Args:
        refusal: the reason for which the donor serves the joiner nothing; empty if it does.
    """
    return pack(_VERSION, refusal[:_MAX_REASON_CHARS])


def read_welcome(data: bytes) -> PeerText:
    """Return the reason for which a donor serves nothing; empty if it does.

    Raises:
        RemoteProtocolError: the bytes are no welcome.
    """
    version, refusal = unpack(data, int, str)
    if version != _VERSION or len(refusal) > _MAX_REASON_CHARS or not refusal.isprintable():
        raise RemoteProtocolError("a welcome of another version, or with a reason that is no short text")
    return PeerText(refusal)


# ---------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class AskManifest:
    """A request for the manifest of a blob."""

    number: int
    """Of the request; the joiner counts."""
    kind: int
    blob_id: bytes


@dataclass(frozen=True, slots=True)
class AskPieces:
    """A request for consecutive pieces of a blob."""

    number: int
    kind: int
    blob_id: bytes
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """The joiner needs the rest of an answer no longer."""

    number: int


Message = AskManifest | AskPieces | Cancel


def encode_request(request: Message) -> bytes:
    """Return a request as bytes."""
    match request:
        case AskManifest(number, kind, blob_id):
            return pack(0, number, kind, blob_id, 0, 0)
        case AskPieces(number, kind, blob_id, first, count):
            return pack(1, number, kind, blob_id, first, count)
        case Cancel(number):
            return pack(2, number, 0, b"", 0, 0)


def read_request(data: bytes) -> Message:
    """Read a request; raise RemoteProtocolError for anything that :func:`encode_request` does not make."""
    what, number, kind, blob_id, first, count = unpack(data, int, int, int, bytes, int, int)
    if not 0 <= number <= MAX_NUMBER:
        raise RemoteProtocolError("a request with an impossible number")
    if what == 2:
        if kind or blob_id or first or count:
            raise RemoteProtocolError("a cancellation with a blob")
        return Cancel(number)
    if not 0 <= kind <= MAX_KIND or len(blob_id) != BLOB_ID_BYTES:
        raise RemoteProtocolError("a request for a blob of an unknown kind, or without an id")
    if what == 0 and not first and not count:
        return AskManifest(number, kind, blob_id)
    if what != 1 or not 0 < count <= MAX_RANGE or not 0 <= first <= MAX_PIECES - count:
        raise RemoteProtocolError("a request of an unknown sort, or for impossible pieces")
    return AskPieces(number, kind, blob_id, first, count)


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
