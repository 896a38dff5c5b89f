"""Carries out one attempt at an all-reduce: opens lanes, moves parts, averages its own share.

Butterfly: every contributor sends each reducer the parts of its share; the reducer averages a part as soon as its last
contribution is in, encodes the average once, and sends those bytes to every contributor. What goes wrong is reported;
what it means is decided elsewhere (:mod:`p2pavg.allreduce.agreement`), and the lanes of the others go on meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import trio

from p2pavg.allreduce.lobby import InboundLane, Lanes
from p2pavg.allreduce.messages import (
    FRAME_BYTES,
    PROTOCOL,
    Lane,
    LaneHeader,
    encode_header,
    part_frame,
    receive_index,
)
from p2pavg.allreduce.milestones import Milestone
from p2pavg.allreduce.partition import Part
from p2pavg.allreduce.reduction import BadContributionError, Contribution, Ledger, average_part
from p2pavg.allreduce.votes import DIGEST_BYTES
from p2pavg.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.matchmaking.roster import Candidate, Roster
from p2pavg.net.framing import receive_exactly_into, send_message
from p2pavg.net.transport import Buffer, Stream, Transport
from p2pavg.workers import RunInThread
from p2pavg_compression import Codec, CodecError

# Parts of each contributor that may wait for the slowest one: 8 MiB of fp32. With the part that is being read, and
# that part decoded, this is all that a peer can make this process hold beside its own vectors.
MAX_WAITING_PARTS = 8
OPEN_SECONDS = 10.0


class Reports(Protocol):
    """Who hears how an attempt goes."""

    def completed(self, attempt: Attempt, digests: tuple[bytes, ...]) -> None:
        """This member has the whole result; one digest a share, in the order of the roster."""

    def troubled(self, attempt: Attempt, peer_id: str, reason: str, *, hostile: bool) -> None:
        """A lane to or from a member broke."""

    def arrived(self, peer_id: str, count: int) -> None:
        """Bytes of a member came."""

    def owes(self, attempt: Attempt, peer_id: str, yes: bool) -> None:
        """A member's contribution is waited for, or no longer."""

    def reached(self, milestone: Milestone) -> None:
        """So far is this member."""


