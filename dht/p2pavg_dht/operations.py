"""The three operations on the network: locate peers, store a record, find the records under a key."""

import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio
from msgspec.structs import replace

from p2pavg_dht.client import Client, OnAnswer
from p2pavg_dht.identity import Contact, RpcError
from p2pavg_dht.lookup import PATHS, Ends, Lookup
from p2pavg_dht.messages import Answer, Find, Found, Locate, Request, Store, Stored, marks_of
from p2pavg_dht.record import Record, merge
from p2pavg_dht.routing import K, RoutingTable, key_point, nearest, point_bytes

logger = logging.getLogger(__name__)

# The seconds for which the peers nearest to a key count as known, and the number of keys that are remembered. A
# hostile contact with its addresses takes 5 KB, so 16 contacts for each key make 10 MB at most.
RESOLVED_FOR = 60.0
MOST_RESOLVED = 128
# The seconds for which contacts that are called beside a lookup may answer after it has ended.
BESIDE_TIMEOUT = 0.5


@dataclass(slots=True)
class StoreRound:
    """The outcome of sending one record to the nearest peers."""

    holders: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def note(self, contact: Contact, answer: Answer) -> None:
        """Note the answer of `contact`."""
        assert isinstance(answer, Stored)
        if answer.outcomes[0]:
            self.refused.append(f"{contact.peer_id}: {answer.outcomes[0]}")
        else:
            self.holders.append(contact.peer_id)
        self.records.extend(answer.records)


@dataclass(frozen=True, slots=True)
class _Resolved:
    """The nearest peers of a key, by the path that found them."""

    ends: Ends
    at: float


class Operations:
    """Lookups of the peer `own_id` over `client` and `paths` disjoint paths, starting from the contacts of `table`."""

    def __init__(self, own_id: str, client: Client, table: RoutingTable, paths: int = PATHS) -> None:
        self._paths = paths
        self._own_id = own_id
        self._client = client
        self._table = table
        self._resolved: dict[int, _Resolved] = {}

    async def locate(self, point: int, seeds: Iterable[Contact] = ()) -> None:
        """Learn the peers near `point`, starting from `seeds` and the known contacts."""
        await self._locate(self._lookup(point, seeds), point)

    async def store(
        self,
        record: Record,
        also: Sequence[Contact] = (),
        known: Sequence[Record] = (),
        *,
        brief: bool = False,
    ) -> StoreRound:
        """Send `record` to the K nearest peers, and to nearer ones that their answers name.

        If the nearest peers are known, this is one wave of calls. If not, they are looked up first, so that
        no copies are left at peers on the way. The contacts in `also` are called at once in any case; their answers
        name no records. Answers leave out the records in `known`. With `brief`, they name no records and no peers.
        """
        point = key_point(record.key)
        outcome = StoreRound()
        addresses = self._client.addresses()
        briefly = Store(addresses, (record,), brief=True)

        def request() -> Store:
            heard = merge([*known, *outcome.records]).values()
            return briefly if brief else Store(addresses, (record,), marks_of(heard))

        async with self._beside(point, also, briefly, outcome.note):
            if not self._known(point):
                lookup = self._lookup(point)
                await self._locate(lookup, point)
                self._note_resolved(point, lookup.ends)
            patient = not brief and self._is_large
            await self._client.walk(self._lookup(point, patient=patient), request, outcome.note)
        return outcome

    async def find(
        self, key: bytes, also: Sequence[Contact] = (), known: Sequence[Record] = ()
    ) -> list[Record]:
        """Return all records under `key` that the K nearest peers and those in `also` hold, not merged yet.

        The records in `known` are among them, whether a peer holds them or not. Each peer is asked for what earlier
        answers have not named, so half of the K nearest send nothing as a rule. The contacts in `also` are asked at
        the end.
        """
        found = list(known)

        def collect(_: Contact, answer: Answer) -> None:
            assert isinstance(answer, Found)
            found.extend(answer.records)

        point = key_point(key)
        addresses = self._client.addresses()

        def request() -> Find:
            return Find(addresses, key, marks_of(merge(found).values()))

        lookup = self._lookup(point, patient=self._is_large)
        await self._client.walk(lookup, request, collect)
        self._note_resolved(point, lookup.ends)
        async with self._beside(point, also, replace(request(), brief=True), collect):
            pass
        return found

    @asynccontextmanager
    async def _beside(
        self, point: int, contacts: Sequence[Contact], request: Request, on_answer: OnAnswer
    ) -> AsyncIterator[None]:
        """Call contacts beside a lookup, and wait for them at most BESIDE_TIMEOUT longer than for the lookup.

        The lookup itself calls those that are nearest to `point`. One that has just failed is left out: it would
        hold up every call.
        """
        async with trio.open_nursery() as nursery:
            now = trio.current_time()
            # A lookup counts this peer itself among the K.
            known = [Contact(self._own_id, ()), *self._table.nearest(point, K)]
            called = {contact.peer_id for contact in nearest(known, point)}
            for contact in map(self._table.prefer_live, contacts):
                if contact.peer_id not in called and self._table.usable(contact, now):
                    nursery.start_soon(self._ask, contact, request, on_answer)
            yield
            nursery.cancel_scope.deadline = trio.current_time() + BESIDE_TIMEOUT

    async def _ask(self, contact: Contact, request: Request, on_answer: OnAnswer) -> None:
        try:
            answer = await self._client.ask(contact, request)
        except RpcError as error:
            logger.debug("beside a lookup: %s", error)
        else:
            on_answer(contact, answer)

    async def _locate(self, lookup: Lookup, point: int) -> None:
        request = Locate(self._client.addresses(), point_bytes(point))
        await self._client.walk(lookup, lambda: request, _ignore)

    def _lookup(self, point: int, seeds: Iterable[Contact] = (), *, patient: bool = False) -> Lookup:
        # Twice as many as are asked. The second half replaces those that do not answer.
        known = [*self._table.nearest(point, 2 * K), *seeds]
        return Lookup(
            point,
            known,
            own_id=self._own_id,
            wide=self._known(point),
            patient=patient,
            paths=self._paths,
            starts=self._starts(point),
        )

    def _known(self, point: int) -> bool:
        """Return whether the nearest known contacts are probably the nearest peers of the whole network."""
        return not self._is_large or bool(self._starts(point))

    @property
    def _is_large(self) -> bool:
        """True if the network has more than K peers. In a smaller one, this peer holds all records itself."""
        return len(self._table.live()) >= K

    def _starts(self, point: int) -> Ends:
        """Return the usable contacts at which the last lookup of `point` has ended, if it was not long ago."""
        now = trio.current_time()
        resolved = self._resolved.get(point)
        if resolved is None or now >= resolved.at + RESOLVED_FOR:
            return ()
        hands = [map(self._table.prefer_live, hand) for hand in resolved.ends]
        return [[contact for contact in hand if self._table.usable(contact, now)] for hand in hands]

    def _note_resolved(self, point: int, ends: Ends) -> None:
        self._resolved.pop(point, None)
        self._resolved[point] = _Resolved(ends, trio.current_time())
        if len(self._resolved) > MOST_RESOLVED:
            # Dictionaries keep their order, so the first one was resolved longest ago.
            del self._resolved[next(iter(self._resolved))]


def _ignore(_: Contact, __: Answer) -> None:
    """Do nothing with an answer: the client has already updated the routing table."""
