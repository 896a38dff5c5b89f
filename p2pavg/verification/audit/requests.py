"""The request of an auditor: the result that it holds, and the signature from which it was drawn. No I/O, no clock."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.consensus.statements import RESULT_BYTES, Statement
from p2pavg.consensus.votes import SIGNATURE_BYTES
from p2pavg.group.audits import Audits

REQUEST_BYTES = RESULT_BYTES + SIGNATURE_BYTES
ANSWER_PIECE_SECONDS = 0.005
"""Time that the link takes for the bytes of an answer that are sent at once. The messages of the next round wait behind
them."""
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 2**14, 60 * 2**10
"""Limits of the bytes that are sent at once. Each piece costs the event loop about as much as its bytes do. The longest
one fits into one frame of the connection."""
UNKNOWN_PIECE_BYTES = 2**15
"""Bytes that are sent at once as long as the bandwidth is not known."""
ANSWER_PART = 1 / 8
"""Part of this peer's bandwidth that an answer takes, if it does not take too long."""

_TICKET_DOMAIN = b"p2pavg-ticket/1\0"


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """The message that follows the header of an audit."""

    digest: bytes
    """:func:`~p2pavg.consensus.statements.result_digest` of the result that the auditor holds."""
    ticket: bytes
    """The auditor's signature of :func:`ticket_bytes`."""

    def pack(self) -> bytes:
        """Return the request's bytes."""
        return self.digest + self.ticket


def ticket_bytes(audits: Audits, statement: Statement) -> bytes:
    """Return the bytes whose signature decides what a member audits.

    After a round, this is the statement that the member has signed in the round: the reducer has seen that signature,
    and knows which inputs it need not keep. Before the end of a round, it is another statement: the first one would
    be a vote that the member has not cast yet.
    """
    return _TICKET_DOMAIN + statement.signed_bytes() if audits.before else statement.signed_bytes()


def seconds_a_byte(total: int, mbps: float) -> float:
    """Return the least time from one byte of an answer to the next, for an audit after the end of a round.

    Such an answer is large and not urgent. On the next round, all members wait for the messages of the slowest one.

    Args:
        total: bytes of the answer.
        mbps: this peer's bandwidth in Mbit/s, as far as it is known.
    """
    # Time that an answer takes at most, if the link carries it.
    return min(8 / (ANSWER_PART * mbps * 1e6), REPLY_SECONDS / max(total, 1))


def answer_pieces(nbytes: int, mbps: float) -> list[range]:
    """Return the pieces in which bytes of an answer are sent, as ranges of positions among them.

    Args:
        nbytes: number of the bytes.
        mbps: this peer's bandwidth in Mbit/s; 0 if it is not known.
    """
    if not nbytes:
        return []
    most = UNKNOWN_PIECE_BYTES
    if mbps:
        most = min(max(int(mbps * 1e6 / 8 * ANSWER_PIECE_SECONDS), MIN_PIECE_BYTES), MAX_PIECE_BYTES)
    count = -(-nbytes // most)
    edges = [piece * nbytes // count for piece in range(count + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]


def read_request(data: bytes) -> AuditRequest:
    """Read a request. Its signature is not checked.

    Raises:
        RemoteProtocolError: it has another length.
    """
    if len(data) != REQUEST_BYTES:
        raise RemoteProtocolError(f"an audit's request of {len(data)} bytes")
    return AuditRequest(data[:RESULT_BYTES], data[RESULT_BYTES:])
