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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Annotated, TypeAlias

from msgspec import Meta

from p2pavg.allreduce.movers.reuse import START, ResumeMark
from p2pavg.base.messages import Hash, Message, pack
from p2pavg.consensus.votes import Ballot
from p2pavg.group.shares import SharePart

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


# The order of parts on a lane, and what each part waits for. Pure: no I/O, no clock.
#
# p2pavg.allreduce.movers.moves has what is done with each part.
#
# * Contributions wait for nothing, so all of them arrive. Averages wait for contributions only. If an average went
#   before a contribution, two members could wait for each other.
# * **Back-pressure.** A reducer reads at most `MAX_WAITING_PARTS` parts of a contributor that are not averaged yet.
#   What is ahead of the slowest contributor waits with its sender, not in this process. Meanwhile the contributor owes
#   nothing.

# Parts of each contributor that may wait for the slowest one: 8 MiB of fp32 at most. With the part that is being read,
# and that part decoded, this is all that a peer can make this process hold beside its own vectors.
MAX_WAITING_PARTS = 4


@dataclass(frozen=True, slots=True)
class Step:
    """One part that is to be moved."""

    kind: Lane
    """``CONTRIBUTIONS`` or ``AVERAGES``."""
    part: SharePart
    after: int | None
    """Number, as in :meth:`~p2pavg.allreduce.values.AttemptData.is_ready`, of what must be ready before: one of this
    member's tasks, or an average to pass on; ``None`` if the part waits for nothing."""
    last: bool
    """True for the last contribution, and for the last average of each reducer: a signature follows it."""
    ends: bool
    """True for the last part on the lane."""
    reducer: str = ""
    """Of an average: the member that has made it."""


Average: TypeAlias = tuple[str, SharePart, int | None]
"""An average on a lane: the member that has made it, the part of that one's share, and what it waits for."""


def outgoing(
    contributions: Sequence[SharePart], averages: Sequence[Average], sums_at: int | None = None
) -> list[Step]:
    """Return the order in which a member sends its contributions to another one's tasks, and averages.

    Args:
        sums_at: the contributions are means of this member's site: number of its task that makes the first of them.
            ``None``: they are its own values, and wait for nothing.
    """
    after = [None if sums_at is None else sums_at + index for index in range(len(contributions))]
    return _steps(zip(contributions, after, strict=True), averages)


def incoming(
    contributions: Sequence[SharePart], averages: Sequence[tuple[str, SharePart]], skipped: int = 0
) -> list[Step]:
    """Return the order in which a member receives contributions to its tasks, and averages of reducers.

    Args:
        skipped: number of contributions that came in an earlier attempt.
    """
    ahead = [None] * MAX_WAITING_PARTS + [part.index for part in contributions]
    waits = list(zip(contributions, ahead, strict=False))[skipped:]
    return _steps(waits, [(reducer, part, None) for reducer, part in averages])


def _steps(contributions: Iterable[tuple[SharePart, int | None]], averages: Iterable[Average]) -> list[Step]:
    found = [
        *(Step(Lane.CONTRIBUTIONS, part, after, False, False) for part, after in contributions),
        *(Step(Lane.AVERAGES, part, after, False, False, reducer) for reducer, part, after in averages),
    ]
    # A relay passes on the shares of several reducers, one after the other. Each of them has signed its own.
    for index, (step, following) in enumerate(zip_longest(found, found[1:])):
        if following is None or (step.kind, step.reducer) != (following.kind, following.reducer):
            found[index] = replace(step, last=True)
    if found:
        found[-1] = replace(found[-1], ends=True)
    return found
