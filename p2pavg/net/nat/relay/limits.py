"""The limits of what a relay gives to others: reservations, circuits, and the bytes that it carries.

This module decides; it does no I/O and has no clock. Two rules keep one peer from using up what others need:

* Every limit holds for a peer, for its address and in all, so that a peer with many identities at one address competes
  with itself. If the relay is full, the network that holds the most gives way to one that holds less.
* The sender pays for bytes, because only the sender decides about them. So no peer uses up the bytes of the peer at the
  other end of its circuit.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from p2pavg.base.hosts import prefix_of
from p2pavg.net.limits.rate import WIRE_OVERHEAD, TokenBucket, take_from_all

DEFAULT_RELAY_MBPS = 10.0

# Peers and hosts whose use is remembered. The least recent ones are forgotten; by then, `mbps` has bounded the rest.
_MAX_ACCOUNTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """The limits of one relay.

    - ``mbps``: Mbit/s that circuits carry in all, both directions together.
    - ``reservations``, ``reservations_per_host``, ``reservations_per_prefix``: peers that this one makes
      reachable. A home or a student dormitory has a few behind one address.
    - ``circuits``, ``circuits_per_peer``, ``circuits_per_host``: circuits that are open. A peer needs one for each
      member of its group that it cannot reach directly, and one for each keeper of its records.
    - ``circuits_per_target``: circuits to one peer behind this one.
    - ``asks_per_peer``, ``asks_per_host``: requests for a circuit at once, and again in each minute. Each one may
      cost the peer behind this one a handshake.
    - ``bytes_per_peer``, ``bytes_per_host``: bytes that one peer or host sends through circuits in an hour.
    - ``seconds``: the longest life of a circuit. Peers that still need one connect again.
    - ``idle_seconds``: the longest time in which a circuit carries nothing.
    """

    mbps: float = DEFAULT_RELAY_MBPS
    reservations: int = 128
    reservations_per_host: int = 16
    reservations_per_prefix: int = 32
    circuits: int = 512
    circuits_per_peer: int = 32
    circuits_per_host: int = 96
    circuits_per_target: int = 64
    asks_per_peer: int = 64
    asks_per_host: int = 256
    bytes_per_peer: int = 1 << 30
    bytes_per_host: int = 2 << 30
    seconds: float = 7200.0
    idle_seconds: float = 300.0


@dataclass(eq=False, frozen=True, slots=True)
class Reservation:
    """The right of one peer to be reached through this relay."""

    peer_id: str
    host: str


@dataclass(eq=False, slots=True)
class Circuit:
    """One circuit, which ``source`` asked for."""

    source: str
    host: str
    """The IP address of the source, as this relay sees it."""
    target: str
    target_host: str
    carried: int = field(default=0)
    """Bytes carried so far, both directions together."""


class RelayBudget:
    """The reservations and circuits of one relay, and the decisions about new ones."""

    def __init__(self, limits: RelayLimits) -> None:
        self.limits = limits
        self._reservations: dict[str, Reservation] = {}
        self._circuits: dict[Circuit, None] = {}
        rate = limits.mbps * 1e6 / 8 / WIRE_OVERHEAD
        self._rate = TokenBucket(rate, max(rate * 0.1, 32 * 1024))
        self._accounts: OrderedDict[tuple[str, str], TokenBucket] = OrderedDict()
        self.carried = 0
        """Bytes carried by all circuits so far."""

    @property
    def circuits(self) -> tuple[Circuit, ...]:
        """The circuits that are open."""
        return tuple(self._circuits)

    @property
    def reserved(self) -> frozenset[str]:
        """The peers that are reachable through this relay."""
        return frozenset(self._reservations)

    # -- reservations

    def reserve(self, peer_id: str, host: str) -> tuple[Reservation, list[Reservation]] | str:
        """Take a reservation. Return it with those that end for it, or the reason for which there is none.

        It replaces an older one of the same peer, whose connection may have died unnoticed.

        Args:
            peer_id: the peer that asks.
            host: its IP address, as this relay sees it.
        """
        limits = self.limits
        # A renewal must not fail because of the place that it takes over.
        others = [other for other in self._reservations.values() if other.peer_id != peer_id]
        prefix = prefix_of(host)
        # A peer with many identities at one address competes with itself: nothing gives way there.
        if sum(other.host == host for other in others) >= limits.reservations_per_host:
            return f"{limits.reservations_per_host} peers at this address have a reservation"
        neighbours = [other for other in others if prefix_of(other.host) == prefix]
        ended: list[Reservation] = []
        if len(neighbours) >= limits.reservations_per_prefix:
            # Within a network, the address with the most places gives way.
            ended = _giving_way(neighbours, host)
            if not ended:
                return f"{limits.reservations_per_prefix} peers of this network have a reservation"
        elif len(others) >= limits.reservations:
            ended = _giving_way(others, host)
            if not ended:
                return f"this relay has all of its {limits.reservations} reservations in use"
        for each in ended:
            self.give_up(each)
        # The newest one is the last: the oldest gives way first.
        self._reservations.pop(peer_id, None)
        self._reservations[peer_id] = taken = Reservation(peer_id, host)
        return taken, ended

    def give_up(self, reservation: Reservation) -> None:
        """End a reservation. Nothing happens if a newer one has replaced it."""
        if self._reservations.get(reservation.peer_id) is reservation:
            del self._reservations[reservation.peer_id]

    # -- circuits

    def connect(self, source: str, host: str, target: str, now: float) -> tuple[Circuit, list[Circuit]] | str:
        """Open a circuit. Return it with those that end for it, or the reason for which there is none.

        Args:
            source: the peer that asks.
            host: its IP address, as this relay sees it.
            target: the peer that it wants to reach.
            now: seconds of a clock that does not run backwards.
        """
        # Counted first, so that requests for peers without a reservation are not free.
        if not self._may_ask(source, host, now):
            return "this peer, or its address, asks for circuits too often"
        reservation = self._reservations.get(target)
        if reservation is None:
            return "the peer has no reservation at this relay"
        if source == target:
            return "a peer needs no circuit to itself"
        # Such a circuit would end at its first bytes. Both ends are told at once instead.
        if self._is_used_up(source, host, now):
            return "this peer, or its address, has used up its bytes for now"
        if self._is_used_up(target, reservation.host, now):
            return "that peer, or its address, has used up its bytes for now"
        limits = self.limits
        ended: list[Circuit] = []
        for name, most, shared, belongs in (
            # A peer or an address that has used up its own places displaces none.
            # Only places that strangers share give way.
            ("of this peer", limits.circuits_per_peer, False, lambda other: other.source == source),
            ("from this address", limits.circuits_per_host, False, lambda other: other.host == host),
            ("to that peer", limits.circuits_per_target, True, lambda other: other.target == target),
            ("in all", limits.circuits, True, lambda _: True),
        ):
            # What gives way for one limit counts no more for the next one.
            crowd = [other for other in self._circuits if other not in ended and belongs(other)]
            if len(crowd) < most:
                continue
            found = _giving_way(crowd, host) if shared else []
            if not found:
                return f"this relay has {most} circuits {name} already"
            ended += found
        for each in ended:
            self.close(each)
        circuit = Circuit(source, host, target, reservation.host)
        self._circuits[circuit] = None
        return circuit, ended

    def close(self, circuit: Circuit) -> None:
        """Forget a circuit that has ended."""
        self._circuits.pop(circuit, None)

    def carry(self, circuit: Circuit, count: int, now: float, *, back: bool) -> float | None:
        """Count bytes of a circuit. Return the seconds to wait before they may go; ``None`` ends the circuit.

        Args:
            back: true if the bytes go from the target to the source.
        """
        circuit.carried += count
        self.carried += count
        sender = (circuit.target, circuit.target_host) if back else (circuit.source, circuit.host)
        accounts = self._byte_accounts(*sender)
        for account in accounts:
            # The bytes are here already, so they count in any case, also those that end the circuit.
            account.take(now, count)
        if any(account.level(now) < 0 for account in accounts):
            return None
        # The common rate comes last: bytes that are not carried must not delay others.
        return self._rate.take(now, count)

    def _may_ask(self, peer_id: str, host: str, now: float) -> bool:
        limits = self.limits
        accounts = [
            self._account(("asks of a peer", peer_id), limits.asks_per_peer / 60.0, limits.asks_per_peer),
            self._account(("asks of a host", host), limits.asks_per_host / 60.0, limits.asks_per_host),
        ]
        # A request that is refused takes nothing: otherwise a peer that goes on asking would never be let in again.
        return take_from_all(now, 1.0, *accounts)

    def _is_used_up(self, peer_id: str, host: str, now: float) -> bool:
        return any(account.level(now) <= 0 for account in self._byte_accounts(peer_id, host))

    def _byte_accounts(self, peer_id: str, host: str) -> list[TokenBucket]:
        """Return the buckets of a peer and its host, which hold an hour's bytes and fill within an hour."""
        per_peer, per_host = self.limits.bytes_per_peer, self.limits.bytes_per_host
        return [
            self._account(("bytes of a peer", peer_id), per_peer / 3600.0, per_peer),
            self._account(("bytes of a host", host), per_host / 3600.0, per_host),
        ]

    def _account(self, key: tuple[str, str], rate: float, most: float) -> TokenBucket:
        if key in self._accounts:
            # The accounts in use stay at the end, and the least recent one is forgotten.
            self._accounts.move_to_end(key)
        else:
            self._accounts[key] = TokenBucket(rate, most)
            if len(self._accounts) > _MAX_ACCOUNTS:
                self._forget()
        return self._accounts[key]

    def _forget(self) -> None:
        """Forget the least recent account that no open circuit needs."""
        busy = {
            name
            for each in self._circuits
            for name in (each.source, each.host, each.target, each.target_host)
        }
        # The account that was just made has no circuit yet, and must not be forgotten at once.
        newest = next(reversed(self._accounts))
        oldest = next((key for key in self._accounts if key[1] not in busy and key != newest), None)
        if oldest is not None:
            del self._accounts[oldest]


Place = TypeVar("Place", Reservation, Circuit)


def _giving_way(crowd: Sequence[Place], host: str) -> list[Place]:
    """Return the place that gives way to a newcomer at ``host``, in a list; empty if none does.

    The network that holds the most places loses the oldest one of its greediest address, if it holds at least two more
    than the newcomer's network. Otherwise the same holds for the addresses of the newcomer's own network.

    Args:
        crowd: the places, the oldest first.
    """
    mine = prefix_of(host)
    networks = Counter(prefix_of(place.host) for place in crowd)
    ((greediest, most),) = networks.most_common(1)
    if networks[mine] + 1 < most:
        return _oldest_of_the_greediest_host([place for place in crowd if prefix_of(place.host) == greediest])
    own = [place for place in crowd if prefix_of(place.host) == mine]
    victims = _oldest_of_the_greediest_host(own)
    held = Counter(place.host for place in own)
    return [victim for victim in victims if held[host] + 1 < held[victim.host]]


def _oldest_of_the_greediest_host(crowd: Sequence[Place]) -> list[Place]:
    hosts = Counter(place.host for place in crowd)
    return [place for place in crowd if place.host == max(hosts, key=hosts.__getitem__)][:1] if hosts else []
