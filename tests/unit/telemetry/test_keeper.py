"""The status that a peer publishes follows from its events."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pavg.base.limits import CALM_LOOK_SECONDS
from p2pavg.telemetry.events import AnyEvent, Drifted, PeerSeen, RoundEnded, RoundKind, UpdateTaken
from p2pavg.telemetry.keeper import SeriesHistory, StatusKeeper
from p2pavg.telemetry.status import Activity, PeerStatus, encode_status, key_of, read_status
from tests.unit.metrics.fakes import moved, progressed

ROUND = RoundEnded(
    time=100.0,
    run_id="run",
    result=RoundKind.SUCCESS,
    duration=3.0,
    exchange_duration=1.0,
    group_id="ab" * 32,
    members=("me", "one", "two"),
    contributors=("me", "one"),
    auxiliaries=("two",),
    sent={"lane": 10, "stream": 5},
    received={"lane": 20},
    ways={"one": "lane", "two": "relayed"},
    samples=8.0,
    own_samples=4.0,
    metrics={"loss": 2.0},
)
UPDATE = UpdateTaken(
    time=101.0,
    run_id="run",
    epoch=1,
    lineage=bytes(range(32)),
    group_id="ab" * 32,
    peers=("me", "one"),
    samples=8.0,
    metrics={"accuracy": 0.5, "loss": 2.0, "samples_per_second": 10.0},
    grad_norm=1.5,
    learning_rates=(0.1, 0.2),
)
FAILED = replace(ROUND, result=RoundKind.FAILED, reason="one was lost: \x1b[31mgone", lost={"one": "gone"})


def after(*events: AnyEvent, now: float = 102.0, mbps: tuple[float, float] = (1.0, 2.0)) -> PeerStatus:
    keeper = StatusKeeper(PeerStatus(name="me"))
    for event in events:
        keeper.take(event)
    status = keeper.status(now=now, uptime=5.0, reach=("public", "public"), mbps=mbps)
    assert read_status(encode_status(status)) == status
    return status


def test_round_is_in_the_totals_and_in_the_list() -> None:
    status = after(ROUND)
    assert (status.total_rounds, status.total_sent, status.total_received) == (1, 15, 20)
    assert status.total_samples == 4.0
    assert (status.lanes, status.streams, status.relayed) == ((key_of("one"),), (), (key_of("two"),))
    (claim,) = status.rounds
    assert (claim.group, claim.members, claim.contributors) == (b"\xab" * 8, 3, 2)
    assert (claim.sent, claim.received, claim.ended) == (15, 20, 100.0)


def test_failed_round_keeps_the_partners_and_names_the_lost_without_control_characters() -> None:
    status = after(ROUND, FAILED)
    assert (status.total_rounds, status.total_failures) == (1, 1)
    assert status.lanes == (key_of("one"),)
    assert status.rounds[0].lost == (key_of("one"),)
    assert status.rounds[0].reason == "one was lost:  [31mgone"


def test_only_the_last_rounds_are_kept() -> None:
    many = [replace(ROUND, time=float(at)) for at in range(20)]
    assert [claim.ended for claim in after(*many).rounds] == [19.0, 18.0, 17.0, 16.0, 15.0, 14.0]


def test_update_sets_epoch_lineage_metrics_and_history_of_the_loss() -> None:
    status = after(UPDATE, replace(UPDATE, epoch=2, metrics={"loss": 1.5}))
    assert (status.epoch, status.lineage) == (2, bytes(range(8)))
    assert (status.grad_norm, status.learning_rate) == (1.5, 0.1)
    assert status.history_of == "loss"
    assert status.history == ((1, 2.0), (2, 1.5))
    assert status.metrics == (("loss", 1.5),)


def test_marks_are_the_last_multiples() -> None:
    updates = [replace(UPDATE, epoch=at, lineage=bytes([at]) * 32) for at in range(1, 40)]
    assert after(*updates).marks == ((32, b"\x20" * 8), (36, b"\x24" * 8))


def test_rounds_without_an_optimizer_have_metrics_too() -> None:
    assert after(ROUND, replace(ROUND, metrics={"loss": 1.0})).history == ((1, 2.0), (2, 1.0))


@pytest.mark.parametrize(
    ("waiting", "follows", "activity"),
    [(False, False, Activity.COMPUTING), (True, False, Activity.WAITING), (True, True, Activity.FOLLOWING)],
)
def test_progress_sets_the_activity(waiting: bool, follows: bool, activity: Activity) -> None:
    status = after(progressed(waiting=waiting, follows=follows))
    assert (status.activity, status.epoch, status.samples_per_second) == (activity, 3, 5.0)


def test_transfer_is_over_when_it_has_not_moved_for_a_while() -> None:
    sent = moved("upload", 1, 2, time=100.0)
    assert [transfer.is_upload for transfer in after(sent, now=101.0).transfers] == [True]
    assert after(sent, now=100.0 + CALM_LOOK_SECONDS).transfers == ()


def test_drift_is_shown_until_all_agree() -> None:
    drifted = Drifted(time=1.0, run_id="run", sentence="1 peer says")
    assert after(drifted).drift == "1 peer says"
    assert after(drifted, Drifted(time=2.0, run_id="run", sentence="")).drift == ""


def test_values_out_of_range_are_brought_into_it() -> None:
    """Other peers would refuse the whole status, and this peer would vanish from their lists."""
    wild = replace(UPDATE, grad_norm=math.inf, learning_rates=(math.nan,), metrics={"loss": 1e101})
    ended = replace(ROUND, sent={"lane": 2**60}, duration=-1.0, reason="x" * 500)
    status = after(wild, ended, mbps=(math.inf, -1.0))
    assert status.learning_rate == 0.0
    assert status.rounds[0].duration == 0.0


def test_version_grows_with_what_changes_the_status_only() -> None:
    keeper = StatusKeeper(PeerStatus())
    keeper.take(PeerSeen(time=1.0, run_id="run", peer_id="one"))
    assert keeper.version == 0
    keeper.take(ROUND)
    assert keeper.version == 1


@given(st.integers(1, 2000), st.integers(1, 7))
def test_history_spans_the_whole_run_in_few_points(updates: int, step: int) -> None:
    history = SeriesHistory(32)
    for at in range(1, updates + 1, step):
        history.add(at, float(at))
    points = history.points
    last = 1 + (updates - 1) // step * step
    assert len(points) <= 32
    assert points[-1] == (last, float(last))
    assert points[0][0] == 1
    assert [at for at, _ in points] == sorted({at for at, _ in points})
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(points)]
    assert not gaps or max(gaps) <= step * max(1, updates / step / 4)


def test_history_goes_back_with_the_run() -> None:
    history = SeriesHistory(32)
    for at in (1, 2, 3, 4, 2):
        history.add(at, float(at))
    assert [at for at, _ in history.points] == [1, 2]
