"""The choice of relays, by a peer that cannot be dialled. No I/O, no clock, no random source."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from itertools import islice

from p2pavg.base.hosts import parse_host, prefix_of
from p2pavg.base.limits import RETRY_SECONDS
from p2pavg.net.addresses import CIRCUIT, is_circuit
from p2pavg.net.limits.dial_policy import is_private
from p2pavg.net.nat.reach.facts import Neighbour

RELAYS_WANTED = 2
"""A peer stays reachable when one of its relays leaves."""


def choose_relays(
    me: str,
    candidates: Sequence[Neighbour],
    held: Collection[str],
    avoided_until: Mapping[str, float],
    now: float,
    wanted: int = RELAYS_WANTED,
) -> tuple[str, ...]:
    """Return the peers to ask for a reservation now.

    Relays in different networks come first, because one attacker or one fault rarely has both. Among equals, the order
    depends on both peers' ids, so that the peers of a run spread over its relays without talking about it.

    Args:
        me: this peer's id.
        candidates: peers that this one has dialled, each once, at the hosts where it reached them.
        held: relays at which this peer has a reservation, or is asking for one.
        avoided_until: when a peer that has refused or failed may be asked again.
        now: seconds of the same clock.
        wanted: how many relays this peer shall have.
    """
    missing = wanted - len(held)
    hosts = {candidate.peer_id: candidate.host for candidate in candidates}
    used = {prefix_of(hosts[peer_id]) for peer_id in held if peer_id in hosts}
    free = sorted(
        (
            candidate
            for candidate in candidates
            if candidate.peer_id not in held and avoided_until.get(candidate.peer_id, now) <= now
        ),
        key=lambda candidate: _distance(me, candidate.peer_id),
    )
    chosen: list[str] = []
    while free and len(chosen) < missing:
        best = next((other for other in free if prefix_of(other.host) not in used), free[0])
        free.remove(best)
        used.add(prefix_of(best.host))
        chosen.append(best.peer_id)
    return tuple(chosen)


def addresses_of_relay(relay: str, reached: Sequence[str], named: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of a relay that a peer behind it announces, or nothing if it has not dialled the relay.

    The address at which the peer has dialled the relay has proved to work, and it is the relay's. What the relay names
    may be the address of a third party, to which all peers that look for this one would connect. So it counts only for
    a relay in the same private network, whose address there means nothing to peers elsewhere; and then only the first.

    Args:
        relay: the relay's id.
        reached: the addresses at which the peer has dialled the relay.
        named: valid addresses that the relay names as its own.
    """
    proved = tuple(reached[:1])
    if not proved or not is_private(_host_of(proved[0])):
        return proved
    elsewhere = (
        text
        for text in named
        if text.endswith(f"/p2p/{relay}") and parse_host(_host_of(text)) and not is_private(_host_of(text))
    )
    return (*proved, *islice(elsewhere, 1))


def _host_of(address: str) -> str:
    return address.split("/")[2]


def _distance(one: str, other: str) -> bytes:
    return hashlib.sha256(f"{one} {other}".encode()).digest()


MAX_DISTRUSTED = 256


class RelayRecord:
    """The relays over which connections have failed lately, so that others are tried first.

    A relay that lies ends the connections that it carries: Noise notices the first byte that was changed. Which of a
    relay and the two ends has failed cannot be told, so this decides about the order of addresses only.
    """

    def __init__(self) -> None:
        self._until: OrderedDict[str, float] = OrderedDict()

    def failed(self, relay: str, now: float) -> None:
        """Note that a connection over a relay has failed or was lost."""
        self._until[relay] = now + RETRY_SECONDS
        self._until.move_to_end(relay)
        if len(self._until) > MAX_DISTRUSTED:
            self._until.popitem(last=False)

    def ordered(self, addresses: Sequence[str], now: float) -> list[str]:
        """Return addresses with those that lead over such relays last, otherwise in their order."""
        late = [f"/p2p/{relay}{CIRCUIT}/" for relay, until in self._until.items() if until > now]
        return sorted(addresses, key=lambda text: is_circuit(text) and any(mark in text for mark in late))
