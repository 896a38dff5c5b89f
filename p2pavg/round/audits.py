"""The audits of one exchange: this member asks the reducers that it was drawn for, and answers its own auditors.

:mod:`p2pavg.verification.audit` decides who asks what, and what follows from an answer. This file carries it out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import trio

from p2pavg.allreduce.attempt import Attempt
from p2pavg.allreduce.context import RunContext
from p2pavg.allreduce.messages import PROTOCOL, Lane, LaneHeader
from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.consensus.statements import Statement, result_digest
from p2pavg.consensus.votes import ResultCommit
from p2pavg.group.aggregation import Audits
from p2pavg.group.roster import Roster
from p2pavg.net.blame import guarded
from p2pavg.net.transport import Buffer, Stream, receive_exactly_into, receive_message, send_message
from p2pavg.verification.audit.keeping import (
    REQUEST_BYTES,
    AuditRequest,
    KeptShare,
    answer_pieces,
    read_request,
    seconds_a_byte,
    ticket_bytes,
)
from p2pavg.verification.audit.layout import Share
from p2pavg.verification.audit.task import AuditTask, Lie, shares_of, tasks_of

logger = logging.getLogger(__name__)

AUDIT_SECONDS = 30.0
"""For which a reducer shows the inputs of a round that has ended, and others wait for its answer."""

_BROKEN = (RemoteProtocolError, StreamBrokenError, ClosedError, UnreachableError)

Finding: TypeAlias = "Lie | str | None"
"""A lie; or why a reducer's answer is missing or proves nothing; or ``None`` if its averages are right."""


class PeerJudge(Protocol):
    """Learns what a round shows of other peers."""

    def accuse(self, evidence: bytes) -> None:
        """Take evidence that a member lied."""

    def audited(self, peer_id: str, finding: Finding) -> None:
        """Learn what an audit of a reducer has found."""


class AuditedExchange(Protocol):
    """The exchange whose averages are audited."""

    def hold(self, attempt: Attempt, digests: Sequence[bytes]) -> None:
        """Say that this member holds the result of an attempt."""

    def lose(self, peer_id: str, reason: str, *, hostile: bool) -> None:
        """Leave a reducer out of the round."""


