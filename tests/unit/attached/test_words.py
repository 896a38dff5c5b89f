"""The word of a peer is that of all its processes together."""

from __future__ import annotations

from p2pavg.attached.words import joint_progress, joint_word
from p2pavg.optim.coordination.progress import Progress, encode_progress, read_progress

STATE, LATER = bytes(32), bytes([1]) * 32


def progress(
    samples: float, *, epoch: int = 3, state: bytes = STATE, waiting: bool = False, batch: float = 1.0
) -> Progress:
    return Progress(
        epoch=epoch,
        state=state,
        samples=samples,
        samples_per_second=10.0,
        waiting=waiting,
        batch_seconds=batch,
        started=epoch > 0,
    )


def test_samples_and_speeds_add_up_and_the_slowest_batch_counts() -> None:
    joint = joint_progress({"a": progress(4.0, waiting=True), "b": progress(8.0, batch=5.0)})
    assert (joint.samples, joint.samples_per_second, joint.batch_seconds) == (12.0, 20.0, 5.0)
    assert not joint.waiting, "one of them still computes"


def test_a_peer_waits_when_all_its_processes_wait() -> None:
    assert joint_progress({name: progress(4.0, waiting=True) for name in "ab"}).waiting


def test_processes_with_other_parameters_do_not_count() -> None:
    said = {"a": progress(4.0), "b": progress(4.0), "c": progress(99.0, epoch=9, state=LATER)}
    assert joint_progress(said).samples == 8.0


def test_of_as_many_the_later_state_counts() -> None:
    """One of two has taken the update already; the other will in a moment."""
    joint = joint_progress({"a": progress(4.0), "b": progress(0.0, epoch=4, state=LATER)})
    assert (joint.epoch, joint.state, joint.samples) == (4, LATER, 0.0)


def test_sums_stay_in_range() -> None:
    assert joint_progress({name: progress(1e15) for name in "abc"}).samples == 1e15


def test_words_that_are_malformed_are_left_out() -> None:
    said = {"a": encode_progress(progress(4.0)), "b": b"\xc1", "c": b""}
    assert read_progress(joint_word("progress", said)).samples == 4.0
    assert joint_word("progress", {"b": b"\xc1"}) == b""


def test_on_other_boards_the_first_process_speaks_for_all() -> None:
    assert joint_word("recipes", {"b": b"2", "a": b"1"}) == b"1"
    assert joint_word("recipes", {}) == b""
