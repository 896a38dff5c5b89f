"""Fetches one blob from several donors at once: carries out what :mod:`p2pavg.state.joiner.pieces` decides.

Each donor has a task, which opens a session with it, and asks for what the plan says. One more task looks at all of
them a few times a second. Pieces are verified and kept in the threads that read them.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import trio

from p2pavg.base.errors import RemoteProtocolError, StateError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import GLANCE_SECONDS, STALL_SECONDS
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.base.threads.workers import ToLoop
from p2pavg.net.blame import guarded
from p2pavg.net.transport import PeerId
from p2pavg.state.average import FewSignersError
from p2pavg.state.joiner.answers import DonorRefusedError, DonorRequest, WrongPieceError
from p2pavg.state.joiner.pieces import FetchManifest, Meter, Pieces, Range, WaitUntil
from p2pavg.state.joiner.sessions import JoinerSession, Sessions
from p2pavg.state.joiner.sink import Sink, digest_of
from p2pavg.state.messages import BlobManifest
from p2pavg.state.tree import CHUNK_BYTES, DIGEST_BYTES, BlobKind, chunk_count, root_of

# Verifies the pieces of one blob and puts them into its sink, in the threads that read them.


class Keeping:
    """The sink of one download, which threads use until :meth:`end`. Create it on the event loop.

    Args:
        name: of the blob, in the reason for which a donor is excluded.
    """

    def __init__(self, sink: Sink, manifest: BlobManifest, name: str) -> None:
        self._sink: Sink | None = sink
        self._digests = manifest.digests
        self._name = name
        self._lock = threading.Lock()
        self._users = 0
        self._over = False
        self._unused = trio.Event()
        self._report = ToLoop()

    def take(self, index: int, piece: memoryview) -> None:
        """Verify a piece and keep it. After :meth:`end`, nothing is kept. From any thread.

        Raises:
            WrongPieceError: its digest is another one.
            StateError: there is no room for it.
        """
        digest = digest_of(piece)
        if digest != self._digests[index]:
            raise WrongPieceError(
                f"sent piece {index} of {self._name} with digest {digest.hex()} "
                f"instead of {self._digests[index].hex()}"
            )
        with self._lock:
            sink = self._sink
            if self._over or sink is None:
                return
            self._users += 1
        try:
            sink.put(index, piece)
        finally:
            with self._lock:
                self._users -= 1
                if self._over and not self._users:
                    self._report(self._unused.set)

    async def end(self) -> Sink:
        """Wait until no thread uses the sink any more; return it, and let go of it. Call this once.

        Sessions refer to this object until their next request. The blob must not stay in memory for so long.
        """
        with self._lock:
            self._over, used = True, self._users > 0
        if used:
            await self._unused.wait()
        assert self._sink is not None
        sink, self._sink = self._sink, None
        return sink


logger = logging.getLogger(__name__)

VERIFIED_AT_ONCE = 16
"""Pieces of an earlier download that are verified in one go. Other work of the same thread gets its turn between."""


@dataclass(frozen=True)
class Wanted:
    """The blob to fetch."""

    kind: int
    blob_id: bytes
    """32 bytes."""
    max_manifest_bytes: int
    read_manifest: Callable[[bytes], BlobManifest]
    """Reads and verifies a manifest, in a worker thread. Raises RemoteProtocolError if it is not the blob's; then the
    donor that sent it is excluded."""


@dataclass(frozen=True)
class DownloadProgress:
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


def chunked(kind: BlobKind, root: bytes, size: int) -> Wanted:
    """Return the blob of ``size`` bytes that this root names. Its manifest is the digests of its chunks."""
    count = chunk_count(size)

    def read(data: bytes) -> BlobManifest:
        digests = [data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES)]
        # The root is known from elsewhere. So a donor that lies cannot make this peer fetch anything else. A root that
        # was made of more or fewer digests is refused by the manifest.
        if root_of(digests, size) != root:
            raise RemoteProtocolError("the digests of another blob than it offers")
        return BlobManifest([CHUNK_BYTES] * (count - 1) + [size - CHUNK_BYTES * (count - 1)], digests)

    return Wanted(kind, root, DIGEST_BYTES * count, read)


class BlobDownload:
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
        make_sink: Callable[[BlobManifest], Sink],
        *,
        on_progress: Callable[[DownloadProgress], None] = lambda _: None,
        patience: float = STALL_SECONDS,
    ) -> None:
        self._sessions = sessions
        self._wanted = wanted
        self._make_sink = make_sink
        self._on_progress = on_progress
        self._plan = Pieces(patience=patience, slow=sessions.slow)
        self._donors: dict[PeerId, tuple[str, ...]] = {}
        self._used: dict[PeerId, _Use] = {}
        self._nursery: trio.Nursery | None = None
        self._manifest: BlobManifest | None = None
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
            # Before the new donors start: the pieces that this one was asked for are free for them.
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
            # A donor answers a bounded number of requests of one session, which all downloads of this run
            # share.
            async with self._sessions.places:
                await self._run()
            # Only here: a cancellation must leave this false, so that the sink is closed below.
            complete = self._failure is None
        finally:
            if self._keeping is not None:
                # Reading threads may still write into the sink. It must not be closed under them, not even
                # when this is cancelled.
                with trio.CancelScope(shield=True):
                    sink = await self._keeping.end()
                if not complete:
                    sink.close()
        if self._failure is not None:
            raise self._failure
        assert sink is not None
        return sink

    async def _run(self) -> None:
        # The patience counts from here, also if no donor has been named yet.
        self._plan.start(trio.current_time())
        with bare_exceptions():
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._start_donors()
                try:
                    await self._poll()
                finally:
                    self._nursery = None
                    for use in self._used.values():
                        # The sessions outlive this download. Without this, their donors would go on sending
                        # what is not used any more.
                        use.cancel_requests()
                    nursery.cancel_scope.cancel()

    async def _poll(self) -> None:
        """Look at all donors a few times a second, until the blob is complete or cannot be had."""
        before, began = 0, trio.current_time()
        while not self._over.is_set():
            with trio.move_on_after(GLANCE_SECONDS):
                await self._over.wait()
            now = trio.current_time()
            for use in [*self._used.values()]:
                # Bytes count as well as pieces: a donor on a slow link takes long for its first piece.
                self._plan.observe(use.peer_id, use.session.received, now)
                if use.session.ended.is_set():
                    self._give_up(use, str(use.session.error))
            for peer_id, reason in self._plan.too_slow(now):
                use = self._used[peer_id]
                self._give_up(use, reason)
                # The donor may still trickle: without its session, it uses no more of the link.
                use.session.drop(StreamBrokenError(reason))
            # The last piece may have come from a donor that was given up, in the turn in which the patience ends.
            if not self._over.is_set() and (why := self._plan.hopeless(now)) is not None:
                self._end(StateError(why))
            # Pieces that came twice used the link, too.
            came = self._plan.done_bytes + self._plan.twice_bytes
            self._meter.note(came - before, now - began)
            before, began = came, now
            self._report()

    def _report(self) -> None:
        plan, rate = self._plan, self._meter.rate
        total = 0 if plan.sizes is None else plan.total_bytes
        left = (total - plan.done_bytes) / rate if rate > 0.0 else math.inf
        rates = {peer_id: plan.donors[peer_id].meter.rate for peer_id in self._used}
        self._on_progress(DownloadProgress(plan.done_bytes, total, rate, left, rates))

    def _notify(self) -> None:
        # Every task that waits holds the event from before its check, so no change falls between the two.
        self._changed.set()
        self._changed = trio.Event()

    def _end(self, failure: Exception | None = None) -> None:
        """End the download: it is complete, or has failed."""
        # The first failure is the cause. A later one may only follow from it.
        self._failure = self._failure or failure
        self._over.set()

    # ------------------------------------------------------------------ donors

    def _start_donors(self) -> None:
        for peer_id in self._donors:
            # One task for each donor, for good: it waits when its donor is not named any more, and goes on
            # when it is again.
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
                # The pause before the next try grows with each failure in a row.
                self._plan.failed(peer_id, trio.current_time(), str(error))
                self._notify()
                continue
            # It may have been left out while the session was opened.
            if peer_id not in self._donors:
                continue
            now = trio.current_time()
            self._plan.opened(peer_id, session.received, now)
            use = self._used[peer_id] = _Use(peer_id, session)
            await self._ask(use)

    async def _until_usable(self, peer_id: PeerId) -> None:
        while True:
            # In this order: a change that comes during the checks below ends the wait.
            changed, at = self._changed, math.inf
            # Another download of this run may have excluded the donor. Then no blob is asked of it any more.
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
        # Another task may have given this use up, and a later session of the same donor is another use.
        while self._used.get(use.peer_id) is use:
            changed = self._changed
            if use.session.ended.is_set():
                self._give_up(use, str(use.session.error))
                return
            decision = self._plan.next(use.peer_id, trio.current_time())
            wanted, range_ = self._wanted, None
            match decision:
                case WaitUntil(until):
                    with trio.move_on_at(until):
                        await changed.wait()
                    continue
                case FetchManifest():
                    request = use.session.ask_manifest(
                        self, wanted.kind, wanted.blob_id, wanted.max_manifest_bytes
                    )
                case Range(first, count):
                    assert self._manifest is not None
                    range_, sizes = decision, self._manifest.sizes[first : first + count]
                    request = use.session.ask_pieces(self, wanted.kind, wanted.blob_id, first, sizes)
            use.requests[range_] = request
            request.about = use, range_
            logger.debug("%s: %s", use.peer_id, decision)

    def _give_up(self, use: _Use, reason: str) -> None:
        """Ask a donor for nothing more for now."""
        # Several events can end one use. Only the first counts as a failure of the donor.
        if self._used.get(use.peer_id) is use:
            del self._used[use.peer_id]
            use.cancel_requests()
            self._plan.failed(use.peer_id, trio.current_time(), reason)
            logger.info("%s is not asked for a state for now: %s", use.peer_id, reason)
            self._notify()

    def _exclude(self, use: _Use, reason: str) -> None:
        """Never ask a donor again."""
        # In all downloads of the run. It comes first: the tasks that wake up below must see it.
        self._sessions.exclude(use.peer_id, reason)
        self._give_up(use, reason)
        self._plan.exclude(use.peer_id, trio.current_time(), reason)
        use.session.drop(RemoteProtocolError(reason))
        self._notify()

    # ------------------------------------------------------------------ the manifest

    async def _judge(self, use: _Use, data: bytes) -> None:
        """Read the manifest that a donor has sent, and begin to fetch pieces."""
        in_thread = self._sessions.context.run_in_thread

        def fault(_peer_id: PeerId, error: Exception) -> None:
            self._exclude(use, f"sent a manifest over which {type(error).__name__} was raised")

        is_first = False
        # Only the reading of what the donor has sent is guarded: an exception of this peer's own sink must
        # stay loud.
        with guarded(use.peer_id, fault, what="a manifest"):
            try:
                manifest = await in_thread(self._wanted.read_manifest, data)
            except RemoteProtocolError as error:
                self._exclude(use, f"sent a manifest that is not the one of {self._name}: {error}")
                return
            except FewSignersError as error:
                self._give_up(use, str(error))
                return
            except StateError as error:  # no fault of the donor: this peer asked for what it cannot use
                self._end(error)
                return
            # Another donor was asked as well, and was faster. Both manifests are verified, so they are the
            # same.
            if self._manifest is not None:
                return
            self._manifest, is_first = manifest, True
            self._plan.manifest_came(use.peer_id, trio.current_time())
        # Not if the manifest of another donor has come meanwhile, and this one raised: one download has one sink.
        if is_first:
            await self._begin(manifest)

    async def _begin(self, manifest: BlobManifest) -> None:
        in_thread = self._sessions.context.run_in_thread
        try:
            sink = await in_thread(self._make_sink, manifest)
            self._keeping = Keeping(sink, manifest, self._name)
            have: list[int] = []
            claimed = sink.claimed
            # After a crash, an earlier download may claim pieces that it has not written. So each is verified
            # again.
            for start in range(0, len(claimed), VERIFIED_AT_ONCE):
                have += await in_thread(sink.verify, claimed[start : start + VERIFIED_AT_ONCE])
        except StateError as error:
            self._end(error)
            return
        self._plan.begin(manifest.sizes, have)
        if self._plan.complete:
            self._end()
        self._notify()

    # ------------------------------------------------------------------ answers to requests

    def take(self, index: int, piece: memoryview) -> None:
        """Verify a piece and keep it, in the thread that reads."""
        assert self._keeping is not None
        self._keeping.take(index, piece)

    def came(self, request: DonorRequest, index: int) -> None:
        """Note a piece, and ask no other donor for it."""
        use: _Use
        use, range_ = request.about
        now = trio.current_time()
        if self._used.get(use.peer_id) is use:
            self._plan.observe(use.peer_id, use.session.received, now)
        # Also from a donor that was given up meanwhile: the piece is verified and kept already.
        for useless in self._plan.came(use.peer_id, range_, index, now):
            for other in self._used.values():
                if (slower := other.requests.get(useless)) is not None:
                    # A piece came from another donor first. The slower one is not made to send the rest of
                    # the range.
                    other.session.cancel(slower)
        if self._plan.complete:
            self._end()
        self._notify()

    def ended(self, request: DonorRequest, error: Exception | None) -> None:
        """Note the end of a request: its manifest is read, its donor is given up or excluded, or nothing is to do."""
        use, range_ = request.about
        # Not if another donor was faster, or the download is over.
        was_wanted = use.requests.pop(range_, None) is not None
        if range_ is None:
            if was_wanted and self._manifest is None and self._nursery is not None:
                if error is None:
                    self._nursery.start_soon(self._judge, use, request.manifest)
                else:
                    self._give_up(use, _reason(error))
            return
        # Even if the request was cancelled meanwhile: a wrong piece is a lie, whenever it comes.
        if isinstance(error, WrongPieceError):
            self._exclude(use, str(error))
        # This peer's own sink cannot keep the blob, so no other donor would help.
        elif isinstance(error, StateError):
            self._end(error)
        # A request that this peer has cancelled may end with any error. That is no fault of the donor.
        elif error is not None and was_wanted and not request.cancelled:
            self._give_up(use, _reason(error))
        self._plan.ended(use.peer_id, range_, trio.current_time())
        self._notify()

    @property
    def _name(self) -> str:
        return f"{self._wanted.blob_id.hex()[:16]}…"


class _Use:
    """A session, as one download uses it."""

    def __init__(self, peer_id: PeerId, session: JoinerSession) -> None:
        self.peer_id = peer_id
        self.session = session
        self.requests: dict[Range | None, DonorRequest] = {}
        """Those that have not ended; that of the manifest has no range."""

    def cancel_requests(self) -> None:
        for request in self.requests.values():
            self.session.cancel(request)
        self.requests.clear()


def _reason(error: Exception) -> str:
    return f"it refuses: {error}" if isinstance(error, DonorRefusedError) else str(error)
