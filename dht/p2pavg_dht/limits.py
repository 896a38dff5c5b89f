"""How much of this machine strangers may use."""

from dataclasses import dataclass, fields

from p2pavg_dht.record import MAX_WIRE_BYTES
from p2pavg_dht.wire import MAX_RECORD_BYTES_PER_ANSWER


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a record store grants; everything beyond is refused with a reason. ValueError when not positive.

    Bytes are those of a record as it travels (`record.wire_bytes`); in memory Python takes about 1 KiB more
    a record, which `total_records` bounds.

    - `max_ttl`, `clock_skew` (seconds): a record may expire at most `max_ttl + clock_skew` from now.
    - `publishers_per_key`, `bytes_per_key`: what one key may hold. The bytes fit into one answer, so an
      answer for a single key is always whole.
    - `records_per_publisher`, `bytes_per_publisher`: what one identity may hold over all keys.
    - `relayed_per_sender`: how many records of *others* one authenticated sender may have brought. Without
      it, one connection could bring any number of made-up identities, each with its own allowance.
    - `total_keys`, `total_records`, `total_bytes`: the whole store.
    """

    max_ttl: float = 3600.0
    clock_skew: float = 60.0
    publishers_per_key: int = 256
    bytes_per_key: int = 960 * 1024
    records_per_publisher: int = 64
    bytes_per_publisher: int = 128 * 1024
    relayed_per_sender: int = 64
    total_keys: int = 4096
    total_records: int = 16384
    total_bytes: int = 32 * 1024 * 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            # `not >` rather than `<=`, so that NaN is refused too.
            if not 0 < value < float("inf"):
                raise ValueError(f"{field.name} must be positive and finite, not {value}")
        for name in ("bytes_per_key", "bytes_per_publisher", "total_bytes"):
            if getattr(self, name) < MAX_WIRE_BYTES:
                raise ValueError(f"{name} must hold one record of {MAX_WIRE_BYTES} bytes")
        if self.bytes_per_key > MAX_RECORD_BYTES_PER_ANSWER:
            raise ValueError(f"bytes_per_key must fit into an answer: {MAX_RECORD_BYTES_PER_ANSWER} bytes")
