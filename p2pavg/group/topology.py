"""Topologies: the members of a group that average, and the part of the vector that each of them averages.

The topologies are data here, with the text that all peers of a run share. No I/O, no clock, no random source.
:mod:`p2pavg.group.roster` elects the reducer of a star and cuts the shares of sites, :mod:`p2pavg.group.shares` those
of a butterfly. :mod:`p2pavg.group.places.gossip` says where a peer looks for the small groups of gossip.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from p2pavg.base.errors import ConfigError
from p2pavg.base.limits import MAX_GROUP_SIZE, MAX_NAME_CHARS, USUAL_GROUP_SIZE
from p2pavg.base.numbers import is_name

GRID = "grid"
_GOSSIP = "gossip"


@dataclass(frozen=True, slots=True)
class Butterfly:
    """Each member reduces a share of the vector, by its bandwidth and at most twice an equal share.

    No member sees more than its share of another one's contribution, and none has to carry the traffic of all.
    """

    text: ClassVar[str] = "butterfly"
    """The topology as text."""


@dataclass(frozen=True, slots=True)
class Star:
    """One member reduces the whole vector: a parameter server that is elected, and needs no machine of its own.

    The members elect the one whose announced bandwidth lets the round end first, among those that are left; ties go
    to the first peer id. So a member that is lost takes no round with it.

    The reducer reads every contribution as a whole, and makes every average. In an open run any peer is elected that
    announces the largest bandwidth. The document on topologies says what that may cost.
    """

    text: ClassVar[str] = "star"
    """The topology as text."""


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

    text: ClassVar[str] = "hierarchical"
    """The topology as text, without the site: all peers of a run share it."""
    site: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.site, str) or (self.site and not is_name(self.site)):
            raise ConfigError(
                f"site must be a name of at most {MAX_NAME_CHARS} bytes of printable text, or empty, got {self.site!r}"
            )


@dataclass(frozen=True, slots=True)
class Gossip:
    """Each round is among a few peers, and the next one among others. A group averages like a butterfly.

    So a run may have any number of peers, and no peer waits for all. The peers' averages differ, and each round brings
    them nearer to each other: see docs/how-to/train-in-small-groups.md.

    Args:
        degree: number of peers that this one averages with in each round, 1 to 63.
        graph: the peers that may meet in a round. ``"grid"`` is the only one: peers with the same coordinate look for
            each other, and each peer draws its coordinate anew for every round, from its id and the round's number
            (:mod:`p2pavg.group.places.gossip`). Rings, exponential graphs and tori need peers that are numbered without
            gaps. Peers come and go, and none gives out numbers.

    Raises:
        ConfigError: an argument is out of range; the message names it.
    """

    degree: int = 1
    graph: str = GRID

    def __post_init__(self) -> None:
        whole = isinstance(self.degree, int) and not isinstance(self.degree, bool)
        if not whole or not 1 <= self.degree < MAX_GROUP_SIZE:
            raise ConfigError(
                f"degree must be a whole number from 1 to {MAX_GROUP_SIZE - 1}, got {self.degree!r}"
            )
        if self.graph != GRID:
            raise ConfigError(
                f"graph must be {GRID!r}, which is the only one, got {self.graph!r}: other graphs need peers that are"
                " numbered without gaps, and no peer gives out numbers"
            )

    @property
    def group_size(self) -> int:
        """Members of a group: this peer and those that it averages with."""
        return self.degree + 1

    @property
    def text(self) -> str:
        """The topology as text, such as ``"gossip:1:grid"``."""
        return f"{_GOSSIP}:{self.degree}:{self.graph}"


Topology: TypeAlias = Butterfly | Star | Hierarchical | Gossip

BUTTERFLY = Butterfly()
_BY_TEXT: dict[str, Topology] = {each.text: each for each in (BUTTERFLY, Star(), Hierarchical())}


def site_of(topology: Topology) -> str:
    """Return the name of this peer's site; empty if it has none."""
    return topology.site if isinstance(topology, Hierarchical) else ""


def resolve_topology(given: object) -> Topology:
    """Return the topology that a text names; return a topology unchanged.

    Texts are ``"butterfly"``, ``"star"``, ``"hierarchical"``, which names no site, and ``"gossip"``, or
    ``"gossip:DEGREE"``. ``resolve_topology(topology.text) == topology`` for every topology.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(given, Butterfly | Star | Hierarchical | Gossip):
        return given
    found = _BY_TEXT.get(given) if isinstance(given, str) else None
    if found is None and isinstance(given, str):
        found = _gossip_of(given)
    if found is None:
        names = ", ".join(map(repr, _BY_TEXT))
        raise ConfigError(f"a topology is {names}, '{_GOSSIP}' or '{_GOSSIP}:DEGREE', got {given!r}")
    return found


def _gossip_of(text: str) -> Gossip | None:
    """Return the gossip that a text names, ``None`` if it is another text."""
    name, *numbers = text.split(":")
    if name != _GOSSIP or len(numbers) > 2:
        return None
    degree = numbers[0] if numbers else "1"
    # isdigit() also accepts the digits of other scripts; leading zeros would give one topology several texts.
    if not (degree.isascii() and degree.isdigit() and len(degree) <= 2 and str(int(degree)) == degree):
        return None
    return Gossip(int(degree), *numbers[1:])


def size_of_groups(topology: Topology, given: int) -> int:
    """Return the number of members that groups of a topology aim at: as given, or as the topology says.

    Args:
        given: the size that a configuration has; :data:`USUAL_GROUP_SIZE` if its author gave none.

    Raises:
        ConfigError: the topology says another size.
    """
    if not isinstance(topology, Gossip):
        return given
    if given not in (USUAL_GROUP_SIZE, topology.group_size):
        raise ConfigError(
            f"group_size is {given}, and groups of the topology {topology.text!r} have {topology.group_size} members:"
            " leave group_size out, or give a degree that is one less than it"
        )
    return topology.group_size


def among_all(topology: Topology) -> Topology:
    """Return the topology for a round of all peers of a run: gossip has no such rounds, so it becomes a butterfly."""
    return BUTTERFLY if isinstance(topology, Gossip) else topology
