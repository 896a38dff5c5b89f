"""Evidence that a reducer lied: one part, its signed inputs and its signed average. No I/O, no clock, no random source.

Any program that has these bytes can check them: the members signed what is in them, and the average is computed again.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta

from p2pavg.allreduce.events import BadContributionError
from p2pavg.allreduce.proofs import PART_DIGEST_BYTES, SignedShare, Subject, is_signed, part_digest
from p2pavg.allreduce.reduction import NormCheck, PartContribution, bytes_of, decoded, reduce_part, scaled
from p2pavg.allreduce.robust import largest_kept
from p2pavg.allreduce.vector.buffers import FRESH
from p2pavg.base.errors import ConfigError, RemoteProtocolError
from p2pavg.base.limits import MAX_GROUP_SIZE, MAX_RULE_CHARS
from p2pavg.base.messages import Count, Message, pack
from p2pavg.base.numbers import bounded_weights
from p2pavg.consensus.votes import SIGNATURE_BYTES, Ballot, Members, Position
from p2pavg.group.aggregation import Aggregation, RobustRule, check_combinable, read_aggregation
from p2pavg.group.roster import Roster, ShareCutter, norm_factors, read_roster
from p2pavg.group.shares import part_size
from p2pavg.net.transport import Buffer
from p2pavg.verification.audit.layout import InputManifest, Share, check_inputs, check_manifest, read_manifest
from p2pavg_compression import MAX_MAGNITUDE, Codec, CodecError, resolve_codec

# The question of an audit: is this the average of these contributions?
#
# The auditor reduces a part again and compares bits. In nearly all cases, the bits are equal. But two processors, or
# two versions of a library, may round a sum of floats differently in the last bit. No honest reducer may be taken for
# a liar because of that. So where bits differ, each value may be off by rounding, and by no more:
#
# * the average as sent is as close to the exact result as the best encoding is, plus a rounding error of
#   `ROUNDING` times the largest contribution to that value. With a robust rule, only what the rule keeps of the
#   contributions counts: a reducer's own values reach no other member, so it can show any.
#
# A liar can use this freedom, but it moves each value by 1.5e-5 of the largest contribution to it at most.

ROUNDING = 2.0**-16
"""Of float32 sums of up to 128 contributions, each rounded to 24 bits, with a reserve of a factor of two."""


def what_is_wrong(
    codec: Codec,
    roster: Roster,
    aggregation: Aggregation,
    values: Sequence[torch.Tensor | Buffer],
    elements: int,
    average: Buffer,
) -> str:
    """Return why a part's average is not that of its contributions; empty if it is.

    Args:
        roster: of the attempt.
        values: of each contributor, in the roster's order: what the codec made of its part, or float32 values (the
            reducer's own).
        elements: length of the part.
        average: the part's average, as the reducer has sent it.
    """
    factors = norm_factors(roster, aggregation.max_norm)
    contributions = [
        PartContribution(member.peer_id, member.weight, value, factors.get(member.peer_id, 1.0))
        for member, value in zip(roster.contributors, values, strict=True)
    ]
    # What others sent is checked when it is decoded. A reducer shows its own values as they are, and with NaN in them
    # there is no average at all.
    for contribution in contributions:
        own = contribution.values
        if isinstance(own, torch.Tensor) and not bool((own.abs() <= MAX_MAGNITUDE).all()):
            peer_id = contribution.peer_id
            return f"it averaged a contribution of {peer_id} that counts in no round: its values are out of range"
    exact = FRESH.floats(elements)
    check = None if aggregation.max_norm is None else NormCheck(roster)
    try:
        if check is not None:  # the reduction does not check a reducer's own values
            for contribution in contributions:
                if isinstance(contribution.values, torch.Tensor):
                    check.take(contribution.peer_id, contribution.values)
        reduce_part(codec, contributions, roster.total_weight, exact, robust=aggregation.robust, check=check)
    except BadContributionError as error:
        return f"it averaged a contribution of {error.peer_id} that counts in no round: {error}"
    exact.clamp_(-MAX_MAGNITUDE, MAX_MAGNITUDE)
    coded = codec.averages
    best = bytes_of(exact) if coded.is_identity else coded.encode(exact)
    if bytes(best) == bytes(average):
        return ""
    try:
        sent = coded.decode(average, elements, FRESH.floats(elements)).double()
    except CodecError as error:
        return f"its average does not decode: {error}"
    nearest = coded.decode(best, elements, FRESH.floats(elements)).double()
    largest = _largest(codec, contributions, elements, aggregation.robust).double()
    precise = exact.double()
    allowed = (nearest - precise).abs() + ROUNDING * (largest + sent.abs())
    wrong = int(((sent - precise).abs() > allowed).sum())
    return f"{wrong} of {elements} values of a part are not the average of the contributions" if wrong else ""


def _largest(
    codec: Codec, contributions: Sequence[PartContribution], elements: int, robust: RobustRule | None
) -> torch.Tensor:
    """Return the largest magnitude of what is averaged to each value."""
    rows = (
        scaled(contribution, decoded(codec, contribution, FRESH.floats(elements)))
        for contribution in contributions
    )
    if robust is not None:
        weights = bounded_weights([contribution.weight for contribution in contributions])
        return largest_kept(robust, list(rows), weights)
    largest = FRESH.floats(elements).zero_()
    for row in rows:
        torch.maximum(largest, row.abs(), out=largest)
    return largest


FALSE_AVERAGE = "p2pavg-false-average/1"
MAGIC = pack(FALSE_AVERAGE)
"""Evidence of every kind begins with a message whose first field names the kind."""
MAX_EVIDENCE_BYTES = 32 * 2**20
MAX_ROSTER_BYTES = 2**18

_LENGTH = struct.Struct(">I")


class EvidenceSubject(Message, frozen=True):
    """The part of a share that evidence is about."""

    attempt: Ballot
    members: Members
    reducer: Position
    aggregation: Annotated[str, Meta(max_length=MAX_RULE_CHARS)]
    index: Count
    """Of the part among those of the share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FalseAverage:
    """One part of a share, with everything that was signed about it."""

    roster: Roster
    """Of the whole group."""
    share: Share
    signed: SignedShare
    manifest: InputManifest
    """It may be about more parts than this one."""
    index: int
    inputs: Sequence[Buffer]
    average: Buffer

    def why(self) -> str:
        """Return why the average is false; empty if it is the average of the inputs."""
        return what_is_wrong(
            self.share.codec,
            self.share.roster,
            self.share.aggregation,
            self.share.values(self.inputs),
            self.share.parts[self.index].elements,
            self.average,
        )

    def pack(self) -> bytes:
        """Return the bytes that :func:`read_false_average` reads."""
        subject, roster = self.share.subject, self.roster.pack()
        members = frozenset(subject.members)
        about = EvidenceSubject(
            subject.attempt, members, self.share.position, subject.aggregation, self.index
        ).encode()
        own = {self.index: self.manifest.own[self.index]} if self.share.contributes else {}
        return b"".join(
            (
                MAGIC,
                _LENGTH.pack(len(roster)),
                roster,
                _LENGTH.pack(len(about)),
                about,
                self.signed.trailer,
                *self.signed.digests,
                InputManifest(self.manifest.inputs, own).pack(),
                *map(bytes, self.inputs),
                bytes(self.average),
            )
        )


