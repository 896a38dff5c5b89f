"""The work function of the processes in the test of teams."""

from __future__ import annotations

import torch

import p2pavg
from p2pavg.population import LogUniform, PopulationSettings, TeamPopulation
from p2pavg.testing.swarm import Member
from tests.integration.optim.state_work import digest_of

# A rate that is copied is multiplied by a factor. With the usual setting, a quarter of them are drawn anew instead.
SETTINGS = PopulationSettings(
    space={"lr": LogUniform(1e-6, 1.0)}, interval=2, quantile=0.5, resample_probability=0.0
)
RATES = {"slow": 1e-6, "fast": 0.05}
BATCH = 8


def train(member: Member) -> None:
    """Take part in a team until it has decided once, and report that update. Argument: ``team``."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1, bias=False)
    torch.manual_seed(member.index)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    wanted = torch.linspace(-1.0, 1.0, 8)
    team = member.arguments["team"]

    def score() -> float:
        return float((model.weight.detach()[0] - wanted).square().mean())

    config = p2pavg.AveragingConfig(run_id="teams")
    with member.averager(config) as averager:
        population = TeamPopulation(
            averager,
            model,
            optimizer,
            SETTINGS,
            team=team,
            target_batch_size=2 * BATCH,
            start={"lr": RATES[team]},
            teams=2,
            wait=60.0,
            peers_to_start=2,
            max_samples_per_peer=BATCH,
        )
        while population.generation < 1:
            population.zero_grad()
            inputs = torch.randn(BATCH, 8)
            torch.autograd.backward((model(inputs)[:, 0] - inputs @ wanted).square().mean())
            report = population.step(score, samples=BATCH)
        decided = report.generation
        member.report(
            team=team,
            copied_from=None if decided is None else decided.copied_from,
            weights=digest_of(model),
            moments=float(sum(state["exp_avg"].double().sum() for state in optimizer.state.values())),
            lineage=population.optimizer.lineage.state.hex(),
            lr=optimizer.param_groups[0]["lr"],
        )
        member.told(120.0)
