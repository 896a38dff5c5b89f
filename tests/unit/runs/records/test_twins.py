"""The marks by which a process tells that another one has its identity."""

from __future__ import annotations

from p2pavg.runs.records.twins import MarksSeen, ProcessMark, Twin

MINE = ProcessMark(100.0, b"m" * 16)
BEFORE, AFTER = ProcessMark(50.0, b"o" * 16), ProcessMark(150.0, b"o" * 16)


def test_own_marks_are_of_no_other_process() -> None:
    seen = MarksSeen(MINE)
    assert [seen.see(MINE, sequence) for sequence in (1, 2, 3)] == [Twin.NONE] * 3


def test_the_mark_of_a_process_that_has_ended_is_not_renewed() -> None:
    """This one was started again: the record of its earlier process lives on for a while, at some of its keepers."""
    seen = MarksSeen(MINE)
    assert [seen.see(BEFORE, sequence) for sequence in (7, 7, 7)] == [Twin.NONE] * 3


def test_a_mark_that_is_renewed_is_of_a_process_that_runs() -> None:
    assert [MarksSeen(MINE).see(BEFORE, 7), MarksSeen(MINE).see(AFTER, 7)] == [Twin.NONE] * 2
    for mark, twin in ((BEFORE, Twin.EARLIER), (AFTER, Twin.LATER)):
        seen = MarksSeen(MINE)
        seen.see(mark, 7)
        assert seen.see(mark, 8) is twin


def test_two_processes_agree_which_of_them_is_the_later_one() -> None:
    """Also if both began at the same moment."""
    other = ProcessMark(MINE.began, b"n" * 16)
    here, there = MarksSeen(MINE), MarksSeen(other)
    for sequence in (1, 2):
        verdicts = here.see(other, sequence), there.see(MINE, sequence)
    assert verdicts == (Twin.LATER, Twin.EARLIER)