class Attempt:
    """One member's side of one attempt.

    Args:
        roster: the members that take part, with the shares that they have in this attempt.
        group_id: of the whole group, in the header of every lane.
        vector: float32, the length of the shares together, on any device; this member's weighted mean. Not changed,
            and not read any more once :meth:`run` has returned. An auxiliary has none.
        position: of a member, in the roster of the whole group.
    """

    def __init__(
        self,
        *,
        number: int,
        transport: Transport,
        group_id: bytes,
        roster: Roster,
        lanes: Lanes,
        codec: Codec,
        vector: torch.Tensor | None,
        run_in_thread: RunInThread,
        reports: Reports,
        position: Callable[[str], int],
    ) -> None:
        self.number = number
        self.roster = roster
        self.ledger = Ledger(roster, transport.peer_id, codec.granularity)
        self.bytes_sent = 0
        self.bytes_received = 0
        self.scope = trio.CancelScope()
        """Cancel it to end the attempt."""
        self._transport = transport
        self._group_id = group_id
        self._lanes = lanes
        self._codec = codec
        self._vector = vector
        self._in_thread = run_in_thread
        self._reports = reports
        self._position = position
        self._me = transport.peer_id
        self._own_parts = self.ledger.parts[self._me]
        # An auxiliary holds its own share only; everybody else the whole vector.
        self._offset = 0 if vector is not None else (self._own_parts[0].start if self._own_parts else 0)
        length = sum(roster.shares) if vector is not None else roster.shares[roster.position(self._me)]
        self.averaged = torch.empty(length, dtype=torch.float32)
        self._pending: list[dict[str, bytearray]] = [{} for _ in self._own_parts]
        # What came of each share, as it came: it may have to be passed on.
        self._encoded: dict[str, list[Buffer]] = {
            peer_id: [b""] * len(parts) for peer_id, parts in self.ledger.parts.items()
        }
        self._ready = [trio.Event() for _ in self._own_parts]
        self._complete = False
        self._passing: trio.Nursery | None = None
        self._sources: dict[str, str] = {}  # of the shares of reducers that are gone: who passes each on
        self._source_named = trio.Event()
        self._passed: set[str] = set()  # reducers whose whole share has come from another one

    async def run(self) -> None:
        """Until cancelled: what others still need is sent also when this member has everything."""
        with self.scope:
            async with trio.open_nursery() as nursery:
                self._passing = nursery
                nursery.start_soon(self._accept_lanes, nursery)
                for member in self.roster.members:
                    if member.peer_id != self._me:
                        self._start_sending(nursery, member)
                    self._owes(member.peer_id, self.ledger.expects(member.peer_id, Lane.CONTRIBUTIONS) > 0)
                await self._check_complete()
                await trio.sleep_forever()

    def let_go(self) -> None:
        """Of everything of a vector's size. Only when the attempt has ended."""
        self._vector = None
        self.averaged = torch.empty(0)
        self._pending.clear()
        self._encoded.clear()

    async def _check_complete(self) -> None:
        if self._complete or not self.ledger.complete:
            return
        self._complete = True
        digests: tuple[bytes, ...] = ()
        if self._vector is not None:
            digests = await self._in_thread(
                _digests, [self._encoded[member.peer_id] for member in self.roster.members]
            )
        self._reports.completed(self, digests)

    def _owes(self, peer_id: str, yes: bool) -> None:
        if peer_id != self._me:
            self._reports.owes(self, peer_id, yes)

    def _broken(self, peer_id: str, error: Exception | str) -> None:
        hostile = isinstance(error, RemoteProtocolError)
        reason = f"it broke the protocol: {error}" if hostile else str(error)
        self._reports.troubled(self, peer_id, reason, hostile=hostile)

    # ------------------------------------------------------------------ out

    def _start_sending(self, nursery: trio.Nursery, member: Candidate) -> None:
        if self._vector is not None and self.ledger.parts[member.peer_id]:
            nursery.start_soon(self._send_lane, member, Lane.CONTRIBUTIONS, self._send_contributions)
        if self._own_parts and not member.auxiliary:
            nursery.start_soon(self._send_lane, member, Lane.AVERAGES, self._send_averages)

    def pass_on(self, reducers: Iterable[str], to: Iterable[str]) -> None:
        """Send members the whole shares of reducers, as the same bytes. This member has the whole result."""
        members = {member.peer_id: member for member in self.roster.members}
        for reducer in reducers:
            for peer_id in to:
                if self._passing is not None and self.ledger.parts[reducer]:
                    self._passing.start_soon(self._send_share, members[peer_id], reducer)

    def take_from(self, source: str, reducers: Iterable[str]) -> None:
        """Take the shares of reducers from this member from now on; what others pass on is not read."""
        self._sources.update(dict.fromkeys(reducers, source))
        self._source_named.set()
        self._source_named = trio.Event()

    async def _send_share(self, member: Candidate, reducer: str) -> None:
        async def send(stream: Stream) -> None:
            for part, payload in zip(self.ledger.parts[reducer], self._encoded[reducer], strict=True):
                await self._send_part(stream, part, payload)

        await self._send_lane(member, Lane.PASSED_ON, send, reducer=self._position(reducer))

    async def _send_lane(
        self, member: Candidate, lane: Lane, send: Callable[[Stream], object], *, reducer: int = 0
    ) -> None:
        """Open a lane to a member and send every part of it."""
        header = LaneHeader(self._group_id, lane, self.number, reducer)
        try:
            stream = await self._transport.open_stream(
                member.peer_id,
                PROTOCOL,
                addresses=member.addresses,
                timeout=OPEN_SECONDS,
                wait_inbound=True,
            )
            try:
                await send_message(stream, encode_header(header))
                await send(stream)  # type: ignore[misc]
            finally:
                await stream.aclose()
        except (UnreachableError, StreamBrokenError, ClosedError) as error:
            self._broken(member.peer_id, error)

    async def _send_contributions(self, stream: Stream) -> None:
        assert self._vector is not None
        for part in self.ledger.parts[stream.remote]:
            payload = await self._in_thread(self._codec.encode, self._vector[part.start : part.stop])
            await self._send_part(stream, part, payload)
            self._reports.reached(Milestone.CONTRIBUTION_SENT)

    async def _send_averages(self, stream: Stream) -> None:
        for part in self._own_parts:
            await self._ready[part.index].wait()
            await self._send_part(stream, part, self._encoded[self._me][part.index])
            self._reports.reached(Milestone.AVERAGE_SENT)

    async def _send_part(self, stream: Stream, part: Part, payload: Buffer) -> None:
        await stream.send_all(part_frame(part.index))
        await stream.send_all(payload)
        self.bytes_sent += FRAME_BYTES + len(payload)

    # ------------------------------------------------------------------ in

    async def _accept_lanes(self, nursery: trio.Nursery) -> None:
        taken: set[tuple[str, Lane, int]] = set()
        while True:
            lane = await self._lanes.receive()
            peer_id = lane.stream.remote
            place = (peer_id, lane.header.lane, lane.header.reducer)
            if place not in taken and self._is_due(lane):
                if lane.header.lane is not Lane.PASSED_ON:  # that may be begun again, by another ballot
                    taken.add(place)
                nursery.start_soon(self._receive_lane, lane, nursery)
                continue
            lane.finished.set()
            if any(member.peer_id == peer_id for member in self.roster.members):
                self._broken(peer_id, RemoteProtocolError("it opened a lane that is not due"))

    def _is_due(self, lane: InboundLane) -> bool:
        peer_id, header = lane.stream.remote, lane.header
        if header.lane is Lane.PASSED_ON:
            reducers = {self._position(member.peer_id) for member in self.roster.members}
            return (
                peer_id in self.ledger.contributors
                and header.reducer in reducers
                and self._vector is not None
            )
        return header.reducer == 0 and self.ledger.expects(peer_id, header.lane) > 0

    async def _receive_lane(self, lane: InboundLane, nursery: trio.Nursery) -> None:
        peer_id = lane.stream.remote
        stream = _Noted(lane.stream, self._reports)
        try:
            if lane.header.lane is Lane.PASSED_ON:
                await self._receive_share(stream, lane.header.reducer)
            else:
                averages = lane.header.lane is Lane.AVERAGES
                for part in self.ledger.parts[peer_id if averages else self._me]:
                    await self._receive_part(stream, lane.header.lane, part, nursery)
        except (RemoteProtocolError, StreamBrokenError, ClosedError) as error:
            self._broken(peer_id, error)
        finally:
            lane.finished.set()

    async def _receive_part(self, stream: Stream, lane: Lane, part: Part, nursery: trio.Nursery) -> None:
        peer_id = stream.remote
        index = await receive_index(stream)
        if index != part.index:
            raise RemoteProtocolError(f"part {index} came where part {part.index} was due")
        if lane is Lane.CONTRIBUTIONS and index >= MAX_WAITING_PARTS:
            # What is ahead of the slowest contributor waits with its sender, not in this process.
            self._owes(peer_id, False)
            await self._ready[index - MAX_WAITING_PARTS].wait()
            self._owes(peer_id, True)
        payload = bytearray(self._codec.encoded_nbytes(part.elements))
        await receive_exactly_into(stream, memoryview(payload))
        self.bytes_received += FRAME_BYTES + len(payload)
        if lane is Lane.AVERAGES and peer_id not in self._passed:
            await self._decode(part, payload)
        if lane is Lane.AVERAGES and peer_id in self._passed:
            return  # the whole share came from another one first
        if lane is Lane.AVERAGES:
            self._encoded[peer_id][index] = payload
        else:
            self._pending[index][peer_id] = payload
            self._owes(peer_id, index + 1 < self.ledger.expects(peer_id, lane))
        if self.ledger.received(peer_id, lane):
            nursery.start_soon(self._average, index)
        await self._check_complete()

    async def _decode(self, part: Part, payload: bytearray) -> None:
        out = self.averaged[part.start : part.stop]
        try:
            await self._in_thread(self._codec.decode, payload, part.elements, out)
        except CodecError as error:
            raise RemoteProtocolError(f"an averaged part does not decode: {error}") from None

    async def _receive_share(self, stream: Stream, position: int) -> None:
        """Averages of a reducer that is gone, from somebody who has them all."""
        reducer = next(m.peer_id for m in self.roster.members if self._position(m.peer_id) == position)
        while self._sources.get(reducer) != stream.remote:
            await self._source_named.wait()  # the source may hear of it first; anybody else may wait
        parts = self.ledger.parts[reducer]
        payloads = []
        for part in parts:
            index = await receive_index(stream)
            if index != part.index:
                raise RemoteProtocolError(f"part {index} came where part {part.index} was due")
            payload = bytearray(self._codec.encoded_nbytes(part.elements))
            await receive_exactly_into(stream, memoryview(payload))
            self.bytes_received += FRAME_BYTES + len(payload)
            payloads.append(payload)
        if not self.ledger.lacks(reducer):
            return  # it came in the meantime, and its digest may have been told
        self._passed.add(reducer)
        for part, payload in zip(parts, payloads, strict=True):
            await self._decode(part, payload)
        self._encoded[reducer][:] = payloads
        self.ledger.received_share(reducer)
        await self._check_complete()

    async def _average(self, index: int) -> None:
        part, pending = self._own_parts[index], self._pending[index]
        contributions = [
            Contribution(member.peer_id, member.weight, self._values(part, pending, member.peer_id))
            for member in self.roster.contributors
        ]
        out = self.averaged[part.start - self._offset : part.stop - self._offset]
        try:
            encoded = await self._in_thread(
                average_part, self._codec, contributions, self.roster.total_weight, out
            )
        except BadContributionError as error:
            self._broken(error.peer_id, error)
            return
        self._encoded[self._me][index] = encoded
        pending.clear()
        self.ledger.averaged_own()
        self._ready[index].set()
        await self._check_complete()

    def _values(self, part: Part, pending: dict[str, bytearray], peer_id: str) -> torch.Tensor | bytearray:
        if peer_id != self._me:
            return pending[peer_id]
        assert self._vector is not None
        return self._vector[part.start : part.stop]


class _Noted(Stream):
    """A stream whose every arrival is a sign of life."""

    def __init__(self, stream: Stream, reports: Reports) -> None:
        self.remote = stream.remote
        self._stream = stream
        self._reports = reports

    async def send_all(self, data: Buffer) -> None:
        await self._stream.send_all(data)

    async def receive_some(self, max_bytes: int) -> bytes:
        chunk = await self._stream.receive_some(max_bytes)
        self._reports.arrived(self.remote, len(chunk))
        return chunk

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def reset(self) -> None:
        await self._stream.reset()


def _digests(shares: Sequence[Sequence[Buffer]]) -> tuple[bytes, ...]:
    """SHA-256 of each share's bytes, shortened: enough that nobody finds two shares of one digest."""
    found = []
    for payloads in shares:
        digest = hashlib.sha256()
        for payload in payloads:
            digest.update(payload)
        found.append(digest.digest()[:DIGEST_BYTES])
    return tuple(found)
