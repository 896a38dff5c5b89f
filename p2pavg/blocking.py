"""The averager for ordinary threads: the only bridge between a training loop and trio.

One background thread runs trio with a peer and its averager. Calls may come from any thread; an exception of the
background thread is raised by the next call.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import trio

from p2pavg.allreduce.vector.accumulation import Given
from p2pavg.base.result import EXCHANGES, FORMS, InProgress, RoundResult, Success, Tensors
from p2pavg.base.threads.trio_thread import TrioThread
from p2pavg.group.places.meeting import Meeting, Stage
from p2pavg.net.nat.reach.reachability import Reachability
from p2pavg.net.nat.relay.limits import DEFAULT_RELAY_MBPS
from p2pavg.peer.averager import DecentralizedAverager, waiting_round
from p2pavg.peer.peer import DEFAULT_LISTEN, open_peer
from p2pavg.peer.shared_states import ShareSettings
from p2pavg.peer.statuses import Statuses
from p2pavg.peer.step_plan import checked_plan, checked_wait
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.records.board import LOOK_SECONDS, Topic
from p2pavg.state.sharing import StateSharing
from p2pavg.telemetry.hub import Events, OnEvent, Subscription
from p2pavg.telemetry.members import RunPeer

PROGRESS_SECONDS = 0.25
"""For so long, ``step(wait=0)`` may repeat what it said of a round that still runs."""

T = TypeVar("T")


class Averager:
    """A :class:`~p2pavg.DecentralizedAverager` whose calls block. Made by :func:`open_averager`."""

    def __init__(self, thread: TrioThread[DecentralizedAverager], averager: DecentralizedAverager) -> None:
        self._thread = thread
        self._averager = averager
        self._progress: tuple[float, object | None, InProgress | None] = (0.0, None, None)
        """Time until which progress is told again, the round that it is of, the progress."""

    @property
    def config(self) -> AveragingConfig:
        """The configuration that it was opened with."""
        return self._averager.config

    @property
    def peer_id(self) -> str:
        """This peer's id."""
        return self._averager.peer_id

    @property
    def addresses(self) -> list[str]:
        """Addresses at which other peers can dial this one; each ends in ``/p2p/<peer id>``."""
        return self._averager.addresses

    @property
    def excluded(self) -> Mapping[str, str]:
        """See :attr:`p2pavg.DecentralizedAverager.excluded`."""
        return self._averager.excluded

    @property
    def reachability(self) -> Reachability:
        """See :attr:`p2pavg.DecentralizedAverager.reachability`."""
        return self._averager.reachability

    @property
    def events(self) -> Events:
        """See :attr:`p2pavg.DecentralizedAverager.events`."""
        return self._averager.events

    @property
    def statuses(self) -> Statuses:
        """See :attr:`p2pavg.DecentralizedAverager.statuses`."""
        return self._averager.statuses

    def subscribe(self, callback: OnEvent) -> Subscription:
        """See :meth:`p2pavg.DecentralizedAverager.subscribe`."""
        return self._averager.subscribe(callback)

    def members(self) -> tuple[RunPeer, ...]:
        """See :meth:`p2pavg.DecentralizedAverager.members`."""
        self._thread.check()
        return self._averager.members()

    def declare(self, tensors: Given) -> None:
        """See :meth:`p2pavg.DecentralizedAverager.declare`."""
        self._thread.check()
        self._averager.declare(tensors)

    def accumulate(
        self,
        tensors: Given,
        *,
        weight: float = 1.0,
        metrics: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """See :meth:`p2pavg.DecentralizedAverager.accumulate`; runs in the calling thread."""
        self._thread.check()
        self._averager.accumulate(tensors, weight=weight, metrics=metrics)

    @property
    def accumulated(self) -> Tensors | None:
        """A copy of the weighted mean of what is accumulated for the next round; ``None`` when nothing is."""
        return self._averager.accumulated

    @property
    def weight(self) -> float:
        """The summed weight, in samples, of what is accumulated for the next round."""
        return self._averager.weight

    @property
    def unresolved_weight(self) -> float:
        """See :attr:`p2pavg.DecentralizedAverager.unresolved_weight`."""
        return self._averager.unresolved_weight

    def clear(self) -> None:
        """Discard everything accumulated, including what a round that fails would give back."""
        self._averager.clear()

    def take_alone(self, state: bytes) -> Success | None:
        """See :meth:`p2pavg.DecentralizedAverager.take_alone`; runs in the calling thread."""
        self._thread.check()
        return self._averager.take_alone(state)

    @property
    def round_state(self) -> bytes | None:
        """See :attr:`p2pavg.DecentralizedAverager.round_state`."""
        return self._averager.round_state

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
        """See :meth:`p2pavg.DecentralizedAverager.step`. Ctrl-C ends the waiting, not the round.

        A training loop that calls it with ``wait=0`` in every step loses no time by that. While there is nothing but
        progress to report, the averager's thread is asked at most every :data:`PROGRESS_SECONDS`, since it has a lower
        priority than the loop. In between, the call returns the progress of the last time.
        """
        if checked_wait(wait) == 0.0 and (known := self._known_progress()) is not None:
            checked_plan(state, observe, group_size, contributors, self.config, meeting)
            return known
        step = partial(self._averager.step, wait=wait, state=state, observe=observe)
        result = self._thread.call(
            partial(step, group_size=group_size, contributors=contributors, meeting=meeting)
        )
        # A report at the end of a match timeout has a reason of its own, and is returned once. A round that has ended
        # is let go: it has the whole average.
        self._progress = (0.0, None, None)
        if isinstance(result, InProgress) and result.reason in (EXCHANGES, FORMS):
            self._progress = (time.monotonic() + PROGRESS_SECONDS, waiting_round(self._averager), result)
        return result

    def _known_progress(self) -> InProgress | None:
        """Return the progress that a call of ``step`` has returned a moment ago, if nothing else is to be said."""
        self._thread.check()
        until, of_round, progress = self._progress
        running = waiting_round(self._averager)
        return progress if running is not None and running is of_round and time.monotonic() < until else None

    def expect(self, peers: Collection[str]) -> None:
        """See :meth:`p2pavg.DecentralizedAverager.expect`."""
        self._averager.expect(peers)

    @property
    def has_places(self) -> bool:
        """True if a ``meeting`` may have a place: not for a process that shares its peer with others."""
        return True

    def certifies(self, peers: Collection[str]) -> bool:  # noqa: ARG002 - an attached process decides by them
        """Return whether the average of a round with these peers can be proven to others, which may replay it.

        Those of rounds among the processes that are attached to one peer cannot.
        """
        return True

    def cancel_matchmaking(self, reason: str) -> bool:
        """See :meth:`p2pavg.DecentralizedAverager.cancel_matchmaking`."""
        return self._thread.call(partial(self._averager.cancel_matchmaking, reason))

    def share_states(self, settings: ShareSettings) -> StateSharing:
        """See :meth:`p2pavg.DecentralizedAverager.share_states`."""
        return self._thread.call(partial(self._averager.share_states, settings))

    @contextmanager
    def sibling(self, config: AveragingConfig) -> Iterator[Averager]:
        """Open another averager of the same peer for as long as the block runs; it closes with this one at the latest.

        Use it for other tensors, or for the same tensors in another run. Two averagers of one run with the same tensors
        disturb each other.
        """
        averager, close = self.open_sibling(config)
        try:
            yield averager
        finally:
            close()

    def open_sibling(self, config: AveragingConfig) -> tuple[Averager, Callable[[], None]]:
        """Open another averager of the same peer, as :meth:`sibling` does; return it, and the function that closes it.

        It closes with this one at the latest. Call the function in any thread but the averager's.
        """
        averager, close = self._thread.call(partial(self._thread.hold, self._averager.sibling, config))
        return Averager(self._thread, averager), close

    @contextmanager
    def beside(self, enter: Callable[[DecentralizedAverager], AbstractAsyncContextManager[T]]) -> Iterator[T]:
        """Run an asynchronous context manager in this averager's trio thread for as long as the block runs.

        Args:
            enter: returns the context manager; it is given the thread's averager.
        """
        value, close = self._thread.call(partial(self._thread.hold, enter, self._averager))
        try:
            yield value
        finally:
            close()

    def board(self, topic: str, look_seconds: float = LOOK_SECONDS) -> Topic:
        """See :meth:`p2pavg.DecentralizedAverager.board`."""
        return self._thread.call(partial(self._averager.board, topic, look_seconds))


@contextmanager
def open_averager(
    config: AveragingConfig,
    *,
    bootstrap: Sequence[str] = (),
    listen: Sequence[str] = DEFAULT_LISTEN,
    identity: str | os.PathLike[str] | None = None,
    announce: Sequence[str] = (),
    port_mapping: bool = True,
    relay_mbps: float = DEFAULT_RELAY_MBPS,
) -> Iterator[Averager]:
    """Run a peer with one averager for as long as the block runs.

    Args:
        config: the run, and how to average in it.
        bootstrap, listen, identity, announce, port_mapping, relay_mbps: see :func:`p2pavg.open_peer`.

    Raises:
        AddressError, ListenError, IdentityError, BootstrapError: as :func:`p2pavg.open_peer`.
    """

    async def live(give: Callable[[DecentralizedAverager], None], stop: trio.Event) -> None:
        async with (
            open_peer(
                listen=listen,
                bootstrap=bootstrap,
                identity=identity,
                announce=announce,
                port_mapping=port_mapping,
                relay_mbps=relay_mbps,
            ) as peer,
            peer.averager(config) as averager,
        ):
            give(averager)
            await stop.wait()

    thread = TrioThread(live, name="p2pavg")
    try:
        yield Averager(thread, thread.start())
    finally:
        thread.stop()


def start_averager(config: AveragingConfig | str, **options: Any) -> Averager:
    """Run a peer with one averager until the program ends, for programs whose training is no block, and notebooks.

    The peer takes its leave when the interpreter exits. Prefer :func:`open_averager` where a block is possible: its
    peer ends with the training.

    Args:
        config: the run, and how to average in it; or the run's id, for the default settings.
        options: as for :func:`open_averager`.

    Raises:
        AddressError, ListenError, IdentityError, BootstrapError: as :func:`p2pavg.open_peer`.
    """
    config = AveragingConfig(run_id=config) if isinstance(config, str) else config
    stack = ExitStack()
    averager = stack.enter_context(open_averager(config, **options))
    # Functions of atexit run after the pools of concurrent.futures have closed, and a peer that leaves needs one.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(stack.close)
    return averager
