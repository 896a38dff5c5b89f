"""Rounds of the processes that are attached to one peer: with other peers, or among themselves."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
import trio

from p2pavg.allreduce.vector.accumulation import Schema
from p2pavg.allreduce.vector.metrics import MetricMeans
from p2pavg.attached.combining import Part, ProcessContributionError, combine
from p2pavg.attached.group import Begin, Gather, GiveUp, LocalGroup
from p2pavg.attached.guest import Guest
from p2pavg.attached.messages import Step, process_id, short
from p2pavg.attached.results import alone_success, encode_success, joint_success
from p2pavg.attached.segments import ContributionSegment, ResultWriter
from p2pavg.attached.shared_states import SharedStates
from p2pavg.attached.standing import LocalAverage
from p2pavg.base.codes import NoPeersCode
from p2pavg.base.errors import P2PAvgError
from p2pavg.base.limits import MAX_GROUP_SIZE
from p2pavg.base.result import EXCHANGES, Failed, InProgress, NoPeers, RoundResult, Success
from p2pavg.base.threads.workers import RunInThread
from p2pavg.peer.averager import DecentralizedAverager
from p2pavg.runs.config import AveragingConfig
from p2pavg.telemetry.events import RoundEnded, RoundKind

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two reports of a round's progress
READ_SECONDS = 30.0
"""Time that a process has for copying a result before the next one takes its place. Then it is dropped."""
LEAVES = "this peer leaves"
_USED = {False: 0, True: 1, None: -1}


@dataclass(slots=True)
class Seat:
    """One process's averager in a run."""

    guest: Guest
    channel: int
    segment: ContributionSegment | None = None
    unread: int = 0
    """Serial of the result that the process has not copied yet; 0 if there is none."""
    told: object = None
    """The progress that the process was told last."""


@dataclass(frozen=True, slots=True)
class _Member:
    """A process in a round."""

    seat: Seat
    step: Step

    @property
    def name(self) -> str:
        return self.seat.guest.name

    @property
    def part(self) -> Part:
        assert self.seat.segment is not None
        return Part(self.name, self.step.weight, self.seat.segment.values)

    def tell(self, kind: str, *fields: object) -> None:
        self.seat.guest.send(kind, self.seat.channel, *fields)


