"""Signatures over the inputs and the averages of a share, which prove later that a reducer lied. No I/O, no clock.

* A **reducer** signs the digests of its averages, in every group. The signature follows the last average. So a reducer
  cannot deny its averages, and no member can name another digest of them unless the reducer has signed that one too
  (:mod:`p2pavg.consensus.agreement` decides by it which of the two lies).

In a group with audits, there is more:

* A **contributor** signs, for each reducer, the digests of all parts that it sends it. The signature follows the last
  part. So a reducer cannot invent the contributions of other members.
* A reducer signs its averages together with the signed digests of the contributions that they are made of. So no
  contributor can sign another contribution afterwards to make a correct average look false.

A reducer's own contribution is sent to no other member, and is signed only when the share is audited
(:mod:`p2pavg.verification.audit`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from msgspec import Meta

from p2pavg.allreduce.messages import Lane
from p2pavg.allreduce.reduction import PartTracker
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_RULE_CHARS
from p2pavg.base.messages import Hash, Message, pack
from p2pavg.consensus.votes import SIGNATURE_BYTES, Ballot, Members, Position, Signature
from p2pavg.net.transport import Buffer
from p2pavg_dht import Signer
from p2pavg_dht.identity import PEER_ID_LENGTH, PeerIdError, public_key_of

PART_DIGEST_BYTES = 32
INPUT_TRAILER_BYTES = SIGNATURE_BYTES
OUTPUT_TRAILER_BYTES = PART_DIGEST_BYTES + SIGNATURE_BYTES

_INPUT_DOMAIN = b"p2pavg-input/1\0"
_INPUTS_DOMAIN = b"p2pavg-inputs/1\0"
_OUTPUT_DOMAIN = b"p2pavg-output/1\0"


@dataclass(frozen=True, slots=True)
class Subject:
    """The exchange that a statement is about. Members are named by their positions in the group's roster."""

    group_id: bytes
    attempt: int
    members: tuple[int, ...]
    """Members of the attempt, in ascending order."""
    aggregation: str
    """Text of the rule that combines contributions."""

    def input_bytes(self, reducer: int, digests: Iterable[bytes]) -> bytes:
        """Return the bytes that a contributor signs about the parts that it sent to a reducer."""
        return _INPUT_DOMAIN + self._pack(reducer, joined(digests))

    def output_bytes(self, reducer: int, inputs: bytes, digests: Iterable[bytes]) -> bytes:
        """Return the bytes that a reducer signs about its averages. ``inputs`` is :func:`inputs_digest`."""
        return self.share_bytes(reducer, inputs, joined(digests))

    def share_bytes(self, reducer: int, inputs: bytes, digest: bytes) -> bytes:
        """Return the same bytes, from the digest of the whole share that each member tells its leader."""
        return _OUTPUT_DOMAIN + self._pack(reducer, inputs + digest)

    def own_bytes(self, domain: bytes, reducer: int, index: int, digest: bytes) -> bytes:
        """Return the bytes that a reducer signs about one part of its own contribution."""
        return domain + self._pack(reducer, index.to_bytes(4, "big") + digest)

    def _pack(self, reducer: int, content: bytes) -> bytes:
        return pack(self.group_id, self.attempt, self.members, self.aggregation, reducer, content)


def part_digest(payload: Buffer) -> bytes:
    """Return the BLAKE3 digest of a part as it is sent."""
    return blake3(payload).digest()


def joined(digests: Iterable[bytes]) -> bytes:
    """Return one digest of the digests of a share's parts."""
    return blake3(b"".join(digests)).digest()


def inputs_digest(contributions: Iterable[Sequence[bytes]]) -> bytes:
    """Return one digest of the digests of all contributions to a share, in the roster's order.

    The reducer's own contribution is not among them.
    """
    return blake3(_INPUTS_DOMAIN + b"".join(map(joined, contributions))).digest()


