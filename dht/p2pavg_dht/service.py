"""Answers to other peers' requests. This module decides; it does no I/O and has no clock."""

from collections.abc import Iterable

from p2pavg_dht.distance import key_point, nearest
from p2pavg_dht.identity import Contact
from p2pavg_dht.messages import (
    MAX_OUTCOME_LENGTH,
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
from p2pavg_dht.record import Record
from p2pavg_dht.routing import RoutingTable
from p2pavg_dht.storage import RecordStore, Refusal
from p2pavg_dht.wire import MAX_RECORD_BYTES_PER_ANSWER

UNCHECKED = "not looked at: an earlier record of this message was forged"


def serve(request: Request, sender: str, store: RecordStore, table: RoutingTable, now: float) -> Answer:
    """Carry out a request of the authenticated peer `sender` at wall-clock time `now`, and return the answer."""
    match request:
        case Store(_, records, _, True):
            return Stored((), (), tuple(_put_all(records, sender, store, now)), 0)
        case Store(_, records, known):
            outcomes = tuple(_put_all(records, sender, store, now))
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
