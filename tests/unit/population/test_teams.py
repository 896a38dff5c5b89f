"""The arguments of a team."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from p2pavg import AveragingConfig, blocking
from p2pavg.base.errors import ConfigError
from p2pavg.optim import AveragedOptimizer, RunState, StepReport
from p2pavg.population import TeamPopulation
from p2pavg.population.team_member import TeamMember
from p2pavg.population.teams import team_run
from tests.unit.population.samples import SETTINGS


@pytest.fixture(scope="module")
def averager() -> Any:
    config = AveragingConfig(run_id="lab")
    with blocking.open_averager(config, listen=["/ip4/127.0.0.1/tcp/0"], port_mapping=False) as found:
        yield found


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"team": ""}, "team must be a name"),
        ({"team": "é"}, "team must be text of at most 64 printable"),
        ({"team": 3}, "team must be text of at most 64 printable"),
        ({"wait": -1.0}, "wait must be a number of seconds"),
        ({"teams": -1}, "teams must be a whole number"),
        ({"copy_timeout": "1"}, "copy_timeout must be a number of seconds"),
        ({"scheduler": None}, "scheduler cannot be used"),
        ({"overlap": True}, "overlap cannot be used"),
        ({"min_peers": 1}, "min_peers cannot be used"),
        ({"start": {"lr": 0.1}}, "the hyperparameter 'kind' is missing"),
        ({"state": RunState(torch.nn.Linear(1, 1))}, "state must be that of model"),
        ({}, "SGD has no option 'kind'"),
    ],
)
def test_an_argument_that_a_team_cannot_use_is_named(
    averager: Any, changes: dict[str, Any], why: str
) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"team": "red", "target_batch_size": 8, **changes}
    with pytest.raises(ConfigError, match=why):
        TeamPopulation(averager, model, optimizer, SETTINGS, **given)


def test_a_peer_that_has_just_copied_is_not_behind_those_that_copied_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AveragedOptimizer, "_must_follow", lambda _, report: report.behind is not None)
    member = TeamMember.__new__(TeamMember)
    report = StepReport(
        epoch=4, peers=1, others=2, samples=0.0, samples_per_second=0.0, behind="others are ahead"
    )
    for copied in (False, True):
        member._has_switched = copied
        assert member._must_follow(report) is not copied


def test_teams_have_runs_of_their_own() -> None:
    assert team_run("lab", "red") == "lab/team red"
