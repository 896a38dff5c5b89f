"""A wait that lasts says what it waits for, with growing pauses."""

from __future__ import annotations

import logging

import pytest
import trio
from trio.testing import MockClock

from p2pavg.base.threads.waits import told_while_waiting

logger = logging.getLogger("p2pavg.test")


async def test_pauses_between_words_grow(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    async with told_while_waiting(logger, lambda seconds: f"waits for {seconds:.0f} s"):
        await trio.sleep(50.0)
    assert [record.getMessage() for record in caplog.records] == [
        f"waits for {seconds} s" for seconds in (3, 9, 21, 45)
    ]


async def test_empty_sentences_are_not_logged(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with told_while_waiting(logger, lambda _seconds: ""):
        await trio.sleep(50.0)
    assert caplog.records == []


async def test_exceptions_of_the_block_are_bare(autojump_clock: MockClock) -> None:
    with pytest.raises(KeyError):
        async with told_while_waiting(logger, lambda _seconds: ""):
            raise KeyError


async def test_it_ends_with_the_block_when_cancelled(autojump_clock: MockClock) -> None:
    with trio.move_on_after(1.0) as scope:
        async with told_while_waiting(logger, lambda _seconds: ""):
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert trio.current_time() == 1.0
