"""A peer's part in the record network: it says, finds, keeps and serves records.

Decisions are made elsewhere (record, storage, routing, lookup, publications, service); this module carries
them out on trio.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from p2pavg_dht.client import Client
from p2pavg_dht.contact import Contact, ContactError
from p2pavg_dht.distance import peer_point
from p2pavg_dht.identity import Signer
from p2pavg_dht.limits import Limits
from p2pavg_dht.messages import MessageError, Store, decode_request, encode
from p2pavg_dht.operations import Operations
from p2pavg_dht.publications import Publications
from p2pavg_dht.record import KEY_BYTES, MAX_VALUE_BYTES, Record, live_records
from p2pavg_dht.routing import RoutingTable
from p2pavg_dht.rpc import Rpc
from p2pavg_dht.service import serve
from p2pavg_dht.storage import RecordStore, Refusal, untimely
from p2pavg_dht.upkeep import Started, Upkeep

logger = logging.getLogger(__name__)

# At shutdown somebody waits: less than one call's time limit. What has not been taken back by then expires.
WITHDRAW_TIMEOUT = 3.0


@dataclass(frozen=True, slots=True)
class Published:
    """What came of a publish.

    - `stored`: how many peers hold the record now, this one included.
    - `refused`: "peer id: reason" of each that answered and did not take it.
    - `records`: what others say under the key, verified and live, one record a publisher.
    """

    stored: int
    refused: tuple[str, ...]
    records: tuple[Record, ...]


class RecordNode:
    """The records of one peer, and its share in keeping those of others.

    `signer` owns the identity, `rpc` reaches other peers, `addresses` says where this peer is reached now
    (the first 16 count), `wall_clock` gives seconds since 1970.

    `run` keeps it going: without it, records are not renewed, peers that call are not learned, and those
    that failed do not come back; publish, find, withdraw and handle work all the same, so a peer that is
    shutting down can still withdraw. Every call is bounded (LOOKUP_TIMEOUT, twice for a publish whose way
    is unknown) and may be cancelled at any time. What the network does is never an exception here; it shows
    in what is returned.
    """

    def __init__(
        self,
        *,
        signer: Signer,
        rpc: Rpc,
        addresses: Callable[[], Sequence[str]],
        limits: Limits | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._peer_id = signer.peer_id
        self._limits = limits or Limits()
        self._now = wall_clock
        self._watchers: dict[bytes, Callable[[], None]] = {}
        self._store = RecordStore(self._limits)
        self._table = RoutingTable(self._peer_id)
        self._publications = Publications(signer, self._limits)
        self._client = Client(rpc, self._table, addresses, self._on_live)
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
        """This peer's id."""
        return self._peer_id

    @property
    def contacts(self) -> tuple[Contact, ...]:
        """The peers that answered when last called."""
        return tuple(self._table.live())

    async def run(self, *, task_status: Started = trio.TASK_STATUS_IGNORED) -> None:
        """Renew records at TTL/3, expire others', check on peers and look for new ones, until cancelled.

        For `nursery.start`. Owns every task that outlives a call. RuntimeError when it runs already.
        """
        await self._upkeep.run(task_status=task_status)

    async def join(self, contacts: Sequence[Contact]) -> int:
        """Get to know the network through `contacts`; how many peers are known afterwards.

        Looks up this peer's own surroundings. 0 means that nobody answered; `run` goes on trying these
        contacts for as long as nobody is known.
        """
        self._upkeep.remember_bootstrap(contacts)
        await self._operations.locate(peer_point(self._peer_id), contacts)
        self._upkeep.refresh_soon()
        return len(self._table.live())

    def add_contact(self, contact: Contact) -> None:
        """Somebody is there: it becomes known as soon as it answers a call, which `run` makes."""
        self._upkeep.check_if_wanted(contact)

    async def publish(self, key: bytes, value: bytes, *, ttl: float) -> Published:
        """Say `value` under `key`, and hear what others say there.

        `key`: 32 bytes. `value`: 1 to 4096 bytes. `ttl`: seconds for which each signed copy counts, at most
        `limits.max_ttl`. `run` renews the record every TTL/3 until `withdraw(key)`; a ttl under about 3 s
        may lapse in between. It takes the place of what this peer said under `key` before, and lasts at
        least as long. ValueError for anything else. A publish that is cancelled may have been stored, and is
        renewed all the same: withdraw it.
        """
        _check_key(key)
        if not 0 < len(value) <= MAX_VALUE_BYTES:
            raise ValueError(f"a value has 1 to {MAX_VALUE_BYTES} bytes, not {len(value)}; see withdraw")
        if not (math.isfinite(ttl) and 0 < ttl <= self._limits.max_ttl):
            raise ValueError(f"ttl must be positive and at most {self._limits.max_ttl} s, not {ttl}")
        return await self._announce(self._publications.announce(key, value, ttl=ttl, now=self._now()))

    async def withdraw(self, key: bytes) -> None:
        """Take back what was published under `key`; nothing happens if nothing was."""
        _check_key(key)
        tombstone = self._publications.withdraw(key, self._now())
        if tombstone is not None:
            await self._announce(tombstone)

    async def withdraw_all(self) -> None:
        """Take back everything, all at once, within WITHDRAW_TIMEOUT. Works before, during and after run."""
        with trio.move_on_after(WITHDRAW_TIMEOUT):
            async with trio.open_nursery() as nursery:
                for key in self._publications.said():
                    nursery.start_soon(self.withdraw, key)

    async def find(self, key: bytes) -> tuple[Record, ...]:
        """What is said under `key`: of each publisher the newest record, if it is live.

        Merged from the K nearest peers, this one's own among them, and ordered by publisher.
        """
        _check_key(key)
        found = await self._operations.find(key)
        return self._merged(key, found)

    def watch(self, key: bytes, changed: Callable[[], None]) -> None:
        """Call `changed` whenever another peer has stored something under `key` here, which `held` then returns.

        One a key. This peer is among those that hold a key while it is one of the K nearest to it, and so
        always where there are no more.
        """
        _check_key(key)
        self._watchers[key] = changed

    def unwatch(self, key: bytes) -> None:
        """No longer call what `watch` was given."""
        self._watchers.pop(key, None)

    def held(self, key: bytes) -> tuple[Record, ...]:
        """What this peer holds under `key` itself, withdrawals among it. Asks nobody."""
        _check_key(key)
        return self._store.records(key, self._now())

    async def handle(self, sender: str, request: bytes) -> bytes:
        """As `answer`, with a checkpoint after it."""
        answer = self.answer(sender, request)
        await trio.lowlevel.checkpoint()
        return answer

    def answer(self, sender: str, request: bytes) -> bytes:
        """The answer to `request` of the authenticated peer `sender`.

        MessageError when it is malformed: the caller resets the stream. One request costs at most 64
        signatures, about 6 ms; how many a sender may make is the caller's to limit. Nothing is awaited, so the
        time from call to return is what the request has cost.
        """
        decoded = decode_request(request)
        try:
            contact = Contact(sender, decoded.addresses)
        except ContactError as error:
            raise MessageError(f"the sender is no contact: {error.reason}") from error
        self._table.update_addresses(contact)
        self._upkeep.check_if_wanted(contact)
        answer = encode(serve(decoded, sender, self._store, self._table, self._now()))
        if isinstance(decoded, Store):
            for key in {record.key for record in decoded.records} & self._watchers.keys():
                self._watchers[key]()
        return answer

    async def _renew(self, key: bytes) -> None:
        record = self._publications.renew(key, self._now())
        if record is not None:
            await self._announce(record)

    async def _announce(self, record: Record) -> Published:
        """Store `record`; once more, outranking it, when an earlier life of ours is found in the way."""
        published, seen = await self._announce_once(record)
        timely = [r for r in seen if untimely(r, self._now(), self._limits) is None]
        again = self._publications.adopt(timely, self._now())
        if again is None:
            return published
        logger.info("a record of an earlier life of this peer was found and is being replaced")
        published, _ = await self._announce_once(again)
        return published

    async def _announce_once(self, record: Record) -> tuple[Published, list[Record]]:
        # Kept here first: of two that announce to each other at once, one finds the other's already stored.
        refusal = self._store.put(record, sender=self._peer_id, now=self._now())
        outcome = await self._operations.store(record)
        for holder in outcome.holders:
            self._publications.confirmed(record, holder)
        refused = [f"{self._peer_id}: {refusal}"] if refusal else []
        others = [r for r in self._merged(record.key, outcome.records) if r.publisher != self._peer_id]
        stored = len(outcome.holders) + (refusal is None)
        return Published(stored, (*refused, *outcome.refused), tuple(others)), outcome.records

    def _merged(self, key: bytes, found: Sequence[Record]) -> tuple[Record, ...]:
        now = self._now()
        records = [*found, *self._store.records(key, now)]
        credible = [r for r in records if untimely(r, now, self._limits) is not Refusal.TOO_FAR]
        return live_records(credible, now)

    def _on_live(self, contact: Contact) -> None:
        self._upkeep.tell_soon(contact)


def _check_key(key: bytes) -> None:
    if type(key) is not bytes or len(key) != KEY_BYTES:
        raise ValueError(f"a key is {KEY_BYTES} bytes")
