"""Audits of a group's averages: how often they are made, and the draw of the auditors and the parts.

A reducer that lies gives all members the same false bits. So members that are drawn reduce some of its parts again,
from the bytes that the contributors signed. No I/O, no clock, no random source.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from blake3 import blake3

from p2pavg.base.errors import ConfigError
from p2pavg.base.limits import MAX_AUDIT_CHARS
from p2pavg.base.numbers import check_number, read_number

DEFAULT_PROBABILITY = 0.125
PARTS_PER_AUDIT = 3
"""An audit covers one of three parts of a share, rounded up."""

_DOMAIN = b"p2pavg-draw/1\0"
_DRAWS = 2**32


@dataclass(frozen=True, slots=True)
class Audits:
    """Audits of a group's averages.

    Args:
        probability: probability with which at least one member audits a share in a round; above 0 and at most 1.
        before: audit before the round is committed, so that an average that is found false is no result. A round then
            takes as long as its audits. Otherwise members audit after the commit: a liar is found, and its lie stays in
            the results of the rounds before.

    Raises:
        ConfigError: an argument is out of range.
    """

    probability: float = DEFAULT_PROBABILITY
    before: bool = False

    def __post_init__(self) -> None:
        check_number("probability of an audit", self.probability, 1.0)

    @property
    def text(self) -> str:
        """The setting as text."""
        return f"{'before' if self.before else 'after'}:{float(self.probability)!r}"


def resolve_audits(given: object) -> Audits | None:
    """Return the audits that a text names; return :class:`Audits` unchanged, and ``None`` for ``"off"``.

    Texts are ``"after"``, ``"before"``, ``"after:PROBABILITY"``, ``"before:PROBABILITY"`` and ``"off"``.

    Raises:
        ConfigError: it is none of these, or the probability is out of range.
    """
    if isinstance(given, Audits):
        return given
    if isinstance(given, str) and len(given) <= MAX_AUDIT_CHARS:
        moment, colon, probability = given.partition(":")
        if given == "off":
            return None
        if moment in ("after", "before"):
            return Audits(read_number(probability) if colon else DEFAULT_PROBABILITY, moment == "before")
    raise ConfigError(f"an audit is 'after:PROBABILITY', 'before:PROBABILITY' or 'off', got {given!r}")


def drawn_parts(
    audits: Audits, ticket: bytes, reducer: int, parts: int, auditors: int, stretches: int = 1
) -> tuple[int, ...]:
    """Return the indices of the parts of one share that one member has to audit; empty if it is not drawn.

    The draw follows from the member's own signature of the result. No other member can compute that signature before it
    has sent its averages, so a reducer that lies cannot know whether it will be audited. Every member can verify the
    draw afterwards, so a reducer need not answer a member that was not drawn.

    Args:
        ticket: signature of the auditor about the attempt.
        reducer: position of the reducer in the group's roster.
        parts: number of parts of the reducer's share.
        auditors: number of members that may audit it: those that hold the result, without the reducer itself.
        stretches: number of pieces of the share that are drawn and audited like shares of their own. One member that
            reduces for a whole group is audited like the reducers whose place it takes: by several auditors, each of
            which asks for no more than it would ask one of them.
    """
    if parts == 0 or auditors == 0:
        return ()
    pieces = min(stretches, parts)
    edges = [piece * parts // pieces for piece in range(pieces + 1)]
    return tuple(
        start + index
        for piece, (start, stop) in enumerate(itertools.pairwise(edges))
        for index in _drawn(audits, reducer, piece, ticket, stop - start, auditors)
    )


def _drawn(
    audits: Audits, reducer: int, piece: int, ticket: bytes, parts: int, auditors: int
) -> tuple[int, ...]:
    place = reducer.to_bytes(2, "big") + (piece.to_bytes(2, "big") if piece else b"")
    drawn = blake3(_DOMAIN + place + ticket).digest(8)
    chance, first = int.from_bytes(drawn[:4], "big"), int.from_bytes(drawn[4:], "big") % parts
    # The members draw independently of each other: at least one of them is drawn with the probability that is set.
    if chance >= (1.0 - (1.0 - audits.probability) ** (1.0 / auditors)) * _DRAWS:
        return ()
    count = -(-parts // PARTS_PER_AUDIT)
    return tuple(sorted((first + offset) % parts for offset in range(count)))
