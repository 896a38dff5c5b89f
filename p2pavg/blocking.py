"""The averager for ordinary threads: the only bridge between a training loop and trio.

One background thread runs trio with a peer and its averager. Calls may come from any thread; an exception of the
background thread is raised by the next call.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import trio

from p2pavg.allreduce.vector.accumulation import Given
from p2pavg.base.limits import GLANCE_SECONDS, LOOK_SECONDS
from p2pavg.base.result import EXCHANGES, FORMS, InProgress, RoundResult, Success, Tensors
from p2pavg.base.threads.program_end import ProgramEnd
from p2pavg.base.threads.trio_thread import TrioThread
from p2pavg.group.places.gossip import SearchPlace, SearchStage
from p2pavg.net.nat.reach.reachability import Reachability
from p2pavg.net.nat.relay.limits import DEFAULT_RELAY_MBPS
from p2pavg.peer.averager import DecentralizedAverager, waiting_round
from p2pavg.peer.joining.member import open_peer_of
from p2pavg.peer.peer import PeerOptions
from p2pavg.peer.shared_states import ShareSettings
from p2pavg.peer.statuses import Statuses
from p2pavg.peer.step_plan import checked_plan, checked_wait
from p2pavg.runs.config import AveragingConfig
from p2pavg.runs.records.board import Topic
from p2pavg.state.sharing import StateSharing
from p2pavg.telemetry.hub import Events, OnEvent, Subscription
from p2pavg.telemetry.status import RunPeer

logger = logging.getLogger(__name__)


T = TypeVar("T")


class Ending(Protocol):
    """The part of an optimizer that ends its training before its averager closes."""

    def begin(self) -> bool:
        """Say that this peer takes no further update; return whether there may be a reason to stay."""
        ...

    def stays(self) -> bool:
        """Offer what other peers lack; return whether to stay longer."""
        ...

    def wait(self) -> None:
        """Block until there may be something new, for a second at most."""
        ...


def stay(endings: Sequence[Ending]) -> None:
    """End the training of some optimizers together: stay until none of them has a reason to."""
    # All say their last word before the first one waits, so no run waits for the end of another one.
    staying = [ending for ending in endings if ending.begin()]
    while staying := [ending for ending in staying if ending.stays()]:
        staying[0].wait()


class Averager:
    """A :class:`~p2pavg.DecentralizedAverager` whose calls block. Made by :func:`open_averager`.

    It is a context manager, too: leaving its block ends the training (:meth:`end`) and closes it.

    Args:
        close: closes it; its thread ends by default.
    """

    _ending: Ending | None = None
    """The end of the optimizer that uses this averager."""

    def __init__(
        self,
        thread: TrioThread[DecentralizedAverager],
        averager: DecentralizedAverager,
        close: Callable[[], None] | None = None,
    ) -> None:
        self._thread = thread
        self._averager = averager
        self._close = close
        self._closed = False
        self._siblings: list[Averager] = []
        self._progress: tuple[float, object | None, InProgress | None] = (0.0, None, None)
        """Time until which progress is told again, the round that it is of, the progress."""

    def close(self) -> None:
        """Leave the run; closing it again does nothing. The peer ends too, unless this averager is a sibling.

        It does not wait for other peers: call :meth:`end` before, if they may lack this peer's last updates. Later
        calls raise :class:`~p2pavg.base.errors.ClosedError`.
        """
        self._closed = True
        (self._close or self._thread.stop)()

    def _call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run a function in the thread, for as long as this averager is open."""
        return self._thread.call(function, is_closed=lambda: self._closed)

    def __enter__(self) -> Averager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # After an error, this peer has not finished its training, and the program should end soon.
            if kind is None:
                self.end()
        finally:
            self.close()

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

    def catch_up(self) -> None:
        """Give the peer a turn, if this program has kept Python's lock from it for half a second or longer.

        Optimizers and :meth:`accumulate` call it. A program that holds the lock for seconds between two batches, e.g.
        in an extension, may call it there, too. It takes an eighth of that time at most.
        """
        self._thread.check()
        # Nearly free if the loop was not held up, so it can be called in every step.
        self._thread.let_catch_up()

    def declare(self, tensors: Given) -> None:
        """See :meth:`p2pavg.DecentralizedAverager.declare`."""
        self._thread.check()
        self._averager.declare(tensors)

    def accumulate(
        self, tensors: Given, *, weight: float = 1.0, metrics: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """See :meth:`p2pavg.DecentralizedAverager.accumulate`; runs in the calling thread."""
        self.catch_up()
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

    def apply_locally(self, state: bytes) -> Success | None:
        """See :meth:`p2pavg.DecentralizedAverager.apply_locally`; runs in the calling thread."""
        self._thread.check()
        return self._averager.apply_locally(state)

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
        meeting: SearchPlace | Sequence[SearchStage] | None = None,
    ) -> RoundResult:
        """See :meth:`p2pavg.DecentralizedAverager.step`. Ctrl-C ends the waiting, not the round.

        A training loop that calls it with ``wait=0`` in every step loses no time by that. While there is nothing but
        progress to report, the averager's thread is asked at most every :data:`GLANCE_SECONDS`, since it has a lower
        priority than the loop. In between, the call returns the progress of the last time.
        """
        if checked_wait(wait) == 0.0 and (known := self._known_progress()) is not None:
            # The arguments are checked all the same: an error must not depend on the time of the call.
            checked_plan(state, observe, group_size, contributors, self.config, meeting)
            return known
        step = partial(self._averager.step, wait=wait, state=state, observe=observe)
        result = self._call(partial(step, group_size=group_size, contributors=contributors, meeting=meeting))
        # A report at the end of a match timeout has a reason of its own, and is returned once. A round that has ended
        # is let go: it has the whole average.
        self._progress = (0.0, None, None)
        if isinstance(result, InProgress) and result.reason in (EXCHANGES, FORMS):
            # For so long, ``step(wait=0)`` may repeat what it said of a round that still runs.
            self._progress = (time.monotonic() + GLANCE_SECONDS, waiting_round(self._averager), result)
        return result

    def _known_progress(self) -> InProgress | None:
        """Return the progress that a call of ``step`` has returned a moment ago, if nothing else is to be said."""
        self._thread.check()
        until, of_round, progress = self._progress
        # Read without a call into the thread. The round is compared, since another one may have begun since.
        running = waiting_round(self._averager)
        return progress if running is not None and running is of_round and time.monotonic() < until else None

    def expect(self, peers: Collection[str]) -> None:
        """See :meth:`p2pavg.DecentralizedAverager.expect`."""
        self._averager.expect(peers)

    def cancel_matchmaking(self, reason: str) -> bool:
        """See :meth:`p2pavg.DecentralizedAverager.cancel_matchmaking`."""
        return self._call(partial(self._averager.cancel_matchmaking, reason))

    def rechecked(self, peer_id: str, why: str) -> None:
        """See :meth:`p2pavg.DecentralizedAverager.rechecked`."""
        self._call(partial(self._averager.rechecked, peer_id, why))

    def share_states(self, settings: ShareSettings) -> StateSharing:
        """See :meth:`p2pavg.DecentralizedAverager.share_states`."""
        return self._call(partial(self._averager.share_states, settings))

    @contextmanager
    def sibling(self, config: AveragingConfig) -> Iterator[Averager]:
        """Open another averager of the same peer for as long as the block runs; it closes with this one at the latest.

        Use it for other tensors, or for the same tensors in another run. Two averagers of one run with the same tensors
        disturb each other.
        """
        averager, close = self.open_sibling(config)
        try:
            yield averager
            # Not in `finally`: after an error in the block, the training has not ended.
            averager.end()
        finally:
            close()

    def open_sibling(self, config: AveragingConfig) -> tuple[Averager, Callable[[], None]]:
        """Open another averager of the same peer, as :meth:`sibling` does; return it, and the function that closes it.

        It closes with this one at the latest. Call the function in any thread but the averager's.
        """
        averager, close = self._call(lambda: self._thread.hold(self._averager.sibling(config)))

        def forget_and_close() -> None:
            # It may be closed twice: by the block, and by its own `close`.
            with suppress(ValueError):
                self._siblings.remove(sibling)
            close()

        sibling = Averager(self._thread, averager, forget_and_close)
        # The end of this averager has to end the training of the siblings that are still open.
        self._siblings.append(sibling)
        return sibling, sibling.close

    @contextmanager
    def beside(self, enter: Callable[[DecentralizedAverager], AbstractAsyncContextManager[T]]) -> Iterator[T]:
        """Run an asynchronous context manager in this averager's trio thread for as long as the block runs.

        Args:
            enter: returns the context manager; it is given the thread's averager.
        """
        value, close = self._call(lambda: self._thread.hold(enter(self._averager)))
        try:
            yield value
        finally:
            close()

    # ------------------------------------------------------------------ the end

    def on_end(self, ending: Ending) -> None:
        """Let an optimizer end its training before this averager closes; an earlier optimizer's is forgotten."""
        self._ending = ending

    def end(self) -> None:
        """End the training of this averager's optimizer, and of those of its siblings.

        They stay, for a bounded time, until the members of their last groups have their last update too; see
        :meth:`p2pavg.optim.AveragedOptimizer.finish`. Leaving the block of :func:`open_averager` does this, unless an
        exception ends it.
        """
        stay([ending for ending in self._endings() if ending is not None])

    def _endings(self) -> list[Ending | None]:
        siblings = [ending for sibling in self._siblings for ending in sibling._endings()]
        return [self._ending, *siblings]

    def is_connected(self, peer_id: str) -> bool:
        """See :meth:`p2pavg.DecentralizedAverager.is_connected`."""
        return self._averager.is_connected(peer_id)

    def board(self, topic: str, look_seconds: float = LOOK_SECONDS, *, lasts: float | None = None) -> Topic:
        """See :meth:`p2pavg.DecentralizedAverager.board`."""
        return self._call(partial(self._averager.board, topic, look_seconds, lasts=lasts))


