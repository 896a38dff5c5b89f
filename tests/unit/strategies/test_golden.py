"""The texts of strategies and all errors about their fields are those of ``golden.txt``.

The file holds expressions after ``>>>``, each with what comes of it: the JSON and the TOML of a strategy, or the error.
Peers of other versions read these texts, so a change of one of them is a change that users notice.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from p2pavg import AveragingConfig, Gossip, Hierarchical, Median, Star
from p2pavg.base.errors import ConfigError
from p2pavg.optim import Cells
from p2pavg.population import Choice, LogUniform, Uniform
from p2pavg.strategies import (
    Custom,
    DataParallel,
    Federated,
    Local,
    ModelParallel,
    PopulationBased,
    Strategy,
    read_json,
    read_toml,
)
from tests.unit.strategies.test_optimizers import made_by

LARGE = {"kind": "data_parallel", "target_batch_size": 64}
STEPS = {"kind": "federated", "rule": "fedavg", "sync_every": 4}
SPACE = {"lr": {"kind": "uniform", "low": 0.1, "high": 1}}


def read(**table: Any) -> Strategy:
    """Return the strategy of a table of this version."""
    return read_json(json.dumps({"version": 1, **table}))


def read_from(given: dict[str, Any], **changes: Any) -> Strategy:
    """Return the strategy of a table with changes."""
    return read(**(given | changes))


NAMES: dict[str, Any] = {
    **{
        each.__name__: each
        for each in (Cells, Choice, Gossip, Hierarchical, LogUniform, Median, Star, Uniform)
    },
    **{
        each.__name__: each
        for each in (Custom, DataParallel, Federated, Local, ModelParallel, PopulationBased)
    },
    "config": partial(AveragingConfig, run_id="lab"),
    "made_by": made_by,
    "read": read,
    "read_json": read_json,
    "read_toml": read_toml,
    "large": partial(read_from, LARGE),
    "steps": partial(read_from, STEPS),
    "population": partial(read_from, {"kind": "population_based", "space": SPACE, "interval": 3}),
    "divided": partial(read_from, {"kind": "model_parallel", "training": LARGE}),
    "own": partial(read_from, {"kind": "custom", "function": "module:function"}),
    "LARGE": LARGE,
    "STEPS": STEPS,
}
# A line that begins with "# " is a heading.
GOLDEN = re.sub("^# .*", "", Path(__file__).with_name("golden.txt").read_text("utf-8"), flags=re.MULTILINE)
CASES = [tuple(map(str.strip, case.split("\n", 1))) for case in GOLDEN.split(">>> ")[1:]]


def outcome_of(expression: str) -> str:
    """Return the texts of a strategy, or the error."""
    try:
        found = eval(expression, dict(NAMES))
    except ConfigError as error:
        return f"ConfigError: {error}"
    assert isinstance(found, Strategy)
    assert read_json(found.json) == read_toml(found.toml) == found
    assert json.loads(found.json)["version"] == 1
    return f"{found.json}\n{found.toml}".strip()


@pytest.mark.parametrize(("expression", "outcome"), CASES)
def test_the_outcome_is_that_of_the_file(expression: str, outcome: str) -> None:
    assert outcome_of(expression) == outcome


def test_each_case_stands_once() -> None:
    assert len({expression for expression, _ in CASES}) == len(CASES)
