"""The publications of this peer: its records, their renewals and their withdrawals.

This module decides and signs, but sends nothing. Times are wall clock, in seconds.

No I/O, no clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from p2pavg_dht.identity import Signer
from p2pavg_dht.record import Record, sign_record
from p2pavg_dht.storage import Limits

# With three renewals in a TTL, a record survives two lost ones. A peer that joins or returns lacks the record for at
# most a third of its TTL.
RENEWALS_PER_TTL = 3


@dataclass(slots=True)
class _Publication:
    record: Record
    ttl: float
    renewed_at: float
    # The peers that have confirmed this very record, and need not be told again.
    holders: set[str] = field(default_factory=set)

    @property
    def due_at(self) -> float:
        return self.renewed_at + self.ttl / RENEWALS_PER_TTL


class Publications:
    """The records of `signer`, at most one for each key, each renewed until it is withdrawn."""

    def __init__(self, signer: Signer, limits: Limits) -> None:
        self._signer = signer
        self._limits = limits
        self._by_key: dict[bytes, _Publication] = {}

    def announce(self, key: bytes, value: bytes, *, ttl: float, now: float) -> Record:
        """Publish `value` under `key` from now on. Every signed copy is valid for `ttl` seconds.

        A copy never expires before the one that it replaces, because that one could then be replayed. So a
        shorter `ttl` takes effect when the earlier record would have expired.
        """
        return self._sign(key, value, ttl, now, self._by_key.get(key))

    def renew(self, key: bytes, now: float) -> Record | None:
        """Return the next copy of the record under `key`; None if there is none. A withdrawal is not signed anew."""
        publication = self._by_key.get(key)
        if publication is None:
            return None
        if publication.record.withdrawn:
            publication.renewed_at = now
            return publication.record
        return self._sign(key, publication.record.value, publication.ttl, now, publication)

    def withdraw(self, key: bytes, now: float) -> Record | None:
        """Withdraw the record under `key` and return its tombstone; None if there is no record.

        The tombstone lasts as long as the record that it withdraws, and is repeated until then, because a peer
        that was away may still hold the record.
        """
        publication = self._by_key.get(key)
        if publication is None or publication.record.withdrawn:
            return None
        return self._sign(key, b"", publication.ttl, now, publication, lifetime=0.0)

    def release(self, key: bytes) -> None:
        """Renew the record under `key` no more, and leave it to the peers that hold it until it expires."""
        self._by_key.pop(key, None)

    def adopt(self, records: Iterable[Record], now: float) -> Record | None:
        """Return a copy that outranks newer records of this publisher among `records`; None if there are none.

        Such records were left by an earlier process of this identity, whose clock was ahead or whose TTL was
        longer. While they last, other peers would refuse ours. `records` must be verified.
        """
        ours = [record for record in records if self._obstructs(record)]
        if not ours:
            return None
        newest = max(ours, key=lambda record: record.rank)
        publication = self._by_key[newest.key]
        said = publication.record
        lifetime = 0.0 if said.withdrawn else publication.ttl
        earlier = _Publication(newest, publication.ttl, now)
        return self._sign(said.key, said.value, publication.ttl, now, earlier, lifetime=lifetime)

    def are_outranked(self, records: Iterable[Record]) -> bool:
        """Return whether one of `records` is newer than what this publisher has under its key.

        Another process has signed it with the same key. `records` must be verified.
        """
        return any(self._obstructs(record) for record in records)

    def due(self, now: float) -> list[bytes]:
        """Return the keys to renew at `now`, and forget the withdrawals that have expired."""
        for key, publication in list(self._by_key.items()):
            if publication.record.withdrawn and publication.record.expiration_time <= now:
                del self._by_key[key]
        # If the clock was set back, renew now instead of waiting for the clock to catch up.
        return [key for key, p in self._by_key.items() if now >= p.due_at or now < p.renewed_at]

    def next_due(self) -> float:
        """Return the moment of the next renewal; infinity if there is no record."""
        return min((publication.due_at for publication in self._by_key.values()), default=float("inf"))

    def said(self) -> list[bytes]:
        """Return the keys of the records that are not withdrawn."""
        return [key for key, publication in self._by_key.items() if not publication.record.withdrawn]

    def confirmed(self, record: Record, peer_id: str) -> None:
        """Note that `peer_id` holds `record`."""
        publication = self._by_key.get(record.key)
        if publication is not None and publication.record == record:
            publication.holders.add(peer_id)

    def unconfirmed(self, peer_id: str, now: float) -> list[Record]:
        """Return the unexpired records, including withdrawals, that `peer_id` has not confirmed."""
        publications = [p for p in self._by_key.values() if peer_id not in p.holders]
        return [p.record for p in publications if p.record.expiration_time > now]

    def _obstructs(self, record: Record) -> bool:
        said = self._by_key.get(record.key)
        if record.publisher != self._signer.peer_id or said is None:
            return False
        return record.rank > said.record.rank or record.expiration_time > said.record.expiration_time

    def _sign(
        self,
        key: bytes,
        value: bytes,
        ttl: float,
        now: float,
        earlier: _Publication | None,
        *,
        lifetime: float | None = None,
    ) -> Record:
        expiration_time = now + (ttl if lifetime is None else lifetime)
        # Microseconds of the wall clock, so that the sequence keeps growing when the process restarts.
        sequence = max(0, int(now * 1e6))
        if earlier is not None:
            sequence = max(sequence, earlier.record.sequence + 1)
            # No peer would have accepted a record that expires later than this.
            latest = now + self._limits.max_ttl
            expiration_time = max(expiration_time, min(earlier.record.expiration_time, latest))
        record = sign_record(
            self._signer, key=key, sequence=sequence, expiration_time=expiration_time, value=value
        )
        self._by_key[key] = _Publication(record, ttl, now)
        return record
