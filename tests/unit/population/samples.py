"""Words of imagined members."""

from __future__ import annotations

import hashlib
from typing import Any

from p2pavg.population import Choice, LogUniform, PopulationSettings, Standing, Uniform
from p2pavg.population.words import in_order

SETTINGS = PopulationSettings(
    space={"lr": LogUniform(1e-4, 1.0), "momentum": Uniform(0.0, 0.99), "kind": Choice(("a", "b", "c"))},
    interval=10,
)


def standing(number: int, score: float, **changes: Any) -> Standing:
    """Return the word of a member that is named after its number."""
    settings: PopulationSettings = changes.pop("settings", SETTINGS)
    given: dict[str, Any] = {
        "settings": settings.digest,
        "member": f"member {number}",
        "generation": 3,
        "steps": 30,
        "score": score,
        "hyperparameters": in_order(settings.first(f"member {number}")),
        "lineage": hashlib.sha256(b"%d" % number).digest(),
        "parent": bytes(32),
        "root": hashlib.sha256(b"root %d" % number).digest(),
        "size": 1000,
    }
    return Standing(**(given | changes))


def population(scores: list[float], **changes: Any) -> dict[str, Standing]:
    """Return the words of members with these scores, by peer id."""
    return {f"peer {number}": standing(number, score, **changes) for number, score in enumerate(scores)}
