"""All-reduces of several topologies on a model of links: bytes over rates, and a latency. No I/O, no clock.

A transfer takes the uplink of its sender and the downlink of its receiver, each for its bytes over the link's rate, and
both at once if they are free. It ends a latency later. A link carries one transfer after another, the one that is ready
first. Reducing takes no time.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

PARTS = 8
"""Parts of the vector for each member; so much of a transfer overlaps with the next one."""


@dataclass(frozen=True)
class Transfer:
    """One part from one member to another, once what it depends on has arrived."""

    name: Hashable
    source: int
    target: int
    fraction: float
    """Of the vector."""
    after: tuple[Hashable, ...] = ()
    part: int = 0
    """Transfers of the same kind go by it."""


def duration(
    transfers: Sequence[Transfer], links: Sequence[tuple[float, float]], nbytes: int, latency: float
) -> float:
    """Return the seconds until the last transfer has arrived.

    Args:
        links: (down, up) of each member in Mbit/s.
        nbytes: bytes of one vector.
        latency: seconds one way.
    """
    waits = {each.name: len(each.after) for each in transfers}
    followers: dict[Hashable, list[int]] = defaultdict(list)
    for order, each in enumerate(transfers):
        for before in each.after:
            followers[before].append(order)
    ready = [(0.0, order) for order, each in enumerate(transfers) if not each.after]
    heapq.heapify(ready)
    free_up, free_down, end = defaultdict[int, float](float), defaultdict[int, float](float), 0.0
    while ready:
        moment, order = heapq.heappop(ready)
        one = transfers[order]
        start = max(moment, free_up[one.source])
        if start > moment:  # others that are ready earlier on another link go first
            heapq.heappush(ready, (start, order))
            continue
        size = one.fraction * nbytes * 8e-6
        sent = start + size / links[one.source][1]
        taken = max(sent, max(start, free_down[one.target]) + size / links[one.target][0])
        free_up[one.source], free_down[one.target] = sent, taken
        end = max(end, taken + latency)
        for follower in followers[one.name]:
            name = transfers[follower].name
            waits[name] -= 1
            if not waits[name]:
                heapq.heappush(ready, (taken + latency, follower))
    return end


def reduced_by(fractions: Sequence[Fraction]) -> list[Transfer]:
    """Return the transfers if each member reduces a fraction of the vector: a butterfly, or a star."""
    count, found = len(fractions), []
    for reducer, fraction in enumerate(fractions):
        parts = max(round(PARTS * count * fraction), 1) if fraction else 0
        for part in range(parts):
            came = []
            for step in range(1, count):
                source = (reducer + step) % count
                came.append(("contribution", source, reducer, part))
                found.append(Transfer(came[-1], source, reducer, float(fraction) / parts, (), part))
            for step in range(1, count):
                target = (reducer + step) % count
                name = ("average", reducer, target, part)
                found.append(Transfer(name, reducer, target, float(fraction) / parts, tuple(came), part))
    # Contributions first, part by part: a member sends to the others in turn.
    return sorted(found, key=lambda one: (bool(one.after), one.part))


def ring(count: int) -> list[Transfer]:
    """Return the transfers of a ring all-reduce (Patarasuk and Yuan 2009, section 3.1): 2 (n - 1) steps."""
    found = []
    for step in range(2 * (count - 1)):
        for source in range(count):
            chunk = (source - step) % count
            for part in range(PARTS):
                after = ((step - 1, (source - 1) % count, chunk, part),) if step else ()
                name = (step, source, chunk, part)
                found.append(Transfer(name, source, (source + 1) % count, 1 / count / PARTS, after))
    return found


def tree(count: int) -> list[Transfer]:
    """Return the transfers of a binary tree: sums go up to the first member, and the average down."""
    found, parts = [], PARTS * count
    for part in range(parts):
        for node in range(1, count):
            after = tuple(("up", child, part) for child in _children(node, count))
            found.append(Transfer(("up", node, part), node, (node - 1) // 2, 1 / parts, after))
    for part in range(parts):
        whole = tuple(("up", child, part) for child in _children(0, count))
        for node in range(1, count):
            parent = (node - 1) // 2
            after = (("down", parent, part),) if parent else whole
            found.append(Transfer(("down", node, part), parent, node, 1 / parts, after))
    return found


def _children(node: int, count: int) -> Iterator[int]:
    return (child for child in (2 * node + 1, 2 * node + 2) if child < count)
