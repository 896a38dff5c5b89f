"""Messages between a daemon and local commands: questions and answers. No I/O, no clock, no random source.

Each message is a msgpack array that begins with its kind and the version of these messages. A daemon may run for months
while the package is upgraded, so both sides check the version first and say what to do.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from p2pavg.base.encoding import checked, first_text, pack, unpack
from p2pavg.base.errors import ControlError, RemoteProtocolError
from p2pavg.base.peer_text import PeerText

VERSION = 1
MAX_MESSAGE_BYTES = 64 * 1024
MAX_TEXTS = 64
MAX_TEXT_CHARS = 1024

_STATUS = "status"
_REFUSED = "refused"
_DONE = "done"


class Question(StrEnum):
    """The questions that a daemon answers."""

    STATUS = "status"
    """Answered with a :class:`DaemonStatus`."""
    STOP = "stop"
    """End gracefully. Answered with :class:`Done` before the daemon has ended."""


@dataclass(frozen=True, slots=True)
class Done:
    """The daemon does what it was told."""


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """The daemon does not do what it was asked, for a reason."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonStatus:
    """The state of a daemon at one moment. Text is empty, and numbers are 0, where there is nothing to say."""

    version: str
    """Version of the daemon's package."""
    pid: int
    peer_id: str
    addresses: tuple[str, ...]
    """Addresses at which other peers can dial it."""
    reachability: str
    """One sentence: how other peers reach it."""
    reach_kind: str
    """The same as a word, a value of :class:`p2pavg.net.nat.reach.reachability.Kind`."""
    run_id: str
    """The run whose rounds it helps, or whose records it keeps."""
    roles: tuple[str, ...]
    """Roles that its certificate grants; empty in a run without an authority."""
    leaving: bool
    """It finishes its rounds and then ends."""
    uptime: float
    """Seconds since its start."""
    peers: int
    """Other peers of the network that answered their last call."""
    run_peers: int
    """Other peers that have published an entry of the run."""
    rounds: int
    """Rounds that it has helped."""
    failed_rounds: int
    round_peers: tuple[str, ...]
    """Ids of the other members of the last round."""
    elements: int
    """Elements that it has reduced, in all rounds together."""
    bytes_sent: int
    bytes_received: int
    certificate_expires: float
    """Seconds since 1970; 0 without a certificate."""
    refusal: str
    """The reason for which other members refuse it, such as an expired certificate."""

    def __post_init__(self) -> None:
        for each in fields(self):
            _check(each.name, getattr(self, each.name))

    @property
    def is_connected(self) -> bool:
        """True if another peer of the network answers."""
        return self.peers > 0


Answer = DaemonStatus | Done | RefusedRequest

_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "tuple[str, ...]": tuple}
_STATUS_TYPES = tuple(_TYPES[str(each.type)] for each in fields(DaemonStatus))


def encode_question(question: Question) -> bytes:
    """Return the bytes of a question."""
    return pack(str(question), VERSION)


def read_question(data: bytes) -> Question:
    """Read a question.

    Raises:
        RemoteProtocolError: the bytes are no question, or one of another version; the message is for its user.
    """
    kind, version = unpack(data, str, int)
    _check_version(version, "this command")
    try:
        return Question(kind)
    except ValueError:
        raise RemoteProtocolError(f"unknown question {kind[:40]!r}") from None


def encode_answer(answer: Answer) -> bytes:
    """Return the bytes of an answer."""
    if isinstance(answer, DaemonStatus):
        return pack(_STATUS, VERSION, *(getattr(answer, each.name) for each in fields(answer)))
    if isinstance(answer, RefusedRequest):
        return pack(_REFUSED, VERSION, answer.reason[:MAX_TEXT_CHARS])
    return pack(_DONE, VERSION)


def read_answer(data: bytes) -> Answer:
    """Read an answer.

    Raises:
        RemoteProtocolError: the bytes are no answer, or one of another version.
    """
    kind = first_text(data)
    if kind == _STATUS:
        _, version, *values = unpack(data, str, int, *_STATUS_TYPES)
        _check_version(version, "the daemon")
        return DaemonStatus(
            **{each.name: value for each, value in zip(fields(DaemonStatus), values, strict=True)}
        )
    if kind == _REFUSED:
        _, version, reason = unpack(data, str, int, str)
        return RefusedRequest(PeerText(reason))
    if kind == _DONE:
        unpack(data, str, int)
        return Done()
    raise RemoteProtocolError(f"unknown answer {kind!r}")


def answer_of(data: bytes) -> DaemonStatus | Done:
    """Read an answer that does what was asked.

    Raises:
        ControlError: the daemon refused; the message is the daemon's reason.
        RemoteProtocolError: as :func:`read_answer`.
    """
    answer = read_answer(data)
    if isinstance(answer, RefusedRequest):
        raise ControlError(f"the daemon refused: {answer.reason}")
    return answer


def _check_version(version: int, whose: str) -> None:
    if version != VERSION:
        raise RemoteProtocolError(
            f"{whose} speaks version {version} of the control messages, and this process version {VERSION}; "
            "start the daemon again with the p2pavg that is installed now"
        )


def _check(name: str, value: Any) -> None:
    if isinstance(value, tuple):
        if len(value) > MAX_TEXTS:
            raise RemoteProtocolError(f"{name} has {len(value)} texts, at most {MAX_TEXTS} are allowed")
        checked(value, (str,) * len(value))
        for text in value:
            _check(name, text)
    elif isinstance(value, str):
        if len(value) > MAX_TEXT_CHARS or not value.isprintable():
            raise RemoteProtocolError(f"{name} is no printable text of at most {MAX_TEXT_CHARS} characters")
    elif value < 0:
        raise RemoteProtocolError(f"{name} is below 0")
