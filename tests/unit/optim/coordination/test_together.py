"""The peers that an optimizer expects, and the results that it accepts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch

import p2pavg
from p2pavg.base.limits import GLANCE_SECONDS, LOOK_SECONDS
from p2pavg.base.result import EXCHANGES, Failed, InProgress, NoPeers, RoundResult, Success
from p2pavg.blocking import Averager
from p2pavg.optim.base.state import Lineage
from p2pavg.optim.coordination.attendance import MIN_ABSENCE_SECONDS
from p2pavg.optim.coordination.progress import Average, Compute, PeerProgress, WaitForPeers
from p2pavg.optim.coordination.together import RoundCoordinator
from p2pavg.optim.coordination.watch import DriftMonitor
from p2pavg.runs.records.board import Entry
from p2pavg.telemetry.events import AnyEvent, Waits
from p2pavg.telemetry.hub import Events

PARAMETERS = [torch.ones(3)]


class Word:
    """A board with the other peers' entries, which the test sets."""

    version = 0

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.mine: list[bytes] = []
        self.looks = 0

    def poll(self) -> None:
        self.looks += 1

    def publish(self, value: bytes, *, now: bool = False) -> None:
        self.mine.append(value)

    def wait(self, version: int, timeout: float) -> None:
        raise AssertionError("nothing is to be waited for")


class Rounds:
    """An averager whose rounds have results that the test sets."""

    peer_id = "me"
    weight = 1.0
    config = p2pavg.AveragingConfig(run_id="run")

    def __init__(self) -> None:
        self.word = Word()
        self.events = Events()
        self.round_state: bytes | None = None
        self.results: list[RoundResult] = []
        self.calls = 0
        self.on_step: Callable[[int], None] = lambda _: None
        self.is_looking = False
        self.stopped: list[str] = []
        self.waits: list[float] = []

    def board(self, topic: str, look_seconds: float = LOOK_SECONDS) -> Word:
        return self.word

    def expect(self, peers: object) -> None:
        """Need no hint."""

    def step(self, *, wait: float, **_: Any) -> RoundResult:
        self.calls += 1
        self.waits.append(wait)
        self.on_step(self.calls)
        return self.results.pop(0)

    def cancel_matchmaking(self, reason: str) -> bool:
        self.stopped.append(reason)
        return self.is_looking


class Company:
    """One peer's coordination with others."""

    def __init__(self, round_state: bytes | None = None, *, peers_to_start: int = 1, **options: Any) -> None:
        self.rounds = Rounds()
        self.rounds.round_state = round_state
        self.together = RoundCoordinator(
            cast(Averager, self.rounds),
            PARAMETERS,
            target=float("inf"),
            peers_to_start=peers_to_start,
            sync_timeout=5.0,
            watch=DriftMonitor(cast(Averager, self.rounds), every=0, labels=()),
            **options,
        )
        self._sequence = 0

    def says(self, peer: str, *, state: bytes | None = None, epoch: int = 0, waiting: bool = True) -> None:
        self._sequence += 1
        lineage = self.together.run.lineage
        progress = PeerProgress(
            epoch=lineage.epoch if state is None else epoch,
            state=lineage.state if state is None else state,
            samples=1.0,
            samples_per_second=1.0,
            waiting=waiting,
        )
        self.rounds.word.entries[peer] = Entry(progress.encode(), self._sequence, 1e12)

    def took(self, *peers: str, lost: Mapping[str, str] | None = None) -> None:
        self.together.took(success(*peers, lost=lost))
        self.together.run.publish(1.0, waiting=True)

    @property
    def counted(self) -> int:
        return self.together.run.survey().peers


def success(*peers: str, lost: Mapping[str, str] | None = None) -> Success:
    return Success(
        averaged=[],
        peers=("me", *peers),
        weights={},
        total_weight=1.0,
        compression_ratio=1.0,
        bytes_sent=0,
        bytes_received=0,
        duration=0.0,
        exchange_duration=0.0,
        group_id="00" * 32,
        share=(0, 0),
        lost=lost or {},
    )


@pytest.fixture
def company() -> Company:
    return Company()


