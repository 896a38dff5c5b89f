"""How long a member may be silent, against a clock that the test moves."""

from __future__ import annotations

import pytest

from p2pavg.consensus.failure_detector import (
    FIRST_CONTACT_SECONDS,
    FLOOR_SECONDS,
    PARTS,
    PING_SECONDS,
    STALLS,
    Pace,
)

PART = 1000
LIMIT = 60.0
BEGUN = 500.0  # a clock may say anything at first
A_MOMENT = 0.001


def a_pace(*, limit: float = LIMIT, prior: float = 0.0) -> Pace:
    return Pace(BEGUN, PART, limit, prior)


def sends(pace: Pace, seconds: float, parts: int, begun: float = BEGUN) -> float:
    """Parts in pieces, ``seconds`` each; when the last was there."""
    now = begun
    pace.arrived(now, PART // 4, data=True)
    pace.arrived(now, 10, data=False)  # its stream of votes is there
    for _ in range(4 * parts):
        now += seconds / 4
        pace.arrived(now, PART // 4, data=True)
    return now


def silence(pace: Pace, since: float) -> float:
    """After how many seconds of silence a member is given up."""
    waited = 0.0
    while pace.overdue(since + waited) is None:
        waited += 0.01
        assert waited < 1000.0
    return waited


def about(seconds: float) -> object:
    return pytest.approx(seconds, abs=0.02)


def test_first_contact_has_its_own_time() -> None:
    assert silence(a_pace(), BEGUN) == about(FIRST_CONTACT_SECONDS)


@pytest.mark.parametrize("prior", [0.1, 1.0, 10.0])
def test_first_contact_may_take_longer_over_a_link_that_is_said_to_be_slow(prior: float) -> None:
    assert silence(a_pace(prior=prior), BEGUN) == about(max(FIRST_CONTACT_SECONDS, PARTS * prior))


def test_as_long_may_be_silent_whose_stream_of_votes_is_not_there_yet() -> None:
    """It was opened while both sides sent parts already, and waits behind them."""
    pace = a_pace()
    for piece in range(8):
        pace.arrived(BEGUN + 0.01 * piece, PART, data=True)
    assert silence(pace, BEGUN + 0.07) == about(FIRST_CONTACT_SECONDS)


def test_as_long_may_be_silent_who_has_sent_less_than_a_part() -> None:
    """Of its pace next to nothing is known: a piece of a part may fill a slow link for as long."""
    pace = a_pace()
    pace.arrived(BEGUN + 2.0, 5, data=False)
    assert silence(pace, BEGUN + 2.0) == about(FIRST_CONTACT_SECONDS)
    pace.arrived(BEGUN + 2.0, 5, data=True)
    pace.arrived(BEGUN + 2.1, PART - 6, data=True)
    assert silence(pace, BEGUN + 2.1) == about(FIRST_CONTACT_SECONDS)


def test_whether_anything_has_come() -> None:
    for data in (False, True):
        pace = a_pace()
        assert not pace.heard
        pace.arrived(BEGUN, 1, data=data)
        assert pace.heard


def test_over_a_fast_link_the_floor_holds() -> None:
    pace = a_pace()
    assert silence(pace, sends(pace, 0.001, 10)) == about(FLOOR_SECONDS)


def test_one_that_pings_is_there() -> None:
    pace = a_pace()
    for tick in range(1000):
        now = BEGUN + tick * PING_SECONDS
        pace.arrived(now, 5, data=False)
        assert pace.overdue(now + PING_SECONDS) is None


@pytest.mark.parametrize("seconds", [0.5, 1.0, 3.0])
def test_a_slow_link_may_be_silent_for_some_of_its_parts(seconds: float) -> None:
    pace = a_pace()
    assert silence(pace, sends(pace, seconds, 3)) == about(PARTS * seconds)


@pytest.mark.parametrize("seconds", [0.1, 1.0, 4.0, 10.0])
def test_a_slow_member_that_moves_is_not_given_up(seconds: float) -> None:
    """Also not as long as no part of it is whole, and whatever it owes."""
    pace = a_pace()
    pace.owes(BEGUN, True)
    now = BEGUN
    for _ in range(60):
        now += seconds / 8
        pace.arrived(now, PART // 8, data=True)
        for wait in (0.25, 0.5, 1.0):
            assert pace.overdue(now + wait * seconds / 8) is None


def test_until_a_part_was_measured_what_its_link_was_said_to_be_counts() -> None:
    pace = a_pace(prior=2.0)
    assert silence(pace, BEGUN) == about(PARTS * 2.0)
    pace.arrived(BEGUN, 5, data=False)
    assert silence(pace, BEGUN) == about(PARTS * 2.0)
    pace.arrived(BEGUN + 0.1, PART // 2, data=True)
    assert silence(pace, BEGUN + 0.1) == about(PARTS * 2.0)
    pace.arrived(BEGUN + 0.2, PART // 2, data=True)
    assert silence(pace, BEGUN + 0.2) == about(FLOOR_SECONDS), "it is faster than it was said to be"


def test_a_link_that_is_slower_than_it_was_said_to_be_is_known_at_once() -> None:
    pace = a_pace(prior=0.1)
    pace.arrived(BEGUN, PART // 10, data=True)
    pace.arrived(BEGUN + 1.0, PART // 10, data=True)
    assert pace.part_seconds() == pytest.approx(10.0)
    assert silence(pace, BEGUN + 1.0) == about(PARTS * 10.0)


def test_the_first_arrival_tells_nothing_of_the_pace() -> None:
    """How long it took to get there is the connection's time."""
    pace = a_pace()
    pace.arrived(BEGUN + 3.0, PART, data=True)
    assert pace.part_seconds() == 0.0


def test_pings_tell_nothing_of_the_pace() -> None:
    pace = a_pace()
    for tick in range(10):
        pace.arrived(BEGUN + tick, 5, data=False)
    assert pace.part_seconds() == 0.0


def test_a_pause_in_which_nothing_was_sent_does_not_make_a_link_slow() -> None:
    pace = a_pace()
    now = sends(pace, 0.4, 10)
    pace.arrived(now + 1000.0, PART // 4, data=True)
    assert pace.part_seconds() < 0.4 + FLOOR_SECONDS / 10


@pytest.mark.parametrize("limit", [0.5, 1.0, 3.0])
def test_no_silence_is_longer_than_the_limit(limit: float) -> None:
    assert silence(a_pace(limit=limit), BEGUN) == about(limit)
    heard, slow, owing = a_pace(limit=limit, prior=50.0), a_pace(limit=limit), a_pace(limit=limit)
    heard.arrived(BEGUN, 5, data=False)
    assert silence(heard, BEGUN) == about(min(limit, PARTS * 50.0))
    assert silence(slow, sends(slow, 30.0, 2)) == about(limit)
    owing.owes(BEGUN, True)
    assert silence(owing, BEGUN) == about(limit)


def pings(pace: Pace, begun: float) -> float:
    """How long a member that only pings is waited for."""
    now = begun
    while True:
        pace.arrived(now, 5, data=False)
        if pace.overdue(now) is not None:
            return now - begun
        now += 0.01
        assert now < begun + 1000.0


class TestOwed:
    def test_one_that_is_there_and_sends_nothing_of_what_it_owes_is_given_up(self) -> None:
        pace = a_pace()
        pace.owes(BEGUN, True)
        assert pings(pace, BEGUN) == about(STALLS * FLOOR_SECONDS)
        assert (
            pace.overdue(BEGUN + STALLS * FLOOR_SECONDS + 0.1) == "sent nothing of its contribution for 4.6 s"
        )

    def test_a_slow_one_has_more_time(self) -> None:
        pace = a_pace()
        now = sends(pace, 2.0, 2)
        pace.owes(now, True)
        assert pings(pace, now) == about(STALLS * PARTS * 2.0)

    def test_the_limit_holds_for_it_too(self) -> None:
        pace = a_pace(prior=100.0)
        pace.owes(BEGUN, True)
        assert pings(pace, BEGUN) == about(LIMIT)

    def test_it_is_waited_for_from_when_it_last_sent_some_of_it(self) -> None:
        pace = a_pace()
        pace.owes(BEGUN, True)
        pace.arrived(BEGUN + 4.0, 1, data=True)
        assert pings(pace, BEGUN + 4.0) == about(STALLS * FLOOR_SECONDS)

    def test_one_that_owes_nothing_any_more_is_not_waited_for(self) -> None:
        pace = a_pace()
        pace.owes(BEGUN, True)
        pace.owes(BEGUN + 1.0, False)
        for tick in range(1000):
            pace.arrived(BEGUN + tick, 5, data=False)
            assert pace.overdue(BEGUN + tick) is None

    def test_data_of_one_that_owes_nothing_does_not_make_it_owe(self) -> None:
        pace = a_pace()
        pace.arrived(BEGUN, 100, data=True)
        for tick in range(1000):
            pace.arrived(BEGUN + tick, 5, data=False)
            assert pace.overdue(BEGUN + tick) is None

    def test_it_has_its_whole_time_when_it_owes_again(self) -> None:
        pace = a_pace()
        pace.owes(BEGUN, True)
        pace.owes(BEGUN + 1.0, False)
        pace.owes(BEGUN + 100.0, True)
        assert pings(pace, BEGUN + 100.0) == about(STALLS * FLOOR_SECONDS)


class TestExcuse:
    def test_what_this_process_missed_is_no_silence(self) -> None:
        pace = a_pace()
        heard = sends(pace, 0.001, 2)
        pace.excuse(20.0)
        assert pace.overdue(heard + 20.0) is None
        assert silence(pace, heard + 20.0) == about(FLOOR_SECONDS)

    def test_nor_when_it_waits_for_the_first_contact(self) -> None:
        pace = a_pace()
        pace.excuse(20.0)
        assert silence(pace, BEGUN + 20.0) == about(FIRST_CONTACT_SECONDS)

    def test_nor_is_what_it_did_not_read_owed(self) -> None:
        pace = a_pace()
        pace.owes(BEGUN, True)
        pace.excuse(20.0)
        assert pings(pace, BEGUN + 20.0) == about(STALLS * FLOOR_SECONDS)

    def test_one_that_owes_nothing_owes_nothing_after_it(self) -> None:
        pace = a_pace()
        pace.arrived(BEGUN, 5, data=False)
        pace.excuse(20.0)
        for tick in range(40):
            pace.arrived(BEGUN + tick, 5, data=False)
            assert pace.overdue(BEGUN + tick) is None

    def test_it_does_not_make_a_slow_link_look_fast(self) -> None:
        """What waited in the meantime is read before it is known for how long this process was held up."""
        pace = a_pace()
        now = sends(pace, 2.0, 3) + 5.0
        pace.arrived(now, PART // 4, data=True)
        pace.excuse(5.0)
        assert silence(pace, sends(pace, 2.0, 1, now)) >= PARTS * 1.5
