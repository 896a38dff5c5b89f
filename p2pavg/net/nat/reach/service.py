"""The protocol ``/p2pavg/reach/1``: tell other peers how this one sees them, dial them back, and ask the same.

A stream carries one question and one answer:

* **Look:** "at which host and port do you see this connection?" The answer is :class:`Observed`.
* **Dial back:** "open a new connection to this port at the host where you see me." The answer is :class:`DialledBack`,
  after the dial. The host is never in the question, so a peer cannot make another one dial a third party (AutoNAT v2
  lets the asker choose the host, and demands 30 to 100 KB of the asker's bytes for it).
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Annotated

import trio
from msgspec import Meta

from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.hosts import MAX_HOST_CHARS, parse_host
from p2pavg.base.limits import QUICK_REPLY_SECONDS, REPLY_SECONDS
from p2pavg.base.messages import Message, Port, cut, decoded
from p2pavg.net.limits.dial_policy import NOT_REACHED
from p2pavg.net.limits.rate import Accounts, TokenBucket, take_from_all
from p2pavg.net.transport import PeerId, Stream, Transport, receive_message, send_message

logger = logging.getLogger(__name__)

# -- messages

PROTOCOL = "/p2pavg/reach/1"
MAX_MESSAGE_BYTES = 512
NONCE_BYTES = 16
MAX_REASON_CHARS = 200
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class DialBackOutcome(StrEnum):
    """The ways in which a dial-back ends."""

    REACHED = "reached"
    """A new connection was opened, and the asker's identity was proved on it."""
    FAILED = "failed"
    """No connection could be opened."""
    REFUSED = "refused"
    """Nothing was dialled, because of a limit. It says nothing about the port."""


class Look(Message, frozen=True, tag="look"):
    """The question for the asker's host and port."""


class DialBack(Message, frozen=True, tag="dial back"):
    """The question to dial the asker."""

    port: Port
    nonce: Nonce
    """Random bytes that the answer repeats."""


class Observed(Message, frozen=True, tag="observed"):
    """The answer to :class:`Look`.

    Raises:
        ValueError: the host is no IP address.
    """

    host: Annotated[str, Meta(max_length=MAX_HOST_CHARS)]
    """An IP address in its normal form, IPv4 not inside IPv6."""
    port: Port

    def __post_init__(self) -> None:
        address = parse_host(self.host)
        if address is None or str(address) != self.host or address.is_unspecified:
            raise ValueError(f"{self.host!r} is no IP address in its normal form")


class DialledBack(Message, frozen=True, tag="dialled back"):
    """The answer to :class:`DialBack`."""

    nonce: Nonce
    outcome: DialBackOutcome
    reason: str = ""
    """The cause in words, for logs, unless the outcome is REACHED."""

    def __post_init__(self) -> None:
        cut(self, reason=MAX_REASON_CHARS)


Question = Look | DialBack
Answer = Observed | DialledBack


def read_question(message: bytes) -> Question:
    """Return the question in a message. Raises RemoteProtocolError if it is none."""
    question: Question = decoded(message, Question)
    return question


def read_dialled_back(message: bytes, nonce: bytes) -> DialledBack:
    """Return the answer to the :class:`DialBack` with this nonce.

    Raises:
        RemoteProtocolError: it is none, or the answer to another question.
    """
    answer = DialledBack.decode(message)
    if answer.nonce != nonce:
        raise RemoteProtocolError("an answer to another question than this dial-back")
    return answer


# -- service

MAX_SERVED = 64
"""Streams that are served at once; each takes less than a KiB."""
MAX_SERVED_PER_PEER = 2

# Dials for others. AutoNAT v2 of go-libp2p serves 60 requests a minute in all and 12 of a peer. A peer asks for each of
# its ports and each version of IP once when it starts, and again after minutes. Several peers of one home ask from one
# host.
MAX_DIALS_AT_ONCE = 8
PEER_DIALS, PEER_DIALS_PER_SECOND = 6.0, 0.1
HOST_DIALS, HOST_DIALS_PER_SECOND = 12.0, 0.2
ALL_DIALS, ALL_DIALS_PER_SECOND = 60.0, 1.0

# Looks take a stream each, and no dial.
PEER_LOOKS, PEER_LOOKS_PER_SECOND = 30.0, 1.0

DialPeer = Callable[[PeerId, str, int], Awaitable[None]]
"""Open a NEW connection to a peer at one IP address and port, prove its identity, and close it or keep it.

Raises UnreachableError with the reason. An existing connection to the peer must not count.
"""


