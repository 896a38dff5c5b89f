"""Check of the reports of the processes of ``scripts/faults chaos``: plain functions of their histories.

:func:`check` returns every violation as a sentence. The rules are:

* **A Success is true.** All members of a group report the same peers, weights and total, and hold the same bits. These
  are the weighted mean of the samples in those peers' contributions, within the codec's error. Every contribution
  belongs to a step that its peer had begun, and that overlapped with the step that counts it.
* **Exactly once.** A sample is in one committed result at most. In a process that lived to the end, every sample is in
  one of three states. It is still in the accumulator and in no result; the accumulator's reported weight is exactly the
  sum of these samples. Or it is used, and in exactly one result. Or it is withheld (``Averager.unresolved_weight``),
  and in one result at most. No contribution of a step that ended with ``NoPeers`` or
  ``Failed(contribution_used=False)`` is in a result.
* **No process hangs.** No step waits longer than the timeouts, no process ends by itself, and none is still running
  when all had time to finish.

**Exceptions.** A committed result is known by the ``Success`` of a member that lived to report it. A process that was
killed in a step, before it reported the result, may have been the only one with a ``Success``. So a contribution that
its peer reports as used (``Failed(contribution_used=True)``, or withheld and not given back) may be missing from the
known results. The condition is that some process was killed in a step that overlaps with that peer's step. The samples
of a killed process may be lost, since it cannot report them; but they are in one result at most, and its earlier
reports still count. There are no other exceptions. A step that ended with ``Success`` *is* a known result. If a sample
is in two results, both were reported, so that is always a violation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, TypeAlias

Event: TypeAlias = Mapping[str, Any]
"""An event as ``chaos_work`` reports it: ``sample``, ``begun``, ``waits``, ``result`` and ``left``."""

SampleId: TypeAlias = tuple[int, int, int]
"""(slot, life, number)."""

Sketches: TypeAlias = Callable[[SampleId], Sequence[float]]

FP32_ERROR = 1e-5
"""Relative error of a few hundred samples accumulated in float32."""
CODEC_ERRORS = {"fp32": FP32_ERROR, "blockwise8": 0.02}
"""Relative error of one encoding, with a margin for the sketch, which knows a norm only within about ten percent."""
SLACK_SECONDS = 20.0
"""Margin of time limits, for a machine that runs many processes on few cores."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of durations and of errors."""

    match_timeout: float
    exchange_timeout: float
    codec: str

    @property
    def wait(self) -> float:
        """Longest permitted duration of one call of ``step``."""
        return self.match_timeout + self.exchange_timeout + SLACK_SECONDS


@dataclass(slots=True, eq=False)
class Life:
    """One process from its start to its end. A slot has several lives in turn, all with the same peer id."""

    slot: int
    number: int
    peer_id: str = ""
    """Empty if it never joined."""
    events: list[Event] = field(default_factory=list)
    stops: list[tuple[float, float]] = field(default_factory=list)
    """Intervals during which it was stopped."""
    killed: float | None = None
    """Time at which the plan killed it, if it did."""
    trouble: str = ""
    """Problem that the parent saw: the process ended by itself, never joined, or never finished."""

    def __str__(self) -> str:
        """Return its name for messages about violations."""
        return f"process {self.slot}" + (f" (restart {self.number})" if self.number else "")


@dataclass(slots=True, eq=False)
class Step:
    """One round of one life, from ``begun`` to ``result``."""

    life: Life
    begun: float
    taken: frozenset[SampleId]
    """Samples accumulated when it began."""
    doubtful: tuple[frozenset[SampleId], ...]
    """Contributions withheld when it began. Any of them may have been given back just before the round began."""
    ended: float = math.inf
    """Time at which it reported its result, or was killed."""
    result: Event | None = None

    def contributions(self) -> Iterator[frozenset[SampleId]]:
        """Sets of samples that it may have contributed; the likely ones first."""
        for chosen in _subsets(self.doubtful):
            yield self.taken.union(*chosen)

    def overlaps(self, other: Step) -> bool:
        """Return whether both steps can have been in the same round."""
        return self.begun <= other.ended and other.begun <= self.ended

    def __str__(self) -> str:
        """Return its name for messages about violations."""
        return f"the step that {self.life} began at {self.begun:.2f}"


