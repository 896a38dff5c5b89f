"""The negotiation of new streams with a connected peer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import trio
from libp2p.custom_types import TProtocol
from libp2p.host.exceptions import StreamFailure
from libp2p.io.exceptions import IOException
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedStreamError

from p2pavg.base.errors import UnreachableError
from p2pavg.base.limits import REPLY_SECONDS
from p2pavg.net.libp2p.connections import Connections
from p2pavg.net.libp2p.guarded_yamux import GuardedYamux
from p2pavg.net.libp2p.host import GuardedHost
from p2pavg.net.libp2p.stream import Libp2pStream, Lifetime, error_text
from p2pavg.net.transport import PeerId

logger = logging.getLogger(__name__)


class _Negotiation:
    """A stream that is being opened, and a note if its caller has given up."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.stream: Libp2pStream | None = None
        self.reason = "the transport is closing"
        self.abandoned = False


class StreamOpener:
    """Opens streams over connections that exist already."""

    def __init__(self, host: GuardedHost, connections: Connections, lifetime: Lifetime) -> None:
        self._host = host
        self._connections = connections
        self._lifetime = lifetime

    async def open(self, peer_id: PeerId, protocol: str) -> Libp2pStream:
        """Open a stream and negotiate its protocol.

        The negotiation runs in the transport's nursery, because a cancelled one leaves half a frame behind.

        Raises:
            UnreachableError: the peer does not serve the protocol, does not answer, or the connection broke.
        """
        attempt = _Negotiation()
        self._lifetime.nursery.start_soon(self._run, attempt, peer_id, protocol)
        try:
            await attempt.done.wait()
        except trio.Cancelled:
            attempt.abandoned = True
            if attempt.stream is not None:
                await attempt.stream.reset()
            raise
        if attempt.stream is None:
            raise UnreachableError(f"{peer_id} opened no stream of {protocol}: {attempt.reason}")
        return attempt.stream

    async def _run(self, attempt: _Negotiation, peer_id: PeerId, protocol: str) -> None:
        watchdog = trio.CancelScope()
        used = self._connections.best_of(peer_id)
        self._lifetime.nursery.start_soon(self._abort_if_silent, watchdog, peer_id, used)
        try:
            found = await self._host.new_stream(ID.from_string(peer_id), [TProtocol(protocol)])
            attempt.stream = Libp2pStream(cast(NetStream, found), self._lifetime)
        except (SwarmException, StreamFailure, IOException, MuxedStreamError, ValueError) as error:
            attempt.reason = error_text(error)
        except Exception as error:
            logger.exception("opening a stream to %s failed", peer_id)
            attempt.reason = error_text(error)
        finally:
            watchdog.cancel()
            attempt.done.set()
        if attempt.abandoned and attempt.stream is not None:
            await attempt.stream.reset()

    async def _abort_if_silent(
        self, watchdog: trio.CancelScope, peer_id: PeerId, used: Sequence[GuardedYamux]
    ) -> None:
        """Close the connections that may be in use if the peer does not answer in time.

        Cancelling the negotiation would not end it for sure: libp2p then resets the stream inside a shield. A direct
        connection that was made meanwhile goes on when a relay is what keeps silent.
        """
        with watchdog:
            await trio.sleep(REPLY_SECONDS)
            logger.debug("%s did not answer within %.0f s", peer_id, REPLY_SECONDS)
            for muxed in used:
                await muxed.abort()
