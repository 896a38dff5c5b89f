"""Direct lanes: how they are made, served and kept.

Theory of operation
===================

A lane is a TLS connection that carries tensors from one peer, the sender, to another, the receiver. libp2p's Noise and
yamux, in Python, take seven times the processor time of TLS, whose bytes OpenSSL moves in a worker thread. So tensors
travel over lanes where a lane can be made, and over libp2p streams otherwise.

What it guarantees:

* The other end of a lane is the peer whose identity a libp2p stream has proved. The two peers exchange certificates on
  that stream, and each trusts exactly the one certificate that the other has named.
* :meth:`LaneKeeper.open` returns a lane or raises UnreachableError within its timeout.
* An inbound TLS connection without a valid ticket gets no further than its first message.
* The lanes of one process are bounded, for each peer and in all. Members of a group get a place before other peers.

How a lane is made (the messages are in ``messages``):

1. The sender opens a libp2p stream and sends its certificate. The receiver refuses, or offers a certificate, a ticket
   and its addresses.
2. The sender dials those addresses and shows the ticket as the TLS server name. The receiver sends a verdict.
3. If that fails, the sender sends a ticket and addresses of its own, and the receiver dials back. So one of the two
   peers may be behind a home router. Data flows from the sender to the receiver in either case.
4. If that fails too, both connect at once, see ``halfway``. So both may be behind home routers that keep ports.

A way that makes no sense is skipped at once: a dial without a direct address, or a punch through a router that allows
none. An address through a relay is never dialled for a lane.

What can happen, and the answer:

* **No way works.** The peer is not tried again for a minute, because the search would take time in every round. If all
  ways were skipped, it is tried again after 5 s: the two peers may know more about their routers by then.
* **The caller is cancelled or times out.** The libp2p stream is reset. The receiver sees its end, and frees the place
  that it held for the lane.
* **A kept lane is not acknowledged yet.** It stays with the idle lanes, but only an acknowledged lane is given out.
* **A lane ends while it is idle.** A task watches each outbound lane and removes it when it ends. A receiver
  may end an idle lane of a peer outside its groups to make room for a member.
* **Both ends consider an idle lane too old.** The sender closes first. If the receiver did, it might close while the
  next message is on its way.
* **A lane has carried 128 GiB.** It is not kept: AES-GCM is safe up to about 380 GiB under one key, and Python cannot
  renew the key.

Why this way: OpenSSL checks the certificates, so there is no cryptography of our own. The ticket tells the receiver
which peer connects before it must decide which certificate to trust.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import trio

from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import CALM_LOOK_SECONDS, GLANCE_SECONDS, REPLY_SECONDS, RETRY_SECONDS
from p2pavg.base.threads.processor import ProcessorWait, ThreadWaits, never_waits
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.net.addresses import direct
from p2pavg.net.lanes.acceptor import TlsAcceptor, Visitor
from p2pavg.net.lanes.halfway import (
    MAX_ADDRESSES,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Back,
    Halfway,
    LaneOffer,
    LaneRequest,
    LaneSearch,
    LaneVerdict,
    Meet,
    SkippedWayError,
    decode_next_way,
    expect_verdict,
    next_message,
)
from p2pavg.net.lanes.inbound import InboundLanes, Slot
from p2pavg.net.lanes.limits import IDLE_LANE_SECONDS, IdleLanes, Nowhere
from p2pavg.net.lanes.tls_connection import TlsConnection
from p2pavg.net.lanes.tls_lane import TlsLane
from p2pavg.net.limits.dial_policy import NOT_REACHED
from p2pavg.net.limits.first_messages import FirstMessages
from p2pavg.net.nat.punch.meeting import Puncher
from p2pavg.net.transport import (
    DirectLane,
    LaneHost,
    PeerId,
    Stream,
    Transport,
    receive_message,
    send_message,
)

logger = logging.getLogger(__name__)

LANE_DIAL_SECONDS = 2.0  # for each of the two dials, which are tried one after the other

# AES-GCM stays safe for 2^24.5 records of 16 KiB under one key (RFC 8446, section 5.5), and Python cannot renew it.
_MAX_LANE_BYTES = 1 << 37

DialledAddresses = Callable[[PeerId], Sequence[str]]
"""Returns the remote addresses of the open connections to a peer that this process has dialled."""


class LaneKeeper:
    """The lanes of one transport.

    Args:
        dialled_addresses: finds the addresses at which the peer was dialled successfully.
        share: the share of the usual number of inbound lanes, where this process may open few files.
        puncher: makes connections where neither peer can dial the other; ``None`` makes none.
        processor_wait: of the event loop's thread.
    """

    def __init__(
        self,
        transport: Transport,
        nursery: trio.Nursery,
        doorway: TlsAcceptor,
        dialled_addresses: DialledAddresses,
        share: float = 1.0,
        puncher: Puncher | None = None,
        processor_wait: ProcessorWait = never_waits,
    ) -> None:
        self._transport = transport
        self._processor_wait = processor_wait
        self._nursery = nursery
        self._doorway = doorway
        self._dialled_addresses = dialled_addresses
        self._closed = False
        self._outbound: dict[TlsLane, trio.CancelScope] = {}
        self._inbound = InboundLanes(nursery, share)
        self._halfway = Halfway(doorway, puncher, self._inbound)
        self._searches: dict[trio.CancelScope, LaneSearch] = {}
        self._excusing = False
        self._idle = IdleLanes()
        self._nowhere = Nowhere()
        self._messages = FirstMessages()
        transport.serve(PROTOCOL, self._answer)

    @property
    def lanes(self) -> list[TlsLane]:
        """The outbound and inbound lanes that have not ended."""
        return [*self._outbound, *self._inbound.lanes]

    def close(self) -> None:
        """Abort every lane and every search, and make no more lanes."""
        self._closed = True
        for scope in self._searches:
            scope.cancel()
        self._inbound.close()
        for lane in self._outbound:
            lane.abort()

    # -- the sender's side

    async def open(self, peer_id: PeerId, addresses: Sequence[str], timeout: float) -> TlsLane:
        """Return a kept lane or make one, see :meth:`Transport.open_lane`."""
        if self._closed:
            raise ClosedError("the transport is closed")
        # A kept lane works even if a search for another one has failed a moment ago.
        if (kept := self._take(peer_id)) is not None:
            return kept
        self._nowhere.check(peer_id)
        search = LaneSearch(peer_id, addresses)
        with trio.move_on_after(timeout) as scope:
            self._searches[scope] = search
            # One task looks at the processor time for all searches.
            if not self._excusing:
                self._excusing = True
                self._nursery.start_soon(self._excuse)
            try:
                return await self._find(search)
            except UnreachableError as error:
                self._remember(search, str(error))
                raise
            finally:
                del self._searches[scope]
        # The scope was cancelled: by :meth:`close`, or because the time is over.
        if self._closed:
            raise ClosedError("the transport is closed")
        reason = "; ".join([*search.reasons, f"no direct lane within {timeout:.1f} s"])
        self._remember(search, reason)
        raise UnreachableError(f"no direct lane to {peer_id}: {reason}")

    async def _excuse(self) -> None:
        """Give searches the time in which this process had no processor, until none is left.

        Once the other peer has answered, a search gets no more: it may wait for an address that never answers, and the
        peer waits for parts.
        """
        waits = ThreadWaits(self._processor_wait, trio.current_time())
        while self._searches:
            await trio.sleep(GLANCE_SECONDS)
            waited = waits.since_last_look(trio.current_time())
            for scope, search in self._searches.items():
                if not search.answered:
                    scope.deadline += waited
        # No other task runs since the last look at the searches, so the next search begins a new task.
        self._excusing = False

    def _take(self, peer_id: PeerId) -> TlsLane | None:
        while (lane := self._idle.take(peer_id)) is not None:
            scope = self._outbound[lane]
            # The lane may have been idle for too long just now: then its watcher is about to drop it.
            if not scope.cancel_called:
                scope.deadline = math.inf
                return lane
        return None

    def keep(self, lane: DirectLane) -> None:
        """Keep a lane for its next use, see :meth:`Transport.keep_lane`."""
        # A lane that has ended is outbound no longer. It must not be given out again.
        if (
            not isinstance(lane, TlsLane)
            or lane not in self._outbound
            or lane.aborted
            or lane.bytes_sent > _MAX_LANE_BYTES
        ):
            lane.abort()
            return
        if lane.owed:  # its user did not wait for the acknowledgement
            lane.finish()
        self._outbound[lane].deadline = trio.current_time() + IDLE_LANE_SECONDS
        self._idle.put(lane)

    def _remember(self, search: LaneSearch, reason: str) -> None:
        if search.futile:
            # A search that skips every way takes one round trip, and a look at the routers may show one.
            seconds = RETRY_SECONDS if search.costly else CALM_LOOK_SECONDS
            self._nowhere.add(search.peer_id, reason, seconds)

    async def _find(self, search: LaneSearch) -> TlsLane:
        try:
            # The time is bounded by the scope in `open`. A peer behind a router may be about to connect to this one.
            stream = await self._transport.open_stream(
                search.peer_id, PROTOCOL, addresses=search.addresses, timeout=math.inf, wait_inbound=True
            )
        except UnreachableError:
            search.futile = self._transport.is_connected(search.peer_id)  # then the peer serves no lanes
            raise
        try:
            # The lane has an owner before the next wait, so a cancelled caller leaves no open connection behind.
            lane = self._adopt_outbound(await self._ask(stream, search), search.peer_id)
            await stream.aclose()  # aclose() cannot be cancelled
        except (StreamBrokenError, RemoteProtocolError) as error:
            # A stream that breaks says nothing about the ways between the two peers, so the next round may try again.
            search.futile = isinstance(error, RemoteProtocolError)
            raise UnreachableError(f"{search.peer_id} gave no direct lane: {error}") from None
        finally:
            await stream.reset()
        return lane

    async def _ask(self, stream: Stream, search: LaneSearch) -> TlsConnection:
        await send_message(stream, LaneRequest(self._doorway.own.der).encode())
        offer = LaneOffer.decode(await next_message(stream))
        search.answered = True
        # This is not remembered as futile: there may be a free place in the next round.
        if offer.refusal:
            raise UnreachableError(f"{search.peer_id} gives no direct lane: {offer.refusal}")
        search.futile = True  # holds only if all ways fail
        for way in (self._go_there, self._let_come, self._meet):
            try:
                return await way(stream, search, offer)
            except UnreachableError as error:
                search.failed(error)
        raise UnreachableError(f"no direct lane to {search.peer_id}: {'; '.join(search.reasons)}")

    async def _go_there(self, stream: Stream, search: LaneSearch, offer: LaneOffer) -> TlsConnection:
        addresses = self._candidates(search.peer_id, search.addresses, offer.addresses)
        if not addresses:
            raise SkippedWayError("no address is known")
        connection = await self._dial(search.peer_id, offer.certificate, offer.ticket, addresses)
        try:
            # In TLS 1.3 the client is done before the server has checked its
            # certificate. Only the verdict says that the lane stands.
            await expect_verdict(stream, 1)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _let_come(self, stream: Stream, search: LaneSearch, offer: LaneOffer) -> TlsConnection:
        addresses = direct(self._transport.addresses)
        if not addresses:
            raise SkippedWayError("and this peer does not listen, so the other peer cannot dial back")
        # The visitor is expected before the receiver learns the ticket, since it dials at once.
        with self._doorway.expecting(self._doorway.visitor(search.peer_id, offer.certificate)) as visitor:
            await send_message(stream, Back(visitor.ticket, addresses).encode())
            await expect_verdict(stream, 2)
            # The verdict and the connection take different ways, so either may arrive first.
            await visitor.decided.wait()
            if (connection := visitor.take()) is None:
                raise UnreachableError(f"the peer dialled back, but {visitor.reason}")
            return connection

    async def _meet(self, stream: Stream, _: LaneSearch, offer: LaneOffer) -> TlsConnection:
        return await self._halfway.ask(stream, offer)

    def _adopt_outbound(self, connection: TlsConnection, peer_id: PeerId) -> TlsLane:
        lane = TlsLane(connection, peer_id)
        self._outbound[lane] = trio.CancelScope()
        self._nursery.start_soon(self._watch, lane)
        # The transport may have been closed while the lane was made. Its watcher ends at once then.
        if self._closed:
            lane.abort()
        return lane

    async def _watch(self, lane: TlsLane) -> None:
        """Attend to an outbound lane for as long as it lives."""
        try:
            with self._outbound[lane]:
                await lane.watch()
        except StreamBrokenError as error:
            logger.debug("a lane to %s ended: %s", lane.remote, error)
        finally:
            # First, so that the lane is not given out while it ends.
            self._idle.forget(lane)
            lane.abort()
            del self._outbound[lane]

    # -- both sides

    def _candidates(self, peer_id: PeerId, known: Sequence[str], named: Sequence[str]) -> list[str]:
        """Return the addresses to dial: those that have worked before, then those that the peer has named."""
        known = self._dialled_addresses(peer_id) or known
        return list(dict.fromkeys(direct([*known, *named])))[:MAX_ADDRESSES]

    async def _dial(
        self, peer_id: PeerId, certificate: bytes, ticket: bytes, addresses: Sequence[str]
    ) -> TlsConnection:
        with trio.move_on_after(LANE_DIAL_SECONDS):
            try:
                return await self._doorway.dial(peer_id, certificate, ticket, addresses)
            # An address that does not answer raises UnreachableError. What is left
            # is a certificate that OpenSSL refuses to load.
            except OSError as error:
                raise RemoteProtocolError(f"OpenSSL does not take the peer's certificate: {error}") from None
        raise UnreachableError(f"no answer within {LANE_DIAL_SECONDS:.0f} s at {', '.join(addresses)}")

    # -- the receiver's side

    def serve(self, host: LaneHost) -> None:
        """Serve inbound lanes, see :meth:`Transport.serve_lanes`."""
        self._inbound.serve(host)

    async def _answer(self, stream: Stream) -> None:
        with trio.move_on_after(REPLY_SECONDS), bare_exceptions():
            message = await next_message(stream)
            # Making a context for the sender's certificate takes processor time. A
            # sender that has used up its share waits here.
            await self._messages.admit(stream)
            refusal = self._inbound.refusal(stream.remote)
            if refusal:
                await send_message(stream, LaneOffer(refusal).encode())
                await stream.aclose()
                return
            with self._messages.charged(stream):
                ask = LaneRequest.decode(message)
                visitor = self._doorway.visitor(stream.remote, ask.certificate)
            # There is no wait between the refusal above and this line. Otherwise
            # two requests could take the same last place.
            slot = Slot(self._inbound.slots, stream.remote)
            try:
                await self._answer_with_offer(stream, ask, visitor, slot)
            finally:
                slot.release()

    async def _answer_with_offer(
        self, stream: Stream, ask: LaneRequest, expected: Visitor, slot: Slot
    ) -> None:
        """Offer a lane, and help the sender to make it, until the sender closes the stream."""
        with self._doorway.expecting(expected) as visitor:
            addresses, punchable = direct(self._transport.addresses), not self._halfway.refusal
            offer = LaneOffer("", self._doorway.own.der, visitor.ticket, addresses, punchable)
            await send_message(stream, offer.encode())
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._admit, stream, visitor, slot)
                wish = await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)
                # The sender closes the stream when it has its lane, or has given up. It wants no verdict any more.
                if wish is None:
                    nursery.cancel_scope.cancel()
                # _admit still sends its verdict. Cancelling it in the middle of the write would break the stream.
                visitor.stay_out("the sender tries another way")
        await self._try_other_ways(stream, ask, slot, wish)
        await stream.aclose()

    async def _try_other_ways(
        self, stream: Stream, ask: LaneRequest, slot: Slot, message: bytes | None
    ) -> None:
        """Dial back, or meet the sender half-way, as it wishes: each once, in this order."""
        back_is_over = False
        while message is not None:
            match decode_next_way(message):
                # Each way at most once, or a sender could have this process dial without end.
                case Back() as back if not back_is_over:
                    await self._dial_back(stream, ask, back, slot)
                    back_is_over = True
                case Meet():
                    await self._halfway.answer(stream, ask.certificate, slot)
                    return
                case _:
                    raise RemoteProtocolError("the sender wants to be dialled back once more")
            message = await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)

    async def _admit(self, stream: Stream, visitor: Visitor, slot: Slot) -> None:
        await visitor.decided.wait()
        if (connection := visitor.take()) is not None:
            # Adopted before the verdict is sent: the sender may use the lane as soon as it has read it.
            self._inbound.adopt(connection, slot)
        try:
            await send_message(stream, LaneVerdict(1, visitor.reason).encode())
        except StreamBrokenError as error:
            logger.debug("%s asked for a lane and then left: %s", stream.remote, error)

    async def _dial_back(self, stream: Stream, ask: LaneRequest, back: Back, slot: Slot) -> None:
        reason = ""
        try:
            # The sender may ask for another way although its first dial has come
            # through here. One request is worth one lane.
            if slot.used:
                raise UnreachableError("the first dial has succeeded")  # noqa: TRY301 - as any other reason
            # A peer that is relayed has no host here: it must not have this process dial into a private network.
            asker = "" if stream.relayed else stream.remote_host
            named = self._doorway.gate.askable(back.addresses, asker)
            addresses = self._candidates(stream.remote, (), named)
            connection = await self._dial(stream.remote, ask.certificate, back.ticket, addresses)
        except UnreachableError as error:
            logger.debug("a lane for %s: dialled back: %s", stream.remote, error)
            # One fixed text for all failures. The true reason would let the sender scan the network of this peer.
            reason = f"dialled back: {NOT_REACHED}"
        else:
            self._inbound.adopt(connection, slot)
        await send_message(stream, LaneVerdict(2, reason).encode())