class TestWanted:
    """An optimizer of whose run a step is wanted, while its loop is in the step of another run's."""

    def test_the_update_that_waits_for_this_peer_wants_a_step(self, company: Company) -> None:
        company.together.computed(1.0)
        company.together.run.publish(1.0, waiting=False)
        assert not company.together.wants_step(time.monotonic()), "no other peer is there"
        company.says("a", waiting=False)
        assert not company.together.wants_step(time.monotonic()), "it still computes"
        company.says("a", waiting=True)
        assert company.together.wants_step(time.monotonic())

    def test_a_due_update_wants_no_step_after_a_round_that_failed(self, company: Company) -> None:
        """Else a run whose rounds fail would keep the loop from its other runs."""
        company.says("a")
        company.took("a")
        company.together.run.publish(1.0, waiting=True)
        company.says("a")
        assert company.together.wants_step(time.monotonic())
        company.rounds.results = [Failed(reason="a member was lost", contribution_used=False)]
        company.together.average(2)
        assert not company.together.wants_step(time.monotonic())
        company.together.computed(1.0)
        assert company.together.wants_step(time.monotonic()), "the next step may do better"

    def test_a_due_update_to_which_no_peer_came_wants_a_step_as_soon_as_one_says_something_new(
        self, company: Company
    ) -> None:
        """Two peers that have waited in vain, each in another run's round, would swap their places for ever."""
        company.says("a")
        company.took("a")
        company.together.run.publish(1.0, waiting=True)
        company.says("a", waiting=False)
        company.rounds.results = [NoPeers(reason="no other peer was ready by the deadline")]
        company.together.average(2)
        assert not company.together.wants_step(time.monotonic())
        company.says("a", waiting=True)
        assert company.together.wants_step(time.monotonic())

    def test_an_optimizer_that_has_waited_in_vain_to_start_wants_a_step_when_one_more_peer_has_come(
        self,
    ) -> None:
        company = Company(peers_to_start=3)
        company.together.computed(1.0)
        company.together.run.publish(1.0, waiting=True)
        company.says("a")
        assert company.together.wants_step(time.monotonic())
        company.together.patience = 0.0
        assert isinstance(company.together.decide_when_all_are_ready(), WaitForPeers)
        assert not company.together.wants_step(time.monotonic())
        company.says("b")
        assert company.together.wants_step(time.monotonic())

    def test_an_optimizer_that_the_loop_no_longer_steps_wants_none(self, company: Company) -> None:
        company.together.computed(1.0)
        company.says("a")
        assert company.together.wants_step(time.monotonic())
        assert not company.together.wants_step(time.monotonic() + MIN_ABSENCE_SECONDS)
        company.together.run.end()  # its averager is closed
        assert not company.together.wants_step(time.monotonic())


def test_a_companion_is_waited_for_until_it_has_had_its_time(
    company: Company, monkeypatch: pytest.MonkeyPatch
) -> None:
    company.says("a")
    before = company.together.run.lineage
    company.took("a")
    assert isinstance(company.together.run.decide(), WaitForPeers), (
        "it has yet to say that it took the update too"
    )
    company.says("a", state=before.state, epoch=before.epoch)
    assert isinstance(company.together.run.decide(), WaitForPeers)
    later = time.monotonic() + MIN_ABSENCE_SECONDS + 1.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert isinstance(company.together.run.decide(), Compute), "it is gone, and no other peer is present"


def test_peer_lost_in_a_round_is_no_companion(company: Company) -> None:
    company.says("a")
    company.took("a", lost={"a": "cut off"})
    assert company.counted == 1


def test_result_for_replaced_parameters_is_discarded(company: Company) -> None:
    """This holds even if parameters of the same update were loaded: the contributed ones were different."""
    lineage = company.together.run.lineage
    for loaded in (Lineage(7, b"7" * 32), lineage):
        company.rounds.results = [
            InProgress(ready_peers=1, target_size=2, reason="it runs"),
            success("a"),
            success("a"),
        ]
        company.rounds.round_state = lineage.state
        company.together.is_at(loaded)
        assert isinstance(company.together.poll(), InProgress)
        result = company.together.average(2)
        assert isinstance(result, Failed)
        assert result.contribution_used is True
        assert "replaced" in result.reason
        assert result.code is p2pavg.FailedCode.PARAMETERS_REPLACED
        company.rounds.round_state = None
        assert isinstance(company.together.average(2), Success)


