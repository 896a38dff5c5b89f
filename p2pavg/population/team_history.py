"""The generations of the teams of a population, as one peer has seen them, and their picture. No I/O, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise

from p2pavg.population.history import Generation, check_shown
from p2pavg.population.picture import Curve, Jump, draw
from p2pavg.population.settings import PopulationSettings
from p2pavg.population.space import LogUniform
from p2pavg.population.team_rules import Claim, claims
from p2pavg.population.team_words import TeamWord
from p2pavg.population.words import MAX_SCORE

MAX_TEAMS = 256
"""Names that are remembered; those that have not been seen for longest are forgotten."""
MAX_GENERATIONS = 512
"""Generations that are remembered of each team; the oldest are forgotten."""
MAX_WORDS = 2**14
"""Words that are remembered in all, of 4 KB at most; the team with the most words loses its oldest generation."""


class TeamHistory:
    """The words of a population of teams that one peer has seen, its own included."""

    def __init__(self, settings: PopulationSettings) -> None:
        self._settings = settings
        self._teams: OrderedDict[str, OrderedDict[int, dict[str, TeamWord]]] = OrderedDict()
        self._count = 0

    def note(self, peer_id: str, word: TeamWord) -> None:
        """Remember a word. A later one of the same peer and generation, which has the ballot, replaces it."""
        if word.standing.settings != self._settings.digest:
            return
        name, number = word.standing.member, word.standing.generation
        own = self._teams.setdefault(name, OrderedDict())
        self._teams.move_to_end(name)
        said = own.setdefault(number, {})
        if peer_id not in said or word.ballot is not None:
            self._count += peer_id not in said
            said[peer_id] = word
        while len(self._teams) > MAX_TEAMS:
            _, lost = self._teams.popitem(last=False)
            self._count -= sum(map(len, lost.values()))
        while len(own) > MAX_GENERATIONS:
            self._count -= len(own.popitem(last=False)[1])
        while self._count > MAX_WORDS:
            longest = max(self._teams.values(), key=lambda each: sum(map(len, each.values())))
            self._count -= len(longest.popitem(last=False)[1])

    def known(self) -> dict[bytes, tuple[str, TeamWord]]:
        """Return the words by digest, with their publishers: see :func:`~p2pavg.population.check_ballot`."""
        return {word.digest(peer): (peer, word) for peer, word in self.words()}

    def words(self) -> list[tuple[str, TeamWord]]:
        """Return all words with their publishers, by team, generation and publisher."""
        return [
            (peer, own[number][peer])
            for _, own in sorted(self._teams.items())
            for number in sorted(own)
            for peer in sorted(own[number])
        ]

    def _claims(self) -> dict[str, list[Claim]]:
        """Return what each team has said at the end of each of its generations."""
        found: dict[str, list[Claim]] = {}
        for name, own in sorted(self._teams.items()):
            for number in sorted(own):
                team = claims(own[number], self._settings).teams.get(name)
                if team is not None:
                    found.setdefault(name, []).append(team)
        return found

    @property
    def generations(self) -> tuple[Generation, ...]:
        """All generations of the teams, by name and in their order. ``peer_id`` is the name of the team.

        A copy is known when the team that copied has ended its next generation: all of its peers sign the weights
        with which that began.
        """
        every = self._claims()
        origins = _origins(every)
        return tuple(
            Generation(
                name,
                name,
                team.standing.generation,
                team.standing.steps,
                team.standing.score,
                dict(team.standing.hyperparameters),
                _origin(name, own[place + 1], origins)[0] if place + 1 < len(own) else None,
            )
            for name, own in every.items()
            for place, team in enumerate(own)
        )

    @property
    def best(self) -> Generation | None:
        """The generation with the best score; ``None`` before the first one."""
        sign = 1.0 if self._settings.mode == "min" else -1.0
        return min(self.generations, key=lambda each: (sign * each.score, each.peer_id), default=None)

    def svg(self, name: str) -> str:
        """Return a picture with one line for each team, and an arrow for each copy, as the text of an SVG file.

        Args:
            name: of a hyperparameter, or ``"score"``.

        Raises:
            ValueError: there is no such hyperparameter, or its values are texts.
        """
        check_shown(name, self._settings)
        best = getattr(self.best, "peer_id", "")
        every = self._claims()
        origins, curves, jumps = _origins(every), {}, []
        for team, own in every.items():
            curve = Curve(team, [], team == best)
            for claim in own:
                its = claim.standing
                value = its.score if name == "score" else dict(its.hyperparameters)[name]
                if name != "score" or abs(its.score) < MAX_SCORE:
                    curve.points.append((its.generation, float(value)))
            if curve.points:
                curves[team] = curve
            for before, after in pairwise(own):
                donor, generation = _origin(team, after, origins)
                if donor is not None:
                    jumps.append(Jump(donor, generation, team, before.standing.generation))
        return draw(name, curves, jumps, is_log=isinstance(self._settings.space.get(name), LogUniform))


def _origins(every: Mapping[str, list[Claim]]) -> dict[bytes, tuple[str, int]]:
    """Return the team and the generation of each lineage."""
    return {
        each.standing.lineage: (name, each.standing.generation) for name, own in every.items() for each in own
    }


def _origin(team: str, after: Claim, origins: Mapping[bytes, tuple[str, int]]) -> tuple[str | None, int]:
    """Return the team and generation whose weights a generation began with; ``None`` if they were its own."""
    name, generation = origins.get(after.standing.parent, (team, 0))
    return (None, 0) if name == team else (name, generation)
