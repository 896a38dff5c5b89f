"""Fault plans on real processes: which faults are possible, and which signals they are."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from p2pavg.testing import After, At, Crash, Cut, Fault, FaultPlan, LocalSwarm, Milestone, Stop, Throttle
from p2pavg.testing.swarm import signals_of


class FakeProcess:
    """Notes its signals."""

    def __init__(self) -> None:
        self.running = True
        self.signals: list[str] = []
        self.signalled = threading.Event()

    def kill(self) -> None:
        self.signals.append("kill")
        self.running = False
        self.signalled.set()

    def stop(self) -> None:
        self.signals.append("stop")

    def resume(self) -> None:
        self.signals.append("resume")


def swarm_of(*processes: FakeProcess) -> LocalSwarm:
    swarm = LocalSwarm("a_module:work", peers=0)
    swarm.processes = list(processes)  # type: ignore[arg-type]
    return swarm


def test_crashes_and_stops_are_signals_at_their_moments() -> None:
    plan = FaultPlan([Fault(Stop(1, 4.0), At(2.0)), Fault(Crash(0), At(1.0)), Fault(Stop(2), At(3.0))])
    assert signals_of(plan) == [(1.0, 0, "kill"), (2.0, 1, "stop"), (3.0, 2, "stop"), (6.0, 1, "resume")]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (Fault(Cut(0, 1), At(1.0)), "share its network"),
        (Fault(Throttle(0, 1e4), At(1.0)), "share its network"),
        (Fault(Crash(0), After(Milestone.FORMED)), "milestones of real processes"),
    ],
)
def test_faults_that_processes_cannot_have_are_refused(fault: Fault, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        signals_of(FaultPlan([fault]))


def test_a_plan_is_carried_out_in_its_order_on_those_that_still_run() -> None:
    processes = [FakeProcess(), FakeProcess()]
    faults: Sequence[Fault] = [
        Fault(Crash(0), At(0.0)),
        Fault(Stop(0), At(0.001)),
        Fault(Stop(1, 0.001), At(0.002)),
        Fault(Crash(1), At(0.004)),
    ]
    with swarm_of(*processes).carrying_out(FaultPlan(faults)):
        assert processes[1].signalled.wait(20.0)
    assert processes[0].signals == ["kill"]
    assert processes[1].signals == ["stop", "resume", "kill"]


def test_what_comes_after_the_block_does_not_happen() -> None:
    process = FakeProcess()
    with swarm_of(process).carrying_out(FaultPlan([Fault(Crash(0), At(3600.0))])):
        pass
    assert process.running


def test_a_plan_that_names_no_process_is_refused() -> None:
    plan = FaultPlan([Fault(Crash(2), At(1.0))])
    with (
        pytest.raises(ValueError, match="names process 2, and the swarm has 1"),
        swarm_of(FakeProcess()).carrying_out(plan),
    ):
        pass
