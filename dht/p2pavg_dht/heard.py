"""The records that other peers' answers have named lately, so that the next answers can leave them out. No I/O."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from p2pavg_dht.record import Record

MAX_KEYS: Final = 32
# Of one key; more are asked for again each time.
MAX_HEARD_BYTES: Final = 128 * 1024


class RecordCache:
    """Genuine records by key. At most 4 MiB are kept; the keys used least recently are forgotten."""

    def __init__(self) -> None:
        self._records: OrderedDict[bytes, tuple[Record, ...]] = OrderedDict()

    def records(self, key: bytes) -> tuple[Record, ...]:
        """Return the records that were kept under `key`. Some may have expired."""
        return self._records.get(key, ())

    def keep(self, key: bytes, records: Sequence[Record]) -> tuple[Record, ...]:
        """Keep `records` in place of those under `key`, as far as there is room; return all of them."""
        room, kept = MAX_HEARD_BYTES, []
        for record in records:
            if record.wire_bytes <= room:
                room -= record.wire_bytes
                kept.append(record)
        self._records.pop(key, None)
        self._records[key] = tuple(kept)
        if len(self._records) > MAX_KEYS:
            self._records.popitem(last=False)
        return tuple(records)