class Later:
    """The states of an optimizer whose run may begin again from a later checkpoint than this peer's."""

    def __init__(self) -> None:
        self.reason = ""

    def poll(self) -> None:
        """Offer nothing."""

    def has_later(self) -> str:
        return self.reason

    def pauses(self, seen: object) -> str:
        return ""


def test_a_later_checkpoint_is_fetched_before_a_round_begins(company: Company) -> None:
    later = Later()
    company.together.share(later)
    company.says("a")
    company.together.run.publish(1.0, waiting=True)
    assert isinstance(company.together.decide_when_all_are_ready(), Average)
    later.reason = "the run begins again from a checkpoint of update 9"
    assert company.together.decide_when_all_are_ready() == Compute(later.reason)


def test_a_later_checkpoint_ends_a_search(company: Company) -> None:
    """Nothing else would: the peer that has it takes part in no round of this one's state."""
    later = Later()
    company.together.share(later)
    company.says("a")
    looks, stopped = InProgress(ready_peers=1, target_size=2, reason="it looks"), NoPeers(reason="stopped")
    company.rounds.results, company.rounds.is_looking = [looks, looks, stopped], True

    def appears(calls: int) -> None:
        later.reason = "the run begins again" if calls == 2 else ""

    company.rounds.on_step = appears
    assert company.together.average(2) == stopped
    assert company.rounds.stopped == ["the run begins again"]


@pytest.mark.parametrize("is_looking", [True, False])
def test_search_ends_when_this_peer_is_behind(company: Company, is_looking: bool) -> None:
    """No other peer will join the search. A round that has a group goes on, and may yet be the update of the others."""
    company.says("a")
    runs = InProgress(ready_peers=1, target_size=2, reason="it looks for peers" if is_looking else EXCHANGES)
    ends = p2pavg.NoPeers(reason="stopped") if is_looking else success("a")
    company.rounds.results = [runs, runs, ends]
    company.rounds.is_looking = is_looking

    def go_on(calls: int) -> None:
        if calls == 2:
            company.says("a", state=b"x" * 32, epoch=9)

    company.rounds.on_step = go_on
    assert company.together.average(2) == ends
    assert company.rounds.results == []
    assert company.rounds.stopped == ["1 peer is at epoch 9; 1 with this one at epoch 0"]


def test_a_round_that_runs_is_waited_for_with_the_peers_with_which_it_began(company: Company) -> None:
    """It was looked at as one of two peers: with a third one, matchmaking that was fine was cancelled."""
    for peer in ("a", "b"):
        company.says(peer)
    company.rounds.results = [
        InProgress(reason="looking", ready_peers=2, target_size=3),
        InProgress(reason="looking", ready_peers=2, target_size=3),
        success("a", "b"),
    ]
    company.together.begin_round(3)
    assert isinstance(company.together.average(), Success)
    assert company.rounds.stopped == []


def test_a_running_search_ends_when_a_peer_is_gone(company: Company) -> None:
    for peer in ("a", "b"):
        company.says(peer)
    company.rounds.is_looking = True
    company.rounds.results = [
        InProgress(reason="looking", ready_peers=2, target_size=3),
        InProgress(reason="looking", ready_peers=2, target_size=3),
        success("a"),
    ]
    company.together.begin_round(3)
    del company.rounds.word.entries["b"]
    company.together.average()
    assert company.rounds.stopped == ["a peer is no longer waited for"]


