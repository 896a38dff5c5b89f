"""Topologies: the members of a group that average, and the part of the vector that each of them averages.

The topologies are data here, with the text that all peers of a run share. No I/O, no clock, no random source.
:mod:`p2pavg.group.star` elects the reducer of a star, :mod:`p2pavg.group.shares` cuts the shares of a butterfly, and
:mod:`p2pavg.group.sites` those of sites.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from p2pavg.errors import ConfigError
from p2pavg.group.limits import MAX_NAME_CHARS
from p2pavg.group.names import is_name


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


@dataclass(frozen=True, slots=True)
class Hierarchical:
    """The members of a site, such as a laboratory, reduce among themselves first; sites exchange sums only.

    A link that the members of a site share to the rest of the world carries each value once in each direction. In a
    butterfly it carries each value once for each member of the site. The topology needs ``audit="off"``, and neither
    ``robust`` nor ``max_norm``: see the document on topologies.

    Args:
        site: name of this peer's site: at most 32 bytes of printable text. Peers with the same name are one site.
            Empty: this peer is a site of its own. The name is no part of the run's key, so that all sites meet.

    Raises:
        ConfigError: ``site`` is no such name.
    """

    site: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.site, str) or (self.site and not is_name(self.site)):
            raise ConfigError(
                f"site must be a name of at most {MAX_NAME_CHARS} bytes of printable text, or empty, got {self.site!r}"
            )

    @property
    def text(self) -> str:
        """The topology as text, without the site: all peers of a run share it."""
        return "hierarchical"


Topology: TypeAlias = Butterfly | Star | Hierarchical

BUTTERFLY = Butterfly()
_BY_TEXT: dict[str, Topology] = {each.text: each for each in (BUTTERFLY, Star(), Hierarchical())}


def site_of(topology: Topology) -> str:
    """Return the name of this peer's site; empty if it has none."""
    return topology.site if isinstance(topology, Hierarchical) else ""


def resolve_topology(given: object) -> Topology:
    """Return the topology that a text names; return a topology unchanged.

    Texts are ``"butterfly"``, ``"star"`` and ``"hierarchical"``, which names no site. ``resolve_topology(topology.text)
    == topology`` for every topology.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(given, Butterfly | Star | Hierarchical):
        return given
    found = _BY_TEXT.get(given) if isinstance(given, str) else None
    if found is None:
        *others, last = map(repr, _BY_TEXT)
        raise ConfigError(f"a topology is {', '.join(others)} or {last}, got {given!r}")
    return found