@contextmanager
def open_averager(
    config: AveragingConfig,
    *,
    bootstrap: Sequence[str] = (),
    listen: Sequence[str] | None = None,
    identity: str | os.PathLike[str] | None = None,
    announce: Sequence[str] = (),
    port_mapping: bool = True,
    relay_mbps: float = DEFAULT_RELAY_MBPS,
) -> Iterator[Averager]:
    """Run a peer with one averager for as long as the block runs.

    When the block ends without an exception, an optimizer that has trained in it first gives the other peers what they
    lack of its last updates, for a bounded time: see :meth:`Averager.end`.

    Args:
        config: the run, and how to average in it. One of :func:`p2pavg.join_run` brings the identity, the port and the
            bootstrap addresses.
        listen: addresses to listen on. ``None``: all interfaces if ``config`` has ``access`` or ``open_run``, and else
            loopback, for processes of this machine.
        bootstrap, identity, announce, port_mapping, relay_mbps: see :func:`p2pavg.open_peer`.

    Raises:
        AddressError, ListenError, IdentityError, BootstrapError: as :func:`p2pavg.open_peer`.
        ConfigError: an address leads out of this machine, and ``config`` has neither ``access`` nor ``open_run``.
        BusyError: another process is the peer of the folder of :func:`p2pavg.join_run`.
    """

    if not isinstance(config, AveragingConfig):
        raise TypeError(f"config must be an AveragingConfig, got {type(config).__name__}")

    options = PeerOptions(
        bootstrap=bootstrap,
        identity=identity,
        announce=announce,
        port_mapping=port_mapping,
        relay_mbps=relay_mbps,
    )

    async def live(give: Callable[[DecentralizedAverager], None], stop: trio.Event) -> None:
        async with open_peer_of(config, listen, options) as peer, peer.averager(config) as averager:
            give(averager)
            await stop.wait()

    thread = TrioThread(live, name="p2pavg")
    try:
        # Ctrl-C may interrupt the start. The thread has to be stopped then, too.
        averager = Averager(thread, thread.start())
        yield averager
        averager.end()
    finally:
        thread.stop()


