"""The inputs of this member's own share, which it shows to the members that audit it. No I/O, no clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from p2pavg.allreduce.proofs import Proofs, is_signed, part_digest
from p2pavg.allreduce.reduction import bytes_of
from p2pavg.allreduce.values import AttemptData
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.consensus.statements import RESULT_BYTES, Statement
from p2pavg.consensus.votes import SIGNATURE_BYTES
from p2pavg.group.aggregation import Audits
from p2pavg.net.transport import Buffer
from p2pavg.verification.audit.layout import OWN_DOMAIN, InputManifest, Share
from p2pavg_dht import Signer

# The request of an auditor: the result that it holds, and the signature from which it was drawn.

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


class KeptShare:
    """The inputs that one reducer keeps of one attempt, until its auditors have asked.

    Args:
        share: this member's own.
        digest: of the result, if it is known: an auditor with another one is not answered.
    """

    def __init__(
        self, share: Share, audits: Audits, values: AttemptData, signer: Signer, digest: bytes | None = None
    ) -> None:
        assert values.proofs is not None
        self.share = share
        self._audits = audits
        self._proofs: Proofs = values.proofs
        self._signer = signer
        self._digest = digest
        self._values: AttemptData | None = values
        self._inputs: dict[int, list[Buffer]] = {}
        self._answered: set[str] = set()

    def keep_only(self, indices: Iterable[int]) -> None:
        """Copy the inputs of these parts, and let go of the attempt. Call it when the attempt has ended."""
        assert self._values is not None
        self._inputs = {index: self._live_inputs(self._values, index) for index in indices}
        self._values = None

    def drawn(self, tickets: Mapping[str, bytes]) -> frozenset[int]:
        """Return the parts that the members with these signatures audit."""
        return frozenset(
            index for ticket in tickets.values() for index in self.share.drawn(self._audits, ticket)
        )

    def admit(self, peer_id: str, attempt: int, request: AuditRequest) -> str:
        """Admit a member's request about an attempt, once. Return why it is refused; empty if it is admitted."""
        share = self.share
        if attempt != share.subject.attempt:
            return "it is about another attempt"
        if peer_id not in share.auditors:
            return "it is no member that holds the result"
        if peer_id in self._answered:
            return "it was answered before"
        if self._digest is not None and request.digest != self._digest:
            return "it holds another result"
        subject = share.subject
        statement = Statement(subject.group_id, subject.attempt, frozenset(subject.members), request.digest)
        if not is_signed(peer_id, request.ticket, ticket_bytes(self._audits, statement)):
            return "its signature does not verify"
        indices = share.drawn(self._audits, request.ticket)
        if not indices:
            return "it was not drawn"
        if self._values is not None:
            if not all(self._values.is_ready(part.index) for part in share.parts):
                return "the averages are not there yet"
            # Taken now: the attempt may end, and let go of its memory, while the answer is being made.
            for index in set(indices) - self._inputs.keys():
                self._inputs[index] = self._live_inputs(self._values, index)
        elif not set(indices) <= self._inputs.keys():
            return "the inputs are not kept any more"
        self._answered.add(peer_id)
        return ""

    def answer(self, request: AuditRequest) -> tuple[bytes, list[list[Buffer]]]:
        """Return the manifest, and the inputs of each audited part. It was admitted."""
        indices = self.share.drawn(self._audits, request.ticket)
        inputs = [self._inputs[index] for index in indices]
        own = {}
        if self.share.contributes:
            for index, buffers in zip(indices, inputs, strict=True):
                digest = part_digest(buffers[-1])
                message = self.share.subject.own_bytes(OWN_DOMAIN, self.share.position, index, digest)
                own[index] = (digest, self._signer.sign(message))
        signed = tuple((signature, tuple(digests)) for signature, digests in self._proofs.inputs())
        return InputManifest(signed, own).pack(), inputs

    def _live_inputs(self, values: AttemptData, index: int) -> list[Buffer]:
        came = values.inputs(index)
        inputs = [came[peer_id] for peer_id in self.share.contributors]
        own = values.own_input(self.share.parts[index])
        if isinstance(own, torch.Tensor):
            # A copy: the caller of the round may change its tensors after the end.
            own = bytes_of(own.detach().to("cpu", torch.float32, copy=True))
        if own is not None:
            inputs.append(own)
        return inputs
