"""The generations of a population: their reports, those of some weights, and those that one peer has seen.

No I/O, no clock, no random source.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.population.rules import is_of
from p2pavg.population.settings import MAX_HYPERPARAMETERS, PopulationSettings, Value, is_name, is_value
from p2pavg.population.words import MAX_GENERATION, MAX_STEPS, Standing, Word, is_member_name

MAX_ANCESTORS = 1024
"""Generations that a snapshot names; the oldest are left out."""

MAX_PEERS = 256
"""Publishers that are remembered; those that have not been seen for longest are forgotten."""
MAX_GENERATIONS = 1024
"""Generations that are remembered of each publisher; the oldest are forgotten."""
MAX_WORDS = 2**14
"""Words that are remembered in all, of 4 KB at most; the publisher with the most words loses its oldest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationReport:
    """The end of one generation of this member."""

    generation: int
    """Its number, from 1."""
    score: float
    """Of this member's weights, before it copied any."""
    reason: str
    """The cause of the decision, as a sentence."""
    copied_from: str | None
    """Peer id of the member whose weights and optimizer state this one has now; ``None`` if it kept its own."""
    hyperparameters: Mapping[str, Value]
    """Those of the next generation, which are in force already."""
    counted: tuple[str, ...]
    """Peer ids of the members whose words counted."""
    refused: Mapping[str, str]
    """The reason for which other words did not count, by peer id."""
    failures: Mapping[str, str]
    """The reason for which weights could not be copied, or were taken back, by peer id."""
    seconds: float
    """Time that ``step`` took: for waiting and copying."""


@dataclass(frozen=True, slots=True)
class Ancestor:
    """One generation in the history of some weights."""

    member: str
    """Name of the member that trained it."""
    generation: int
    """Of that member."""
    steps: int
    """Steps of training in the weights at its end."""
    score: float
    hyperparameters: Mapping[str, Value]


def pack_ancestors(ancestors: Sequence[Ancestor]) -> list[Any]:
    """Return generations as plain values."""
    return [
        [each.member, each.generation, each.steps, each.score, dict(each.hyperparameters)]
        for each in ancestors[-MAX_ANCESTORS:]
    ]


def read_ancestors(values: object) -> tuple[Ancestor, ...]:
    """Read the generations that another peer's snapshot names.

    Raises:
        RemoteProtocolError: they are malformed.
    """
    if type(values) is not list or len(values) > MAX_ANCESTORS:
        raise RemoteProtocolError("the state's generations are malformed, or too many")
    return tuple(map(_ancestor, values))


def _ancestor(value: object) -> Ancestor:
    if type(value) is not list or list(map(type, value)) != [str, int, int, float, dict]:
        raise RemoteProtocolError("the state has a generation that is malformed")
    member, generation, steps, score, hyperparameters = value
    if not (
        is_member_name(member)
        and 0 < generation <= MAX_GENERATION
        and 0 <= steps <= MAX_STEPS
        and math.isfinite(score)
        and 0 < len(hyperparameters) <= MAX_HYPERPARAMETERS
        and all(is_name(name) and is_value(each) for name, each in hyperparameters.items())
    ):
        raise RemoteProtocolError("the state has a generation with values out of range")
    return Ancestor(member, generation, steps, score, hyperparameters)


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of one member."""

    peer_id: str
    """The publisher of its word."""
    member: str
    generation: int
    steps: int
    """Steps of training in the weights at its end."""
    score: float
    hyperparameters: Mapping[str, Value]
    copied_from: str | None
    """Peer id of the publisher from which it has copied at its end; ``None`` if it kept its own weights, or if its
    decision is not known."""


class History:
    """The words of a population that one peer has seen, its own included.

    A peer that joins late knows the generations before only of the weights that it has copied
    (:attr:`Population.lineage`).
    """

    def __init__(self, settings: PopulationSettings) -> None:
        self._settings = settings
        self._words: OrderedDict[str, OrderedDict[int, Word]] = OrderedDict()

    def note(self, peer_id: str, word: Word) -> None:
        """Remember a word. A later one of the same generation, which has the decision, replaces it.

        Words of other settings, or with hyperparameters out of their ranges, are left out.
        """
        if not is_of(word.standing, self._settings):
            return
        own = self._words.setdefault(peer_id, OrderedDict())
        self._words.move_to_end(peer_id)
        while len(self._words) > MAX_PEERS:
            self._words.popitem(last=False)
        generation = word.standing.generation
        if generation not in own or word.decision is not None:
            own[generation] = word
        while len(own) > MAX_GENERATIONS:
            own.popitem(last=False)
        if sum(map(len, self._words.values())) > MAX_WORDS:
            max(self._words.values(), key=len).popitem(last=False)

    def known(self) -> dict[bytes, tuple[str, Standing]]:
        """Return the words by digest, with their publishers: see :func:`~p2pavg.population.check_decision`."""
        return {word.standing.digest: (peer, word.standing) for peer, word in self.words()}

    def words(self) -> Iterable[tuple[str, Word]]:
        """Return all words with their publishers, by publisher and in the order of their generations."""
        return [(peer, own[number]) for peer, own in sorted(self._words.items()) for number in sorted(own)]

    @property
    def generations(self) -> tuple[Generation, ...]:
        """All generations, by publisher and in their order."""
        known = self.known()
        found = []
        for peer_id, word in self.words():
            said, donor = word.standing, b"" if word.decision is None else word.decision.donor
            # Empty for one that kept its own weights; and the donor's word may not be known.
            copied_from = known[donor][0] if donor in known else None
            found.append(
                Generation(
                    peer_id,
                    said.member,
                    said.generation,
                    said.steps,
                    said.score,
                    dict(said.hyperparameters),
                    copied_from,
                )
            )
        return tuple(found)

    @property
    def best(self) -> Generation | None:
        """The generation with the best score; ``None`` before the first one."""
        sign = 1.0 if self._settings.mode == "min" else -1.0
        return min(self.generations, key=lambda each: (sign * each.score, each.peer_id), default=None)
