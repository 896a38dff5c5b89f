"""The answer of a reducer to an audit: which bytes it consists of, in which order. No I/O, no clock.

The answer has no lengths in it. Both sides compute them from the roster, so nothing is allocated that was not agreed.

1. The **manifest**: each other contributor's signature and the digests of all of its parts, in the roster's order. If
   the reducer contributes itself: for each audited part, the digest of its own values and its signature of that.
2. The **inputs** of each audited part: what each other contributor sent, in the roster's order, then the reducer's own
   values as float32, or encoded if the codec is sparse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from p2pavg.allreduce.proofs import PART_DIGEST_BYTES, Subject, inputs_digest, is_signed, part_digest
from p2pavg.allreduce.reduction import parts_of_share
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.consensus.votes import SIGNATURE_BYTES
from p2pavg.group.aggregation import Aggregation, Audits, drawn_parts
from p2pavg.group.roster import Roster
from p2pavg.group.shares import SharePart
from p2pavg.group.topology import Star
from p2pavg.net.transport import Buffer
from p2pavg_compression import Codec

OWN_DOMAIN = b"p2pavg-own/1\0"


@dataclass(frozen=True, kw_only=True)
class Share:
    """One reducer's share of one attempt, as all members know it.

    Args:
        roster: of the attempt, with its shares.
        position: of the reducer in the roster of the whole group.
        positions: of the attempt's members in the roster of the whole group, by peer id.
    """

    subject: Subject
    roster: Roster
    reducer: str
    codec: Codec
    aggregation: Aggregation
    positions: Mapping[str, int]

    @property
    def position(self) -> int:
        """Position of the reducer in the roster of the whole group."""
        return self.positions[self.reducer]

    @cached_property
    def parts(self) -> tuple[SharePart, ...]:
        """The parts of the share."""
        position = self.roster.position(self.reducer)
        return parts_of_share(self.roster, position, self.codec.granularity)

    @property
    def contributors(self) -> tuple[str, ...]:
        """Ids of the contributors but the reducer, in the roster's order."""
        return tuple(m.peer_id for m in self.roster.contributors if m.peer_id != self.reducer)

    @property
    def contributes(self) -> bool:
        """True if the reducer contributes itself."""
        return any(member.peer_id == self.reducer for member in self.roster.contributors)

    @property
    def auditors(self) -> frozenset[str]:
        """Ids of the members that may audit the share: those that hold the result, but the reducer."""
        return frozenset(member.peer_id for member in self.roster.holders) - {self.reducer}

    def drawn(self, audits: Audits, ticket: bytes) -> tuple[int, ...]:
        """Return the indices of the parts that the member with this signature audits; empty if it is not drawn."""
        # One member that reduces for the whole group is audited like the reducers whose place it takes.
        stretches = self.roster.reducers if isinstance(self.aggregation.topology, Star) else 1
        return drawn_parts(audits, ticket, self.position, len(self.parts), len(self.auditors), stretches)

    def manifest_bytes(self, audited: int) -> int:
        """Return the length of a manifest for so many audited parts."""
        digests = len(self.contributors) * (SIGNATURE_BYTES + len(self.parts) * PART_DIGEST_BYTES)
        return digests + self.contributes * audited * (PART_DIGEST_BYTES + SIGNATURE_BYTES)

    def input_bytes(self, part: SharePart) -> list[int]:
        """Return the lengths of the inputs of one part: of each other contributor, then of the reducer's values."""
        encoded = self.codec.encoded_nbytes(part.elements)
        own = [encoded if self.codec.is_sparse else 4 * part.elements] if self.contributes else []
        return [encoded] * len(self.contributors) + own

    def values(self, inputs: Sequence[Buffer]) -> list[torch.Tensor | Buffer]:
        """Return the inputs of one part in the order of the roster's contributors.

        The reducer's own are values, or encoded if the codec is sparse.
        """
        by_id: dict[str, torch.Tensor | Buffer] = dict(zip(self.contributors, inputs, strict=False))
        if self.contributes:
            own = inputs[-1]
            is_encoded = self.codec.is_sparse
            by_id[self.reducer] = own if is_encoded else torch.frombuffer(bytearray(own), dtype=torch.float32)
        return [by_id[member.peer_id] for member in self.roster.contributors]


