"""The parts that a member is still owed in an attempt, and the averaging of a part. No I/O, no clock.

A member owes another its contribution to that one's share, and the averages of its own share.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from p2pavg.allreduce.events import FalseNormError, UndecodableError
from p2pavg.allreduce.messages import MAX_WAITING_PARTS, Lane
from p2pavg.allreduce.movers.routes import Routes
from p2pavg.allreduce.robust import combine
from p2pavg.allreduce.vector.buffers import FRESH, Buffers
from p2pavg.base.errors import RemoteProtocolError
from p2pavg.base.numbers import bounded_weights
from p2pavg.base.result import FailedCode
from p2pavg.group.aggregation import RobustRule
from p2pavg.group.roster import Roster, Sites
from p2pavg.group.shares import SharePart, cut_into_parts, part_size
from p2pavg.net.transport import Buffer
from p2pavg_compression import MAX_MAGNITUDE, Codec, CodecError

# Checks that no member's values are longer than the norm that it signed.
#
# A reducer sees one share of each contribution. Of that share, the norm is at most that of the whole vector. A member
# may still send every reducer a share as long as the norm that it signed: no reducer can see that alone. With R
# reducers its whole vector is then at most sqrt(R) times too long.

SLACK = 2.0
"""An honest share is at most twice as long as its member's vector, with any codec. A codec rounds each value to the
nearest level, and 0 is a level. So rounding moves a value by no more than its own magnitude."""
_ROUNDING = 1 + 1e-5  # of the sums of squares
_BLOCK = 2**20


class NormCheck:
    """Sums up each member's squares over the parts of one share. Safe to use from any thread."""

    def __init__(self, roster: Roster) -> None:
        self._norms = {member.peer_id: member.norm for member in roster.contributors}
        self._squares: dict[str, float] = {}
        self._lock = threading.Lock()

    def take(self, peer_id: str, values: torch.Tensor) -> None:
        """Count a decoded part of a member's, float32 on the CPU.

        Raises:
            FalseNormError: the parts so far are longer than the member's vector can be.
        """
        squares = vector_norm(values) ** 2
        with self._lock:
            squares += self._squares.get(peer_id, 0.0)
            self._squares[peer_id] = squares
        length, signed = math.sqrt(squares), self._norms[peer_id]
        if length > SLACK * _ROUNDING * signed:
            raise FalseNormError(peer_id, length, signed)


def vector_norm(values: torch.Tensor) -> float:
    """Return the Euclidean norm of float32 values on any device, summed in float64, block by block."""
    blocks = torch.split(values, _BLOCK)
    norms = [float(torch.linalg.vector_norm(block, dtype=torch.float64)) for block in blocks if block.numel()]
    return math.sqrt(math.fsum(norm**2 for norm in norms))


@dataclass(frozen=True, slots=True)
class RoundFault:
    """A fault in a round, and the peer that caused it; ``None`` if it was this peer."""

    reason: str
    peer_id: str | None
    hostile: bool = False
    """True if that peer broke the protocol, which no honest peer does."""
    seconds: float = 0.0
    """Seconds for which that peer kept the others waiting."""
    code: FailedCode = FailedCode.OTHER
    """The reason of a round that failed, for programs."""


def parts_of_share(roster: Roster, position: int, granularity: int) -> tuple[SharePart, ...]:
    """Return the parts of the share of the member at ``position``, range by range."""
    size = part_size(sum(roster.shares), roster.reducers)
    parts = [part for each in roster.ranges[position] for part in cut_into_parts(*each, granularity, size)]
    return tuple(replace(part, index=index) for index, part in enumerate(parts))


