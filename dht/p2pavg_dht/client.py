"""Outbound calls: single bounded calls, and whole lookups. The results update the routing table."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

import trio

from p2pavg_dht.identity import MAX_ADDRESSES, RPC_TIMEOUT, Contact, Rpc, RpcError
from p2pavg_dht.lookup import MOST_CALLS, Lookup
from p2pavg_dht.messages import (
    Answer,
    Find,
    Found,
    Locate,
    LocateAnswer,
    MessageError,
    Request,
    Store,
    Stored,
    decode_answer,
    encode,
)
from p2pavg_dht.record import Record, RecordError, verify
from p2pavg_dht.routing import RoutingTable

logger = logging.getLogger(__name__)

# The timeout of a lookup. Among dead peers it asks the next ones every half second; then it ends with what it has.
LOOKUP_TIMEOUT = 15.0
# About 3 ms of signatures between two checkpoints.
VERIFIED_AT_ONCE = 32
# Contacts that wait for background work, of each kind.
MOST_WAITING = 256

OnAnswer: TypeAlias = Callable[[Contact, Answer], None]
Outcome: TypeAlias = tuple[Contact, Answer | RpcError]


class Client:
    """Calls over `rpc`."""

    def __init__(self, rpc: Rpc, table: RoutingTable) -> None:
        self._rpc = rpc
        self._table = table
        self._to_newcomers, self.newcomers = trio.open_memory_channel[Contact](MOST_WAITING)
        """The contacts that have answered for the first time, or again."""
        self.background: trio.Nursery | None = None
        """Nursery of the node's calls. Without it, a lookup cancels those that it no longer waits for.

        A cancelled call costs its stream, and the next one opens another: a peer that is only slow would get slower.
        """

    def addresses(self) -> tuple[str, ...]:
        """Return this peer's own addresses, 16 at most."""
        return tuple(self._rpc.addresses)[:MAX_ADDRESSES]

    async def ask(self, contact: Contact, request: Request) -> Answer:
        """Send a request to `contact` and return its checked answer.

        Raises RpcError if there is no answer within RPC_TIMEOUT, or an invalid one.
        """
        encoded = encode(request)
        try:
            with trio.fail_after(RPC_TIMEOUT):
                answer = decode_answer(await self._rpc.call(contact, encoded))
                await _check(request, answer)
        except (RpcError, MessageError, RecordError, trio.TooSlowError) as error:
            self._table.failed(contact, trio.current_time())
            logger.debug("%s did not answer a %s: %r", contact.peer_id, type(request).__name__, error)
            raise RpcError(f"{contact.peer_id}: {error!r}") from error
        if self._table.succeeded(contact, trio.current_time()):
            try:
                self._to_newcomers.send_nowait(contact)
            except trio.WouldBlock:
                logger.debug(
                    "%s gets our records at their renewal: too many peers came at once", contact.peer_id
                )
        return answer

    async def walk(self, lookup: Lookup, request: Callable[[], Request], on_answer: OnAnswer) -> None:
        """Send requests to the contacts that `lookup` names, until it has finished or LOOKUP_TIMEOUT is over.

        `request` returns that of the next call, and is called after `on_answer` has had the answers that led to it.
        """
        # The channel has room for every outcome, so a call that has ended never blocks.
        send, receive = trio.open_memory_channel[Outcome](MOST_CALLS)
        with trio.move_on_after(LOOKUP_TIMEOUT):
            async with trio.open_nursery() as nursery:
                while True:
                    for contact in lookup.next_calls(trio.current_time()):
                        calls = self.background or nursery
                        calls.start_soon(self._ask_into, contact, request(), send)
                    if lookup.finished:
                        break
                    with trio.move_on_at(lookup.next_stall):
                        contact, outcome = await receive.receive()
                        self._note(lookup, contact, outcome, on_answer)
                    lookup.notice_stalls(trio.current_time())
                nursery.cancel_scope.cancel()
        for contact in lookup.stalled:
            self._table.failed(contact, trio.current_time())

    async def _ask_into(
        self, contact: Contact, request: Request, outcomes: trio.MemorySendChannel[Outcome]
    ) -> None:
        outcome: Answer | RpcError = RpcError("this node has ended")
        try:
            outcome = await self.ask(contact, request)
        except RpcError as error:
            outcome = error
        finally:
            outcomes.send_nowait((contact, outcome))

    def _note(
        self, lookup: Lookup, contact: Contact, outcome: Answer | RpcError, on_answer: OnAnswer
    ) -> None:
        if isinstance(outcome, RpcError):
            lookup.failed(contact)
            return
        now = trio.current_time()
        named = [self._table.prefer_live(closer) for closer in outcome.closer]
        lookup.answered(contact, [closer for closer in named if self._table.usable(closer, now)])
        on_answer(contact, outcome)


async def _check(request: Request, answer: Answer) -> None:
    """Raise MessageError or RecordError unless `answer` belongs to `request` and its records are genuine."""
    match request, answer:
        case Store(records=records), Stored(_, held, outcomes, _) if len(outcomes) == len(records):
            await _check_records(held, {record.key for record in records})
        case Find(key=key), Found(_, held):
            await _check_records(held, {key})
        case Locate(), LocateAnswer():
            pass
        case _:
            raise MessageError("the answer does not belong to the request")


async def _check_records(records: Sequence[Record], keys: set[bytes]) -> None:
    for number, record in enumerate(records, start=1):
        if record.key not in keys:
            raise MessageError("the answer has records under another key")
        verify(record)
        if number % VERIFIED_AT_ONCE == 0:
            await trio.lowlevel.checkpoint()
