"""A peer's node in the record network: it publishes, finds, stores and serves records.

Other modules make the decisions (record, storage, routing, lookup, publications, service). This module carries
them out on trio.
"""

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trio

from p2pavg_dht.client import Client
from p2pavg_dht.identity import Contact, ContactError, Rpc, Signer
from p2pavg_dht.messages import MessageError, Store, decode_request, encode
from p2pavg_dht.operations import Operations
from p2pavg_dht.publications import Publications
from p2pavg_dht.record import KEY_BYTES, MAX_VALUE_BYTES, Record, live_records
from p2pavg_dht.routing import RoutingTable, peer_point
from p2pavg_dht.storage import Guard, Limits, RecordStore, Refusal, serve, untimely
from p2pavg_dht.upkeep import Upkeep

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # whose stubs mypy prefers to trio's own

# The records that other peers' answers have named lately, so that the next answers can leave them out.

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


logger = logging.getLogger(__name__)

# The timeout of withdrawals at shutdown, shorter than that of a single call. Records not withdrawn by then expire.
WITHDRAW_TIMEOUT = 3.0


@dataclass(frozen=True, slots=True)
class Published:
    """The result of a publish.

    - `stored`: the number of peers that hold the record now, including this one.
    - `refused`: "peer id: reason" for each peer that answered and refused the record.
    - `records`: the live, verified records of other publishers under the key, one of each.
    """

    stored: int
    refused: tuple[str, ...]
    records: tuple[Record, ...]


