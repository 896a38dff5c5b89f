"""Strategies go to JSON, TOML and run files, and come back; errors name the field."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from p2pavg import AveragingConfig, Median, RunFile
from p2pavg.base.errors import ConfigError
from p2pavg.base.formats import PeerText
from p2pavg.group.strategy import MAX_STRATEGY_CHARS, canonical, check_text, mark, mark_in, read_table
from p2pavg.optim import Cells
from p2pavg.population import Choice
from p2pavg.runs.membership.run_file import MAX_RUN_FILE_BYTES, parse_run_file
from p2pavg.runs.records.run_entry import RunEntry, why_apart
from p2pavg.strategies import (
    Custom,
    DataParallel,
    Federated,
    PopulationBased,
    Strategy,
    read_json,
    read_toml,
    strategy_of,
)
from tests.unit.strategies.samples import FUNCTION, STRATEGIES

each = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.kind)


def run_file(**changes: Any) -> RunFile:
    return RunFile(**{"run_id": "lab", "authority": bytes(32), "secret": bytes(32), **changes})


@each
def test_a_strategy_stands_in_a_run_file_and_in_a_configuration(strategy: Strategy) -> None:
    run = run_file(strategy=strategy.json)
    again = parse_run_file(run.text)
    assert again == run
    assert strategy_of(again) == strategy
    config = AveragingConfig(**again.settings)
    assert strategy_of(config) == strategy
    assert "[strategy]" in run.text


def test_without_a_strategy_there_is_none() -> None:
    assert strategy_of(run_file()) is None
    assert "strategy" not in run_file().text
    assert strategy_of(AveragingConfig(run_id="lab")) is None


def test_the_longest_strategy_has_room_in_a_run_file() -> None:
    long = Custom(FUNCTION, {"a": "x" * (MAX_STRATEGY_CHARS - 140)})
    assert len(run_file(strategy=long.json).text) <= MAX_RUN_FILE_BYTES


def test_a_run_file_with_a_malformed_strategy_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match="strategy must be a table"):
        parse_run_file(run_file().text + "strategy = 'local'\n")
    with pytest.raises(ConfigError, match=r"strategy\.kind must be text"):
        parse_run_file(run_file().text + "[strategy]\nversion = 1\n")
    with pytest.raises(ConfigError, match="strategy must be the canonical text"):
        run_file(strategy='{"kind":"local", "version":1}')


def test_equal_strategies_have_equal_texts() -> None:
    one = Federated(rule="diloco", sync_every=4, options={"lr": 0.5, "momentum": 0.25})
    assert one.json == replace(one, options={"momentum": 0.25, "lr": 0.5}).json
    assert canonical(read_table(one.json)) == one.json
    check_text(one.json)
    with pytest.raises(ConfigError):
        check_text(" " + one.json)


def test_a_custom_strategy_from_a_text_is_not_the_callers_own() -> None:
    own = Custom(FUNCTION, {"sync_every": 2})
    assert type(own.function) is str
    for found in (read_json(own.json), read_toml(own.toml), strategy_of(run_file(strategy=own.json))):
        assert isinstance(found, Custom)
        assert found == own
        for same in (found, replace(found, options={}), copy.copy(found)):
            assert isinstance(same.function, PeerText), "the distrust goes along into every copy"


def test_choices_keep_their_types() -> None:
    strategy = PopulationBased(space={"kind": Choice((1, 1.5, "one", True))}, interval=3)
    found = read_toml(strategy.toml)
    assert isinstance(found, PopulationBased)
    assert repr(found.space["kind"]) == repr(Choice((1, 1.5, "one", True)))


def test_other_rules_of_participation_are_told_apart_from_strategies() -> None:
    config = AveragingConfig(run_id="lab", strategy=STRATEGIES[1].json)
    entry = RunEntry(
        schema_hash=bytes(32),
        tensors=1,
        elements=1,
        codec="fp32",
        group_size=4,
        rule=config.rule,
        aggregation="",
    )
    rule = f"fraction 0x1p-1 seed 0 {mark(STRATEGIES[1].json)}"
    assert mark_in(rule) == mark_in(entry.rule) == mark(STRATEGIES[1].json)
    assert "another participation rule" in why_apart(entry, [msgspec.structs.replace(entry, rule=rule)])


def test_cells_have_one_text_however_they_are_given() -> None:
    cells = Cells(count=3, timeout=5, robust=Median())
    table = {"count": 3, "timeout": 5.0, "robust": "median"}
    strategies = [DataParallel(target_batch_size=8, cells=each) for each in (cells, table)]
    assert strategies[0] == strategies[1]
    assert len({each.json for each in strategies}) == 1
    assert hash(strategies[0]) == hash(strategies[1])
    assert '"cells":{"count":3,"delay":0,"every":50,' in strategies[0].json
    assert "[strategy.cells]\ncount = 3\n" in strategies[0].toml
