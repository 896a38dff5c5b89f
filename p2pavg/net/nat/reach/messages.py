"""The messages of ``/p2pavg/reach/1``: one question on a stream, and one answer. No I/O, no clock, no random source.

* **Look:** "at which host and port do you see this connection?" The answer is :class:`Observed`.
* **Dial back:** "open a new connection to this port at the host where you see me." The answer is :class:`DialledBack`,
  after the dial. The host is never in the question, so a peer cannot make another one dial a third party (AutoNAT v2
  lets the asker choose the host, and demands 30 to 100 KB of the asker's bytes for it).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import Message, Port, cut, decoded
from p2pavg.net.limits.sources import MAX_HOST_CHARS, parse_host

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
