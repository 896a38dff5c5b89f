"""Messages between a daemon and local commands: questions and answers. No I/O, no clock, no random source.

A daemon may run for months while the package is upgraded. So an envelope carries each message, with the version of
these messages: both sides check it first, and say what to do.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, structs

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.messages import Count, Message, Seconds, cut, decoded

VERSION = 2
MAX_MESSAGE_BYTES = 64 * 1024
MAX_TEXTS = 64
MAX_TEXT_CHARS = 1024
_Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
_Texts = Annotated[tuple[_Text, ...], Meta(max_length=MAX_TEXTS)]


class Question(StrEnum):
    """The questions that a daemon answers."""

    STATUS = "status"
    """Answered with a :class:`DaemonStatus`."""
    STOP = "stop"
    """End gracefully. Answered with :class:`Done` before the daemon has ended."""


class ControlEnvelope(Message, frozen=True):
    """A question or an answer as bytes, and the version in which it is written."""

    version: Count
    content: bytes


class ControlQuestion(Message, frozen=True):
    """A question as a message."""

    question: Question


class Done(Message, frozen=True, tag="done"):
    """The daemon does what it was told."""


class RefusedRequest(Message, frozen=True, tag="refused"):
    """The daemon does not do what it was asked, for a reason."""

    reason: str

    def __post_init__(self) -> None:
        cut(self, reason=MAX_TEXT_CHARS)


class DaemonStatus(Message, frozen=True, tag="status", kw_only=True):
    """The state of a daemon at one moment. Text is empty, and numbers are 0, where there is nothing to say."""

    version: _Text
    """Version of the daemon's package."""
    pid: Count
    peer_id: _Text
    addresses: _Texts
    """Addresses at which other peers can dial it."""
    reachability: _Text
    """One sentence: how other peers reach it."""
    reach_kind: _Text
    """The same as a word, a value of :class:`p2pavg.net.nat.reach.reachability.Kind`."""
    run_id: _Text
    """The run whose rounds it helps, or whose records it keeps."""
    roles: _Texts
    """Roles that its certificate grants; empty in a run without an authority."""
    leaving: bool
    """It finishes its rounds and then ends."""
    uptime: Seconds
    """Seconds since its start."""
    peers: Count
    """Other peers of the network that answered their last call."""
    run_peers: Count
    """Other peers that have published an entry of the run."""
    rounds: Count
    """Rounds that it has helped."""
    failed_rounds: Count
    round_peers: _Texts
    """Ids of the other members of the last round."""
    elements: Count
    """Elements that it has reduced, in all rounds together."""
    bytes_sent: Count
    bytes_received: Count
    certificate_expires: Seconds
    """Seconds since 1970; 0 without a certificate."""
    training: _Text
    """The work that this machine has given to the training, as a sentence; empty if it runs no job."""
    refusal: _Text
    """The reason for which other members refuse it, such as an expired certificate."""

    def __post_init__(self) -> None:
        for name, value in structs.asdict(self).items():
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str) and not text.isprintable():
                    raise ValueError(f"{name} is no printable text")

    @property
    def is_connected(self) -> bool:
        """True if another peer of the network answers."""
        return self.peers > 0


Answer = DaemonStatus | Done | RefusedRequest


def encode_question(question: Question) -> bytes:
    """Return the bytes of a question."""
    return ControlEnvelope(VERSION, ControlQuestion(question).encode()).encode()


def read_question(data: bytes) -> Question:
    """Read a question.

    Raises:
        RemoteProtocolError: the bytes are no question, or one of another version; the message is for its user.
    """
    return ControlQuestion.decode(_content(data, "this command")).question


def encode_answer(answer: Answer) -> bytes:
    """Return the bytes of an answer."""
    return ControlEnvelope(VERSION, answer.encode()).encode()


def read_answer(data: bytes) -> Answer:
    """Read an answer.

    Raises:
        RemoteProtocolError: the bytes are no answer, or one of another version.
    """
    answer: Answer = decoded(_content(data, "the daemon"), Answer)
    return answer


def _content(data: bytes, whose: str) -> bytes:
    envelope = ControlEnvelope.decode(data)
    if envelope.version != VERSION:
        raise RemoteProtocolError(
            f"{whose} speaks version {envelope.version} of the control messages, and this process version {VERSION}; "
            "start the daemon again with the p2pavg that is installed now"
        )
    return envelope.content
