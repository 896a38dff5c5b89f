"""Members that keep a round from its end are left out while there is time for another attempt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import trio

from p2pavg.consensus.member import RoundPhase
from p2pavg.round.slow_members import SlowMembers


class Leading:
    """The votes of a leader that gathers until a moment, and then holds a result that the third member lacks."""

    reduces_all = False

    def __init__(self, holds_from: float) -> None:
        self.holds_from = holds_from
        self.member = SimpleNamespace(
            size=3,
            begun=SimpleNamespace(view=frozenset(range(3))),
            pending=SimpleNamespace(held=((0, ()), (1, ()))),
        )
        self.left_out: list[tuple[int, float]] = []

    def leads(self, phase: RoundPhase) -> bool:
        holds = trio.current_time() >= self.holds_from
        return phase is (RoundPhase.HOLDING if holds else RoundPhase.GATHERING)

    def lost(self, position: int, _reason: str, **_: object) -> None:
        self.left_out.append((position, trio.current_time()))


async def test_a_leader_that_gathers_at_half_of_the_time_looks_again() -> None:
    voting: Any = Leading(holds_from=11.0)
    exchange: Any = SimpleNamespace(attempt=None, held_at=2.0)
    slow = SlowMembers(voting, exchange, {}, 20.0, is_star=False)
    await slow.leave_behind(0.0)  # where the clock begins
    [(position, at)] = voting.left_out
    assert (position, 11.0 < at < 20.0) == (2, True)