class PartTracker:
    """The parts that one member expects from every other member.

    Args:
        sites: of the roster's members; ``None``: they are one site, which is a butterfly or a star.
    """

    def __init__(self, roster: Roster, me: str, granularity: int, sites: Sites | None = None) -> None:
        self.roster = roster
        self.me = me
        position = roster.position(me)
        self.holding = not roster.members[position].auxiliary
        """True if this member wants the whole result."""
        self.parts = {
            member.peer_id: parts_of_share(roster, index, granularity)
            for index, member in enumerate(roster.members)
        }
        """The parts of each member's share."""
        # All below follows from the roster alone, so all members agree on who sends what to whom.
        self.routes = Routes(roster, self.parts, sites)
        self.tasks = self.routes.tasks_of(me)
        """The parts that this member reduces. In a butterfly, those of its share."""
        self.first_own = self.routes.first_own(me)
        """Number of the first task of its own share. In those before it, this member is a relay."""
        self.feeders = self.routes.feeders_of(me)
        """The other members that send this one their own contributions. In a butterfly, all contributors."""
        self.forwards = [
            (reducer, part) for reducer in self.routes.relayed_by(me) for part in self.parts[reducer]
        ]
        """The averages that this member passes on to its site, as a relay."""
        others = [member for member in roster.members if member.peer_id != me]
        self._others = [member.peer_id for member in others]
        contributors = {member.peer_id for member in roster.contributors}
        self.contributors = [member.peer_id for member in others if member.peer_id in contributors]
        """The other members that contribute."""
        self.holders = [member.peer_id for member in others if not member.auxiliary]
        """The other members that want the whole result."""
        self._due: dict[str, Sequence[SharePart]] = {}
        self._came: dict[str, int] = {}
        """Number of parts that have come of each contributor."""
        # Averages are counted by reducer and not by sender: a relay, or another
        # member after a loss, may pass them on.
        self._averaged: dict[str, int] = {}
        """Number of averages that have come of each reducer, from any member."""
        self._served: dict[str, list[str]] = {}
        self._missing = [0] * len(self.tasks)
        for member in others:
            peer_id = member.peer_id
            self._due[peer_id] = self.routes.contributions(peer_id, me)
            self._served[peer_id] = self.routes.averages(peer_id, me) if self.holding else []
            # A task may have fewer contributions than others: a relay sums up its own site only.
            for part in self._due[peer_id]:
                self._missing[part.index] += 1
        self.unfed = [index for index, missing in enumerate(self._missing) if missing == 0]
        """The tasks to which no other member contributes."""
        self._own_left = len(self.tasks)

    def expects(self, peer_id: str, lane: Lane) -> int:
        """Return the number of parts that a member sends to this one on a lane."""
        if lane is Lane.CONTRIBUTIONS:
            return len(self._due.get(peer_id, ()))
        served = self._served.get(peer_id, ()) if lane is Lane.AVERAGES else ()
        return sum(len(self.parts[reducer]) for reducer in served)

    def contributions_of(self, peer_id: str) -> Sequence[SharePart]:
        """Return the tasks of this member to which another one contributes."""
        return self._due.get(peer_id, ())

    def owed_by(self, peer_id: str) -> int:
        """Return the number of parts that are still to come from a member."""
        averages = sum(self._left_of(reducer) for reducer in self._served.get(peer_id, ()))
        return self._contributions_owed_by(peer_id) + averages

    def _contributions_owed_by(self, peer_id: str) -> int:
        return len(self._due.get(peer_id, ())) - self._came.get(peer_id, 0)

    def _left_of(self, reducer: str) -> int:
        return len(self.parts[reducer]) - self._averaged.get(reducer, 0)

    def due(self, peer_id: str, lane: Lane) -> SharePart:
        """Return the next contribution of a member, or the next average of a reducer.

        Raises:
            RemoteProtocolError: no further part is due.
        """
        # Parts come in a fixed order on each lane. So the next one is known,
        # and its index on the wire only has to be right.
        if lane is Lane.CONTRIBUTIONS:
            parts, position = self._due.get(peer_id, ()), self._came.get(peer_id, 0)
        else:
            wanted = self.holding and lane is Lane.AVERAGES and peer_id != self.me
            parts = self.parts.get(peer_id, ()) if wanted else ()
            position = self._averaged.get(peer_id, 0)
        # Without this check, a member could send parts without end, or averages to a member that wants none.
        if position >= len(parts):
            raise RemoteProtocolError(f"a part of {lane.name.lower()} came where none was due")
        return parts[position]

    def begin_with(self, contributor: str, parts: int) -> list[int]:
        """Note that so many parts of a contributor came in an earlier attempt.

        Return the indices of those that all contributors have sent by now.
        """
        self._came[contributor] = parts
        for index in range(parts):
            self._missing[index] -= 1
        return [index for index in range(parts) if self._missing[index] == 0]

    def position(self, peer_id: str, lane: Lane) -> int:
        """Return the number of parts that have come: contributions of a member, or averages of a reducer."""
        return (self._came if lane is Lane.CONTRIBUTIONS else self._averaged).get(peer_id, 0)

    def has(self, peer_id: str, lane: Lane, index: int) -> bool:
        """Return whether a part has come: a contribution of a member, or an average of a reducer."""
        position = self.position(peer_id, lane)
        # A relay's means begin in the midst of this member's tasks, so positions are not indices.
        if lane is Lane.CONTRIBUTIONS and position:
            return index <= self._due[peer_id][position - 1].index
        return index < position

    def received(self, peer_id: str, lane: Lane) -> bool:
        """Note that the due part has come. Return whether it was the last contribution to one of our tasks."""
        index = self.due(peer_id, lane).index
        if lane is Lane.AVERAGES:
            self._averaged[peer_id] = index + 1
            return False
        self._came[peer_id] = self._came.get(peer_id, 0) + 1
        self._missing[index] -= 1
        return self._missing[index] == 0

    def lacks(self, reducer: str) -> bool:
        """Return whether averages of a reducer are still to come, from any member."""
        wanted = self.holding and reducer != self.me and reducer in self.parts
        return wanted and self._left_of(reducer) > 0

    def received_share(self, reducer: str) -> None:
        """Note that the averages of a whole share came from another member than its reducer."""
        # A reducer that was lost owes nothing any more: other members had its share, and have passed it on.
        if self.holding and reducer != self.me:
            self._averaged[reducer] = len(self.parts[reducer])

    def averaged_own(self) -> None:
        """Note that one of our tasks is done."""
        self._own_left -= 1

    @property
    def own_is_averaged(self) -> bool:
        """True when all of our tasks are done."""
        return self._own_left == 0

    @property
    def complete(self) -> bool:
        """True when everything that this member needs is there."""
        # A member that needs no result still has to reduce its share: the others wait for it.
        return self.own_is_averaged and not self._owing()

    def slowest(self) -> str | None:
        """Return the slowest peer that still owes over half of its parts. Contributions count first."""
        # A member that has sent most of its parts will finish in time, and is worth waiting for.
        behind = list(filter(self.is_behind, self._others))
        return max(behind, key=self._delays, default=None)

    def is_behind(self, peer_id: str) -> bool:
        """Return whether a member still owes over half of its parts."""
        return 2 * self.owed_by(peer_id) > sum(self.expects(peer_id, lane) for lane in Lane)

    def holds_up(self) -> str | None:
        """Return the contributor that this member waits for while it has all it can take of most others.

        ``None`` if there is none: contributions come as fast as this member's own link lets them.
        """
        came = {peer_id: self._came.get(peer_id, 0) for peer_id in self.feeders}
        parts = len(self.tasks)
        slowest = min(came, key=lambda peer_id: came[peer_id], default=None)
        if slowest is None or came[slowest] == parts:
            return None
        # No contributor gets further ahead of the slowest one than this: what follows waits with its sender.
        ahead = min(came[slowest] + MAX_WAITING_PARTS, parts)
        # If most of them are that far, this member's link is not what holds the round up.
        waiting = sum(count >= ahead for count in came.values())
        return slowest if 2 * waiting > len(came) - 1 else None

    def overdue(self, timeout: float) -> RoundFault:
        """Return the member that is waited for when the time is over.

        A reducer that still owes averages may only be waiting itself. A member that still owes its contribution waits
        for no other member. So the latter is named first, and among several the one that owes most.
        """
        waiting = self.waited_for() or "itself"
        culprit = max(self._owing(), key=self._delays, default=None)
        return RoundFault(
            f"the exchange took longer than {timeout:g} s, waiting for {waiting}", culprit, seconds=timeout
        )

    def waited_for(self) -> str:
        """Name the members that owe this one parts, with their numbers; empty if none does."""
        return ", ".join(f"{peer_id} ({self.owed_by(peer_id)} parts)" for peer_id in self._owing())

    def _owing(self) -> list[str]:
        return [peer_id for peer_id in self._others if self.owed_by(peer_id)]

    def _delays(self, peer_id: str) -> tuple[int, int]:
        # A relay that owes the mean of its site may be waiting itself, like a reducer that owes averages.
        contributions = self._contributions_owed_by(peer_id) if peer_id in self.feeders else 0
        return (contributions, self.owed_by(peer_id))


