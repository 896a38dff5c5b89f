"""Ask a few peers for their clock, versions and number of runs; answer the same (:mod:`p2pavg.runs.records.hello`)."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

import trio

from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import QUICK_REPLY_SECONDS, ROUND_TRIPS_SECONDS
from p2pavg.net.transport import Stream, Transport, receive_message, send_message
from p2pavg.runs.records.hello import (
    MAX_HELLO_BYTES,
    PROTOCOL,
    QUESTION,
    HelloAnswer,
    PeerHello,
    compare,
    other_versions,
    wrong_clock,
)
from p2pavg_dht import Contact, RecordNode

logger = logging.getLogger(__name__)

ASKED_AT_ONCE = 8  # the median of eight clocks stays right with three false ones
GREET_AGAIN_SECONDS = 300.0  # clocks drift slowly
FRESH_GREETING_SECONDS = 10.0  # for which answers are reused
GREETING_SECONDS = 3.0
"""For one answer. A result that says why no group formed, and the doctor, wait for all of them."""
MIN_SECONDS_BETWEEN = 0.5  # between two questions of one peer; an honest peer asks at most every ten seconds
MAX_REMEMBERED = 1024  # askers


class Greeter:
    """The hello protocol of one peer: it asks others, and answers them.

    Args:
        protocols: what this peer serves.
        runs: the number of runs it takes part in.
        records: knows peers in the network that answered lately.
    """

    def __init__(
        self,
        transport: Transport,
        records: RecordNode,
        *,
        wall_clock: Callable[[], float],
        protocols: Sequence[str],
        runs: Callable[[], int],
    ) -> None:
        self._transport = transport
        self._wall_clock = wall_clock
        self._protocols = tuple(protocols)
        self._runs = runs
        self._records = records
        self._heard: tuple[HelloAnswer, ...] = ()
        self._looked = float("-inf")
        self._said = ""
        self._askers: OrderedDict[str, float] = OrderedDict()

    async def run(self) -> None:
        """Compare clocks and versions soon after the start and then periodically, until cancelled."""
        await trio.sleep(ROUND_TRIPS_SECONDS)  # joining the network comes first
        while True:
            await self.poll()
            # The first peer of a network has no other peer to ask yet.
            await trio.sleep(GREET_AGAIN_SECONDS if self._heard else FRESH_GREETING_SECONDS)

    async def poll(self) -> tuple[HelloAnswer, ...]:
        """Return the answers of a few peers; reuse answers of the last seconds."""
        if trio.current_time() < self._looked + FRESH_GREETING_SECONDS:
            return self._heard
        self._looked = trio.current_time()
        heard: list[HelloAnswer] = []
        async with trio.open_nursery() as nursery:
            for contact in self._records.contacts[:ASKED_AT_ONCE]:
                nursery.start_soon(self._ask, contact, heard)
        self._heard = tuple(heard)
        self._warn()
        return self._heard

    def differences(self, heard: Sequence[HelloAnswer]) -> list[str]:
        """Return sentences on how this peer's clock and versions differ from the answers."""
        found = [wrong_clock(heard), other_versions(self._protocols, heard)]
        return [sentence for sentence in found if sentence]

    def _warn(self) -> None:
        """Log each difference once; a wrong clock that drifts by seconds is not a new difference."""
        said = "; ".join(self.differences(self._heard))
        kind = "".join(character for character in said if not character.isdigit())
        if said and kind != self._said:
            logger.warning("%s", said)
        if self._heard:
            self._said = kind

    async def _ask(self, contact: Contact, heard: list[HelloAnswer]) -> None:
        stream: Stream | None = None
        with trio.move_on_after(GREETING_SECONDS):
            try:
                stream = await self._transport.open_stream(
                    contact.peer_id, PROTOCOL, addresses=contact.addresses, timeout=GREETING_SECONDS
                )
                asked = self._wall_clock()
                await send_message(stream, QUESTION)
                answer = await receive_message(stream, max_bytes=MAX_HELLO_BYTES)
                if answer is not None:
                    heard.append(compare(PeerHello.decode(answer), asked, self._wall_clock()))
            except (UnreachableError, StreamBrokenError, RemoteProtocolError, ClosedError) as error:
                logger.debug("no hello of %s: %s", contact.peer_id, error)
        if stream is not None:
            await stream.reset()

    async def serve(self, stream: Stream) -> None:
        """Answer one question; a peer that asks again too soon gets none."""
        now = trio.current_time()
        last = self._askers.pop(stream.remote, float("-inf"))
        self._askers[stream.remote] = now
        if len(self._askers) > MAX_REMEMBERED:
            self._askers.popitem(last=False)
        if now < last + MIN_SECONDS_BETWEEN:
            return
        with trio.move_on_after(QUICK_REPLY_SECONDS):
            if await receive_message(stream, max_bytes=MAX_HELLO_BYTES) is None:
                return
            mine = PeerHello(clock=self._wall_clock(), protocols=self._protocols, runs=self._runs())
            await send_message(stream, mine.encode())
            await stream.aclose()
