"""A run whose peers are killed and replaced, with the real optimizers: a short form of ``scripts/faults churn``."""

from __future__ import annotations

import itertools

import pytest

from tests.simulation.churn import Course, Setting, findings, play

pytestmark = pytest.mark.one_worker

PEERS = 5
KILLS = 2
LENGTH = 120
"""Samples of the data: an epoch takes five updates."""
MOST = 0.06 * LENGTH
"""Samples of an epoch that may be missed, or repeated: those that die with a peer, and those that two peers take before
they know of each other."""
UPDATES = 3
"""In a state of so few bytes, messages take longer than the bytes: a peer may just miss the beginning of a round."""


@pytest.fixture(scope="module")
def course() -> Course:
    return play(
        Setting(
            peers=PEERS,
            seconds=50.0,
            every=20.0,
            elements=50_000,
            length=LENGTH,
            log_updates=4,
            batch_seconds=(0.3, 0.5),
        )
    )


def test_all_peers_of_a_lineage_hold_the_same_bits(course: Course) -> None:
    assert course.bits
    assert all(len(bits) == 1 for bits in course.bits.values())
    assert all(len(states) == 1 for states in course.lineages.values())


def test_peers_that_join_load_a_snapshot_and_take_part_soon(course: Course) -> None:
    joiners = course.joiners()
    assert len(joiners) == KILLS
    for life in joiners:
        followed = life.followed[0]
        assert followed.replayed < followed.missed, "it replayed all updates since the run began"
        assert any(update.contributed for update in life.updates)
    assert not findings(course, UPDATES)


def test_a_kill_and_a_join_delay_no_update_for_long(course: Course) -> None:
    times = sorted(at for at, _ in course.samples.values())
    longest = max(after - before for before, after in itertools.pairwise(times))
    assert longest < 3 * course.update_seconds()


def test_the_peers_together_take_each_sample_of_an_epoch_once(course: Course) -> None:
    assert sum(course.counted.values()) == sum(samples for _, samples in course.samples.values())
    # What is left of an epoch when the next one has begun is in the lanes of some.
    whole = range(max(epoch for epoch, _ in course.counted) - 2)
    assert len(whole) >= 2
    for epoch in whole:
        taken = {sample: times for (each, sample), times in course.counted.items() if each == epoch}
        missed, repeated = LENGTH - len(taken), sum(taken.values()) - len(taken)
        assert max(missed, repeated) <= MOST, f"epoch {epoch}: {missed} missed, {repeated} repeated"
