"""The reachability and the addresses to announce, as they follow from the facts. No I/O, no clock, no random source."""

from __future__ import annotations

from collections.abc import Sequence

from p2pavg.net.limits.dial_policy import is_private
from p2pavg.net.limits.sources import parse_host
from p2pavg.net.nat.reach.facts import VERSIONS, Endpoint, Facts, Mapped, version_of
from p2pavg.net.nat.reach.reachability import (
    BEING_TRIED_SENTENCE,
    NOT_ASKED,
    PUBLIC_SENTENCE,
    PUNCHABLE_BARRIERS,
    Kind,
    Reachability,
    announced,
    behind,
    mapped,
)

MAX_DIRECT = 4
"""Direct addresses that are announced beside circuits: a dialler tries six addresses in all."""


def are_relays_wanted(facts: Facts) -> bool:
    """Return whether a router or a firewall keeps others from dialling this peer, as far as is known.

    A router counts until an endpoint works, so that the peer has relays from the first second. IPv6 counts like that
    too, since most homes have a firewall for it.
    """
    version = facts.deciding_version
    if not version or facts.working(version):
        return False
    return version == 6 or facts.view(version).routed or facts.is_closed(version)


def reachability(facts: Facts, announce: Sequence[str], relays: Sequence[str]) -> Reachability:
    """Return the reachability.

    Args:
        announce: the addresses that the user has named.
        relays: the ids of the peers that relay for this one.
    """
    if announce:
        kind, sentence = Kind.ANNOUNCED, announced(len(announce))
    else:
        kind, sentence = _kind(facts, len(relays))
    return Reachability(
        kind=kind,
        sentence=sentence,
        outer_hosts=facts.outer_hosts,
        relays=tuple(relays),
        punch_hosts=facts.punch_hosts,
    )


def _kind(facts: Facts, relays: int) -> tuple[Kind, str]:
    """Return the kind and the sentence.

    Behind a router, this peer counts as closed until a dial-back succeeds. A success takes a round trip, a failure
    seconds: dials to a closed port are dropped without an answer.
    """
    version = facts.deciding_version
    if not version:
        if (found := untried_mapping(facts)) is not None:
            return Kind.MAPPED, mapped(found.port, found.protocol)
        return NOT_ASKED.kind, NOT_ASKED.sentence
    if works := facts.working(version):
        return _kind_of_working(facts, works)
    barrier, is_closed = facts.barrier(version), facts.is_closed(version)
    sentence = behind(barrier, relays) if is_closed else BEING_TRIED_SENTENCE
    if version == 4 and facts.working(6):
        sentence += "; public over IPv6"
    elif version == 4 and barrier not in PUNCHABLE_BARRIERS and facts.punch_hosts:
        sentence += "; direct connections over IPv6 by hole punching"
    if not is_closed and not facts.view(version).routed:
        return Kind.UNKNOWN, sentence
    return (Kind.PUNCHABLE if barrier in PUNCHABLE_BARRIERS else Kind.RELAYED), sentence


def untried_mapping(facts: Facts) -> Mapped | None:
    """Return the router's mapping if its outer address is public, and no peer outside is there that could try it.

    The first peer of a run at home needs an address for others to join by.
    """
    mapping = facts.mapping
    if mapping is None or facts.outer_hosts or is_private(mapping.host):
        return None
    return mapping


def _kind_of_working(facts: Facts, works: Sequence[Endpoint]) -> tuple[Kind, str]:
    mapping = facts.mapping
    if mapping is not None and all(
        port == mapping.port and host not in facts.interfaces for host, port in works
    ):
        return Kind.MAPPED, mapped(mapping.port, mapping.protocol)
    return Kind.PUBLIC, PUBLIC_SENTENCE


def addresses(
    facts: Facts, announce: Sequence[str], circuits: Sequence[str], peer_id: str
) -> tuple[str, ...]:
    """Return the addresses to announce, the best first; each ends in ``/p2p/<peer id>``.

    Args:
        announce: the addresses that the user has named, without a peer id.
        circuits: complete addresses that lead through relays.
    """
    works = [found for version in VERSIONS for found in facts.working(version)]
    if (mapping := untried_mapping(facts)) is not None:
        works.append((mapping.host, mapping.port))
    own = [found for found in facts.listening if found not in works and _may_be_announced(facts, found)]
    direct = [*announce, *(f"/ip{version_of(host)}/{host}/tcp/{port}" for host, port in (*works, *own))]
    texts = [f"{text}/p2p/{peer_id}" for text in dict.fromkeys(direct)]
    return (*(texts[:MAX_DIRECT] if circuits else texts), *circuits)


def _may_be_announced(facts: Facts, endpoint: Endpoint) -> bool:
    """Return whether an address of this machine is announced although no other peer has dialled it.

    Private ones are for peers of the same network, and public ones count until a dial-back has failed. Loopback
    addresses are announced as long as no peer of another network was seen.
    """
    host, _ = endpoint
    address = parse_host(host)
    if address is None or not facts.outer_hosts:
        return True
    if address.is_loopback:
        return False
    if address.version == 6 and not facts.view(6).hosts and facts.view(4).routed:
        # No peer can try it, and routers of homes let no IPv6 in that was not asked for.
        return is_private(host)
    return is_private(host) or facts.works(endpoint) is not False
