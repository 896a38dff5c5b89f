"""Being a relay: reservations of peers behind routers, and circuits to them.

Theory of operation
===================

A circuit joins a stream of the peer that asks and a stream to the peer that is asked for. Over it, the two make an
ordinary connection of libp2p, so the relay sees only what Noise has encrypted, and a relay that changes a byte ends the
connection. It cannot pretend to be either of them.

What it guarantees:

* A relay connects to peers with a reservation only, over the connection that they have opened to it. So no stranger can
  make a relay dial a third party.
* What the relay gives is bounded by :class:`~p2pavg.net.nat.relay.limits.RelayLimits`: for each peer, each address and
  in all. All circuits together stay below one rate, of which each sending address gets an equal part: of the circuits
  in which it sends, one has its turn at a time.
* A circuit holds at most one piece of PIECE_BYTES in each direction here, besides the windows of its two streams,
  which are 256 KiB each and do not grow. All circuits together hold what the transport holds for strangers at most.

What can happen, and the answer:

* **One end reads nothing.** The transport gives up a stream that takes no data for 30 s. The connections to the relay
  go on, because the end at fault may be the other one.
* **One end closes.** The other end gets what was sent before, as over TCP.
* **A peer has changed its network.** Its old connection may look alive for a while. Its new reservation replaces the
  old one, whose connection is dropped, since circuits would be opened over it.
* **A circuit is asked for over a circuit.** It is refused: chains of relays would multiply traffic.
"""

from __future__ import annotations

import logging
import weakref

import trio

from p2pavg.base.errors import ClosedError, RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import QUICK_REPLY_SECONDS
from p2pavg.base.threads.waits import bare_exceptions
from p2pavg.net.addresses import CircuitAddress, direct
from p2pavg.net.limits.rate import TokenBucket
from p2pavg.net.nat.relay.limits import Circuit, RelayBudget, RelayLimits
from p2pavg.net.nat.relay.messages import (
    CIRCUIT_PROTOCOL,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Connect,
    Connected,
    Incoming,
    RelayMessage,
    RelayPing,
    RelayRefusal,
    Reserve,
    Reserved,
    decode,
)
from p2pavg.net.transport import PeerId, Stream, Transport, receive_message, send_message

logger = logging.getLogger(__name__)

RELAY_PING_SECONDS = 10.0
"""Home routers forget an idle connection after some minutes; and a peer behind one shall notice a dead relay soon."""
MAX_PINGS = 8  # at once, since answers cost time; two in RELAY_PING_SECONDS after that
PIECE_BYTES = 16 * 1024


