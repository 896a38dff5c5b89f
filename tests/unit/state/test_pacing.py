"""The pace of states on a link: from measurements of the link, without waiting."""

from __future__ import annotations

import pytest

from p2pavg.net.limits.rate import WIRE_OVERHEAD
from p2pavg.state.pacing import LATELY_SECONDS, PART, SLOW_MBPS, STEP_BYTES, Pace


class Link:
    """A clock, and a link that was measured."""

    def __init__(self, mbps: float) -> None:
        self.mbps = mbps
        self.now = 100.0
        self.in_round = True

    def pace(self) -> Pace:
        return Pace(lambda: self.mbps, lambda: self.in_round, clock=lambda: self.now)

    def seconds(self, pace: Pace, steps: int) -> float:
        """Return the seconds in which so many steps leave."""
        began = self.now
        for _ in range(steps):
            self.now += pace.delay(STEP_BYTES)
        return self.now - began


@pytest.mark.parametrize("mbps", [0.5, 5.0, 99.0])
def test_states_fill_a_part_of_a_slow_link(mbps: float) -> None:
    link = Link(mbps)
    pace, steps = link.pace(), 200
    assert not pace.is_free
    sent = steps * STEP_BYTES * 8 * WIRE_OVERHEAD / 1e6 / link.seconds(pace, steps)
    assert sent == pytest.approx(PART * mbps, rel=0.02)


@pytest.mark.parametrize("mbps", [0.0, SLOW_MBPS, 1000.0])
def test_a_fast_link_and_one_that_was_not_measured_have_no_pace(mbps: float) -> None:
    link = Link(mbps)
    pace = link.pace()
    assert pace.is_free
    assert link.seconds(pace, 100) == 0


def test_two_sessions_share_the_pace() -> None:
    link = Link(5.0)
    pace = link.pace()
    alone = link.seconds(link.pace(), 100)
    first = [pace.delay(STEP_BYTES) for _ in range(100)][-1]
    assert first == pytest.approx(alone)


def test_a_new_measurement_changes_the_pace() -> None:
    link = Link(5.0)
    pace = link.pace()
    slow = link.seconds(pace, 100)
    link.mbps = 10.0
    assert link.seconds(pace, 100) == pytest.approx(slow / 2, rel=0.05)


def test_nothing_is_held_back_when_no_round_was_near() -> None:
    """The measurement of the link is too low if the other members of the last rounds were slow."""
    link = Link(5.0)
    pace = link.pace()
    assert link.seconds(pace, 10) > 0
    link.in_round = False
    assert link.seconds(pace, 10) > 0, "the next round may come at any time"
    link.now += LATELY_SECONDS
    assert link.seconds(pace, 100) == 0
    link.in_round = True
    assert link.seconds(pace, 10) > 0
