"""The records that this peer keeps, and the reasons for which it refuses one.

The policy under attack: **a live record is never displaced by another publisher's.** A record stays until it
expires. Its renewal is refused only if the new value is longer and there is no room for the difference. So a
flood cannot remove an honest record. It can keep newcomers out, of one key or of the whole store, for at most
the longest TTL; after that, the attacker has to send it again. Each publisher has an allowance over all keys.
Each sender has an allowance of other publishers' records. Many identities that each connect themselves count
as many publishers: this layer does not decide about admission to a run.

Places are *reserved* under a key that this peer uses itself, for its own record and those of a few peers that it has
met. A flood of invented publishers cannot keep those out.

A *guard* is the rule of a key whose run this peer knows: it refuses records of publishers that are no members. So
strangers cannot fill the keys of a run at its own members.

No record is refused because it is far from this peer's own point. Publishers choose keys freely, so a flood
would simply choose near ones. But an honest record may come from a peer whose table is out of date.

Replays: under one key, a publisher's sequence and its expiration time only ever grow. So a tombstone outlives
every record that it withdraws. When it is gone, an older record is refused as expired.

No I/O, no clock.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heappop, heappush
from typing import TypeAlias, TypeVar

from p2pavg_dht.identity import Contact
from p2pavg_dht.messages import (
    MAX_OUTCOME_LENGTH,
    MAX_RECORD_BYTES_PER_ANSWER,
    Answer,
    Find,
    Found,
    Locate,
    LocateAnswer,
    Request,
    Store,
    Stored,
    unmarked,
)
from p2pavg_dht.record import Record, RecordError, verify
from p2pavg_dht.routing import RoutingTable, key_point, nearest

# Limits of the memory that a record store grants to strangers.


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a record store. Records beyond them are refused with a reason.

    Bytes are counted as on the wire (`record.wire_bytes`). In memory, Python takes about 1 KiB more for each
    record, which `total_records` bounds.

    - `max_ttl`, `clock_skew` (seconds): a record may expire at most `max_ttl + clock_skew` from now.
    - `publishers_per_key`, `bytes_per_key`: limits of one key. The bytes must fit into one answer, so that an answer
      for a single key is always complete.
    - `records_per_publisher`, `bytes_per_publisher`: limits of one identity over all keys. A peer has two or three
      records for each averager that it has open.
    - `relayed_per_sender`: the number of *other* publishers' records that one authenticated sender may have
      brought. Without it, one connection could bring any number of invented identities, each with its own
      allowance.
    - `total_keys`, `total_records`, `total_bytes`: limits of the whole store.
    """

    max_ttl: float = 3600.0
    clock_skew: float = 60.0
    publishers_per_key: int = 256
    bytes_per_key: int = MAX_RECORD_BYTES_PER_ANSWER
    records_per_publisher: int = 256
    bytes_per_publisher: int = 256 * 1024
    relayed_per_sender: int = 64
    total_keys: int = 4096
    total_records: int = 16384
    total_bytes: int = 32 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.bytes_per_key > MAX_RECORD_BYTES_PER_ANSWER:
            raise ValueError(f"bytes_per_key must fit into an answer: {MAX_RECORD_BYTES_PER_ANSWER} bytes")


T = TypeVar("T", bound=bytes | str)
Guard: TypeAlias = Callable[[Record], str | None]
"""Returns the reason for which a record, whose signature is genuine, is refused under its key; None admits it."""


class Refusal(StrEnum):
    """The reason for which a record was refused. The text is sent to the sender."""

    EXPIRED = "already expired"
    TOO_FAR = "expires too far in the future"
    REPLAYED = "replayed: a newer record of this publisher is held"
    SHORTENED = "expires before the record it replaces, which could then be replayed"
    FORGED = "forged: the signature is not the publisher's"
    KEY_FULL = "no room under this key"
    PUBLISHER_QUOTA = "the publisher's allowance is used up"
    UNKNOWN_WITHDRAWN = "withdrawn, and no record of this publisher is held"
    SENDER_QUOTA = "the sender's allowance of other publishers' records is used up"
    STORE_FULL = "no room"


def untimely(record: Record, now: float, limits: Limits) -> Refusal | None:
    """Return the refusal of a record that is expired, or expires too late, at wall-clock time `now`."""
    if record.expiration_time <= now:
        return Refusal.EXPIRED
    if record.expiration_time > now + limits.max_ttl + limits.clock_skew:
        return Refusal.TOO_FAR
    return None


@dataclass(slots=True)
class _Usage:
    records: int = 0
    bytes: int = 0

    def add(self, records: int, size: int) -> None:
        self.records += records
        self.bytes += size


@dataclass(frozen=True, slots=True)
class _Entry:
    record: Record
    # The sender of another publisher's record; None if the publisher sent it itself.
    relayed_by: str | None