@dataclass(slots=True)
class Account:
    """Fate of all samples that one life accumulated."""

    life: Life
    samples: dict[SampleId, float] = field(default_factory=dict)
    """Weight of each sample."""
    steps: list[Step] = field(default_factory=list)
    kept: frozenset[SampleId] = frozenset()
    """Samples in its accumulator at its last report."""
    unresolved: list[tuple[frozenset[SampleId], Step]] = field(default_factory=list)
    used: list[tuple[frozenset[SampleId], Step]] = field(default_factory=list)
    """Contributions that it reports as used without a Success of its own, each with its step."""
    finished: bool = False

    def weigh(self, samples: Iterable[SampleId]) -> float:
        """Return the exact sum of the samples' weights."""
        return math.fsum(self.samples[sample] for sample in samples)


@dataclass(slots=True)
class Committed:
    """One group's result, as all its holders report it."""

    group_id: str
    holders: list[Step]
    """Steps that reported it."""
    steps: list[Step] = field(default_factory=list)
    """Steps whose contributions it counts."""
    samples: frozenset[SampleId] = frozenset()

    @property
    def first(self) -> Event:
        """The first holder's report."""
        result = self.holders[0].result
        assert result is not None
        return result


@dataclass(slots=True)
class Findings:
    """Findings of the check."""

    violations: list[str]
    committed: list[Committed]
    excused: int
    """Number of used contributions whose result no surviving process reported."""
    undecided: int
    """Number of contributions that are unresolved at the end."""


def check(lives: Sequence[Life], limits: Limits, sketches: Sketches) -> Findings:
    """Check all reports; return the findings.

    Args:
        lives: lives of all processes, in any order.
        limits: limits of durations and errors.
        sketches: returns the sketch of a sample's values; see :func:`scripts.fault_search.chaos_work.sketch`.
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
    """Follow the samples of a process through its steps, and compare their weights with the reported ones."""
    account = Account(life)
    violations: list[str] = []
    kept: frozenset[SampleId] = frozenset()
    step: Step | None = None

    def weigh(event: Event) -> None:
        """Find the withheld contributions whose return explains the reported weight."""
        nonlocal kept
        for back in _subsets(account.unresolved):
            found = kept.union(*(samples for samples, _ in back))
            if account.weigh(found) == event["weight"]:
                kept = found
                account.unresolved = [entry for entry in account.unresolved if entry not in back]
                return
        if not violations:  # later violations follow from the first
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
    """Return the samples of a step's contribution that are accumulated again."""
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
    """At the end, count contributions as used that are neither given back nor unresolved."""
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
    """Report steps that took too long, not counting time for which the process was stopped, and a wrong end."""
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
    """Check every Success: identical in its group, made of real contributions, and their mean."""
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
    """Rank several steps with the same contribution by the likelihood that they are in a result."""
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
    """Report wrong values, found by comparing sketches and the sketches' norms."""
    total = math.fsum(weights[sample] for samples in contributions for sample in samples)
    size = len(result["sketch"])
    exact = [0.0] * size
    rounding = 0.0  # every contribution is encoded, and then the average
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
    """Check that every sample is in one committed result, or is kept; return also the number of exceptions."""
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
            violations.append(f"{account.life} did not report its unused samples")
    return excused, violations


def _was_told_unused(step: Step) -> bool:
    result = step.result
    return result is not None and (result["result"] == "NoPeers" or result.get("used") is False)


def _may_know(killed: Step, step: Step) -> bool:
    """Return whether a process killed in an overlapping step may have been the only holder of a result."""
    return killed.life.peer_id != step.life.peer_id and killed.overlaps(step)


def _subsets(items: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Return all subsets, the smaller ones first."""
    for size in range(len(items) + 1):
        yield from combinations(items, size)
