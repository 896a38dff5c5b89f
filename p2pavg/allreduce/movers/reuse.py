"""The contributions that a later attempt need not send again. Pure: no I/O, no clock.

When a member is lost, the averages that count it are worthless, and the contributions of the others are not. A reducer
keeps its range in the next attempt (:mod:`p2pavg.group.roster`). So it keeps what has come for it, and averages it
again without the lost member.

* **Who decides.** A reducer tells each contributor how far its contribution has come (:class:`ResumeMark`), before it
  promises to go on. The contributor names in the header of its lane where it goes on: there, or earlier. The reducer
  refuses a place up to which nothing has come. So the two need not agree, and a lie about it costs the liar only.
* **What is signed.** The contributor signs the digests of all parts again, for the new attempt and its members: those
  that it sent before, as it sent them, and those that it sends now. So one signature covers the whole contribution as
  before, and no signature of an earlier attempt counts in a later one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from p2pavg.group.shares import SharePart
from p2pavg.net.transport import Buffer
from p2pavg_compression import Codec


class ResumeMark(NamedTuple):
    """A place in one member's contribution to one reducer."""

    parts: int
    """Whole parts before it."""
    nbytes: int
    """Encoded bytes of the next part before it."""

    def of(self, part: SharePart, payload: Buffer) -> memoryview:
        """Return the bytes of a part that come after this place; the part's index is ``parts`` or more."""
        return memoryview(payload)[self.nbytes if part.index == self.parts else 0 :]


START = ResumeMark(0, 0)


@dataclass(frozen=True, slots=True)
class Received:
    """One contribution, as far as it has come in an attempt that has ended."""

    parts: Sequence[Buffer]
    """Whole parts, from the first one on."""
    begun: Buffer
    """The first bytes of the next part."""
    digests: Sequence[bytes]
    """Digests of the whole parts; empty bytes in a group without audits."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Everything of an attempt that the next one may use, at one member."""

    parts: Mapping[str, Sequence[SharePart]]
    """The parts of each reducer's share."""
    came: Mapping[str, Received]
    """Contributions to this member's share, by contributor."""
    sent: Mapping[str, Sequence[bytes]]
    """Digests of the parts that were sent to each reducer, from the first one on."""
    told: Mapping[str, ResumeMark]
    """How far this member's contribution has come, by the reducers that have told it."""


def goes_on_at(
    told: ResumeMark, sent: int, before: Sequence[SharePart], now: Sequence[SharePart], codec: Codec
) -> ResumeMark:
    """Return where a contributor goes on in a later attempt.

    Args:
        told: how far its contribution has come, as the reducer has told it.
        sent: whole parts that the contributor has encoded. It believes of no more that they have come.
        before: parts of the reducer's share in the attempt before.
        now: parts of its share in this attempt.
    """
    parts = min(told.parts, sent)
    mark = told if parts == told.parts and parts < sent else ResumeMark(parts, 0)
    return _within(mark, before, now, codec)


def has_come(
    came: Received, before: Sequence[SharePart], now: Sequence[SharePart], codec: Codec
) -> ResumeMark:
    """Return how much of a contribution a reducer keeps for a later attempt."""
    return _within(ResumeMark(len(came.parts), len(came.begun)), before, now, codec)


def _within(
    mark: ResumeMark, before: Sequence[SharePart], now: Sequence[SharePart], codec: Codec
) -> ResumeMark:
    """Return the last place up to ``mark`` that means the same in both attempts.

    It is before the end of the last part, because a signature follows that part.
    """
    if not now:
        return START
    pairs = zip(before, now, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))  # parts of the same elements
    if mark.parts >= same:
        mark = ResumeMark(same, 0)
    if mark.parts == len(now):
        return ResumeMark(len(now) - 1, codec.encoded_nbytes(now[-1].elements))
    return (
        mark if mark.nbytes <= codec.encoded_nbytes(now[mark.parts].elements) else ResumeMark(mark.parts, 0)
    )