class ReachService:
    """Answers the questions of other peers.

    A dial goes only to the host from which the asker's own, direct connection comes, and counts against the limits of
    the asker, its host, and all together. So what strangers can cause is a few dials a minute of a host that has just
    opened a connection to this peer. The answer to a dial that failed is one fixed word.

    Args:
        dial_peer: opens a new connection for a dial-back.
    """

    def __init__(self, transport: Transport, dial_peer: DialPeer) -> None:
        self._dial_peer = dial_peer
        self._serving: Counter[PeerId] = Counter()
        self._dialling: set[PeerId] = set()
        self._lookers = Accounts(PEER_LOOKS_PER_SECOND, PEER_LOOKS)
        self._peers = Accounts(PEER_DIALS_PER_SECOND, PEER_DIALS)
        self._hosts = Accounts(HOST_DIALS_PER_SECOND, HOST_DIALS)
        self._all = TokenBucket(ALL_DIALS_PER_SECOND, ALL_DIALS)
        transport.serve(PROTOCOL, self.serve)

    async def serve(self, stream: Stream) -> None:
        """Answer one question; streams beyond the limits get no answer."""
        if self._serving[stream.remote] >= MAX_SERVED_PER_PEER or self._serving.total() >= MAX_SERVED:
            return
        self._serving[stream.remote] += 1
        try:
            with trio.move_on_after(REPLY_SECONDS):
                if (message := await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)) is None:
                    return
                question = read_question(message)
                if isinstance(question, Look):
                    answer = self._observe(stream)
                else:
                    answer = await self._dial_back(stream, question)
                if answer is not None:
                    await send_message(stream, answer.encode())
                    await stream.aclose()
        finally:
            self._serving[stream.remote] -= 1
            self._serving += Counter()  # drops the peers without a stream

    def _observe(self, stream: Stream) -> Answer | None:
        """Return the host and port of a direct connection; ``None`` if there is no answer to give."""
        address = parse_host(stream.remote_host)
        if stream.relayed or address is None or not stream.remote_port:
            return None
        if not take_from_all(trio.current_time(), 1.0, self._lookers.of(stream.remote)):
            return None
        return Observed(str(address), stream.remote_port)

    async def _dial_back(self, stream: Stream, question: DialBack) -> Answer:
        reason = self._refusal(stream)
        if reason:
            return DialledBack(question.nonce, DialBackOutcome.REFUSED, reason)
        self._dialling.add(stream.remote)
        try:
            with trio.fail_after(QUICK_REPLY_SECONDS):
                await self._dial_peer(stream.remote, stream.remote_host, question.port)
        except (UnreachableError, trio.TooSlowError) as error:
            logger.debug("%s asked to be dialled back at port %d: %r", stream.remote, question.port, error)
            return DialledBack(question.nonce, DialBackOutcome.FAILED, NOT_REACHED)
        finally:
            self._dialling.discard(stream.remote)
        return DialledBack(question.nonce, DialBackOutcome.REACHED)

    def _refusal(self, stream: Stream) -> str:
        """Return the reason against a dial; if there is none, take it from the budgets and return an empty text."""
        if stream.relayed or parse_host(stream.remote_host) is None:
            return "dial-backs are for direct connections"
        if stream.remote in self._dialling:
            return "another dial-back of this peer is under way"
        if len(self._dialling) >= MAX_DIALS_AT_ONCE:
            return f"{MAX_DIALS_AT_ONCE} dial-backs are under way"
        accounts = (self._peers.of(stream.remote), self._hosts.of(stream.remote_host), self._all)
        if not take_from_all(trio.current_time(), 1.0, *accounts):
            return "too many dial-backs in a minute"
        return ""


async def ask_to_look(transport: Transport, peer_id: PeerId) -> Observed:
    """Ask a connected peer how it sees this one.

    Raises:
        UnreachableError: no answer came within QUICK_REPLY_SECONDS, or an invalid one.
    """
    message = await _ask(transport, peer_id, Look(), QUICK_REPLY_SECONDS)
    try:
        return Observed.decode(message)
    except RemoteProtocolError as error:
        raise UnreachableError(f"{peer_id} gave an invalid answer: {error}") from None


async def ask_dial_back(transport: Transport, peer_id: PeerId, port: int) -> DialledBack:
    """Ask a connected peer to dial this one back at a port.

    The answer alone proves nothing: only a new inbound connection of that peer does.

    Raises:
        UnreachableError: no answer came in time, or an invalid one.
    """
    question = DialBack(port, secrets.token_bytes(NONCE_BYTES))
    message = await _ask(transport, peer_id, question, 2 * QUICK_REPLY_SECONDS)  # it dials, and then answers
    try:
        return read_dialled_back(message, question.nonce)
    except RemoteProtocolError as error:
        raise UnreachableError(f"{peer_id} gave an invalid answer: {error}") from None


async def _ask(transport: Transport, peer_id: PeerId, question: Look | DialBack, timeout: float) -> bytes:
    stream: Stream | None = None
    try:
        with trio.fail_after(timeout):
            stream = await transport.open_stream(peer_id, PROTOCOL, timeout=timeout)
            await send_message(stream, question.encode())
            answer = await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)
    except trio.TooSlowError:
        raise UnreachableError(f"{peer_id} did not answer within {timeout:.0f} s") from None
    except (StreamBrokenError, RemoteProtocolError, ClosedError) as error:
        raise UnreachableError(f"{peer_id} gave no answer: {error}") from None
    finally:
        if stream is not None:
            await stream.reset()
    if answer is None:
        raise UnreachableError(f"{peer_id} gave no answer")
    return answer
