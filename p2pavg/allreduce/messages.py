"""What travels in an exchange.

A *lane* is a stream (``/p2pavg/exchange/1.0.0``) that carries parts one way: contributions to a reducer
(reduce-scatter), or averages from a reducer (all-gather). It begins with a header message; then come frames, each a
kind of one byte and

* ``PART``: the part's index in its share (four bytes, big-endian), then the encoded values, whose number of bytes both
  sides know;
* ``DONE``: nothing. The sender has sent all; back on the same lane, the receiver has received all;
* ``ABORT``: a length (two bytes) and a message: the member has given the round up, and why. Only back on a lane.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from p2pavg.errors import RemoteProtocolError
from p2pavg.net.framing import receive_exactly_into
from p2pavg.net.transport import Stream
from p2pavg.net.wire import pack, unpack
from p2pavg_dht import PeerIdError, public_key_of

PROTOCOL = "/p2pavg/exchange/1.0.0"
MAX_HEADER_BYTES = 64
MAX_REASON_CHARS = 300
FRAME_BYTES = 5


class Lane(enum.IntEnum):
    """What a lane carries."""

    CONTRIBUTIONS = 0
    AVERAGES = 1


class Kind(enum.IntEnum):
    """The first byte of a frame."""

    PART = 1
    DONE = 2
    ABORT = 3


@dataclass(frozen=True, slots=True)
class LaneHeader:
    """The first message on a lane."""

    group_id: bytes
    lane: Lane


@dataclass(frozen=True, slots=True)
class Abort:
    """Why a member gave the round up, and because of whom (``""``: nobody in particular)."""

    reason: str
    peer_id: str


def encode_header(header: LaneHeader) -> bytes:
    """The header's bytes."""
    return pack(header.group_id, int(header.lane))


def decode_header(message: bytes) -> LaneHeader:
    """Raises RemoteProtocolError for anything that :func:`encode_header` does not make."""
    group_id, lane = unpack(message, bytes, int)
    if len(group_id) != 32 or lane not in (Lane.CONTRIBUTIONS, Lane.AVERAGES):
        raise RemoteProtocolError("a lane header with no group id or of an unknown lane")
    return LaneHeader(group_id, Lane(lane))


def part_frame(index: int) -> bytes:
    """What goes before a part's values."""
    return bytes([Kind.PART]) + index.to_bytes(4, "big")


DONE_FRAME = bytes([Kind.DONE])


def abort_frame(abort: Abort) -> bytes:
    """An ``ABORT`` frame."""
    body = pack(abort.reason[:MAX_REASON_CHARS], abort.peer_id)
    return bytes([Kind.ABORT]) + len(body).to_bytes(2, "big") + body


async def receive_kind(stream: Stream) -> Kind:
    """The kind of the next frame.

    Raises:
        RemoteProtocolError: no such kind.
        StreamBrokenError: the stream ended.
    """
    kind = bytearray(1)
    await receive_exactly_into(stream, memoryview(kind))
    try:
        return Kind(kind[0])
    except ValueError:
        raise RemoteProtocolError(f"a frame of unknown kind {kind[0]}") from None


async def receive_index(stream: Stream) -> int:
    """The index of a part."""
    index = bytearray(4)
    await receive_exactly_into(stream, memoryview(index))
    return int.from_bytes(index, "big")


async def receive_abort(stream: Stream) -> Abort:
    """The rest of an ``ABORT`` frame."""
    length = bytearray(2)
    await receive_exactly_into(stream, memoryview(length))
    size = int.from_bytes(length, "big")
    if size > 8 * MAX_REASON_CHARS:
        raise RemoteProtocolError(f"an abort of {size} bytes")
    body = bytearray(size)
    await receive_exactly_into(stream, memoryview(body))
    reason, peer_id = unpack(bytes(body), str, str)
    if peer_id:
        try:
            public_key_of(peer_id)
        except PeerIdError as error:
            raise RemoteProtocolError(str(error)) from None
    printable = "".join(
        character if character.isprintable() else "?" for character in reason[:MAX_REASON_CHARS]
    )
    return Abort(printable, peer_id)
