"""Timeouts of the failure detector, against a clock that the test moves."""

from __future__ import annotations

import pytest

from p2pavg.base.limits import MAX_BACKOFF_SECONDS
from p2pavg.consensus.failure_detector import (
    FIRST_CONTACT_SECONDS,
    FLOOR_SECONDS,
    MARGIN,
    MAX_SILENT,
    MEMBER_PING_SECONDS,
    PARTS,
    STALLS,
    ArrivalPace,
    Silences,
    lag,
)

PART = 1000
LIMIT = 60.0
BEGUN = 500.0  # a clock may start at any value
A_MOMENT = 0.001


def a_pace(*, limit: float = LIMIT, prior: float = 0.0, patience: float = 0.0) -> ArrivalPace:
    return ArrivalPace(BEGUN, PART, limit, prior, patience)


def sends(pace: ArrivalPace, seconds: float, parts: int, begun: float = BEGUN) -> float:
    """Let parts arrive in pieces, ``seconds`` per part; return the time of the last arrival."""
    now = begun
    pace.arrived(now, PART // 4, data=True)
    pace.arrived(now, 10, data=False)  # its stream of votes is open
    for _ in range(4 * parts):
        now += seconds / 4
        pace.arrived(now, PART // 4, data=True)
    return now


def silence(pace: ArrivalPace, since: float) -> float:
    """Return the seconds of silence after which a member is given up."""
    waited = 0.0
    while pace.overdue(since + waited) is None:
        waited += 0.01
        assert waited < 1000.0
    return waited


def about(seconds: float) -> object:
    return pytest.approx(seconds, abs=0.02)


@pytest.mark.parametrize("prior", [0.1, 1.0, 10.0])
def test_first_contact_may_take_longer_over_a_link_announced_as_slow(prior: float) -> None:
    assert silence(a_pace(prior=prior), BEGUN) == about(max(FIRST_CONTACT_SECONDS, PARTS * prior))


def test_first_contact_time_lasts_until_the_stream_of_votes_is_open() -> None:
    """The stream is opened while both sides already send parts, and waits behind them."""
    pace = a_pace()
    for piece in range(8):
        pace.arrived(BEGUN + 0.01 * piece, PART, data=True)
    assert silence(pace, BEGUN + 0.07) == about(FIRST_CONTACT_SECONDS)


def test_first_contact_time_lasts_until_a_parts_worth_has_come() -> None:
    """The pace is hardly known before that: a piece of a part may fill a slow link for as long."""
    pace = a_pace()
    pace.arrived(BEGUN + 2.0, 5, data=False)
    assert silence(pace, BEGUN + 2.0) == about(FIRST_CONTACT_SECONDS)
    pace.arrived(BEGUN + 2.0, 5, data=True)
    pace.arrived(BEGUN + 2.1, PART - 6, data=True)
    assert silence(pace, BEGUN + 2.1) == about(FIRST_CONTACT_SECONDS)


@pytest.mark.parametrize("data", [False, True])
def test_contact_is_the_time_to_the_first_arrival_in_which_this_process_ran(data: bool) -> None:
    pace = a_pace()
    assert pace.contact is None
    pace.excuse(0.5)
    pace.arrived(BEGUN + 2.0, 1, data=data)
    pace.arrived(BEGUN + 5.0, 1, data=data)
    assert pace.contact == about(1.5)


class TestLag:
    def test_members_that_answer_at_once_are_not_late(self) -> None:
        assert lag([]) == 1.0
        assert lag([0.01, MEMBER_PING_SECONDS, 0.02]) == 1.0

    def test_few_members_do_not_make_a_group_late(self) -> None:
        assert lag([30.0, 30.0, 0.1, 0.1, 0.1]) == 1.0

    @pytest.mark.parametrize("late", [1.0, 3.0])
    def test_all_timeouts_of_a_late_group_are_longer(self, late: float) -> None:
        """The case seen: sixteen processes on two processors, most heard of after 1.4 s, one after 6 s."""
        assert lag([late * MEMBER_PING_SECONDS] * 3) == about(late)

        silent = a_pace()
        assert not silent.is_silent(BEGUN + late * FIRST_CONTACT_SECONDS - 0.1, late)
        assert silent.is_silent(BEGUN + late * FIRST_CONTACT_SECONDS, late)

        known = a_pace()
        last = sends(known, 0.001, 10)
        assert not known.is_silent(last + late * FLOOR_SECONDS - 0.1, late)
        assert known.is_silent(last + late * FLOOR_SECONDS, late)

        owing = a_pace()
        owing.owes(BEGUN, True)
        stall = BEGUN + late * STALLS * FLOOR_SECONDS
        owing.arrived(stall - 0.2, 5, data=False)
        assert owing.overdue(stall - 0.1, late) is None
        assert owing.overdue(stall, late) is not None


class TestAMemberWhoseSystemAnswers:
    """Its process is slow or stands still; a dead process's connections are closed, and a dead machine answers not."""

    def test_it_may_be_silent_up_to_the_limit(self) -> None:
        for pace in (a_pace(), a_pace(patience=3.0)):
            last = sends(pace, 0.001, 10)
            assert pace.overdue(last + LIMIT - 0.1, answers=True) is None
            assert pace.overdue(last + LIMIT, answers=True) == f"silent for {LIMIT:.1f} s"
        assert a_pace().overdue(BEGUN + LIMIT - 0.1, answers=True) is None, "it was never heard of"

    def test_when_it_stops_answering_the_silence_counts_from_its_beginning(self) -> None:
        pace = a_pace()
        last = sends(pace, 0.001, 10)
        assert pace.overdue(last + 10.0, answers=True) is None
        assert pace.overdue(last + 10.0) == "silent for 10.0 s"

    def test_while_it_is_silent_it_owes_no_part_either(self) -> None:
        pace = a_pace()
        last = sends(pace, 0.001, 10)
        pace.owes(last, True)
        assert pace.overdue(last + STALLS * FLOOR_SECONDS + 1.0, answers=True) is None

    def test_one_that_pings_and_sends_no_part_is_given_up_as_ever(self) -> None:
        pace = a_pace()
        last = sends(pace, 0.001, 10)
        pace.owes(last, True)
        end = last + STALLS * FLOOR_SECONDS
        for pings in range(1, 9):
            pace.arrived(last + pings * MEMBER_PING_SECONDS, 10, data=False)
        assert pace.overdue(end - 0.1, answers=True) is None
        assert pace.overdue(end, answers=True) == "sent no part of its contribution for 4.5 s"

    def test_one_that_is_back_has_time_for_its_part_but_rare_pings_buy_no_more_than_the_limit(self) -> None:
        pace = a_pace()
        now = begun = sends(pace, 0.001, 10)
        pace.owes(now, True)
        now += 6.5
        pace.arrived(now, 10, data=False)
        assert pace.overdue(now + FLOOR_SECONDS - 0.1, answers=True) is None
        while pace.overdue(now, answers=True) is None:
            now += LIMIT - 0.1
            pace.arrived(now, 10, data=False)
        assert now - begun < 2 * LIMIT + STALLS * FLOOR_SECONDS

    def test_after_anothers_doubt_its_answers_do_not_count(self) -> None:
        pace = a_pace()
        last = sends(pace, 0.001, 10)
        pace.doubt()
        assert pace.overdue(last + FLOOR_SECONDS, answers=True) == "silent for 1.5 s"


def test_a_doubted_member_that_never_gave_a_sign_has_no_more_time_than_others() -> None:
    pace = a_pace()
    pace.doubt()
    assert silence(pace, BEGUN) == about(FLOOR_SECONDS)


def test_a_member_that_pings_is_alive() -> None:
    pace = a_pace()
    for tick in range(1000):
        now = BEGUN + tick * MEMBER_PING_SECONDS
        pace.arrived(now, 5, data=False)
        assert pace.overdue(now + MEMBER_PING_SECONDS) is None


@pytest.mark.parametrize("seconds", [0.5, 1.0, 3.0])
def test_the_timeout_of_a_slow_link_is_several_parts(seconds: float) -> None:
    pace = a_pace()
    assert silence(pace, sends(pace, seconds, 3)) == about(PARTS * seconds)


@pytest.mark.parametrize("seconds", [0.1, 1.0, 4.0, 10.0])
def test_a_slow_member_that_moves_is_not_given_up(seconds: float) -> None:
    """Not even before its first whole part, and while it owes data."""
    pace = a_pace()
    pace.owes(BEGUN, True)
    now = BEGUN
    for _ in range(60):
        now += seconds / 8
        pace.arrived(now, PART // 8, data=True)
        for wait in (0.25, 0.5, 1.0):
            assert pace.overdue(now + wait * seconds / 8) is None


def test_the_announced_pace_counts_until_a_part_is_measured() -> None:
    pace = a_pace(prior=2.0)
    assert silence(pace, BEGUN) == about(PARTS * 2.0)
    pace.arrived(BEGUN, 5, data=False)
    assert silence(pace, BEGUN) == about(PARTS * 2.0)
    pace.arrived(BEGUN + 0.1, PART // 2, data=True)
    assert silence(pace, BEGUN + 0.1) == about(PARTS * 2.0)
    pace.arrived(BEGUN + 0.2, PART // 2, data=True)
    assert silence(pace, BEGUN + 0.2) == about(FLOOR_SECONDS), "it is faster than it was said to be"


def test_a_link_slower_than_announced_is_noticed_at_once() -> None:
    pace = a_pace(prior=0.1)
    pace.arrived(BEGUN, PART // 10, data=True)
    pace.arrived(BEGUN + 1.0, PART // 10, data=True)
    assert pace.part_seconds() == pytest.approx(10.0)
    assert silence(pace, BEGUN + 1.0) == about(PARTS * 10.0)


def test_the_first_arrival_does_not_measure_the_pace() -> None:
    """The time before it is the time of the connection."""
    pace = a_pace()
    pace.arrived(BEGUN + 3.0, PART, data=True)
    assert pace.part_seconds() == 0.0


def test_pings_do_not_measure_the_pace() -> None:
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


def pings(pace: ArrivalPace, begun: float) -> float:
    """Return the seconds after which a member that only pings is given up."""
    now = begun
    while True:
        pace.arrived(now, 5, data=False)
        if pace.overdue(now) is not None:
            return now - begun
        now += 0.01
        assert now < begun + 1000.0


class TestOwed:
    def test_a_live_member_that_sends_no_owed_data_is_given_up(self) -> None:
        pace = a_pace()
        pace.owes(BEGUN, True)
        assert pings(pace, BEGUN) == about(STALLS * FLOOR_SECONDS)
        assert (
            pace.overdue(BEGUN + STALLS * FLOOR_SECONDS + 0.1) == "sent no part of its contribution for 4.6 s"
        )
        assert not pace.is_silent(BEGUN + STALLS * FLOOR_SECONDS + 0.1), "its votes still arrive"

    def test_a_slow_member_has_more_time(self) -> None:
        pace = a_pace()
        now = sends(pace, 2.0, 2)
        pace.owes(now, True)
        assert pings(pace, now) == about(STALLS * PARTS * 2.0)

    def test_the_time_counts_from_the_last_owed_data(self) -> None:
        pace = a_pace()
        pace.owes(BEGUN, True)
        pace.arrived(BEGUN + 4.0, 1, data=True)
        assert pings(pace, BEGUN + 4.0) == about(STALLS * FLOOR_SECONDS)

    @pytest.mark.parametrize("before", ["it owed", "it has sent data", "this process stood still"])
    def test_a_member_that_owes_nothing_is_not_given_up_for_it(self, before: str) -> None:
        pace = a_pace()
        pace.arrived(BEGUN, 100, data=before == "it has sent data")
        if before == "it owed":
            pace.owes(BEGUN, True)
            pace.owes(BEGUN + 1.0, False)
        if before == "this process stood still":
            pace.excuse(20.0)
        for tick in range(1000):
            pace.arrived(BEGUN + tick, 5, data=False)
            assert pace.overdue(BEGUN + tick) is None

    def test_the_time_starts_anew_when_it_owes_again(self) -> None:
        pace = a_pace()
        pace.owes(BEGUN, True)
        pace.owes(BEGUN + 1.0, False)
        pace.owes(BEGUN + 100.0, True)
        assert pings(pace, BEGUN + 100.0) == about(STALLS * FLOOR_SECONDS)


class TestExcuse:
    def test_a_pause_of_this_process_is_no_silence(self) -> None:
        pace = a_pace()
        heard = sends(pace, 0.001, 2)
        pace.excuse(20.0)
        assert pace.overdue(heard + 20.0) is None
        assert silence(pace, heard + 20.0) == about(FLOOR_SECONDS)

    def test_a_pause_extends_the_time_of_first_contact(self) -> None:
        pace = a_pace()
        pace.excuse(20.0)
        assert silence(pace, BEGUN + 20.0) == about(FIRST_CONTACT_SECONDS)

    def test_a_pause_extends_the_time_for_owed_data(self) -> None:
        pace = a_pace()
        pace.owes(BEGUN, True)
        pace.excuse(20.0)
        assert pings(pace, BEGUN + 20.0) == about(STALLS * FLOOR_SECONDS)

    def test_a_pause_does_not_make_a_slow_link_look_fast(self) -> None:
        """Data that waited meanwhile is read before the length of the pause is known."""
        pace = a_pace()
        now = sends(pace, 2.0, 3) + 5.0
        pace.arrived(now, PART // 4, data=True)
        pace.excuse(5.0)
        assert silence(pace, sends(pace, 2.0, 1, now)) >= PARTS * 1.5


class TestPatience:
    """A member that was silent before, and came back, has more time."""

    def test_it_is_waited_for_before_and_after_its_pace_is_known(self) -> None:
        assert silence(a_pace(patience=9.0), BEGUN) == about(9.0)
        pace = a_pace(patience=9.0)
        assert silence(pace, sends(pace, 0.001, 10)) == about(9.0)

    def test_it_takes_no_time_from_a_slow_link(self) -> None:
        pace = a_pace(patience=2.0)
        assert silence(pace, sends(pace, 3.0, 3)) == about(PARTS * 3.0)

    @pytest.mark.parametrize("limit", [1.0, 3.0])
    def test_no_patience_is_longer_than_the_limit(self, limit: float) -> None:
        assert silence(a_pace(limit=limit, patience=1e9), BEGUN) == about(limit)
        owing = a_pace(limit=limit, patience=1e9)
        owing.owes(BEGUN, True)
        assert pings(owing, BEGUN) == about(limit)

    def test_the_time_for_owed_data_grows_by_it(self) -> None:
        pace = a_pace(patience=9.0)
        pace.owes(BEGUN, True)
        assert pings(pace, BEGUN) == about(STALLS * FLOOR_SECONDS + 9.0)

    def test_it_ends_when_another_member_has_given_this_one_up(self) -> None:
        pace = a_pace(patience=9.0)
        heard = sends(pace, 0.001, 10)
        assert pace.overdue(heard + FLOOR_SECONDS) is None
        pace.doubt()
        assert pace.overdue(heard + FLOOR_SECONDS) is not None


class TestLongest:
    def test_the_longest_silence_between_two_arrivals_is_noted(self) -> None:
        pace = a_pace()
        for moment in (0.0, 0.5, 3.0, 3.5):
            pace.arrived(BEGUN + moment, 5, data=False)
        assert pace.longest == pytest.approx(2.5)

    def test_the_time_before_the_first_arrival_does_not_count(self) -> None:
        """It is the time of the connection, and the other one may have begun later."""
        pace = a_pace()
        pace.arrived(BEGUN + 3.0, 5, data=False)
        assert pace.longest == 0.0

    def test_a_pause_of_this_process_does_not_count(self) -> None:
        pace = a_pace()
        pace.arrived(BEGUN, 5, data=False)
        pace.excuse(20.0)
        pace.arrived(BEGUN + 20.5, 5, data=False)
        assert pace.longest == pytest.approx(0.5)

    def test_a_lost_member_counts_as_silent_for_as_long_as_a_stranger_may_be(self) -> None:
        pace = a_pace()
        heard = sends(pace, 0.001, 10)
        assert pace.silence_of_lost(heard + FLOOR_SECONDS) == FIRST_CONTACT_SECONDS
        assert pace.silence_of_lost(heard + 9.0) == pytest.approx(9.0)


class TestSilences:
    def test_a_member_may_be_silent_for_longer_than_it_was(self) -> None:
        silences = Silences()
        assert silences.patience("a", BEGUN) == 0.0
        silences.note("a", BEGUN, 3.0)
        silences.note("a", BEGUN + 1.0, 2.0)
        assert silences.patience("a", BEGUN + 2.0) == MARGIN * 3.0
        assert silences.patience("b", BEGUN + 2.0) == 0.0

    def test_silences_that_are_as_common_as_pings_are_not_kept(self) -> None:
        silences = Silences()
        silences.note("a", BEGUN, FLOOR_SECONDS / MARGIN)
        assert silences.patience("a", BEGUN) == 0.0

    def test_a_silence_is_forgotten_by_and_by(self) -> None:
        silences = Silences()
        silences.note("a", BEGUN, 4.0)
        for halves in range(5):
            assert silences.patience("a", BEGUN + halves * MAX_BACKOFF_SECONDS) == MARGIN * 4.0 / 2**halves
        silences.note("a", BEGUN + 2 * MAX_BACKOFF_SECONDS, 2.0)
        assert silences.patience("a", BEGUN + 2.5 * MAX_BACKOFF_SECONDS) == MARGIN * 2.0

    def test_a_bounded_number_of_members_is_remembered(self) -> None:
        silences = Silences()
        for number in range(MAX_SILENT + 1):
            silences.note(str(number), BEGUN, 4.0)
        assert silences.patience("0", BEGUN) == 0.0
        assert silences.patience("1", BEGUN) == MARGIN * 4.0
        silences.note("1", BEGUN, 1.0)
        silences.note("new", BEGUN, 4.0)
        assert silences.patience("1", BEGUN) == MARGIN * 4.0, "it was silent lately"
        assert silences.patience("2", BEGUN) == 0.0
