"""The record in which a peer describes its recipe and its parameters. No I/O, no clock.

A record may come from any stranger: lengths, ranges and characters are checked before anything is compared or shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pavg.allreduce.vector.accumulation import MAX_TENSORS
from p2pavg.base.messages import Hash, Message
from p2pavg.base.numbers import is_name
from p2pavg.optim.base.recipe import MAX_FIELD_CHARS, MAX_FIELDS, Rate, first_difference
from p2pavg.optim.base.state import DIGEST_BYTES, MAX_CHUNKS, SHORT_BYTES
from p2pavg.optim.coordination.progress import MAX_EPOCH
from p2pavg.runs.records.run_entry import MAX_ELEMENTS

TOPIC = "recipes"
MAX_RATES = 24  # published changes of the hyperparameters: more updates than it takes to notice a fork
MAX_WORD_BYTES = 3500  # of a record's 4096: the rest is for its signature and key
MAX_TOLD = 3  # reported differences of one kind of peers, and reported kinds of peers


class RecipeRecord(Message, frozen=True, kw_only=True, tag=2):
    """One peer's record of its recipe and parameters."""

    recipe: Hash
    """:attr:`p2pavg.optim.base.recipe.Recipe.digest`."""
    origin: Hash
    """Digest of the parameters with which its run began."""
    tensors: Annotated[int, Meta(ge=1, le=MAX_TENSORS)]
    elements: Annotated[int, Meta(ge=0, le=MAX_ELEMENTS)]
    """Number of elements of the parameters that it trains."""
    fields: Annotated[tuple[tuple[str, str], ...], Meta(max_length=MAX_FIELDS)]
    """Its recipe as readable text."""
    rates: Annotated[tuple[Rate, ...], Meta(max_length=MAX_RATES)] = ()
    """Hyperparameters of its updates, one entry for each change, the newest last."""
    until: Annotated[int, Meta(ge=0, le=MAX_EPOCH)] = 0
    """Last update that ``rates`` covers."""
    epoch: Annotated[int, Meta(ge=0, le=MAX_EPOCH)] = 0
    """Update after which it took the digests of its parameters; 0 before the first time."""
    state: Annotated[bytes, Meta(max_length=DIGEST_BYTES)] = b""
    """State of its lineage at that update, 32 bytes; empty before the first time."""
    digests: Annotated[bytes, Meta(max_length=MAX_CHUNKS * SHORT_BYTES)] = b""
    """Digests of its parameters, 8 bytes per chunk."""

    def __post_init__(self) -> None:
        texts = [text for _, text in self.fields]
        is_shown = all(len(text) <= MAX_FIELD_CHARS and text.isprintable() for text in texts)
        if not is_shown or not all(is_name(name) for name, _ in self.fields):
            raise ValueError("a recipe with a field that is too long, or not printable")
        if len(self.state) != (DIGEST_BYTES if self.epoch else 0):
            raise ValueError("a recipe with a state of another length")
        if len(self.digests) % SHORT_BYTES or bool(self.digests) != bool(self.epoch):
            raise ValueError("a recipe with digests of another length")


def encode_word(word: RecipeRecord) -> bytes:
    """Return a record's value; leave out the last fields if it would be too long, and then the oldest rates."""
    while len(packed := word.encode()) > MAX_WORD_BYTES and (word.fields or word.rates):
        fields, rates = word.fields[:-1], word.rates if word.fields else word.rates[1:]
        word = msgspec.structs.replace(word, fields=fields, rates=rates)
    return packed


def differences(mine: RecipeRecord, others: Iterable[RecipeRecord]) -> tuple[str, ...]:
    """Return one sentence for each difference in training between other peers and this one, most common first."""
    kinds = Counter(what for word in others for what in _differences(mine, word))
    return tuple(_sentence(count, *what) for what, count in kinds.most_common(MAX_TOLD))


def keeps_apart(mine: RecipeRecord, others: Iterable[RecipeRecord], rules: Collection[str]) -> str:
    """Return the difference that keeps this peer from following any of these peers; empty if it could follow one.

    A rate or a first parameter comes with the run's state. An architecture, or a rule of training, does not.

    Args:
        rules: names of the settings that never change during an optimizer's life.
    """
    found: Counter[tuple[str, str, str]] = Counter()
    for word in others:
        kinds = _differences(mine, word)
        if (word.tensors, word.elements) == (mine.tensors, mine.elements):
            kinds = [_field_difference(*field) for field in _other_fields(mine, word) if field[0] in rules]
        if not kinds:
            return ""
        found.update(kinds[:MAX_TOLD])
    return "; ".join(_sentence(count, *what) for what, count in found.most_common(MAX_TOLD))


def _differences(mine: RecipeRecord, other: RecipeRecord) -> list[tuple[str, str, str]]:
    """Return the parts of sentences on one other peer: verb in the singular, verb in the plural, rest."""
    if (other.tensors, other.elements) != (mine.tensors, mine.elements):
        one = f"{other.tensors} tensors of {other.elements} elements"
        return [
            ("trains", "train", f"another architecture: {one}, this one {mine.tensors} of {mine.elements}")
        ]
    found = [_field_difference(*difference) for difference in _other_fields(mine, other)][:MAX_TOLD]
    if other.recipe != mine.recipe and not found:
        found.append(("trains", "train", "with other settings, which are too many or too long to tell"))
    if other.origin != mine.origin:
        found.append(("began", "began", "with other parameters than this one (another seed?)"))
    rates = first_difference(mine.rates, other.rates, min(mine.until, other.until))
    if rates is not None and other.origin == mine.origin and other.recipe == mine.recipe:
        own, its = rates
        told = (
            f"{its.text or 'no lr'}, this one with {own.text or 'no lr'}"
            if its.text != own.text
            else "other hyperparameters than this one"
        )
        found.append(("took", "took", f"update {own.update} with {told}"))
    return found


def _other_fields(mine: RecipeRecord, other: RecipeRecord) -> list[tuple[str, str, str]]:
    own, its = dict(mine.fields), dict(other.fields)
    names = [*own, *(name for name in its if name not in own)]
    return [
        (name, its.get(name, "none"), own.get(name, "none"))
        for name in names
        if its.get(name, "none") != own.get(name, "none")
    ]


def _field_difference(name: str, its: str, own: str) -> tuple[str, str, str]:
    return ("trains", "train", f"with {name} {its}, this one with {own}")


def _sentence(count: int, one: str, several: str, rest: str) -> str:
    subject, verb = ("1 peer", one) if count == 1 else (f"{count} peers", several)
    return f"{subject} of this run {verb} {rest}"
