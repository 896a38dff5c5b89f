"""The record in which a peer describes its recipe and its parameters. No I/O, no clock.

A record may come from any stranger: lengths, ranges and characters are checked before anything is compared or shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from p2pavg.allreduce.vector.accumulation import MAX_TENSORS
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import checked, pack, unpack
from p2pavg.base.names import is_name
from p2pavg.optim.base.digest import DIGEST_BYTES, MAX_CHUNKS, SHORT_BYTES
from p2pavg.optim.base.recipe import MAX_FIELD_CHARS, MAX_FIELDS, Rate, first_difference
from p2pavg.optim.coordination.progress import MAX_EPOCH
from p2pavg.runs.records.run_entry import MAX_ELEMENTS

TOPIC = "recipes"
MAX_RATES = 24  # published changes of the hyperparameters: more updates than it takes to notice a fork
MAX_WORD_BYTES = 3500  # of a record's 4096: the rest is for its signature and key
MAX_TOLD = 3  # reported differences of one kind of peers, and reported kinds of peers

_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRecord:
    """One peer's record of its recipe and parameters.

    Raises:
        RemoteProtocolError: something is out of range.
    """

    recipe: bytes
    """32 bytes: :attr:`p2pavg.optim.base.recipe.Recipe.digest`."""
    origin: bytes
    """32 bytes: digest of the parameters with which its run began."""
    tensors: int
    elements: int
    """Number of elements of the parameters that it trains."""
    fields: tuple[tuple[str, str], ...]
    """Its recipe as readable text."""
    rates: tuple[Rate, ...] = ()
    """Hyperparameters of its updates, one entry for each change, the newest last."""
    until: int = 0
    """Last update that ``rates`` covers."""
    epoch: int = 0
    """Update after which it took the digests of its parameters; 0 before the first time."""
    state: bytes = b""
    """State of its lineage at that update, 32 bytes; empty before the first time."""
    digests: bytes = b""
    """Digests of its parameters, 8 bytes per chunk."""

    def __post_init__(self) -> None:
        if len(self.recipe) != DIGEST_BYTES or len(self.origin) != DIGEST_BYTES:
            raise RemoteProtocolError("a recipe with a digest of another length")
        if not 0 < self.tensors <= MAX_TENSORS or not 0 <= self.elements <= MAX_ELEMENTS:
            raise RemoteProtocolError("a recipe with numbers of parameters out of range")
        if len(self.fields) > MAX_FIELDS or not all(_is_field(*field) for field in self.fields):
            raise RemoteProtocolError("a recipe with a field that is too long, or not printable")
        if len(self.rates) > MAX_RATES or not all(_is_rate(rate) for rate in self.rates):
            raise RemoteProtocolError("a recipe with hyperparameters out of range")
        if not (0 <= self.until <= MAX_EPOCH and 0 <= self.epoch <= MAX_EPOCH):
            raise RemoteProtocolError("a recipe with an update out of range")
        if len(self.state) != (DIGEST_BYTES if self.epoch else 0):
            raise RemoteProtocolError("a recipe with a state of another length")
        chunks, rest = divmod(len(self.digests), SHORT_BYTES)
        if rest or chunks > MAX_CHUNKS or bool(chunks) != bool(self.epoch):
            raise RemoteProtocolError("a recipe with digests of another length")


def encode_word(word: RecipeRecord) -> bytes:
    """Return a record's value; leave out the last fields if it would be too long."""
    fields = word.fields
    while len(packed := _packed(word, fields)) > MAX_WORD_BYTES:
        fields = fields[:-1]
    return packed


def _packed(word: RecipeRecord, fields: tuple[tuple[str, str], ...]) -> bytes:
    rates = tuple((rate.update, rate.digest, rate.text) for rate in word.rates)
    counts = (word.tensors, word.elements, word.until, word.epoch)
    return pack(_VERSION, word.recipe, word.origin, *counts, fields, rates, word.state, word.digests)


def read_word(value: bytes) -> RecipeRecord:
    """Read a word; raise RemoteProtocolError for anything that :func:`encode_word` does not make."""
    version, recipe, origin, tensors, elements, until, epoch, fields, rates, state, digests = unpack(
        value, int, bytes, bytes, int, int, int, int, tuple, tuple, bytes, bytes
    )
    if version != _VERSION:
        raise RemoteProtocolError(f"a recipe of version {version}")
    return RecipeRecord(
        recipe=recipe,
        origin=origin,
        tensors=tensors,
        elements=elements,
        fields=tuple(_pair(field) for field in fields[: MAX_FIELDS + 1]),
        rates=tuple(_rate(rate) for rate in rates[: MAX_RATES + 1]),
        until=until,
        epoch=epoch,
        state=state,
        digests=digests,
    )


def read_words(said: Mapping[str, bytes]) -> dict[str, RecipeRecord]:
    """Return each peer's word; leave out malformed ones."""
    found = {}
    for peer_id, value in said.items():
        try:
            found[peer_id] = read_word(value)
        except RemoteProtocolError:
            continue
    return found


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


def _is_field(name: str, text: str) -> bool:
    return is_name(name) and _is_text(text)


def _is_text(text: str) -> bool:
    return len(text) <= MAX_FIELD_CHARS and text.isprintable()


def _is_rate(rate: Rate) -> bool:
    in_range = 0 <= rate.update <= MAX_EPOCH and len(rate.digest) == SHORT_BYTES
    return in_range and _is_text(rate.text)


def _pair(field: object) -> tuple[str, str]:
    name, text = checked(field if isinstance(field, tuple) else (), (str, str))
    return name, text


def _rate(field: object) -> Rate:
    return Rate(*checked(field if isinstance(field, tuple) else (), (int, bytes, str)))
