"""Population based training of simulated peers: decisions that others repeat, copies, deaths, lies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import trio

from p2pavg import AveragingConfig
from p2pavg.net.transport import Stream
from p2pavg.population import (
    Generation,
    GenerationReport,
    LogUniform,
    Population,
    PopulationSettings,
    Word,
    check_decision,
)
from p2pavg.population.weights import Loaded, Weights
from p2pavg.population.words import TOPIC
from p2pavg.state.donor.service import StateService
from p2pavg.state.snapshot import Content
from p2pavg.testing import FaultPlan, MemoryNetwork, SimulatedLoop, run_loops
from tests.simulation.swarm import LAN

SETTINGS = PopulationSettings(
    space={"lr": LogUniform(1e-4, 1.0), "weight_decay": LogUniform(1e-6, 1e-1)}, interval=5, seed=3
)
CONFIG = AveragingConfig(run_id="pbt")


class Task(torch.nn.Module):
    """Distance from a point: a small rate learns too slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.at = torch.nn.Parameter(torch.full((64,), 3.0))

    def forward(self) -> torch.Tensor:
        return (self.at - 1.0).square().mean()


def member_of(
    loop: SimulatedLoop, at: float = 3.0, settings: PopulationSettings = SETTINGS, **options: Any
) -> tuple[Task, Population, Callable[[], float]]:
    """Return a model that begins somewhere and does not learn, its member of a population, and its score."""
    model = Task()
    with torch.no_grad():
        model.at.fill_(at)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    population = Population(loop.averager, model, optimizer, settings, **{"wait": 20.0, **options})
    return model, population, lambda: float(model().detach())


@dataclass
class Outcome:
    """The results of one peer."""

    peer_id: str
    reports: list[GenerationReport]
    words: dict[str, list[Word]]
    """By publisher, as this peer has seen them."""
    generations: tuple[Generation, ...]
    weights: torch.Tensor
    ancestors: list[dict[str, Any]]


def train(
    loop: SimulatedLoop,
    *,
    generations: int,
    settings: PopulationSettings = SETTINGS,
    late: float = 0.0,
    before: Callable[[Task, Population], None] = lambda *_: None,
    **options: Any,
) -> Outcome:
    if late and loop.index == 0:
        loop.sleep(late)
    model = Task()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    population = Population(loop.averager, model, optimizer, settings, **{"wait": 20.0, **options})
    reports = []
    while population.generation < generations:
        optimizer.zero_grad()
        torch.autograd.backward(model())
        optimizer.step()
        loop.sleep(1.0)
        before(model, population)
        report = population.step(lambda: float(model().detach()))
        if report is not None:
            reports.append(report)
    for _ in range(10):  # the others' last words come
        loop.sleep(1.0)
        _ = population.history
    words: dict[str, list[Word]] = {}
    for peer, word in population.history.words():
        words.setdefault(peer, []).append(word)
    return Outcome(
        loop.averager.peer_id,
        reports,
        words,
        population.history.generations,
        model.at.detach().clone(),
        [dict(each.hyperparameters) for each in population.lineage],
    )


async def run(
    count: int, *, plan: FaultPlan | None = None, generations: int = 6, **options: Any
) -> dict[int, Outcome]:
    network = MemoryNetwork(latency=LAN)
    work = partial(train, generations=generations, members=count, **options)
    return await run_loops(network, count, work, config=CONFIG, plan=plan)


def check_all_decisions(found: dict[int, Outcome], settings: PopulationSettings = SETTINGS) -> int:
    """Check each decision from the words that an observer has seen; return the number of copies."""
    copies = 0
    for observer in found.values():
        known = {
            word.standing.digest: (peer, word.standing)
            for peer, own in observer.words.items()
            for word in own
        }
        for peer, own in observer.words.items():
            for word in own:
                if word.decision is not None and set(word.decision.basis) <= known.keys():
                    assert check_decision(peer, word, known, settings) == ""
                    copies += bool(word.decision.donor)
    return copies


async def test_members_copy_the_better_ones_and_any_observer_repeats_each_decision() -> None:
    found = await run(5, generations=4)
    copies = [report for outcome in found.values() for report in outcome.reports if report.copied_from]
    assert copies
    # Each observer has seen all words, so it has repeated all decisions.
    assert check_all_decisions(found) == 5 * len(copies)
    assert all(len(outcome.generations) == 20 for outcome in found.values())
    assert all(outcome.generations == found[0].generations for outcome in found.values())
    for outcome in found.values():
        assert len(outcome.ancestors) == 4
        for report in outcome.reports[:-1]:
            if report.copied_from is not None:
                own = outcome.words[outcome.peer_id]
                donor = outcome.words[report.copied_from][report.generation - 1]
                decision = own[report.generation - 1].decision
                assert decision is not None
                assert decision.donor == donor.standing.digest
                assert own[report.generation].standing.parent == donor.standing.lineage
    worst = [min(own.reports, key=lambda each: each.generation).score for own in found.values()]
    ends = [own.reports[-1].score for own in found.values()]
    assert max(ends) < max(worst)


