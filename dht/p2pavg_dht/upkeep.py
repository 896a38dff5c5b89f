"""The background work of a record node: renewals, expiry, checks of peers, refreshes of the routing table."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import trio

from p2pavg_dht.client import Client
from p2pavg_dht.identity import Contact, RpcError
from p2pavg_dht.messages import MAX_STORED_RECORDS, Locate, Store, Stored
from p2pavg_dht.operations import Operations
from p2pavg_dht.publications import Publications
from p2pavg_dht.routing import K, RoutingTable, flipped, key_point, point_bytes
from p2pavg_dht.storage import RecordStore

logger = logging.getLogger(__name__)

# The wall clock may jump (a suspended laptop, a corrected clock), so it is read again this often.
TICK = 1.0
SHORTEST_TICK = 0.05
# The first refresh comes soon after joining, when other peers join too. The interval then doubles each time, and grows
# fourfold after a refresh that has met no peer: a network in which nothing changes costs next to nothing.
FIRST_REFRESH = 0.25
GROWTH = 2.0
QUIET_GROWTH = 4.0
LONGEST_REFRESH = 300.0
# Buckets with few peers are filled after peers were met, and at refreshes as rare as this one. Most have no more peers.
LONG_REFRESH = 30.0
# Peers that call but do not answer can occupy at most so many tasks, each for RPC_TIMEOUT.
CHECKERS = 16
MOST_WAITING = 256
MOST_BOOTSTRAP = 64


class TaskStatus(Protocol):
    """The `task_status` that `nursery.start` passes (trio.TaskStatus[None])."""

    def started(self) -> None:
        """Report that the task runs."""


class _Checks:
    """The calls that check whether a contact answers. Contacts that wait for a check are bounded."""

    def __init__(self, client: Client, table: RoutingTable, own_point: int) -> None:
        self._client = client
        self._table = table
        self._own_point = own_point
        self._checking: set[str] = set()
        self._to_check, self._checks = trio.open_memory_channel[Contact](MOST_WAITING)

    def check_if_wanted(self, contact: Contact) -> None:
        """Call `contact` soon, if the routing table wants it."""
        if self._table.wanted(contact, trio.current_time()):
            self.check_soon(contact)

    def check_soon(self, contact: Contact) -> None:
        """Call `contact` soon, unless a check of it is under way."""
        if contact.peer_id in self._checking:
            return
        try:
            self._to_check.send_nowait(contact)
        except trio.WouldBlock:
            logger.debug("%s is not checked: too many contacts wait for a check", contact.peer_id)
        else:
            self._checking.add(contact.peer_id)

    async def run(self) -> None:
        """Make the calls, until cancelled. Several tasks may run it."""
        # A check asks for the peers near this one, so every check is a refresh as well.
        async for contact in self._checks:
            try:
                await self._client.ask(
                    contact, Locate(self._client.addresses(), point_bytes(self._own_point))
                )
            except RpcError as error:
                logger.debug("check: %s", error)
            finally:
                self._checking.discard(contact.peer_id)


class Upkeep:
    """The background work of one node. It begins with `run`. Work that waits for it is bounded."""

    def __init__(
        self,
        *,
        own_point: int,
        client: Client,
        table: RoutingTable,
        operations: Operations,
        store: RecordStore,
        publications: Publications,
        renew: Callable[[bytes], Awaitable[None]],
        wall_clock: Callable[[], float],
    ) -> None:
        self._own_point = own_point
        self._client = client
        self._table = table
        self._operations = operations
        self._store = store
        self._publications = publications
        self._renew = renew
        self._now = wall_clock
        self._running = False
        self._bootstrap: tuple[Contact, ...] = ()
        self._refresh_wanted = trio.Event()
        self._checks = _Checks(client, table, own_point)
        self._to_tell, self._newcomers = trio.open_memory_channel[Contact](MOST_WAITING)

    def remember_bootstrap(self, contacts: Sequence[Contact]) -> None:
        """Remember contacts, to try them whenever no peer is known."""
        self._bootstrap = tuple(dict.fromkeys((*contacts, *self._bootstrap)))[:MOST_BOOTSTRAP]

    def refresh_soon(self) -> None:
        """Refresh the routing table after FIRST_REFRESH, and then at growing intervals."""
        self._refresh_wanted.set()

    def check_if_wanted(self, contact: Contact) -> None:
        """Call `contact` soon, if the routing table wants it."""
        self._checks.check_if_wanted(contact)

    def tell_soon(self, contact: Contact) -> None:
        """Send `contact`, which is new or has returned, those of this peer's records that it should hold."""
        try:
            self._to_tell.send_nowait(contact)
        except trio.WouldBlock:
            logger.debug(
                "%s will get our records at their renewal: too many peers came at once", contact.peer_id
            )

    async def run(self, *, task_status: TaskStatus) -> None:
        """Do the background work until cancelled. Raise RuntimeError if it runs already."""
        if self._running:
            raise RuntimeError("this record node runs already")
        self._running = True
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(CHECKERS):
                    nursery.start_soon(self._checks.run)
                    nursery.start_soon(self._tell_newcomers)
                nursery.start_soon(self._refresh)
                nursery.start_soon(self._tick, nursery)
                nursery.start_soon(self._end_calls_in, nursery)
                task_status.started()
        finally:
            self._running = False

    async def _end_calls_in(self, nursery: trio.Nursery) -> None:
        # As a task of the nursery: it is open until this one has ended.
        self._client.background = nursery
        try:
            await trio.sleep_forever()
        finally:
            self._client.background = None

    async def _tick(self, nursery: trio.Nursery) -> None:
        while True:
            now = self._now()
            self._store.expire(now)
            for key in self._publications.due(now):
                nursery.start_soon(self._renew, key)
            self._check_on_peers()
            # Wait until the renewals have begun. Then they are no longer due when the next tick is planned.
            await trio.sleep(SHORTEST_TICK)
            await trio.sleep(max(0.0, min(TICK, self._publications.next_due() - self._now())))

    def _check_on_peers(self) -> None:
        for contact in self._table.due(trio.current_time()):
            self._checks.check_soon(contact)
        if not self._table.live():
            for contact in self._bootstrap:
                self._checks.check_if_wanted(contact)

    async def _tell_newcomers(self) -> None:
        async for contact in self._newcomers:
            records = [
                record
                for record in self._publications.unconfirmed(contact.peer_id, self._now())
                if contact in self._table.nearest(key_point(record.key), K)
            ][:MAX_STORED_RECORDS]
            if not records:
                continue
            try:
                answer = await self._client.ask(
                    contact, Store(self._client.addresses(), tuple(records), brief=True)
                )
            except RpcError as error:
                logger.debug("telling: %s", error)
                continue
            assert isinstance(answer, Stored)
            for record, outcome in zip(records, answer.outcomes, strict=True):
                if not outcome:
                    self._publications.confirmed(record, contact.peer_id)

    async def _refresh(self) -> None:
        interval, met = FIRST_REFRESH, -1
        while True:
            self._refresh_wanted = trio.Event()
            with trio.move_on_after(interval):
                await self._refresh_wanted.wait()
                interval = FIRST_REFRESH
                met = -1
                await trio.sleep(interval)
            before = self._table.met
            await self._look_around(everywhere=before > met or interval >= LONG_REFRESH)
            met = before
            growth = GROWTH if self._table.met > before else QUIET_GROWTH
            interval = min(growth * interval, LONGEST_REFRESH)

    async def _look_around(self, *, everywhere: bool) -> None:
        """Look for the nearest peers, and with `everywhere` for peers of each bucket that has few."""
        await self._operations.locate(self._own_point)
        if everywhere:
            for bucket in self._table.buckets_to_refresh():
                await self._operations.locate(flipped(self._own_point, bucket))
