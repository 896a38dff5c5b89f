"""Connections that end just now, as the caller of a stream over them sees it."""

from __future__ import annotations

from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from p2pavg.net.libp2p.connections import NOTICE_SECONDS, Connections, proves_end


class Connection:
    """A connection as libp2p has it."""

    def __init__(self, *, dropped_here: bool = False) -> None:
        self.event_shutting_down = trio.Event()
        self.event_closed = trio.Event()
        self.muxed_conn = self
        self.dropped_here = dropped_here

    @property
    def is_closed(self) -> bool:
        return self.event_closed.is_set()


@pytest.mark.parametrize(
    ("seconds", "dropped_here", "ended"),
    [(0.5, False, True), (0.5, True, False), (2.0, False, False)],
    ids=["in time", "by this end", "too late"],
)
async def test_an_end_is_waited_for_a_moment(
    seconds: float, dropped_here: bool, ended: bool, autojump_clock: MockClock
) -> None:
    """A write may have failed before libp2p sets the event."""
    connections = [Connection(), Connection(dropped_here=dropped_here)]

    async def end() -> None:
        await trio.sleep(seconds * NOTICE_SECONDS)
        connections[1].event_shutting_down.set()
        connections[1].event_closed.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(end)
        owner, given = cast(Any, None), cast(Any, connections)
        assert await Connections.one_was_ended(owner, given) is ended


async def test_a_connection_that_ends_is_waited_for_until_libp2p_lists_it_no_more(
    autojump_clock: MockClock,
) -> None:
    """A busy machine may work on that for a second. A member of a group was lost because this gave up after 0.1 s."""
    connection = Connection()
    connection.event_shutting_down.set()

    async def end() -> None:
        await trio.sleep(20 * NOTICE_SECONDS)
        connection.event_closed.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(end)
        assert await Connections.one_was_ended(cast(Any, None), cast(Any, [connection]))
        assert connection.is_closed


@pytest.mark.parametrize(
    ("host", "dialled", "met", "proves"),
    [
        ("8.8.8.8", True, True, True),
        ("8.8.8.8", False, True, False),  # a router refuses there, through which the peer has dialled
        ("192.168.1.7", False, True, True),
        ("192.168.1.7", False, False, False),  # another machine, in the network of a peer elsewhere
        ("2001:4860:4860::8888", False, True, False),
    ],
)
def test_a_refusal_proves_an_end_where_the_peer_took_dials(
    host: str, dialled: bool, met: bool, proves: bool
) -> None:
    assert proves_end(host, dialled=dialled, met=met) is proves
