"""Whether what the processes of :mod:`chaos` have reported can be right. Plain functions of their histories.

:func:`check` returns everything that is wrong, as sentences. What it holds the processes to:

* **Success tells the truth.** All of one group name the same peers, weights and total, and hold the same bits; these
  are the weighted mean of the samples that were in those peers' contributions, within what the codec loses. Every
  contribution is of a step that its peer had begun, and that was not over before the one that counts it began.
* **Exactly once.** A sample is in one committed result at most. Of a process that lived to the end, every sample is
  either still in its accumulator, whose reported weight is then exactly the sum of those, and in no result; or used,
  and in exactly one; or withheld (``Averager.unresolved_weight``), and in one at most. No step that ended with
  ``NoPeers`` or ``Failed(contribution_used=False)`` is in a result.
* **Nobody hangs.** No wait of a step outlasts the timeouts, no process ends by itself, none is still on its way when
  all had time to finish.

**What is excused, and no more than that.** A committed result is known by the ``Success`` of a member that lived to
report it. If a process was killed in a step, between reporting that the step began and reporting its result, it may
have held a ``Success`` that nobody else did. So a contribution that its peer says is used
(``Failed(contribution_used=True)``, or withheld and not given back) may be missing from the known results if there is
a process that was killed in a step which overlaps with that peer's, from beginning to end. And the samples of a
process that was killed need not be anywhere, as nobody can ask it; but they are in one result at most, and what it
had said of its steps is held against it. Nothing else is excused: a step that ended with ``Success`` *is* a known
result, and of two results that contain a sample both were reported, so there is no excuse for that at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, TypeAlias

Event: TypeAlias = Mapping[str, Any]
"""As :mod:`scripts.fault_search.chaos_work` reports it: ``sample``, ``begun``, ``waits``, ``result`` and ``left``."""

SampleId: TypeAlias = tuple[int, int, int]
"""Slot, life, number."""

Sketches: TypeAlias = Callable[[SampleId], Sequence[float]]

FP32_ERROR = 1e-5
"""Relative, for some hundred samples accumulated in float32."""
CODEC_ERRORS = {"fp32": FP32_ERROR, "blockwise8": 0.02}
"""Relative, of one encoding, with room for the sketch, which knows a norm only within some ten percent."""
SLACK_SECONDS = 20.0
"""A watchdog's: for a machine that runs many processes on few cores."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is promised of time, and of values."""

    match_timeout: float
    exchange_timeout: float
    codec: str

    @property
    def wait(self) -> float:
        """The longest that one call of step may take."""
        return self.match_timeout + self.exchange_timeout + SLACK_SECONDS


@dataclass(slots=True, eq=False)
class Life:
    """One process, from its start to its end. A slot has one after another, all with the same peer id."""

    slot: int
    number: int
    peer_id: str = ""
    """Empty when it never joined."""
    events: list[Event] = field(default_factory=list)
    stops: list[tuple[float, float]] = field(default_factory=list)
    """From when to when it was stopped."""
    killed: float | None = None
    """When it was, by the plan."""
    trouble: str = ""
    """What the parent saw: it ended by itself, or never joined, or never finished."""

    def __str__(self) -> str:
        """What a violation calls it."""
        return f"process {self.slot}" + (f" (restart {self.number})" if self.number else "")


@dataclass(slots=True, eq=False)
class Step:
    """One round of one life, from ``begun`` to ``result``."""

    life: Life
    begun: float
    taken: frozenset[SampleId]
    """What was accumulated when it began."""
    doubtful: tuple[frozenset[SampleId], ...]
    """Withheld then. Any of it may have been given back in the moment before the round took what was accumulated."""
    ended: float = math.inf
    """When it reported its result, or was killed."""
    result: Event | None = None

    def contributions(self) -> Iterator[frozenset[SampleId]]:
        """What it may have contributed; likely first."""
        for chosen in _subsets(self.doubtful):
            yield self.taken.union(*chosen)

    def overlaps(self, other: Step) -> bool:
        """Whether both can have been in the same round."""
        return self.begun <= other.ended and other.begun <= self.ended

    def __str__(self) -> str:
        """What a violation calls it."""
        return f"the step that {self.life} began at {self.begun:.2f}"


