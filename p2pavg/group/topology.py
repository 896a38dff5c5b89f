"""Topologies: the members of a group that average, and the part of the vector that each of them averages.

The topologies are data here, with the text that all peers of a run share. No I/O, no clock, no random source.
:mod:`p2pavg.group.star` elects the reducer of a star, and :mod:`p2pavg.group.shares` cuts the shares of a butterfly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from p2pavg.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Butterfly:
    """Each member reduces a share of the vector, by its bandwidth and at most twice an equal share.

    No member sees more than its share of another one's contribution, and none has to carry the traffic of all.
    """

    @property
    def text(self) -> str:
        """The topology as text."""
        return "butterfly"


@dataclass(frozen=True, slots=True)
class Star:
    """One member reduces the whole vector: a parameter server that is elected, and needs no machine of its own.

    The members elect the one whose announced bandwidth lets the round end first, among those that are left; ties go
    to the first peer id. So a member that is lost takes no round with it.

    The reducer reads every contribution as a whole, and makes every average. In an open run any peer is elected that
    announces the largest bandwidth. The document on topologies says what that may cost.
    """

    @property
    def text(self) -> str:
        """The topology as text."""
        return "star"


Topology: TypeAlias = Butterfly | Star

BUTTERFLY = Butterfly()
_BY_TEXT: dict[str, Topology] = {each.text: each for each in (BUTTERFLY, Star())}


def resolve_topology(given: object) -> Topology:
    """Return the topology that a text names; return a topology unchanged.

    Texts are ``"butterfly"`` and ``"star"``. ``resolve_topology(topology.text) == topology`` for every topology.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(given, Butterfly | Star):
        return given
    found = _BY_TEXT.get(given) if isinstance(given, str) else None
    if found is None:
        raise ConfigError(f"a topology is {' or '.join(map(repr, _BY_TEXT))}, got {given!r}")
    return found
