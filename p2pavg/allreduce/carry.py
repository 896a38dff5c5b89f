"""The contributions to one member's share, and those that go over from one attempt to the next. No I/O, no clock.

:mod:`p2pavg.allreduce.movers.reuse` decides what goes over. Nothing does in a group without audits, because its
reducers keep no contribution longer than until its average.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from p2pavg.allreduce.messages import Lane
from p2pavg.allreduce.movers.reuse import START, Leftover, Received, ResumeMark, goes_on_at, has_come
from p2pavg.allreduce.proofs import Proofs
from p2pavg.allreduce.reduction import PartTracker
from p2pavg.allreduce.vector.buffers import Buffers
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.group.shares import SharePart
from p2pavg.net.transport import Buffer
from p2pavg_compression import Codec


class IncomingPart:
    """A part that is being received into memory of its own.

    Args:
        at: bytes that need not come, because they are there.
    """

    def __init__(self, index: int, payload: memoryview, at: int = 0) -> None:
        self.index = index
        self.payload = payload
        self.filled = at
        """Bytes from the beginning that are there. It never decreases, also if a sender begins the part again."""
        self._at = at

    def begin_again(self, at: int) -> None:
        """Receive the part again, from so many bytes on."""
        self._at = at

    @property
    def rest(self) -> memoryview:
        """The memory of the bytes that are still to come."""
        return self.payload[self._at :]

    def add(self, count: int) -> None:
        """Note that so many more bytes have come."""
        self._at += count
        self.filled = max(self.filled, self._at)


class Inputs:
    """The contributions to a share of so many parts: those that wait for others, and those that are kept.

    Its owner guards it: :class:`~p2pavg.allreduce.values.AttemptData`.

    Args:
        keeps: whether contributions are kept when their part has been averaged.
    """

    def __init__(self, parts: int, *, keeps: bool) -> None:
        self.keeps = keeps
        self._waiting: list[dict[str, Buffer]] = [{} for _ in range(parts)]
        self._averaged: list[dict[str, Buffer]] = [{} for _ in range(parts)]
        self._coming: dict[str, IncomingPart] = {}

    def let_go(self) -> None:
        """Release everything that has the size of a vector."""
        self._waiting.clear()
        self._averaged.clear()
        self._coming.clear()

    def begin(self, contributor: str, coming: IncomingPart) -> None:
        """Note that the next part of a contributor is being received."""
        self._coming[contributor] = coming

    def begun(self, contributor: str, index: int) -> IncomingPart | None:
        """Return the beginning of a part that came in an earlier attempt, or in this one."""
        coming = self._coming.get(contributor)
        return coming if coming is not None and coming.index == index else None

    def take(self, contributor: str, index: int, payload: Buffer) -> None:
        """Let a part wait for those of the other contributors."""
        self._waiting[index][contributor] = payload

    def waiting(self, index: int) -> Mapping[str, Buffer]:
        """Return what waits for the other contributors, or is complete and is being averaged."""
        return self._waiting[index]

    def averaged(self, index: int) -> None:
        """Note that a part has been averaged."""
        if self.keeps:
            self._averaged[index] = dict(self._waiting[index])
        self._waiting[index].clear()

    def kept(self, index: int) -> dict[str, Buffer]:
        """Return the contributions of which a part was averaged, by peer id; none unless they are kept."""
        return self._averaged[index]

    def mark(self, contributor: str, parts: int) -> ResumeMark:
        """Return how far a contribution has come, of which so many parts are whole."""
        coming = self.begun(contributor, parts)
        return ResumeMark(parts, 0 if coming is None else coming.filled)

    def came(self, contributor: str, mark: ResumeMark, digests: list[bytes]) -> Received:
        """Return a contribution up to a mark."""
        whole = [
            self._waiting[index].get(contributor, self._averaged[index].get(contributor, b""))
            for index in range(mark.parts)
        ]
        coming = self.begun(contributor, mark.parts)
        # A copy: a thread of the attempt that ends may still write into that memory.
        begun = b"" if coming is None else bytes(coming.payload[: mark.nbytes])
        return Received(whole, begun, digests[: mark.parts])


class ResumeState:
    """What an attempt has of the one before, and what it leaves to the next one. Safe to use from any thread.

    Args:
        inputs: the contributions to this member's share.
        guard: of the ledger and the inputs.
        leftover: of the attempt before; ``None`` in the first one.
    """

    def __init__(
        self,
        ledger: PartTracker,
        inputs: Inputs,
        codec: Codec,
        buffers: Buffers,
        *,
        proofs: Proofs | None,
        guard: threading.Condition,
        leftover: Leftover | None,
    ) -> None:
        self.complete: list[int] = []
        """Parts of this member's share to which all contributions came before; they are to be averaged."""
        self._ledger = ledger
        self._inputs = inputs
        self._codec = codec
        self._buffers = buffers
        self._proofs = proofs
        self._guard = guard
        self._has: dict[str, ResumeMark] = {}
        self._goes_on: dict[str, ResumeMark] = {}
        if leftover is not None and proofs is not None:
            self._take_contributions(leftover, proofs)
            self._resume(leftover, proofs)

    def _take_contributions(self, leftover: Leftover, proofs: Proofs) -> None:
        me, ledger = self._ledger.me, self._ledger
        own = ledger.parts[me]
        for contributor in ledger.contributors if own else ():
            came = leftover.came.get(contributor)
            if came is None:
                continue
            mark = has_come(came, leftover.parts[me], own, self._codec)
            self._has[contributor] = mark
            for index in range(mark.parts):
                self._inputs.take(contributor, index, came.parts[index])
            if mark.nbytes:
                begun = came.parts[mark.parts] if mark.parts < len(came.parts) else came.begun
                coming = self._coming(own[mark.parts], mark.nbytes)
                coming.payload[: mark.nbytes] = memoryview(begun)[: mark.nbytes]
                self._inputs.begin(contributor, coming)
            proofs.have_come(contributor, came.digests[: mark.parts])
            self.complete = ledger.begin_with(contributor, mark.parts)

    def _resume(self, leftover: Leftover, proofs: Proofs) -> None:
        for reducer, told in leftover.told.items():
            if reducer in self._ledger.parts:
                now, sent = self._ledger.parts[reducer], leftover.sent[reducer]
                before = leftover.parts[reducer]
                mark = goes_on_at(told, len(sent), before, now, self._codec)
                self._goes_on[reducer] = mark
                proofs.were_sent(reducer, sent[: mark.parts])

    # ------------------------------------------------------------------ in this attempt

    def goes_on_at(self, reducer: str) -> ResumeMark:
        """Return where this member's contribution to a reducer goes on."""
        return self._goes_on.get(reducer, START)

    def check_begin(self, contributor: str, mark: ResumeMark) -> None:
        """Check where a contributor goes on.

        Raises:
            RemoteProtocolError: something before it has not come.
        """
        has = self._has.get(contributor, START)
        own = self._ledger.parts[self._ledger.me]
        size = self._codec.encoded_nbytes(own[mark.parts].elements) if mark.parts < len(own) else 0
        if mark > has or mark.nbytes > size:
            raise RemoteProtocolError(f"its contribution goes on at {mark}, and has come up to {has}")

    def receive(self, contributor: str, part: SharePart, mark: ResumeMark) -> IncomingPart:
        """Return the memory for a part of a contribution, with what has come of it before ``mark``."""
        skipped = mark.nbytes if part.index == mark.parts else 0
        with self._guard:
            if self._ledger.has(contributor, Lane.CONTRIBUTIONS, part.index):
                return self._coming(part, skipped)  # it has come; what is sent of it is not used
            coming = self._inputs.begun(contributor, part.index)
            if coming is None:
                coming = self._coming(part, skipped)
                self._inputs.begin(contributor, coming)
            coming.begin_again(skipped)
            return coming

    def _coming(self, part: SharePart, at: int) -> IncomingPart:
        return IncomingPart(part.index, self._buffers.bytes(self._codec.encoded_nbytes(part.elements)), at)

    # ------------------------------------------------------------------ for the next one

    def mark(self, contributor: str) -> ResumeMark:
        """Return how far a contribution to this member's share has come, as far as it is kept."""
        if not self._inputs.keeps or contributor not in self._ledger.contributors:
            return START
        with self._guard:
            return self._inputs.mark(contributor, self._ledger.position(contributor, Lane.CONTRIBUTIONS))

    def leave(self, told: Mapping[str, ResumeMark]) -> Leftover | None:
        """Return what goes over to the next attempt; ``None`` if nothing does.

        Args:
            told: how far this member's contribution has come, by the reducers that have told it.
        """
        proofs = self._proofs
        if proofs is None:
            return None
        came = {}
        with self._guard:
            for contributor in self._ledger.contributors:
                mark = self._inputs.mark(contributor, self._ledger.position(contributor, Lane.CONTRIBUTIONS))
                came[contributor] = self._inputs.came(contributor, mark, proofs.came(contributor))
        sent = {reducer: proofs.sent(reducer) for reducer in self._ledger.parts}
        return Leftover(self._ledger.parts, came, sent, dict(told))
