"""Limits of the memory that a record store grants to strangers. No I/O, no clock."""

from dataclasses import dataclass, fields

from p2pavg_dht.record import MAX_WIRE_BYTES
from p2pavg_dht.wire import MAX_RECORD_BYTES_PER_ANSWER


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a record store. Records beyond them are refused with a reason.

    Bytes are counted as on the wire (`record.wire_bytes`). In memory, Python takes about 1 KiB more for each
    record, which `total_records` bounds. Raises ValueError for limits that are not positive.

    - `max_ttl`, `clock_skew` (seconds): a record may expire at most `max_ttl + clock_skew` from now.
    - `publishers_per_key`, `bytes_per_key`: limits of one key. The bytes fit into one answer, so an answer for
      a single key is always complete.
    - `records_per_publisher`, `bytes_per_publisher`: limits of one identity over all keys. A peer has two or three
      records for each averager that it has open, and with DDP it has one for each bucket of gradients.
    - `relayed_per_sender`: the number of *other* publishers' records that one authenticated sender may have
      brought. Without it, one connection could bring any number of invented identities, each with its own
      allowance.
    - `total_keys`, `total_records`, `total_bytes`: limits of the whole store.
    """

    max_ttl: float = 3600.0
    clock_skew: float = 60.0
    publishers_per_key: int = 256
    bytes_per_key: int = 960 * 1024
    records_per_publisher: int = 256
    bytes_per_publisher: int = 256 * 1024
    relayed_per_sender: int = 64
    total_keys: int = 4096
    total_records: int = 16384
    total_bytes: int = 32 * 1024 * 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            # Written as `not ... <`, so that NaN is refused too.
            if not 0 < value < float("inf"):
                raise ValueError(f"{field.name} must be positive and finite, not {value}")
        for name in ("bytes_per_key", "bytes_per_publisher", "total_bytes"):
            if getattr(self, name) < MAX_WIRE_BYTES:
                raise ValueError(f"{name} must hold one record of {MAX_WIRE_BYTES} bytes")
        if self.bytes_per_key > MAX_RECORD_BYTES_PER_ANSWER:
            raise ValueError(f"bytes_per_key must fit into an answer: {MAX_RECORD_BYTES_PER_ANSWER} bytes")