class RecordStore:
    """Verified records by key and publisher, within `limits`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._keys: dict[bytes, dict[str, _Entry]] = {}
        self._total = _Usage()
        self._by_key: dict[bytes, _Usage] = {}
        self._by_publisher: dict[str, _Usage] = {}
        self._relayed: Counter[str] = Counter()
        self._guards: dict[bytes, list[Guard]] = {}
        self._reserved: dict[bytes, frozenset[str]] = {}
        self._expirations: list[tuple[float, bytes, str]] = []

    def __len__(self) -> int:
        return self._total.records

    @property
    def total_bytes(self) -> int:
        """The bytes of all records held, as on the wire."""
        return self._total.bytes

    def guard(self, key: bytes, guard: Guard) -> None:
        """Let `guard` decide on the records under `key`, unless another guard does already."""
        self._guards.setdefault(key, []).append(guard)

    def unguard(self, key: bytes, guard: Guard) -> None:
        """End a `guard`. The next one that was set for the key, if any, decides from now on."""
        self._guards[key].remove(guard)
        if not self._guards[key]:
            del self._guards[key]

    def reserve(self, key: bytes, publishers: Collection[str]) -> None:
        """Reserve places under `key` for `publishers`, in place of those that had one; for none of them, end that."""
        if publishers:
            self._reserved[key] = frozenset(publishers)
        else:
            self._reserved.pop(key, None)

    def put(self, record: Record, *, sender: str, now: float) -> str | None:
        """Store `record`, sent by the authenticated peer `sender`. Return the reason if it is refused.

        A record that is held already counts as stored. The signature check is the most expensive one, so it
        comes after the others; a guard sees genuine records only.
        """
        # Records that have expired must not take the room of this one.
        self.expire(now)
        held = self._held(record.key, record.publisher)
        # Several keepers and the publisher itself send the same record. It was verified when it came first.
        if held is not None and held.record == record:
            return None
        refusal: str | None = (
            # The order matters: what comes first is cheap, and a flood of records
            # without room costs no signature check.
            untimely(record, now, self._limits)
            or (_outranked(record, held.record) if held else None)
            or self._no_room(record, held, sender)
            or _forged(record)
            or self._guarded(record, held)
        )
        if refusal is not None:
            return refusal
        relayed_by = None if sender == record.publisher else sender
        if held is not None:
            # The first sender's allowance keeps the charge, so that renewals cannot be spread over many senders.
            # Only the publisher itself takes the charge over.
            relayed_by = relayed_by and held.relayed_by
            self._remove(held)
        entry = _Entry(record, relayed_by)
        self._keys.setdefault(record.key, {})[record.publisher] = entry
        self._count(entry, 1)
        # The heap finds what has expired without a look at all records. Entries of records that were replaced stay in
        # it. A publisher that renews all the time leaves one stale expiration each time.
        heappush(self._expirations, (record.expiration_time, record.key, record.publisher))
        if len(self._expirations) > 2 * len(self) + 64:
            held_now = (entry.record for entries in self._keys.values() for entry in entries.values())
            self._expirations = [(r.expiration_time, r.key, r.publisher) for r in held_now]
            heapify(self._expirations)
        return None

    def records(self, key: bytes, now: float) -> tuple[Record, ...]:
        """Return the unexpired records under `key`, including withdrawals, ordered by publisher."""
        self.expire(now)
        entries = self._keys.get(key, {})
        # Withdrawals are told as well: another keeper may still hold a record that was withdrawn.
        return tuple(entries[publisher].record for publisher in sorted(entries))

    def records_within(self, keys: Iterable[bytes], most_bytes: int, now: float) -> tuple[list[Record], int]:
        """Return the unexpired records under `keys` that fit into `most_bytes`, and the number left out."""
        taken: list[Record] = []
        omitted = 0
        for record in (record for key in keys for record in self.records(key, now)):
            # A long record that does not fit leaves room for shorter ones that follow.
            if record.wire_bytes <= most_bytes:
                most_bytes -= record.wire_bytes
                taken.append(record)
            else:
                omitted += 1
        return taken, omitted

    def expire(self, now: float) -> None:
        """Forget the records that have expired at wall-clock time `now`."""
        while self._expirations and self._expirations[0][0] <= now:
            _, key, publisher = heappop(self._expirations)
            entry = self._held(key, publisher)
            # A renewed record has left its earlier expiration behind in the heap.
            if entry is not None and entry.record.expiration_time <= now:
                self._remove(entry)

    def _guarded(self, record: Record, held: _Entry | None) -> str | None:
        guards = self._guards.get(record.key)
        if not guards:
            return None
        if record.withdrawn:  # it has no value that a guard could check
            return None if held else Refusal.UNKNOWN_WITHDRAWN
        # Several users of a run at this peer may each set a guard. One of them is enough.
        return guards[0](record)

    def _held(self, key: bytes, publisher: str) -> _Entry | None:
        return self._keys.get(key, {}).get(publisher)

    def _no_room(self, record: Record, held: _Entry | None, sender: str) -> Refusal | None:
        limits = self._limits
        records = 0 if held else 1
        size = record.wire_bytes - (held.record.wire_bytes if held else 0)
        # Renewals take no new place, so they pass.
        if not held and sender != record.publisher and self._relayed[sender] >= limits.relayed_per_sender:
            return Refusal.SENDER_QUOTA
        publisher = self._by_publisher.get(record.publisher, _Usage())
        if _over(publisher, records, size, limits.records_per_publisher, limits.bytes_per_publisher):
            return Refusal.PUBLISHER_QUOTA
        # A reserved place is free of the limits of the key and of the store, and not of the publisher's own.
        if record.publisher in self._reserved.get(record.key, ()):
            return None
        key = self._by_key.get(record.key, _Usage())
        if _over(key, records, size, limits.publishers_per_key, limits.bytes_per_key):
            return Refusal.KEY_FULL
        new_key = record.key not in self._keys and len(self._keys) >= limits.total_keys
        if new_key or _over(self._total, records, size, limits.total_records, limits.total_bytes):
            return Refusal.STORE_FULL
        return None

    def _remove(self, entry: _Entry) -> None:
        entries = self._keys[entry.record.key]
        del entries[entry.record.publisher]
        if not entries:
            del self._keys[entry.record.key]
        self._count(entry, -1)

    def _count(self, entry: _Entry, sign: int) -> None:
        record = entry.record
        self._total.add(sign, sign * record.wire_bytes)
        _count_in(self._by_key, record.key, sign, record.wire_bytes)
        _count_in(self._by_publisher, record.publisher, sign, record.wire_bytes)
        if entry.relayed_by is not None:
            self._relayed[entry.relayed_by] += sign
            if not self._relayed[entry.relayed_by]:
                del self._relayed[entry.relayed_by]


def _count_in(usages: dict[T, _Usage], name: T, sign: int, size: int) -> None:
    usage = usages.setdefault(name, _Usage())
    usage.add(sign, sign * size)
    if not usage.records:
        del usages[name]


def _outranked(record: Record, held: Record) -> Refusal | None:
    if record.rank < held.rank:
        return Refusal.REPLAYED
    # If the time went back, this record would expire first, and the older one could be sent again.
    if record.expiration_time < held.expiration_time:
        return Refusal.SHORTENED
    return None


def _forged(record: Record) -> Refusal | None:
    try:
        verify(record)
    except RecordError:
        return Refusal.FORGED
    return None


def _over(usage: _Usage, records: int, size: int, most_records: int, most_bytes: int) -> bool:
    # A record that takes no more room than before is never refused for lack of room: renewals and withdrawals pass.
    too_many = records > 0 and usage.records + records > most_records
    return too_many or (size > 0 and usage.bytes + size > most_bytes)


# Answers to other peers' requests.

UNCHECKED = "not looked at: an earlier record of this message was forged"


def serve(request: Request, sender: str, store: RecordStore, table: RoutingTable, now: float) -> Answer:
    """Carry out a request of the authenticated peer `sender` at wall-clock time `now`, and return the answer."""
    match request:
        case Store(_, records, known, brief):
            outcomes = tuple(_put_all(records, sender, store, now))
            if brief:
                return Stored((), (), outcomes, 0)
            keys = dict.fromkeys(record.key for record in records)
            held, omitted = store.records_within(keys, MAX_RECORD_BYTES_PER_ANSWER, now)
            closer = _closer(table, key_point(records[0].key), sender)
            return Stored(closer, unmarked(held, known), outcomes, omitted)
        case Find(_, key, known, brief):
            closer = () if brief else _closer(table, key_point(key), sender)
            return Found(closer, unmarked(store.records(key, now), known))
        case Locate(_, point):
            return LocateAnswer(_closer(table, int.from_bytes(point, "big"), sender))


def _put_all(records: Iterable[Record], sender: str, store: RecordStore, now: float) -> Iterable[str]:
    forged = False
    for record in records:
        if forged:
            # An honest peer checks records before it relays them. So this sender gets no more processor time.
            yield UNCHECKED
            continue
        refusal = store.put(record, sender=sender, now=now)
        forged = refusal is Refusal.FORGED
        yield (refusal or "")[:MAX_OUTCOME_LENGTH]


def _closer(table: RoutingTable, point: int, asker: str) -> tuple[Contact, ...]:
    # A contact without an address is useless to the asking peer.
    others = (contact for contact in table.live() if contact.addresses and contact.peer_id != asker)
    return tuple(nearest(others, point))