class RelayService:
    """The relay that a peer is for others that cannot be dialled.

    Args:
        transport: tells whether this peer can be dialled itself.
        limits: ``None`` relays for no peer.
    """

    def __init__(self, transport: Transport, limits: RelayLimits | None) -> None:
        self._transport = transport
        self._relays = limits is not None
        self.budget = RelayBudget(limits or RelayLimits())
        """The reservations and circuits of this relay at the moment."""
        self._holders: dict[PeerId, trio.CancelScope] = {}
        self._open: dict[Circuit, trio.CancelScope] = {}
        self._turns: weakref.WeakValueDictionary[str, trio.Lock] = weakref.WeakValueDictionary()
        transport.serve(PROTOCOL, self.serve)

    async def serve(self, stream: Stream) -> None:
        """Answer a request for a reservation or a circuit."""
        with trio.move_on_after(QUICK_REPLY_SECONDS) as scope:
            message = await receive(stream)
        if scope.cancelled_caught:
            return
        # Chains of relays would multiply traffic.
        reason = "a relay is not asked through a relay" if stream.relayed else self._refusal()
        if reason:
            await _refuse(stream, reason)
        elif isinstance(message, Reserve):
            await self._reserve(stream)
        elif isinstance(message, Connect):
            await self._connect(stream, message.target)
        else:
            raise RemoteProtocolError(f"a stream to a relay began with {type(message).__name__}")

    def _refusal(self) -> str:
        """Return the reason for which this peer is no relay now; empty if it is one."""
        if not self._relays:
            return "this peer relays for no one, as its user wants it"
        if not self._transport.reachability.dialable or not direct(self._transport.addresses):
            return "this peer cannot be dialled itself"
        return ""

    # -- reservations

    async def _reserve(self, stream: Stream) -> None:
        found = self.budget.reserve(stream.remote, stream.remote_host)
        if isinstance(found, str):
            await _refuse(stream, found)
            return
        taken, ended = found
        # The older reservation of the same peer goes as well: its connection may be dead without a sign of it.
        for peer_id in (stream.remote, *(each.peer_id for each in ended)):
            if (older := self._holders.pop(peer_id, None)) is not None:
                older.cancel()
        self._holders[stream.remote] = holding = trio.CancelScope()
        # The connection must not give way to strangers' ones: circuits to the peer go over it.
        self._transport.remember_peer(stream.remote)
        logger.info("%s at %s is reachable through this peer", stream.remote, stream.remote_host)
        try:
            with holding:
                await send_message(stream, Reserved(direct(self._transport.addresses)).encode())
                await self._answer_pings(stream)
            if holding.cancelled_caught and stream.remote in self.budget.reserved:  # by a newer reservation
                await stream.reset_connection()
        except (StreamBrokenError, ClosedError) as error:
            logger.debug("a reservation ends: %s", error)
        finally:
            # Nothing happens here if a newer reservation of the peer has its place by now.
            self.budget.give_up(taken)
            if self._holders.get(stream.remote) is holding:
                del self._holders[stream.remote]

    async def _answer_pings(self, stream: Stream) -> None:
        pings = TokenBucket(2.0 / RELAY_PING_SECONDS, MAX_PINGS)
        while True:
            # One ping may be missing, and the next one late.
            with trio.move_on_after(2.5 * RELAY_PING_SECONDS) as silence:
                data = await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)
                if data is None:
                    return
                if not isinstance(decode(data), RelayPing):
                    raise RemoteProtocolError("a peer with a reservation sent something else than a ping")
                # Each ping costs an answer, so a peer that sends them without end would use up the relay's time.
                if pings.take(trio.current_time(), 1.0) > 0.0:
                    raise RemoteProtocolError(f"a peer sent more than {MAX_PINGS} pings at once")
                await send_message(stream, RelayPing().encode())
            if silence.cancelled_caught:
                logger.info("%s sent no ping any more: its reservation ends", stream.remote)
                # The connection is dead. Circuits over it would only wait.
                await stream.reset_connection()
                return

    # -- circuits

    async def _connect(self, stream: Stream, target: PeerId) -> None:
        found = self.budget.connect(stream.remote, stream.remote_host, target, trio.current_time())
        if isinstance(found, str):
            await _refuse(stream, found)
            return
        circuit, ended = found
        # The budget has counted these as closed. Their tasks end here.
        for each in ended:
            self._open.pop(each).cancel()
        self._open[circuit] = scope = trio.CancelScope()
        try:
            with scope:
                await self._reach_and_join(circuit, stream)
        finally:
            self._open.pop(circuit, None)
            self.budget.close(circuit)

    async def _reach_and_join(self, circuit: Circuit, stream: Stream) -> None:
        try:
            other = await self._reach(circuit.target, circuit.source)
        except (UnreachableError, StreamBrokenError, RemoteProtocolError, ClosedError) as error:
            await _refuse(stream, f"the peer was not reached: {error}")
            return
        # From here on, an end that reads nothing costs its stream and no connection: the other end may be at fault.
        for each in (stream, other):
            each.carry_circuit()
        try:
            await send_message(stream, Connected().encode())
            # Closed and not reset: what was sent before the end has to arrive.
            for ended in await self._join(circuit, stream, other):
                await ended.aclose()
        finally:
            await other.reset()

    async def _reach(self, target: PeerId, source: PeerId) -> Stream:
        with trio.move_on_after(QUICK_REPLY_SECONDS):
            stream = await self._transport.open_stream(target, CIRCUIT_PROTOCOL, timeout=QUICK_REPLY_SECONDS)
            # The target has a reservation, and so a connection of its own. If that has just ended, another relay is no
            # way to it.
            await _ask_for_circuit(stream, Incoming(source))
            return stream
        raise UnreachableError(f"no answer within {QUICK_REPLY_SECONDS:.0f} s")

    async def _join(self, circuit: Circuit, one: Stream, other: Stream) -> list[Stream]:
        """Carry bytes both ways until one end closes, breaks, is idle for too long, or has used up its bytes.

        Return the streams that have got everything that was sent to them: those of which the other end has closed.
        """
        complete: list[Stream] = []
        with bare_exceptions():
            async with trio.open_nursery() as nursery:
                nursery.cancel_scope.deadline = trio.current_time() + self.budget.limits.seconds
                nursery.start_soon(self._end_if_idle, circuit, nursery.cancel_scope)
                for back, pair in ((False, (one, other)), (True, (other, one))):
                    nursery.start_soon(self._carry, circuit, *pair, back, complete, nursery.cancel_scope)
        logger.debug(
            "a circuit from %s to %s ends after %d bytes", circuit.source, circuit.target, circuit.carried
        )
        return complete

    async def _carry(
        self,
        circuit: Circuit,
        one: Stream,
        other: Stream,
        back: bool,
        complete: list[Stream],
        both: trio.CancelScope,
    ) -> None:
        """Carry the bytes of one direction, and end both directions with it."""
        # One turn for each sending address, whatever its number of circuits. So an
        # address with many gets no larger part of the rate.
        turn = self._turns.setdefault(circuit.target_host if back else circuit.host, trio.Lock())
        try:
            while piece := await one.receive_some(PIECE_BYTES):
                async with turn:
                    wait = self.budget.carry(circuit, len(piece), trio.current_time(), back=back)
                    if wait is None:
                        logger.info(
                            "a circuit ends: %s, or its address, has used up its bytes for now", one.remote
                        )
                        both.cancel()
                        return
                    await trio.sleep(wait)
                # Outside of the turn: an end that reads slowly holds up no other circuit of the same address.
                await other.send_all(piece)
            complete.append(other)
        except (StreamBrokenError, ClosedError) as error:
            logger.debug("a circuit of %s broke: %s", circuit.source, error)
        both.cancel()

    async def _end_if_idle(self, circuit: Circuit, both: trio.CancelScope) -> None:
        before = -1
        while circuit.carried != before:
            before = circuit.carried
            await trio.sleep(self.budget.limits.idle_seconds)
        both.cancel()


