"""The background work of a record node: renewals, expiry, checks of peers, refreshes of the routing table."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import trio

from p2pavg_dht.client import MOST_WAITING, Client
from p2pavg_dht.identity import Contact, RpcError
from p2pavg_dht.messages import MAX_STORED_RECORDS, Locate, Store, Stored
from p2pavg_dht.operations import Operations
from p2pavg_dht.publications import Publications
from p2pavg_dht.routing import K, RoutingTable, flipped, key_point, point_bytes
from p2pavg_dht.storage import RecordStore

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # whose stubs mypy prefers to trio's own

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
MOST_BOOTSTRAP = 64


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
        self._checking: set[str] = set()
        self._to_check, self._checks = trio.open_memory_channel[Contact](MOST_WAITING)

    def remember_bootstrap(self, contacts: Sequence[Contact]) -> None:
        """Remember contacts, to try them whenever no peer is known."""
        self._bootstrap = tuple(dict.fromkeys((*contacts, *self._bootstrap)))[:MOST_BOOTSTRAP]

    def refresh_soon(self) -> None:
        """Refresh the routing table after FIRST_REFRESH, and then at growing intervals."""
        self._refresh_wanted.set()

    def check_if_wanted(self, contact: Contact) -> None:
        """Call `contact` soon, if the routing table wants it."""
        if self._table.wanted(contact, trio.current_time()):
            self._check_soon(contact)

    def _check_soon(self, contact: Contact) -> None:
        """Call `contact` soon, unless a check of it is under way."""
        if contact.peer_id in self._checking:
            return
        try:
            self._to_check.send_nowait(contact)
        except trio.WouldBlock:
            logger.debug("%s is not checked: too many contacts wait for a check", contact.peer_id)
        else:
            self._checking.add(contact.peer_id)

    async def run(self, *, task_status: "TaskStatus[None]") -> None:
        """Do the background work until cancelled. Raise RuntimeError if it runs already."""
        if self._running:
            raise RuntimeError("this record node runs already")
        self._running = True
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(CHECKERS):
                    nursery.start_soon(self._check)
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
            self._check_soon(contact)
        if not self._table.live():
            for contact in self._bootstrap:
                self.check_if_wanted(contact)

    async def _check(self) -> None:
        """Check whether the contacts that wait for it answer. Several tasks run it."""
        async for contact in self._checks:
            # It asks for the peers near this one, so every check is a refresh as well.
            request = Locate(self._client.addresses(), point_bytes(self._own_point))
            try:
                await self._client.ask(contact, request)
            except RpcError as error:
                logger.debug("check: %s", error)
            finally:
                self._checking.discard(contact.peer_id)

    async def _tell_newcomers(self) -> None:
        """Send peers that are new or have returned those of this peer's records that they should hold."""
        async for contact in self._client.newcomers:
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
