"""Ports, bootstrap addresses, clocks, versions of other peers, and reachability. No I/O, no clock, no random source."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from p2pavg.base.formats import count
from p2pavg.base.hosts import parse_host
from p2pavg.runs.records.hello import SKEW_SECONDS, HelloAnswer, other_versions, wrong_clock
from p2pavg.tools.doctor.findings import Finding, fault, not_known, note, ok, warning

# ------------------------------------------------------------------ ports


class PortState(StrEnum):
    """The result of an attempt to listen at an address."""

    FREE = "free"
    TAKEN = "taken"
    FORBIDDEN = "forbidden"
    NO_SUCH_HOST = "no such host"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """An address to listen on."""

    address: str
    port: int
    state: PortState
    owner: str = ""
    """The process that listens there, such as ``nginx (process 812)``; empty if the system does not tell."""
    is_this_peer: bool = False
    """True if a peer with this peer's own id listens there."""
    error: str = ""
    """The system's words for a failure of another kind."""


def judge_ports(ports: Sequence[Port]) -> list[Finding]:
    """Judge the addresses to listen on."""
    if not ports:
        return [note("port", "this peer does not listen", "no --listen address was named")]
    return [_judge_port(port) for port in ports]


def _judge_port(port: Port) -> Finding:
    if port.state is PortState.FREE:
        # With port 0 the system chooses a free one at each start.
        if port.port == 0:
            return ok("port", f"{port.address} takes any free port; a forwarded port needs a fixed one")
        return ok("port", f"{port.address} is free")
    # The doctor may run beside the peer that it examines.
    if port.state is PortState.TAKEN and port.is_this_peer:
        return ok("port", f"{port.address} is held by this peer, which runs already")
    owner = port.owner or "another process, which the system does not name to this user"
    causes = {
        PortState.TAKEN: (f"port {port.port} is in use by {owner}", "end that process, or take another port"),
        PortState.FORBIDDEN: (
            f"the system does not let this user listen on port {port.port}",
            "take a port above 1023",
        ),
        PortState.NO_SUCH_HOST: (
            "no interface of this machine has that address",
            f"listen on all interfaces: /ip4/0.0.0.0/tcp/{port.port}",
        ),
        PortState.FAILED: (port.error, "take another address to listen on"),
    }
    return fault("port", f"{port.address} cannot be listened on", *causes[port.state])


# ------------------------------------------------------------------ bootstrap addresses


class DialOutcome(StrEnum):
    """The outcome of dialling an address."""

    REACHED = "reached"
    OWN = "own"
    NAME_UNKNOWN = "name unknown"
    NO_NAME_SERVER = "no name server"
    NO_ROUTE = "no route"
    FORBIDDEN = "forbidden"
    REFUSED = "refused"
    TIMED_OUT = "timed out"
    OTHER_SERVICE = "other service"
    SILENT = "silent"
    CLOSED = "closed"
    OTHER_PEER = "other peer"
    NOT_BEHIND = "not behind the relay"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialled:
    """An address of a peer, and what dialling it led to."""

    address: str
    host: str
    port: int
    peer_id: str
    answer: DialOutcome
    detail: str = ""
    """The first words of another service, the id of another peer, or the text of an error."""
    seconds: float = 0.0
    """The duration of the dial that reached the peer."""


def judge_bootstrap(dialled: Sequence[Dialled]) -> list[Finding]:
    """Judge the bootstrap addresses. One that is reached is enough; then the others are warnings."""
    if not dialled:
        return [
            not_known("bootstrap", "no address was named: add --bootstrap ADDR, or --run FILE with addresses")
        ]
    # One address that answers is enough to join the network.
    level = warning if any(each.answer is DialOutcome.REACHED for each in dialled) else fault
    found = []
    for each in dialled:
        if each.answer is DialOutcome.REACHED:
            found.append(ok("bootstrap", f"{each.address} answered in {each.seconds:.2f} s"))
        # A run file lists the peers that are usually online, and this one may be among them.
        elif each.answer is DialOutcome.OWN:
            what = f"{each.address} is this peer itself"
            found.append(note("bootstrap", what, "its id is that of the key file"))
        else:
            found.append(level("bootstrap", f"{each.address} is not reached", *_why(each)))
    return found


