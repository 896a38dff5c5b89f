"""The interface of the network: streams and direct lanes to peers that are known by their id.

There are two implementations, :mod:`p2pavg.net.libp2p.transport` and :class:`p2pavg.testing.MemoryNetwork`. Both pass
:mod:`tests.transport_conformance`.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import trio

from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.net.nat.reach.reachability import NOT_ASKED, Reachability

Buffer = bytes | bytearray | memoryview

PeerId = str
"""Base58 text of a libp2p peer id, such as ``12D3KooW…``."""


class Stream(abc.ABC):
    """A bidirectional, ordered byte stream to one authenticated peer.

    One task may send while another receives. Two tasks must not send at once, nor receive at once. A cancelled call
    leaves its direction of the stream unusable, because a part of a message may be lost.
    """

    remote: PeerId
    """The authenticated id of the peer at the other end."""
    remote_host: str = ""
    """The IP address of the other end; that of the relay if :attr:`relayed`; empty if it is not known."""
    remote_port: int = 0
    """The port of the other end of the connection; 0 if it is not known."""
    relayed: bool = False
    """True if the bytes travel through a relay."""

    def hold(self, count: int) -> None:  # noqa: B027 - a network that counts no memory is complete
        """Note how many bytes of an unfinished message were read from this stream and are held in memory."""

    @abc.abstractmethod
    async def send_all(self, data: Buffer) -> None:
        """Hand all of ``data`` to the network.

        Raises:
            StreamBrokenError: the stream ended; the number of bytes that arrived is unknown.
            ClosedError: :meth:`aclose` or :meth:`reset` was called before.
        """

    @abc.abstractmethod
    async def receive_some(self, max_bytes: int) -> bytes:
        """Return at least one and at most ``max_bytes`` bytes; ``b""`` when the other side has closed its half.

        An end of stream does not imply that a message is complete. Messages carry their length for that.

        Raises:
            StreamBrokenError: the stream was reset or its connection is gone.
            ClosedError: :meth:`aclose` or :meth:`reset` was called before.
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close this side's half, and give up the stream. Never raises; bounded in time."""

    @abc.abstractmethod
    async def reset(self) -> None:
        """Drop the stream in both directions at once. Never raises; bounded in time; works under cancellation."""

    def carry_circuit(self) -> None:  # noqa: B027 - a network whose streams have no connections is complete
        """Note that the stream carries a circuit: the peer that reads nothing may be another one than :attr:`remote`.

        A write that stalls then ends this stream only, and not its connection. And few unread bytes are held for it.
        """

    async def wait_closed(self) -> None:  # noqa: B027 - a network that loses nothing on its way is complete
        """Wait, after :meth:`aclose`, until the other side has closed its half too. Never raises; bounded in time."""

    async def reset_connection(self) -> None:
        """Drop the connection below the stream, with everything on it. Never raises; bounded in time."""
        await self.reset()


StreamHandler = Callable[[Stream], Awaitable[None]]
"""Serves one inbound stream, which is reset when the handler returns. An exception costs that stream only."""


