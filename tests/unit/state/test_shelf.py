"""The holdings of a donor: one snapshot, and a log within its bounds."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.allreduce.averages import EncodedAverage
from p2pavg.state.average import LoggedAverage
from p2pavg.state.choice import MAX_LOG, SnapshotOffer
from p2pavg.state.donor.shelf import HeldSnapshot, Shelf
from p2pavg.state.tree import CHUNK_BYTES, BlobKind, chunk_digests, root_of

DATA = memoryview(bytes(CHUNK_BYTES) + b"the last chunk")


def average(number: int, nbytes: int = 100) -> LoggedAverage:
    parts = (bytes(nbytes - 50), bytes(50))
    return LoggedAverage(
        bytes(32), number.to_bytes(32, "big"), b"certificate", EncodedAverage(parts, (b"1" * 32, b"2" * 32))
    )


SIZE = average(0).nbytes


def snapshot(epoch: int = 3) -> HeldSnapshot:
    digests = chunk_digests(DATA)
    root = root_of(digests, len(DATA))
    return HeldSnapshot(SnapshotOffer(epoch=epoch, state=bytes(32), root=root, size=len(DATA)), DATA, digests)


def held(shelf: Shelf) -> list[int]:
    return [int.from_bytes(group_id, "big") for group_id in shelf.log]


def test_the_oldest_averages_are_dropped_when_the_memory_is_full() -> None:
    shelf = Shelf(3 * SIZE)
    for epoch in range(1, 6):
        shelf.took(average(epoch), epoch)
    assert held(shelf) == [3, 4, 5]
    assert (shelf.epoch, shelf.log_first) == (5, 2)
    shelf.set_log_bytes(2 * SIZE - 1)
    assert held(shelf) == [5]


def test_the_newest_average_is_kept_even_if_it_is_too_large() -> None:
    shelf = Shelf(1)
    shelf.took(average(1), 1)
    assert held(shelf) == [1]


def test_a_log_is_no_longer_than_a_record_can_name() -> None:
    shelf = Shelf(10**9)
    for epoch in range(1, MAX_LOG + 3):
        shelf.took(average(epoch), epoch)
    assert held(shelf) == list(range(3, MAX_LOG + 3))
    assert shelf.log_first == 2


def test_an_average_that_does_not_follow_begins_the_log_anew() -> None:
    shelf = Shelf(10**9)
    shelf.took(average(1), 1)
    shelf.took(average(5), 5)
    assert (held(shelf), shelf.log_first) == ([5], 4)
    shelf.took(average(4), 4)
    assert (held(shelf), shelf.log_first) == ([4], 3)


def test_a_replaced_state_drops_everything() -> None:
    shelf = Shelf(10**9)
    shelf.took(average(1), 1)
    shelf.put(snapshot())
    shelf.begin(7)
    assert (shelf.log, shelf.snapshot, shelf.epoch, shelf.log_first) == ((), None, 7, 7)


@pytest.mark.parametrize(
    ("since", "expected"), [(5, 0.0), (4, 0.25), (3, 0.5), (1, 1.0), (0, 1.0), (-9, 1.0), (9, 0.0)]
)
def test_fullness_counts_the_averages_since_an_update(since: int, expected: float) -> None:
    shelf = Shelf(4 * SIZE)
    for epoch in range(1, 6):
        shelf.took(average(epoch), epoch)
    assert shelf.log_full(since) == pytest.approx(expected)


def test_fullness_counts_places_too() -> None:
    shelf = Shelf(10**12)
    for epoch in range(1, 33):
        shelf.took(average(epoch), epoch)
    assert shelf.log_full(0) == 32 / MAX_LOG


class TestServing:
    def shelf(self) -> Shelf:
        shelf = Shelf(10**9)
        shelf.took(average(1), 1)
        shelf.put(snapshot())
        return shelf

    def test_blobs_are_served_by_kind_and_id(self) -> None:
        shelf, held_one = self.shelf(), snapshot()
        root, group_id = held_one.offer.root, average(1).group_id
        assert shelf.manifest(BlobKind.SNAPSHOT, root) == b"".join(held_one.digests)
        assert shelf.manifest(BlobKind.AVERAGE, group_id) == average(1).manifest()
        assert [bytes(shelf.piece(BlobKind.SNAPSHOT, root, index) or b"") for index in (0, 1)] == [
            bytes(CHUNK_BYTES),
            b"the last chunk",
        ]
        assert shelf.piece(BlobKind.AVERAGE, group_id, 1) == bytes(50)
        for kind, blob_id in (
            (BlobKind.SNAPSHOT, group_id),
            (BlobKind.AVERAGE, root),
            (2, root),
            (-1, root),
            (0, b""),
        ):
            assert shelf.manifest(kind, blob_id) is None
            assert shelf.piece(kind, blob_id, 0) is None

    @given(st.integers().filter(lambda index: index not in (0, 1)), st.sampled_from([0, 1]))
    def test_no_other_index_has_a_piece(self, index: int, kind: int) -> None:
        shelf = self.shelf()
        blob_id = snapshot().offer.root if kind == BlobKind.SNAPSHOT else average(1).group_id
        before = shelf.read_at
        assert shelf.piece(kind, blob_id, index) is None
        assert shelf.read_at == before

    def test_only_reading_the_snapshot_counts_as_use(self) -> None:
        shelf = self.shelf()
        shelf.piece(BlobKind.AVERAGE, average(1).group_id, 0)
        shelf.piece(BlobKind.SNAPSHOT, bytes(32), 0)
        assert shelf.read_at < 0
        shelf.piece(BlobKind.SNAPSHOT, snapshot().offer.root, 0)
        assert shelf.read_at > 0

    def test_calls_from_several_threads_do_not_disturb_each_other(self) -> None:
        shelf, failed, stop = Shelf(8 * SIZE), [], threading.Event()

        def serve() -> None:
            while not stop.is_set():
                try:
                    self._look(shelf)
                except Exception as error:
                    failed.append(error)
                    raise

        threads = [threading.Thread(target=serve) for _ in range(3)]
        for thread in threads:
            thread.start()
        for epoch in range(1, 500):
            shelf.took(average(epoch), epoch)
            if epoch % 7 == 0:
                shelf.put(snapshot(epoch))
            if epoch % 31 == 0:
                shelf.begin(epoch)
        stop.set()
        for thread in threads:
            thread.join()
        assert not failed

    @staticmethod
    def _look(shelf: Shelf) -> None:
        found: Any = shelf.log
        assert len(found) <= 8
        for group_id in found:
            manifest = shelf.manifest(BlobKind.AVERAGE, group_id)
            assert manifest in (None, average(1).manifest())
            assert shelf.piece(BlobKind.AVERAGE, group_id, 1) in (None, bytes(50))
        assert shelf.log_full(0) <= 1.0
        one = shelf.snapshot
        if one is not None:
            assert shelf.piece(BlobKind.SNAPSHOT, one.offer.root, 1) in (None, b"the last chunk")


def test_a_former_snapshot_stays_until_the_next_one_if_it_shall() -> None:
    shelf = Shelf(1000)
    found = []
    for number in range(3):
        data = memoryview(bytes([number]) * 10)
        digests = chunk_digests(data)
        root = root_of(digests, len(data))
        found.append(
            HeldSnapshot(SnapshotOffer(epoch=number, state=bytes(32), root=root, size=10), data, digests)
        )
    for held_snapshot in found:
        shelf.put(held_snapshot, keeps_former=True)
    assert shelf.snapshot is found[2]
    pieces = [shelf.piece(BlobKind.SNAPSHOT, each.offer.root, 0) for each in found]
    assert [piece is not None and bytes(piece)[:1] for piece in pieces] == [False, b"\1", b"\2"]
    assert shelf.manifest(BlobKind.SNAPSHOT, found[1].offer.root) == b"".join(found[1].digests)
    shelf.put(found[0])
    assert shelf.piece(BlobKind.SNAPSHOT, found[2].offer.root, 0) is None, "only if it shall"


def test_it_is_followed_while_one_who_read_an_average_lacks_the_last() -> None:
    shelf = Shelf(10**9)
    for epoch in (1, 2):
        shelf.took(average(epoch), epoch)
        assert not shelf.is_followed
    shelf.piece(BlobKind.AVERAGE, average(2).group_id, 0)
    # An archivist reads several at once: those since its last look are new to it, too.
    for epoch in (3, 4, 5):
        shelf.took(average(epoch), epoch)
        assert shelf.is_followed
    shelf.piece(BlobKind.AVERAGE, average(5).group_id, 0)
    assert shelf.is_followed
    shelf.piece(BlobKind.AVERAGE, average(5).group_id, 1)
    assert not shelf.is_followed