def _why(each: Dialled) -> tuple[str, str]:
    """Return cause and remedy of an address that is not reached."""
    host, port, detail = each.host, each.port, each.detail
    compare = "compare the address with the one that the peer prints when it starts"
    causes = {
        DialOutcome.NAME_UNKNOWN: (
            f"the name {host} is unknown",
            "correct the name, or use the peer's IP address",
        ),
        DialOutcome.NO_NAME_SERVER: (
            f"no name server answers, so {host} is not looked up",
            "connect this machine to the network, and look at its DNS settings",
        ),
        DialOutcome.NO_ROUTE: (
            f"no route leads from this machine to {host}",
            "connect this machine to the network; an IPv6 address needs IPv6 here",
        ),
        DialOutcome.FORBIDDEN: (
            f"this machine's own firewall forbids connections to {host} port {port}",
            "allow outgoing TCP connections to that port",
        ),
        # The machine itself answers, so it is on, and nothing on the way drops the connection.
        DialOutcome.REFUSED: (
            f"{host} refuses connections to port {port}: no process listens there, or the port is wrong",
            f"start the peer there, and {compare}",
        ),
        # Not even a refusal comes back.
        DialOutcome.TIMED_OUT: (
            f"{host} port {port} does not answer: a firewall or router drops the connection, or the machine is off",
            f"allow inbound TCP connections to port {port} there, or forward the port in its router; {compare}",
        ),
        # It answers with words that are not libp2p's greeting.
        DialOutcome.OTHER_SERVICE: (
            f"port {port} of {host} is the port of another service"
            + (f", which says {detail!r}" if detail else ""),
            compare,
        ),
        # The system accepts connections for a program that hangs.
        DialOutcome.SILENT: (
            f"a process accepts connections to {host} port {port} and says nothing",
            f"it hangs, or it is another service: start the peer again, and {compare}",
        ),
        DialOutcome.CLOSED: (
            f"{host} port {port} accepts the connection and closes it at once",
            f"it is another service, a router in between, or a peer that is full; {compare}",
        ),
        # The listener has proved another peer id than that of the address.
        DialOutcome.OTHER_PEER: (
            f"another peer is there: {detail}, not {each.peer_id}",
            "its key file is new or another one: use the address that it prints now",
        ),
        # The relay itself is reached, so the fault lies between it and the peer.
        DialOutcome.NOT_BEHIND: (
            f"the relay at {host} port {port} answers, and leads to no peer {each.peer_id}: {detail}",
            "the peer has left, or has taken other relays: use an address that it announces now",
        ),
    }
    return causes.get(each.answer, (detail or "dialling failed without a reason", compare))


# ------------------------------------------------------------------ answers of other peers


def judge_clock(heard: Sequence[HelloAnswer] | None) -> list[Finding]:
    """Judge this machine's clock by those of other peers.

    Args:
        heard: answers of peers; ``None`` if no peer could be asked.
    """
    if not heard:
        return [not_known("clock", "no other peer was reached, so clocks are not compared")]
    if sentence := wrong_clock(heard):
        what = "this machine's clock is wrong, so other peers ignore what this one says"
        remedy = "set the clock, and keep it right: `timedatectl set-ntp true`"
        return [fault("clock", what, sentence.removesuffix("; set it"), remedy)]
    # One clock that is off is that peer's own matter, and no fault of this machine.
    most = max(abs(answer.ahead) for answer in heard)
    if most > SKEW_SECONDS:
        cause = f"the clock of one is {most:.0f} s off, and the median agrees with this machine"
        return [note("clock", f"it agrees with most of {len(heard)} peers", cause)]
    return [ok("clock", f"it agrees with {count(len(heard), 'peer')}")]


def judge_versions(mine: Sequence[str], heard: Sequence[HelloAnswer] | None) -> list[Finding]:
    """Judge the versions of the protocols of other peers.

    Args:
        mine: the protocols that this version of p2pavg serves.
    """
    if not heard:
        return [not_known("version", "no other peer was reached, so versions are not compared")]
    sentence = other_versions(mine, heard)
    if not sentence:
        return [ok("version", f"same protocols as {count(len(heard), 'peer')}")]
    what = "other peers run another version of p2pavg, and do not meet this one"
    return [fault("version", what, sentence, "install the same version of p2pavg on all peers")]


# ------------------------------------------------------------------ reachability


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkReach:
    """The reachability of this machine, as peers in other networks have found it."""

    kind: str
    """``public``, ``mapped``, ``announced``, ``punchable``, ``relayed`` or ``unknown``."""
    sentence: str
    outer_hosts: tuple[str, ...] = ()
    """The IP addresses at which other peers see this machine."""


def is_outside(host: str, own_hosts: Collection[str]) -> bool:
    """Return whether a peer at a host is on another machine, so that it can say how others see this one.

    Args:
        host: an IP address or a name; a name counts as another machine.
        own_hosts: IP addresses of this machine's interfaces.
    """
    address = parse_host(host)
    return address is None or not (address.is_loopback or str(address) in own_hosts)


