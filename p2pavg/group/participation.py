"""Participation rules: they decide which members contribute to a round and which only observe.

Every member applies the rule to the signed records of all members. No I/O, no clock, no random source. An observer
holds the result like every other member, and keeps what it accumulated.
"""

from __future__ import annotations

import abc
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from p2pavg.base.errors import ConfigError
from p2pavg.base.limits import MAX_MBPS, MAX_NAME_CHARS, MAX_TAGS
from p2pavg.base.messages import pack
from p2pavg.base.numbers import is_name
from p2pavg.group.candidate import Candidate

MAX_SEED = 2**63

_DRAW_DOMAIN = "p2pavg/draw/1"


class Participation(abc.ABC):
    """A rule that decides which members of a group contribute. All peers of a run need the same rule."""

    @property
    @abc.abstractmethod
    def text(self) -> str:
        """The rule as text. Peers whose rules have different texts never form a group."""

    @abc.abstractmethod
    def contributors(self, members: Sequence[Candidate]) -> frozenset[str]:
        """Return the ids of the members that contribute. All given members have something to contribute."""


@dataclass(frozen=True, slots=True)
class RandomFraction(Participation):
    """A random fraction of each group contributes: the members with the lowest SHA-256 of seed, state and peer id.

    The draw is new for every state. :mod:`p2pavg.optim` sets the state; other callers set it with ``step(state=...)``.
    Without a state the same peers are drawn each time.

    Args:
        fraction: fraction of the members that have something to contribute, above 0 and at most 1. It is rounded up,
            so at least one member contributes. This is the fraction C of McMahan et al. 2017
            ("Communication-Efficient Learning of Deep Networks from Decentralized Data"), algorithm 1.
        seed: any whole number; the same for all peers.

    Raises:
        ConfigError: an argument is out of range.
    """

    fraction: float
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, int | float):
            raise ConfigError(f"fraction must be a number, got {self.fraction!r}")
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction must be above 0 and at most 1, got {self.fraction!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or abs(self.seed) >= MAX_SEED:
            raise ConfigError(
                f"seed must be a whole number below 2^63 in magnitude, got {type(self.seed).__name__}"
            )

    @property
    def text(self) -> str:
        """See :class:`Participation`."""
        return f"fraction {float(self.fraction).hex()} seed {self.seed}"

    def contributors(self, members: Sequence[Candidate]) -> frozenset[str]:
        """See :class:`Participation`."""
        drawn = sorted(members, key=self._draw)
        return frozenset(member.peer_id for member in drawn[: self._count(len(drawn))])

    def _count(self, members: int) -> int:
        # Exact arithmetic: as floats, 0.28 * 25 is a little more than 7.
        return max(1, math.ceil(Fraction(self.fraction).limit_denominator(10**6) * members))

    def _draw(self, member: Candidate) -> bytes:
        return hashlib.sha256(pack(_DRAW_DOMAIN, str(self.seed), member.state, member.peer_id)).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ByCapability(Participation):
    """Members that claim some capabilities contribute.

    Args:
        tags: tags that a contributor must have (:attr:`p2pavg.AveragingConfig.tags`), e.g. ``("gpu", "fp16")``.
        min_bandwidth: least bandwidth that a contributor must announce, in Mbit/s.

    Raises:
        ConfigError: an argument is out of range.
    """

    tags: tuple[str, ...] = ()
    min_bandwidth: float = 0.0

    def __post_init__(self) -> None:
        check_tags(self.tags)
        number = not isinstance(self.min_bandwidth, bool) and isinstance(self.min_bandwidth, int | float)
        if not number or not 0 <= self.min_bandwidth <= MAX_MBPS:
            raise ConfigError(f"min_bandwidth must be a number of Mbit/s from 0 to {MAX_MBPS:g}")

    @property
    def text(self) -> str:
        """See :class:`Participation`."""
        return f"tags {sorted(self.tags)} bandwidth {float(self.min_bandwidth).hex()}"

    def contributors(self, members: Sequence[Candidate]) -> frozenset[str]:
        """See :class:`Participation`."""
        return frozenset(
            member.peer_id
            for member in members
            if set(self.tags) <= set(member.tags) and member.assumed_bandwidth >= self.min_bandwidth
        )


def check_tags(tags: object) -> None:
    """Raise ConfigError unless a peer can announce these tags."""
    if not isinstance(tags, tuple) or not all(isinstance(tag, str) and is_name(tag) for tag in tags):
        raise ConfigError(
            f"tags must be a tuple of texts of 1 to {MAX_NAME_CHARS} printable characters, got {tags!r}"
        )
    if len(tags) > MAX_TAGS:
        raise ConfigError(f"tags can be {MAX_TAGS} at most, got {len(tags)}")


def silent_members(members: Sequence[Candidate]) -> frozenset[str]:
    """Return the ids of the members that have nothing to contribute but want the result."""
    return frozenset(member.peer_id for member in members if member.weight == 0 and not member.auxiliary)


def observers(rule: Participation | None, members: Sequence[Candidate]) -> frozenset[str]:
    """Return the ids of the members that only observe."""
    silent = silent_members(members)
    if rule is None:
        return silent
    able = [member for member in members if not member.auxiliary and member.peer_id not in silent]
    return silent | {member.peer_id for member in able} - rule.contributors(able)
