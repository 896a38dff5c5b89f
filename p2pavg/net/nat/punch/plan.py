"""The rules of hole punching: whether two peers try, from where to where, when they begin, and when they give up.

This module decides; it does no I/O and has no clock.

Two routers that drop what comes from outside let a connection through that both peers open at once: each router has
seen a packet from inside before the other peer's packet arrives. Both peers must name the right outer port before they
begin, so both routers must give a connection a port that can be predicted (RFC 5382, section 4.3; Ford and others,
"Peer-to-peer communication across network address translators", 2005).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

from msgspec import Meta

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.hosts import MAX_HOST_CHARS, parse_host, version_of
from p2pavg.base.messages import Message, cut, decoded
from p2pavg.net.addresses import MAX_ADDRESS_CHARS
from p2pavg.net.nat.reach.reachability import Reachability

# The messages with which two peers coordinate a punch, on any stream between them.
#
#     asker   Propose   the number of the try, and where the asker's router will show its port: one endpoint for each
#                       version of IP
#     other   Answer    where the other router will show its port; or a refusal with its reason
#     asker   Sync      begin: the other peer at once, the asker half a round trip later
#     both peers connect to each other
#     other   Verdict   the connection is made and its handshakes are done; or they have failed, with the reason
#
# After a failure, the asker may propose the next try. After a refusal, or an answer that it does not accept, it
# closes the stream.
#
# A peer that can be dialled needs no punch. It sends one DialMe with its addresses, and gets one Verdict.

PROTOCOL = "/p2pavg/punch/2"
MAX_MESSAGE_BYTES = 4096
MAX_ADDRESSES = 6
MAX_REASON = 500
_MAX_ENDPOINTS = 2  # one for each version of IP

PeerAddress = Annotated[str, Meta(min_length=1, max_length=MAX_ADDRESS_CHARS)]
"""An address as a peer names it. The dial checks that it is one, and that peer's."""


class PunchProposal(Message, frozen=True, tag="propose"):
    """The proposal of a try, from 1 to TRIES, with the asker's endpoints: one or two, of different versions of IP."""

    attempt: Annotated[int, Meta(ge=1, le=TRIES)]
    endpoints: Annotated[tuple[Endpoint, ...], Meta(min_length=1, max_length=_MAX_ENDPOINTS)]

    def __post_init__(self) -> None:
        if len({endpoint.version for endpoint in self.endpoints}) < len(self.endpoints):
            raise ValueError("two endpoints of one version of IP were proposed")


class PunchAnswer(Message, frozen=True, tag="answer"):
    """The answer to a proposal: the endpoint of the peer that answers, or a ``refusal``, which is the reason.

    ``busy`` is the time in seconds that the peer has needed for its answer. The asker does not count it as a part of
    the round trip, and waits no longer than that for an answer.
    """

    refusal: str = ""
    endpoint: Endpoint | None = None
    # A part of the protocol: an answer of more seconds is refused.
    busy: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.0

    def __post_init__(self) -> None:
        cut(self, refusal=MAX_REASON)
        if bool(self.refusal) == bool(self.endpoint):
            raise ValueError("an answer is either an endpoint or a refusal")


class Sync(Message, frozen=True, tag="sync"):
    """The signal to begin the try that was agreed on."""


class PunchVerdict(Message, frozen=True, tag="verdict"):
    """The result of a try or of a dial at the peer that was asked: ``reason`` is empty if there is a connection."""

    reason: str = ""

    def __post_init__(self) -> None:
        cut(self, reason=MAX_REASON)


class DialMe(Message, frozen=True, tag="dial me"):
    """The request of a peer to be dialled at one of its addresses. The dial checks that they are addresses of it."""

    addresses: Annotated[tuple[PeerAddress, ...], Meta(min_length=1, max_length=MAX_ADDRESSES)]


Request = PunchProposal | DialMe


def decode_request(message: bytes) -> Request:
    """Read the first message of a stream.

    Raises:
        RemoteProtocolError: it is malformed, or of another kind.
    """
    request: Request = decoded(message, Request)
    return request


