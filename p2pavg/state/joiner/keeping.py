"""Verifies the pieces of one blob and puts them into its sink, in the threads that read them."""

from __future__ import annotations

import threading

import trio

from p2pavg.base.threads.workers import ToLoop
from p2pavg.state.joiner.answers import WrongPieceError
from p2pavg.state.joiner.sink import Sink, digest_of
from p2pavg.state.manifest import BlobManifest


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
