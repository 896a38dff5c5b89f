"""A peer's rounds do not wait for work that others make it do."""

from __future__ import annotations

import threading

import trio

from p2pavg import open_peer


async def test_work_that_no_round_waits_for_has_a_thread_of_its_own() -> None:
    goes_on = threading.Event()
    async with open_peer() as peer, trio.open_nursery() as nursery:
        nursery.start_soon(peer.context.run_aside, goes_on.wait, 120.0)
        try:
            assert await peer.context.run_in_thread(lambda: "done") == "done"
            assert not goes_on.is_set()
        finally:
            goes_on.set()
