"""The messages of ``/p2pavg/reach/1``: one question on a stream, and one answer. No I/O, no clock, no random source.

* **Look:** "at which host and port do you see this connection?" The answer is :class:`Observed`.
* **Dial back:** "open a new connection to this port at the host where you see me." The answer is :class:`DialledBack`,
  after the dial. The host is never in the question, so a peer cannot make another one dial a third party (AutoNAT v2
  lets the asker choose the host, and demands 30 to 100 KB of the asker's bytes for it).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from p2pavg.base.encoding import first_text, pack, unpack
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.peer_text import PeerText
from p2pavg.net.limits.sources import parse_host

PROTOCOL = "/p2pavg/reach/1"
MAX_MESSAGE_BYTES = 512
NONCE_BYTES = 16
MAX_REASON_CHARS = 200
MAX_HOST_CHARS = 45  # an IPv6 address in its longest form


class DialBackOutcome(StrEnum):
    """The ways in which a dial-back ends."""

    REACHED = "reached"
    """A new connection was opened, and the asker's identity was proved on it."""
    FAILED = "failed"
    """No connection could be opened."""
    REFUSED = "refused"
    """Nothing was dialled, because of a limit. It says nothing about the port."""


@dataclass(frozen=True, slots=True)
class Look:
    """The question for the asker's host and port."""


@dataclass(frozen=True, slots=True)
class DialBack:
    """The question to dial the asker.

    Raises:
        ValueError: the port or the nonce is out of range.
    """

    port: int
    nonce: bytes
    """Random bytes that the answer repeats."""

    def __post_init__(self) -> None:
        if not 0 < self.port < 1 << 16 or len(self.nonce) != NONCE_BYTES:
            raise ValueError(f"no dial-back to port {self.port} with a nonce of {len(self.nonce)} bytes")


@dataclass(frozen=True, slots=True)
class Observed:
    """The answer to :class:`Look`.

    Raises:
        ValueError: the host is no IP address, or the port is out of range.
    """

    host: str
    """An IP address in its normal form, IPv4 not inside IPv6."""
    port: int

    def __post_init__(self) -> None:
        address = parse_host(self.host[:MAX_HOST_CHARS])
        if address is None or str(address) != self.host or address.is_unspecified:
            raise ValueError(f"{self.host[:MAX_HOST_CHARS]!r} is no IP address in its normal form")
        if not 0 < self.port < 1 << 16:
            raise ValueError(f"no connection has the port {self.port}")


@dataclass(frozen=True, slots=True)
class DialledBack:
    """The answer to :class:`DialBack`.

    Raises:
        ValueError: the nonce or the reason is too long.
    """

    nonce: bytes
    outcome: DialBackOutcome
    reason: str = ""
    """The cause in words, for logs, unless the outcome is REACHED."""

    def __post_init__(self) -> None:
        if len(self.nonce) != NONCE_BYTES or len(self.reason) > MAX_REASON_CHARS:
            raise ValueError("an answer to a dial-back with a nonce or a reason that is too long")


Question = Look | DialBack
Answer = Observed | DialledBack

_LOOK, _DIAL_BACK, _OBSERVED, _DIALLED_BACK = "look", "dial back", "observed", "dialled back"


def encode(message: Question | Answer) -> bytes:
    """Return the bytes of a question or an answer."""
    match message:
        case Look():
            return pack(_LOOK)
        case DialBack(port, nonce):
            return pack(_DIAL_BACK, port, nonce)
        case Observed(host, port):
            return pack(_OBSERVED, host, port)
        case DialledBack(nonce, outcome, reason):
            return pack(_DIALLED_BACK, nonce, str(outcome), reason)


def read_question(message: bytes) -> Question:
    """Return the question in a message. Raises RemoteProtocolError for anything that :func:`encode` does not make."""
    try:
        match first_text(message):
            case "look":
                unpack(message, str)
                return Look()
            case "dial back":
                _, port, nonce = unpack(message, str, int, bytes)
                return DialBack(port, nonce)
            case other:
                raise RemoteProtocolError(f"an unknown question {other!r}")
    except ValueError as error:
        raise RemoteProtocolError(str(error)) from None


def read_observed(message: bytes) -> Observed:
    """Return the answer to :class:`Look`. Raises RemoteProtocolError for anything that :func:`encode` does not make."""
    kind, host, port = unpack(message, str, str, int)
    try:
        if kind == _OBSERVED:
            return Observed(host, port)
    except ValueError as error:
        raise RemoteProtocolError(str(error)) from None
    raise RemoteProtocolError(f"an answer {kind[:64]!r} to a look")


def read_dialled_back(message: bytes, nonce: bytes) -> DialledBack:
    """Return the answer to the :class:`DialBack` with this nonce.

    Raises:
        RemoteProtocolError: anything that :func:`encode` does not make, or the answer to another question.
    """
    kind, repeated, outcome, reason = unpack(message, str, bytes, str, str)
    if kind != _DIALLED_BACK or repeated != nonce:
        raise RemoteProtocolError("an answer to another question than this dial-back")
    try:
        return DialledBack(repeated, DialBackOutcome(outcome), PeerText(reason))
    except ValueError as error:
        raise RemoteProtocolError(str(error)) from None
