"""The spreading of evidence among the peers of a run: each one publishes the digests of what it has verified.

A peer that reads an unknown digest fetches the evidence from the publisher, verifies it itself, excludes the peer that
it accuses, and publishes the digest too. So one witness of a lie is enough, and no peer's word counts.
:mod:`p2pavg.verification.evidence.inquiries` decides what is fetched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import trio

from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import (
    FAREWELL_SECONDS,
    LOOK_SECONDS,
    RECORD_LIFE_SECONDS,
    REPLY_SECONDS,
    SPREAD_LOOK_SECONDS,
)
from p2pavg.net.blame import guarded
from p2pavg.net.transport import Stream, receive_exactly_into, receive_message, send_message
from p2pavg.runs.context import PeerContext
from p2pavg.runs.records.run_records import RunRecords
from p2pavg.verification.evidence.accusation import (
    MAX_ADDRESSES,
    MAX_ANSWER_BYTES,
    MAX_NAMED,
    PROTOCOL,
    Accusation,
    EvidenceAnswer,
    EvidenceRequest,
    Named,
    Notice,
    digest_of,
    read_accusation,
    read_named,
    read_notice,
)
from p2pavg.verification.evidence.inquiries import EvidenceFetch, Exclusions, Inquiries
from p2pavg_dht import Record
from p2pavg_dht.identity import MAX_ADDRESS_LENGTH

logger = logging.getLogger(__name__)

MAX_CLAIMS = 32
"""Pieces of this peer's own evidence that wait to be verified. One round gives at most one for each of its members."""
MIN_BYTES_PER_SECOND = 128 * 1024  # 1 Mbit/s; contradictions have a few hundred bytes and come over any link
_CHUNK_BYTES = 64 * 1024


def transfer_seconds(size: int) -> float:
    """Return the timeout of a transfer of so many bytes of evidence, in seconds."""
    return REPLY_SECONDS + size / MIN_BYTES_PER_SECOND


