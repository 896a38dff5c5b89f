"""The result of one generation, as a training loop gets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from p2pavg.population.space import Value


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
