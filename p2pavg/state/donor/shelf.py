"""The states that one peer offers to others: one snapshot, or two if asked for, and the log of the last averages.

Calls may come from any thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from p2pavg.net.transport import Buffer
from p2pavg.state.average import LoggedAverage
from p2pavg.state.choice import MAX_LOG, SnapshotOffer
from p2pavg.state.tree import CHUNK_BYTES, BlobKind


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """A snapshot in memory."""

    offer: SnapshotOffer
    data: memoryview
    digests: Sequence[bytes]
    """Of its chunks, 32 bytes each."""


class Shelf:
    """The snapshot and the log of one peer in one run.

    Args:
        log_bytes: memory of the log; the oldest averages are dropped, also if there are more than one record can name.
            The newest one is always kept.
    """

    def __init__(self, log_bytes: int) -> None:
        self._lock = threading.Lock()
        self._snapshot: HeldSnapshot | None = None
        self._former: HeldSnapshot | None = None
        self._log: OrderedDict[bytes, LoggedAverage] = OrderedDict()
        self._log_bytes = log_bytes
        self._epoch = 0
        self._read_at = -math.inf
        self._read: dict[bytes, set[int]] = {}
        """Parts of each average of the log that other peers have read."""

    @property
    def is_followed(self) -> bool:
        """True if a peer has read an average of the log, and not all of the last one: it may want that, too.

        Members of the rounds need none from here. An archivist does, and reads several updates at once every few
        seconds, so those just before the last one may be new to it.
        """
        with self._lock:
            if not self._log:
                return False
            *earlier, (last, average) = self._log.items()
            has_all = len(self._read.get(last, ())) >= len(average.encoded.parts)
            return not has_all and any(group_id in self._read for group_id, _ in earlier)

    @property
    def read_at(self) -> float:
        """Time of :func:`time.monotonic` at which a piece of the snapshot was last read; -inf before the first one."""
        return self._read_at

    @property
    def epoch(self) -> int:
        """The update to which the log leads."""
        return self._epoch

    @property
    def snapshot(self) -> HeldSnapshot | None:
        """The snapshot, if there is one."""
        return self._snapshot

    @property
    def log(self) -> tuple[bytes, ...]:
        """Group ids of the averages, the oldest first."""
        with self._lock:
            return tuple(self._log)

    def average(self, group_id: bytes) -> LoggedAverage | None:
        """Return an average of the log; ``None`` if it is not there."""
        with self._lock:
            return self._log.get(group_id)

    @property
    def log_first(self) -> int:
        """The update after which the log begins: all averages that came later are offered."""
        with self._lock:
            return self._epoch - len(self._log)

    def set_log_bytes(self, log_bytes: int) -> None:
        """Change the memory of the log."""
        with self._lock:
            self._log_bytes = log_bytes
            self._shorten()

    def log_full(self, since: int) -> float:
        """Return the fraction of the log that the averages after an update take: of its memory, or of its length."""
        with self._lock:
            first = max(len(self._log) - max(self._epoch - since, 0), 0)
            later = list(self._log.values())[first:]
            taken = sum(average.nbytes for average in later)
            return max(taken / self._log_bytes, len(later) / MAX_LOG) if later else 0.0

    def put(self, snapshot: HeldSnapshot | None, *, keeps_former: bool = False) -> None:
        """Replace the snapshot, or drop it.

        Args:
            keeps_former: true if the one that is replaced stays beside it, for peers that are fetching it. An earlier
                one than that is dropped.
        """
        with self._lock:
            self._former = self._snapshot if keeps_former else None
            self._snapshot = snapshot

    def took(self, average: LoggedAverage, epoch: int) -> None:
        """Add the average that led to an update. If it does not follow on the log, the log begins anew with it."""
        with self._lock:
            if epoch != self._epoch + 1:
                self._log.clear()
                self._read.clear()
            self._log[average.group_id] = average
            self._epoch = epoch
            self._shorten()

    def begin(self, epoch: int) -> None:
        """Drop everything: the parameters were replaced by those after an update."""
        with self._lock:
            self._log.clear()
            self._read.clear()
            self._snapshot = self._former = None
            self._epoch = epoch

    def _shorten(self) -> None:
        held = sum(average.nbytes for average in self._log.values())
        while len(self._log) > MAX_LOG or (len(self._log) > 1 and held > self._log_bytes):
            group_id, oldest = self._log.popitem(last=False)
            self._read.pop(group_id, None)
            held -= oldest.nbytes

    # ------------------------------------------------------------------ for other peers

    def manifest(self, kind: int, blob_id: bytes) -> bytes | None:
        """Return the manifest of a blob; ``None`` if it is not held."""
        with self._lock:
            if kind == BlobKind.AVERAGE:
                average = self._log.get(blob_id)
                return None if average is None else average.manifest()
            held = self._held(blob_id)
        if kind != BlobKind.SNAPSHOT or held is None:
            return None
        return b"".join(held.digests)

    def _held(self, root: bytes) -> HeldSnapshot | None:
        for held in (self._snapshot, self._former):
            if held is not None and held.offer.root == root:
                return held
        return None

    def piece(self, kind: int, blob_id: bytes, index: int) -> Buffer | None:
        """Return a piece of a blob; ``None`` if it is not held."""
        with self._lock:
            average = self._log.get(blob_id) if kind == BlobKind.AVERAGE else None
            held = self._held(blob_id) if kind == BlobKind.SNAPSHOT else None
            if average is not None and 0 <= index < len(average.encoded.parts):
                self._read.setdefault(blob_id, set()).add(index)
                return average.encoded.parts[index]
        if held is None or not 0 <= index < len(held.digests):
            return None
        self._read_at = time.monotonic()
        return held.data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
