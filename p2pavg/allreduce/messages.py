"""Headers and frames of an exchange, on streams of ``/p2pavg/exchange/4.0.0``.

A stream begins with a header message that says what it is:

* a *lane* carries the parts of one attempt one way: contributions to a reducer (reduce-scatter), averages from a
  reducer (all-gather), or a share that its reducer did not live to send, passed on by a member that has it. Each part
  is its index in its share (four bytes, big-endian), then the encoded values, whose number both sides know. A direct
  lane carries a member's contributions and then its averages; a stream carries one of the two;
* ``CONTROL`` carries votes (:mod:`p2pavg.consensus.votes`) both ways, for as long as the round lasts;
* ``ASK`` carries one vote back: how a round ended;
* ``AUDIT`` carries a request and the inputs of some parts back (:mod:`p2pavg.verification.audit.layout`);
* ``STATE``, on a direct lane only, carries pieces of states (:mod:`p2pavg.state`). The group id is its ticket.

A signature follows the last average, and in a group with audits the last contribution (:mod:`p2pavg.allreduce.proofs`).

No I/O, no clock.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from p2pavg.allreduce.movers.reuse import START, ResumeMark
from p2pavg.base.encoding import pack, unpack
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.consensus.votes import MAX_BALLOT
from p2pavg.net.framing import receive_exactly_into
from p2pavg.net.transport import Stream

PROTOCOL = "/p2pavg/exchange/4.0.0"
MAX_HEADER_BYTES = 96
FRAME_BYTES = 4
MEMBERS_BYTES = 16

_MEMBERS_DOMAIN = "p2pavg/attempt/1"


class Lane(enum.IntEnum):
    """The content of a stream."""

    CONTRIBUTIONS = 0
    AVERAGES = 1
    PASSED_ON = 2
    CONTROL = 3
    ASK = 4
    PARTS = 5
    """Contributions, then averages: what a direct lane carries."""
    AUDIT = 6
    """A request to show the inputs of a share, and the answer: see :mod:`p2pavg.verification.audit`."""
    STATE = 7
    """Pieces of states, for the peer that has given the sender a ticket: see :mod:`p2pavg.state`."""


@dataclass(frozen=True, slots=True)
class LaneHeader:
    """The first message on a stream."""

    group_id: bytes
    """In a lane of the kind ``STATE``: the ticket."""
    lane: Lane
    attempt: int = 0
    reducer: int = 0
    """Of a share that is passed on: its reducer's position in the roster."""
    members: bytes = b""
    """:func:`members_digest` of a later attempt. Its members are one leader's word, which may differ from member to
    member: without this, two members could mix parts of two attempts. The group id names those of the first attempt."""
    begin: ResumeMark = START
    """In a lane with contributions, where they go on, if some of them came in an earlier attempt."""


def encode_header(header: LaneHeader) -> bytes:
    """The header's bytes."""
    return pack(
        header.group_id, int(header.lane), header.attempt, header.reducer, header.members, *header.begin
    )


def members_digest(attempt: int, peer_ids: Iterable[str]) -> bytes:
    """Return what a lane's header says of an attempt's members: 16 bytes, or none for the first attempt."""
    return hashlib.sha256(pack(_MEMBERS_DOMAIN, *peer_ids)).digest()[:MEMBERS_BYTES] if attempt else b""


def decode_header(message: bytes) -> LaneHeader:
    """Raises RemoteProtocolError for anything that :func:`encode_header` does not make."""
    types = (bytes, int, int, int, bytes, int, int)
    group_id, lane, attempt, reducer, members, parts, nbytes = unpack(message, *types)
    if len(group_id) != 32 or lane not in list(Lane):
        raise RemoteProtocolError("a lane header with no group id or of an unknown lane")
    if not 0 <= attempt <= MAX_BALLOT or not 0 <= reducer < 256:
        raise RemoteProtocolError("a lane header of an impossible attempt or reducer")
    if len(members) not in (0, MEMBERS_BYTES):
        raise RemoteProtocolError("a lane header with a digest of another length")
    if not (0 <= parts < 2**31 and 0 <= nbytes < 2**31) or ((parts or nbytes) and not attempt):
        raise RemoteProtocolError("a lane header whose contributions go on at an impossible place")
    return LaneHeader(group_id, Lane(lane), attempt, reducer, members, ResumeMark(parts, nbytes))


def part_frame(index: int) -> bytes:
    """Return the frame that goes before a part's values."""
    return index.to_bytes(FRAME_BYTES, "big")


async def receive_index(stream: Stream) -> int:
    """The index of the part that comes next."""
    index = bytearray(FRAME_BYTES)
    await receive_exactly_into(stream, memoryview(index))
    return int.from_bytes(index, "big")
