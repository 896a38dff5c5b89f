"""Teams of simulated peers in a population: equal bits, decisions that others repeat, deaths, lies, late peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from trio.testing import MockClock

from p2pavg import AveragingConfig
from p2pavg.net.transport import Stream
from p2pavg.optim import RunState
from p2pavg.population import (
    Ballot,
    Generation,
    GenerationReport,
    LogUniform,
    PopulationSettings,
    TeamPopulation,
    TeamWord,
    check_ballot,
)
from p2pavg.population.team_life import pack_life
from p2pavg.population.team_member import TeamMember
from p2pavg.population.team_rules import vote_for
from p2pavg.population.team_turn import Turns
from p2pavg.state.checkpoint import read as read_checkpoint
from p2pavg.state.donor.service import StateService
from p2pavg.testing import FaultPlan, MemoryNetwork, SimulatedLoop, run_loops
from tests.simulation.swarm import LAN

SETTINGS = PopulationSettings(space={"lr": LogUniform(1e-3, 0.3)}, interval=3, quantile=0.5, seed=3)
CONFIG = AveragingConfig(run_id="teams", match_timeout=10.0)
BATCH = 8
RATES = {"slow": 1e-3, "fast": 0.2, "middle": 0.03}


class Task(torch.nn.Module):
    """Distance from a point: a small rate learns too slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.at = torch.nn.Parameter(torch.full((64,), 3.0))

    def forward(self) -> torch.Tensor:
        return (self.at - 1.0).square().mean()


@dataclass
class Outcome:
    """The results of one peer."""

    peer_id: str
    team: str
    reports: list[GenerationReport] = field(default_factory=list)
    words: list[tuple[str, TeamWord]] = field(default_factory=list)
    generations: tuple[Generation, ...] = ()
    picture: str = ""
    after: dict[int, tuple[bytes, bytes, dict[str, Any], int]] = field(default_factory=dict)
    """By update: digest of the lineage, bytes of the weights and of the momentum, hyperparameters, generation."""
    loaded: int = 0
    lives: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By update: the team's life."""


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


def train(
    loop: SimulatedLoop,
    team: str,
    *,
    generations: int = 4,
    teams: int = 2,
    peers: int = 2,
    late: float = 0.0,
    score: Callable[[Task, TeamPopulation], float] | None = None,
    directory: Path | None = None,
    **options: Any,
) -> Outcome:
    if late:
        loop.sleep(late)
    model = Task()
    inner = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    population = TeamPopulation(
        loop.averager,
        model,
        inner,
        SETTINGS,
        team=team,
        target_batch_size=BATCH * peers,
        start={"lr": RATES[team]},
        teams=teams,
        wait=20.0,
        peers_to_start=peers,
        state=model if directory is None else RunState(model, directory, every=1, keep=100),
        **options,
    )
    found = Outcome(loop.averager.peer_id, team)

    own: list[bytes] = []

    def measure() -> float:
        own.append(bits(model.at))
        return float(model().detach()) if score is None else score(model, population)

    while population.generation < generations:
        population.zero_grad()
        torch.autograd.backward(model())
        loop.sleep(1.0)
        own.clear()
        report = population.step(measure, samples=BATCH)
        if own:
            assert bits(model.at) == own[0], "what was tried was put back"
        if report.generation is not None:
            found.reports.append(report.generation)
            if report.generation.copied_from:
                states = population.optimizer._states
                assert states is not None
                shelf = states._sharing.shelf
                assert (shelf.snapshot, shelf.log) == (None, ()), (
                    "nothing leads to the weights that were replaced"
                )
        note(found, population, model, inner)
    for _ in range(10):  # the others' last words come
        loop.sleep(1.0)
        _ = population.history
    found.words = population.history.words()
    found.generations = population.history.generations
    found.picture = population.history.svg("lr")
    found.loaded = population.optimizer.states_loaded
    return found


def note(found: Outcome, population: TeamPopulation, model: Task, inner: torch.optim.Optimizer) -> None:
    momentum = inner.state[model.at].get("momentum_buffer")
    held = bits(model.at) + (b"" if momentum is None else bits(momentum))
    lineage = population.optimizer.lineage
    found.lives[lineage.epoch] = pack_life(population.optimizer.life)
    found.after[lineage.epoch] = (
        lineage.state,
        held,
        dict(population.hyperparameters),
        population.generation,
    )


