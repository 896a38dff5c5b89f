"""Faults of a :class:`~p2pavg.testing.FaultPlan` on real processes: signals at moments."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from p2pavg.testing.faults import At, Crash, Fault, FaultPlan, Stop


class Signalled(Protocol):
    """The part of a :class:`~p2pavg.testing.SwarmProcess` that faults use."""

    @property
    def running(self) -> bool: ...
    def kill(self) -> None: ...
    def stop(self) -> None: ...
    def resume(self) -> None: ...


def signals_of(plan: FaultPlan) -> list[tuple[float, int, str]]:
    """Return the signals of a plan in their order: seconds from its beginning, index of the process, and the method.

    Raises:
        ValueError: real processes cannot have one of the faults; the message says why.
    """
    found: list[tuple[float, int, str]] = []
    for fault in plan.faults:
        found += _signals_of(fault)
    return sorted(found)


def _signals_of(fault: Fault) -> list[tuple[float, int, str]]:
    match fault:
        case Fault(Crash(peer), At(at)):
            return [(at, peer, "kill")]
        case Fault(Stop(peer, seconds), At(at)):
            return [(at, peer, "stop"), *([] if seconds is None else [(at + seconds, peer, "resume")])]
        case Fault(_, At()):
            why = "processes of one machine share its network; use Crash or Stop"
        case _:
            why = "the milestones of real processes are not seen from outside; use At(seconds)"
    raise ValueError(f"{fault}: {why}, or simulated peers")


@contextmanager
def carrying_out(plan: FaultPlan, processes: Callable[[], Sequence[Signalled]]) -> Iterator[None]:
    """Send the signals of a plan for as long as the block runs; its beginning is that of the plan.

    Args:
        processes: returns the processes by index, at the moment of a fault. One that has ended gets no signal.

    Raises:
        ValueError: see :func:`signals_of`; or an index is that of no process when the block begins.
    """
    signals = signals_of(plan)
    count = len(processes())
    for _, index, _ in signals:
        if not 0 <= index < count:
            raise ValueError(f"the plan names process {index}, and the swarm has {count}")
    left = threading.Event()
    thread = threading.Thread(target=_send, args=(signals, processes, left), daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()


def _send(
    signals: list[tuple[float, int, str]],
    processes: Callable[[], Sequence[Signalled]],
    left: threading.Event,
) -> None:
    began = time.monotonic()
    for at, index, method in signals:
        if left.wait(max(began + at - time.monotonic(), 0.0)):
            return
        process = processes()[index]
        if process.running:
            getattr(process, method)()