_started: dict[str, Averager] = {}
"""The averagers of :func:`start_averager` that are open, by run."""
_starting = threading.RLock()


def start_averager(config: AveragingConfig | str, **options: Any) -> Averager:
    """Run a peer with one averager until it is closed or the program ends, for notebooks and training without a block.

    The peer takes its leave at :meth:`Averager.close`, or when the main thread and all threads that are no daemons
    have ended. In the second case it first gives other peers what they lack (:meth:`Averager.end`), unless an error
    ended the program.

    If this function has opened an averager of the same run in this process before, as in a notebook whose cell runs
    again, that one is closed first. Otherwise the other peers, and the new one, would wait for it.

    Prefer :func:`open_averager` where a block is possible: its peer ends with the training.

    Args:
        config: the run, and how to average in it; or the run's id, for the default settings.
        options: as for :func:`open_averager`.

    Raises:
        AddressError, ListenError, IdentityError, BootstrapError: as :func:`p2pavg.open_peer`.
    """
    config = AveragingConfig(run_id=config) if isinstance(config, str) else config
    if not isinstance(config, AveragingConfig):
        raise TypeError(f"config must be an AveragingConfig or a run's name, got {type(config).__name__}")
    # Two threads that start one run at the same time must not both find that there is no earlier averager.
    with _starting:
        if (earlier := _started.get(config.run_id)) is not None:
            logger.warning(
                "run %r has been started in this process before, as %s: that peer is closed, and another one starts",
                config.run_id,
                earlier.peer_id,
            )
            try:
                earlier.close()
            except Exception as error:  # noqa: BLE001 - of its thread, which has ended; this start is a new one
                logger.warning("it had failed: %r", error)
        block = open_averager(config, **options)
        opened = block.__enter__()

        def close() -> None:
            # An averager of the same run may have been started after this one, and has its place now.
            if _started.get(opened.config.run_id) is averager:
                del _started[opened.config.run_id]
            # The program's end must not close it again.
            ending.cancel()
            block.__exit__(None, None, None)

        def end_with_the_program() -> None:
            # An error that ended the program is no end of its training: the others must not take it for one.
            if not hasattr(sys, "last_value"):
                averager.end()
            close()

        # Its own `close` also ends the block that was entered by hand above.
        averager = _started[config.run_id] = Averager(opened._thread, opened._averager, close)
        ending = ProgramEnd(end_with_the_program)
    return averager
