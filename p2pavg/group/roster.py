"""The roster: the agreed members of one group, with what each signed and its share."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_MEMBERS
from p2pavg.base.messages import checked, pack, unpack
from p2pavg.base.numbers import bounded_weights, lower_median
from p2pavg.group.candidate import Candidate, link_of, read_signed_candidate
from p2pavg.group.places.gossip import COUNTS
from p2pavg.group.ranges import Range, ranges_after_loss, whole_ranges
from p2pavg.group.shares import MemberLink, fastest_shares, largest_fraction, levelled
from p2pavg.group.sites import shares_of_sites
from p2pavg.group.star import elect
from p2pavg.group.topology import BUTTERFLY, Hierarchical, Star, Topology
from p2pavg_dht import Record
from p2pavg_dht.record import pack as pack_record
from p2pavg_dht.record import unpack as unpack_record

_ROSTER_DOMAIN = b"p2pavg-roster/2\0"


def share_cutter(
    elements: int, granularity: int, topology: Topology = BUTTERFLY
) -> Callable[[Sequence[Candidate]], tuple[int, ...]]:
    """Return the function that cuts a vector of ``elements`` into shares, one per member.

    It uses only what the members signed, so every member computes the same shares.
    """

    def cut(members: Sequence[Candidate]) -> tuple[int, ...]:
        if isinstance(topology, Star):
            reducer = elect(members, elements)
            return tuple(elements if position == reducer else 0 for position in range(len(members)))
        of_sites = (
            shares_of_sites(elements, granularity, members) if isinstance(topology, Hierarchical) else None
        )
        if of_sites is not None:
            return of_sites
        return _fastest_shares(elements, granularity, tuple(map(link_of, members)))

    return cut


@lru_cache(maxsize=64)  # groups meet again; with 16 members, exact fractions take a millisecond
def _fastest_shares(elements: int, granularity: int, members: tuple[MemberLink, ...]) -> tuple[int, ...]:
    links = levelled(members)
    return fastest_shares(elements, links, granularity, largest_fraction(links))


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The agreed members of one group, the leader first, with what each signed and its share.

    There are three kinds of members: contributors, whose vectors are averaged; observers, which hold the result without
    contributing; and auxiliaries, which have no vector.

    Raises:
        RemoteProtocolError: the roster is impossible, e.g. its records are not all under one key.
    """

    members: tuple[Candidate, ...]
    shares: tuple[int, ...]
    """Elements of the vector that each member reduces, in the members' order."""
    proposal: int
    """Number of the leader's proposal; it makes the id of every roster unique."""
    observers: frozenset[str] = frozenset()
    """Ids of the members that only observe in this round, whatever weight they signed."""
    divided: tuple[tuple[Range, ...], ...] | None = None
    """Of a later attempt: the ranges that each member reduces. ``None``: the shares follow one another."""
    group_size: int = 0
    """Of a later attempt: number of members of the whole group."""

    def __post_init__(self) -> None:
        ids = [member.peer_id for member in self.members]
        if not 2 <= len(ids) <= MAX_MEMBERS:
            raise RemoteProtocolError(f"a roster of {len(ids)} members")
        if len(set(ids)) != len(ids):
            raise RemoteProtocolError("a roster names a peer twice")
        if self.members[0].auxiliary or len(self.holders) < 2:
            raise RemoteProtocolError("a roster of fewer than two contributors, or led by an auxiliary")
        if not self.contributors:
            raise RemoteProtocolError("a roster without a contributor")
        if self.observers - {member.peer_id for member in self.holders} or any(
            member.weight == 0 and member.peer_id not in self.observers for member in self.holders
        ):
            raise RemoteProtocolError("a roster whose observers do not fit its members")
        if len({member.record.key for member in self.members}) != 1:
            raise RemoteProtocolError("a roster of peers of different runs")
        if len({member.codec for member in self.members}) != 1:
            raise RemoteProtocolError("a roster of peers with different codecs")
        if len({member.state for member in self.holders}) != 1:
            raise RemoteProtocolError("a roster of peers with different states")
        if len(self.shares) != len(ids) or any(share < 0 for share in self.shares):
            raise RemoteProtocolError("a roster whose shares do not fit its members")
        if not sum(member.weight for member in self.members) < math.inf:  # fsum raises
            raise RemoteProtocolError("a roster whose weights overflow")

    @cached_property
    def contributors(self) -> tuple[Candidate, ...]:
        """The members whose contributions are averaged."""
        return tuple(member for member in self.holders if member.peer_id not in self.observers)

    @cached_property
    def holders(self) -> tuple[Candidate, ...]:
        """The members that hold the result after a successful round: contributors and observers."""
        return tuple(member for member in self.members if not member.auxiliary)

    @property
    def total_weight(self) -> float:
        """Sum of the contributors' weights."""
        return math.fsum(member.weight for member in self.contributors)

    @property
    def metrics(self) -> dict[str, float]:
        """Weighted mean of each metric, over the contributors that measured it; of counts of rounds, the median."""
        return self.metrics_by(robust=False)

    def metrics_by(self, *, robust: bool) -> dict[str, float]:
        """Return one value of each metric, from those that the contributors signed.

        Args:
            robust: take the median of each metric, in which each member counts once. A mean is as large as the largest
                claim, whatever rule combines the contributions themselves.
        """
        found: dict[str, list[tuple[float, float]]] = {}
        for member in self.contributors:
            for name, value in member.metrics:
                found.setdefault(name, []).append((member.weight, value))
        return {
            name: _median([value for _, value in pairs]) if robust or name in COUNTS else _mean(pairs)
            for name, pairs in sorted(found.items())
        }

    @cached_property
    def ranges(self) -> tuple[tuple[Range, ...], ...]:
        """Ranges of the vector that each member reduces, in the members' order."""
        return whole_ranges(self.shares) if self.divided is None else self.divided

    @property
    def reducers(self) -> int:
        """Number of members by which parts are sized. All attempts of a group have parts of the same size."""
        return self.group_size or len(self.members)

    def among(
        self,
        attempt: int,
        positions: Iterable[int],
        cut_shares: Callable[[Sequence[Candidate]], tuple[int, ...]],
        granularity: int,
    ) -> Roster:
        """Return the roster of an attempt of this group.

        Args:
            positions: of the attempt's members; in attempt 0, all of them.
            cut_shares: see :func:`share_cutter`.

        Raises:
            RemoteProtocolError: these members cannot form a group.
        """
        chosen = sorted(positions)
        if attempt == 0:
            if chosen != list(range(len(self.members))):
                raise RemoteProtocolError("a first attempt among some of the members")
            return self
        members = tuple(self.members[position] for position in chosen)
        divided = ranges_after_loss(self.shares, chosen, cut_shares(members), granularity)
        return Roster(
            members=members,
            shares=tuple(sum(stop - start for start, stop in ranges) for ranges in divided),
            proposal=self.proposal,
            observers=self.observers & {member.peer_id for member in members},
            divided=divided,
            group_size=len(self.members),
        )

    def position(self, peer_id: str) -> int:
        """Return the index of a member. Raises ValueError for a peer that is not a member."""
        return [member.peer_id for member in self.members].index(peer_id)

    def pack(self) -> bytes:
        """Return the canonical encoding of the roster."""
        return pack(
            tuple(pack_record(member.record) for member in self.members),
            self.shares,
            self.proposal,
            tuple(index for index, member in enumerate(self.members) if member.peer_id in self.observers),
        )

    @cached_property
    def group_id(self) -> bytes:
        """SHA-256 of the roster: 32 bytes in the header of every stream of this group."""
        return hashlib.sha256(_ROSTER_DOMAIN + self.pack()).digest()


