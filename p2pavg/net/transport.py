"""The network as everything above sees it: streams to peers that are known by their id.

Two implementations, :mod:`p2pavg.net.libp2p.transport` and :class:`p2pavg.testing.MemoryNetwork`; both pass
:mod:`p2pavg.testing.transport_conformance`.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Sequence

from p2pavg.errors import UnreachableError

Buffer = bytes | bytearray | memoryview

PeerId = str
"""Base58 text of a libp2p peer id, such as ``12D3KooW…``."""


class Stream(abc.ABC):
    """A bidirectional, ordered byte stream to one authenticated peer.

    One task may send while another receives; two tasks may not do the same at once. A call that is cancelled leaves
    its direction of the stream unusable: a part of a message may be gone.
    """

    remote: PeerId
    """The authenticated id of the peer at the other end."""
    remote_host: str = ""
    """The IP address at the other end; empty when it is not known."""

    def hold(self, count: int) -> None:  # noqa: B027 - a network that counts no memory is complete
        """Note how many bytes of an unfinished message were read from this stream and wait in memory for the rest."""

    @abc.abstractmethod
    async def send_all(self, data: Buffer) -> None:
        """Hand all of ``data`` to the network.

        Raises:
            StreamBrokenError: the stream ended; how much arrived is unknown.
            ClosedError: :meth:`aclose` or :meth:`reset` was called before.
        """

    @abc.abstractmethod
    async def receive_some(self, max_bytes: int) -> bytes:
        """At least one and at most ``max_bytes`` bytes; ``b""`` when the other side has closed its half.

        An end of stream says nothing about completeness: messages carry their length.

        Raises:
            StreamBrokenError: the stream was reset or its connection is gone.
            ClosedError: as above.
        """

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Say that nothing more comes, and let go of the stream. Never raises, bounded in time."""

    @abc.abstractmethod
    async def reset(self) -> None:
        """Drop the stream in both directions at once. Never raises, bounded in time, works under cancellation."""


StreamHandler = Callable[[Stream], Awaitable[None]]
"""Serves one inbound stream. Whatever it raises costs that stream only; the stream is reset when it returns."""


class DirectLane(abc.ABC):
    """One way to or from one authenticated peer over a connection of its own; blocking, for worker threads.

    One thread at a time may send, or receive; :meth:`abort` may come from any other.
    """

    remote: PeerId
    """The authenticated id of the peer at the other end."""
    bytes_sent: int
    """Handed to the system so far."""
    bytes_received: int

    @abc.abstractmethod
    def unsent(self) -> int:
        """Of :attr:`bytes_sent`, those that the other side is not known to have; 0 where the system does not tell."""

    @abc.abstractmethod
    def keep_unsent_below(self, count: int) -> None:
        """Let :meth:`send` block while the system holds about so many bytes that the link has not taken.

        What the system holds cannot be overtaken by what is more urgent. Where it cannot be told, nothing changes.

        Raises:
            StreamBrokenError: the lane ended.
        """

    @abc.abstractmethod
    def wait_for_room(self) -> None:
        """Block until :meth:`send` of a little would not. Raises StreamBrokenError when the lane has ended."""

    @abc.abstractmethod
    def send(self, data: Buffer) -> None:
        """Block until the kernel has taken all of ``data``.

        Raises:
            StreamBrokenError: the lane ended; how much arrived is unknown.
        """

    @abc.abstractmethod
    def receive_into(self, buffer: memoryview) -> None:
        """Block until ``buffer`` is full.

        Raises:
            StreamBrokenError: the lane ended before.
        """

    @abc.abstractmethod
    async def receive_exactly(self, count: int) -> bytes:
        """So many bytes, a few: from trio, while no thread uses the lane. Cancelling this leaves the lane unusable.

        Raises:
            StreamBrokenError: the lane ended before.
        """

    @abc.abstractmethod
    def acknowledge(self) -> None:
        """As the receiver: tell the sender that all which it has sent so far has come. Raises StreamBrokenError."""

    @abc.abstractmethod
    async def acknowledged(self) -> None:
        """As the sender, from trio, when all is sent: wait until the receiver says that it has come.

        What the system took may still be lost with the connection. Cancelling this leaves the lane as it is.

        Raises:
            StreamBrokenError: the lane ended before.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """Drop the connection at once. Never raises, from any thread, any number of times.

        Whoever is blocked in the lane, in another thread, raises StreamBrokenError promptly.
        """


DirectLaneHandler = Callable[[DirectLane], Awaitable[None]]
"""Reads whole messages from a lane that has bytes to read, and leaves it between two. What it raises costs the lane."""


class Transport(abc.ABC):
    """This process' place in the network."""

    peer_id: PeerId

    @property
    @abc.abstractmethod
    def addresses(self) -> tuple[str, ...]:
        """Where others can dial this peer; each ends in ``/p2p/<peer id>``."""

    @abc.abstractmethod
    def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Answer inbound streams of ``protocol`` with ``handler`` from now on."""

    @abc.abstractmethod
    async def dial(self, address: str, *, timeout: float) -> PeerId:
        """Connect to an address that ends in ``/p2p/<peer id>`` and return that id.

        Raises:
            AddressError: the text is no such address.
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
        """A new stream, over an open connection if there is one, else by dialling ``addresses``.

        With ``wait_inbound``, where dialling fails an inbound connection that the peer makes within ``timeout``
        seconds is as good: behind a home router only one of two can dial. Without, a refused dial fails at once.

        Raises:
            RefusedError: every dial was refused, where a connection to this peer has been before.
            UnreachableError: no stream within ``timeout`` seconds, or the peer does not serve ``protocol``.
        """

    @abc.abstractmethod
    def is_connected(self, peer_id: PeerId) -> bool:
        """Whether a connection to the peer is open now."""

    @abc.abstractmethod
    async def disconnect(self, peer_id: PeerId) -> None:
        """Close every connection to the peer. Never raises, bounded in time."""

    def remember_peer(self, peer_id: PeerId, *, companion: bool = False) -> None:  # noqa: B027 - for those with limits
        """Keep a place for a peer: its connections do not give way to those of strangers.

        Args:
            companion: the peer is in a group with this one, or was named by this process' user; otherwise it has
                answered a call. Companions come first.
        """

    def serve_lanes(  # noqa: B027 - a network without lanes is complete
        self, handler: DirectLaneHandler, *, wanted: Callable[[PeerId], bool] | None = None
    ) -> None:
        """Call ``handler`` with each idle inbound lane that has bytes to read, from now on; until then they wait.

        Args:
            wanted: whether lanes of a peer are expected now. Other peers get a few only. ``None`` expects all.
        """

    async def open_lane(
        self,
        peer_id: PeerId,
        *,
        addresses: Sequence[str] = (),  # noqa: ARG002 - for those that have lanes
        timeout: float,  # noqa: ARG002
    ) -> DirectLane:
        """A lane to the peer, one that was kept if there is one; the caller's own until it keeps or aborts it.

        Raises:
            UnreachableError: no lane within ``timeout`` seconds; after that at once for a while.
        """
        raise UnreachableError(f"this network has no direct lanes to {peer_id}")

    def keep_lane(self, lane: DirectLane) -> None:
        """Take back a lane from :meth:`open_lane` on which :meth:`DirectLane.acknowledged` was waited for.

        It is for the next caller, as soon as the acknowledgement has come.
        """
        lane.abort()