def judge_reach(
    reach: NetworkReach | None, own_hosts: Collection[str], port: int, *, listens: bool
) -> list[Finding]:
    """Judge the outer address, the firewall, the router and the port mapping.

    Args:
        reach: ``None`` if no peer was asked.
        own_hosts: IP addresses of this machine's interfaces.
        port: the port on which the examined peer listens.
        listens: false if that port could not be listened on.
    """
    cause = ""
    if not listens:
        cause = "the port could not be listened on, so no peer could be asked to dial it"
    elif reach is None:
        cause = "no peer in another network was asked to dial this one"
    elif reach.kind == "unknown":
        cause = reach.sentence or "no peer in another network was asked to dial this one"
    if reach is None or cause:
        names = ("outer address", "firewall", "router", "port mapping")
        return [not_known(name, cause) for name in names]
    outer = ", ".join(reach.outer_hosts)
    seen = f"others see this machine at {outer}"
    found = [ok("outer address", seen) if outer else not_known("outer address", "untold")]
    # Others see an address that no interface of this machine has, so a router translates.
    routed = bool(reach.outer_hosts) and not set(reach.outer_hosts) & set(own_hosts)
    can_be_dialled = reach.kind in ("public", "mapped", "announced")
    # From outside, a firewall on this machine cannot be told from the router before it.
    if can_be_dialled:
        found.append(ok("firewall", "others can dial this peer"))
    elif routed:
        found.append(note("firewall", "others cannot dial this peer", "a router is in between; see there"))
    else:
        cause = f"no router translates addresses, so a firewall drops inbound connections to port {port}"
        remedy = (
            f"allow inbound TCP connections to port {port} in this machine's firewall, and in the provider's"
        )
        found.append(warning("firewall", "others cannot dial this peer", cause, remedy))
    if not routed:
        none = "this machine has its outer address itself"
        return [*found, ok("router", none), note("port mapping", "not needed", none)]
    if can_be_dialled:
        mapped = reach.sentence if reach.kind == "mapped" else "the port is forwarded already"
        return [*found, ok("router", reach.sentence), ok("port mapping", mapped)]
    # Providers give their customers addresses of this range, behind a router of their own.
    shared = any((address := parse_host(host)) is not None and address in _CGNAT for host in own_hosts)
    cause = (
        "the provider's router is in between too (CGNAT), and forwards no ports"
        if shared
        else "a router is in between"
    )
    remedy = "forward the port in the router, turn on UPnP or NAT-PMP there, or listen on IPv6"
    # Through a router that keeps ports, holes can be punched. Without that, only relays are left.
    level = warning if reach.kind == "relayed" else note
    unmapped = "the router has no UPnP and no NAT-PMP, or they are off"
    return [
        *found,
        level("router", reach.sentence, cause, remedy),
        note("port mapping", "no port is mapped", unmapped, remedy),
    ]


_CGNAT = ipaddress.ip_network("100.64.0.0/10")  # RFC 6598


# Addresses that the user wants to announce.


@dataclass(slots=True, kw_only=True)
class Announced:
    """An address to announce, and what other peers have found out about it."""

    address: str
    host: str
    port: int
    seen_at: list[str] = field(default_factory=list)
    """IP addresses at which the asked peers see this machine."""
    reached: int = 0
    """Peers that have dialled the address."""
    failures: list[str] = field(default_factory=list)
    """The reason of each peer that could not dial it."""


def judge_announced(found: Sequence[Announced], *, listens: bool) -> list[Finding]:
    """Judge each address to announce.

    Args:
        listens: false if the examined peer's port could not be listened on, for example because the peer runs.
    """
    if found and not listens:
        cause = "the port could not be listened on, so no peer could be asked to dial it"
        return [not_known("announced", cause)]
    return [_judge(each) for each in found]


def _judge(each: Announced) -> Finding:
    if each.reached:
        return ok("announced", f"{count(each.reached, 'other peer')} dialled {each.address}")
    same = [host for host in each.seen_at if _version(host) == _version(each.host)]
    if not same:
        cause = f"no peer that could be asked is connected over the kind of IP of {each.address}"
        return not_known("announced", cause)
    if each.host not in same:
        return warning(
            "announced",
            f"others see this machine at {', '.join(sorted(set(same)))}, and not at {each.host}",
            f"{each.address} is another machine's address, or an earlier one of this machine",
            "announce the address at which others see this machine, or leave out --announce",
        )
    if not each.failures:
        return not_known("announced", f"no peer was willing to dial {each.address}")
    remedy = (
        f"forward port {each.port} of the router to the port of --listen on this machine, and allow it in the "
        "firewall; or leave out --announce"
    )
    return fault("announced", f"others cannot dial {each.address}", each.failures[0], remedy)


def _version(host: str) -> int | None:
    address = parse_host(host)
    return None if address is None else address.version
