"""The messages with which two peers coordinate a punch, on any stream between them.

    asker   Propose   the number of the try, and where the asker's router will show its port: one endpoint for each
                      version of IP
    other   Answer    where the other router will show its port; or a refusal with its reason
    asker   Sync      begin: the other peer at once, the asker half a round trip later
    both peers connect to each other
    other   Verdict   the connection is made and its handshakes are done; or they have failed, with the reason

After a failure, the asker may propose the next try. After a refusal, or an answer that it does not accept, it closes
the stream.

A peer that can be dialled needs no punch. It sends one DialMe with its addresses, and gets one Verdict.

No I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from p2pavg.base.encoding import first_text, pack, unpack
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.peer_text import PeerText
from p2pavg.net.addresses import MAX_ADDRESS_CHARS
from p2pavg.net.nat.punch.plan import TRIES, Endpoint

PROTOCOL = "/p2pavg/punch/1"
MAX_MESSAGE_BYTES = 4096
MAX_ADDRESSES = 6
MAX_BUSY_SECONDS = 10.0
MAX_REASON = 500
_MAX_ENDPOINTS = 2  # one for each version of IP

_PROPOSE, _ANSWER, _SYNC, _VERDICT, _DIAL_ME = "propose", "answer", "sync", "verdict", "dial me"


@dataclass(frozen=True, slots=True)
class PunchProposal:
    """The proposal of a try, from 1 to TRIES, with the asker's endpoints: one or two, of different versions of IP."""

    attempt: int
    endpoints: tuple[Endpoint, ...]

    def encode(self) -> bytes:
        """Return the message as bytes."""
        return pack(_PROPOSE, self.attempt, [(found.host, found.port) for found in self.endpoints])

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """Read a message. Raises RemoteProtocolError if it is malformed."""
        kind, attempt, endpoints = unpack(message, str, int, tuple)
        _check_kind(kind, _PROPOSE)
        if not 1 <= attempt <= TRIES or not 1 <= len(endpoints) <= _MAX_ENDPOINTS:
            raise RemoteProtocolError(
                f"try {attempt} of a punch was proposed with {len(endpoints)} endpoints"
            )
        found = tuple(_endpoint(each) for each in endpoints)
        if len({endpoint.version for endpoint in found}) < len(found):
            raise RemoteProtocolError("two endpoints of one version of IP were proposed")
        return cls(attempt, found)


@dataclass(frozen=True, slots=True)
class PunchAnswer:
    """The answer to a proposal: the endpoint of the peer that answers, or a ``refusal``, which is the reason.

    ``busy`` is the time in seconds that the peer has needed for its answer. The asker does not count it as a part of
    the round trip.
    """

    refusal: str = ""
    endpoint: Endpoint | None = None
    busy: float = 0.0

    def encode(self) -> bytes:
        """Return the message as bytes."""
        endpoint = () if self.endpoint is None else (self.endpoint.host, self.endpoint.port)
        return pack(_ANSWER, self.refusal[:MAX_REASON], endpoint, min(self.busy, MAX_BUSY_SECONDS))

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """Read a message. Raises RemoteProtocolError if it is malformed."""
        kind, refusal, endpoint, busy = unpack(message, str, str, tuple, float)
        _check_kind(kind, _ANSWER)
        if not 0.0 <= busy <= MAX_BUSY_SECONDS:
            raise RemoteProtocolError(f"an answer that took {busy} s")
        if refusal:
            return cls(_checked_reason(refusal))
        return cls("", _endpoint(endpoint), busy)


@dataclass(frozen=True, slots=True)
class Sync:
    """The signal to begin the try that was agreed on."""

    def encode(self) -> bytes:
        """Return the message as bytes."""
        return pack(_SYNC)

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """Read a message. Raises RemoteProtocolError if it is malformed."""
        (kind,) = unpack(message, str)
        _check_kind(kind, _SYNC)
        return cls()


@dataclass(frozen=True, slots=True)
class PunchVerdict:
    """The result of a try or of a dial at the peer that was asked: ``reason`` is empty if there is a connection."""

    reason: str = ""

    def encode(self) -> bytes:
        """Return the message as bytes."""
        return pack(_VERDICT, self.reason[:MAX_REASON])

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """Read a message. Raises RemoteProtocolError if it is malformed."""
        kind, reason = unpack(message, str, str)
        _check_kind(kind, _VERDICT)
        return cls(_checked_reason(reason))


@dataclass(frozen=True, slots=True)
class DialMe:
    """The request of a peer to be dialled at one of its addresses. The dial checks that they are addresses of it."""

    addresses: tuple[str, ...]

    def encode(self) -> bytes:
        """Return the message as bytes."""
        return pack(_DIAL_ME, self.addresses[:MAX_ADDRESSES])

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """Read a message. Raises RemoteProtocolError if it is malformed."""
        kind, addresses = unpack(message, str, tuple)
        _check_kind(kind, _DIAL_ME)
        if not 1 <= len(addresses) <= MAX_ADDRESSES:
            raise RemoteProtocolError(f"a peer wants to be dialled at {len(addresses)} addresses")
        for address in addresses:
            if not isinstance(address, str) or not 0 < len(address) <= MAX_ADDRESS_CHARS:
                raise RemoteProtocolError("a message holds an address that is empty, too long or not text")
        return cls(addresses)


Request = PunchProposal | DialMe
_REQUESTS: dict[str, type[Request]] = {_PROPOSE: PunchProposal, _DIAL_ME: DialMe}


def decode_request(message: bytes) -> Request:
    """Read the first message of a stream.

    Raises:
        RemoteProtocolError: it is malformed, or of another kind.
    """
    kind = first_text(message)
    if kind not in _REQUESTS:
        raise RemoteProtocolError(f"a message of the kind {kind!r} came instead of a request")
    return _REQUESTS[kind].decode(message)


def _check_kind(kind: str, wanted: str) -> None:
    if kind != wanted:
        raise RemoteProtocolError(f"a message of the kind {kind[:64]!r} came instead of {wanted!r}")


def _endpoint(fields: object) -> Endpoint:
    if not isinstance(fields, tuple) or len(fields) != 2:
        raise RemoteProtocolError("an endpoint is a host and a port")
    host, port = fields
    if type(host) is not str or type(port) is not int or len(host) > MAX_ADDRESS_CHARS:
        raise RemoteProtocolError("an endpoint is a host and a port")
    try:
        return Endpoint(host, port)
    except ValueError as error:
        raise RemoteProtocolError(f"not an endpoint: {error}") from None


def _checked_reason(reason: str) -> PeerText:
    if len(reason) > MAX_REASON:
        raise RemoteProtocolError(f"a reason of {len(reason)} characters")
    return PeerText(reason)
