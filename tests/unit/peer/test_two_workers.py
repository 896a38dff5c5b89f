"""A peer's rounds do not wait for work that others make it do."""

from __future__ import annotations

import threading

import trio

from p2pavg import open_peer


async def test_work_that_no_round_waits_for_has_a_thread_of_its_own() -> None:
    begun, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        goes_on.wait(30.0)
        ended.set()

    async with open_peer() as peer, trio.open_nursery() as nursery:
        nursery.start_soon(peer.context.run_aside, work)
        await trio.to_thread.run_sync(begun.wait)
        try:
            assert await peer.context.run_in_thread(lambda: "done") == "done"
            assert not ended.is_set()
        finally:
            goes_on.set()
