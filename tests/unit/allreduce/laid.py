"""Direct lanes between simulated peers: pairs of sockets in this process, on the real clock."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from p2pavg.base.errors import RemoteProtocolError, StreamBrokenError, UnreachableError
from p2pavg.net.transport import Buffer, DirectLane
from p2pavg.peer.peer import Peer


class PairLane(DirectLane):
    """One end of a pair of sockets. A test that breaks a lane breaks the sender's end."""

    def __init__(self, end: socket.socket, remote: str) -> None:
        self.remote = remote
        self.bytes_sent = self.bytes_received = 0
        self.breaks_at: float = float("inf")
        self.change: Callable[[bytes], bytes] = bytes
        self.socket = end
        self.acknowledgements = 0
        self.owed = False
        """True while the receiver has not acknowledged what was sent."""

    def unsent(self) -> int:
        return 0

    def keep_unsent_below(self, count: int) -> None:
        """Do nothing: a pair of sockets is no link."""

    def wait_for_room(self) -> None:
        """Do nothing: the pair has room for a part."""

    def send(self, data: Buffer) -> None:
        self.owed = True
        if self.bytes_sent + len(data) > self.breaks_at:
            self.abort()
        try:
            self.socket.sendall(self.change(bytes(data)))
        except OSError as error:
            raise StreamBrokenError(str(error)) from None
        self.bytes_sent += len(data)

    def receive_into(self, buffer: memoryview) -> None:
        while buffer:
            try:
                count = self.socket.recv_into(buffer)
            except OSError as error:
                raise StreamBrokenError(str(error)) from None
            if not count:
                raise StreamBrokenError("it ended early")
            self.bytes_received += count
            buffer = buffer[count:]

    async def receive_some(self, count: int) -> bytes:
        await trio.lowlevel.wait_readable(self.socket.fileno())
        found = self.socket.recv(count)
        if not found:
            raise StreamBrokenError("it ended early")
        self.bytes_received += len(found)
        return found

    async def send_from_loop(self, data: Buffer) -> None:
        await trio.lowlevel.checkpoint()
        self.send(data)

    async def acknowledge_from_loop(self) -> None:
        await trio.lowlevel.checkpoint()
        self.acknowledge()

    def acknowledge(self) -> None:
        try:
            self.socket.sendall(b"!")
        except OSError as error:
            raise StreamBrokenError(str(error)) from None
        self.acknowledgements += 1

    async def acknowledged(self) -> None:
        await trio.lowlevel.wait_readable(self.socket.fileno())
        if not self.socket.recv(1):
            raise StreamBrokenError("it ended unacknowledged")
        self.owed = False

    def abort(self) -> None:
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the lane was aborted before


class Takes(DirectLane):
    """A lane that takes all data, and on which nothing arrives."""

    def __init__(self, remote: str) -> None:
        self.remote = remote
        self.bytes_sent = self.bytes_received = 0
        self.awaited = False
        self.aborted = False

    def unsent(self) -> int:
        return 0

    def keep_unsent_below(self, count: int) -> None:
        """Do nothing: the lane buffers nothing."""

    def wait_for_room(self) -> None:
        """Do nothing: the lane always has room."""

    def send(self, data: Buffer) -> None:
        self.bytes_sent += len(data)

    def receive_into(self, buffer: memoryview) -> None:
        raise NotImplementedError

    async def receive_some(self, count: int) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async def send_from_loop(self, data: Buffer) -> None:
        await trio.lowlevel.checkpoint()
        self.send(data)

    async def acknowledge_from_loop(self) -> None:
        raise NotImplementedError

    def acknowledge(self) -> None:
        raise NotImplementedError

    async def acknowledged(self) -> None:
        self.awaited = True
        await trio.sleep_forever()

    def abort(self) -> None:
        self.aborted = True


class Laid:
    """Lanes among some peers. ``prepare`` is called with each new lane's sending end and the peer that opened it."""

    def __init__(
        self, nursery: trio.Nursery, peers: Sequence[Peer], prepare: Callable[[PairLane, str], Any]
    ) -> None:
        self.opened: list[tuple[str, str]] = []
        self.cannot: set[tuple[str, str]] = set()
        self._nursery = nursery
        self._peers = {peer.id: peer for peer in peers}
        self._prepare = prepare
        self._idle: dict[tuple[str, str], list[PairLane]] = {}
        self.ends: list[PairLane] = []

    async def open(self, sender: str, receiver: str) -> DirectLane:
        await trio.lowlevel.checkpoint()
        if (sender, receiver) in self.cannot:
            raise UnreachableError("there is no way")
        if idle := self._idle.get((sender, receiver)):
            return idle.pop()
        self.opened.append((sender, receiver))
        near, far = socket.socketpair()
        outbound, inbound = PairLane(near, receiver), PairLane(far, sender)
        self.ends += [outbound, inbound]
        self._prepare(outbound, sender)
        self._nursery.start_soon(self._attend, self._peers[receiver], inbound)
        return outbound

    def keep(self, sender: str, lane: DirectLane) -> None:
        assert isinstance(lane, PairLane)
        self._nursery.start_soon(self._keep, sender, lane)

    async def _keep(self, sender: str, lane: PairLane) -> None:
        try:
            if lane.owed:  # its attempt ended before: the receiver may still end the lane
                await lane.acknowledged()
        except (StreamBrokenError, OSError):
            lane.abort()
        else:
            self._idle.setdefault((sender, lane.remote), []).append(lane)

    async def _attend(self, peer: Peer, lane: PairLane) -> None:
        try:
            while True:
                await trio.lowlevel.wait_readable(lane.socket.fileno())
                await peer.lobby.serve_lane(lane)
        except (StreamBrokenError, RemoteProtocolError):
            lane.abort()


@asynccontextmanager
async def lanes_among(
    peers: Sequence[Peer], prepare: Callable[[PairLane, str], Any] = lambda _lane, _sender: None
) -> AsyncIterator[Laid]:
    """Give the peers direct lanes to each other."""
    async with trio.open_nursery() as nursery:
        laid = Laid(nursery, peers, prepare)
        for peer in peers:
            _give(laid, peer)
        try:
            yield laid
        finally:
            nursery.cancel_scope.cancel()
            for end in laid.ends:
                end.abort()
                end.socket.close()


def _give(laid: Laid, peer: Peer) -> None:
    transport: Any = peer.context.transport

    async def open_lane(peer_id: str, *, addresses: Sequence[str] = (), timeout: float) -> DirectLane:
        return await laid.open(peer.id, peer_id)

    transport.open_lane = open_lane
    transport.keep_lane = lambda lane: laid.keep(peer.id, lane)
