"""Evidence that a reducer sent different averages of one share to different members. No I/O, no clock.

A reducer signs the averages of its share once an attempt. Two of its signatures about one attempt that name different
digests prove that it lied, without the averages themselves. No roster is needed: the signed bytes name the group.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2pavg.allreduce.proofs import PART_DIGEST_BYTES, Subject, is_signed
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.limits import MAX_MEMBERS
from p2pavg.base.messages import checked, pack, unpack
from p2pavg.consensus.votes import MAX_BALLOT, SIGNATURE_BYTES
from p2pavg_dht.identity import PEER_ID_LENGTH

TWO_AVERAGES = "p2pavg-two-averages/1"
"""The first field of this kind of evidence."""
MAX_EVIDENCE_BYTES = 4096
GROUP_ID_BYTES = 32


@dataclass(frozen=True, slots=True, order=True)
class Output:
    """One signature of a reducer about the averages of its share."""

    digest: bytes
    """Of the share."""
    inputs: bytes
    """Digest of the contributions, as the reducer has signed it."""
    signature: bytes


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
    two = tuple((one.digest, one.inputs, one.signature) for one in sorted((a, b)))
    return pack(
        TWO_AVERAGES,
        reducer,
        subject.group_id,
        subject.attempt,
        subject.members,
        subject.aggregation,
        position,
        *two,
    )


def read_two_averages(data: bytes) -> tuple[str, Subject]:
    """Return the reducer that lied and the attempt in which it did, from bytes of :func:`encode_two_averages`.

    Raises:
        RemoteProtocolError: the bytes are malformed, not canonical, or prove nothing.
    """
    if len(data) > MAX_EVIDENCE_BYTES:
        raise RemoteProtocolError(f"evidence of {len(data)} bytes")
    types = (str, str, bytes, int, tuple, str, int, tuple, tuple)
    kind, reducer, group_id, attempt, members, aggregation, position, *two = unpack(data, *types)
    if kind != TWO_AVERAGES or len(reducer) != PEER_ID_LENGTH or len(group_id) != GROUP_ID_BYTES:
        raise RemoteProtocolError("evidence of another kind, or about no peer or no group")
    checked(members, (int,) * len(members))
    if len(members) > MAX_MEMBERS or members != tuple(sorted(set(members))) or position not in members:
        raise RemoteProtocolError("evidence whose members are too many, out of order, or without the accused")
    if not 0 <= attempt <= MAX_BALLOT or not 0 <= members[0] <= members[-1] < MAX_MEMBERS:
        raise RemoteProtocolError("evidence about an impossible attempt or member")
    subject = Subject(group_id, attempt, members, aggregation)
    first, second = (_read_output(fields) for fields in two)
    if not _contradict(reducer, subject, position, first, second):
        raise RemoteProtocolError("two signatures that do not contradict each other, or are forged")
    if encode_two_averages(reducer, subject, position, first, second) != data:
        raise RemoteProtocolError("evidence that is not canonical")
    return reducer, subject


def _read_output(fields: tuple[object, ...]) -> Output:
    digest, inputs, signature = checked(fields, (bytes, bytes, bytes))
    lengths = (len(digest), len(inputs), len(signature))
    if lengths != (PART_DIGEST_BYTES, PART_DIGEST_BYTES, SIGNATURE_BYTES):
        raise RemoteProtocolError("evidence with a digest or a signature of another length")
    return Output(digest, inputs, signature)


def _contradict(reducer: str, subject: Subject, position: int, a: Output, b: Output) -> bool:
    return a.digest != b.digest and all(
        is_signed(reducer, one.signature, subject.share_bytes(position, one.inputs, one.digest))
        for one in (a, b)
    )
