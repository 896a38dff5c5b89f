"""The plan of faults for the processes of ``scripts/faults chaos``, drawn from a seed before anything runs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

KINDS = ("kill", "stop", "stop, then kill", "clock")
ENDS = {"stop": "resume", "cut": "mend", "clock": "right"}
"""The action that ends a fault of a process that goes on to live."""
START_SECONDS = 8.0  # after which a restarted process counts as running
PEACE_SECONDS = 40.0
"""Mean time between two faults of a process, apart from bursts, if nothing else is said."""
STEP_SECONDS = 50.0
"""The most by which a wall clock is set wrong. Peers whose clocks differ by a minute are not admitted."""
AIMED = 0.7
"""Fraction of faults that are aimed at an exchange, which is a small part of the time."""
BURST = 0.25
"""Fraction of faults that follow another one at once."""


@dataclass(frozen=True, order=True, slots=True)
class Action:
    """One action on one process."""

    at: float
    """Seconds from the beginning."""
    what: str
    """``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``resume`` (SIGCONT), ``restart`` (with the same identity), ``cut`` (its
    link, which carries nothing in either direction), ``mend``, ``clock`` (its wall clock jumps) or ``right``."""
    slot: int
    aim: float | None = field(default=None, compare=False)
    """If it is aimed at an exchange: seconds after the process's next group begins one."""
    by: float = 0.0
    """Seconds by which the clock is wrong."""


def draw(
    seed: int, *, peers: int, seconds: float, every: float | None = None, links: bool = False
) -> list[Action]:
    """Draw the plan, deterministically from the seed. At least half of the processes run at any time.

    A fault is a kill and a later restart; a stop and a later resume; a stop, a kill during it, and a later restart; a
    cut and a later mending of the link; or a jump of the clock, and its correction. The first faults are one of each.
    Everything is undone when ``seconds`` are over.

    Args:
        every: mean seconds between two faults. ``None``: each process has one in :data:`PEACE_SECONDS`.
        links: whether processes have links that can be cut.
    """
    dice = random.Random(f"chaos/{seed}/{peers}")
    usual = [*KINDS, "stop", *(["cut"] if links else [])]
    kinds = dice.sample(sorted({*usual}), len({*usual}))
    every = PEACE_SECONDS / peers if every is None else every
    down: dict[int, float] = {}  # until when
    actions: list[Action] = []
    at = 0.0
    while True:
        at += dice.uniform(0.0, 0.2) if dice.random() < BURST else dice.expovariate(1.0 / every)
        down = {slot: until for slot, until in down.items() if until > at}
        if len(down) >= peers // 2:
            at = min(down.values()) + dice.uniform(0.1, 0.5)
            down = {slot: until for slot, until in down.items() if until > at}
        if at >= seconds:
            return sorted(actions)
        slot = dice.choice([slot for slot in range(peers) if slot not in down])
        kind = kinds.pop() if kinds else dice.choice(usual)
        pause = _draw_pause(dice, seconds)
        aim = dice.uniform(0.0, 0.3) if dice.random() < AIMED else None
        if kind in ENDS:
            by = dice.uniform(-STEP_SECONDS, STEP_SECONDS) if kind == "clock" else 0.0
            actions += [Action(at, kind, slot, aim, by), Action(min(at + pause, seconds), ENDS[kind], slot)]
            down[slot] = at + pause
            continue
        if kind == "stop, then kill":
            actions.append(Action(at, "stop", slot, aim))
            actions.append(Action(min(at + pause / 2, seconds), "kill", slot))
        else:
            actions.append(Action(at, "kill", slot, aim))
        actions.append(Action(min(at + pause, seconds), "restart", slot))
        down[slot] = at + pause + START_SECONDS


def _draw_pause(dice: random.Random, seconds: float) -> float:
    """Draw the time for which a process is away: a moment, less than a round's timeouts, or more."""
    longest = dice.choice([0.5, 4.0, 20.0])
    return min(dice.uniform(longest / 10, longest), seconds / 4)