@dataclass(slots=True)
class Account:
    """What became of everything that one life accumulated."""

    life: Life
    samples: dict[SampleId, float] = field(default_factory=dict)
    """Their weights."""
    steps: list[Step] = field(default_factory=list)
    kept: frozenset[SampleId] = frozenset()
    """In its accumulator when it was last heard of."""
    unresolved: list[tuple[frozenset[SampleId], Step]] = field(default_factory=list)
    used: list[tuple[frozenset[SampleId], Step]] = field(default_factory=list)
    """What it says others have used, and in which step: without a Success of its own."""
    finished: bool = False

    def weigh(self, samples: Iterable[SampleId]) -> float:
        """The exact sum of their weights."""
        return math.fsum(self.samples[sample] for sample in samples)


@dataclass(slots=True)
class Committed:
    """One group's result, as all who hold it report it."""

    group_id: str
    holders: list[Step]
    """Who reported it."""
    steps: list[Step] = field(default_factory=list)
    """Whose contributions it counts."""
    samples: frozenset[SampleId] = frozenset()

    @property
    def first(self) -> Event:
        """What one of them reports."""
        result = self.holders[0].result
        assert result is not None
        return result


@dataclass(slots=True)
class Findings:
    """What the check found."""

    violations: list[str]
    committed: list[Committed]
    excused: int
    """Contributions that are used, in a result that nobody lived to report."""
    undecided: int
    """Contributions that are unresolved at the end."""


def check(lives: Sequence[Life], limits: Limits, sketches: Sketches) -> Findings:
    """Everything that is wrong.

    Args:
        lives: of all processes, in any order.
        limits: what they were given.
        sketches: of a sample's values; see :func:`scripts.fault_search.chaos_work.sketch`.
    """
    violations: list[str] = []
    accounts = []
    for life in lives:
        account, wrong = settle(life)
        accounts.append(account)
        violations += wrong
        violations += check_time(life, limits)
    committed, wrong = check_results(accounts, limits, sketches)
    violations += wrong
    excused, wrong = check_once(accounts, committed)
    violations += wrong
    undecided = sum(len(account.unresolved) for account in accounts if account.finished)
    return Findings(violations, committed, excused, undecided)


# ---------------------------------------------------------------------- one life


def settle(life: Life) -> tuple[Account, list[str]]:
    """What a process held at each moment, held against the weights that it reported."""
    account = Account(life)
    violations: list[str] = []
    kept: frozenset[SampleId] = frozenset()
    step: Step | None = None

    def weigh(event: Event) -> None:
        """The reported weight is that of what is kept, with what may have been given back."""
        nonlocal kept
        for back in _subsets(account.unresolved):
            found = kept.union(*(samples for samples, _ in back))
            if account.weigh(found) == event["weight"]:
                kept = found
                account.unresolved = [entry for entry in account.unresolved if entry not in back]
                return
        if not violations:  # what comes after the first follows from it
            violations.append(
                f"{life} holds a weight of {event['weight']!r} at {event['at']:.2f} ({event['event']}), but the "
                f"samples that are left weigh {account.weigh(kept)!r}, and unresolved is "
                f"{[account.weigh(samples) for samples, _ in account.unresolved]}"
            )

    for event in life.events:
        match event["event"]:
            case "sample":
                sample = (life.slot, life.number, event["number"])
                account.samples[sample] = event["weight"]
                kept |= {sample}
            case "begun":
                weigh(event)
                doubtful = tuple(samples for samples, _ in account.unresolved)
                step = Step(life, event["at"], kept, doubtful, life.killed or math.inf)
                account.steps.append(step)
                kept = frozenset()
            case "result":
                assert step is not None
                step.ended, step.result = event["at"], event
                kept |= _after(account, step)
                weigh(event)
            case "left":
                weigh(event)
                violations += _settle_withheld(account, event)
                account.finished = True
    account.kept = kept
    return account, violations