def is_signed(peer_id: str, signature: bytes, message: bytes) -> bool:
    """Return whether a peer has signed a message."""
    try:
        public_key_of(peer_id).verify(signature, message)
    except (InvalidSignature, PeerIdError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class SignedShare:
    """A reducer's signature of its averages, and the digests that it signed."""

    inputs: bytes
    """:func:`inputs_digest` of the contributions, as the reducer has signed it."""
    digests: tuple[bytes, ...]
    """Of each part's average, as it was sent."""
    signature: bytes

    @property
    def trailer(self) -> bytes:
        """The bytes that follow the last average of the share."""
        return self.inputs + self.signature


class Proofs:
    """The signatures and digests of one attempt, at one member. Safe to use from any thread.

    Two calls about the same part must not overlap.

    Args:
        audited: true in a group with audits. Contributors sign what they send in such a group only.
    """

    def __init__(
        self,
        subject: Subject,
        ledger: PartTracker,
        signer: Signer,
        positions: dict[str, int],
        *,
        audited: bool = True,
    ) -> None:
        self.audited = audited
        self.subject = subject
        self.positions = positions
        """Position of each member in the roster of the whole group."""
        self._me = ledger.me
        self._signer = signer
        self._contributors = tuple(ledger.contributors)
        own = len(ledger.parts[ledger.me])
        self._sent = {peer_id: [b""] * len(parts) for peer_id, parts in ledger.parts.items()}
        self._came = {peer_id: [b""] * own for peer_id in ledger.contributors}
        self._signatures: dict[str, bytes] = {}
        self._shares: dict[str, SignedShare] = {}
        self._lock = threading.Lock()

    # ------------------------------------------------------------------ contributions

    def sends(self, reducer: str, index: int, payload: Buffer) -> None:
        """Note a part that goes to a reducer."""
        self._sent[reducer][index] = part_digest(payload)

    def sign_input(self, reducer: str) -> bytes:
        """Return this member's signature of all parts that it has sent to a reducer."""
        message = self.subject.input_bytes(self.positions[reducer], self._sent[reducer])
        return self._signer.sign(message)

    def sent(self, reducer: str) -> list[bytes]:
        """Return the digests of the parts that were sent to a reducer, from the first one on."""
        return list(itertools.takewhile(bool, self._sent[reducer]))

    def were_sent(self, reducer: str, digests: Sequence[bytes]) -> None:
        """Note the first parts that went to a reducer, in an earlier attempt."""
        self._sent[reducer][: len(digests)] = digests

    def came(self, contributor: str) -> list[bytes]:
        """Return the digests of the parts that have come from a contributor; empty bytes for the others."""
        return list(self._came[contributor])

    def have_come(self, contributor: str, digests: Sequence[bytes]) -> None:
        """Note the first parts that came from a contributor, in an earlier attempt."""
        self._came[contributor][: len(digests)] = digests

    def receives(self, contributor: str, index: int, payload: Buffer) -> None:
        """Note a part that came from a contributor."""
        self._came[contributor][index] = part_digest(payload)

    def check_input(self, contributor: str, signature: bytes) -> None:
        """Check a contributor's signature of all parts that came from it, and keep it.

        Raises:
            RemoteProtocolError: it has not signed these parts.
        """
        message = self.subject.input_bytes(self.positions[self._me], self._came[contributor])
        if not is_signed(contributor, signature, message):
            raise RemoteProtocolError("its signature of the parts that it sent does not verify")
        with self._lock:
            self._signatures[contributor] = signature

    def inputs(self) -> list[tuple[bytes, list[bytes]]]:
        """Return each other contributor's signature and the digests of its parts, in the roster's order."""
        with self._lock:
            return [(self._signatures[peer_id], self._came[peer_id]) for peer_id in self._contributors]

    # ------------------------------------------------------------------ averages

    def sign_output(self, digests: Sequence[bytes]) -> SignedShare:
        """Sign the averages of this member's share, once. All of them must be there."""
        with self._lock:
            if self._me not in self._shares:
                inputs = inputs_digest(self._came[peer_id] for peer_id in self._contributors)
                message = self.subject.output_bytes(self.positions[self._me], inputs, digests)
                self._shares[self._me] = SignedShare(inputs, tuple(digests), self._signer.sign(message))
            return self._shares[self._me]

    def check_output(self, reducer: str, digests: Sequence[bytes], trailer: bytes) -> None:
        """Check a reducer's signature of its averages, and keep it.

        Raises:
            RemoteProtocolError: it has not signed these averages.
        """
        inputs, signature = trailer[:PART_DIGEST_BYTES], trailer[PART_DIGEST_BYTES:]
        message = self.subject.output_bytes(self.positions[reducer], inputs, digests)
        if not is_signed(reducer, signature, message):
            raise RemoteProtocolError(f"the signature of {reducer} under its averages does not verify")
        with self._lock:
            self._shares[reducer] = SignedShare(inputs, tuple(digests), signature)

    def share(self, reducer: str) -> SignedShare:
        """Return what a reducer has signed of its averages. It must be there."""
        with self._lock:
            return self._shares[reducer]


def trailer_bytes(proofs: Proofs | None, kind: Lane) -> int:
    """Return the number of bytes that follow the last part of a kind."""
    if proofs is None:
        return 0
    if kind is not Lane.CONTRIBUTIONS:
        return OUTPUT_TRAILER_BYTES
    return INPUT_TRAILER_BYTES if proofs.audited else 0


# Evidence that a reducer sent different averages of one share to different members.
#
# A reducer signs the averages of its share once an attempt. Two of its signatures about one attempt that name
# different digests prove that it lied, without the averages themselves. No roster is needed: the signed bytes name
# the group.

TWO_AVERAGES = "p2pavg-two-averages/1"
"""The first field of this kind of evidence."""
MAX_EVIDENCE_BYTES = 4096
_PartDigest = Annotated[bytes, Meta(min_length=PART_DIGEST_BYTES, max_length=PART_DIGEST_BYTES)]


class Output(Message, frozen=True, order=True):
    """One signature of a reducer about the averages of its share."""

    digest: _PartDigest
    """Of the share."""
    inputs: _PartDigest
    """Digest of the contributions, as the reducer has signed it."""
    signature: Signature


class TwoAverages(Message, frozen=True, tag=TWO_AVERAGES):
    """Two signatures of one reducer about one attempt, in order."""

    reducer: Annotated[str, Meta(min_length=PEER_ID_LENGTH, max_length=PEER_ID_LENGTH)]
    group_id: Hash
    attempt: Ballot
    members: Members
    aggregation: Annotated[str, Meta(max_length=MAX_RULE_CHARS)]
    position: Position
    first: Output
    second: Output

    def __post_init__(self) -> None:
        if self.position not in self.members:
            raise ValueError("evidence without the accused among the members")
        if self.first > self.second:
            raise ValueError("evidence that is not in order")


def encode_two_averages(reducer: str, subject: Subject, position: int, a: Output, b: Output) -> bytes:
    """Return two signatures of one reducer as bytes, the same for either order.

    Args:
        reducer: its peer id.
        subject: the attempt that both are about.
        position: the reducer's in the roster of the group.

    Raises:
        ValueError: they prove nothing.
    """
    if not _contradict(reducer, subject, position, a, b):
        raise ValueError("the two signatures do not contradict each other")
    first, second = sorted((a, b))
    members = frozenset(subject.members)
    about = (reducer, subject.group_id, subject.attempt, members, subject.aggregation, position)
    return TwoAverages(*about, first, second).encode()


def read_two_averages(data: bytes) -> tuple[str, Subject]:
    """Return the reducer that lied and the attempt in which it did, from bytes of :func:`encode_two_averages`.

    Raises:
        RemoteProtocolError: the bytes are malformed, not canonical, or prove nothing.
    """
    if len(data) > MAX_EVIDENCE_BYTES:
        raise RemoteProtocolError(f"evidence of {len(data)} bytes")
    said = TwoAverages.decode(data)
    subject = Subject(said.group_id, said.attempt, tuple(sorted(said.members)), said.aggregation)
    if not _contradict(said.reducer, subject, said.position, said.first, said.second):
        raise RemoteProtocolError("two signatures that do not contradict each other, or are forged")
    return said.reducer, subject


def _contradict(reducer: str, subject: Subject, position: int, a: Output, b: Output) -> bool:
    return a.digest != b.digest and all(
        is_signed(reducer, one.signature, subject.share_bytes(position, one.inputs, one.digest))
        for one in (a, b)
    )
