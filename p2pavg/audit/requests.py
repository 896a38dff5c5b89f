"""The request of an auditor: the result that it holds, and the signature from which it was drawn. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from p2pavg.consensus.statements import RESULT_BYTES, Statement
from p2pavg.consensus.votes import SIGNATURE_BYTES
from p2pavg.errors import RemoteProtocolError
from p2pavg.group.audits import Audits

REQUEST_BYTES = RESULT_BYTES + SIGNATURE_BYTES

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


def read_request(data: bytes) -> AuditRequest:
    """Read a request. Its signature is not checked.

    Raises:
        RemoteProtocolError: it has another length.
    """
    if len(data) != REQUEST_BYTES:
        raise RemoteProtocolError(f"an audit's request of {len(data)} bytes")
    return AuditRequest(data[:RESULT_BYTES], data[RESULT_BYTES:])