@dataclass(frozen=True, slots=True)
class PartContribution:
    """One member's values of one part: float32 of its length, on any device, or what the codec made of them.

    Args:
        factor: the values count multiplied by it: see :mod:`p2pavg.group.roster`.
    """

    peer_id: str
    weight: float
    values: torch.Tensor | Buffer
    factor: float = 1.0


def average_part(
    codec: Codec,
    contributions: Sequence[PartContribution],
    total_weight: float,
    out: torch.Tensor,
    *,
    robust: RobustRule | None = None,
    check: NormCheck | None = None,
    buffers: Buffers = FRESH,
    payload: memoryview | None = None,
    left_out: torch.Tensor | None = None,
) -> memoryview:
    """Combine one part's contributions, encode the result once, and decode it from there into ``out``.

    Every member decodes these same bytes, this one too: that is what makes their results identical.

    The weighted mean takes memory for one part, or for two with ``check``. A robust rule needs all contributions at
    once: one part per contributor, and one more.

    Args:
        contributions: of all members, in the roster's order, so that the rounding is the same in every run.
        total_weight: the sum of the roster's weights.
        out: float32 of the part's length, on the CPU.
        robust: the rule that the group has agreed on; ``None``: the weighted mean.
        check: is given what other members sent, before their factors are applied.
        buffers: lends the memory that the reduction works in.
        payload: where the encoded part goes, of its length; allocated when missing.
        left_out: where what the encoding of the result loses goes, float32 of the part's length.

    Returns:
        The encoded part: ``payload``, or with a codec that changes nothing the bytes of ``out``.

    Raises:
        BadContributionError: an encoded contribution is malformed, or longer than its member signed.
    """
    # Not into `out`: this member keeps what all others decode, and not its own more precise sum.
    accumulator = buffers.floats(out.numel())
    reduce_part(codec, contributions, total_weight, accumulator, robust=robust, check=check, buffers=buffers)
    codec = codec.averages
    # Contributions at the limit may exceed it by a rounding error together.
    if codec.is_identity:
        return bytes_of(torch.clamp(accumulator, -MAX_MAGNITUDE, MAX_MAGNITUDE, out=out))
    # Nearly all sums are within the limit, so they are clamped only after the codec has refused one.
    try:
        encoded = codec.encode(accumulator, payload)
    except CodecError:
        encoded = codec.encode(accumulator.clamp_(-MAX_MAGNITUDE, MAX_MAGNITUDE), payload)
    codec.decode(encoded, out.numel(), out=out)
    if left_out is not None:
        torch.sub(accumulator, out, out=left_out)
    return encoded