async def test_a_member_comes_late_and_copies_the_training_of_the_others() -> None:
    found = await run(4, generations=8, late=8.0, wait=1.0)
    late = found[0]
    copied = [report for report in late.reports if report.copied_from]
    assert copied
    assert len(late.ancestors) > 8 or late.reports[-1].score < 1.0


async def test_a_member_that_dies_while_it_is_copied_costs_no_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each copier copies another donor, or keeps its own weights."""
    network = MemoryNetwork(latency=LAN)
    killed: list[str] = []
    original = StateService.serve

    async def serve(self: StateService, stream: Stream) -> None:
        if not killed:
            killed.append(self._context.transport.peer_id)
            network.crash(killed[0])
            await trio.sleep_forever()
        await original(self, stream)

    monkeypatch.setattr(StateService, "serve", serve)
    work = partial(train, generations=3, members=5)
    found = await run_loops(network, 5, work, config=CONFIG)
    assert len(found) == 4
    assert killed[0] not in {outcome.peer_id for outcome in found.values()}
    reports = [report for outcome in found.values() for report in outcome.reports]
    failures = [report.failures[killed[0]] for report in reports if killed[0] in report.failures]
    assert failures
    for outcome in found.values():
        assert len(outcome.reports) == 3
        assert torch.isfinite(outcome.weights).all()
        for report in outcome.reports:
            if killed[0] in report.failures:
                own = outcome.words[outcome.peer_id][report.generation - 1]
                assert own.decision is not None
                assert len(own.decision.failed) >= 1
    check_all_decisions(found)


async def test_a_member_that_lies_about_its_score_is_copied_once_by_each_and_by_none_for_good() -> None:
    """Its weights score worse than the copier's own, which takes them back."""

    def train_or_lie(loop: SimulatedLoop) -> Outcome:
        if loop.index:
            return train(loop, generations=5, members=4)
        model, population, _ = member_of(loop, at=100.0)
        while population.generation < 5:
            loop.sleep(1.0)
            population.step(0.0)  # the best score that there is
        loop.sleep(60.0)
        return Outcome(loop.averager.peer_id, [], {}, (), model.at.detach(), [])

    network = MemoryNetwork(latency=LAN)
    found = await run_loops(network, 4, train_or_lie, config=CONFIG)
    liar = found.pop(0).peer_id
    reports = [report for outcome in found.values() for report in outcome.reports]
    taken_back = [report for report in reports if liar in report.failures]
    assert taken_back
    assert all("worse than this member's own" in report.failures[liar] for report in taken_back)
    assert all(report.copied_from != liar for report in reports)
    assert len(taken_back) <= 3
    assert all(report.score < 5.0 for report in reports), "with the liar's weights it would be thousands"
    for outcome in found.values():
        refusals = [report.refused.get(liar, "") for report in outcome.reports]
        caught = [report.generation for report in outcome.reports if liar in report.failures]
        if caught and caught[0] < 5:
            assert "are worse than" in refusals[-1]
    check_all_decisions(found)


async def test_words_of_other_settings_and_of_strangers_to_the_format_count_nothing() -> None:
    other = replace(SETTINGS, quantile=0.5)

    def play(loop: SimulatedLoop) -> Outcome | None:
        if loop.index == 1:
            train(loop, generations=3, settings=other)
            return None
        if loop.index >= 2:
            _, population, score = member_of(loop)
            while loop.index == 3 and population.generation < 1:
                loop.sleep(1.0)
                population.step(score)
            # The word that the last one has published before counts no longer.
            loop.averager.board(TOPIC).publish(b"not a word", now=True)
            loop.sleep(60.0)
            return None
        return train(loop, generations=3)

    found = await run_loops(MemoryNetwork(latency=LAN), 4, play, config=CONFIG)
    report = found[0].reports[-1]  # type: ignore[union-attr]
    assert report.counted == ()
    assert report.copied_from is None
    assert sorted(report.refused.values())[0] == "its population has other settings"
    assert ["no Word" in why for why in sorted(report.refused.values())[1:]] == [True, True]


