"""The record that a member of a population publishes on the board. No I/O, no clock.

A record may come from any stranger: lengths, ranges and characters are checked before anything is compared or shown.
The board's records are signed by their publishers, and in a run with an authority only those of members are seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated

from msgspec import Meta

from p2pavg.base.messages import Hash, Message, pack
from p2pavg.population.settings import MAX_HYPERPARAMETERS, MAX_MAGNITUDE, Value, is_name, is_value

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

_STANDING = b"p2pavg/population/standing/2\0"
_LINEAGE = "p2pavg/population/lineage/1"

Hyperparameters = tuple[tuple[str, Value], ...]


_Digest = Annotated[bytes, Meta(min_length=SHORT_BYTES, max_length=SHORT_BYTES)]
_Value = (
    Annotated[float, Meta(ge=-MAX_MAGNITUDE, le=MAX_MAGNITUDE)]
    | Annotated[int, Meta(ge=-int(MAX_MAGNITUDE), le=int(MAX_MAGNITUDE))]
    | str
    | bool
)
_Hyperparameters = Annotated[
    tuple[tuple[str, _Value], ...], Meta(min_length=1, max_length=MAX_HYPERPARAMETERS)
]


class Standing(Message, frozen=True, kw_only=True):
    """A member at the end of one of its generations."""

    settings: Hash
    """:attr:`PopulationSettings.digest`."""
    member: Annotated[str, Meta(min_length=1, max_length=MAX_MEMBER_CHARS)]
    """Name of the population member. Several peers may form one."""
    generation: Annotated[int, Meta(ge=1, le=MAX_GENERATION)]
    """Generations that this member has finished, from 1."""
    steps: Annotated[int, Meta(ge=0, le=MAX_STEPS)]
    """Steps of training in these weights, also those of the members from which they were copied."""
    score: Annotated[float, Meta(ge=-MAX_SCORE, le=MAX_SCORE)]
    hyperparameters: _Hyperparameters
    """Those of this generation, in the order of their names."""
    lineage: Hash
    """Names these weights: it depends on ``parent``, publisher, generation and hyperparameters."""
    parent: Hash
    """Lineage of the weights with which this generation began; zeros at the member's start."""
    root: Hash
    """Root of the snapshot of these weights: see :mod:`p2pavg.state`."""
    size: Annotated[int, Meta(ge=1, le=MAX_SNAPSHOT_BYTES)]
    """Bytes of the snapshot."""

    def __post_init__(self) -> None:
        if not is_member_name(self.member):
            raise ValueError("a member whose name is not printable")
        _check_hyperparameters(self.hyperparameters)

    @property
    def digest(self) -> bytes:
        """16 bytes that name this word in decisions."""
        return hashlib.sha256(_STANDING + self.encode()).digest()[:SHORT_BYTES]


class Decision(Message, frozen=True, kw_only=True):
    """The decision of a member at the end of a generation, and the words on which it rests."""

    donor: Annotated[bytes, Meta(max_length=SHORT_BYTES)] = b""
    """Digest of the word of the member whose weights it copied; empty if it kept its own."""
    hyperparameters: _Hyperparameters
    """Those of its next generation."""
    basis: Annotated[tuple[_Digest, ...], Meta(max_length=MAX_BASIS)] = ()
    """Digests of the other members' words that counted, in ascending order."""
    failed: Annotated[tuple[_Digest, ...], Meta(max_length=MAX_BASIS)] = ()
    """Those of ``basis`` whose weights could not be copied, in ascending order."""

    def __post_init__(self) -> None:
        if any(one >= other for one, other in pairwise(self.basis)):
            raise ValueError("a decision whose words are not in order")
        if tuple(sorted(set(self.failed))) != self.failed or not set(self.failed) <= set(self.basis):
            raise ValueError("a decision that failed at words on which it does not rest")
        if self.donor and (self.donor not in self.basis or self.donor in self.failed):
            raise ValueError("a decision for a word on which it does not rest")
        _check_hyperparameters(self.hyperparameters)


class Word(Message, frozen=True, kw_only=True, tag=2):
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


def is_member_name(name: str) -> bool:
    """Return whether a member may have this name."""
    return 0 < len(name) <= MAX_MEMBER_CHARS and name.isascii() and name.isprintable()


def _check_hyperparameters(pairs: Hyperparameters) -> None:
    """Raise ValueError if the hyperparameters of a word are out of range or order."""
    if not all(is_name(name) and is_value(value) for name, value in pairs):
        raise ValueError("a member's word with a hyperparameter out of range")
    if any(one >= other for (one, _), (other, _) in pairwise(pairs)):
        raise ValueError("a member's word whose hyperparameters are not in order")
