"""The streams of one attempt are let go, however it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import trio
from trio.testing import wait_all_tasks_blocked

from p2pavg.matchmaking.attempt_runner import AttemptRunner
from p2pavg.matchmaking.messages import Nudge
from p2pavg.net.transport import Buffer
from tests.unit.allreduce.attempts import Reaches
from tests.unit.allreduce.streams import SaidBefore
from tests.unit.group.samples import candidate


class Full(SaidBefore):
    """A stream whose other side reads nothing."""

    async def send_all(self, data: Buffer) -> None:
        await trio.sleep_forever()


class ReachesFull(Reaches):
    """Opens streams to peers that read nothing."""

    async def open_stream(self, peer_id: str, *_: object, **__: object) -> Full:
        await trio.lowlevel.checkpoint()
        self.opened.append(Full(b"", peer_id))
        return cast(Full, self.opened[-1])


async def test_a_nudge_that_is_not_read_is_let_go_with_its_attempt() -> None:
    me, later = candidate(0), candidate(1)
    transport = ReachesFull(me.peer_id)
    runner = SimpleNamespace(_context=SimpleNamespace(transport=transport))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(AttemptRunner._nudge, cast(Any, runner), later, Nudge(me))
        await wait_all_tasks_blocked()
        assert [stream.closed for stream in transport.opened] == [False]
        nursery.cancel_scope.cancel()
    assert [stream.closed for stream in transport.opened] == [True]
