"""The generations of a population, as one peer has seen them, and their picture. No I/O, no clock, no random source."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from p2pavg.population.picture import Curve, Jump, draw
from p2pavg.population.rules import is_of
from p2pavg.population.settings import PopulationSettings
from p2pavg.population.space import Choice, LogUniform, Value
from p2pavg.population.words import MAX_SCORE, Standing, Word

MAX_PEERS = 256
"""Publishers that are remembered; those that have not been seen for longest are forgotten."""
MAX_GENERATIONS = 1024
"""Generations that are remembered of each publisher; the oldest are forgotten."""
MAX_WORDS = 2**14
"""Words that are remembered in all, of 4 KB at most; the publisher with the most words loses its oldest one."""


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
        return tuple(_generation(peer, word, known) for peer, word in self.words())

    @property
    def best(self) -> Generation | None:
        """The generation with the best score; ``None`` before the first one."""
        sign = 1.0 if self._settings.mode == "min" else -1.0
        return min(self.generations, key=lambda each: (sign * each.score, each.peer_id), default=None)

    def svg(self, name: str) -> str:
        """Return a picture of one hyperparameter in all members, as the text of an SVG file.

        Each line is a member: its hyperparameter over the generations. An arrow leads from the member that was copied
        to the one that has copied it. The best member's line is thick. The same words give the same bytes.

        Args:
            name: of a hyperparameter, or ``"score"``.

        Raises:
            ValueError: there is no such hyperparameter, or its values are texts.
        """
        check_shown(name, self._settings)
        range_ = self._settings.space.get(name)
        curves: dict[str, Curve] = {}
        best = self.best
        for each in self.generations:
            value = each.score if name == "score" else each.hyperparameters[name]
            if name == "score" and abs(each.score) >= MAX_SCORE:
                continue  # its training had diverged
            curve = curves.setdefault(
                each.peer_id, Curve(each.member, [], each.peer_id == getattr(best, "peer_id", ""))
            )
            curve.points.append((each.generation, float(value)))
        known, jumps = self.known(), []
        for peer, word in self.words():
            made = word.decision
            if made is not None and made.donor in known:
                donor, its = known[made.donor]
                jumps.append(Jump(donor, its.generation, peer, word.standing.generation))
        return draw(name, curves, jumps, is_log=isinstance(range_, LogUniform))


def check_shown(name: str, settings: PopulationSettings) -> None:
    """Raise ValueError if a picture cannot show something of this name."""
    range_ = settings.space.get(name)
    if range_ is None and name != "score":
        raise ValueError(f"name must be score or one of {', '.join(settings.space)}, got {name!r}")
    if isinstance(range_, Choice) and any(isinstance(value, str) for value in range_.values):
        raise ValueError(f"{name} has texts as values, which have no place on an axis")


def _generation(peer_id: str, word: Word, known: Mapping[bytes, tuple[str, Standing]]) -> Generation:
    standing, made = word.standing, word.decision
    donor = known.get(made.donor) if made is not None and made.donor else None
    return Generation(
        peer_id,
        standing.member,
        standing.generation,
        standing.steps,
        standing.score,
        dict(standing.hyperparameters),
        None if donor is None else donor[0],
    )
