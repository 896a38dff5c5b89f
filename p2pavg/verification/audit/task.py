"""One member's audit of one reducer: what it asks for, and what follows from the answer. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2pavg.allreduce.proofs import SignedShare
from p2pavg.allreduce.values import AttemptData
from p2pavg.group.aggregation import Aggregation, Audits
from p2pavg.group.candidate import Candidate
from p2pavg.group.roster import Roster
from p2pavg.net.transport import Buffer
from p2pavg.verification.audit.evidence import FalseAverage
from p2pavg.verification.audit.keeping import AuditRequest
from p2pavg.verification.audit.layout import Share, check_inputs, check_manifest, read_manifest
from p2pavg_compression import Codec


@dataclass(frozen=True, slots=True)
class Lie:
    """A false average that the auditor can prove."""

    reason: str
    evidence: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditTask:
    """An audit that this member was drawn for."""

    roster: Roster
    """Of the whole group."""
    share: Share
    signed: SignedShare
    """The reducer's signature of its averages."""
    averages: Mapping[int, bytes]
    """The averages of the audited parts, by their index, as the reducer has sent them."""
    request: AuditRequest

    @property
    def reducer(self) -> Candidate:
        """The member that is audited."""
        return self.roster.members[self.share.position]

    @property
    def indices(self) -> tuple[int, ...]:
        """The audited parts, in ascending order."""
        return tuple(sorted(self.averages))

    def judge(self, manifest: bytes, inputs: Sequence[Sequence[Buffer]]) -> Lie | None:
        """Return the lie that an answer proves, or ``None`` if the audited averages are right.

        Args:
            inputs: of each audited part, in the order of :attr:`indices`.

        Raises:
            RemoteProtocolError: the answer is not what was signed. It proves nothing.
        """
        read = read_manifest(self.share, self.indices, manifest)
        check_manifest(self.share, read, self.signed.inputs)
        for index, buffers in zip(self.indices, inputs, strict=True):
            check_inputs(self.share, read, index, buffers)
        for index, buffers in zip(self.indices, inputs, strict=True):
            found = FalseAverage(
                roster=self.roster,
                share=self.share,
                signed=self.signed,
                manifest=read,
                index=index,
                inputs=buffers,
                average=self.averages[index],
            )
            if wrong := found.why():
                return Lie(wrong, found.pack())
        return None


def shares_of(
    roster: Roster, members: Roster, values: AttemptData, codec: Codec, aggregation: Aggregation
) -> dict[str, Share]:
    """Return the shares of an attempt by their reducers' ids.

    Args:
        roster: of the whole group.
        members: of the attempt, with its shares.
        values: what this member holds of the attempt.
    """
    assert values.proofs is not None
    positions = {member.peer_id: position for position, member in enumerate(roster.members)}
    return {
        member.peer_id: Share(
            subject=values.proofs.subject,
            roster=members,
            reducer=member.peer_id,
            codec=codec,
            aggregation=aggregation,
            positions={each.peer_id: positions[each.peer_id] for each in members.members},
        )
        for member in members.members
    }


def tasks_of(
    me: str,
    roster: Roster,
    shares: Mapping[str, Share],
    audits: Audits,
    values: AttemptData,
    request: AuditRequest,
) -> list[AuditTask]:
    """Return the audits that this member was drawn for. It holds the whole result of the attempt.

    What the tasks need is copied, so they outlive the attempt.
    """
    assert values.proofs is not None
    tasks = []
    for reducer, share in shares.items():
        indices = share.drawn(audits, request.ticket) if reducer != me else ()
        if indices:
            averages = {index: bytes(values.averages.encoded(reducer, index)) for index in indices}
            signed = values.proofs.share(reducer)
            tasks.append(
                AuditTask(roster=roster, share=share, signed=signed, averages=averages, request=request)
            )
    return tasks
