"""The bytes of states that a peer sends, counted for its subscribers."""

from __future__ import annotations

from p2pavg.state.donor.uploads import QUIET_REPORTS, Upload, Uploads


def test_bytes_to_several_peers_are_one_report() -> None:
    uploads = Uploads()
    assert uploads.report(100.0) is None
    uploads.note("a", 300)
    uploads.note("b", 200)
    uploads.note("a", 500)
    assert uploads.report(102.0) == Upload(1000, 500.0, 2)


def test_nothing_new_is_no_report() -> None:
    uploads = Uploads()
    uploads.note("a", 300)
    uploads.report(1.0)
    assert uploads.report(2.0) is None


def test_the_end_is_reported_once_and_the_next_upload_counts_from_nothing() -> None:
    uploads = Uploads()
    uploads.note("a", 300)
    assert [uploads.report(1.0 + number) for number in range(QUIET_REPORTS + 2)] == [
        Upload(300, 300.0, 1),
        *[None] * (QUIET_REPORTS - 1),
        Upload(300, 0.0, 0, is_over=True),
        None,
    ]
    uploads.note("a", 7)
    assert uploads.report(QUIET_REPORTS + 3.0) == Upload(7, 7.0, 1)


def test_a_pause_within_an_upload_ends_it_not() -> None:
    uploads = Uploads()
    uploads.note("a", 300)
    uploads.report(1.0)
    assert uploads.report(2.0) is None
    uploads.note("a", 300)
    assert uploads.report(3.0) == Upload(600, 300.0, 1)
