"""The reachability of one peer: one of a few kinds, and a sentence for its user. No I/O, no clock, no random source."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The ways in which other peers can reach a peer."""

    UNKNOWN = "unknown"
    """No peer outside this network has answered yet."""
    PUBLIC = "public"
    """Another peer has dialled this one."""
    MAPPED = "mapped"
    """The router passes a port on, because this process asked it to."""
    ANNOUNCED = "announced"
    """The user has named the addresses."""
    PUNCHABLE = "punchable"
    """The router or firewall refuses inbound connections, but both sides can open one at the same time."""
    RELAYED = "relayed"
    """Only relays carry connections to this peer, which itself can dial peers that are dialable."""


_DIALABLE = frozenset((Kind.UNKNOWN, Kind.PUBLIC, Kind.MAPPED, Kind.ANNOUNCED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachability:
    """The reachability of this peer, as far as it is known."""

    kind: Kind
    sentence: str
    """The same in words, such as ``port 4001 is mapped by UPnP``."""
    outer_hosts: tuple[str, ...] = ()
    """The IP addresses at which peers in other networks see this one: IPv4 first, at most two of each version."""
    relays: tuple[str, ...] = ()
    """The ids of the peers that relay for this one."""
    punch_hosts: tuple[str, ...] = ()
    """Those of ``outer_hosts`` to which hole punching is likely to succeed. A router that gives IPv4 connections random
    ports may let IPv6 through as it is, so that a peer that is relayed over IPv4 can be punched over IPv6."""

    @property
    def dialable(self) -> bool:
        """True if other peers can dial this one, or if nothing is known that speaks against it."""
        return self.kind in _DIALABLE

    @property
    def punchable(self) -> bool:
        """True if hole punching is likely to succeed, although this peer cannot be dialled."""
        return self.kind is Kind.PUNCHABLE


NOT_KNOWN_YET = "not known yet"
"""The beginning of the sentences that are about to change."""

NOT_ASKED = Reachability(
    kind=Kind.UNKNOWN, sentence=f"{NOT_KNOWN_YET}: no peer of another network has answered"
)
"""The reachability of a peer that has not asked any other peer yet."""


class Barrier(StrEnum):
    """The obstacle between a peer and the peers that dial it, in the words of the sentences."""

    FIREWALL = "firewall"
    """Nothing changes addresses, but inbound connections do not arrive."""
    KEEPS_PORTS = "router that keeps ports"
    """The outer port of a connection is its local port."""
    SAME_FOR_ALL = "router that gives a port the same outer port for all peers"
    """The outer port differs from the local one, but does not depend on the destination."""
    CHANGES_PORTS = "router that changes ports"
    """The outer port differs from the local one. No second peer was there to compare with."""
    SYMMETRIC = "symmetric router"
    """Each destination sees another outer port."""
    NO_LISTENER = "no listener"
    """This process was told not to listen."""
    UNTESTED = "router"
    """No peer was there that could be asked for outer ports."""


PUNCHABLE_BARRIERS = frozenset(
    (Barrier.FIREWALL, Barrier.KEEPS_PORTS, Barrier.SAME_FOR_ALL, Barrier.NO_LISTENER)
)
"""The obstacles through which hole punching works: outer ports can be told before a connection is made."""


def behind(barrier: Barrier, relays: int) -> str:
    """Return the sentence for a peer that cannot be dialled.

    Args:
        relays: the number of peers that relay for it.
    """
    where = "without a listener" if barrier is Barrier.NO_LISTENER else f"behind a {barrier}"
    if barrier in PUNCHABLE_BARRIERS:
        return f"{where}; direct connections by hole punching"
    if not relays:
        return f"{where}; no relay is known yet"
    return f"{where}; traffic is relayed by {relays} peer{'s' if relays > 1 else ''}"


def mapped(port: int, protocol: str) -> str:
    """Return the sentence for a peer whose router passes a port on."""
    return f"port {port} is mapped by {protocol}"


def announced(count: int) -> str:
    """Return the sentence for a peer whose user has named its addresses."""
    return "reachable at the address that was announced" + (f" and {count - 1} more" if count > 1 else "")


PUBLIC_SENTENCE = "public"
BEING_TRIED_SENTENCE = f"{NOT_KNOWN_YET}: other peers are asked to dial this one"
