"""The generations of a team so far: the same on all of its peers at each update. No I/O, no clock, no random source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from p2pavg.base.errors import RemoteProtocolError, StateError
from p2pavg.population.lineage import MAX_ANCESTORS, Ancestor, pack_ancestors, read_ancestors
from p2pavg.population.settings import PopulationSettings
from p2pavg.population.space import Value
from p2pavg.population.words import (
    DIGEST_BYTES,
    MAX_GENERATION,
    MAX_STEPS,
    Standing,
    in_order,
    lineage_after,
)

ORIGIN = bytes(DIGEST_BYTES)
"""Lineage of weights that have not been trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamLife:
    """The generations of one team, up to one update."""

    team: str
    hyperparameters: Mapping[str, Value]
    """Those in force."""
    generation: int = 0
    """Generations that are over."""
    steps: int = 0
    """Updates in the weights, up to the last generation's end; also those of teams from which they were copied."""
    since: int = 0
    """Updates since then."""
    lineage: bytes = ORIGIN
    ancestors: tuple[Ancestor, ...] = ()
    """The generations through which the weights have gone, as far as the team has agreed on their scores."""

    def trained(self) -> TeamLife:
        """Return the life after one more update."""
        return replace(self, since=self.since + 1)

    def is_over(self, interval: int) -> bool:
        """Return whether the present generation has all of its updates: the next update brings the decision."""
        return self.since >= interval

    def standing(self, settings: PopulationSettings, *, score: float, root: bytes, size: int) -> Standing:
        """Return what a peer says at the end of the present generation.

        Args:
            score: of the peer.
            root, size: of the snapshot of the weights.
        """
        pairs = in_order(self.hyperparameters)
        return Standing(
            settings=settings.digest,
            member=self.team,
            generation=self.generation + 1,
            steps=self.steps + settings.interval,
            score=score,
            hyperparameters=pairs,
            lineage=lineage_after(self.lineage, self.team, self.generation + 1, pairs),
            parent=self.lineage,
            root=root,
            size=size,
        )

    def kept(self, interval: int, score: float | None) -> TeamLife:
        """Return the life after the update that brought the decision to keep the weights, or no decision.

        Args:
            score: the team's, on which it has agreed; ``None`` if it has not. Then the generation is left out of
                ``ancestors``.
        """
        generation, steps = self.generation + 1, self.steps + interval
        own = () if score is None else (self._ancestor(generation, steps, score),)
        return replace(
            self,
            generation=generation,
            steps=steps,
            since=self.since - interval,
            lineage=lineage_after(self.lineage, self.team, generation, in_order(self.hyperparameters)),
            ancestors=(*self.ancestors, *own)[-MAX_ANCESTORS:],
        )

    def _ancestor(self, generation: int, steps: int, score: float) -> Ancestor:
        return Ancestor(self.team, generation, steps, score, dict(self.hyperparameters))

    def copied(
        self, donor: Standing, ancestors: tuple[Ancestor, ...], hyperparameters: Mapping[str, Value]
    ) -> TeamLife:
        """Return the life after the weights of another team have replaced those of this one.

        Args:
            donor: that team's, with the team's score.
            ancestors: the generations before it, from its snapshot.
            hyperparameters: those with which this team goes on.
        """
        last = Ancestor(donor.member, donor.generation, donor.steps, donor.score, dict(donor.hyperparameters))
        return replace(
            self,
            hyperparameters=dict(hyperparameters),
            generation=self.generation + 1,
            steps=donor.steps,
            since=0,
            lineage=donor.lineage,
            ancestors=(*ancestors, last)[-MAX_ANCESTORS:],
        )


def pack_life(life: TeamLife) -> dict[str, Any]:
    """Return a life as plain values, for a state."""
    return {
        "team": life.team,
        "hyperparameters": dict(sorted(life.hyperparameters.items())),
        "generation": life.generation,
        "steps": life.steps,
        "since": life.since,
        "lineage": life.lineage,
        "ancestors": pack_ancestors(life.ancestors),
    }


def read_life(values: object, team: str, settings: PopulationSettings) -> TeamLife:
    """Read the life of a team from a state that another of its peers has sent.

    Raises:
        StateError: it is malformed, or that of another team or population.
    """
    names = ("team", "hyperparameters", "generation", "steps", "since", "lineage", "ancestors")
    if type(values) is not dict or set(values) != set(names):
        raise StateError("the state's generations are malformed")
    name, found, generation, steps, since, lineage, ancestors = (values[each] for each in names)
    if name != team:
        raise StateError("the state is that of another team")
    if type(found) is not dict or not all(type(each) is str for each in found):
        raise StateError("the state's hyperparameters are malformed")
    if found.keys() != settings.space.keys() or not all(
        settings.space[each].holds(value) for each, value in found.items()
    ):
        raise StateError(
            "the state's hyperparameters are not those of this population, or not in their ranges"
        )
    limits = ((generation, MAX_GENERATION), (steps, MAX_STEPS), (since, settings.interval))
    if not all(type(number) is int and 0 <= number <= most for number, most in limits):
        raise StateError("the state's generations have numbers out of range")
    if type(lineage) is not bytes or len(lineage) != DIGEST_BYTES:
        raise StateError("the state's lineage is malformed")
    try:
        read = read_ancestors(ancestors)
    except RemoteProtocolError as error:
        raise StateError(str(error)) from None
    return TeamLife(
        team=team,
        hyperparameters=dict(found),
        generation=generation,
        steps=steps,
        since=since,
        lineage=lineage,
        ancestors=read,
    )