def read_false_average(data: bytes) -> FalseAverage:
    """Read evidence that a reducer lied, and check everything that was signed in it. It may prove nothing: see ``why``.

    Raises:
        RemoteProtocolError: the bytes are malformed, or something in them is not signed.
    """
    if len(data) > MAX_EVIDENCE_BYTES or not data.startswith(MAGIC):
        raise RemoteProtocolError("no evidence of a false average")
    reader = _EvidenceReader(data, len(MAGIC))
    roster = read_roster(reader.message(MAX_ROSTER_BYTES))
    share, index = _read_share(roster, reader.message(MAX_ROSTER_BYTES), len(data))
    count = len(share.parts)
    if not 0 <= index < count:
        raise RemoteProtocolError(f"evidence about part {index} of {count}")
    inputs_digest, signature = reader.take(PART_DIGEST_BYTES), reader.take(SIGNATURE_BYTES)
    digests = tuple(reader.take(PART_DIGEST_BYTES) for _ in range(count))
    manifest = read_manifest(share, [index], reader.take(share.manifest_bytes(1)))
    part = share.parts[index]
    inputs = [reader.take(size) for size in share.input_bytes(part)]
    average = reader.take(share.codec.averages.encoded_nbytes(part.elements))
    reader.end()
    message = share.subject.output_bytes(share.position, inputs_digest, digests)
    if not is_signed(share.reducer, signature, message):
        raise RemoteProtocolError("averages that the accused has not signed")
    if part_digest(average) != digests[index]:
        raise RemoteProtocolError("another average than the accused has signed")
    check_manifest(share, manifest, inputs_digest)
    check_inputs(share, manifest, index, inputs)
    return FalseAverage(
        roster=roster,
        share=share,
        signed=SignedShare(inputs_digest, digests, signature),
        manifest=manifest,
        index=index,
        inputs=inputs,
        average=average,
    )


def _read_share(roster: Roster, about: bytes, total_bytes: int) -> tuple[Share, int]:
    said = EvidenceSubject.decode(about)
    members, reducer = tuple(sorted(said.members)), said.reducer
    if reducer not in members or members[-1] >= len(roster.members):
        raise RemoteProtocolError("evidence about members that the roster has not")
    if len(roster.contributors) > MAX_GROUP_SIZE:
        raise RemoteProtocolError(f"evidence about a group of {len(roster.contributors)} contributors")
    try:
        codec = resolve_codec(roster.members[0].codec)
        rule = read_aggregation(said.aggregation)
        # A few bytes of such contributions would take seconds to combine.
        check_combinable(rule.robust, codec)
    except (ConfigError, ValueError) as error:
        raise RemoteProtocolError(f"evidence about an unknown codec or rule: {error}") from None
    elements = sum(roster.shares)
    cutter = ShareCutter(elements, codec.granularity, rule.topology)
    of_attempt = roster.among(said.attempt, members, cutter)
    parts = max(of_attempt.shares) // part_size(elements, len(roster.members))
    if parts * PART_DIGEST_BYTES > total_bytes:  # each part has a digest in the evidence
        raise RemoteProtocolError("evidence about more parts than it has digests")
    share = Share(
        subject=Subject(roster.group_id, said.attempt, members, said.aggregation),
        roster=of_attempt,
        reducer=roster.members[reducer].peer_id,
        codec=codec,
        aggregation=rule,
        positions={roster.members[member].peer_id: member for member in members},
    )
    return share, said.index


class _EvidenceReader:
    """Takes evidence apart. Every length is checked before anything is copied."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = memoryview(data)
        self._at = at

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise RemoteProtocolError("evidence that ends too early")
        self._at += count
        return bytes(self._data[self._at - count : self._at])

    def message(self, most: int) -> bytes:
        (length,) = _LENGTH.unpack(self.take(_LENGTH.size))
        if length > most:
            raise RemoteProtocolError(f"evidence with a message of {length} bytes")
        return self.take(length)

    def end(self) -> None:
        if self._at != len(self._data):
            raise RemoteProtocolError("evidence with bytes after its end")
