"""Threads put verified pieces into a sink, and never into one whose download has ended."""

from __future__ import annotations

import threading
import weakref

import trio
import trio.testing

from p2pavg.net.transport import Buffer
from p2pavg.state.joiner.fetching import Keeping
from p2pavg.state.joiner.sink import MemorySink
from p2pavg.state.messages import BlobManifest
from tests.unit.state.blobs import Blob

BLOB = Blob(0, 3, 100)
MANIFEST = BlobManifest(BLOB.sizes, BLOB.digests)


class SlowSink(MemorySink):
    """Puts a piece when it is told to."""

    def __init__(self) -> None:
        super().__init__(BLOB.sizes)
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.kept: list[int] = []

    def put(self, index: int, piece: Buffer) -> None:
        self.begun.set()
        assert self.go_on.wait(30.0)
        self.kept.append(index)


async def test_the_end_of_a_download_waits_for_threads_that_keep_a_piece() -> None:
    sink = SlowSink()
    keeping, ended = Keeping(sink, MANIFEST, "a blob"), trio.Event()

    async def end() -> None:
        await keeping.end()
        assert sink.kept == [0]
        ended.set()

    with trio.fail_after(30.0):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, keeping.take, 0, memoryview(BLOB.pieces[0]))
            await trio.to_thread.run_sync(sink.begun.wait)
            nursery.start_soon(end)
            await trio.testing.wait_all_tasks_blocked()
            assert not ended.is_set()
            keeping.take(1, memoryview(BLOB.pieces[1]))  # comes too late
            sink.go_on.set()
    assert sink.kept == [0]


async def test_a_download_that_has_ended_holds_no_blob() -> None:
    """Sessions refer to it until their donors have answered what was cancelled."""
    sink = MemorySink(BLOB.sizes)
    keeping, gone = Keeping(sink, MANIFEST, "a blob"), weakref.ref(sink)
    assert await keeping.end() is sink
    del sink
    assert gone() is None