@dataclass(frozen=True, slots=True)
class InputManifest:
    """The signatures of a share's inputs."""

    inputs: tuple[tuple[bytes, tuple[bytes, ...]], ...]
    """Each other contributor's signature, and the digests of its parts, in the roster's order."""
    own: Mapping[int, tuple[bytes, bytes]]
    """Digest of the reducer's own values of each audited part, and its signature; empty if it contributes nothing."""

    def pack(self) -> bytes:
        """Return the manifest's bytes."""
        pieces = [signature + b"".join(digests) for signature, digests in self.inputs]
        pieces += [digest + signature for _, (digest, signature) in sorted(self.own.items())]
        return b"".join(pieces)


def read_manifest(share: Share, audited: Sequence[int], packed: bytes) -> InputManifest:
    """Read a manifest. Its signatures are not checked.

    Args:
        audited: indices of the audited parts, in ascending order.

    Raises:
        RemoteProtocolError: it has another length.
    """
    if len(packed) != share.manifest_bytes(len(audited)):
        raise RemoteProtocolError(f"a manifest of {len(packed)} bytes")
    count, at, inputs = len(share.parts), 0, []
    for _ in share.contributors:
        signature, at = packed[at : at + SIGNATURE_BYTES], at + SIGNATURE_BYTES
        digests, at = packed[at : at + count * PART_DIGEST_BYTES], at + count * PART_DIGEST_BYTES
        inputs.append((signature, _cut(digests)))
    own = {}
    for index in audited if share.contributes else ():
        digest, at = packed[at : at + PART_DIGEST_BYTES], at + PART_DIGEST_BYTES
        own[index], at = (digest, packed[at : at + SIGNATURE_BYTES]), at + SIGNATURE_BYTES
    return InputManifest(tuple(inputs), own)


def check_manifest(share: Share, manifest: InputManifest, inputs: bytes) -> None:
    """Check the signatures of a manifest.

    Args:
        inputs: :func:`~p2pavg.allreduce.proofs.inputs_digest`, as the reducer has signed it with its averages.

    Raises:
        RemoteProtocolError: a signature does not verify, or these are not the inputs that the reducer signed.
    """
    if inputs_digest(digests for _, digests in manifest.inputs) != inputs:
        raise RemoteProtocolError("it shows other contributions than it signed")
    for peer_id, (signature, digests) in zip(share.contributors, manifest.inputs, strict=True):
        if not is_signed(peer_id, signature, share.subject.input_bytes(share.position, digests)):
            raise RemoteProtocolError(f"it shows contributions that {peer_id} has not signed")
    for index, (digest, signature) in manifest.own.items():
        message = share.subject.own_bytes(OWN_DOMAIN, share.position, index, digest)
        if not is_signed(share.reducer, signature, message):
            raise RemoteProtocolError("it has not signed its own contribution")


def check_inputs(share: Share, manifest: InputManifest, index: int, inputs: Sequence[Buffer]) -> None:
    """Check the inputs of one part against the digests of a manifest.

    Raises:
        RemoteProtocolError: they are not those that were signed.
    """
    expected = [digests[index] for _, digests in manifest.inputs]
    if share.contributes:
        expected.append(manifest.own[index][0])
    if [part_digest(each) for each in inputs] != expected:
        raise RemoteProtocolError(f"it shows other bytes of part {index} than were signed")


def _cut(digests: bytes) -> tuple[bytes, ...]:
    return tuple(
        digests[start : start + PART_DIGEST_BYTES] for start in range(0, len(digests), PART_DIGEST_BYTES)
    )