class RoundAudits:
    """One member's audits in one exchange.

    Args:
        roster: of the whole group.
        judge: learns of each audit that this member has made.
        exchange: the round, whose end waits for audits that are made before it.
    """

    def __init__(
        self, context: RunContext, roster: Roster, judge: PeerJudge, exchange: AuditedExchange
    ) -> None:
        self._context = context
        self._roster = roster
        self._judge = judge
        self._exchange = exchange
        self._me = context.transport.peer_id
        self._audits = context.aggregation.audits
        self._kept: KeptShare | None = None
        self._settled = trio.Event()  # set when it is decided what this member answers
        self._answering = trio.CancelScope()
        self._tasks: list[AuditTask] = []
        if self._audits is not None:
            # From the beginning: with audits before the end, auditors ask while the round runs.
            context.lobby.audited[roster.group_id] = self._serve

    # ------------------------------------------------------------------ before the end of a round

    def begun(self, attempt: Attempt) -> None:
        """Answer the auditors of an attempt that begins, in a group that audits before the end."""
        if self._audits is not None and self._audits.before:
            # Without a digest, since no result is committed yet: each auditor names the one that it holds.
            self._keep(attempt, self._audits, None)
            self._settled.set()

    def completed(self, attempt: Attempt, digests: Sequence[bytes], nursery: trio.Nursery | None) -> None:
        """Have the exchange hold the result of an attempt, which is here as a whole, with one digest a share.

        In a group that audits before the end, it does so later, in the nursery, unless an audit finds a lie or goes
        unanswered.
        """
        audits = self._audits
        if audits is None or not audits.before or not digests or nursery is None:
            self._exchange.hold(attempt, digests)
        else:
            nursery.start_soon(
                self._hold_if_verified, attempt, digests, self._tasks_of(attempt, audits, digests)
            )

    async def _hold_if_verified(
        self, attempt: Attempt, digests: Sequence[bytes], tasks: Sequence[AuditTask]
    ) -> None:
        # Otherwise this member does not say that it holds the result, and the reducer is left out of the next attempt.
        if not any(await self._findings(tasks)):
            self._exchange.hold(attempt, digests)

    # ------------------------------------------------------------------ after the end

    def ended(self, attempt: Attempt, committed: ResultCommit | None, digests: Sequence[bytes]) -> None:
        """Prepare the audits of a round that has ended: copy what they need of its last attempt.

        Args:
            committed: the commit that this member believes; ``None`` if the round failed.
            digests: of the shares of the result; empty if this member holds none.
        """
        audits = self._audits
        self._kept = None
        self._settled.set()
        # The values are those of the last attempt, so nothing of another one can be shown or checked.
        if audits is None or audits.before or committed is None or committed.attempt != attempt.number:
            return
        if digests:
            self._tasks = self._tasks_of(attempt, audits, digests)
        if attempt.ledger.parts[self._me] and attempt.ledger.own_is_averaged:
            # Only what is drawn is kept: the contributions to a share take about as much memory as the vector.
            kept = self._keep(attempt, audits, committed.digest or None)
            ids = [member.peer_id for member in self._roster.members]
            tickets = {ids[position]: signature for position, signature in committed.signatures}
            # Its own share is audited by others.
            tickets.pop(self._me, None)
            drawn = kept.drawn(tickets)
            # An auxiliary may have heard of no signature; then each member may have been drawn.
            kept.keep_only(drawn if tickets else range(len(kept.share.parts)))
            if tickets and not drawn:
                self._kept = None

    async def run(self) -> None:
        """Audit, and answer auditors for as long as the inputs are kept. Call it after :meth:`ended`."""
        tasks, self._tasks = self._tasks, []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._answer)
            # Outside of the scope of the answers: each audit has its own time and comes to a finding, whatever ends
            # the answers. A reducer that is silent for that time would otherwise never be found silent.
            await self._findings(tasks)
            # They hold copies of the audited parts, and the answers may go on for longer.
            tasks.clear()

    async def _answer(self) -> None:
        """Answer auditors until the time is over: slower members may ask late."""
        try:
            with self._answering, trio.move_on_after(AUDIT_SECONDS):
                if self._kept is not None:
                    await trio.sleep_forever()
        finally:
            self.close()

    def close(self) -> None:
        """Answer no auditor any more. The audits that this member makes go on until each has its finding."""
        self._answering.cancel()
        self._context.lobby.audited.pop(self._roster.group_id, None)
        self._kept = None
        self._settled.set()

    # ------------------------------------------------------------------ asking

    def _tasks_of(self, attempt: Attempt, audits: Audits, digests: Sequence[bytes]) -> list[AuditTask]:
        values = attempt.values
        assert values.proofs is not None
        subject, digest = values.proofs.subject, result_digest(digests)
        statement = Statement(subject.group_id, subject.attempt, frozenset(subject.members), digest)
        request = AuditRequest(digest, self._context.signer.sign(ticket_bytes(audits, statement)))
        shares = self._shares_of(attempt)
        return tasks_of(self._me, self._roster, shares, audits, values, request)

    def _shares_of(self, attempt: Attempt) -> dict[str, Share]:
        context = self._context
        return shares_of(self._roster, attempt.roster, attempt.values, context.codec, context.aggregation)

    async def _findings(self, tasks: Sequence[AuditTask]) -> list[Finding]:
        findings: list[Finding] = []
        async with trio.open_nursery() as nursery:
            for task in tasks:
                nursery.start_soon(self._audit, task, findings)
        return findings

    async def _audit(self, task: AuditTask, findings: list[Finding]) -> None:
        finding: Finding = f"it answered no audit within {AUDIT_SECONDS:g} s"

        def blame(_peer_id: str, error: Exception) -> None:
            nonlocal finding
            finding = f"its answer to an audit raised {type(error).__name__}"

        # Whatever the answer makes this peer do: it is the reducer's, and must not end this peer's program.
        blames = guarded(task.reducer.peer_id, blame, what="the answer to an audit", expected=_BROKEN)
        with trio.move_on_after(AUDIT_SECONDS):
            try:
                with blames:
                    manifest, inputs = await self._ask(task)
                    # It reduces parts again, which would hold up the event loop.
                    finding = await self._context.run_in_thread(task.judge, manifest, inputs)
            except _BROKEN as error:
                finding = f"its answer to an audit proves nothing: {error}"
        findings.append(finding)
        self._judge.audited(task.reducer.peer_id, finding)
        if finding is not None and self._audits is not None and self._audits.before:
            reason = finding.reason if isinstance(finding, Lie) else finding
            self._exchange.lose(task.reducer.peer_id, reason, hostile=isinstance(finding, Lie))

    async def _ask(self, task: AuditTask) -> tuple[bytes, list[list[memoryview]]]:
        context, share = self._context, task.share
        stream = await context.transport.open_stream(
            task.reducer.peer_id,
            PROTOCOL,
            addresses=task.reducer.addresses,
            timeout=REPLY_SECONDS,
            # Neither may be able to dial the other: then the connection of the round is used.
            wait_inbound=True,
        )
        try:
            header = LaneHeader(share.subject.group_id, Lane.AUDIT, share.subject.attempt)
            await send_message(stream, header.encode())
            await send_message(stream, task.request.pack())
            manifest = await self._receive(stream, share.manifest_bytes(len(task.indices)))
            inputs = [
                [await self._receive(stream, size) for size in share.input_bytes(share.parts[index])]
                for index in task.indices
            ]
            return bytes(manifest), inputs
        finally:
            await stream.aclose()

    async def _receive(self, stream: Stream, count: int) -> memoryview:
        buffer = self._context.buffers.bytes(count)
        # Audits obey the same limits as parts: a user's limit is for all of them together.
        await trio.sleep(self._context.download.delay(count))
        await receive_exactly_into(stream, buffer)
        return buffer

    # ------------------------------------------------------------------ answering

    def _keep(self, attempt: Attempt, audits: Audits, digest: bytes | None) -> KeptShare:
        shares = self._shares_of(attempt)
        self._kept = kept = KeptShare(shares[self._me], audits, attempt.values, self._context.signer, digest)
        return kept

    async def _serve(self, stream: Stream, attempt: int) -> None:
        """Answer one member. A member may ask a little before this one has heard how the round ended."""
        with trio.move_on_after(REPLY_SECONDS) as scope:
            message = await receive_message(stream, max_bytes=REQUEST_BYTES)
            # What this member answers is decided with the commit, of which the auditor may have heard first.
            await self._settled.wait()
        if scope.cancelled_caught or message is None:
            return
        request, kept = read_request(message), self._kept
        why = "the inputs are not kept" if kept is None else kept.admit(stream.remote, attempt, request)
        if kept is None or why:
            logger.info("an audit by %s is not answered: %s", stream.remote, why)
            return
        with trio.move_on_after(AUDIT_SECONDS):
            manifest, inputs = await self._context.run_in_thread(kept.answer, request)
            pieces = [manifest, *(each for buffers in inputs for each in buffers)]
            a_byte = self._seconds_a_byte(sum(map(len, pieces)))
            for piece in (part for each in pieces for part in self._cut(each)):
                await trio.sleep(max(self._context.upload.delay(len(piece)), a_byte * len(piece)))
                await stream.send_all(piece)
            await stream.aclose()

    def _seconds_a_byte(self, total: int) -> float:
        """Return the least time from one byte of an answer to the next."""
        assert self._audits is not None
        if self._audits.before:  # the round waits for it
            return 0.0
        return seconds_a_byte(total, self._context.meter.mbps)

    def _cut(self, data: Buffer) -> Iterator[memoryview]:
        view = memoryview(data).cast("B")
        for piece in answer_pieces(len(view), self._context.meter.known_mbps[0]):
            yield view[piece.start : piece.stop]
