"""Sites: members that reduce among themselves before they exchange sums with other sites. Pure: no I/O, no clock.

Every member computes the same sites, shares and relays, from what the members have signed.

* The **shares** are those of a butterfly in which each site is one member: every site reduces an equal part of the
  vector. With k sites, the link between a site that reduces the fraction x and the others carries 1 + x (k - 2)
  vectors each way, whatever the number of its members: see :func:`~p2pavg.group.shares.best_fractions`. Among the
  members of a site, its part is cut by their bandwidths.
* For each share, every other site has a **relay**. It reduces the contributions of its site to that share, sends the
  result to the share's reducer, and passes the averages on to its site.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

from p2pavg.group.candidate import Candidate, link_of
from p2pavg.group.shares import fastest_shares, largest_fraction, levelled

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
