"""A whole round among members in one process: every part, signature and average, without a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from p2pavg.allreduce.messages import Lane
from p2pavg.allreduce.proofs import Proofs, Subject
from p2pavg.allreduce.reduction import PartTracker
from p2pavg.allreduce.values import AttemptData
from p2pavg.allreduce.vector.buffers import Buffers
from p2pavg.consensus.statements import Statement, result_digest
from p2pavg.group.aggregation import Aggregation, Audits
from p2pavg.group.roster import Roster, ShareCutter
from p2pavg.group.topology import BUTTERFLY, Topology
from p2pavg.net.transport import Buffer
from p2pavg.verification.audit.keeping import AuditRequest, KeptShare, ticket_bytes
from p2pavg.verification.audit.layout import Share
from p2pavg.verification.audit.task import AuditTask, shares_of, tasks_of
from p2pavg_compression import Codec
from tests.unit.group.samples import SIGNERS, candidate, roster

ELEMENTS = 3 * 6 * 64
ALWAYS = Audits(1.0)
IDS = [signer.peer_id for signer in SIGNERS]

Falsify = Callable[[torch.Tensor], None]


def vector(index: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(index))


def group_of(
    codec: Codec, size: int = 3, auxiliary: int | None = None, topology: Topology = BUTTERFLY
) -> Roster:
    """Return a roster of members with unequal weights."""
    members = []
    for index in range(size):
        changes: dict[str, Any] = {"auxiliary": True} if index == auxiliary else {"weight": 1.0 + index}
        norm = 0.0 if index == auxiliary else float(vector(index).norm())
        members.append(candidate(index, codec=codec.name, norm=norm, **changes))
    return roster(members, ShareCutter(ELEMENTS, codec.granularity, topology).cut(members))


class Played:
    """The members of a round that has been played to its end.

    Args:
        liar: member whose averages ``falsify`` changes before it encodes and signs them.
        attempt: number of the attempt; a later one is among the members but the last.
    """

    def __init__(
        self,
        codec: Codec,
        aggregation: Aggregation,
        *,
        size: int = 3,
        auxiliary: int | None = None,
        liar: int | None = None,
        falsify: Falsify | None = None,
        attempt: int = 0,
    ) -> None:
        self.codec = codec
        self.aggregation = aggregation
        self.group = group_of(codec, size + (attempt > 0), auxiliary, aggregation.topology)
        cutter = ShareCutter(ELEMENTS, codec.granularity, aggregation.topology)
        self.members = self.group.among(attempt, range(size), cutter)
        self.subject = Subject(self.group.group_id, attempt, tuple(range(size)), aggregation.text)
        self.values = [self._values(index) for index in range(size)]
        if liar is not None:
            _let_lie(self.values[liar], codec, falsify or _nudge)
        for reducer in range(size):
            self._reduce(reducer)
        for reducer in range(size):
            self._spread(reducer)

    def _values(self, index: int) -> AttemptData:
        ledger = PartTracker(self.members, IDS[index], self.codec.granularity)
        positions = {IDS[position]: position for position in range(len(self.members.members))}
        member = self.members.members[index]
        return AttemptData(
            ledger=ledger,
            codec=self.codec,
            vector=None if member.auxiliary else vector(index),
            buffers=Buffers(1 << 24),
            aggregation=self.aggregation,
            proofs=Proofs(self.subject, ledger, SIGNERS[index], positions),
        )

    def _reduce(self, reducer: int) -> None:
        to = self.values[reducer]
        parts = to._ledger.parts[IDS[reducer]]
        for member in self.members.contributors:
            source = self.values[IDS.index(member.peer_id)]
            for part in parts if source is not to else ():
                payload = bytes(source.contribution(IDS[reducer], part))
                last = part is parts[-1]
                trailer = source.trailer(Lane.CONTRIBUTIONS, IDS[reducer]) if last else b""
                if to.contributed(member.peer_id, part.index, payload, trailer):
                    to.average(part.index)

    def _spread(self, reducer: int) -> None:
        source = self.values[reducer]
        parts = source._ledger.parts[IDS[reducer]]
        for member in self.members.holders:
            to = self.values[IDS.index(member.peer_id)]
            for part in parts if to is not source else ():
                payload = bytes(source.averages.encoded(IDS[reducer], part.index))
                trailer = source.trailer(Lane.AVERAGES, IDS[reducer]) if part is parts[-1] else b""
                to.receive_average(IDS[reducer], part, payload, trailer)

    # ------------------------------------------------------------------ audits

    def share(self, reducer: int) -> Share:
        return shares_of(self.group, self.members, self.values[reducer], self.codec, self.aggregation)[
            IDS[reducer]
        ]

    def statement(self, auditor: int) -> Statement:
        digest = result_digest(self.values[auditor].averages.digests())
        return Statement(self.group.group_id, self.subject.attempt, frozenset(self.subject.members), digest)

    def request(self, auditor: int, audits: Audits = ALWAYS) -> AuditRequest:
        statement = self.statement(auditor)
        return AuditRequest(statement.digest, SIGNERS[auditor].sign(ticket_bytes(audits, statement)))

    def tasks(self, auditor: int, audits: Audits = ALWAYS) -> dict[str, AuditTask]:
        """Return the audits that a member makes, by the reducer's id."""
        values = self.values[auditor]
        shares = shares_of(self.group, self.members, values, self.codec, self.aggregation)
        found = tasks_of(IDS[auditor], self.group, shares, audits, values, self.request(auditor, audits))
        return {task.reducer.peer_id: task for task in found}

    def answered(self, auditor: int = 0, reducer: int = 1) -> tuple[AuditTask, bytes, list[list[Buffer]]]:
        """Let one member ask another one. Return its audit, and the manifest and the inputs of the answer."""
        task, kept = self.tasks(auditor)[IDS[reducer]], self.kept(reducer)
        assert kept.admit(IDS[auditor], self.subject.attempt, task.request) == ""
        return task, *kept.answer(task.request)

    def kept(self, reducer: int, audits: Audits = ALWAYS, digest: bytes | None = None) -> KeptShare:
        return KeptShare(self.share(reducer), audits, self.values[reducer], SIGNERS[reducer], digest)


def _nudge(average: torch.Tensor) -> None:
    average[0] += 0.5


def _let_lie(values: AttemptData, codec: Codec, falsify: Falsify) -> None:
    combine = values._combiner.combine

    def false(given: Any, out: torch.Tensor, left_out: torch.Tensor | None = None) -> memoryview:
        encoded = combine(given, out, left_out)
        falsify(out)
        if not codec.is_identity:
            encoded = memoryview(codec.averages.encode(out))
            codec.averages.decode(encoded, len(out), out)
        return encoded

    values._combiner.combine = false  # type: ignore[method-assign, assignment]