async def run(
    teams: dict[int, str],
    *,
    plan: FaultPlan | None = None,
    play: Callable[..., Outcome] = train,
    **options: Any,
) -> dict[int, Outcome]:
    count = len(set(teams.values()))

    def work(loop: SimulatedLoop) -> Outcome:
        return play(loop, teams[loop.index], **{"teams": count, **options})

    return await run_loops(MemoryNetwork(latency=LAN), len(teams), work, config=CONFIG, plan=plan)


def check_bits(found: dict[int, Outcome]) -> int:
    """Check that the peers of each team hold the same at each update; return the updates that two peers held."""
    shared = 0
    for team in {outcome.team for outcome in found.values()}:
        own = [outcome.after for outcome in found.values() if outcome.team == team]
        for epoch in set().union(*own):
            held = [after[epoch] for after in own if epoch in after]
            assert len(set(map(repr, held))) == 1, f"update {epoch} of {team}"
            shared += len(held) > 1
    return shared


def check_all_ballots(found: dict[int, Outcome]) -> int:
    """Check each ballot from the words that each observer has seen; return the number of checks."""
    checks = 0
    for observer in found.values():
        known = {word.digest(peer): (peer, word) for peer, word in observer.words}
        for peer, word in observer.words:
            if word.ballot is not None and set(word.ballot.basis) <= known.keys():
                assert check_ballot(peer, word, known, SETTINGS) == ""
                checks += 1
    return checks


async def test_the_peers_of_a_team_copy_the_better_team_together(autojump_clock: MockClock) -> None:
    teams = {0: "slow", 1: "slow", 2: "fast", 3: "fast"}
    found = await run(teams)
    assert check_bits(found) > 20
    for index, outcome in found.items():
        assert [report.generation for report in outcome.reports] == [1, 2, 3, 4], index
    slow, fast = found[0].reports, found[2].reports
    assert slow[0].copied_from == "fast"
    assert {report.copied_from for report in fast} == {None}
    assert [report.copied_from for report in slow] == [report.copied_from for report in found[1].reports]
    # The decision comes with update 4, and a copy counts as one more.
    assert [4 in outcome.after for outcome in found.values()] == [
        outcome.team == "fast" for outcome in found.values()
    ]
    assert check_all_ballots(found) >= 4 * 16
    assert all(outcome.loaded == 0 for outcome in found.values())
    # Each team is one line of the picture, which is the same wherever it is drawn.
    assert len({outcome.picture for outcome in found.values()}) == 1
    copies = [each for each in found[0].generations if each.copied_from]
    assert {each.peer_id for each in found[0].generations} == {"slow", "fast"}
    assert (copies[0].peer_id, copies[0].generation, copies[0].copied_from) == ("slow", 1, "fast")


