"""Punches that two peers coordinate on a stream between them, for libp2p connections and for lanes.

What it guarantees:

* A punch ends with a connection whose handshakes are done at both ends, or with UnreachableError, within a bound.
* A peer that is asked sends packets only to endpoints that pass the dial gate, and no more tries than
  :mod:`p2pavg.net.nat.punch.meeting` allows.
* Every fresh port is closed at the end of its try.

What an attacker can do. A peer that asks for a punch, or answers one, names the endpoint to which this process
connects, which may belong to a third party. As with every address that a peer names:

* The dial gate refuses loopback, reserved networks, and private networks that this machine is not in. Ports below 1024
  are refused too, because no router gives them to a connection.
* A try that fails counts as a failed dial of that host. After 8 of them, one every 5 s is allowed, for all peers that
  ask together.
* A try sends at most MOST_CONNECTS packets to an endpoint that refuses, and three to one that is silent. If a server
  accepts the connection, it gets the first bytes of a handshake, which fails.
* An attacker that makes both ends of a punch wait gets nothing but its own tries.

* The verdict on a try that failed, and the refusal of an endpoint, are one fixed word. How long a try takes still tells
  an endpoint that refuses from a silent one.

So a few SYNs to a third party are left, as with any dial, and an attacker sends more packets to cause them.

A peer may lie about the time that it needs for an answer. That shifts the moments at which the two begin, by a second
at most, and costs that peer its punch.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import trio

from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.hosts import version_of
from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.net.limits.dial_gate import DialGate
from p2pavg.net.limits.dial_policy import NOT_REACHED
from p2pavg.net.limits.rate import Accounts, TokenBucket
from p2pavg.net.nat.punch import plan
from p2pavg.net.nat.punch.plan import (
    MAX_MESSAGE_BYTES,
    Endpoint,
    PunchAnswer,
    PunchProposal,
    PunchVerdict,
    Sync,
)
from p2pavg.net.nat.punch.sockets import FreshPort, punch
from p2pavg.net.nat.reach.watcher import ReachWatcher
from p2pavg.net.transport import PeerId, Stream, Transport, receive_message, send_message

# The limits of punches and dials that other peers ask for.

# The tries that one peer may ask for. A peer asks for one connection, and for a lane or two in each direction when a
# group begins. Each may take three tries, after which a peer waits for a minute before it searches for a lane again.
PEER_TRIES = 16
PEER_TRIES_PER_SECOND = 0.25

# The tries that all peers together may ask for. p2pavg.net.limits.dial_policy bounds those that fail at one host.
ALL_TRIES = 128
ALL_TRIES_PER_SECOND = 8.0

# Tries that are under way. Each one occupies up to four sockets for a few seconds.
PEER_AT_ONCE = 4
ALL_AT_ONCE = 32

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """A connection that its owner closes."""

    def close(self) -> None:
        """End it."""


T = TypeVar("T", bound=Closable | None)

Use = Callable[[socket.socket], Awaitable[T]]
"""Does the handshakes on a punched connection. It takes over the socket, and closes it if it fails or is cancelled.

