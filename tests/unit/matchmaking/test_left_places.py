"""Places that an attempt leaves: its record is withdrawn there, unless the next attempt has begun in one of them."""

from __future__ import annotations

from typing import Any, cast

import trio

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


async def test_record_of_the_next_attempt_is_not_withdrawn() -> None:
    records = Records()
    nothing = cast(Any, None)
    matchmaker = Matchmaker(
        nothing,
        key=b"k" * 32,
        settings=nothing,
        codec="fp32",
        bandwidth=lambda: 0.0,
        records=cast(Any, records),
    )
    matchmaker._said = [b"next"]
    await matchmaker._withdraw_left(b"next")
    await matchmaker._withdraw_left(b"left")
    assert records.withdrawn == [b"left"]
    await matchmaker.withdraw()
    assert records.withdrawn == [b"left", b"next"]
