"""Helpers: the members of an attempt, and a transport whose streams take everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import trio

from p2pavg.allreduce.messages import Lane, LaneHeader
from p2pavg.base.errors import UnreachableError
from p2pavg.group.roster import Roster
from p2pavg.net.transport import Stream, StreamHandler, Transport
from tests.unit.allreduce.streams import SaidBefore
from tests.unit.group.samples import SIGNERS, candidate, roster

A, B, C, AUX = (signer.peer_id for signer in SIGNERS[:4])
SHARE = 4
NUMBER = 7


def three() -> Roster:
    return roster([candidate(index, weight=1.0) for index in range(3)], [SHARE] * 3)


class Reaches(Transport):
    """Opens streams that take everything, to all but some."""

    def __init__(self, peer_id: str, unreachable: Sequence[str] = ()) -> None:
        self.peer_id = peer_id
        self.group_id = self.members = b""
        self.opened: list[SaidBefore] = []
        self._unreachable = unreachable

    @property
    def addresses(self) -> tuple[str, ...]:
        return ()

    def serve(self, protocol: str, handler: StreamHandler) -> None:
        raise NotImplementedError

    async def dial(self, address: str, *, timeout: float) -> str:
        raise NotImplementedError

    async def open_stream(self, peer_id: str, protocol: str, **_: object) -> Stream:
        await trio.lowlevel.checkpoint()
        if peer_id in self._unreachable:
            raise UnreachableError(peer_id)
        self.opened.append(SaidBefore(b"", peer_id))
        return self.opened[-1]

    def is_connected(self, peer_id: str) -> bool:
        raise NotImplementedError

    def watching_connections(self, connected: Callable[[str], None]) -> AbstractContextManager[None]:
        raise NotImplementedError

    async def disconnect(self, peer_id: str) -> None:
        raise NotImplementedError

    def sent(self, peer_id: str, lane: Lane, reducer: int = 0) -> bytes | None:
        """Return the bytes sent to a member on a lane, after the header."""
        header = LaneHeader(self.group_id, lane, NUMBER, reducer, self.members).encode()
        head = len(header).to_bytes(4, "big") + header
        found = [s for s in self.opened if s.remote == peer_id and s.sent.startswith(head)]
        assert len(found) <= 1
        return bytes(found[0].sent[len(head) :]) if found else None