TRIES = 3
"""Tries of one punch, each with new ports. In the wild, 97.6 % of the punches that succeed do so at the first try."""

PUNCH_SECONDS = 2.5
"""The time for the connections of one try. The system repeats a lost packet after one second, and again after two."""

UPGRADE_SECONDS = 4.0
"""The time for the handshakes on a punched connection: a few round trips, and room for a busy machine."""

LONGEST_ROUND_TRIP = 2.0
"""The longest round trip that is believed. A peer that delays its answer shifts only the begin of its own punch."""

# Routers give outgoing connections no ports below this one. A peer that names such a port wants this process to connect
# to a service.
LOWEST_PORT = 1024


class Endpoint(Message, frozen=True):
    """An IP address, in its shortest form, and a TCP port of 1024 or above.

    Raises:
        ValueError: the host is no such address, or the port is out of range.
    """

    host: Annotated[str, Meta(max_length=MAX_HOST_CHARS)]
    port: int

    def __post_init__(self) -> None:
        address = parse_host(self.host)
        if address is None or str(address) != self.host:
            raise ValueError(f"{self.host!r} is not an IP address in its shortest form")
        if not LOWEST_PORT <= self.port < 65536:
            raise ValueError(f"{self.port} is not a port from {LOWEST_PORT} to 65535")

    @property
    def version(self) -> int:
        """The version of IP: 4 or 6."""
        return version_of(self.host)

    def address_of(self, peer_id: str) -> str:
        """Return the multiaddress of a peer at this endpoint."""
        return f"/ip{self.version}/{self.host}/tcp/{self.port}/p2p/{peer_id}"


def refusal(own: Reachability) -> str:
    """Return the reason for which this peer takes part in no punch; empty if it does."""
    if own.dialable or not own.punch_hosts:
        return f"its router does not allow hole punching ({own.sentence})"
    return ""


def hosts_to_propose(own: Reachability) -> dict[int, str]:
    """Return this peer's outer address of each version of IP that it has: the first one in its list."""
    found: dict[int, str] = {}
    for host in own.punch_hosts:
        found.setdefault(version_of(host), host)
    return found


def choose(attempt: int, own: Reachability, proposed: Sequence[Endpoint]) -> tuple[str, Endpoint] | str:
    """Choose where a try meets: an outer address of this peer and an endpoint of the other one, of the same version.

    IPv6 comes first, because a router that only filters translates no ports. Where both versions are possible, the next
    try takes the other one.

    Returns:
        The pair, or the reason for which there is none.
    """
    own_hosts = hosts_to_propose(own)
    theirs = {endpoint.version: endpoint for endpoint in proposed}
    common = sorted(own_hosts.keys() & theirs.keys(), reverse=True)
    if not common:
        return (
            f"its outer addresses are of IPv{_names(own_hosts)}, and the proposed ones of IPv{_names(theirs)}"
        )
    version = common[(attempt - 1) % len(common)]
    return own_hosts[version], theirs[version]


def _names(versions: Collection[int]) -> str:
    return " and IPv".join(str(version) for version in sorted(versions))


def round_trip(*, sent: float, answered: float, busy: float) -> float:
    """Return the seconds that a message takes to the other peer and back.

    Args:
        sent: the time at which the proposal was sent.
        answered: the time at which its answer arrived.
        busy: the seconds that the other peer has needed for its answer, as it says.
    """
    return min(max(answered - sent - busy, 0.0), LONGEST_ROUND_TRIP)


def begin_of_asker(now: float, trip: float) -> float:
    """Return when the asker begins: when the message that it sends now arrives, and the other peer begins."""
    return now + trip / 2


def check_attempt(attempt: int, *, after: int = 0) -> None:
    """Check the number of a try: each is the one after the try before, and TRIES is the last.

    Raises:
        RemoteProtocolError: it is another number.
    """
    if attempt != after + 1 or attempt > TRIES:
        raise RemoteProtocolError(f"try {attempt} of a punch came after try {after}")