class DirectLane(abc.ABC):
    """A one-way connection to or from one authenticated peer, with blocking calls for worker threads.

    One thread at a time may send or receive. Any other thread may call :meth:`abort`.
    """

    remote: PeerId
    """The authenticated id of the peer at the other end."""
    is_local = False
    """True if the other end is on this machine, so that no link carries the bytes."""
    bytes_sent: int
    """Bytes handed to the operating system so far."""
    bytes_received: int

    @abc.abstractmethod
    def unsent(self) -> int:
        """Return how many of :attr:`bytes_sent` the other side has not confirmed; 0 where the system cannot tell."""

    @abc.abstractmethod
    def keep_unsent_below(self, count: int) -> None:
        """Let :meth:`send` block while the operating system holds about ``count`` bytes that are not sent yet.

        Bytes that the system holds delay more urgent ones. On systems without such a setting, nothing changes.

        Raises:
            StreamBrokenError: the lane ended.
        """

    @abc.abstractmethod
    def wait_for_room(self) -> None:
        """Block until a small :meth:`send` would not block. Raises StreamBrokenError if the lane has ended."""

    @abc.abstractmethod
    def send(self, data: Buffer) -> None:
        """Block until the kernel has taken all of ``data``.

        Raises:
            StreamBrokenError: the lane ended; the number of bytes that arrived is unknown.
        """

    @abc.abstractmethod
    def receive_into(self, buffer: memoryview) -> None:
        """Block until ``buffer`` is full.

        Raises:
            StreamBrokenError: the lane ended before.
        """

    @abc.abstractmethod
    async def receive_some(self, count: int) -> bytes:
        """Return between 1 and ``count`` bytes, from trio, while no thread uses the lane.

        A cancelled call leaves the lane unusable.

        Raises:
            StreamBrokenError: the lane ended before.
        """

    async def receive_exactly(self, count: int) -> bytes:
        """Return exactly ``count`` bytes, as :meth:`receive_some` does. Meant for a few bytes."""
        received = b""
        while len(received) < count:
            received += await self.receive_some(count - len(received))
        return received

    @abc.abstractmethod
    async def send_from_loop(self, data: Buffer) -> None:
        """Send all of ``data`` from trio, while no thread uses the lane. Meant for a few hundred kilobytes at most.

        A cancelled call leaves the lane unusable.

        Raises:
            StreamBrokenError: the lane ended; the number of bytes that arrived is unknown.
        """

    @abc.abstractmethod
    async def acknowledge_from_loop(self) -> None:
        """Do what :meth:`acknowledge` does, as :meth:`send_from_loop` does it."""

    @abc.abstractmethod
    def acknowledge(self) -> None:
        """Tell the sender, as the receiver, that everything sent so far has arrived. Raises StreamBrokenError."""

    @abc.abstractmethod
    async def acknowledged(self) -> None:
        """Wait, as the sender and from trio, until the receiver acknowledges everything that was sent.

        Without it, bytes that the operating system has taken may still be lost with the connection. A cancelled call
        leaves the lane as it is.

        Raises:
            StreamBrokenError: the lane ended before.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """Drop the connection at once. Never raises, from any thread, any number of times.

        A call that is blocked on the lane in another thread raises StreamBrokenError promptly.
        """


class LaneHost(Protocol):
    """Reads the inbound lanes of a transport."""

    async def serve_lane(self, lane: DirectLane) -> None:
        """Read whole messages from a lane that has bytes to read, and return between two. An exception ends the lane.

        The lane is idle at each call.
        """

    def wants_lane(self, peer_id: PeerId) -> bool:
        """Return whether lanes of a peer are expected now. Other peers get only a few."""


class Transport(abc.ABC):
    """The connection of this process to the network."""

    peer_id: PeerId

    @property
    @abc.abstractmethod
    def addresses(self) -> tuple[str, ...]:
        """The addresses at which other peers can dial this one; each ends in ``/p2p/<peer id>``."""

    @property
    def reachability(self) -> Reachability:
        """The ways in which others can reach this peer, as far as it knows them."""
        return NOT_ASKED

    async def settle(self) -> None:  # noqa: B027 - a network without routers is complete
        """Wait until this peer knows how others reach it, for a few seconds at most."""

    @abc.abstractmethod
    def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Answer inbound streams of ``protocol`` with ``handler`` from now on."""

    @abc.abstractmethod
    async def dial(self, address: str, *, timeout: float) -> PeerId:
        """Connect to an address that ends in ``/p2p/<peer id>`` and return that id.

        Raises:
            AddressError: the text is not such an address.
            UnreachableError: no authenticated connection within ``timeout`` seconds.
        """

    @abc.abstractmethod
    async def open_stream(
        self,
        peer_id: PeerId,
        protocol: str,
        *,
        addresses: Sequence[str] = (),
        timeout: float,
        wait_inbound: bool = False,
    ) -> Stream:
        """Open a stream over an existing connection, or else dial ``addresses``.

        Args:
            timeout: seconds, at most :data:`~p2pavg.base.limits.MAX_TIMEOUT_SECONDS`.
            wait_inbound: if dialling fails, wait until the peer connects to this one. A peer behind a home router can
                dial, but cannot be dialled. If false, a failed dial raises at once.

        Raises:
            RefusedError: every dial was refused, at hosts where this peer was connected before.
            UnreachableError: no stream within ``timeout`` seconds, or the peer does not serve ``protocol``.
        """

    @abc.abstractmethod
    def is_connected(self, peer_id: PeerId) -> bool:
        """Return whether a connection to the peer is open now."""

    def answers(self, peer_id: PeerId, seconds: float) -> bool:  # noqa: ARG002 - a network that knows nothing of it is complete
        """Return whether the peer's system, not its process, has acknowledged something in the last seconds.

        False says nothing: a network need not know, and nothing may have been sent.
        """
        return False

    @abc.abstractmethod
    def watching_connections(self, connected: Callable[[PeerId], None]) -> AbstractContextManager[None]:
        """Call ``connected`` with the peer of each new connection while the block runs, whichever side makes it.

        It must not raise.
        """

    @abc.abstractmethod
    async def disconnect(self, peer_id: PeerId) -> None:
        """Close every connection to the peer. Never raises, bounded in time."""

    @property
    def relayed_bytes(self) -> int:
        """Bytes that this peer has carried between others as their relay, both directions together."""
        return 0

    def remember_peer(self, peer_id: PeerId, *, companion: bool = False) -> None:  # noqa: B027 - for transports with limits
        """Keep a place for a peer, so that its connections do not give way to those of strangers.

        Args:
            companion: true if the peer is in a group with this one or was named by this process' user; false if it
                has answered a call. Companions have priority.
        """

    def serve_lanes(self, host: LaneHost) -> None:  # noqa: B027 - a network without lanes is complete
        """Let ``host`` read each inbound lane from now on. Before this call, lanes wait."""

    async def open_lane(
        self,
        peer_id: PeerId,
        *,
        addresses: Sequence[str] = (),  # noqa: ARG002 - for transports with lanes
        timeout: float,  # noqa: ARG002
    ) -> DirectLane:
        """Return a lane to the peer: a kept one if there is one. The caller owns it until it keeps or aborts it.

        Raises:
            UnreachableError: no lane within ``timeout`` seconds. After a failure, calls raise at once for a while.
        """
        raise UnreachableError(f"this network has no direct lanes to {peer_id}")

    def keep_lane(self, lane: DirectLane) -> None:
        """Take back a lane from :meth:`open_lane`, after its user has called :meth:`DirectLane.acknowledged`.

        The next caller may get it as soon as the acknowledgement has arrived.
        """
        lane.abort()


