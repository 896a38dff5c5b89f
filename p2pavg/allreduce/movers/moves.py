"""The moves of the parts of one lane, in their order: one story for all who carry it out. No I/O, no clock.

A generator yields each move, and is sent what came of it. Three kinds of movers carry the moves out: a thread on a
direct lane, a task of the event loop on a direct lane with little on it (:mod:`~p2pavg.allreduce.movers.lane_driver`),
and one on a stream (:mod:`~p2pavg.allreduce.movers.stream_driver`). So they move the same parts in the same order, and
each end of a lane may use another kind.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from p2pavg.allreduce.carry import IncomingPart
from p2pavg.allreduce.events import BadContributionError
from p2pavg.allreduce.messages import Lane, Step
from p2pavg.allreduce.movers.reuse import ResumeMark
from p2pavg.allreduce.proofs import trailer_bytes
from p2pavg.allreduce.values import AttemptData, check_index
from p2pavg.group.milestones import Milestone
from p2pavg.net.transport import Buffer

if TYPE_CHECKING:
    from p2pavg.allreduce.signals import Signals


@dataclass(frozen=True, slots=True)
class AwaitReady:
    """Wait for what :meth:`~p2pavg.allreduce.values.AttemptData.is_ready` numbers so."""

    index: int
    receives: bool = False
    """True if the other end has parts to send meanwhile. It owes nothing during the wait."""


@dataclass(frozen=True, slots=True)
class SendPart:
    """Send a part, and the bytes that follow it if it is the last one of its kind; then report the milestone."""

    step: Step
    payload: Buffer
    trailer: bytes
    milestone: Milestone | None


@dataclass(frozen=True, slots=True)
class ReceiveIndex:
    """Receive the index of the next part; the result is that number."""


@dataclass(frozen=True, slots=True)
class ReceivePart:
    """Receive what is left of a part; the result is the bytes that follow it."""

    coming: IncomingPart
    follow: int
    """Number of bytes that follow it: not 0 only if it is the last one of its kind."""
    ends: bool
    """True for the last part on the lane."""


@dataclass(frozen=True, slots=True)
class RunWork:
    """Call a function that may take milliseconds; the result is its own. The event loop leaves it to a thread."""

    work: Callable[[], Any]


Move: TypeAlias = AwaitReady | SendPart | ReceiveIndex | ReceivePart | RunWork
Moves: TypeAlias = Generator[Move, Any, None]
"""Moves, each of which is followed by the result of the one before."""


class Mover(Protocol):
    """Carries moves out in a task of the event loop."""

    async def move(self, move: Move) -> Any:
        """Carry out one move; return what came of it."""
        ...


async def carry_out(moves: Moves, mover: Mover) -> None:
    """Let a task carry moves out, one after the other."""
    result = None
    while True:
        try:
            move = moves.send(result)
        except StopIteration:
            return
        result = await mover.move(move)


def sending(
    values: AttemptData,
    remote: str,
    steps: Sequence[Step],
    begin: ResumeMark,
    *,
    passes_on: bool = False,
    in_one_room: bool = False,
) -> Moves:
    """Yield the moves that send parts to a member, each as soon as it is ready.

    Args:
        steps: as :func:`~p2pavg.allreduce.messages.outgoing` returns them.
        begin: where the contribution goes on.
        passes_on: the parts are averages of a reducer that is gone; they are no progress of this member.
        in_one_room: a part has left before the next move, so all are encoded in the same memory.
    """
    room = None
    for step in steps:
        if step.after is not None:
            yield AwaitReady(step.after)
        if step.kind is Lane.CONTRIBUTIONS:
            about, milestone = remote, Milestone.CONTRIBUTION_SENT
            if step.after is not None:
                own = values.sum_of_site(step.after)
            else:
                room = room or (values.room(step.part) if in_one_room else None)
                own = yield RunWork(partial(values.contribution, remote, step.part, room))
            payload: Buffer = begin.of(step.part, own)
        else:
            about, milestone = step.reducer, Milestone.AVERAGE_SENT
            payload = values.averages.encoded(step.reducer, step.part.index)
        trailer = values.trailer(step.kind, about) if step.last else b""
        yield SendPart(step, payload, trailer, None if passes_on else milestone)


def receiving(
    values: AttemptData, remote: str, steps: Sequence[Step], begin: ResumeMark, signals: Signals
) -> Moves:
    """Yield the moves that receive what :func:`sending` sends at the other end.

    Args:
        steps: as :func:`~p2pavg.allreduce.messages.incoming` returns them.
        begin: where the contribution goes on, if some of it came in an earlier attempt.

    Raises:
        RemoteProtocolError: the member sent what none sends.
    """
    for step in steps:
        # Both ends know the order of the parts. The index only shows that they mean the same one.
        check_index((yield ReceiveIndex()), step.part)
        if step.kind is Lane.CONTRIBUTIONS:
            yield from _receiving_contribution(values, remote, step, begin, signals)
        else:
            coming = IncomingPart(step.part.index, values.buffer(step.part))
            trailer = yield _part_of(values, step, coming)
            # It may have come before, over a direct lane that broke.
            if not values.has(step.reducer, step.kind, step.part.index):
                average = partial(values.receive_average, step.reducer, step.part, coming.payload, trailer)
                for number in (yield RunWork(average)):
                    signals.ready(number)
        signals.progressed()


def _receiving_contribution(
    values: AttemptData, remote: str, step: Step, begin: ResumeMark, signals: Signals
) -> Moves:
    index = step.part.index
    # In an earlier attempt, or over a lane that broke. It is read all the same, and does not count twice.
    comes_again = values.has(remote, step.kind, index)
    # Back-pressure: a contributor that is ahead waits, and not its parts in this process.
    if step.after is not None and not comes_again:
        yield AwaitReady(step.after, receives=True)
    coming = values.carry.receive(remote, step.part, begin)
    trailer = yield _part_of(values, step, coming)
    complete = False
    if not comes_again:
        complete = yield RunWork(partial(values.contributed, remote, index, coming.payload, trailer))
    if step.last:
        signals.owes(remote, False)
    if complete:
        wrong = yield RunWork(partial(_average, values, index))
        # It names the member whose values cannot be averaged, which need not be the one that sent this last part.
        if wrong is not None:
            signals.blame(wrong.peer_id, wrong)
        else:
            signals.ready(index)


def _part_of(values: AttemptData, step: Step, coming: IncomingPart) -> ReceivePart:
    return ReceivePart(coming, trailer_bytes(values.proofs, step.kind) if step.last else 0, step.ends)


def _average(values: AttemptData, index: int) -> BadContributionError | None:
    try:
        values.average(index)
    except BadContributionError as error:
        return error
    return None


def receiving_share(values: AttemptData, reducer: str, steps: Sequence[Step], signals: Signals) -> Moves:
    """Yield the moves that receive the share of a reducer that is gone. Raises what :func:`receiving` raises."""
    payloads: list[Buffer] = []
    trailer = b""
    for step in steps:
        check_index((yield ReceiveIndex()), step.part)
        coming = IncomingPart(step.part.index, values.buffer(step.part))
        trailer = yield _part_of(values, step, coming)
        payloads.append(coming.payload)
    # All at once, so that a share is never of two sources.
    for number in (yield RunWork(partial(values.receive_share, reducer, payloads, trailer))):
        signals.ready(number)
    signals.progressed()
