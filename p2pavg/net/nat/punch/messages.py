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

from typing import Annotated

from msgspec import Meta

from p2pavg.base.messages import Message, cut, decoded
from p2pavg.net.addresses import MAX_ADDRESS_CHARS
from p2pavg.net.nat.punch.plan import TRIES, Endpoint

PROTOCOL = "/p2pavg/punch/2"
MAX_MESSAGE_BYTES = 4096
MAX_ADDRESSES = 6
MAX_BUSY_SECONDS = 10.0
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
    the round trip.
    """

    refusal: str = ""
    endpoint: Endpoint | None = None
    busy: Annotated[float, Meta(ge=0.0, le=MAX_BUSY_SECONDS)] = 0.0

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
