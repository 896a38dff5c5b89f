"""The limits of tries that other peers ask for."""

from contextlib import ExitStack
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from p2pavg.net.nat.punch.meeting import (
    ALL_AT_ONCE,
    ALL_TRIES,
    PEER_AT_ONCE,
    PEER_TRIES,
    PEER_TRIES_PER_SECOND,
    Puncher,
    RefusedPunchError,
)


def puncher() -> Puncher:
    return Puncher(*cast(Any, (None, None, None)))


def refusal(limits: Puncher, peer_id: str) -> str:
    """Carry out a try. Return the reason if it is not allowed."""
    try:
        with limits.counted(peer_id):
            return ""
    except RefusedPunchError as error:
        return str(error)


async def test_a_peer_has_a_burst_and_then_a_rate(autojump_clock: MockClock) -> None:
    limits = puncher()
    assert [refusal(limits, "A") for _ in range(PEER_TRIES)] == [""] * PEER_TRIES
    assert "has asked for too many" in refusal(limits, "A")
    assert refusal(limits, "B") == "", "another peer pays nothing for it"
    await trio.sleep(1.0 / PEER_TRIES_PER_SECOND)
    assert refusal(limits, "A") == ""


async def test_all_peers_together_have_a_rate(autojump_clock: MockClock) -> None:
    limits = puncher()
    assert [refusal(limits, str(number)) for number in range(ALL_TRIES)] == [""] * ALL_TRIES
    assert "other peers" in refusal(limits, "A")
    await trio.sleep(1.0)
    assert refusal(limits, "A") == ""


async def test_tries_under_way_are_limited_for_each_peer_and_in_all(autojump_clock: MockClock) -> None:
    limits = puncher()
    with ExitStack() as mine, ExitStack() as others:
        for _ in range(PEER_AT_ONCE):
            mine.enter_context(limits.counted("A"))
        assert "under way" in refusal(limits, "A")
        for number in range(ALL_AT_ONCE - PEER_AT_ONCE):
            others.enter_context(limits.counted(str(number)))
        assert "under way" in refusal(limits, "B")
        mine.close()
        assert refusal(limits, "B") == refusal(limits, "A") == ""


async def test_a_try_that_fails_is_no_longer_under_way(autojump_clock: MockClock) -> None:
    limits = puncher()
    for _ in range(2 * PEER_AT_ONCE):
        with pytest.raises(ValueError, match="of the try"), limits.counted("A"):
            raise ValueError("of the try")
