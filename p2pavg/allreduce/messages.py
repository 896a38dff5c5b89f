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
from typing import Annotated

from msgspec import Meta

from p2pavg.allreduce.movers.reuse import START, ResumeMark
from p2pavg.base.messages import Hash, Message, pack
from p2pavg.consensus.votes import Ballot

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


class LaneHeader(Message, frozen=True):
    """The first message on a stream."""

    group_id: Hash
    """In a lane of the kind ``STATE``: the ticket."""
    lane: Lane
    attempt: Ballot = 0
    reducer: Annotated[int, Meta(ge=0, lt=256)] = 0
    """Of a share that is passed on: its reducer's position in the roster."""
    members: Annotated[bytes, Meta(max_length=MEMBERS_BYTES)] = b""
    """:func:`members_digest` of a later attempt. Its members are one leader's word, which may differ from member to
    member: without this, two members could mix parts of two attempts. The group id names those of the first attempt."""
    begin: ResumeMark = START
    """In a lane with contributions, where they go on, if some of them came in an earlier attempt."""

    def __post_init__(self) -> None:
        if len(self.members) not in (0, MEMBERS_BYTES):
            raise ValueError("a lane header with a digest of another length")
        parts, nbytes = self.begin
        if not (0 <= parts < 2**31 and 0 <= nbytes < 2**31) or ((parts or nbytes) and not self.attempt):
            raise ValueError("a lane header whose contributions go on at an impossible place")


def members_digest(attempt: int, peer_ids: Iterable[str]) -> bytes:
    """Return what a lane's header says of an attempt's members: 16 bytes, or none for the first attempt."""
    return hashlib.sha256(pack(_MEMBERS_DOMAIN, *peer_ids)).digest()[:MEMBERS_BYTES] if attempt else b""


def part_frame(index: int) -> bytes:
    """Return the frame that goes before a part's values."""
    return index.to_bytes(FRAME_BYTES, "big")