def _after(account: Account, step: Step) -> frozenset[SampleId]:
    """What of a step's contribution is accumulated again."""
    result = step.result
    assert result is not None
    if result["result"] == "Success":
        own = result["weights"].get(account.life.peer_id)
        mine = next((found for found in step.contributions() if account.weigh(found) == own), step.taken)
        account.unresolved = [entry for entry in account.unresolved if not entry[0] <= mine]
        return frozenset()
    if result.get("used") is None and result["result"] == "Failed":
        account.unresolved.append((step.taken, step))
        return frozenset()
    if result.get("used"):
        account.used.append((step.taken, step))
        return frozenset()
    return step.taken


def _settle_withheld(account: Account, event: Event) -> list[str]:
    """At the end, what is neither given back nor unresolved any more was used."""
    for still in _subsets(account.unresolved):
        if account.weigh(sample for samples, _ in still for sample in samples) == event["unresolved_weight"]:
            account.used += [entry for entry in account.unresolved if entry not in still]
            account.unresolved = list(still)
            return []
    return [
        f"{account.life} withholds a weight of {event['unresolved_weight']!r} at the end, which is no sum of "
        f"{[account.weigh(samples) for samples, _ in account.unresolved]}"
    ]


def check_time(life: Life, limits: Limits) -> list[str]:
    """What took too long, not counting the time for which the process was stopped; and how it ended."""
    violations = [f"{life} {life.trouble}"] if life.trouble else []
    stepping = False
    before = 0.0
    moments = [(event["event"], event["at"]) for event in life.events]
    if life.killed is not None:
        moments.append(("killed", life.killed))
    for what, at in moments:
        stopped = sum(max(min(until, at) - max(since, before), 0.0) for since, until in life.stops)
        if stepping and at - before - stopped > limits.wait:
            violations.append(
                f"a step of {life} took {at - before - stopped:.1f} s until {at:.2f}, with timeouts of "
                f"{limits.match_timeout:g} and {limits.exchange_timeout:g} s"
            )
        stepping = what in ("begun", "waits") or (stepping and what == "sample")
        before = at
    return violations


# ---------------------------------------------------------------------- all together


def check_results(
    accounts: Sequence[Account], limits: Limits, sketches: Sketches
) -> tuple[list[Committed], list[str]]:
    """Every Success: alike in its group, made of contributions that there were, and their mean."""
    violations: list[str] = []
    known: dict[tuple[str, float], list[tuple[frozenset[SampleId], Step]]] = {}
    weights: dict[SampleId, float] = {}
    groups: dict[str, Committed] = {}
    for account in accounts:
        weights.update(account.samples)
        for step in account.steps:
            for samples in step.contributions():
                known.setdefault((account.life.peer_id, account.weigh(samples)), []).append((samples, step))
            if step.result is not None and step.result["result"] == "Success":
                group_id = step.result["group_id"]
                groups.setdefault(group_id, Committed(group_id, [])).holders.append(step)
    for found in groups.values():
        violations += _check_alike(found)
        contributions = []
        for peer_id, weight in found.first["weights"].items():
            if (peer_id, weight) not in known:
                violations.append(
                    f"{_name(found)} counts {peer_id} with a weight that it never had: {weight!r}"
                )
                break
            samples, step = max(
                known[peer_id, weight], key=lambda entry: _likelihood(entry[1], found.holders)
            )
            contributions.append(samples)
            found.steps.append(step)
            violations += [
                f"{holder} counts {step}, which was over at {step.ended:.2f}"
                for holder in found.holders
                if not step.overlaps(holder) or (peer_id == holder.life.peer_id and step is not holder)
            ]
        else:
            found.samples = frozenset().union(*contributions)
            wrong = _check_mean(found.first, contributions, weights, limits.codec, sketches)
            violations += [f"{_name(found)} {wrong}"] if wrong else []
    return list(groups.values()), violations


def _likelihood(step: Step, holders: Sequence[Step]) -> tuple[bool, bool, bool]:
    """Of several steps with the same contribution: whether it is this one that is in a result."""
    return step in holders, all(map(step.overlaps, holders)), not _was_told_unused(step)


