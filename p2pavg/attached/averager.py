"""The averager of a process that is attached to a peer of this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar, cast

import torch

from p2pavg.allreduce.vector.accumulation import Accumulation, Given
from p2pavg.attached.channel import AttachedRound, Channel
from p2pavg.attached.link import Link, wait_until
from p2pavg.attached.messages import MAX_CHANNELS, process_id, short, update_fields
from p2pavg.attached.results import round_ended
from p2pavg.attached.settings import check_shareable
from p2pavg.attached.sharing import AttachedSharing
from p2pavg.base.errors import AttachError, BusyError, ClosedError, ConfigError
from p2pavg.base.result import InProgress, NoPeers, RoundResult, Success, Tensors
from p2pavg.blocking import Averager
from p2pavg.group.places.meeting import Meeting, Stage
from p2pavg.net.nat.reach.reachability import Reachability
from p2pavg.peer.alone import take_alone
from p2pavg.peer.averager import DecentralizedAverager
from p2pavg.peer.shared_states import ShareSettings
from p2pavg.peer.statuses import LOOK_SECONDS as STATUS_LOOK_SECONDS
from p2pavg.peer.statuses import HeardStatuses, Statuses
from p2pavg.peer.step_plan import StepPlan, checked_plan, checked_wait
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.records.board import LOOK_SECONDS, Topic
from p2pavg.state.news import TOPIC as STATES
from p2pavg.state.sharing import StateSharing
from p2pavg.telemetry.events import AnyEvent, Drifted, UpdateTaken
from p2pavg.telemetry.hub import Events, OnEvent, Subscription
from p2pavg.telemetry.members import RunPeer, run_peer
from p2pavg.telemetry.status import TOPIC

T = TypeVar("T")

ANSWER_SECONDS = 15.0
"""Time that the peer may take for an answer: it closes an averager within 2 s before it opens it again."""


class AttachedAverager(Averager):
    """A :class:`p2pavg.blocking.Averager` of a process that shares its peer. Made by :meth:`AttachedPeer.averager`.

    The processes of a peer are one member of a group. Each sees the others: an id is ``PEER_ID/NAME`` there, on boards
    and in results, while other peers see one peer, whose weight is the sum.

    If the peer ends, the round goes on when it is back, and everything accumulated is kept.
    """

    def __init__(self, link: Link, number: int, config: AveragingConfig) -> None:
        check_shareable(config)
        self._config = config
        self._link = link
        self._accumulation = Accumulation(config.max_weight)
        self.channel = Channel(link, number, config, self._accumulation)
        """Its end of the connection."""
        self._stepping = threading.Lock()
        self._events = Events()
        self._events.subscribe(self._pass_on)
        self._expected: tuple[str, ...] | None = None
        self._numbers = 0
        self._closed = False

    @property
    def config(self) -> AveragingConfig:
        """The configuration that it was opened with."""
        return self._config

    @property
    def peer_id(self) -> str:
        """This process's id, ``PEER_ID/NAME``."""
        return process_id(self._link.peer_id, self._link.name)

    @property
    def addresses(self) -> list[str]:
        """Addresses at which other peers can dial the peer, when this process attached."""
        return list(self._link.addresses)

    @property
    def excluded(self) -> Mapping[str, str]:
        """See :attr:`p2pavg.DecentralizedAverager.excluded`; as of the last round."""
        return MappingProxyType(self.channel.excluded)

    @property
    def reachability(self) -> Reachability:
        """An attached process does not know it: the peer's log says it.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a process that is attached to a peer does not know how others reach it",
            remedy="read the peer's log, or `members()` on another peer",
        )

    @property
    def events(self) -> Events:
        """The events of this process: of its optimizers, and of its rounds.

        The peer's subscribers get them once for all processes. Bytes and ways are known to the peer only.
        """
        return self._events

    def subscribe(self, callback: OnEvent) -> Subscription:
        """See :meth:`p2pavg.DecentralizedAverager.subscribe`; delivers what :attr:`events` says."""
        return self._events.subscribe(callback)

    def _pass_on(self, event: AnyEvent) -> None:
        """Tell the peer of what it cannot know itself."""
        if isinstance(event, UpdateTaken):
            self.channel.tell("updated", *update_fields(event))
        elif isinstance(event, Drifted):
            self.channel.tell("drifted", short(event.sentence))

    @property
    def statuses(self) -> Statuses:
        """An attached process publishes no status of its own.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a process that is attached to a peer publishes no status",
            remedy="use `members()`, or ask the peer",
        )

    @contextmanager
    def beside(
        self,
        enter: Callable[[DecentralizedAverager], AbstractAsyncContextManager[T]],  # noqa: ARG002
    ) -> Iterator[T]:
        """An attached process has no trio thread of its own.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a process that is attached to a peer has no trio thread, in which a monitor could run",
            remedy="let the peer show the run: `p2pavg peer --monitor PORT`",
        )
        yield

    def members(self) -> tuple[RunPeer, ...]:
        """See :meth:`p2pavg.DecentralizedAverager.members`. The peer of this process is not among them."""
        heard = HeardStatuses(self.board(TOPIC, STATUS_LOOK_SECONDS), time.time).read()
        return tuple(run_peer(peer_id, said.status, said.at) for peer_id, said in heard.items())

    # ------------------------------------------------------------------ what is accumulated

    def declare(self, tensors: Given) -> None:
        """See :meth:`p2pavg.DecentralizedAverager.declare`."""
        self._check()
        self._accumulation.declare(tensors)
        self._describe()

    def accumulate(
        self,
        tensors: Given,
        *,
        weight: float = 1.0,
        metrics: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """See :meth:`p2pavg.DecentralizedAverager.accumulate`; runs in the calling thread."""
        self._check()
        self._accumulation.add(tensors, weight, metrics)
        self._describe()

    def _describe(self) -> None:
        channel, schema = self.channel, self._accumulation.schema
        assert schema is not None
        with self._link.changed:
            channel.describe(schema)
            wait_until(self._link, lambda: channel.is_described or channel.error is not None, ANSWER_SECONDS)
            self._check()

    @property
    def accumulated(self) -> Tensors | None:
        """A copy of the weighted mean of what is accumulated for the next round; ``None`` when nothing is."""
        return self._accumulation.mean()

    @property
    def weight(self) -> float:
        """The summed weight, in samples, of what this process has accumulated for the next round."""
        return self._accumulation.weight

    @property
    def unresolved_weight(self) -> float:
        """Always 0: a contribution whose fate is not known counts as accumulated again."""
        return self._accumulation.unresolved_weight

    def clear(self) -> None:
        """Discard everything accumulated, including what a round that fails would give back."""
        self._accumulation.clear()

    def take_alone(self, state: bytes) -> Success | None:
        """See :meth:`p2pavg.DecentralizedAverager.take_alone`."""
        self._check()
        return take_alone(self._accumulation, self.peer_id, state)

    # ------------------------------------------------------------------ rounds

    @property
    def round_state(self) -> bytes | None:
        """See :attr:`p2pavg.DecentralizedAverager.round_state`."""
        round_ = self.channel.round
        return None if round_ is None else round_.plan.state

    def expect(self, peers: Collection[str]) -> None:
        """Name the peers and processes that the next rounds are to be with.

        Without this call, a round waits for all processes of its run that are attached to the peer.
        """
        self._expected = tuple(peers)

    @property
    def has_places(self) -> bool:
        """False: the processes of a peer are one member of a group."""
        return False

    def certifies(self, peers: Collection[str]) -> bool:
        """See :meth:`p2pavg.blocking.Averager.certifies`."""
        prefix = process_id(self._link.peer_id, "")
        return any(not peer.startswith(prefix) for peer in peers)

    def step(
        self,
        *,
        wait: float | None,
        state: bytes = b"",
        observe: bool = False,
        group_size: int | None = None,
        contributors: int = 0,
        meeting: Meeting | Sequence[Stage] | None = None,
    ) -> RoundResult:
        """See :meth:`p2pavg.DecentralizedAverager.step`.

        ``group_size`` counts processes and other peers. While the peer is not there, the result is
        :class:`~p2pavg.InProgress`, and its reason says so. :class:`~p2pavg.Failed` with ``contribution_used=None``
        says that the peer ended while it exchanged with others; the contribution counts as accumulated again.

        Raises:
            ConfigError, AccumulateError: the other processes have another configuration, or average other tensors.
            ValueError: an argument is out of range, or there is a ``meeting``: the processes of a peer are one member.
        """
        if meeting is not None:
            raise ValueError(
                "a process that shares its peer with others looks for groups in the common place only"
            )
        plan = checked_plan(state, observe, group_size, contributors, self._config)
        seconds = checked_wait(wait)
        end = time.monotonic() + min(seconds, threading.TIMEOUT_MAX)
        if not self._stepping.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            return InProgress(
                ready_peers=1, target_size=self._config.group_size, reason="another thread is averaging"
            )
        try:
            with self._link.changed:
                self._check()
                if self.channel.round is None and not self._begin(plan):
                    return NoPeers(reason="nothing is accumulated")
                round_ = self.channel.round
                assert round_ is not None
                while round_.result is None:
                    left = end - time.monotonic()
                    if left <= 0:
                        return round_.progress
                    self._link.changed.wait(left)
                    self._check()
                self.channel.round = None
        finally:
            self._stepping.release()
        assert round_.result is not None
        duration = time.monotonic() - round_.began
        self._events.emit(
            round_ended(
                round_.result,
                time=time.time(),
                duration=duration,
                run_id=self._config.run_id,
                process=self.peer_id,
                excluded=self.channel.excluded,
            )
        )
        return self._whole(round_)

    def _begin(self, plan: StepPlan) -> bool:
        schema = self._accumulation.schema
        if schema is None:
            return False
        contribution = None if plan.observes else self._accumulation.take()
        if contribution is None and not plan.observes:
            return False
        self._numbers += 1
        progress = InProgress(
            ready_peers=1,
            target_size=plan.target or self._config.group_size,
            reason="asking the peer for a round",
        )
        self.channel.begin(
            AttachedRound(self._numbers, plan, contribution, self._expected, progress, time.monotonic())
        )
        return True

    def _whole(self, round_: AttachedRound) -> RoundResult:
        """Return the result with its tensors, which are made in the calling thread."""
        result, schema = round_.result, self._accumulation.schema
        assert result is not None
        if not isinstance(result, Success):
            return result
        assert schema is not None
        assert round_.vector is not None
        return replace(result, averaged=schema.unflatten(round_.vector))

    def cancel_matchmaking(self, reason: str) -> bool:
        """See :meth:`p2pavg.DecentralizedAverager.cancel_matchmaking`."""
        channel = self.channel
        with self._link.changed:
            self._check()
            round_ = channel.round
            if round_ is None or round_.result is not None:
                return False
            if channel.end_unsent(reason):
                return True
            channel.cancel(round_.number, reason)
            wait_until(self._link, lambda: round_.number in channel.cancelled, ANSWER_SECONDS)
            return channel.cancelled.get(round_.number, False) or channel.end_unsent(reason)

    # ------------------------------------------------------------------ beside the rounds

    def share_states(self, settings: ShareSettings) -> StateSharing:
        """See :meth:`p2pavg.DecentralizedAverager.share_states`. The peer sends and fetches states for this process.

        The limits are those of the first process of the run. A download is kept in memory, whatever the directory.
        """
        schema = self._accumulation.schema
        if schema is None:
            raise ValueError("call declare() before, so that it is known what a state is of")
        limits = (
            settings.log_bytes,
            float(settings.upload_mbps or 0.0),
            float(settings.download_mbps or 0.0),
        )
        channel = self.channel
        with self._link.changed:
            self._check()
            sharing = AttachedSharing(
                self._link,
                channel.topic(STATES, LOOK_SECONDS),
                channel.tell,
                lambda vector: cast(list[torch.Tensor], schema.unflatten(vector)),
                limits,
            )
            channel.share(sharing)
            wait_until(self._link, lambda: sharing.is_shared or channel.error is not None, ANSWER_SECONDS)
            self._check()
            if not sharing.is_shared:
                raise AttachError(self._link.why_down)
        return sharing

    @contextmanager
    def sibling(self, config: AveragingConfig) -> Iterator[Averager]:
        """Open another averager of this process for as long as the block runs, for another run."""
        self._check()
        with open_channel(self._link, config) as averager:
            yield averager

    def open_sibling(self, config: AveragingConfig) -> tuple[Averager, Callable[[], None]]:
        """Open another averager of this process, for another run; return it, and the function that closes it."""
        stack = ExitStack()
        return stack.enter_context(self.sibling(config)), stack.close

    def board(self, topic: str, look_seconds: float = LOOK_SECONDS) -> Topic:
        """See :meth:`p2pavg.DecentralizedAverager.board`. It shows the other processes of the peer, too."""
        with self._link.changed:
            self._check()
            return self.channel.topic(topic, look_seconds)

    def _check(self) -> None:
        self._link.check()
        if self._closed:
            raise ClosedError("the averager is closed")
        if self.channel.error is not None:
            raise self.channel.error

    # ------------------------------------------------------------------ opening and closing

    def open(self, number: int) -> None:
        """Open it at the peer, with :attr:`Link.changed` held.

        Raises:
            ConfigError, BusyError: the peer refuses it; the message says why.
            AttachError: the peer does not answer.
        """
        channel = self.channel
        self._link.listeners[number] = channel
        if self._link.is_up:
            channel.attached()
        wait_until(self._link, lambda: channel.is_open or channel.error is not None, ANSWER_SECONDS)
        if channel.error is not None:
            raise channel.error
        if not channel.is_open:
            raise AttachError(self._link.why_down)

    def close(self) -> None:
        """Close it; what was accumulated stays readable."""
        if self.channel.sharing is not None:
            self.channel.sharing.close()
        with self._link.changed:
            self._closed = True
            self.channel.close()
            self._link.changed.notify_all()


@contextmanager
def open_channel(link: Link, config: AveragingConfig) -> Iterator[AttachedAverager]:
    """Open an averager over a connection, for as long as the block runs."""
    with link.changed:
        number = next((number for number in range(MAX_CHANNELS) if number not in link.listeners), None)
        if number is None:
            raise BusyError(f"this process has {MAX_CHANNELS} averagers open; close one")
        averager = AttachedAverager(link, number, config)
        try:
            averager.open(number)
        except BaseException:
            del link.listeners[number]
            raise
    try:
        yield averager
    finally:
        averager.close()
        with link.changed:
            del link.listeners[number]