async def _refuse(stream: Stream, reason: str) -> None:
    await send_message(stream, RelayRefusal(reason).encode())
    await stream.aclose()


async def _ask_for_circuit(stream: Stream, request: Connect | Incoming) -> None:
    """Ask the other end of a new stream to carry a circuit on it. Without its consent, reset the stream.

    Raises:
        UnreachableError: it refused, or is itself only reached through a relay.
        StreamBrokenError, RemoteProtocolError: it has left, or broke the protocol.
    """
    try:
        if stream.relayed:
            raise UnreachableError("it is itself only reached through a relay")  # noqa: TRY301 - as any other reason
        await send_message(stream, request.encode())
        answer = await receive(stream)
        if isinstance(answer, RelayRefusal):
            raise UnreachableError(answer.reason)  # noqa: TRY301
        if not isinstance(answer, Connected):
            raise RemoteProtocolError(f"it answered with {type(answer).__name__}")  # noqa: TRY301
    except BaseException:
        await stream.reset()
        raise


# Receive the messages of the relay protocols.


async def receive(stream: Stream) -> RelayMessage:
    """Return the next message of a stream.

    Raises:
        RemoteProtocolError: it is malformed or too long.
        StreamBrokenError: the stream broke, or was closed without a message.
    """
    data = await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)
    if data is None:
        raise StreamBrokenError(f"{stream.remote} closed the stream without an answer")
    return decode(data)


# Using a relay: circuits to peers behind it.

# Four round trips of at most a second each, twice: asking the relay, which asks the peer; or handshakes over a circuit.
CIRCUIT_SECONDS = 8.0


async def open_circuit(transport: Transport, address: CircuitAddress) -> Stream:
    """Ask a relay for a circuit. Return the stream that carries its bytes.

    Raises:
        UnreachableError: the relay was not reached, or gives no circuit; the message says why.
    """
    with trio.move_on_after(CIRCUIT_SECONDS):
        stream = await transport.open_stream(
            address.relay, PROTOCOL, addresses=[address.relay_address], timeout=CIRCUIT_SECONDS
        )
        try:
            await _ask_for_circuit(stream, Connect(address.target))
        except (UnreachableError, StreamBrokenError, RemoteProtocolError, ClosedError) as error:
            raise UnreachableError(f"the relay {address.relay} gives no circuit: {error}") from None
        return stream
    raise UnreachableError(f"the relay {address.relay} gave no circuit within {CIRCUIT_SECONDS:.0f} s")