# Messages on a stream: a length of four bytes, big-endian, then that many bytes.
#
# The length is checked against the caller's limit before anything is allocated. Bulk payloads follow a message
# without framing, and are read directly into the caller's buffer.

LENGTH_BYTES = 4

# Control messages are small: a roster of 16 members with signed records of 4 KiB each is the largest. gRPC allows
# 4 MiB by default, libp2p's own protocols 64 KiB to 4 MiB.
MAX_CONTROL_BYTES = 256 * 1024


_READ_CHUNK = 256 * 1024  # the initial window of a stream; a read rarely finds more


async def send_message(stream: Stream, message: Buffer) -> None:
    """Send one message, preceded by its length."""
    await send_messages(stream, [message])


async def send_messages(stream: Stream, messages: Iterable[Buffer]) -> None:
    """Send messages one after the other, each preceded by its length, in one write."""
    await stream.send_all(
        b"".join(len(message).to_bytes(LENGTH_BYTES, "big") + bytes(message) for message in messages)
    )


async def receive_message(stream: Stream, *, max_bytes: int = MAX_CONTROL_BYTES) -> bytes | None:
    """Return the next message; ``None`` if the other side closed its half between two messages.

    Raises:
        RemoteProtocolError: the announced length is zero or above ``max_bytes``, or the message was not complete
            REPLY_SECONDS after its first byte.
        StreamBrokenError: the stream ended within a message, or was reset.
    """
    first = await stream.receive_some(LENGTH_BYTES)
    if not first:
        return None
    # From the first byte to the last one. A roster of 64 KiB takes 8 s on a link of 64 kbit/s, the slowest that is
    # supported without setting a bandwidth. A sender that takes longer occupies memory for nothing.
    with trio.move_on_after(REPLY_SECONDS):
        length = int.from_bytes(first + await _receive_exactly(stream, LENGTH_BYTES - len(first)), "big")
        if not 0 < length <= max_bytes:
            raise RemoteProtocolError(
                f"a message of {length} bytes was announced, 1 to {max_bytes} are allowed"
            )
        return bytes(await _receive_exactly(stream, length))
    raise RemoteProtocolError(f"a message was not complete {REPLY_SECONDS:.0f} s after its first byte")


async def _receive_exactly(stream: Stream, count: int) -> bytearray:
    """Return exactly ``count`` bytes.

    The buffer grows with the bytes that arrive, so a stranger cannot reserve memory by announcing a long message. The
    transport is told how many bytes the buffer holds.
    """
    received = bytearray()
    try:
        while len(received) < count:
            received += await _receive_some(stream, count - len(received))
            stream.hold(len(received))
    finally:
        stream.hold(0)
    return received


async def _receive_some(stream: Stream, wanted: int) -> bytes:
    chunk = await stream.receive_some(min(wanted, _READ_CHUNK))
    if not chunk:
        raise StreamBrokenError(f"stream of {stream.remote} ended {wanted} bytes early")
    return chunk


async def receive_exactly_into(
    stream: Stream, buffer: memoryview, on_chunk: Callable[[int], None] = lambda _count: None
) -> None:
    """Fill ``buffer`` from the stream.

    Args:
        on_chunk: is told the length of each chunk that has come into ``buffer``.

    Raises:
        StreamBrokenError: the stream ended or was reset before the buffer was full.
    """
    filled = 0
    while filled < len(buffer):
        chunk = await _receive_some(stream, len(buffer) - filled)
        buffer[filled : filled + len(chunk)] = chunk
        filled += len(chunk)
        on_chunk(len(chunk))
