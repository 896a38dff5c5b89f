"""The averager of a trio program. :mod:`p2pavg.blocking` offers the same to ordinary threads."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import trio

from p2pavg.allreduce.vector.accumulation import Accumulation, Given, Schema
from p2pavg.base.errors import ClosedError
from p2pavg.base.limits import LOOK_SECONDS, TAIL_SECONDS, WARN_WAIT_SECONDS
from p2pavg.base.messages import pack
from p2pavg.base.result import InProgress, NoPeers, NoPeersCode, RoundResult, Success, Tensors
from p2pavg.base.threads.waits import told_while_waiting
from p2pavg.group.bandwidth import BandwidthMeter
from p2pavg.group.places.gossip import ROUND, Rotation, SearchPlace, SearchStage, stages_at
from p2pavg.group.topology import Gossip
from p2pavg.net.nat.reach.reachability import Reachability
from p2pavg.peer.contributing import open_rounds
from p2pavg.peer.host import Host, JoinedRun
from p2pavg.peer.shared_states import ShareSettings, open_sharing
from p2pavg.peer.statuses import Statuses
from p2pavg.peer.step_plan import StepPlan, checked_plan, checked_wait
from p2pavg.peer.watched import Telemetry
from p2pavg.round.roles import Contributor
from p2pavg.round.round import Round
from p2pavg.round.rounds import Rounds
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.membership.certificate import Role
from p2pavg.runs.records.board import Board
from p2pavg.state.choice import TOPIC
from p2pavg.state.sharing import StateSharing
from p2pavg.telemetry.hub import Events, OnEvent, Subscription
from p2pavg.telemetry.status import RunPeer

if TYPE_CHECKING:
    # libp2p installs trio-typing, whose stubs mypy prefers to trio's own.
    from trio_typing import TaskStatus

logger = logging.getLogger(__name__)

_ALONE = "p2pavg/alone/1"
OpenAverager: TypeAlias = "Callable[[AveragingConfig], AbstractAsyncContextManager[DecentralizedAverager]]"


class DecentralizedAverager:
    """Averages what is accumulated with other peers of the same run.

    Made by :meth:`p2pavg.Peer.averager`. ``accumulate``, ``accumulated``, ``weight`` and ``clear`` may be called from
    any thread; ``step`` belongs to trio.
    """

    def __init__(
        self,
        host: Host,
        config: AveragingConfig,
        nursery: trio.Nursery,
        tails: trio.Nursery,
        open_averager: OpenAverager,
    ) -> None:
        self.config = config
        self._host = host
        self._open_averager = open_averager
        self._nursery = nursery
        self._tails = tails
        self._rotation: Rotation | None = None
        if isinstance(config.aggregation.topology, Gossip):
            self._rotation = Rotation(host.id, config.group_size, config.match_timeout)
        # In gossip the round's number travels as a metric: the group's median says how far the others are.
        own_metrics = () if self._rotation is None else (ROUND,)
        self._accumulation = Accumulation(config.max_weight, own_metrics)
        self._meter = BandwidthMeter(
            given_mbps=config.bandwidth,
            max_upload_mbps=config.max_upload_mbps,
            max_download_mbps=config.max_download_mbps,
        )
        self._rounds: Rounds | None = None
        self._expected: frozenset[str] = frozenset()
        self._run = JoinedRun(host, config.run_id, config.access)
        self._sharing: StateSharing | None = None
        self._round: Round[RoundResult] | None = None
        self._watched = Telemetry(host, config, self._run, nursery, self._meter)
        self._stepping = trio.Lock()
        self._closed = False
        # Said at the start: afterwards an open run looks like any other.
        if config.open_run:
            logger.warning(
                "the run %r is open: any peer that knows this name can read and change its averages",
                config.run_id,
            )
        # From the beginning, before any round: revocations and evidence must be known when the first group forms.
        nursery.start_soon(self._run.run)

    @property
    def peer_id(self) -> str:
        """This peer's id."""
        return self._host.id

    @property
    def reachability(self) -> Reachability:
        """The ways in which others can reach this peer, as far as it knows; ``reachability.sentence`` is in words."""
        return self._host.context.transport.reachability

    @property
    def addresses(self) -> list[str]:
        """Addresses at which others can dial this peer; each ends in ``/p2p/<peer id>``."""
        return self._host.addresses

    @property
    def excluded(self) -> Mapping[str, str]:
        """Peers that are excluded from the run because evidence proves that they lied: the reason, by peer id.

        Any peer that sees a lie can prove it to the others by signatures of the liar, and each peer verifies this proof
        itself. An excluded peer is in no later group of this peer, for as long as this peer takes part in the run. May
        be read from any thread.
        """
        return self._run.excluded

    @property
    def events(self) -> Events:
        """Delivers the events of this averager to its subscribers. Optimizers emit theirs through it."""
        return self._watched.events

    @property
    def statuses(self) -> Statuses:
        """The status that this peer publishes, and those of the run's other peers."""
        return self._watched.statuses

    def subscribe(self, callback: OnEvent) -> Subscription:
        """Call ``callback`` with every event of this averager from now on.

        It is called in the thread in which the event happens: trio's for rounds and for other peers, the training
        loop's for updates. So it must return soon, and must not call the averager. An exception that it raises is
        logged once.

        Args:
            callback: takes one event of :mod:`p2pavg.telemetry.events`.

        Returns:
            The subscription; its ``cancel`` ends it.
        """
        return self._watched.events.subscribe(callback)

    def members(self) -> tuple[RunPeer, ...]:
        """Return the peers of the run that publish a status, this one first. May be called from any thread.

        A peer appears within seconds of opening its averager. It is gone at once when it closes the averager, within
        seconds when its process has ended and it was in this peer's last round, and within 15 s otherwise. What a peer
        says of itself is its claim: a hostile peer may lie about its own entry, and about no other.
        """
        return self._watched.statuses.members()

    def declare(self, tensors: Given) -> None:
        """Describe the tensors without accumulating anything, so that :meth:`step` can observe.

        Args:
            tensors: as for :meth:`accumulate`; their values are not read.

        Raises:
            AccumulateError, ClosedError: as :meth:`accumulate`.
        """
        self._check_open()
        self._accumulation.declare(tensors)

    def accumulate(
        self, tensors: Given, *, weight: float = 1.0, metrics: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Add tensors to this peer's next contribution, which is their weighted mean.

        Args:
            tensors: a sequence, or a mapping from names, of dense tensors of float32, float16 or bfloat16, on CPU or
                CUDA; always the same number, names, shapes, dtypes and devices as in the first call. They are read,
                not kept.
            weight: how much they count, in samples; finite and above 0, and at most ``config.max_weight``. Of what adds
                up to more, the mean goes into the round and counts ``max_weight``.
            metrics: what was measured on these samples, e.g. ``{"loss": 2.3}``: finite numbers, 16 names at most. Their
                means by weight, over calls and then over peers, are in the round's :attr:`p2pavg.Success.metrics`.

        Raises:
            AccumulateError: anything else, NaN and Inf among the values too; the message names the tensor, and nothing
                of this call is accumulated.
            ClosedError: the averager is closed.
        """
        self._check_open()
        self._accumulation.add(tensors, weight, metrics)

    @property
    def accumulated(self) -> Tensors | None:
        """A copy of the weighted mean of what waits for the next round; ``None`` when nothing does."""
        return self._accumulation.mean()

    @property
    def weight(self) -> float:
        """Summed weight, in samples, of what waits for the next round."""
        return self._accumulation.weight

    @property
    def unresolved_weight(self) -> float:
        """Summed weight, in samples, of what went into rounds from which this peer was cut off.

        It is not known yet whether the others used it (:attr:`p2pavg.Failed.contribution_used`). If they did not, it
        counts as accumulated again.
        """
        return self._accumulation.unresolved_weight

    def clear(self) -> None:
        """Forget what was accumulated, also what a round that fails would give back."""
        self._accumulation.clear()

    def apply_locally(self, state: bytes) -> Success | None:
        """Take what is accumulated as the average of this peer alone, without a round; ``None`` if nothing is.

        For an optimizer that takes updates while no other peer is there. No round of this averager may run. The
        result's ``group_id`` follows from the peer and the state. No group has it, so two peers that go on alone from
        the same state are in different states afterwards.

        Args:
            state: state of the tensors before the update.
        """
        self._check_open()
        taken = self._accumulation.take()
        if taken is None:
            return None
        averaged = taken.schema.unflatten(taken.mean.clone())
        self._accumulation.release(taken)
        return Success(
            averaged=averaged,
            peers=(self.peer_id,),
            weights={self.peer_id: taken.weight},
            total_weight=taken.weight,
            compression_ratio=1.0,
            bytes_sent=0,
            bytes_received=0,
            duration=0.0,
            exchange_duration=0.0,
            group_id=hashlib.sha256(pack(_ALONE, self.peer_id, state)).hexdigest(),
            share=(0, taken.schema.elements),
            metrics=taken.metrics.means,
        )

    @property
    def round_state(self) -> bytes | None:
        """The ``state`` of the round that runs or whose result was not collected yet; ``None`` without one."""
        return None if self._round is None else self._round.role.state

    async def step(
        self,
        *,
        wait: float | None,
        state: bytes = b"",
        observe: bool = False,
        group_size: int | None = None,
        contributors: int = 0,
        meeting: SearchPlace | Sequence[SearchStage] | None = None,
    ) -> RoundResult:
        """Average, or report the progress of a round that runs.

        Starts a round if none runs; what is accumulated from then on belongs to the next one. The round goes on in
        the background when this call returns before it has ended, and a later call collects its result.

        Args:
            wait: 0 does not wait, a number waits for at most so many seconds, ``None`` until there is a result or the
                match timeout has passed without a group.
            state: up to 32 bytes that name what the tensors belong to, such as the parameters that gradients are of:
                a round is among peers of the same state. Like the next two, it counts for a round that this call
                starts.
            observe: hold the result, and contribute nothing: what is accumulated stays. :meth:`declare` says of what,
                if nothing was accumulated yet.
            group_size: members that the round aims at instead of ``config.group_size``, when it is known how many
                will come; ``config.min_group_size`` to 64.
            contributors: contributors without which such a group is not complete, when it is known that the others only
                observe; 0 to 64.
            meeting: where to look for the group, one place after the other if several are given; by default among all
                peers that are ready, or where the topology says.

        Returns:
            * :class:`~p2pavg.Success`: ``averaged`` is the average of ``peers``; the contribution is used up. Not so
              when this peer is among its ``observers``, by ``observe`` or by the run's
              :attr:`~p2pavg.AveragingConfig.participation`: then everything accumulated still is.
            * :class:`~p2pavg.InProgress`: the round runs.
            * :class:`~p2pavg.NoPeers`: no other peer was ready by the match timeout, or nothing was accumulated.
            * :class:`~p2pavg.Failed`: the exchange did not come to an end, and why. As with ``NoPeers``, everything
              accumulated still is, and the next call begins another round.

        Raises:
            ClosedError: the averager is closed.
            BusyError: another averager of this peer, or its daemon, has the same tensors in the same run.
            ImportError: the codec needs a package for tensors on this device; what is accumulated stays.
            ValueError: ``wait`` is negative or not a number, or another argument is out of range.
        """
        self._check_open()
        # The arguments are checked even if a round runs and does not need them, so a mistake shows at once.
        plan = checked_plan(state, observe, group_size, contributors, self.config, meeting)
        # The wait counts from the call, also while another task holds the lock.
        deadline = trio.current_time() + checked_wait(wait)
        await trio.lowlevel.checkpoint()
        # A lock that is free is taken even with `wait=0`, whose deadline is over at the first checkpoint.
        with trio.move_on_at(deadline if self._stepping.locked() else math.inf) as scope:
            await self._stepping.acquire()
        if scope.cancelled_caught:  # another task waits for the round
            size = self.config.group_size
            other = InProgress(ready_peers=1, target_size=size, reason="another thread is averaging")
            return self._round.progress() if self._round else other
        try:
            # The averager may have been closed while this call waited for the lock.
            self._check_open()
            return await self._step(deadline, plan)
        finally:
            self._stepping.release()

    def expect(self, peers: Collection[str]) -> None:
        """Name the other peers that the rounds are to be with from now on; an empty collection names none.

        A group that this peer leads keeps their places: another contributor comes on top of them, and the group waits
        for them as it would without it. Call it before :meth:`step` begins a round, from any thread.
        """
        # One assignment of an immutable set, so any thread may do it while a round begins.
        self._expected = frozenset(peers) - {self.peer_id}

    async def rechecked(self, peer_id: str, why: str) -> None:
        """Note that a peer's contribution is not what its samples give; ``why`` is a sentence about it.

        Optimizers call it. The second time, this peer does not meet that one for a while.
        """
        await trio.lowlevel.checkpoint()
        if self._rounds is not None:
            self._rounds.rechecked(peer_id, why)

    async def cancel_matchmaking(self, reason: str) -> bool:
        """End the round that runs, if it has no group yet.

        A later :meth:`step` collects its result, :class:`~p2pavg.NoPeers` with this reason, and everything accumulated
        still is.

        Returns:
            Whether it did: a round that has a group goes on, since the others count on this peer.
        """
        await trio.lowlevel.checkpoint()
        return self._round is not None and self._round.cancel_matchmaking(reason)

    async def _step(self, deadline: float, plan: StepPlan) -> RoundResult:
        # A round that another call has begun is continued: its arguments count, and not the ones of this call.
        if self._round is None and not self._begin(plan):
            return NoPeers(reason="nothing is accumulated", code=NoPeersCode.NOTHING_ACCUMULATED)
        assert self._round is not None
        while True:
            # The result first: a call that comes after the end collects it even if its own time is over.
            if (result := self._round.result) is not None:
                self._round = None
                if self._rotation is not None and isinstance(result, Success):
                    self._rotation.took(result.peers, result.weights, result.metrics)
                return result
            # Once at each match timeout, so that a caller with `wait=None` can look after other things meanwhile.
            if (report := self._round.take_report()) is not None:
                return report
            with trio.move_on_at(deadline) as scope:
                # A program that waits for a slow member looks like one that hangs, so the log names the member.
                async with told_while_waiting(logger, self._round.exchange_word, first=WARN_WAIT_SECONDS):
                    await self._round.changed()
            # Closing has cancelled the round and woken this call, which has no result to return.
            self._check_open()
            # A result that came in the same turn of the event loop as the deadline is not left for the next call.
            if scope.cancelled_caught and self._round.result is None:
                return self._round.progress()

    def _begin(self, plan: StepPlan) -> bool:
        schema = self._accumulation.schema
        # An observer has no contribution; the schema alone says which peers it can meet.
        if schema is None or (self._accumulation.weight == 0 and not plan.observes):
            return False
        # Only here: the key under which peers find each other depends on the tensors, which the first call names.
        if self._rounds is None:
            # It raises while everything is still accumulated.
            self.config.codec.check_device(schema.device)
            self._rounds = open_rounds(
                self._host, self._run, self.config, schema, self._meter, self._nursery, self._tails
            )
        # From here on nothing can fail before the round owns what is taken.
        contribution = None if plan.observes else self._accumulation.take()
        if contribution is None and not plan.observes:  # cleared in another thread meanwhile
            return False
        stages, metrics = self._places(plan)
        role = Contributor(
            self._rounds.context,
            self.config,
            self._accumulation,
            schema,
            contribution,
            plan.state,
            on_average=None if self._sharing is None else self._sharing.committed,
            reports=self._watched.reports,
            metrics=metrics,
        )
        self._round = Round(self._rounds, role, plan.target, plan.contributors, stages, self._expected)
        self._nursery.start_soon(self._round.run)
        return True

    def _places(self, plan: StepPlan) -> tuple[Sequence[SearchStage], Mapping[str, float]]:
        """Return where the group of a round is looked for, and the metrics that the topology adds."""
        if plan.stages is not None or self._rotation is None:
            return plan.stages or stages_at(None), {}
        # Auxiliaries bring no partner to a cell, so they do not count for the number of cells.
        trains = sum(peer.role != Role.AUXILIARY for peer in self.members())
        return self._rotation.stages(trains), self._rotation.metrics

    def is_connected(self, peer_id: str) -> bool:
        """Return whether there is a connection to a peer. A process that is stopped, as by SIGSTOP, keeps its own."""
        return self._host.context.transport.is_connected(peer_id)

    async def board(
        self, topic: str, look_seconds: float = LOOK_SECONDS, *, lasts: float | None = None
    ) -> Board:
        """Return the board of a topic: short texts that the peers of the run publish. One topic has one object.

        Args:
            look_seconds: between two looks for what does not come by itself; of the first call for a topic.
            lasts: seconds for which this peer's text can be read after the averager has closed; ``None``: not at all.
                Also of the first call for a topic.

        Raises:
            ClosedError: the averager is closed.
        """
        self._check_open()
        await trio.lowlevel.checkpoint()
        return self._watched.boards.open(topic, look_seconds, lasts)

    async def share_states(self, settings: ShareSettings) -> StateSharing:
        """Offer states to other peers of the run from now on, and be able to fetch theirs.

        The optimizers of :mod:`p2pavg.optim` use it. Call :meth:`declare` before. A later call, of another optimizer,
        ends what the earlier one shares.

        Raises:
            ClosedError: the averager is closed.
            ValueError: the averager has not been told of any tensors.
        """
        self._check_open()
        schema = self._accumulation.schema
        if schema is None:
            raise ValueError("call declare() before, so that it is known what a state is of")
        if self._sharing is not None:
            self._sharing.end()
        board = await self.board(TOPIC)
        # In the averager's nursery: what is shared outlives this call, and ends with the averager.
        self._sharing = await self._nursery.start(self._share, schema, settings, board)
        return self._sharing

    async def _share(
        self,
        schema: Schema,
        settings: ShareSettings,
        board: Board,
        *,
        task_status: TaskStatus[StateSharing] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        async with open_sharing(
            self._host,
            self._run,
            self.config,
            schema,
            settings,
            board,
            lambda: self._round is not None and self._round.is_exchanging,
            # A state has what rounds leave of the link, so the donor has to know what the link carries.
            lambda: self._meter.announced_mbps,
            self.events.emit,
        ) as sharing:
            task_status.started(sharing)
            await sharing.ended.wait()

    def sibling(self, config: AveragingConfig) -> AbstractAsyncContextManager[DecentralizedAverager]:
        """Open another averager of the same peer. See :meth:`p2pavg.Peer.averager`."""
        return self._open_averager(config)

    async def aclose(self) -> None:
        """End the round that runs, if any, and release everything within 2 s. What was accumulated stays readable."""
        if self._closed:
            return
        # Before anything is awaited: no call may begin a round from now on, and a second `aclose` returns at once.
        self._closed = True
        if self._round is not None:
            # The contribution is given back, so that it stays readable.
            self._round.scope.cancel()
        # Shielded, since the caller may be cancelled: records that are not withdrawn make others wait for this peer.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + TAIL_SECONDS):
            async with trio.open_nursery() as nursery:
                # All withdrawals at once: each is a call to other peers, and together they have two seconds.
                self._watched.boards.close(nursery)
                if self._rounds is not None:
                    nursery.start_soon(self._rounds.matchmaker.close)
                    # The entry in the run is one for all averagers of this peer, so the last of them withdraws it.
                    if self._host.registry.remove_averager(self._rounds.matchmaker.key, self.config.run_id):
                        nursery.start_soon(self._rounds.leave)
            self._watched.statuses.close()
            self._run.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the averager is closed")


def waiting_round(averager: DecentralizedAverager) -> object | None:
    """Return the round that runs, if ``step`` could only return its progress. Any thread may call this."""
    # Read once: trio's thread may end the round between two reads.
    running = averager._round
    return running if running is not None and running.only_waits else None