def _name(found: Committed) -> str:
    return (
        f"the result of group {found.group_id[:8]}, of {', '.join(str(step.life) for step in found.holders)},"
    )


def _check_alike(found: Committed) -> list[str]:
    violations = []
    for step in found.holders:
        result = step.result
        assert result is not None
        for what in ("weights", "total_weight", "digest"):
            if result[what] != found.first[what]:
                violations.append(
                    f"{step.life} and {found.holders[0].life} differ in the {what} of group {found.group_id[:8]}"
                )
        if step.life.peer_id not in result["weights"]:
            violations.append(f"{step.life} is not in its own result of group {found.group_id[:8]}")
    if not math.isclose(
        found.first["total_weight"], math.fsum(found.first["weights"].values()), rel_tol=1e-12
    ):
        violations.append(f"{_name(found)} has a total weight that is not the sum of its weights")
    return violations


def _check_mean(
    result: Event,
    contributions: Sequence[frozenset[SampleId]],
    weights: Mapping[SampleId, float],
    codec: str,
    sketches: Sketches,
) -> str:
    """What is wrong with the values: they are compared by their sketches, of which norms are taken too."""
    total = math.fsum(weights[sample] for samples in contributions for sample in samples)
    size = len(result["sketch"])
    exact = [0.0] * size
    rounding = 0.0  # each contribution is encoded, and then their average
    for samples in contributions:
        part = [0.0] * size
        for sample in samples:
            for index, value in enumerate(sketches(sample)):
                part[index] += weights[sample] * value / total
        rounding += sum(value**2 for value in part)
        exact = [a + b for a, b in zip(exact, part, strict=True)]
    rounding += sum(value**2 for value in exact)
    error = math.dist(result["sketch"], exact)
    bound = CODEC_ERRORS[codec] * math.sqrt(rounding)
    if error <= bound:
        return ""
    return f"is {error / math.hypot(*exact):.1e} of its norm from the mean of its peers' samples"


def check_once(accounts: Sequence[Account], committed: Sequence[Committed]) -> tuple[int, list[str]]:
    """Every sample in one committed result, or in none and kept. Returns how many contributions were excused, too."""
    violations: list[str] = []
    where: dict[SampleId, str] = {}
    for found in committed:
        for sample in sorted(found.samples):
            if where.setdefault(sample, found.group_id) != found.group_id:
                violations.append(
                    f"sample {sample[2]} of process {sample[0]}, life {sample[1]}, is in two results: of group "
                    f"{where[sample][:8]} and of group {found.group_id[:8]}"
                )
    steps = [step for account in accounts for step in account.steps]
    cut_short = [step for step in steps if step.result is None and step.life.killed is not None]
    counted = {id(step): found for found in committed for step in found.steps}
    for step in steps:
        if _was_told_unused(step) and id(step) in counted:
            violations.append(
                f"{step} was told that it was in no result, and is in that of group {counted[id(step)].group_id[:8]}"
            )
    excused = 0
    for account in accounts:
        violations += [
            f"sample {sample[2]} of {account.life} is in the result of group {where[sample][:8]}, and accumulated still"
            for sample in sorted(account.kept & where.keys())
        ]
        for samples, step in account.used:
            results = {where.get(sample) for sample in samples}
            if len(results) > 1:
                violations.append(f"{step} was used in part: {sorted(map(str, results))}")
            elif results == {None} and any(_may_know(other, step) for other in cut_short):
                excused += 1
            elif results == {None}:
                violations.append(f"{step} was told that it was used, and no known result contains it")
        if account.life.killed is None and not account.finished and not account.life.trouble:
            violations.append(f"{account.life} did not say what is left")
    return excused, violations


def _was_told_unused(step: Step) -> bool:
    result = step.result
    return result is not None and (result["result"] == "NoPeers" or result.get("used") is False)


def _may_know(killed: Step, step: Step) -> bool:
    """Whether who was killed in a step may have held the result that another's contribution is in."""
    return killed.life.peer_id != step.life.peer_id and killed.overlaps(step)


def _subsets(items: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """The smaller ones first."""
    for size in range(len(items) + 1):
        yield from combinations(items, size)