def reduce_part(
    codec: Codec,
    contributions: Sequence[PartContribution],
    total_weight: float,
    accumulator: torch.Tensor,
    *,
    robust: RobustRule | None = None,
    check: NormCheck | None = None,
    buffers: Buffers = FRESH,
) -> None:
    """Combine one part's contributions into ``accumulator``, float32 of the part's length: the result, not encoded.

    The other arguments, and the errors, are those of :func:`average_part`.
    """
    if robust is None:
        _sum_up(codec, contributions, total_weight, accumulator, check, buffers)
        return
    rows = [
        scaled(
            contribution, decoded(codec, contribution, buffers.floats(accumulator.numel()), check), buffers
        )
        for contribution in contributions
    ]
    # A weight is a claim. Unbounded, one liar's weight could exceed that of all
    # others together, against which no rule helps.
    weights = bounded_weights([contribution.weight for contribution in contributions])
    combine(robust, rows, weights, accumulator)


def _sum_up(
    codec: Codec,
    contributions: Sequence[PartContribution],
    total_weight: float,
    accumulator: torch.Tensor,
    check: NormCheck | None,
    buffers: Buffers,
) -> None:
    """Write the weighted mean into ``accumulator``."""
    accumulator.zero_()
    # Only the check of norms needs the values of each member. Without it,
    # the codec adds them up without another copy.
    room = None if check is None else buffers.floats(accumulator.numel())
    for contribution in contributions:
        # Divided before summing: weights go up to 1e15, and the sum must stay finite in float32.
        share = contribution.weight / total_weight * contribution.factor
        if isinstance(contribution.values, torch.Tensor) or room is not None:
            values = decoded(codec, contribution, room, check)
            if isinstance(contribution.values, torch.Tensor) or not codec.is_sparse:
                accumulator.add_(values, alpha=share)
                continue
        try:
            # A sparse codec sums without a fused multiply-add. Another rounding could choose other values of the sum.
            codec.accumulate(contribution.values, accumulator, share)
        except CodecError as error:
            raise UndecodableError(contribution.peer_id, str(error)) from None


def decoded(
    codec: Codec, contribution: PartContribution, room: torch.Tensor | None, check: NormCheck | None = None
) -> torch.Tensor:
    """Return a contribution's values, float32 on the CPU: this member's own, or what others sent, checked.

    Args:
        room: where the values of other members go.

    Raises:
        BadContributionError: an encoded contribution is malformed, or longer than its member signed.
    """
    if isinstance(contribution.values, torch.Tensor):
        return contribution.values.cpu()
    assert room is not None
    # What came from the network is checked when it is first decoded: a malformed part costs its sender its place.
    try:
        values = codec.decode(contribution.values, room.numel(), room)
    except CodecError as error:
        raise UndecodableError(contribution.peer_id, str(error)) from None
    if check is not None:
        check.take(contribution.peer_id, values)
    return values


def scaled(contribution: PartContribution, values: torch.Tensor, buffers: Buffers = FRESH) -> torch.Tensor:
    """Return the values times the contribution's factor. This member's own vector is not changed."""
    if contribution.factor == 1.0:
        return values
    # The own vector is still needed if this attempt fails. What others sent is decoded into memory of this call.
    own = isinstance(contribution.values, torch.Tensor)
    return torch.mul(values, contribution.factor, out=buffers.floats(values.numel()) if own else values)


def bytes_of(values: torch.Tensor) -> memoryview:
    """The bytes of float32 values on the CPU, where they are."""
    return values.numpy().data.cast("B")