async def test_a_score_that_is_not_finite_counts_nothing_and_its_member_copies_another() -> None:
    def play(loop: SimulatedLoop) -> Outcome:
        if loop.index:
            return train(loop, generations=3, members=3)

        def spoil(model: Task, population: Population) -> None:
            if population.generation == 0 and population.is_due:
                model.at.data.fill_(math.nan)

        return train(loop, generations=3, members=3, before=spoil)

    found = await run_loops(MemoryNetwork(latency=LAN), 3, play, config=CONFIG)
    diverged = found[0]
    assert math.isnan(diverged.reports[0].score)
    assert diverged.reports[0].copied_from is not None
    assert torch.isfinite(diverged.weights).all()
    for outcome in (found[1], found[2]):
        assert diverged.peer_id not in outcome.reports[0].counted
        assert outcome.reports[0].refused[diverged.peer_id] == "its training has diverged"


async def test_all_members_can_end_with_the_best_weights() -> None:
    def play(loop: SimulatedLoop) -> tuple[str, str | None, torch.Tensor, torch.Tensor]:
        model, population, score = member_of(loop, 10.0 * (loop.index + 1), settings, members=3)
        with pytest.raises(ValueError, match="has not finished a generation"):
            population.take_best(score)
        population.step(score)
        loop.sleep(5.0)
        before, taken = model.at.detach().clone(), population.take_best(score)
        loop.sleep(20.0)  # the others copy this member
        return loop.averager.peer_id, taken, before, model.at.detach().clone()

    settings = replace(SETTINGS, interval=1, quantile=0.01)
    found = await run_loops(MemoryNetwork(latency=LAN), 3, play, config=CONFIG)
    best = found[0][0]
    assert [taken for _, taken, _, _ in found.values()].count(None) >= 1
    assert found[0][1] is None
    assert found[1][1] == best
    for _, _, _, after in found.values():
        assert torch.equal(after, found[0][2])


async def test_a_copy_of_the_best_that_fails_leaves_what_was_copied_before() -> None:
    """A member that has copied another one, and then cannot take the best, has the weights and the life of that one."""

    def play(loop: SimulatedLoop) -> tuple[torch.Tensor, int, torch.Tensor, int, str | None] | None:
        # The second is the best when all decide. The third has better weights for a moment, and claims so later.
        model, population, score = member_of(loop, [50.0, 20.0, 30.0][loop.index], settings, members=3)
        report = population.step(score)
        loop.sleep(5.0)
        if loop.index == 2:
            population.step(lambda: 0.001)  # a claim that no weights here confirm
        if loop.index:
            loop.sleep(60.0)
            return None
        assert report is not None
        assert report.copied_from is not None
        loop.sleep(10.0)
        copied, steps = model.at.detach().clone(), population.steps
        taken = population.take_best(score)
        return copied, steps, model.at.detach().clone(), population.steps, taken

    settings = replace(SETTINGS, interval=1, quantile=0.34)
    found = await run_loops(MemoryNetwork(latency=LAN), 3, play, config=CONFIG)
    copied, steps, after, steps_after, taken = found[0]  # type: ignore[misc]
    assert float(copied[0]) == 20.0
    assert taken is None
    assert torch.equal(after, copied)
    assert steps_after == steps


HALVES = replace(SETTINGS, quantile=0.5)


def trained_well(loop: SimulatedLoop) -> Outcome:
    return train(loop, generations=2, members=2, settings=HALVES, start={"lr": 0.1, "weight_decay": 1e-6})


@pytest.mark.parametrize("where", ["copy", "evaluation"])
async def test_a_copy_that_is_interrupted_gives_the_own_weights_back(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Ctrl-C in the midst of the weights of another member, or an evaluation of them that fails."""
    prepare = Weights.prepare

    def interrupted(weights: Weights, content: Content) -> Loaded:
        loaded = prepare(weights, content)

        def take() -> None:
            loaded.take()
            raise KeyboardInterrupt

        return replace(loaded, take=take)

    def play(loop: SimulatedLoop) -> torch.Tensor | Outcome:
        if loop.index:
            return trained_well(loop)
        model, population, measured = member_of(loop, 50.0, HALVES, members=2)
        calls = []

        def score() -> float:
            calls.append(float(model.at.detach()[0]))
            if len(calls) == 2:
                assert calls[1] < 10.0, "the other member's weights"
                raise RuntimeError("no data")
            return measured()

        for _ in range(HALVES.interval - 1):
            loop.sleep(1.0)
            population.step(score)
        with monkeypatch.context() as patched:
            if where == "copy":
                patched.setattr(Weights, "prepare", interrupted)
            with pytest.raises(KeyboardInterrupt if where == "copy" else RuntimeError):
                population.step(score)
        assert len(population.lineage) == 1, "the generation of its own weights"
        loop.sleep(20.0)
        own = model.at.detach().clone()
        if where == "evaluation":
            assert population.take_best(score) is not None, "its own word is what it compares with"
        return own

    found = await run_loops(MemoryNetwork(latency=LAN), 2, play, config=CONFIG)
    assert torch.equal(found[0], torch.full((64,), 50.0))  # type: ignore[arg-type]
