"""A run whose peers are killed and replaced, with the real optimizers: a short form of ``scripts/faults churn``."""

from __future__ import annotations

import itertools

import pytest

from tests.simulation.churn import Course, Setting, findings, play

pytestmark = pytest.mark.one_worker

PEERS = 5
KILLS = 2
UPDATES = 3
"""In a state of so few bytes, messages take longer than the bytes: a peer may just miss the beginning of a round."""


@pytest.fixture(scope="module")
def course() -> Course:
    return play(
        Setting(
            peers=PEERS, seconds=50.0, every=20.0, elements=50_000, log_updates=4, batch_seconds=(0.3, 0.5)
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
