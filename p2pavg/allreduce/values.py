"""The data that one member holds in an attempt: waiting contributions, averages, and the bytes that they came as.

No I/O, no clock. Parts come in from the event loop and from the threads of direct lanes, several at once: everything
here may be called from any thread.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate

import torch
from blake3 import blake3

from p2pavg.allreduce.averages import Averages
from p2pavg.allreduce.carry import Inputs, ResumeState
from p2pavg.allreduce.messages import Lane
from p2pavg.allreduce.movers.reuse import Leftover
from p2pavg.allreduce.proofs import Proofs
from p2pavg.allreduce.reduction import NormCheck, PartContribution, PartTracker, average_part, bytes_of
from p2pavg.allreduce.vector.buffers import Buffers
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.group.aggregation import PLAIN, Aggregation
from p2pavg.group.roster import Roster, norm_factors
from p2pavg.group.shares import SharePart
from p2pavg.net.transport import Buffer
from p2pavg_compression import Codec

# Combines the contributions to one share, or of one site, part by part, by the rule of the group.
#
# Safe to use from any thread.


class Combiner:
    """The rule by which one reducer combines contributions, and what it remembers of them from part to part.

    Args:
        weights: of the contributions that are combined, by the peer ids of their senders.
    """

    def __init__(
        self,
        roster: Roster,
        aggregation: Aggregation,
        codec: Codec,
        buffers: Buffers,
        weights: Mapping[str, float],
    ) -> None:
        self._weights = weights
        self._total_weight = math.fsum(weights.values())
        self._robust = aggregation.robust
        self._factors = norm_factors(roster, aggregation.max_norm)
        self._norm_check = None if aggregation.max_norm is None else NormCheck(roster)
        self._codec = codec
        self._buffers = buffers
        # A robust rule decodes all contributions to a part: those of one part at a time, however many are complete.
        self._one_at_a_time = threading.Lock() if aggregation.robust else nullcontext()

    def combine(
        self,
        values: Mapping[str, torch.Tensor | Buffer],
        out: torch.Tensor,
        left_out: torch.Tensor | None = None,
    ) -> memoryview:
        """Combine all contributions to a part.

        Args:
            values: the part of each contributor, by peer id: float32, or what the codec made of it.
            out: where the result goes, float32 of the part's length, on the CPU.
            left_out: where what its encoding loses goes, likewise.

        Returns:
            The encoded part; with a codec that changes nothing, the bytes of ``out``.

        Raises:
            BadContributionError: a member's part does not decode, or is longer than the member signed.
        """
        contributions = [
            PartContribution(peer_id, weight, values[peer_id], self._factors.get(peer_id, 1.0))
            for peer_id, weight in self._weights.items()
        ]
        with self._one_at_a_time:
            return average_part(
                self._codec,
                contributions,
                self._total_weight,
                out,
                robust=self._robust,
                check=self._norm_check,
                buffers=self._buffers,
                payload=self._room(out.numel()),
                left_out=left_out,
            )

    def _room(self, elements: int) -> memoryview | None:
        codec = self._codec.averages
        return None if codec.is_identity else self._buffers.bytes(codec.encoded_nbytes(elements))


def check_index(index: int, part: SharePart) -> None:
    """Raise RemoteProtocolError unless it is the part that is due."""
    if index != part.index:
        raise RemoteProtocolError(f"part {index} came where part {part.index} was due")


class AttemptData:
    """The parts of one attempt.

    Args:
        vector: float32, the length of the shares together, on any device; this member's weighted mean. Not changed.
            Only contributors have one.
        aggregation: how the group combines contributions.
        proofs: signs what this member sends, and checks what the others signed; ``None`` if nothing is signed.
        leftover: contributions of the attempt before.
    """

    def __init__(
        self,
        *,
        ledger: PartTracker,
        codec: Codec,
        vector: torch.Tensor | None,
        buffers: Buffers,
        aggregation: Aggregation = PLAIN,
        proofs: Proofs | None = None,
        leftover: Leftover | None = None,
    ) -> None:
        self.proofs = proofs
        self._audited = proofs is not None and proofs.audited
        self._ledger = ledger
        of_site, of_share = ledger.routes.weights_at(ledger.me)
        self._combiner = Combiner(ledger.roster, aggregation, codec, buffers, of_share)
        self._site_combiner = Combiner(ledger.roster, aggregation, codec, buffers, of_site)
        self._codec = codec
        self._vector = vector
        self._buffers = buffers
        self.averages = Averages(ledger, codec.averages, buffers)
        """Of the whole vector, or an auxiliary's share."""
        own = ledger.parts[ledger.me]
        # Of a sparse codec every member sees in the average what is left out.
        counts = vector is not None and codec.needs_feedback and not codec.is_sparse
        elements = sum(part.elements for part in own)
        self.left_out = torch.zeros(elements, dtype=torch.float32, device="cpu") if counts else None
        """The loss of this member's averages by their encoding, float32; range after range."""
        self._left_at = list(accumulate((part.elements for part in own), initial=0))
        self._inputs = Inputs(len(ledger.tasks), keeps=self._audited)
        # Tasks before ``first_own`` are those of a relay. Their results go on to reducers, and are no averages.
        self._sums: list[Buffer] = [b""] * ledger.first_own
        # The averages of a reducer that this member passes on are numbered from here, in the order of their parts.
        self._forwards = {reducer: len(ledger.tasks) for reducer, _ in ledger.forwards}
        for index, (reducer, part) in enumerate(ledger.forwards):
            self._forwards[reducer] = len(ledger.tasks) + index - part.index
        self._ready = [False] * (len(ledger.tasks) + len(ledger.forwards))
        self._passed: set[str] = set()  # reducers whose whole share has come from another one
        # A share is decoded from one source at a time: its reducer's lane, or what another one passes on of it.
        self._decoding = {peer_id: threading.Lock() for peer_id in ledger.parts}
        self.changed = threading.Condition()
        """Guards the ledger and what is held; notified when something is ready: see :meth:`is_ready`."""
        self.carry = ResumeState(
            ledger,
            self._inputs,
            codec,
            buffers,
            proofs=proofs if self._audited else None,
            guard=self.changed,
            leftover=leftover,
        )

    def let_go(self) -> None:
        """Release everything that has the size of a vector. Call it only when nothing uses it any more."""
        self._vector = self.left_out = None
        self.averages.let_go()
        self._inputs.let_go()
        self._sums.clear()

    @property
    def complete(self) -> bool:
        """True when everything that this member needs is there."""
        with self.changed:
            return self._ledger.complete

    def outputs(self) -> tuple[bytes, ...]:
        """Return each reducer's signature of its share, in the order of :meth:`Averages.digests`.

        The bytes are those that follow the share's last average; empty for a share without parts, which no reducer
        signs. An auxiliary has none. Every part must be there.
        """
        if not self._ledger.holding:
            return ()
        return tuple(
            self.trailer(Lane.AVERAGES, reducer) if parts else b""
            for reducer, parts in self._ledger.parts.items()
        )

    # ------------------------------------------------------------------ out

    def room(self, part: SharePart) -> memoryview | None:
        """Return memory that :meth:`contribution` may use for this part and the next; ``None`` if it needs none."""
        if self._codec.is_identity:
            return None
        return self._buffers.bytes(self._codec.encoded_nbytes(part.elements))

    def contribution(self, reducer: str, part: SharePart, out: memoryview | None = None) -> Buffer:
        """Encode this member's values of a part of a reducer's share, into ``out`` if it has the right length.

        With a codec that changes nothing, return the vector's own bytes.
        """
        assert self._vector is not None
        values = self._vector[part.start : part.stop]
        payload: Buffer
        # On a CPU these bytes are sent from the vector itself, without a copy.
        if self._codec.is_identity and not values.is_cuda:
            payload = bytes_of(values)
        else:
            fits = out is not None and out.nbytes == self._codec.encoded_nbytes(part.elements)
            payload = self._codec.encode(values, out if fits else None)
        if self.proofs is not None and self._audited:
            # The signature at the end covers the bytes as they are sent, so they are noted here.
            self.proofs.sends(reducer, part.index, payload)
        return payload

    def sum_of_site(self, index: int) -> Buffer:
        """Return the mean of this member's site that one of its tasks has made. It must be ready."""
        return self._sums[index]

    def forward_at(self, reducer: str) -> int | None:
        """Return the number of the first average of a reducer that this member passes on; ``None`` if it does not."""
        return self._forwards.get(reducer)

    def trailer(self, kind: Lane, reducer: str) -> bytes:
        """Return the bytes that follow the last part of a kind, about a reducer's share. All parts must be there."""
        if self.proofs is None:
            return b""
        if kind is Lane.CONTRIBUTIONS:
            return self.proofs.sign_input(reducer) if self._audited else b""
        if reducer == self._ledger.me:
            return self.proofs.sign_output(self.averages.part_digests(reducer)).trailer
        return self.proofs.share(reducer).trailer

    @property
    def is_on_cpu(self) -> bool:
        """True if nothing here waits for a GPU."""
        return self._vector is None or not self._vector.is_cuda

    def is_ready(self, index: int) -> bool:
        """Return whether one of this member's tasks is done, or an average has come that it passes on.

        Its tasks have the first numbers, and the averages those after them: see :meth:`forward_at`.
        """
        return self._ready[index]

    # ------------------------------------------------------------------ in

    def has(self, peer_id: str, lane: Lane, index: int) -> bool:
        """Return whether a part has come already: a contribution of a member, or an average of a reducer."""
        with self.changed:
            return self._ledger.has(peer_id, lane, index)

    def buffer(self, part: SharePart) -> memoryview:
        """Return memory for an average that is to be received."""
        return self._buffers.bytes(self._codec.averages.encoded_nbytes(part.elements))

    def contributed(self, peer_id: str, index: int, payload: Buffer, trailer: bytes = b"") -> bool:
        """Take a member's part. Return whether it was the last one, so that :meth:`average` must be called.

        Args:
            trailer: bytes that followed it, if it was the member's last part.

        Raises:
            RemoteProtocolError: the member has not signed its parts.
        """
        if self.proofs is not None and self._audited:
            # Before the part is taken: a contributor's last one counts only with its signature.
            self.proofs.receives(peer_id, index, payload)
            if trailer:
                self.proofs.check_input(peer_id, trailer)
        with self.changed:
            self._inputs.take(peer_id, index, payload)
            return self._ledger.received(peer_id, Lane.CONTRIBUTIONS)

    def average(self, index: int) -> None:
        """Do one of this member's tasks: average a part of its share, or reduce a part of its site as a relay.

        It is ready from then on (:meth:`is_ready`).

        Raises:
            BadContributionError: a member's part does not decode, or is longer than the member signed.
        """
        part, place = self._ledger.tasks[index], index - self._ledger.first_own
        # Outside the lock, since several threads average different parts at once. No other thread has this task.
        own = self.own_input(part)
        values: dict[str, torch.Tensor | Buffer] = {**self._inputs.waiting(index)}
        if own is not None:
            values[self._ledger.me] = own
        if place < 0:
            room = torch.empty(part.elements, dtype=torch.float32, device="cpu")
            encoded, digest = self._site_combiner.combine(values, room), b""
            self._sums[index] = encoded
        else:
            left = None
            if self.left_out is not None:
                left = self.left_out[self._left_at[place] : self._left_at[place + 1]]
            encoded = self._combiner.combine(values, self.averages.values_of(part), left)
            digest = blake3(encoded).digest()
        with self.changed:
            if place >= 0:
                self.averages.keep(self._ledger.me, place, encoded, digest)
            self._inputs.averaged(index)
            self._ledger.averaged_own()
            self._ready[index] = True
            self.changed.notify_all()

    def inputs(self, index: int) -> dict[str, Buffer]:
        """Return the contributions of which a part of this member's share was averaged, by peer id, as they came.

        This member's own is not among them. They are kept in a group with audits only.
        """
        return self._inputs.kept(index)

    def own_input(self, part: SharePart) -> torch.Tensor | Buffer | None:
        """Return this member's own contribution to a part of its share; ``None`` if it contributes nothing.

        It is not encoded, unless the codec is sparse: an auditor then has to be shown a hundredth of the bytes.
        """
        if self._vector is None:
            return None
        values = self._vector[part.start : part.stop]
        return self._codec.encode(values) if self._codec.is_sparse else values

    def receive_average(
        self, reducer: str, part: SharePart, payload: Buffer, trailer: bytes = b""
    ) -> Sequence[int]:
        """Take a part of a reducer's share; return the numbers that are ready now (:meth:`is_ready`).

        Args:
            trailer: bytes that followed it, if it was the share's last part.

        Raises:
            RemoteProtocolError: it does not decode, or the reducer has not signed its averages.
        """
        with self._decoding[reducer]:
            if reducer in self._passed:
                return ()  # the whole share came from another one first
            self.averages.install(reducer, part, payload)
            # The ledger hears of the last part only after the reducer's signature:
            # a share counts as complete when it is signed.
            self._check_output(reducer, trailer)
            with self.changed:
                self._ledger.received(reducer, Lane.AVERAGES)
            return self._note_forwards(reducer, (part,))

    def _note_forwards(self, reducer: str, parts: Sequence[SharePart]) -> Sequence[int]:
        """Note that averages of a reducer have come; return their numbers if this member passes them on."""
        first = self._forwards.get(reducer)
        if first is None:
            return ()
        numbers = [first + part.index for part in parts]
        with self.changed:
            for number in numbers:
                self._ready[number] = True
            self.changed.notify_all()
        return numbers

    def _check_output(self, reducer: str, trailer: bytes) -> None:
        if self.proofs is not None and trailer:
            self.proofs.check_output(reducer, self.averages.part_digests(reducer), trailer)

    def receive_share(self, reducer: str, payloads: list[Buffer], trailer: bytes = b"") -> Sequence[int]:
        """Take all parts of a reducer's share from another member, and the bytes that followed the last one.

        Return the numbers that are ready now (:meth:`is_ready`).

        Raises:
            RemoteProtocolError: one of them does not decode, or the reducer has not signed them.
        """
        with self._decoding[reducer]:
            with self.changed:
                came = not self._ledger.lacks(reducer)
            if came:  # in the meantime, and its digest may have been told
                return self._note_forwards(reducer, self._ledger.parts[reducer])
            # From here on, what the reducer's own lane still brings is dropped,
            # so that one share is never of two sources.
            self._passed.add(reducer)
            for part, payload in zip(self._ledger.parts[reducer], payloads, strict=True):
                self.averages.install(reducer, part, payload)
            self._check_output(reducer, trailer)
            with self.changed:
                self._ledger.received_share(reducer)
            return self._note_forwards(reducer, self._ledger.parts[reducer])
