"""Places that an attempt leaves: its record is withdrawn there, unless the next attempt has begun in one of them."""

from __future__ import annotations

from typing import Any, cast

import trio
from trio.testing import MockClock

from p2pavg.matchmaking.matchmaker import Matchmaker


class Records:
    """Notes withdrawals."""

    def __init__(self) -> None:
        self.withdrawn: list[bytes] = []

    def keep_no_places(self) -> None:
        """Do nothing: none are kept."""

    async def withdraw(self, key: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.withdrawn.append(key)


def matchmaker_with(records: Records) -> Matchmaker:
    nothing = cast(Any, None)
    return Matchmaker(
        nothing, key=b"k" * 32, settings=nothing, codec="fp32", meter=nothing, records=cast(Any, records)
    )


async def test_record_of_the_next_attempt_is_not_withdrawn() -> None:
    records = Records()
    matchmaker = matchmaker_with(records)
    matchmaker._said = [b"next"]
    await matchmaker._withdraw_left(b"next")
    await matchmaker._withdraw_left(b"left")
    assert records.withdrawn == [b"left"]
    await matchmaker.withdraw()
    assert records.withdrawn == [b"left", b"next"]


async def test_an_attempt_that_ends_after_the_matchmaker_withdraws_no_record_of_its_successor(
    autojump_clock: MockClock,
) -> None:
    records = Records()
    matchmaker = matchmaker_with(records)
    await matchmaker.close()
    matchmaker._said = [b"next"]  # by the attempt, which is cancelled meanwhile
    await matchmaker._withdraw_unless_renewed()
    assert records.withdrawn == []