class Accusations:
    """The accusations of one run, as one peer knows them. All of the peer's users of the run share one object.

    Args:
        run_id: names the run in the log.
        key: of the run's notices, among the run's peers.
    """

    def __init__(self, context: PeerContext, run_id: str, key: bytes) -> None:
        self.exclusions = Exclusions(context.signer.peer_id)
        self.changed: list[Callable[[], None]] = []
        """Called after a peer was excluded."""
        self._context = context
        self._run_id = run_id
        self._key = key
        self._me = context.signer.peer_id
        self._inquiries = Inquiries(self.exclusions, self._me)
        self._claims: set[bytes] = set()
        self._woken = trio.Event()
        self._turn = trio.Lock()

    def accuse(self, evidence: bytes) -> None:
        """Verify evidence that this peer found itself, exclude the liar, and publish the evidence. Returns at once.

        Args:
            evidence: of any kind in :data:`p2pavg.verification.evidence.accusation.KINDS`.
        """
        # Several averagers of the run, or several rounds, may find the same evidence.
        digest = digest_of(evidence)
        if digest in self._claims:
            return
        if len(self._claims) >= MAX_CLAIMS:
            logger.warning("evidence of a lie in run %r is left out: too much of it waits", self._run_id)
            return
        self._claims.add(digest)
        self._context.nursery.start_soon(self._claim, digest, evidence)

    async def _claim(self, digest: bytes, evidence: bytes) -> None:
        try:
            with guarded(self._me, lambda _peer_id, _error: None, what="own evidence"):
                accusation = await self._context.run_aside(read_accusation, evidence)
                # Evidence of a peer that was met in a round has priority: others may be invented identities.
                self.exclusions.meets(accusation.peer_id)
                self._learn(accusation)
        finally:
            self._claims.discard(digest)

    def _learn(self, accusation: Accusation) -> None:
        before = self.exclusions.against_me
        if self.exclusions.learn(accusation):
            logger.warning(
                "%s is excluded from run %r: %s", accusation.peer_id, self._run_id, accusation.reason
            )
            # Published at once, so that the evidence outlives this peer.
            self._woken.set()
            for changed in tuple(self.changed):
                changed()
        elif self.exclusions.against_me and not before:
            logger.error(
                "other peers exclude this one, %s, from run %r: %s. Its private key signs in another process too: "
                "make a new identity file, and use one for each process",
                self._me,
                self._run_id,
                accusation.reason,
            )

    # ------------------------------------------------------------------ records

    async def spread(self, records: RunRecords) -> None:
        """Publish digests and fetch evidence until cancelled; withdraw the record then.

        While another user of the run at this peer does so, this call waits for its end, and then takes over.
        """
        # A peer has one record under a key. Two users that published and withdrew it would disturb each other.
        async with self._turn:
            records.watch(self._key, lambda: self._woken.set())
            try:
                async with trio.open_nursery() as nursery:
                    await self._look_and_publish(records, nursery)
            finally:
                records.unwatch(self._key)
                # Other peers would ask a peer that is gone for evidence, until the record expires.
                with trio.CancelScope(shield=True, deadline=trio.current_time() + FAREWELL_SECONDS):
                    await records.withdraw(self._key)

    async def _look_and_publish(self, records: RunRecords, nursery: trio.Nursery) -> None:
        published, look_at = b"", trio.current_time()
        while True:
            # Made before the look: what comes during the look begins the next one.
            self._woken = trio.Event()
            if trio.current_time() >= look_at:
                self._note_notices(await records.find(self._key))
                # Between two look-ups of the records. A record that another peer stores here is read within a second.
                look_at = trio.current_time() + SPREAD_LOOK_SECONDS
            else:
                # Records that are stored here are read without a call to any peer.
                self._note_notices(records.held(self._key))
            named = self.exclusions.newest(MAX_NAMED)
            usable = [text for text in self._context.transport.addresses if len(text) <= MAX_ADDRESS_LENGTH]
            value = Notice(tuple(usable[:MAX_ADDRESSES]), named).encode() if named else b""
            if value and value != published:
                answer = await records.publish(self._key, value, ttl=RECORD_LIFE_SECONDS)
                self._note_notices(answer.records)
            elif value != published:  # all evidence was let go
                await records.withdraw(self._key)
            published = value
            # The inquiries bound how many run at once, and what one accuser may cost.
            while (fetch := self._inquiries.next(self._context.wall_clock())) is not None:
                nursery.start_soon(self._fetch, fetch, records)
            # Without this pause, an accuser that changes its record all the time would keep this loop busy.
            await trio.sleep(LOOK_SECONDS)
            with trio.move_on_at(look_at):
                await self._woken.wait()

    def _note_notices(self, records: Iterable[Record]) -> None:
        now = self._context.wall_clock()
        for record in records:
            if record.withdrawn or self._inquiries.is_heard(record.publisher, record.sequence):
                continue
            try:
                notice = read_notice(record.value)
            except RemoteProtocolError as error:
                logger.debug("%s published an invalid notice of evidence: %s", record.publisher, error)
                # An empty notice is noted for this sequence, so the same record is not read again in each look.
                notice = Notice((), ())
            self._inquiries.heard(record.publisher, notice, record.sequence, record.expiration_time, now)

    # ------------------------------------------------------------------ evidence of others

    async def _fetch(self, fetch: EvidenceFetch, records: RunRecords) -> None:
        request = EvidenceRequest(records.stored_key(self._key), fetch.named.digest, records.certificate)
        data = None
        try:
            # The time follows from the size that the accuser has named: one that sends a byte now
            # and then must not hold one of the few places.
            with trio.move_on_after(transfer_seconds(fetch.named.size)):
                data = await self._receive(fetch, request)
            if data is None:
                self._inquiries.failed(fetch, self._context.wall_clock())
            else:
                await self._judge(fetch, data)
        finally:
            self._inquiries.ended(fetch)
            self._woken.set()

    async def _receive(self, fetch: EvidenceFetch, request: EvidenceRequest) -> bytes | None:
        """Return the evidence, which may be anything of its size; ``None`` if the accuser gives none."""
        stream: Stream | None = None
        try:
            stream = await self._context.transport.open_stream(
                fetch.accuser, PROTOCOL, addresses=fetch.addresses, timeout=REPLY_SECONDS
            )
            await send_message(stream, request.encode())
            answer = await receive_message(stream, max_bytes=MAX_ANSWER_BYTES)
            refusal = "it closed the stream" if answer is None else EvidenceAnswer.decode(answer).refusal
            if refusal:
                logger.info(
                    "%s accuses %s and sends no evidence: %s", fetch.accuser, fetch.named.peer_id, refusal
                )
                return None
            return await _receive_all(stream, fetch.named.size)
        except (UnreachableError, StreamBrokenError, ClosedError, RemoteProtocolError) as error:
            logger.info("%s accuses %s and sends no evidence: %s", fetch.accuser, fetch.named.peer_id, error)
            return None
        finally:
            if stream is not None:
                await stream.reset()

    async def _judge(self, fetch: EvidenceFetch, data: bytes) -> None:
        """Believe the evidence, or ignore its accuser from now on."""
        with guarded(fetch.accuser, self._fault, what="evidence"):
            # In a thread that no round waits for: evidence may be true and yet be made to take long.
            found, seconds = await self._context.run_aside(_timed, data, fetch.named)
            self._inquiries.verified(fetch, seconds, self._context.wall_clock())
            # Naming evidence costs an accuser nothing. So a false name costs it all further fetches.
            if isinstance(found, RemoteProtocolError):
                self._inquiries.ignore(fetch.accuser)
                logger.warning(
                    "%s accused %s in run %r and sent %s: its accusations are ignored from now on",
                    fetch.accuser,
                    fetch.named.peer_id,
                    self._run_id,
                    found,
                )
                return
            self._inquiries.proved(fetch)
            self._learn(found)

    def _fault(self, peer_id: str, error: Exception) -> None:  # noqa: ARG002 - logged by the guard
        self._inquiries.ignore(peer_id)


def _timed(data: bytes, named: Named) -> tuple[Accusation | RemoteProtocolError, float]:
    """Return evidence of others that is verified, or what is wrong with it, and the processor seconds that took."""
    began = time.thread_time()
    try:
        found: Accusation | RemoteProtocolError = read_named(data, named)
    except RemoteProtocolError as error:
        found = error
    return found, time.thread_time() - began


async def _receive_all(stream: Stream, size: int) -> bytes:
    """Return exactly ``size`` bytes. The memory grows with what arrives, so that an announcement reserves none."""
    received = bytearray()
    while len(received) < size:
        chunk = bytearray(min(_CHUNK_BYTES, size - len(received)))
        await receive_exactly_into(stream, memoryview(chunk))
        received += chunk
    return bytes(received)