@pytest.mark.parametrize(("batch", "grace"), [(0.1, MIN_ABSENCE_SECONDS), (5.0, 15.0), (20.0, 60.0)])
def test_a_late_peer_is_waited_for_as_long_as_the_average_is_not_needed(
    monkeypatch: pytest.MonkeyPatch, batch: float, grace: float
) -> None:
    """With a delay of three batches: a busy peer, whose batches are long, has patience with other busy ones."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    company = Company(delay=3, grace=None)
    for peer in ("a", "b"):
        company.says(peer)
    company.took("a", "b")
    for _ in range(5):
        now[0] += batch
        company.together.computed(1.0)
    company.together.run.publish(1.0, waiting=True)
    company.says("a")
    company.says("b", waiting=False)
    company.rounds.is_looking = True
    company.rounds.results = [InProgress(reason="looking", ready_peers=2, target_size=3)] * 3
    company.together.begin_round(3)
    for after, stopped in ((grace - 0.1, []), (0.2, ["1 of 3 peers still compute after the grace period"])):
        now[0] += after
        company.together.look_on()
        assert company.rounds.stopped == stopped


def test_an_observer_looks_often_whether_the_others_went_on_without_it(company: Company) -> None:
    """It has about a second to replay the update that it missed, before their next group is formed."""
    rounds = company.rounds
    forming = InProgress(ready_peers=2, target_size=2, reason="it looks for peers")
    exchanging = InProgress(ready_peers=2, target_size=2, reason=EXCHANGES)
    company.says("a")
    rounds.results = [forming, forming, exchanging, success("a")]
    assert isinstance(company.together.observe(), Success)
    assert rounds.waits == [GLANCE_SECONDS] * 4
    assert rounds.word.looks == 2, "a peer that has its group asks for nothing"
    rounds.waits.clear()
    rounds.results = [forming, success("a")]
    assert isinstance(company.together.average(2), Success)
    assert rounds.waits == [LOOK_SECONDS] * 2
    assert rounds.word.looks == 2


def test_round_of_an_earlier_optimizer_is_discarded() -> None:
    company = Company(round_state=b"of another")
    company.rounds.results = [success("a"), success("a")]
    assert isinstance(company.together.average(2), Failed)
    assert isinstance(company.together.average(2), Success)


def test_peer_that_was_not_due_missed_nothing(company: Company) -> None:
    """A peer that was behind for long and has loaded the state is expected at once."""
    for _ in range(12):
        company.says("a")
        company.says("late", state=b"x" * 32)
        company.took("a")
    company.says("a")
    company.says("late")
    assert company.counted == 3


def test_peer_that_loads_a_state_expects_all_peers_again(company: Company) -> None:
    for _ in range(4):
        company.says("a")
        company.took()
    company.says("a")
    assert company.counted == 1
    company.together.is_at(company.together.run.lineage)
    company.says("a")
    assert company.counted == 2


def test_batch_time_excludes_rounds(company: Company, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for seconds, what in ((2.0, "batch"), (50.0, "round"), (2.0, "batch"), (50.0, "round"), (2.0, "batch")):
        now += seconds
        if what == "batch":
            company.together.computed(8.0)
        else:
            company.took()
    assert company.together.run.pace.samples_per_second == pytest.approx(4.0, rel=0.01)


def test_a_split_of_the_run_is_a_warning_and_not_an_order(
    company: Company, caplog: pytest.LogCaptureFixture
) -> None:
    """The peers of the last update continue together, whatever number of peers is elsewhere."""
    company.says("a")
    company.took("a")
    company.says("a")
    for name in "xyz":
        company.says(name, state=b"x" * 32, epoch=9)
    for _ in range(3):
        assert company.together.left_behind() is None
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("3 peers that took none of the last updates with this one")
    assert "the run has split" in warning


def test_a_wait_for_an_exchange_names_the_members_that_are_waited_for(company: Company) -> None:
    exchanging = InProgress(
        ready_peers=2, target_size=2, reason=EXCHANGES, waits_for="waiting for parts of b (3 parts)"
    )
    company.rounds.results = [exchanging, success("a")]
    heard: list[AnyEvent] = []
    company.rounds.events.subscribe(heard.append)
    assert isinstance(company.together.average(2), Success)
    assert company.together.waiting.reason == "the group exchanges; waiting for parts of b (3 parts)"
    [told] = [event for event in heard if isinstance(event, Waits)]
    assert (told.run_id, told.reason) == ("run", company.together.waiting.reason)
