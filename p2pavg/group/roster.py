"""The roster: the agreed members of one group, with what each signed and its share."""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Annotated, TypeAlias, assert_never

from msgspec import Meta

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_AUXILIARY_ELEMENTS, MAX_MEMBERS
from p2pavg.base.messages import Message
from p2pavg.base.numbers import bounded_weights, lower_median
from p2pavg.group.bandwidth import DEFAULT_MBPS
from p2pavg.group.candidate import Candidate, link_of, read_signed_candidate
from p2pavg.group.places.gossip import COUNTS
from p2pavg.group.reach import is_direct
from p2pavg.group.shares import (
    RELAY_MBPS,
    MemberLink,
    fastest_shares,
    largest_fraction,
    levelled,
    share_bounds,
)
from p2pavg.group.topology import BUTTERFLY, Butterfly, Gossip, Hierarchical, Star, Topology
from p2pavg_dht import Record

# Sites: members that reduce among themselves before they exchange sums with other sites. Pure: no I/O, no clock.
#
# Every member computes the same sites, shares and relays, from what the members have signed.
#
# * The **shares** are those of a butterfly in which each site is one member: every site reduces an equal part of the
#   vector. With k sites, the link between a site that reduces the fraction x and the others carries 1 + x (k - 2)
#   vectors each way, whatever the number of its members: see p2pavg.group.shares.best_fractions. Among the
#   members of a site, its part is cut by their bandwidths.
# * For each share, every other site has a **relay**. It reduces the contributions of its site to that share, sends the
#   result to the share's reducer, and passes the averages on to its site.

Sites: TypeAlias = tuple[tuple[int, ...], ...]
"""Positions of the members of each site, in ascending order. Every member is in one site."""


def sites_of(members: Sequence[Candidate]) -> Sites:
    """Return the sites of the members of an attempt, in the order of their first members.

    A member that names no site is a site of its own, and so is an auxiliary. If no site has two members, or all that
    hold the result are in one site, there is nothing to gain: all members count as one site, which is a butterfly.
    """
    found: dict[str | int, list[int]] = {}
    for position, member in enumerate(members):
        found.setdefault(member.site or position, []).append(position)
    holding = [site for site in found.values() if not members[site[0]].auxiliary]
    if len(holding) < 2 or all(len(site) == 1 for site in holding):
        return (tuple(range(len(members))),)
    return tuple(map(tuple, found.values()))


