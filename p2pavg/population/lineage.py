"""The generations through which a member's weights have gone, as snapshots carry them. No I/O, no clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.population.space import MAX_HYPERPARAMETERS, Value, is_name, is_value
from p2pavg.population.words import MAX_GENERATION, MAX_MEMBER_CHARS, MAX_STEPS

MAX_ANCESTORS = 1024
"""Generations that a snapshot names; the oldest are left out."""


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
    return tuple(map(_read, values))


def _read(value: object) -> Ancestor:
    if type(value) is not list or list(map(type, value)) != [str, int, int, float, dict]:
        raise RemoteProtocolError("the state has a generation that is malformed")
    member, generation, steps, score, hyperparameters = value
    good = 0 < len(member) <= MAX_MEMBER_CHARS and member.isascii() and member.isprintable()
    good = good and 0 < generation <= MAX_GENERATION and 0 <= steps <= MAX_STEPS and math.isfinite(score)
    good = good and 0 < len(hyperparameters) <= MAX_HYPERPARAMETERS
    if not good or not all(is_name(name) and is_value(each) for name, each in hyperparameters.items()):
        raise RemoteProtocolError("the state has a generation with values out of range")
    return Ancestor(member, generation, steps, score, hyperparameters)
