"""The checker of ``scripts/faults chaos`` on hand-made histories, its plan, and a short run with real processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.benchmarks import netns
from scripts.fault_search.chaos import Setting, examine, measure, run
from scripts.fault_search.chaos_check import Findings, Life, Limits, SampleId, check
from scripts.fault_search.chaos_plan import Action, draw
from scripts.fault_search.chaos_work import draw_sample, sketch

pytestmark = pytest.mark.processes

LIMITS = Limits(match_timeout=5.0, exchange_timeout=15.0, codec="fp32")
A, B, C = "peer A", "peer B", "peer C"


def values(sample: SampleId) -> Sequence[float]:
    slot, life, number = sample
    return [slot + 1.0, life + 2.0, number + 3.0, 1.0]


def mean(*parts: tuple[float, SampleId]) -> list[float]:
    total = sum(weight for weight, _ in parts)
    return [sum(weight * values(sample)[i] for weight, sample in parts) / total for i in range(4)]


class History(Life):
    """Build the history of a process from a short notation."""

    def sample(self, at: float, number: int, weight: float) -> History:
        self.events.append({"event": "sample", "at": at, "number": number, "weight": weight})
        return self

    def begun(self, at: float, weight: float) -> History:
        self.events.append({"event": "begun", "at": at, "weight": weight})
        return self

    def result(self, at: float, weight: float, result: str, **what: Any) -> History:
        self.events.append({"event": "result", "at": at, "weight": weight, "result": result, **what})
        return self

    def success(
        self, at: float, weight: float, group_id: str, weights: dict[str, float], average: Sequence[float]
    ) -> History:
        return self.result(
            at,
            weight,
            "Success",
            group_id=group_id,
            weights=weights,
            total_weight=sum(weights.values()),
            digest=f"bits of {group_id}",
            sketch=list(average),
        )

    def failed(self, at: float, weight: float, *, used: bool | None) -> History:
        return self.result(at, weight, "Failed", reason="lost", peer=None, used=used)

    def left(self, at: float, weight: float, unresolved: float = 0.0) -> History:
        self.events.append({"event": "left", "at": at, "weight": weight, "unresolved_weight": unresolved})
        return self


def found(*lives: Life) -> Findings:
    return check(lives, LIMITS, values)


def wrong(*lives: Life) -> str:
    """Return the only violation that the checker finds."""
    [text] = found(*lives).violations
    return text


FIRST = mean((1.0, (0, 0, 0)), (2.0, (1, 0, 0)))
SECOND = mean((4.0, (0, 0, 1)), (8.0, (1, 0, 1)))


def right() -> tuple[History, History]:
    """Return histories of two processes that average twice.

    In between, one of them has a round without a group. At the end, one sample is left.
    """
    a = History(0, 0, A).sample(0, 0, 1.0).begun(0, 1.0).success(2, 0, "g1", {A: 1.0, B: 2.0}, FIRST)
    b = History(1, 0, B).sample(0, 0, 2.0).begun(1, 2.0).success(2, 0, "g1", {A: 1.0, B: 2.0}, FIRST)
    a.sample(3, 1, 4.0).begun(3, 4.0).result(8, 4.0, "NoPeers", reason="nobody")
    a.begun(9, 4.0).sample(9.5, 2, 16.0).success(11, 16.0, "g2", {A: 4.0, B: 8.0}, SECOND)
    b.sample(9, 1, 8.0).begun(9, 8.0).success(12, 0, "g2", {A: 4.0, B: 8.0}, SECOND)
    return a.left(20, 16.0), b.left(20, 0)


def began() -> tuple[History, History]:
    """Return histories of two processes that have each begun a round with one sample."""
    return History(0, 0, A).sample(0, 0, 1.0).begun(0, 1.0), History(1, 0, B).sample(0, 0, 2.0).begun(0, 2.0)


class TestRight:
    def test_two_processes_average_twice(self) -> None:
        findings = found(*right())
        assert findings.violations == []
        assert [len(result.samples) for result in findings.committed] == [2, 2]

    @pytest.mark.parametrize("withheld", [False, True])
    def test_a_returned_contribution_counts_in_a_later_round(self, withheld: bool) -> None:
        """It may be given back when the first round ends, or just before the next one takes it."""
        a, b = began()
        if withheld:
            a.failed(2, 0, used=None).sample(3, 1, 4.0).begun(3, 4.0)
        else:
            a.sample(1, 1, 4.0).failed(2, 5.0, used=False).begun(3, 5.0)
        weights, average = ({A: 5.0, B: 2.0}, mean((1.0, (0, 0, 0)), (4.0, (0, 0, 1)), (2.0, (1, 0, 0))))
        a.success(4, 0, "g", weights, average).left(9, 0)
        b.success(4, 0, "g", weights, average).left(9, 0)
        assert found(a, b).violations == []

    @pytest.mark.parametrize("told", [True, None])
    def test_a_contribution_that_another_peer_reports_as_used(self, told: bool | None) -> None:
        a, b = began()
        a.failed(3, 0, used=told).left(9, 0)
        b.success(2, 0, "g", {A: 1.0, B: 2.0}, FIRST).left(9, 0)
        assert found(a, b).violations == []

    def test_a_withheld_contribution_that_is_returned_or_not_decided(self) -> None:
        for returned in (1.0, 0.0):
            a, b = began()
            a.failed(3, 0, used=None).left(9, returned, 1.0 - returned)
            findings = found(a, b.failed(2, 2.0, used=False).left(9, 2.0))
            assert findings.violations == []
            assert findings.undecided == 1 - returned

    def test_samples_of_a_killed_process_are_in_at_most_one_result(self) -> None:
        a, b = right()
        del b.events[-2:]  # it was killed before it reported its second result
        b.killed = 13
        b.sample(12.5, 2, 32.0)
        restarted = History(1, 1, B).sample(15, 0, 64.0).left(20, 64.0)
        assert found(a, b, restarted).violations == []

    def test_a_step_of_a_stopped_process_may_take_longer(self) -> None:
        a = began()[0].failed(70, 1.0, used=False).left(71, 1.0)
        assert "took 70.0 s" in wrong(a)
        a.stops.append((1.0, 60.0))
        assert found(a).violations == []


class TestExcused:
    """A contribution was used in a result that no process reported, because those that held it were killed."""

    def used(self, used: bool | None = True) -> History:
        return History(0, 0, A).sample(0, 0, 1.0).begun(10, 1.0).failed(13, 0, used=used).left(20, 0)

    def killed(self, begun: float, killed: float) -> History:
        life = History(1, 0, B, killed=killed)
        return life.sample(0, 0, 2.0).begun(begun, 2.0)

    def test_a_process_killed_during_that_step_may_have_held_the_result(self) -> None:
        findings = found(self.used(), self.killed(9, 12))
        assert findings.violations == []
        assert findings.excused == 1
        assert "no known result contains it" in wrong(self.used(None))
        assert found(self.used(None), self.killed(9, 12)).violations == []

    def test_no_other_process_is_an_excuse(self) -> None:
        reported = self.killed(9, 12).failed(11, 2.0, used=False)
        survivor = self.killed(9, 12).failed(11, 2.0, used=False).left(20, 2.0)
        survivor.killed = None
        for other in (self.killed(14, 15), self.killed(8, 9), reported, survivor):
            assert "no known result contains it" in wrong(self.used(), other)


class TestWrong:
    @pytest.mark.parametrize(
        ("in_a", "in_b", "what", "text"),
        [
            (8, 5, {"sketch": [x * 1.001 for x in SECOND]}, "from the mean of its peers' samples"),
            (2, 2, {"sketch": mean((1.0, (0, 0, 0)))}, "from the mean of its peers' samples"),
            (None, 2, {"digest": 5.0}, "differ in the digest of group g1"),
            (None, 2, {"total_weight": 5.0}, "differ in the total_weight of group g1"),
            (None, 2, {"weights": {B: 2.0, C: 1.0}}, "differ in the weights of group g1"),
            (8, 5, {"weights": {A: 5.0, B: 8.0}, "total_weight": 13.0}, "with a weight that it never had"),
            (-1, None, {"weight": 0.0}, "samples that are left weigh 16.0"),
            (-1, None, {"weight": 20.0}, "samples that are left weigh 16.0"),
            (-1, None, {"unresolved_weight": 0.25}, "withholds a weight of 0.25"),
        ],
    )
    def test_a_false_report(
        self, in_a: int | None, in_b: int | None, what: dict[str, Any], text: str
    ) -> None:
        lives = right()
        for life, place in zip(lives, (in_a, in_b), strict=True):
            if place is not None:
                life.events[place] = {**life.events[place], **what}
        assert text in wrong(*lives)

    def test_a_result_that_omits_its_own_peer(self) -> None:
        a, b = right()
        c = History(2, 0, C).sample(0, 0, 1.5).begun(0, 1.5)
        c.events.append({**a.events[2]})
        assert "is not in its own result" in wrong(a, b, c.left(20, 0))

    @pytest.mark.parametrize("killed", [None, 12.0])
    def test_a_sample_in_two_results(self, killed: float | None) -> None:
        """No kill excuses it."""
        a, b = right()
        if killed is not None:
            a.events, a.killed = a.events[:-2], killed
        c = History(2, 0, C).sample(0, 0, 0.5).begun(9, 0.5)
        average = mean((4.0, (0, 0, 1)), (0.5, (2, 0, 0)))
        c.success(12, 0, "g3", {A: 4.0, C: 0.5}, average)
        assert "sample 1 of process 0, life 0, is in two results" in wrong(a, b, c.left(20, 0))

    @pytest.mark.parametrize("killed", [None, 15.0])
    def test_a_contribution_both_kept_and_in_a_result(self, killed: float | None) -> None:
        a, b = right()
        a.events = a.events[:-2]
        a.failed(13, 20.0, used=False)
        a.killed = killed
        if killed is None:
            a.left(20, 20.0)
        texts = found(a, b).violations
        assert any("was told that it was in no result" in text for text in texts)
        assert killed or any("and accumulated still" in text for text in texts)

    def test_a_withheld_contribution_used_and_returned(self) -> None:
        a, b = began()
        a.failed(3, 0, used=None).left(9, 1.0)
        b.success(2, 0, "g", {A: 1.0, B: 2.0}, FIRST).left(9, 0)
        assert "is in the result of group g, and accumulated still" in wrong(a, b)

    def test_a_contribution_of_a_finished_step(self) -> None:
        a, b = right()
        b.events = [{**event, "at": event["at"] + (30 if event["at"] >= 9 else 0)} for event in b.events]
        assert any("which was over at 11.00" in text for text in found(a, b).violations)

    def test_a_step_that_takes_too_long(self) -> None:
        a, b = right()
        a.events = [{**event, "at": event["at"] + (50 if event["at"] > 19 else 0)} for event in a.events]
        assert found(a, b).violations == []  # a pause between steps is allowed
        c = History(2, 0, C).sample(0, 0, 1.5).begun(0, 1.5)
        hangs = replace(c, events=list(c.events), killed=100)
        assert "a step of process 2 took 100.0 s" in wrong(hangs)
        c.failed(41, 1.5, used=False).left(42, 1.5)
        assert "a step of process 2 took 41.0 s" in wrong(a, b, c)

    def test_a_process_without_a_final_report(self) -> None:
        a, b = right()
        a.events.pop()
        assert "process 0 did not report its unused samples" in wrong(a, b)
        a.trouble = "was not killed, and has ended"
        assert "process 0 was not killed, and has ended" in wrong(a, b)


class TestPlan:
    @pytest.mark.parametrize("peers", [4, 5, 8])
    def test_half_of_the_processes_always_run_and_faults_end(self, peers: int) -> None:
        allowed = {
            "kill": {"runs", "stopped"},
            "stop": {"runs"},
            "resume": {"stopped"},
            "restart": {"killed"},
            "cut": {"runs"},
            "mend": {"cut off"},
            "clock": {"runs"},
            "right": {"late"},
        }
        becomes = {"kill": "killed", "stop": "stopped", "cut": "cut off", "clock": "late"}
        plans = [draw(seed, peers=peers, seconds=120.0, links=True) for seed in range(30)]
        assert plans[0] == draw(0, peers=peers, seconds=120.0, links=True) != plans[1]
        for plan in plans:
            assert plan == sorted(plan)
            states = dict.fromkeys(range(peers), "runs")
            for action in plan:
                assert states[action.slot] in allowed[action.what], plan
                states[action.slot] = becomes.get(action.what, "runs")
                assert 2 * sum(state in ("runs", "late") for state in states.values()) >= peers, plan
            assert set(states.values()) == {"runs"}


def test_a_sketch_is_linear_and_keeps_norms() -> None:
    _, one = draw_sample(0, 0, 0, 0, 1_000)
    _, other = draw_sample(0, 0, 0, 1, 1_000)
    both = torch.tensor(sketch(one)) + torch.tensor(sketch(other))
    torch.testing.assert_close(torch.tensor(sketch(one + other)), both, atol=1e-3, rtol=1e-5)
    assert torch.tensor(sketch(one)).norm() / one.norm() == pytest.approx(1.0, abs=0.3)


SHORT = Setting(
    peers=4, seconds=15.0, seed=3, group_size=3, elements=20_000, match_timeout=3.0, calm_seconds=5.0
)


def test_four_processes_with_kills_stops_and_restarts(tmp_path: Path) -> None:
    """The first process, from which the others bootstrapped, is among them."""
    plan = [
        Action(2.0, "kill", 0),
        Action(3.0, "stop", 1),
        Action(4.0, "restart", 0),
        Action(6.0, "resume", 1),
        Action(7.0, "clock", 2, by=45.0),
        Action(10.0, "right", 2),
    ]
    report = run(SHORT, plan, tmp_path)
    findings = examine(SHORT, report)
    assert findings.violations == []
    assert report.faults == Counter({action.what: 1 for action in plan})
    first, again = (life for life in report.lives if life.slot == 0)
    assert first.peer_id == again.peer_id
    assert measure(report, findings)["rounds_per_minute"] > 0
    assert any(again.peer_id in result.first["weights"] and result.holders for result in findings.committed)
    assert {event["event"] for event in again.events} >= {"sample", "begun", "result", "left"}


def test_a_process_whose_link_is_cut_is_back_when_it_is_mended(tmp_path: Path) -> None:
    try:
        netns.check()
    except netns.NoNamespacesError as error:
        pytest.skip(str(error))
    how = replace(SHORT, links=True)
    report = run(how, [Action(2.0, "cut", 0), Action(8.0, "mend", 0)], tmp_path)
    findings = examine(how, report)
    assert findings.violations == []
    holders = [step for result in findings.committed for step in result.holders if step.life.slot == 0]
    ends = [step.ended - report.began for step in holders]
    # A group that had all parts by then may end a little later, on a busy machine.
    assert not any(6.0 < end < 8.0 for end in ends), ends
    assert any(end > 8.0 for end in ends), ends
