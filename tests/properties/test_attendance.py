"""Limits of the effect of strangers' words, whatever and whenever they publish."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from p2pavg.optim.coordination.attendance import CLAIM_MARGIN, FIRST_BATCHES, NEWCOMERS, PeerTrust
from p2pavg.optim.coordination.progress import (
    MAX_BATCH_SECONDS,
    MAX_EPOCH,
    MAX_SAMPLES,
    Average,
    LeftBehind,
    PeerProgress,
    WaitForPeers,
    decide,
    survey,
)

STATES = [number.to_bytes(32, "big") for number in range(4)]
SPEED, BATCH_SECONDS = 4.0, 2.0
KNOWN = ("a", "b")


def honest(epoch: int, samples: float, *, waiting: bool = False) -> PeerProgress:
    return PeerProgress(
        epoch=epoch,
        state=STATES[epoch],
        samples=samples,
        samples_per_second=SPEED,
        waiting=waiting,
        batch_seconds=BATCH_SECONDS,
        started=epoch > 0,
    )


lies = st.builds(
    PeerProgress,
    epoch=st.integers(0, 3) | st.integers(0, MAX_EPOCH),
    state=st.sampled_from(STATES) | st.binary(min_size=32, max_size=32),
    samples=st.floats(0.0, MAX_SAMPLES),
    samples_per_second=st.floats(0.0, MAX_SAMPLES),
    waiting=st.booleans(),
    batch_seconds=st.floats(0.0, MAX_BATCH_SECONDS),
    started=st.booleans(),
)
strangers = st.dictionaries(st.text("xyz", min_size=1, max_size=4), lies, max_size=64)


@dataclass
class Moment:
    after: float
    words: dict[str, PeerProgress]


moments = st.lists(st.builds(Moment, st.floats(0.0, 100.0), strangers), min_size=1, max_size=8)


def running(samples: float) -> tuple[PeerTrust, dict[str, PeerProgress]]:
    """Return a peer's attendance after an update with two others, and the others' words."""
    attendance = PeerTrust(0.0)
    attendance.receive(honest(0, 8.0), {peer: honest(0, 8.0) for peer in KNOWN}, 0.0)
    attendance.took(KNOWN, honest(0, 8.0), {peer: honest(0, 8.0) for peer in KNOWN}, 0.0)
    return attendance, {peer: honest(1, samples) for peer in KNOWN}


def decided(
    attendance: PeerTrust, mine: PeerProgress, words: dict[str, PeerProgress], now: float, **how: Any
) -> Any:
    seen = survey(mine, attendance.receive(mine, words, now))
    return decide(mine, seen, least=2, settled=attendance.is_settled(mine, seen.peers, 1, now), **how)


@given(moments, st.floats(1.0, 1e6))
def test_strangers_never_make_a_peer_behind_whose_companions_are_with_it(
    said: list[Moment], target: float
) -> None:
    attendance, words = running(8.0)
    now = 0.0
    for moment in said:
        now += moment.after
        assert not isinstance(
            decided(attendance, honest(1, 8.0), moment.words | words, now, target=target), LeftBehind
        )


@given(moments)
def test_strangers_samples_are_limited_by_those_of_known_peers(said: list[Moment]) -> None:
    attendance, words = running(8.0)
    now = 0.0
    for moment in said:
        now += moment.after
        seen = attendance.receive(honest(1, 8.0), moment.words | words, now)
        new = [other for other in seen if other.peer_id not in KNOWN and other.progress.state == STATES[1]]
        assert sum(other.samples for other in new) <= 24.0 * (1 + 1e-9)
        assert all(other.samples <= other.progress.samples for other in seen)
        assert sum(other.expected for other in new) <= NEWCOMERS


@given(moments)
def test_at_the_start_samples_are_limited_by_the_time_since_the_first_word(said: list[Moment]) -> None:
    attendance, now, mine = PeerTrust(0.0), 0.0, honest(0, 8.0)
    for moment in said:
        now += moment.after
        for other in attendance.receive(mine, moment.words, now):
            assert other.samples <= FIRST_BATCHES * 8.0 + CLAIM_MARGIN * SPEED * now


@given(moments)
def test_strangers_delay_waiting_peers_for_a_bounded_time(said: list[Moment]) -> None:
    """This holds for any changes of their words."""
    attendance, _ = running(8.0)
    words = {peer: honest(1, 8.0, waiting=True) for peer in KNOWN}
    mine, now = honest(1, 8.0, waiting=True), 0.0
    decisions = []
    for moment in said:
        now += moment.after
        decisions.append((now, decided(attendance, mine, moment.words | words, now, target=float("inf"))))
    late = [decision for at, decision in decisions if at >= decisions[0][0] + 30.0]
    assert not any(isinstance(decision, WaitForPeers) for decision in late)
    assert all(isinstance(decision, Average) and decision.peers <= 3 + NEWCOMERS for decision in late)


@given(moments, st.integers(0, 3))
def test_any_words_are_counted_without_an_error(said: list[Moment], epoch: int) -> None:
    attendance, now = PeerTrust(0.0), 0.0
    for moment in said:
        now += moment.after
        mine = honest(epoch, 8.0)
        seen = attendance.receive(mine, moment.words, now)
        assert {other.peer_id for other in seen} <= moment.words.keys()
        attendance.no_group_formed(mine, moment.words, now)
        attendance.took(list(moment.words)[:2], mine, moment.words, now)
        attendance.receive(mine, moment.words, now)
