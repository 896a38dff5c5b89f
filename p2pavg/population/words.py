"""The record that a member of a population publishes on the board. No I/O, no clock.

A record may come from any stranger: lengths, ranges and characters are checked before anything is compared or shown.
The board's records are signed by their publishers, and in a run with an authority only those of members are seen.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import checked, pack, unpack
from p2pavg.population.space import MAX_HYPERPARAMETERS, Value, is_name, is_value

TOPIC = "population"
MAX_MEMBER_CHARS = 64
MAX_GENERATION = 2**40
MAX_STEPS = 2**53
MAX_SCORE = 1e100  # magnitude
MAX_SNAPSHOT_BYTES = 2**50
MAX_BASIS = 64
"""Words on which one decision rests."""
DIGEST_BYTES = 32
SHORT_BYTES = 16  # of a word's digest in a basis
MAX_WORD_BYTES = 3500  # of a record's 4096: the rest is for its signature and key

_STANDING_TYPES = (bytes, str, int, int, float, tuple, bytes, bytes, bytes, int)
"""Types of the fields of a standing, as they are packed."""

_VERSION = 1
_STANDING = "p2pavg/population/standing/1"
_LINEAGE = "p2pavg/population/lineage/1"

Hyperparameters = tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A member at the end of one of its generations.

    Raises:
        RemoteProtocolError: a field is out of range.
    """

    settings: bytes
    """32 bytes: :attr:`PopulationSettings.digest`."""
    member: str
    """Name of the population member. Several peers may form one."""
    generation: int
    """Generations that this member has finished, from 1."""
    steps: int
    """Steps of training in these weights, also those of the members from which they were copied."""
    score: float
    hyperparameters: Hyperparameters
    """Those of this generation, in the order of their names."""
    lineage: bytes
    """Names these weights: 32 bytes that depend on ``parent``, publisher, generation and hyperparameters."""
    parent: bytes
    """Lineage of the weights with which this generation began, 32 bytes; zeros at the member's start."""
    root: bytes
    """Root of the snapshot of these weights, 32 bytes: see :mod:`p2pavg.state`."""
    size: int
    """Bytes of the snapshot."""

    def __post_init__(self) -> None:
        if any(len(each) != DIGEST_BYTES for each in (self.settings, self.lineage, self.parent, self.root)):
            raise RemoteProtocolError("a member's word with a digest of another length")
        if not 0 < len(self.member) <= MAX_MEMBER_CHARS or not (
            self.member.isascii() and self.member.isprintable()
        ):
            raise RemoteProtocolError("a member's word with a name out of range")
        if not (0 < self.generation <= MAX_GENERATION and 0 <= self.steps <= MAX_STEPS):
            raise RemoteProtocolError("a member's word with numbers out of range")
        if not math.isfinite(self.score) or abs(self.score) > MAX_SCORE:
            raise RemoteProtocolError("a member's word with a score out of range")
        if not 0 < self.size <= MAX_SNAPSHOT_BYTES:
            raise RemoteProtocolError("a member's word with a snapshot out of range")
        _check_hyperparameters(self.hyperparameters)

    @property
    def digest(self) -> bytes:
        """16 bytes that name this word in decisions."""
        return hashlib.sha256(pack(_STANDING, *_standing_fields(self))).digest()[:SHORT_BYTES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision of a member at the end of a generation, and the words on which it rests.

    Raises:
        RemoteProtocolError: a field is out of range.
    """

    donor: bytes = b""
    """Digest of the word of the member whose weights it copied; empty if it kept its own."""
    hyperparameters: Hyperparameters
    """Those of its next generation."""
    basis: tuple[bytes, ...] = ()
    """Digests of the other members' words that counted, in ascending order."""
    failed: tuple[bytes, ...] = ()
    """Those of ``basis`` whose weights could not be copied, in ascending order."""
    reason: str = field(default="", compare=False)
    """The cause as a sentence. It is not published: it follows from the rest."""

    def __post_init__(self) -> None:
        if len(self.basis) > MAX_BASIS or any(len(each) != SHORT_BYTES for each in self.basis):
            raise RemoteProtocolError("a decision on too many words, or with a digest of another length")
        if any(one >= other for one, other in pairwise(self.basis)):
            raise RemoteProtocolError("a decision whose words are not in order")
        if tuple(sorted(set(self.failed))) != self.failed or not set(self.failed) <= set(self.basis):
            raise RemoteProtocolError("a decision that failed at words on which it does not rest")
        if self.donor and (self.donor not in self.basis or self.donor in self.failed):
            raise RemoteProtocolError("a decision for a word on which it does not rest")
        _check_hyperparameters(self.hyperparameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One member's record."""

    standing: Standing
    decision: Decision | None = None
    """``None`` until it has decided."""


def lineage_after(parent: bytes, peer_id: str, generation: int, hyperparameters: Hyperparameters) -> bytes:
    """Return the lineage of the weights after one generation, 32 bytes.

    Args:
        parent: lineage of the weights before it.
        peer_id: the publisher of the member's words.
    """
    return hashlib.sha256(pack(_LINEAGE, parent, peer_id, generation, hyperparameters)).digest()


def in_order(hyperparameters: Mapping[str, Value]) -> Hyperparameters:
    """Return hyperparameters in the order of their names, as words have them."""
    return tuple(sorted(hyperparameters.items()))


def encode_word(word: Word) -> bytes:
    """Return the bytes that a member publishes, at most :data:`MAX_WORD_BYTES`."""
    made = word.decision
    decision = () if made is None else (made.donor, made.hyperparameters, made.basis, made.failed)
    return pack(_VERSION, *_standing_fields(word.standing), decision)


def read_word(value: bytes) -> Word:
    """Read a record; raise RemoteProtocolError for anything that :func:`encode_word` does not make."""
    version, *fields, made = unpack(value, int, *_STANDING_TYPES, tuple)
    if version != _VERSION:
        raise RemoteProtocolError(f"a member's word of version {version}")
    return Word(standing=_standing_of(fields), decision=_decision(made))


def read_words(said: Mapping[str, bytes]) -> tuple[dict[str, Word], dict[str, str]]:
    """Return each peer's word, and the reason for which the others are malformed, by peer id."""
    found, refused = {}, {}
    for peer_id, value in said.items():
        try:
            found[peer_id] = read_word(value)
        except RemoteProtocolError as error:
            refused[peer_id] = str(error)
    return found, refused


def _standing_fields(standing: Standing) -> tuple[Any, ...]:
    """Return a standing as plain values, of :data:`_STANDING_TYPES`."""
    return (
        standing.settings,
        standing.member,
        standing.generation,
        standing.steps,
        float(standing.score),
        standing.hyperparameters,
        standing.lineage,
        standing.parent,
        standing.root,
        standing.size,
    )


def _standing_of(fields: Sequence[Any]) -> Standing:
    """Return the standing of plain values of :data:`_STANDING_TYPES`; raise RemoteProtocolError for others."""
    settings, member, generation, steps, score, hyperparameters, lineage, parent, root, size = fields
    return Standing(
        settings=settings,
        member=member,
        generation=generation,
        steps=steps,
        score=score,
        hyperparameters=_pairs_of(hyperparameters),
        lineage=lineage,
        parent=parent,
        root=root,
        size=size,
    )


def _decision(fields: tuple[Any, ...]) -> Decision | None:
    if not fields:
        return None
    donor, hyperparameters, basis, failed = checked(fields, (bytes, tuple, tuple, tuple))
    return Decision(
        donor=donor,
        hyperparameters=_pairs_of(hyperparameters),
        basis=checked(basis, (bytes,) * len(basis)),
        failed=checked(failed, (bytes,) * len(failed)),
    )


def _pairs_of(fields: tuple[Any, ...]) -> Hyperparameters:
    """Return hyperparameters of plain values; raise RemoteProtocolError for others."""
    pairs = []
    for each in fields[: MAX_HYPERPARAMETERS + 1]:
        if type(each) is not tuple or len(each) != 2 or type(each[0]) is not str:
            raise RemoteProtocolError("a hyperparameter that is no name and value")
        pairs.append((each[0], each[1]))
    return tuple(pairs)


def _check_hyperparameters(pairs: Hyperparameters) -> None:
    """Raise RemoteProtocolError if the hyperparameters of a word are none, too many, or out of range or order."""
    if not 0 < len(pairs) <= MAX_HYPERPARAMETERS:
        raise RemoteProtocolError("a member's word with too many hyperparameters, or none")
    if not all(
        is_name(name) and type(value) in (float, int, str, bool) and is_value(value) for name, value in pairs
    ):
        raise RemoteProtocolError("a member's word with a hyperparameter out of range")
    names = [name for name, _ in pairs]
    if any(one >= other for one, other in pairwise(names)):
        raise RemoteProtocolError("a member's word whose hyperparameters are not in order")