Raises OSError or UnreachableError.
"""


class RefusedPunchError(UnreachableError):
    """One of the two peers does not take part in a punch, so that another try would be futile."""


@dataclass(frozen=True, slots=True)
class _Half:
    """One peer's half of a try: the port, the endpoint at which its router shows the port, and the other's endpoint."""

    port: FreshPort
    own: Endpoint
    other: Endpoint


class Puncher:
    """Makes connections with other peers by punches.

    Args:
        gate: the gate of all dials of this transport.
        transport: tells how others reach this peer, as far as it is known now.
        watcher: finds the outer port of a fresh port.
    """

    def __init__(self, gate: DialGate, transport: Transport, watcher: ReachWatcher) -> None:
        self.gate = gate
        """The gate of all dials of this transport."""
        self._transport = transport
        self._watcher = watcher
        self._all_tries = TokenBucket(ALL_TRIES_PER_SECOND, ALL_TRIES)
        self._tries = Accounts(PEER_TRIES_PER_SECOND, PEER_TRIES)
        self._under_way: Counter[PeerId] = Counter()

    @property
    def refusal(self) -> str:
        """The reason for which this peer takes part in no punch; empty if it does."""
        return plan.refusal(self._transport.reachability)

    # -- the peer that asks

    async def ask(self, stream: Stream, use: Use[T]) -> T:
        """Punch, in several tries if necessary, and return the result of ``use``.

        Args:
            stream: a stream to the other peer, which serves it with :meth:`take_part`.
            use: its result is closed if the other peer reports a failure. A connection of libp2p is none: it ends by
                itself, as the other end is closed.

        Raises:
            RefusedPunchError: this peer or the other one takes part in no punch.
            UnreachableError: every try has failed; the message has the reason of each.
            StreamBrokenError, RemoteProtocolError: the other peer has left, or broke the protocol.
        """
        if refusal := self.refusal:
            raise RefusedPunchError(f"this peer takes part in no punch: {refusal}")
        reasons = []
        for attempt in range(1, plan.TRIES + 1):
            try:
                return await self._ask_once(stream, attempt, use)
            # It would be refused again. All other failures may be bad luck with the ports or the moment.
            except RefusedPunchError:
                raise
            except UnreachableError as error:
                reasons.append(f"try {attempt}: {error}")
        raise UnreachableError("; ".join(reasons))

    async def _ask_once(self, stream: Stream, attempt: int, use: Use[T]) -> T:
        with ExitStack() as owned:
            ports = await self._open_ports(
                owned, plan.hosts_to_propose(self._transport.reachability).values()
            )
            sent = trio.current_time()
            await send_message(stream, PunchProposal(attempt, tuple(ports)).encode())
            answer = PunchAnswer.decode(await _next(stream))
            if answer.refusal or answer.endpoint is None:
                raise RefusedPunchError(f"the peer takes part in no punch: {answer.refusal}")
            trip = plan.round_trip(sent=sent, answered=trio.current_time(), busy=answer.busy)
            half = _half(ports, answer.endpoint)
            # Before Sync: the other peer begins to connect when it reads it, and would do so for nothing.
            await self._check_may_dial(stream.remote, half.other)
            await send_message(stream, Sync().encode())
            begin = plan.begin_of_asker(trio.current_time(), trip)
            return await self._meet_and_compare(stream, half, begin, use)

    async def _meet_and_compare(self, stream: Stream, half: _Half, begin: float, use: Use[T]) -> T:
        """Carry out a try, and read the verdict in any case, so that the next try finds the stream in order.

        From Sync to the verdict, a peer needs a round trip, PUNCH_SECONDS and UPGRADE_SECONDS: less than REPLY_SECONDS.
        """
        try:
            made = await self._meet(stream.remote, half, begin, use)
        except UnreachableError as error:
            verdict = PunchVerdict.decode(await _next(stream))
            theirs = f"; the peer reported: {verdict.reason}" if verdict.reason else ""
            raise UnreachableError(f"{error}{theirs}") from None
        try:
            verdict = PunchVerdict.decode(await _next(stream))
            if verdict.reason:
                raise UnreachableError(f"the peer reported: {verdict.reason}")  # noqa: TRY301 - as any other reason
        except BaseException:
            # Without the other peer's success there is half a connection, which would only time out later.
            if made is not None:
                made.close()
            raise
        return made

    # -- the peer that is asked

    async def take_part(self, stream: Stream, first: PunchProposal, use: Use[None]) -> bool:
        """Take part in a punch that the other peer has proposed. Return true after a success.

        Args:
            first: the first message of the other peer, which has been read.

        Raises:
            StreamBrokenError, RemoteProtocolError: the other peer has left, or broke the protocol.
        """
        attempt, message = 0, first
        while True:
            plan.check_attempt(message.attempt, after=attempt)
            attempt = message.attempt
            if await self._answer_once(stream, message, use):
                return True
            following = await receive_bounded(stream)
            if following is None:
                return False
            message = PunchProposal.decode(following)

    async def _answer_once(self, stream: Stream, propose: PunchProposal, use: Use[None]) -> bool:
        began = trio.current_time()
        try:
            async with self._half_of(stream.remote, propose) as half:
                # The asker subtracts this from the round trip, from which it computes when the two begin.
                busy = trio.current_time() - began
                await send_message(stream, PunchAnswer("", half.own, min(busy, REPLY_SECONDS)).encode())
                Sync.decode(await _next(stream))
                reason = ""
                try:
                    await self._meet(stream.remote, half, trio.current_time(), use)
                except UnreachableError as error:
                    logger.debug("a punch for %s failed: %s", stream.remote, error)
                    reason = (
                        NOT_REACHED  # the endpoint was the other peer's choice: see "What an attacker can do"
                    )
                await send_message(stream, PunchVerdict(reason).encode())
                return not reason
        except RefusedPunchError as error:
            await send_message(stream, PunchAnswer(str(error)).encode())
            return False

    @asynccontextmanager
    async def _half_of(self, peer_id: PeerId, propose: PunchProposal) -> AsyncIterator[_Half]:
        """Hold this peer's half of a try, as the peer that is asked.

        Raises:
            RefusedPunchError: this peer does not take part; the message is the reason.
        """
        if refusal := self.refusal:
            raise RefusedPunchError(refusal)
        chosen = plan.choose(propose.attempt, self._transport.reachability, propose.endpoints)
        if isinstance(chosen, str):
            raise RefusedPunchError(chosen)
        own_host, other = chosen
        # Counted before any work: ports and probes cost this peer more than a proposal costs its sender.
        with ExitStack() as owned, self.counted(peer_id):
            try:
                await self._check_may_dial(peer_id, other)
                half = _half(await self._open_ports(owned, [own_host]), other)
            except RefusedPunchError as error:  # it tells of this machine's networks, and of its router
                logger.debug("no punch for %s: %s", peer_id, error)
                raise RefusedPunchError(NOT_REACHED) from None
            yield half

    @contextmanager
    def counted(self, peer_id: PeerId) -> Iterator[None]:
        """Count a try, or another dial, for which a peer has asked.

        Raises:
            RefusedPunchError: this peer, or all peers together, have asked for too many.
        """
        now = trio.current_time()
        if self._under_way[peer_id] >= PEER_AT_ONCE or self._under_way.total() >= ALL_AT_ONCE:
            raise RefusedPunchError("too many tries are under way")
        if self._tries.level(now, peer_id) < 1.0:
            raise RefusedPunchError("the peer has asked for too many tries")
        if self._all_tries.level(now) < 1.0:
            raise RefusedPunchError("other peers have asked for too many tries")
        self._tries.of(peer_id).take(now, 1.0)
        self._all_tries.take(now, 1.0)
        self._under_way[peer_id] += 1
        try:
            yield
        finally:
            self._under_way[peer_id] -= 1
            self._under_way += Counter()  # drops the peers without a try

    # -- both

    async def _open_ports(self, owned: ExitStack, hosts: Iterable[str]) -> dict[Endpoint, FreshPort]:
        """Open a fresh port for each outer host, and find the endpoints at which the router will show them."""
        found: dict[Endpoint, FreshPort] = {}
        reasons = []
        for host in hosts:
            try:
                port = owned.enter_context(FreshPort(version_of(host)))
                found[Endpoint(host, await self._watcher.outer_port(port.version, port.port))] = port
            except (OSError, ValueError, UnreachableError) as error:
                reasons.append(f"{host}: {error}")
        if not found:
            raise RefusedPunchError(f"no outer port is known: {'; '.join(reasons)}")
        return found

    async def _check_may_dial(self, peer_id: PeerId, endpoint: Endpoint) -> None:
        """Raise RefusedPunchError if the dial gate refuses an endpoint that the peer named."""
        try:
            await self.gate.candidates(peer_id, endpoint.address_of(peer_id))
        except UnreachableError as error:
            raise RefusedPunchError(str(error)) from None

    async def _meet(self, peer_id: PeerId, half: _Half, begin: float, use: Use[T]) -> T:
        """Connect and do the handshakes. Raises UnreachableError."""
        text = half.other.address_of(peer_id)
        # Asked again, since other tries may have used up the limits of the host meanwhile.
        (address,) = await self.gate.candidates(peer_id, text)
        async with self.gate.dialling(peer_id, text, address):
            # From here on the socket belongs to `use`, which closes it also when the time below is over.
            plain = await punch(half.port, half.other, begin)
            with trio.move_on_after(plan.UPGRADE_SECONDS):
                try:
                    return await use(plain)
                except OSError as error:
                    raise UnreachableError(
                        f"the punch succeeded, and the handshake failed: {error}"
                    ) from None
            raise UnreachableError(
                f"the punch succeeded, and the handshake took longer than {plan.UPGRADE_SECONDS:.0f} s"
            )


def _half(ports: dict[Endpoint, FreshPort], other: Endpoint) -> _Half:
    for own, port in ports.items():
        if own.version == other.version:
            return _Half(port, own, other)
    raise RemoteProtocolError(f"the answer has an endpoint of IPv{other.version}, which was not proposed")


async def receive_bounded(stream: Stream, seconds: float = REPLY_SECONDS) -> bytes | None:
    """Return the next message; ``None`` if the other peer has closed its half.

    Raises:
        StreamBrokenError: the stream broke, or no message came in time.
        RemoteProtocolError: the message is too long, or was not complete in time.
    """
    with trio.move_on_after(seconds):
        return await receive_message(stream, max_bytes=MAX_MESSAGE_BYTES)
    raise StreamBrokenError(f"{stream.remote} sent no message about a punch within {seconds:.0f} s")


async def _next(stream: Stream) -> bytes:
    message = await receive_bounded(stream)
    if message is None:
        raise StreamBrokenError(f"{stream.remote} closed the stream in the middle of a punch")
    return message
