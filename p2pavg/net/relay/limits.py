"""What a relay gives to others: its reservations and circuits, and the bytes that it carries.

This module decides; it does no I/O and has no clock. Every limit holds for a peer, for its address and in all, so that
a peer with many identities at one address competes with itself.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from p2pavg.net.limits.rate import WIRE_OVERHEAD, TokenBucket
from p2pavg.net.limits.sources import prefix_of

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
    - ``bytes_per_peer``, ``bytes_per_host``: bytes that the circuits of one asking peer or host carry in an hour.
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
    target: str
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

    def reserve(self, peer_id: str, host: str) -> Reservation | str:
        """Take a reservation, or return the reason for which there is none.

        It replaces an older one of the same peer, whose connection may have died unnoticed.

        Args:
            peer_id: the peer that asks.
            host: its IP address, as this relay sees it.
        """
        limits = self.limits
        hosts = [other.host for other in self._reservations.values() if other.peer_id != peer_id]
        if len(hosts) >= limits.reservations:
            return f"this relay has all of its {limits.reservations} reservations in use"
        if hosts.count(host) >= limits.reservations_per_host:
            return f"{limits.reservations_per_host} peers at this address have a reservation"
        prefix = prefix_of(host)
        if sum(prefix_of(other) == prefix for other in hosts) >= limits.reservations_per_prefix:
            return f"{limits.reservations_per_prefix} peers of this network have a reservation"
        self._reservations[peer_id] = taken = Reservation(peer_id, host)
        return taken

    def give_up(self, reservation: Reservation) -> None:
        """End a reservation. Nothing happens if a newer one has replaced it."""
        if self._reservations.get(reservation.peer_id) is reservation:
            del self._reservations[reservation.peer_id]

    # -- circuits

    def connect(self, source: str, host: str, target: str, now: float) -> Circuit | str:
        """Open a circuit, or return the reason for which there is none.

        Args:
            source: the peer that asks.
            host: its IP address, as this relay sees it.
            target: the peer that it wants to reach.
        """
        limits = self.limits
        if target not in self._reservations:
            return "the peer has no reservation at this relay"
        if source == target:
            return "a peer needs no circuit to itself"
        crowds = (
            ("in all", limits.circuits, lambda _: True),
            ("of this peer", limits.circuits_per_peer, lambda other: other.source == source),
            ("from this address", limits.circuits_per_host, lambda other: other.host == host),
            ("to that peer", limits.circuits_per_target, lambda other: other.target == target),
        )
        for name, most, belongs in crowds:
            if sum(map(belongs, self._circuits)) >= most:
                return f"this relay has {most} circuits {name} already"
        if any(account.level(now) <= 0 for account in self._accounts_of(source, host)):
            return "this peer, or its address, has used up its bytes for now"
        circuit = Circuit(source, host, target)
        self._circuits[circuit] = None
        return circuit

    def close(self, circuit: Circuit) -> None:
        """Forget a circuit that has ended."""
        self._circuits.pop(circuit, None)

    def carry(self, circuit: Circuit, count: int, now: float) -> float | None:
        """Count bytes of a circuit. Return the seconds to wait before they may go; ``None`` ends the circuit."""
        circuit.carried += count
        self.carried += count
        accounts = self._accounts_of(circuit.source, circuit.host)
        for account in accounts:
            account.take(now, count)
        if any(account.level(now) < 0 for account in accounts):
            return None
        return self._rate.take(now, count)

    def _accounts_of(self, peer_id: str, host: str) -> list[TokenBucket]:
        """Return the buckets of a peer and its host, which hold an hour's bytes and fill within an hour."""
        wanted = (("peer", peer_id, self.limits.bytes_per_peer), ("host", host, self.limits.bytes_per_host))
        found = []
        for kind, name, most in wanted:
            account = self._accounts.setdefault((kind, name), TokenBucket(most / 3600.0, most))
            self._accounts.move_to_end((kind, name))
            found.append(account)
        if len(self._accounts) > _MAX_ACCOUNTS:
            self._forget()
        return found

    def _forget(self) -> None:
        """Forget the least recent accounts, but none of a circuit that is open."""
        busy = {("peer", each.source) for each in self._circuits}
        busy |= {("host", each.host) for each in self._circuits}
        for key in list(self._accounts)[: len(self._accounts) - _MAX_ACCOUNTS]:
            if key not in busy:
                del self._accounts[key]
