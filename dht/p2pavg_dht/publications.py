"""What this peer itself says: its records, when they are renewed, and how they are taken back.

Decides and signs; sends nothing. Times are wall clock, in seconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from p2pavg_dht.identity import Signer
from p2pavg_dht.limits import Limits
from p2pavg_dht.record import Record, sign_record

# A record survives two lost renewals, and a peer that joins or comes back lacks it for a third of its TTL.
RENEWALS_PER_TTL = 3


@dataclass(slots=True)
class _Publication:
    record: Record
    ttl: float
    renewed_at: float
    # Who has confirmed this very record: nobody has to be told twice.
    holders: set[str] = field(default_factory=set)

    @property
    def due_at(self) -> float:
        return self.renewed_at + self.ttl / RENEWALS_PER_TTL


class Publications:
    """The records of `signer`, at most one a key, each renewed until it is withdrawn."""

    def __init__(self, signer: Signer, limits: Limits) -> None:
        self._signer = signer
        self._limits = limits
        self._by_key: dict[bytes, _Publication] = {}

    def announce(self, key: bytes, value: bytes, *, ttl: float, now: float) -> Record:
        """Say `value` under `key` from now on; every signed copy counts for `ttl` seconds.

        A copy never expires before the one that it replaces, which could otherwise be replayed: a shorter
        `ttl` takes effect once the earlier record would have expired.
        """
        return self._sign(key, value, ttl, now, self._by_key.get(key))

    def renew(self, key: bytes, now: float) -> Record | None:
        """The next copy of what is said under `key`; None when nothing is. A withdrawal stays as it is."""
        publication = self._by_key.get(key)
        if publication is None:
            return None
        if publication.record.withdrawn:
            publication.renewed_at = now
            return publication.record
        return self._sign(key, publication.record.value, publication.ttl, now, publication)

    def withdraw(self, key: bytes, now: float) -> Record | None:
        """The tombstone for what is said under `key`; None when nothing is.

        It lasts as long as the record that it withdraws, and is repeated until then: who was away when it
        was sent may still hold the record.
        """
        publication = self._by_key.get(key)
        if publication is None or publication.record.withdrawn:
            return None
        return self._sign(key, b"", publication.ttl, now, publication, lifetime=0.0)

    def adopt(self, records: Iterable[Record], now: float) -> Record | None:
        """A copy that outranks those of `records` that are ours and that ours would be refused for.

        They are left over from an earlier life of this identity, in which the clock was ahead or the TTL
        longer. None when there is no such record. `records` must be verified.
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

    def due(self, now: float) -> list[bytes]:
        """The keys to renew at `now`. Forgets the withdrawals that have expired."""
        for key, publication in list(self._by_key.items()):
            if publication.record.withdrawn and publication.record.expiration_time <= now:
                del self._by_key[key]
        # A clock that was set back must not postpone the renewal by as much.
        return [key for key, p in self._by_key.items() if now >= p.due_at or now < p.renewed_at]

    def next_due(self) -> float:
        """When `due` will next have something; infinity when nothing is said."""
        return min((publication.due_at for publication in self._by_key.values()), default=float("inf"))

    def said(self) -> list[bytes]:
        """The keys under which something is said and not withdrawn."""
        return [key for key, publication in self._by_key.items() if not publication.record.withdrawn]

    def confirmed(self, record: Record, peer_id: str) -> None:
        """`peer_id` holds `record`."""
        publication = self._by_key.get(record.key)
        if publication is not None and publication.record == record:
            publication.holders.add(peer_id)

    def unconfirmed(self, peer_id: str, now: float) -> list[Record]:
        """The unexpired records, withdrawals among them, that `peer_id` has not confirmed."""
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
        # Microseconds of the wall clock: the sequence goes on growing when the process starts anew.
        sequence = max(0, int(now * 1e6))
        if earlier is not None:
            sequence = max(sequence, earlier.record.sequence + 1)
            # Nobody would have taken, or would take, a record that expires later than this.
            latest = now + self._limits.max_ttl
            expiration_time = max(expiration_time, min(earlier.record.expiration_time, latest))
        record = sign_record(
            self._signer, key=key, sequence=sequence, expiration_time=expiration_time, value=value
        )
        self._by_key[key] = _Publication(record, ttl, now)
        return record
