"""Evidence that a reducer sent different averages of one share to different members. No I/O, no clock.

A reducer signs the averages of its share once an attempt. Two of its signatures about one attempt that name different
digests prove that it lied, without the averages themselves. No roster is needed: the signed bytes name the group.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from p2pavg.allreduce.proofs import PART_DIGEST_BYTES, Subject, is_signed
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_RULE_CHARS
from p2pavg.base.messages import Hash, Message
from p2pavg.consensus.votes import Ballot, Members, Position, Signature
from p2pavg_dht.identity import PEER_ID_LENGTH

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
