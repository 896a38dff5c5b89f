"""The messages of a gate's socket. No I/O, no clock.

Each connection to the socket begins with one :data:`GateRequest` of the program and its answer, each preceded by its
length. What follows depends on the request:

* After :class:`Attach`, the program sends :class:`ServeProtocol`, :class:`RememberPeer`, :class:`TellNotice` and
  :class:`TellUpdate`, and the gate what is new: :class:`PeerNews`, :class:`ConnectionNews`, :class:`InboundStream`. The
  program is attached until it closes this one.
* After :class:`AskStream` and :class:`TakeStream`, both sides send chunks of the stream: four bytes of length, and as
  many bytes. Length 0 closes that half. A connection that ends without it was reset.
* After all others, the program may ask again.

The program is a stranger's: the gate takes nothing of it for granted.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from p2pavg.base.limits import MAX_TIMEOUT_SECONDS
from p2pavg.base.messages import Count, Message, cut
from p2pavg.net.nat.reach.reachability import Kind, Reachability

MAX_GATE_BYTES = 256 * 1024
"""Of one message. A record that is signed has a few kilobytes, and the bytes that the members of a group sign up to
32 for each part of a share."""
MAX_NOTICE_BYTES = 1024
CHUNK_LENGTH_BYTES = 4
MAX_CHUNK_BYTES = 256 * 1024
MAX_LIST = 64
MAX_ANSWERS = 256  # peers of one look: those of the largest group, and as many others

GateId = Annotated[str, Meta(max_length=128)]
GateText = Annotated[str, Meta(max_length=2000)]
GateTexts = Annotated[tuple[GateText, ...], Meta(max_length=MAX_LIST)]
ProtocolName = Annotated[str, Meta(min_length=1, max_length=128)]
WaitSeconds = Annotated[float, Meta(ge=0.0, le=MAX_TIMEOUT_SECONDS)]


# ---------------------------------------------------------------------- of the program


class Attach(Message, frozen=True, tag=0):
    """The program begins to use the network."""


class ServeProtocol(Message, frozen=True, tag=1):
    """The program answers inbound streams of a protocol from now on."""

    protocol: ProtocolName


class RememberPeer(Message, frozen=True, tag=2):
    """See :meth:`p2pavg.net.transport.Transport.remember_peer`."""

    peer_id: GateId
    companion: bool


class AskStream(Message, frozen=True, tag=3):
    """See :meth:`p2pavg.net.transport.Transport.open_stream`."""

    peer_id: GateId
    protocol: ProtocolName
    addresses: GateTexts
    timeout: WaitSeconds
    wait_inbound: bool


class TakeStream(Message, frozen=True, tag=4):
    """The program takes an inbound stream that it was told of."""

    number: Count


class DialAddress(Message, frozen=True, tag=5):
    """See :meth:`p2pavg.net.transport.Transport.dial`."""

    address: GateText
    timeout: WaitSeconds


class DropConnections(Message, frozen=True, tag=6):
    """See :meth:`p2pavg.net.transport.Transport.disconnect`."""

    peer_id: GateId


class Settle(Message, frozen=True, tag=7):
    """See :meth:`p2pavg.net.transport.Transport.settle`."""


class AskSignature(Message, frozen=True, tag=8):
    """The program asks for this peer's signature of a message."""

    message: Annotated[bytes, Meta(max_length=MAX_GATE_BYTES)]


class TellNotice(Message, frozen=True, tag=9):
    """The program's peer has read a notice that the run's authority is said to have signed."""

    notice: Annotated[bytes, Meta(max_length=MAX_NOTICE_BYTES)]


class TellUpdate(Message, frozen=True, tag=10):
    """The program has taken an update of the run."""

    epoch: Count
    certificate: Annotated[bytes, Meta(max_length=MAX_GATE_BYTES - MAX_NOTICE_BYTES)]
    metric: Annotated[str, Meta(max_length=64)]
    """Name of what it measures; empty if it measures nothing."""
    value: Annotated[float, Meta(ge=-1e300, le=1e300)]


GateRequest = Attach | AskStream | TakeStream | DialAddress | DropConnections | Settle | AskSignature
"""The first message of a connection."""
ProgramTold = TellNotice | TellUpdate
ProgramNews = ServeProtocol | RememberPeer | ProgramTold


# ---------------------------------------------------------------------- of the gate


class PeerNews(Message, frozen=True, tag=0):
    """The ways in which others reach this peer."""

    peer_id: GateId
    addresses: GateTexts
    kind: Kind
    sentence: GateText
    outer_hosts: GateTexts
    relays: GateTexts
    punch_hosts: GateTexts

    @property
    def reachability(self) -> Reachability:
        """The same as an object."""
        return Reachability(
            kind=self.kind,
            sentence=self.sentence,
            outer_hosts=self.outer_hosts,
            relays=self.relays,
            punch_hosts=self.punch_hosts,
        )


class ConnectionNews(Message, frozen=True, tag=1):
    """A connection to a peer was made, or the last one has ended."""

    peer_id: GateId
    is_open: bool


class InboundStream(Message, frozen=True, tag=2):
    """Another peer has opened a stream; it waits to be taken."""

    number: Count
    protocol: ProtocolName


class AnswerNews(Message, frozen=True, tag=8):
    """The systems of these peers have acknowledged something since the last look.

    See :meth:`p2pavg.net.transport.Transport.answers`.
    """

    peer_ids: Annotated[tuple[GateId, ...], Meta(max_length=MAX_ANSWERS)]


class StopProgram(Message, frozen=True, tag=7):
    """The program is to end soon, as after Ctrl-C."""


class StreamOpened(Message, frozen=True, tag=3):
    """The stream that was asked for, or taken, follows."""

    remote: GateId
    remote_host: GateText
    remote_port: Annotated[int, Meta(ge=0, lt=1 << 16)]
    relayed: bool


class GateDone(Message, frozen=True, tag=4):
    """The request was carried out."""

    text: GateText = ""
    """The id of the peer that was dialled."""


class Signature(Message, frozen=True, tag=5):
    """This peer's signature."""

    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class GateError(Message, frozen=True, tag=6):
    """The request was not carried out."""

    name: Annotated[str, Meta(max_length=32)]
    """Of the error's class."""
    reason: str

    def __post_init__(self) -> None:
        cut(self, reason=2000)


GateAnswer = PeerNews | StreamOpened | GateDone | Signature | GateError
GateNews = PeerNews | ConnectionNews | InboundStream | AnswerNews | StopProgram


def news_of(peer_id: str, addresses: tuple[str, ...], reachability: Reachability) -> PeerNews:
    """Return how others reach a peer, as a message."""
    return PeerNews(
        peer_id,
        addresses[:MAX_LIST],
        reachability.kind,
        reachability.sentence,
        reachability.outer_hosts,
        reachability.relays[:MAX_LIST],
        reachability.punch_hosts,
    )