async def test_a_peer_that_is_killed_while_it_copies_costs_itself(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = MemoryNetwork(latency=LAN)
    original = StateService.serve
    killed: list[str] = []

    async def serve(self: StateService, stream: Stream) -> None:
        if not killed:
            killed.append(stream.remote)
            network.crash(stream.remote)
        await original(self, stream)

    monkeypatch.setattr(StateService, "serve", serve)
    teams = ["slow", "slow", "slow", "fast", "fast"]

    def work(loop: SimulatedLoop) -> Outcome:
        return train(loop, teams[loop.index], generations=2)

    found = await run_loops(network, len(teams), work, config=CONFIG)
    assert len(found) == 4
    assert check_bits(found) > 10
    slow = [outcome for outcome in found.values() if outcome.team == "slow"]
    assert killed[0] not in {outcome.peer_id for outcome in slow}
    assert [outcome.reports[0].copied_from for outcome in slow] == ["fast", "fast"]


async def test_one_liar_in_a_team_changes_neither_its_score_nor_its_decision(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It claims the best score that there is, votes for an outcome of its own, and does not copy.

    It takes the weights from the other peers of its team then, as any peer that could not copy them.
    """
    liar = 2
    original = Turns.hold

    def hold(self: Turns, member: TeamMember, *args: Any, **options: Any) -> Any:
        held = original(self, member, *args, **options)
        if self._peer_id in liars:
            member.vote = vote_for(b"0123456789abcdef")
            member.prepared.clear()
        return held

    monkeypatch.setattr(Turns, "hold", hold)
    liars: set[str] = set()
    teams = ["slow", "slow", "slow", "fast", "fast"]

    def work(loop: SimulatedLoop) -> Outcome:
        if loop.index == liar:
            liars.add(loop.averager.peer_id)
            return train(loop, "slow", generations=1, score=lambda *_: 0.0)
        return train(loop, teams[loop.index], generations=2)

    found = await run_loops(MemoryNetwork(latency=LAN), len(teams), work, config=CONFIG)
    assert check_bits(found) > 10
    honest = [found[index].reports[0] for index in (0, 1)]
    assert [report.copied_from for report in honest] == ["fast", "fast"]
    assert all(report.score > 3.0 for report in honest)
    assert found[liar].loaded > 0
    assert found[0].loaded == found[1].loaded == 0


async def test_a_checkpoint_has_the_life_of_its_update(autojump_clock: MockClock, tmp_path: Path) -> None:
    teams = ["slow", "slow", "fast", "fast"]

    def work(loop: SimulatedLoop) -> Outcome:
        directory = tmp_path / str(loop.index) if loop.index in (0, 2) else None
        return train(loop, teams[loop.index], generations=2, directory=directory)

    found = await run_loops(MemoryNetwork(latency=LAN), len(teams), work, config=CONFIG)
    assert found[0].reports[0].copied_from == "fast"
    for index in (0, 2):
        checked = 0
        for path in (tmp_path / str(index)).glob("*"):
            if path.is_dir() or "download" in path.name:
                continue
            saved = read_checkpoint(path, verified=True)
            if saved.epoch in found[index].lives:
                checked += 1
                assert saved.common.values["extra"] == found[index].lives[saved.epoch]
        assert checked >= 5


@pytest.mark.long
async def test_a_late_peer_gets_the_weights_and_hyperparameters_of_its_team(
    autojump_clock: MockClock,
) -> None:
    teams = ["slow", "slow", "fast", "fast", "slow"]

    def work(loop: SimulatedLoop) -> Outcome:
        late = 20.0 if loop.index == 4 else 0.0
        return train(loop, teams[loop.index], generations=6, late=late)

    found = await run_loops(MemoryNetwork(latency=LAN), len(teams), work, config=CONFIG)
    assert check_bits(found) > 20
    assert found[4].loaded > 0
    late, companion = found[4].after, found[0].after
    shared = late.keys() & companion.keys()
    assert shared
    assert any(late[epoch][2] != {"lr": RATES["slow"]} for epoch in shared)


@pytest.mark.long
@pytest.mark.parametrize("hears_ballots", [True, False])
async def test_peers_that_have_heard_different_words_do_not_go_apart(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, hears_ballots: bool
) -> None:
    """One of two hears no other team in the first generation: there is no majority for a copy, and both keep.

    If they hear each other's ballots, both vote to keep. Otherwise each votes for its own ballot.
    """
    original = Turns._believed
    blind: list[str] = []

    def believed(self: Turns, own: str) -> dict[str, TeamWord]:
        if own == "slow" and not blind:
            blind.append(self._peer_id)
        words = original(self, own)
        first = self._mine is None or self._mine.standing.generation == 1
        if first and blind == [self._peer_id]:
            return {peer: word for peer, word in words.items() if word.standing.member == own}
        return words

    def chosen(self: Turns, member: TeamMember, mine: TeamWord) -> Ballot:
        assert self._mine is not None
        own = self._mine.ballot
        assert own is not None
        return choose(self, member, mine) if hears_ballots or mine.standing.generation > 1 else own

    choose = Turns._chosen
    monkeypatch.setattr(Turns, "_believed", believed)
    monkeypatch.setattr(Turns, "_chosen", chosen)
    found = await run({0: "slow", 1: "slow", 2: "fast", 3: "fast"}, generations=2)
    assert check_bits(found) > 10
    slow = [found[index].reports for index in (0, 1)]
    assert [[report.copied_from for report in reports] for reports in slow] == [[None, "fast"]] * 2
    assert all(("no proposal" in reports[0].reason) is not hears_ballots for reports in slow)
    proposed = [word.ballot.donor for _, word in found[0].words if word.ballot is not None]
    assert any(proposed)
    assert found[0].loaded == found[1].loaded == 0