class RecordNode:
    """The records of one peer, and its share of other peers' records.

    `signer` owns the identity, `rpc` calls other peers, and `wall_clock` returns seconds since 1970.

    `run` does the background work. Without it, records are not renewed, calling peers are not learned, and
    peers that failed are not tried again. publish, find, withdraw and answer work without it, so a peer that
    is shutting down can still withdraw. Every call is bounded by LOOKUP_TIMEOUT, or by twice as much for a
    publish that must look up the nearest peers first. Every call may be cancelled at any time. Failures of the
    network raise no exception here; the returned values show them.
    """

    def __init__(
        self,
        *,
        signer: Signer,
        rpc: Rpc,
        limits: Limits | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._peer_id = signer.peer_id
        self._limits = limits or Limits()
        self._now = wall_clock
        self._watchers: dict[bytes, Callable[[], None]] = {}
        self.on_outranked: Callable[[], None] = lambda: None
        """A function that is called when a record is found that another process of this identity has signed.

        It may be an earlier process, whose clock was ahead.
        """
        self._is_silent = False
        self._also: dict[bytes, tuple[Contact, ...]] = {}
        self._kept: dict[bytes, frozenset[str]] = {}
        self._store = RecordStore(self._limits)
        self._heard = RecordCache()
        self._table = RoutingTable(self._peer_id)
        self._publications = Publications(signer, self._limits)
        self._client = Client(rpc, self._table)
        self._operations = Operations(self._peer_id, self._client, self._table)
        self._upkeep = Upkeep(
            own_point=peer_point(self._peer_id),
            client=self._client,
            table=self._table,
            operations=self._operations,
            store=self._store,
            publications=self._publications,
            renew=self._renew,
            wall_clock=wall_clock,
        )

    @property
    def peer_id(self) -> str:
        """The id of this peer."""
        return self._peer_id

    @property
    def contacts(self) -> tuple[Contact, ...]:
        """The peers that answered their last call."""
        return tuple(self._table.live())

    @property
    def network_size(self) -> int:
        """About how many peers the network has, this one included: exact for small ones, see `RoutingTable`."""
        return self._table.network_size()

    async def run(self, *, task_status: "TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Renew own records at TTL/3, expire others, check peers and look for new ones, until cancelled.

        Call it with `nursery.start`. It owns every task that outlives a call. Raises RuntimeError if it runs
        already.
        """
        await self._upkeep.run(task_status=task_status)

    async def join(self, contacts: Sequence[Contact]) -> int:
        """Join the network through `contacts`, and return the number of peers that are known afterwards.

        It looks up the peers nearest to this one. 0 means that no contact answered. `run` tries these contacts
        again for as long as no peer is known.
        """
        # Before the first call: if all of them fail now, the upkeep goes on trying.
        self._upkeep.remember_bootstrap(contacts)
        await self._operations.locate(peer_point(self._peer_id), contacts)
        self._upkeep.refresh_soon()
        return len(self._table.live())

    async def publish(
        self, key: bytes, value: bytes, *, ttl: float, also: Sequence[Contact] = ()
    ) -> Published:
        """Publish `value` under `key`, and return the other publishers' records there.

        `key`: 32 bytes. `value`: 1 to MAX_VALUE_BYTES (4864) bytes. `ttl`: the seconds for which each signed copy
        is valid, at most `limits.max_ttl`. Raises ValueError for anything else.

        `run` renews the record every TTL/3 until `withdraw(key)`. With a ttl under about 3 s, the record may
        expire in between. The record replaces the one that this peer published under `key` before, and lasts
        at least as long. A cancelled publish may have stored the record, which is then renewed too: withdraw
        it.

        `also`: peers that get the record, and its renewals and withdrawal, besides the nearest ones. This peer
        keeps places for their records, and for its own, under the key.
        """
        _check_key(key)
        if not 0 < len(value) <= MAX_VALUE_BYTES:
            raise ValueError(f"a value has 1 to {MAX_VALUE_BYTES} bytes, not {len(value)}; see withdraw")
        if not (math.isfinite(ttl) and 0 < ttl <= self._limits.max_ttl):
            raise ValueError(f"ttl must be positive and at most {self._limits.max_ttl} s, not {ttl}")
        # Everything that renewals need is noted before the first call, since the call may be cancelled in its midst.
        record = self._publications.announce(key, value, ttl=ttl, now=self._now())
        self._also[key] = tuple(also)
        # Strangers may fill a key with invented records; these publishers have places there in any case.
        self._store.reserve(key, {self._peer_id, *(contact.peer_id for contact in also)})
        return await self._announce(record, also)

    async def withdraw(self, key: bytes) -> None:
        """Withdraw this peer's record under `key`, if there is one."""
        _check_key(key)
        # Another process has this identity: a withdrawal would remove its record.
        if self._is_silent:
            return
        tombstone = self._publications.withdraw(key, self._now())
        # Taken before anything is awaited: a publish that comes meanwhile sets it anew.
        also = self._also.pop(key, ())
        if tombstone is not None:
            await self._announce_briefly(tombstone, also)
        if key not in self._also:  # not published again meanwhile
            self._store.reserve(key, self._kept.get(key, frozenset()))

    def fall_silent(self) -> None:
        """Withdraw no more records: they would be those of another process, which has the same identity."""
        self._is_silent = True

    def release(self, key: bytes) -> None:
        """Renew this peer's record under `key` no more, and do not withdraw it either: it expires where it is stored.

        For a record that is to be found after its publisher has gone.
        """
        _check_key(key)
        self._publications.release(key)

    def keep_places(self, key: bytes, contacts: Sequence[Contact]) -> None:
        """Keep places for the records of `contacts` under `key`, though this peer has published none there.

        It lasts until it is called with none. A record that this peer publishes keeps those of its `also` instead.
        """
        _check_key(key)
        if contacts:
            self._kept[key] = frozenset({self._peer_id, *(contact.peer_id for contact in contacts)})
        else:
            self._kept.pop(key, None)
        if key not in self._also:
            self._store.reserve(key, self._kept.get(key, frozenset()))

    async def withdraw_all(self) -> None:
        """Withdraw all records at once, within WITHDRAW_TIMEOUT. It works before, during and after `run`."""
        with trio.move_on_after(WITHDRAW_TIMEOUT):
            async with trio.open_nursery() as nursery:
                for key in self._publications.said():
                    nursery.start_soon(self.withdraw, key)

    async def find(self, key: bytes, also: Sequence[Contact] = ()) -> tuple[Record, ...]:
        """Return the live records under `key`: the newest one of each publisher, ordered by publisher.

        The answers of the K nearest peers, and of those in `also`, are merged with this peer's own records. A
        publisher whose newest record is withdrawn or expired is left out.
        """
        _check_key(key)
        found = await self._operations.find(key, also, self._known(key))
        # A newer record of this identity means that another process has it, or had it with a clock that was ahead.
        if self._publications.are_outranked(found):
            self.on_outranked()
        return self._heard.keep(key, self._merged(key, found))

    @contextmanager
    def guarded(self, key: bytes, guard: Guard) -> Iterator[None]:
        """Let `guard` decide which records this peer stores under `key`, as long as the block lasts.

        It gets genuine records, and returns the reason for refusing one, or None. Of several guards of one key, the
        first decides.
        """
        _check_key(key)
        self._store.guard(key, guard)
        try:
            yield
        finally:
            self._store.unguard(key, guard)

    def watch(self, key: bytes, changed: Callable[[], None]) -> None:
        """Call `changed` whenever another peer has stored records under `key` here; `held` then returns them.

        There is one watcher for each key. This peer gets the records of a key while it is one of the K nearest
        peers to it. In a network of at most K peers, that is always so.
        """
        _check_key(key)
        self._watchers[key] = changed

    def unwatch(self, key: bytes) -> None:
        """End a `watch`."""
        self._watchers.pop(key, None)

    def held(self, key: bytes) -> tuple[Record, ...]:
        """Return the records under `key` that this peer holds, including withdrawals. It makes no call."""
        _check_key(key)
        return self._store.records(key, self._now())

    def answer(self, sender: str, request: bytes) -> bytes:
        """Return the answer to `request` of the authenticated peer `sender`.

        Raises MessageError if the request is malformed; then the caller resets the stream. A request takes at
        most 64 signature checks, about 6 ms. The caller limits the number of requests of a sender. Nothing is
        awaited, so the time from call to return is the processor time of the request.
        """
        decoded = decode_request(request)
        try:
            contact = Contact(sender, decoded.addresses)
        except ContactError as error:
            raise MessageError(f"the sender is no contact: {error}") from error
        # A call does not prove that its sender can be reached: the routing table takes it after a call back.
        self._table.update_addresses(contact)
        self._upkeep.check_if_wanted(contact)
        # Before the watchers are called: they look at what is stored now.
        answer = encode(serve(decoded, sender, self._store, self._table, self._now()))
        if isinstance(decoded, Store):
            for key in {record.key for record in decoded.records} & self._watchers.keys():
                self._watchers[key]()
        return answer

    async def _renew(self, key: bytes) -> None:
        # Each answer would name all that the other publishers have renewed meanwhile.
        record = self._publications.renew(key, self._now())
        if record is None:
            return
        await self._announce_briefly(record, self._also.get(key, ()))

    async def _announce_briefly(self, record: Record, also: Sequence[Contact]) -> None:
        """Store `record` without asking for those of others."""
        self._store.put(record, sender=self._peer_id, now=self._now())
        outcome = await self._operations.store(record, also, brief=True)
        for holder in outcome.holders:
            self._publications.confirmed(record, holder)
        # Perhaps a newer record of an earlier process of this peer is held. A full answer shows it.
        if outcome.refused:
            await self._announce(record, also)

    async def _announce(self, record: Record, also: Sequence[Contact]) -> Published:
        """Store `record`. If a newer record of an earlier process of this peer is found, outrank it and repeat."""
        published, seen = await self._announce_once(record, also)
        # An expired record obstructs nothing, and one that expires too far ahead is stored by no honest peer.
        timely = [r for r in seen if untimely(r, self._now(), self._limits) is None]
        again = self._publications.adopt(timely, self._now())
        if again is None:
            return published
        self.on_outranked()
        logger.info("a newer record of an earlier process of this peer was found and is being replaced")
        # Once only: two processes of one identity would outrank each other without end.
        published, _ = await self._announce_once(again, also)
        return published

    async def _announce_once(self, record: Record, also: Sequence[Contact]) -> tuple[Published, list[Record]]:
        # Store the record here first. If two peers announce to each other at once, one of them then finds the
        # other's record.
        refusal = self._store.put(record, sender=self._peer_id, now=self._now())
        known = self._known(record.key)
        # The request names the records that are known, so the answers leave them out.
        outcome = await self._operations.store(record, also, known)
        for holder in outcome.holders:
            self._publications.confirmed(record, holder)
        refused = [f"{self._peer_id}: {refusal}"] if refusal else []
        merged = self._heard.keep(record.key, self._merged(record.key, [*known, *outcome.records]))
        others = [r for r in merged if r.publisher != self._peer_id]
        stored = len(outcome.holders) + (refusal is None)
        return Published(stored, (*refused, *outcome.refused), tuple(others)), outcome.records

    def _known(self, key: bytes) -> tuple[Record, ...]:
        return self._merged(key, self._heard.records(key))

    def _merged(self, key: bytes, found: Sequence[Record]) -> tuple[Record, ...]:
        now = self._now()
        records = [*found, *self._store.records(key, now)]
        # Keepers that are honest refuse such a record. Expired ones stay until here: they show what they have replaced.
        credible = [r for r in records if untimely(r, now, self._limits) is not Refusal.TOO_FAR]
        return live_records(credible, now)


def _check_key(key: bytes) -> None:
    if type(key) is not bytes or len(key) != KEY_BYTES:
        raise ValueError(f"a key is {KEY_BYTES} bytes")