class SharedRounds:
    """The rounds of one run.

    Args:
        averager: of this peer; nothing else uses it.
        config: its configuration.
        run_in_thread: how contributions are combined off the event loop.
        wall_clock: returns seconds since 1970.
    """

    def __init__(
        self,
        averager: DecentralizedAverager,
        config: AveragingConfig,
        run_in_thread: RunInThread,
        wall_clock: Callable[[], float],
    ) -> None:
        self._wall_clock = wall_clock
        self._averager = averager
        self._config = config
        self._run_in_thread = run_in_thread
        self._group = LocalGroup(config.group_size, config.min_group_size, config.match_timeout)
        self.seats: dict[str, Seat] = {}
        """The processes that have described their tensors, by name."""
        self.schema: Schema | None = None
        self.states: SharedStates | None = None
        """The states that the processes share; ``None`` if they share none."""
        self.result: ResultWriter | None = None
        self._vector: torch.Tensor | None = None
        # A later peer must not take another peer's round for its own.
        self._serial = secrets.randbits(40) << 16
        self._woken = trio.Event()
        self._taken = trio.Event()
        self._running: dict[str, _Member] = {}
        self._looks = False  # for other peers
        self._exchanges = False  # with other peers
        self._finishing = False
        self._idle = trio.Event()
        """Set when no round runs and none will begin."""
        self._cancelled: dict[str, str] = {}
        """Reasons of the processes that have cancelled while the round that runs looked for other peers."""

    def sit(self, seat: Seat) -> None:
        """Let a process take part; its segment is there."""
        name = seat.guest.name
        self.seats[name] = seat
        self._group.join(name)
        self._wake()

    def leave(self, name: str) -> None:
        """Forget a process. What it has contributed to a round that runs still counts."""
        seat = self.seats.pop(name, None)
        if seat is not None and seat.segment is not None:
            seat.segment.close()
        self._group.leave(name)
        self._taken.set()
        self._wake()

    def ask(self, name: str, step: Step) -> None:
        """Take in a process's request for a round."""
        self._group.ask(name, step, self._averager.peer_id, trio.current_time())
        self._wake()

    def taken(self, name: str, serial: int) -> None:
        """Note that a process has copied a result."""
        if self.seats[name].unread == serial:
            self.seats[name].unread = 0
            self._taken.set()

    async def cancel(self, name: str, number: int, reason: str) -> bool:
        """End a process's request, if its round has no group yet; return whether it did."""
        request = self._group.seats.get(name)
        if request is None or request.step.number != number:
            return False
        running = self._running
        if name not in running or not self._is_here(running[name]):
            self._end([self._member(name)], NoPeers(reason=reason, code=NoPeersCode.CANCELLED))
            return True
        if self._looks and await self._averager.cancel_matchmaking(reason) and self._running is running:
            self._cancelled[name] = reason
            return True
        return False

    @property
    def is_exchanging(self) -> bool:
        """True while a round runs that has its group, or needs none."""
        return bool(self._running) and not (self._looks and not self._exchanges)

    async def finish(self) -> None:
        """Begin no further round; wait until the one that runs has ended. One that has no group yet ends at once.

        The processes keep their requests, and hand them to the next peer at this socket.
        """
        self._finishing = True
        self._wake()
        self._taken.set()
        if self._looks:
            await self._averager.cancel_matchmaking(LEAVES)
        await self._idle.wait()

    def _wake(self) -> None:
        self._woken.set()

    # ------------------------------------------------------------------ rounds

    async def run(self) -> None:
        """Begin the rounds that are due, until cancelled."""
        while not self._finishing:
            woken = self._woken = trio.Event()
            decision = self._group.decide(trio.current_time())
            if isinstance(decision, Gather):
                for name, reason in decision.reasons.items():
                    self._progress(self._member(name), 1, self._config.group_size, reason)
                with trio.move_on_at(decision.until):
                    await woken.wait()
            elif isinstance(decision, GiveUp):
                self._end([self._member(decision.name)], NoPeers(reason=decision.reason))
            elif any(seat.unread for seat in self.seats.values()):
                # Processes may leave, cancel or ask for another round meanwhile: decide again then.
                await self._until_all_have_read()
            else:
                await self._round(decision)
        self._idle.set()
        await trio.sleep_forever()  # the boards and states of the run live on

    async def _round(self, plan: Begin) -> None:
        """Carry out a plan that was decided just now, with no wait since."""
        self._serial += 1
        self._running = {name: self._member(name) for name in plan.members}
        try:
            for member in self._running.values():
                member.tell("begun", member.step.number, self._serial)
            await self._carry_out(plan)
        except ProcessContributionError as error:
            self._refuse(error)
        except P2PAvgError as error:
            logger.warning("a round of the attached processes failed: %s", error)
            self._end(self._running.values(), Failed(reason=str(error)))
        finally:
            self._running = {}

    def _refuse(self, error: ProcessContributionError) -> None:
        """Drop the process whose values cannot be averaged; the others' round begins again without it."""
        seat = self.seats.get(error.name)
        if seat is not None:
            seat.guest.drop(str(error))
        self.leave(error.name)

    async def _carry_out(self, plan: Begin) -> None:
        began, self._cancelled = trio.current_time(), {}
        parts = [self._running[name].part for name in plan.contributors]
        if plan.remote:
            result = await self._with_others(plan, parts)
            if isinstance(result, NoPeers) and result.code is NoPeersCode.CANCELLED:
                for name, reason in self._cancelled.items():
                    self._end([self._running[name]], NoPeers(reason=reason, code=NoPeersCode.CANCELLED))
                return  # the others' requests stay
            if isinstance(result, Success):
                await self._pass_on(plan, result)
                return
            if not isinstance(result, NoPeers) or not self._group.may_average_alone(plan):
                self._end(self._running.values(), result)
                return
        await self._among_themselves(plan, parts, began)

    async def _among_themselves(self, plan: Begin, parts: list[Part], began: float) -> None:
        assert self.result is not None
        self.result.open()
        await self._run_in_thread(combine, parts, self.result.values, self._config.aggregation.robust)
        success = alone_success(
            self._averager.peer_id,
            plan,
            {name: member.step.weight for name, member in self._running.items()},
            {name: dict(member.step.metrics) for name, member in self._running.items()},
            serial=self._serial,
            elements=self.result.values.numel(),
            seconds=trio.current_time() - began,
        )
        await self._keep(plan, success)
        self._tell_of(success)
        self._commit(success)

    async def _keep(self, plan: Begin, success: Success) -> None:
        """Keep the average for a process that is behind. It has no certificate: no other peer would believe it."""
        assert self.result is not None
        if self.states is not None and self.states.keeps_averages:
            vector = await self._run_in_thread(self.result.values.clone)
            self.states.committed(success.group_id, LocalAverage(plan.state, encode_success(success), vector))

    def _tell_of(self, success: Success) -> None:
        """Tell the subscribers of the peer's averager of a round among its processes."""
        peer_id = self._averager.peer_id
        self._averager.events.emit(
            RoundEnded(
                time=self._wall_clock(),
                run_id=self._config.run_id,
                result=RoundKind.SUCCESS,
                group_id=success.group_id,
                members=(peer_id,),
                contributors=(peer_id,),
                excluded=tuple(self._averager.excluded),
                duration=success.duration,
                samples=success.total_weight,
                own_samples=success.total_weight,
                metrics=success.metrics,
            )
        )

    async def _with_others(self, plan: Begin, parts: list[Part]) -> RoundResult:
        """Contribute the processes' weighted mean to a round with other peers; return its result."""
        assert self.schema is not None
        if self._vector is None:
            self._vector = torch.empty(self.schema.elements)
        means, weight = MetricMeans(), sum(part.weight for part in parts)
        for part in parts:
            means.add(dict(self._running[part.name].step.metrics), part.weight)
        if parts:
            await self._run_in_thread(combine, parts, self._vector)
        self._averager.clear()  # what an earlier round gave back is with the processes
        self._averager.accumulate_vector(self.schema, self._vector, weight=weight, metrics=means.means)
        size = min(max(1 + plan.remote, self._config.min_group_size), MAX_GROUP_SIZE)
        contributors = plan.remote_contributors + bool(parts) if plan.remote_contributors else 0
        self._averager.expect(plan.others)
        self._looks = True
        try:
            while True:
                if self._finishing and not self._exchanges:
                    await self._averager.cancel_matchmaking(LEAVES)
                result = await self._averager.step(
                    wait=LOOK_SECONDS,
                    state=plan.state,
                    observe=not parts,
                    group_size=size,
                    contributors=min(contributors, MAX_GROUP_SIZE),
                )
                if not isinstance(result, InProgress):
                    return result
                self._exchanges = result.reason == EXCHANGES
                ready = len(plan.members) + result.ready_peers - 1
                for member in self._running.values():
                    self._progress(member, ready, plan.target, result.reason)
        finally:
            self._looks = self._exchanges = False

    async def _pass_on(self, plan: Begin, result: Success) -> None:
        assert self.result is not None
        self.result.open()
        averaged = result.averaged
        tensors = list(averaged.values()) if isinstance(averaged, dict) else averaged
        await self._run_in_thread(_write, tensors, self.result.values)
        weights = {name: member.step.weight for name, member in self._running.items()}
        self._commit(joint_success(result, self._averager.peer_id, plan, weights))

    def _commit(self, success: Success) -> None:
        """Commit a result whose vector is written, for all processes of the round at once."""
        assert self.result is not None
        here = [member for member in self._running.values() if self._is_here(member)]
        gone = {self._id(name) for name, member in self._running.items() if member not in here}
        lost = {**success.lost, **dict.fromkeys(sorted(gone), "the process has ended")}
        self.result.commit(self._serial, encode_success(replace(success, lost=lost)))
        for member in here:
            member.seat.unread = self._serial
            member.tell("committed", member.step.number, self._serial)
            self._group.cancel(member.name)
        self._tell_excluded()

    def _end(self, members: Iterable[_Member], result: RoundResult) -> None:
        """End requests without a result; the processes keep their contributions."""
        assert isinstance(result, Failed | NoPeers)
        used = _USED[result.contribution_used] if isinstance(result, Failed) else 0
        peer = (result.peer or "") if isinstance(result, Failed) else ""
        for member in members:
            if self._is_here(member):
                kind = type(result).__name__
                reason = (short(result.reason), str(result.code))
                member.tell("ended", member.step.number, kind, *reason, peer, used)
                self._group.cancel(member.name)
        self._tell_excluded()

    async def _until_all_have_read(self) -> None:
        """Wait until the last result may be overwritten; drop the processes that have not read it in time."""
        with trio.move_on_after(READ_SECONDS):
            while any(seat.unread for seat in self.seats.values()) and not self._finishing:
                taken = self._taken = trio.Event()
                await taken.wait()
        if self._finishing:
            return  # the result stays where it is
        for name in [name for name, seat in self.seats.items() if seat.unread]:
            self.seats[name].guest.drop(f"it has not read the last result within {READ_SECONDS:g} s")
            self.leave(name)

    # ------------------------------------------------------------------ one process

    def _id(self, name: str) -> str:
        return process_id(self._averager.peer_id, name)

    def _member(self, name: str) -> _Member:
        request = self._group.seats[name]
        assert request is not None
        return _Member(self.seats[name], request.step)

    def _is_here(self, member: _Member) -> bool:
        """Return whether a process is still attached, since it asked for the round."""
        return self.seats.get(member.name) is member.seat

    def _progress(self, member: _Member, ready: int, target: int, reason: str) -> None:
        fields = (member.step.number, ready, target, short(reason), reason == EXCHANGES)
        if self._is_here(member) and member.seat.told != fields:
            member.seat.told = fields
            member.tell("progress", *fields)

    def _tell_excluded(self) -> None:
        excluded = tuple((peer, short(reason)) for peer, reason in self._averager.excluded.items())[:1024]
        if excluded:
            for seat in self.seats.values():
                seat.guest.send("excluded", seat.channel, excluded)


@torch.no_grad()
def _write(tensors: list[torch.Tensor], out: torch.Tensor) -> None:
    """Write tensors into a flat float32 vector; float16 and bfloat16 fit into it exactly."""
    at = 0
    for tensor in tensors:
        out[at : at + tensor.numel()].copy_(tensor.reshape(-1))
        at += tensor.numel()
