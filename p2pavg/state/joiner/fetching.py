"""Fetches one blob from several donors at once: carries out what :mod:`p2pavg.state.joiner.pieces` decides.

Each donor has a task, which opens a session with it, and asks for what the plan says. One more task looks at all of
them a few times a second. Pieces are verified and kept in the threads that read them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from p2pavg.base.errors import RemoteProtocolError, StateError, StreamBrokenError, UnreachableError
from p2pavg.base.threads.exceptions import bare_exceptions
from p2pavg.net.blame import guarded
from p2pavg.net.transport import PeerId
from p2pavg.state.joiner.answers import RefusedError, Request, WrongPieceError
from p2pavg.state.joiner.donors import Meter, Range
from p2pavg.state.joiner.keeping import Keeping
from p2pavg.state.joiner.pieces import PATIENCE_SECONDS, FetchManifest, FetchRange, Pieces, Wait
from p2pavg.state.joiner.session import Session
from p2pavg.state.joiner.sessions import Sessions
from p2pavg.state.joiner.sink import Sink
from p2pavg.state.manifest import Manifest

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
VERIFIED_AT_ONCE = 16
"""Pieces of an earlier download that are verified in one go. Other work of the same thread gets its turn between."""


@dataclass(frozen=True)
class Wanted:
    """The blob to fetch."""

    kind: int
    blob_id: bytes
    """32 bytes."""
    max_manifest_bytes: int
    read_manifest: Callable[[bytes], Manifest]
    """Reads and verifies a manifest, in a worker thread. Raises RemoteProtocolError if it is not the blob's; then the
    donor that sent it is excluded."""


@dataclass(frozen=True)
class Progress:
    """Progress of a download."""

    done: int
    """Bytes that are here, also those of an earlier download."""
    total: int
    """Bytes of the blob; 0 until the manifest is here."""
    rate: float
    """Bytes per second, a mean of the last seconds."""
    seconds_left: float
    """At this rate; infinite if nothing comes."""
    rates: Mapping[PeerId, float]
    """Bytes per second of each donor that is used now."""
    twice: int
    """Bytes that came more than once, because a slow donor was taken over."""


class Fetch:
    """The download of one blob. :meth:`run` is called once.

    Args:
        make_sink: called in a worker thread, when the manifest is here.
        on_progress: called a few times a second.
        patience: seconds for which no donor may be usable.
    """

    def __init__(
        self,
        sessions: Sessions,
        wanted: Wanted,
        make_sink: Callable[[Manifest], Sink],
        *,
        on_progress: Callable[[Progress], None] = lambda _: None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._sessions = sessions
        self._wanted = wanted
        self._make_sink = make_sink
        self._on_progress = on_progress
        self._plan = Pieces(patience=patience)
        self._donors: dict[PeerId, tuple[str, ...]] = {}
        self._used: dict[PeerId, _Use] = {}
        self._nursery: trio.Nursery | None = None
        self._manifest: Manifest | None = None
        self._keeping: Keeping | None = None
        self._changed = trio.Event()
        self._over = trio.Event()
        self._failure: Exception | None = None
        self._meter = Meter()

    @property
    def excluded(self) -> Mapping[PeerId, str]:
        """Donors that sent something wrong, each with the reason."""
        return self._sessions.excluded

    def set_donors(self, donors: Mapping[PeerId, Sequence[str]]) -> None:
        """Fetch from these donors from now on.

        Args:
            donors: the addresses of each one, by peer id.
        """
        self._donors = {peer_id: tuple(addresses) for peer_id, addresses in donors.items()}
        for use in [*self._used.values()]:
            if use.peer_id not in self._donors:
                self._give_up(use, "it is not named any more")
        self._start_donors()
        self._notify()

    async def run(self) -> Sink:
        """Fetch the blob; return the sink, which is complete and verified, and which the caller closes.

        Raises:
            StateError: no donor was usable for too long; or the sink cannot keep the blob.
        """
        complete = False
        sink: Sink | None = None
        try:
            async with self._sessions.places:
                await self._run()
            complete = self._failure is None
        finally:
            if self._keeping is not None:
                with trio.CancelScope(shield=True):
                    sink = await self._keeping.end()
                if not complete:
                    sink.close()
        if self._failure is not None:
            raise self._failure
        assert sink is not None
        return sink

    async def _run(self) -> None:
        self._plan.start(trio.current_time())
        with bare_exceptions():
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._start_donors()
                try:
                    await self._look()
                finally:
                    self._nursery = None
                    for use in self._used.values():
                        use.cancel_requests()
                    nursery.cancel_scope.cancel()

    async def _look(self) -> None:
        """Look at all donors a few times a second, until the blob is complete or cannot be had."""
        before, began = 0, trio.current_time()
        while not self._over.is_set():
            with trio.move_on_after(LOOK_SECONDS):
                await self._over.wait()
            now = trio.current_time()
            for use in [*self._used.values()]:
                self._plan.observe(use.peer_id, use.session.received, now)
                if use.session.ended.is_set():
                    self._give_up(use, str(use.session.error))
            for peer_id, reason in self._plan.too_slow(now):
                use = self._used[peer_id]
                self._give_up(use, reason)
                use.session.drop(StreamBrokenError(reason))
            if (why := self._plan.hopeless(now)) is not None:
                self._end(StateError(why))
            came = self._plan.done_bytes + self._plan.twice_bytes
            self._meter.note(came - before, now - began)
            before, began = came, now
            self._report()

    def _report(self) -> None:
        plan, rate = self._plan, self._meter.rate
        total = 0 if plan.sizes is None else plan.total_bytes
        left = (total - plan.done_bytes) / rate if rate > 0.0 else math.inf
        rates = {peer_id: plan.donors[peer_id].meter.rate for peer_id in self._used}
        self._on_progress(Progress(plan.done_bytes, total, rate, left, rates, plan.twice_bytes))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _end(self, failure: Exception | None = None) -> None:
        """End the download: it is complete, or has failed."""
        self._failure = self._failure or failure
        self._over.set()

    # ------------------------------------------------------------------ donors

    def _start_donors(self) -> None:
        for peer_id in self._donors:
            if self._nursery is not None and peer_id not in self._plan.donors:
                self._plan.add(peer_id)
                self._nursery.start_soon(self._attend, peer_id)

    async def _attend(self, peer_id: PeerId) -> None:
        """Use one donor whenever it can be used."""
        while True:
            await self._until_usable(peer_id)
            now = trio.current_time()
            try:
                session = await self._sessions.get(peer_id, self._donors.get(peer_id, ()))
            except UnreachableError as error:
                self._plan.failed(peer_id, trio.current_time(), str(error))
                self._notify()
                continue
            now = trio.current_time()
            self._plan.opened(peer_id, session.received, now)
            use = self._used[peer_id] = _Use(peer_id, session)
            await self._ask(use)

    async def _until_usable(self, peer_id: PeerId) -> None:
        while True:
            changed, at = self._changed, math.inf
            if peer_id in self.excluded and not self._plan.donors[peer_id].excluded:
                self._plan.exclude(peer_id, trio.current_time(), self.excluded[peer_id])
            if peer_id in self._donors:
                at = self._plan.may_use_at(peer_id)
            if at <= trio.current_time():
                return
            with trio.move_on_at(at):
                await changed.wait()

    async def _ask(self, use: _Use) -> None:
        """Ask a donor for what the plan says, until it is given up."""
        while self._used.get(use.peer_id) is use:
            changed = self._changed
            if use.session.ended.is_set():
                self._give_up(use, str(use.session.error))
                return
            decision = self._plan.next(use.peer_id, trio.current_time())
            match decision:
                case FetchManifest():
                    self._ask_manifest(use)
                case FetchRange(range_):
                    self._ask_range(use, range_)
                case Wait(until):
                    with trio.move_on_at(until):
                        await changed.wait()
            if not isinstance(decision, Wait):
                logger.debug("%s: %s", use.peer_id, decision)

    def _give_up(self, use: _Use, reason: str) -> None:
        """Ask a donor for nothing more for now."""
        if self._used.get(use.peer_id) is use:
            del self._used[use.peer_id]
            use.cancel_requests()
            self._plan.failed(use.peer_id, trio.current_time(), reason)
            logger.info("%s is not asked for a state for now: %s", use.peer_id, reason)
            self._notify()

    def _exclude(self, use: _Use, reason: str) -> None:
        """Never ask a donor again."""
        self._sessions.exclude(use.peer_id, reason)
        self._give_up(use, reason)
        self._plan.exclude(use.peer_id, trio.current_time(), reason)
        use.session.drop(RemoteProtocolError(reason))
        self._notify()

    # ------------------------------------------------------------------ the manifest

    def _ask_manifest(self, use: _Use) -> None:
        wanted = self._wanted
        use.requests[None] = use.session.ask_manifest(
            wanted.kind, wanted.blob_id, wanted.max_manifest_bytes, partial(self._manifest_ended, use)
        )

    def _manifest_ended(self, use: _Use, error: Exception | None) -> None:
        request = use.requests.pop(None, None)
        if request is None or self._manifest is not None or self._nursery is None:
            return
        if error is None:
            self._nursery.start_soon(self._judge, use, request.manifest)
        else:
            self._give_up(use, _reason(error))

    async def _judge(self, use: _Use, data: bytes) -> None:
        """Read the manifest that a donor has sent, and begin to fetch pieces."""
        in_thread = self._sessions.context.run_in_thread

        def fault(_peer_id: PeerId, error: Exception) -> None:
            self._exclude(use, f"sent a manifest over which {type(error).__name__} was raised")

        with guarded(use.peer_id, fault, what="a manifest"):
            try:
                manifest = await in_thread(self._wanted.read_manifest, data)
            except RemoteProtocolError as error:
                self._exclude(use, f"sent a manifest that is not the one of {self._name}: {error}")
                return
            if self._manifest is not None:
                return
            self._manifest = manifest
            self._plan.manifest_came(use.peer_id, trio.current_time())
        if self._manifest is not None:
            await self._begin(self._manifest)

    async def _begin(self, manifest: Manifest) -> None:
        in_thread = self._sessions.context.run_in_thread
        try:
            sink = await in_thread(self._make_sink, manifest)
            self._keeping = Keeping(sink, manifest, self._name)
            have: list[int] = []
            claimed = sink.claimed
            for start in range(0, len(claimed), VERIFIED_AT_ONCE):
                have += await in_thread(sink.verify, claimed[start : start + VERIFIED_AT_ONCE])
        except StateError as error:
            self._end(error)
            return
        self._plan.begin(manifest.sizes, have)
        if self._plan.complete:
            self._end()
        self._notify()

    # ------------------------------------------------------------------ pieces

    def _ask_range(self, use: _Use, range_: Range) -> None:
        assert self._keeping is not None
        assert self._manifest is not None
        use.requests[range_] = use.session.ask_pieces(
            self._wanted.kind,
            self._wanted.blob_id,
            range_.first,
            self._manifest.sizes[range_.first : range_.first + range_.count],
            take=self._keeping.take,
            came=partial(self._came, use, range_),
            ended=partial(self._range_ended, use, range_),
        )

    def _came(self, use: _Use, range_: Range, index: int) -> None:
        now = trio.current_time()
        if self._used.get(use.peer_id) is use:
            self._plan.observe(use.peer_id, use.session.received, now)
        arrival = self._plan.came(use.peer_id, range_, index, now)
        for useless in arrival.useless:
            for other in self._used.values():
                if (request := other.requests.get(useless)) is not None:
                    other.session.cancel(request)
        if self._plan.complete:
            self._end()
        self._notify()

    def _range_ended(self, use: _Use, range_: Range, error: Exception | None) -> None:
        request = use.requests.pop(range_, None)
        if isinstance(error, WrongPieceError):
            self._exclude(use, str(error))
        elif isinstance(error, StateError):
            self._end(error)
        elif error is not None and request is not None and not request.cancelled:
            self._give_up(use, _reason(error))
        self._plan.ended(use.peer_id, range_, trio.current_time())
        self._notify()

    @property
    def _name(self) -> str:
        return f"{self._wanted.blob_id.hex()[:16]}…"


class _Use:
    """A session, as one download uses it."""

    def __init__(self, peer_id: PeerId, session: Session) -> None:
        self.peer_id = peer_id
        self.session = session
        self.requests: dict[Range | None, Request] = {}
        """Those that have not ended; that of the manifest has no range."""

    def cancel_requests(self) -> None:
        for request in self.requests.values():
            self.session.cancel(request)
        self.requests.clear()


def _reason(error: Exception) -> str:
    return f"it refuses: {error}" if isinstance(error, RefusedError) else str(error)