def shares_of_sites(elements: int, granularity: int, members: Sequence[Candidate]) -> tuple[int, ...] | None:
    """Cut a vector into one share per member, in the members' order; ``None`` if the members are one site.

    An auxiliary gets no share: its traffic would cross the links of all sites.

    Args:
        elements: length of the vector.
        granularity: the codec's block; a block is never split between reducers.
        members: of an attempt.
    """
    sites = sites_of(members)
    if len(sites) == 1:
        return None
    holding = [site for site in sites if not members[site[0]].auxiliary]
    blocks = -(-elements // granularity)
    edges = [min(blocks * each // len(holding) * granularity, elements) for each in range(len(holding) + 1)]
    shares = [0] * len(members)
    for index, site in enumerate(holding):
        links = levelled([link_of(members[position]) for position in site])
        cut = fastest_shares(edges[index + 1] - edges[index], links, granularity, largest_fraction(links))
        for position, share in zip(site, cut, strict=True):
            shares[position] = share
    return tuple(shares)


def relays_of(sites: Sites, shares: Sequence[int], holders: Sequence[bool]) -> Mapping[tuple[int, int], int]:
    """Return the relay of each share in each other site that has members which hold the result.

    The largest shares are given out first, each to the holder of the site that has least to relay, compared with its
    own share. So members with faster links relay more, as they reduce more.

    Args:
        sites: of the attempt's members.
        shares: elements that each member reduces.
        holders: for each member, True if it holds the result.

    Returns:
        The relay's position, by the position of the share's reducer and the number of the site.
    """
    found: dict[tuple[int, int], int] = {}
    for number, site in enumerate(sites):
        able = [position for position in site if holders[position]]
        others = [position for position, share in enumerate(shares) if share and position not in site]
        load = dict.fromkeys(able, 0)
        for reducer in sorted(others, key=lambda position: (-shares[position], position)) if able else ():
            relay = min(able, key=lambda each: _rank(load[each] + shares[reducer], shares[each], each))
            load[relay] += shares[reducer]
            found[reducer, number] = relay
    return found


def _rank(load: int, share: int, position: int) -> tuple[bool, Fraction, int]:
    return not share, Fraction(load, share or 1), position


# The reducer of a star. Pure: every member elects the same one, from what the members have signed.
#
# With c members that hold the result, the reducer of a vector of V bytes receives V (c - 1) and sends as much; an
# auxiliary, which has no vector of its own, V c each way. Every other member sends V and receives V, whichever member
# reduces. So the round is shortest with the member that needs least time for its traffic.

MAX_AUXILIARY_INPUTS = 4 * MAX_AUXILIARY_ELEMENTS
"""Elements of all contributions together that an auxiliary may have to keep: 1 GiB of fp32. It helps strangers, and
must not run out of memory for them."""

_Rank: TypeAlias = tuple[Fraction, bool, Fraction, str]


def elect(members: Sequence[Candidate], elements: int) -> int:
    """Return the position of the member that reduces the whole vector.

    It is the member with which the round ends first, by the bandwidths that all have announced:

    * A member whose bandwidth is unknown counts as the slowest of those that are known, and comes after these.
    * Pairs of members that cannot connect directly share :data:`~p2pavg.group.shares.RELAY_MBPS` through relays. A
      member with such pairs counts as no faster than that.
    * An auxiliary is elected only for vectors that it may hold: see :data:`MAX_AUXILIARY_INPUTS`.
    * Of equal members the first peer id is elected.

    Args:
        members: of an attempt, in any order. At least one is no auxiliary.
        elements: length of the vector.
    """
    holders = sum(not member.auxiliary for member in members)
    fits = elements <= MAX_AUXILIARY_ELEMENTS and elements * holders <= MAX_AUXILIARY_INPUTS
    known = [member.bandwidth for member in members if member.bandwidth]
    unknown = Fraction(min(known, default=DEFAULT_MBPS))

    def rank(position: int) -> _Rank:
        member = members[position]
        traffic = holders - (not member.auxiliary)
        own = traffic / (Fraction(member.bandwidth) if member.bandwidth else unknown)
        relayed = 2 * _indirect(members, position) / Fraction(RELAY_MBPS)
        return max(own, relayed), not member.bandwidth, own, member.peer_id

    eligible = [position for position, member in enumerate(members) if fits or not member.auxiliary]
    return min(eligible, key=rank)


def _indirect(members: Sequence[Candidate], position: int) -> int:
    """Return the number of members with a vector that exchange with a member through relays only."""
    reducer = members[position]
    return sum(
        not (member.auxiliary or index == position or is_direct(reducer.reach, member.reach))
        for index, member in enumerate(members)
    )


# The ranges of the vector that each member of a later attempt reduces. Pure: every member computes the same ones.
#
# In the first attempt a member reduces one range, its share (p2pavg.group.shares). When members are lost, those that
# are left keep their ranges, since contributions to them have come already. Only the ranges of the lost members are
# divided anew.

Range: TypeAlias = tuple[int, int]
"""First element of a range of the vector, and the element after its last."""

_HALF = Fraction(1, 2)


def whole_ranges(shares: Sequence[int]) -> tuple[tuple[Range, ...], ...]:
    """Return the ranges of the first attempt, in the members' order: one each, or none for a share of nothing."""
    bounds = [share_bounds(shares, position) for position in range(len(shares))]
    return tuple(((start, stop),) if start < stop else () for start, stop in bounds)


def ranges_after_loss(
    shares: Sequence[int], left: Sequence[int], wanted: Sequence[int], granularity: int
) -> tuple[tuple[Range, ...], ...]:
    """Divide the vector among the members that are left.

    Each keeps the range that it had in the first attempt. What the lost members had is divided in proportion to what
    each member that is left lacks of the share that it would have if the vector were cut among these members only. So
    no member gets more than the greater of that share and its first one.

    The ranges depend on nothing but the group and the members that are left. So a peer that knows these can check a
    signature of any attempt, without knowing the attempts before it.

    Args:
        shares: elements of each member of the group in the first attempt.
        left: positions of the members that are left, in ascending order.
        wanted: elements of each of them if the vector were cut among them only. They sum to the sum of ``shares``.
        granularity: the codec's block; a block is never split.

    Returns:
        Of each member that is left, its range in the first attempt and then further ones, in ascending order. A member
        may have none.
    """
    kept = whole_ranges(shares)
    free = [one for position, own in enumerate(kept) if position not in left for one in own]
    lacks = [max(0, want - shares[position]) for want, position in zip(wanted, left, strict=True)]
    blocks = -(-sum(stop - start for start, stop in free) // granularity)
    cuts = itertools.accumulate(lacks, initial=0)
    edges = [math.floor(Fraction(blocks * cut, max(sum(lacks), 1)) + _HALF) * granularity for cut in cuts]
    return tuple(
        kept[position] + tuple(_between(free, start, stop))
        for position, (start, stop) in zip(left, itertools.pairwise(edges), strict=True)
    )


def _between(ranges: Sequence[Range], first: int, last: int) -> Iterator[Range]:
    """Yield the pieces of ranges from their ``first`` to their ``last`` element, counted through all of them."""
    at = 0
    for start, stop in ranges:
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            yield start + low, start + high
        at += stop - start


_ROSTER_DOMAIN = b"p2pavg-roster/2\0"


@dataclass(frozen=True, slots=True)
class ShareCutter:
    """Cuts a vector of ``elements`` into shares, one per member, whose bounds are multiples of ``granularity``.

    It uses only what the members signed, so every member computes the same shares, and no leader can put more load on
    one of them.
    """

    elements: int
    granularity: int
    topology: Topology = BUTTERFLY

    def cut(self, members: Sequence[Candidate]) -> tuple[int, ...]:
        """Return the number of elements of each member's share, in the members' order."""
        topology = self.topology
        if isinstance(topology, Star):
            reducer = elect(members, self.elements)
            return tuple(self.elements if position == reducer else 0 for position in range(len(members)))
        if isinstance(topology, Hierarchical):
            of_sites = shares_of_sites(self.elements, self.granularity, members)
            if of_sites is not None:
                return of_sites
        elif not isinstance(topology, Butterfly | Gossip):
            assert_never(topology)  # a new one must say how it cuts, and not be taken for a butterfly
        return _fastest_shares(self.elements, self.granularity, tuple(map(link_of, members)))


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

    def among(self, attempt: int, positions: Iterable[int], cutter: ShareCutter) -> Roster:
        """Return the roster of an attempt of this group.

        Args:
            positions: of the attempt's members; in attempt 0, all of them.
            cutter: of the run.

        Raises:
            RemoteProtocolError: these members cannot form a group.
        """
        chosen = sorted(positions)
        if attempt == 0:
            if chosen != list(range(len(self.members))):
                raise RemoteProtocolError("a first attempt among some of the members")
            return self
        members = tuple(self.members[position] for position in chosen)
        divided = ranges_after_loss(self.shares, chosen, cutter.cut(members), cutter.granularity)
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
        return _PackedRoster(
            tuple(member.record for member in self.members),
            self.shares,
            self.proposal,
            tuple(index for index, member in enumerate(self.members) if member.peer_id in self.observers),
        ).encode()

    @cached_property
    def group_id(self) -> bytes:
        """SHA-256 of the roster: 32 bytes in the header of every stream of this group."""
        return hashlib.sha256(_ROSTER_DOMAIN + self.pack()).digest()


class _PackedRoster(Message, frozen=True):
    """A roster as it is sent and hashed. Its numbers may still be impossible, and its records forged."""

    records: Annotated[tuple[Record, ...], Meta(max_length=MAX_MEMBERS)]
    shares: Annotated[tuple[int, ...], Meta(max_length=MAX_MEMBERS)]
    proposal: int
    observing: Annotated[tuple[int, ...], Meta(max_length=MAX_MEMBERS)]


def read_roster(packed: bytes) -> Roster:
    """Read a roster from a message and check every member's signature.

    Raises:
        RemoteProtocolError: the roster is malformed, forged or impossible.
    """
    said = _PackedRoster.decode(packed)
    if said.observing != tuple(sorted(set(said.observing) & set(range(len(said.records))))):
        raise RemoteProtocolError("a roster whose observers do not fit its members")
    members = tuple(map(read_signed_candidate, said.records))
    observers = frozenset(members[index].peer_id for index in said.observing)
    return Roster(members=members, shares=said.shares, proposal=said.proposal, observers=observers)


def records_of_roster(packed: bytes) -> tuple[Record, ...]:
    """Return the members' records in a roster's bytes, before their signatures are checked.

    Raises:
        RemoteProtocolError: the roster is malformed, or has members of different runs.
    """
    records = _PackedRoster.decode(packed).records
    if len({record.key for record in records}) > 1:
        raise RemoteProtocolError("a roster of peers of different runs")
    return records


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
