"""Groups that meet again: most rounds of a small run have the members of the round before. No I/O, no clock.

Every member of a group knows who led it. If that peer announces its next attempt first, its record is all that the
others need: a peer gives its record to the members of its last round directly. So they do not announce themselves, in
the hope of joining it, for :data:`~p2pavg.matchmaking.timing.REUNION_SECONDS`. Their deadlines are later by as much.
So a leader that begins within that time after them comes before them. Nor do they ask strangers in this time.

**The group must be the whole run,** as far as its members see. In a run of several groups, or with a peer too many,
groups that meet again would never mix, and leave the same peer out in every round. So a peer that sees another one
that was not in the group announces itself at once. It sees all others in a network of at most :data:`EVERYONE_KEEPS`
peers, and in one without a peer besides the group. In larger networks all peers announce themselves. And each member
does so all the same when its last record has expired (:data:`~p2pavg.matchmaking.timing.RECORD_TTL_SECONDS`), in case
that there are others by now. Runs that step less often hardly notice what it costs.

A leader that is gone, or late, costs the others the time for which they hold back. They then announce themselves and
look for others as in any attempt.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from p2pavg.group.candidate import Candidate
from p2pavg.matchmaking.timing import RECORD_TTL_SECONDS, REUNION_SECONDS
from p2pavg_dht.routing import K

EVERYONE_KEEPS = K
"""Peers of a network in which each keeps the records of all others."""
MOST_OTHERS = 16
"""Larger groups do not meet again: a leader gives its record to so many members of its last round directly."""
LEAST_MATCH_TIMEOUT = 4 * REUNION_SECONDS
"""Seconds. Peers with less patience do not hold back: others that come soon after them may not have more."""


@dataclass(frozen=True, slots=True)
class LastGroup:
    """The members that finished the last round together, this peer included."""

    key: bytes
    """Ready key of the place where they met."""
    leader: str
    """Id of the first of them in the roster."""
    members: frozenset[str]
    holders: frozenset[str]
    """Ids of the members that want results."""


def last_group(key: bytes, members: Sequence[Candidate]) -> LastGroup | None:
    """Return the group of these members, in the roster's order; ``None`` without members."""
    if not members:
        return None
    holders = frozenset(member.peer_id for member in members if not member.auxiliary)
    every = frozenset(member.peer_id for member in members)
    return LastGroup(key, members[0].peer_id, every, holders)


def holds_back(
    me: str,
    last: LastGroup | None,
    *,
    key: bytes,
    target: int,
    expected: Collection[str],
    match_timeout: float,
    looked: float,
    network: int,
) -> bool:
    """Return whether a peer waits for the leader of its last group, before it announces itself.

    Args:
        me: id of the peer.
        last: its last group; ``None`` if the last round had none, or failed.
        key: ready key of the place where the attempt looks.
        target: number of members that want results with which the group is complete.
        expected: ids of the other peers that the group is to be with, if they are known.
        match_timeout: seconds.
        looked: seconds since this peer announced itself last.
        network: about how many peers the network has, this one included.
    """
    return (
        last is not None
        and last.leader != me
        and last.key == key
        and target <= len(last.holders)
        and len(last.members) <= MOST_OTHERS + 1
        and last.holders >= set(expected)
        and match_timeout >= LEAST_MATCH_TIMEOUT
        and looked < RECORD_TTL_SECONDS
        and network <= max(EVERYONE_KEEPS, len(last.members))
    )