def read_roster(packed: bytes) -> Roster:
    """Read a roster from a message and check every member's signature.

    Raises:
        RemoteProtocolError: the roster is malformed, forged or impossible.
    """
    records, shares, proposal, observing = unpack(packed, tuple, tuple, int, tuple)
    if len(records) > MAX_MEMBERS:
        raise RemoteProtocolError(f"a roster of {len(records)} members")
    checked(shares, (int,) * len(shares))
    if observing != tuple(
        sorted(set(checked(observing, (int,) * len(observing))) & set(range(len(records))))
    ):
        raise RemoteProtocolError("a roster whose observers do not fit its members")
    members = tuple(map(read_signed_candidate, records))
    observers = frozenset(members[index].peer_id for index in observing)
    return Roster(members=members, shares=shares, proposal=proposal, observers=observers)


def records_of_roster(packed: bytes) -> list[Record]:
    """Return the members' records in a roster's bytes, before anything of them is checked.

    Raises:
        RemoteProtocolError: the roster is malformed, or has members of different runs.
        RecordError: a record is malformed.
    """
    records, *_ = unpack(packed, tuple, tuple, int, tuple)
    if len(records) > MAX_MEMBERS:
        raise RemoteProtocolError(f"a roster of {len(records)} members")
    found = list(map(unpack_record, records))
    if len({record.key for record in found}) > 1:
        raise RemoteProtocolError("a roster of peers of different runs")
    return found


def _median(values: Sequence[float]) -> float:
    """Return the median; of an even number of more than two values, the lower of those in the middle.

    It is then a value that a member has signed, even if half of the members lie that theirs are large. Of two values
    neither is in the middle, and the mean shows both.
    """
    return values[0] / 2 + values[1] / 2 if len(values) == 2 else statistics.median_low(values)


def _mean(found: Sequence[tuple[float, float]]) -> float:
    """Return the weighted mean of (weight, value) pairs, without leaving the range of the values."""
    total = math.fsum(weight for weight, _ in found)
    return math.fsum(weight / total * value for weight, value in found)


# Bounded influence: the factors by which long contributions are shortened.
#
# Each member signs the Euclidean norm of its contribution in its readiness record, as it signs its weight: both
# belong to the contribution that is set aside before the record is signed. The roster carries these records. So all
# members of a group, and of a later attempt among some of them, compute the same factors from the same bytes.
#
# A median of earlier rounds would not do. Members remember different rounds, because each was in other groups, was
# lost or has just joined, and reducers with different factors would average different things.


def norm_factors(roster: Roster, max_norm: float | None) -> dict[str, float]:
    """Return the factor for each contribution that is longer than ``max_norm`` times the group's median norm.

    The median is the lower weighted median of the norms that the contributors signed, with
    :func:`~p2pavg.base.numbers.bounded_weights`. Contributors that lie about their norms cannot raise it above the
    largest honest norm, unless they have more than half of this weight.

    Args:
        max_norm: 1 or more; ``None`` bounds nothing.

    Returns:
        Factors from 0 to below 1, by peer id, in the roster's order. Other contributions are averaged as they are.
    """
    if max_norm is None:
        return {}
    members = roster.contributors
    weights = bounded_weights([member.weight for member in members])
    longest = max_norm * lower_median([member.norm for member in members], weights)
    return {member.peer_id: longest / member.norm for member in members if member.norm > longest}
