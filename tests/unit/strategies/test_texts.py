"""Strategies go to JSON, TOML and run files, and come back; errors name the field."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from p2pavg import AveragingConfig, Median, RunFile
from p2pavg.base.errors import ConfigError
from p2pavg.group.strategy import MAX_STRATEGY_CHARS, canonical, check_text, mark, mark_in, read_table
from p2pavg.optim import Cells
from p2pavg.population import Choice, Uniform
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
def test_a_strategy_comes_back_from_json_and_toml(strategy: Strategy) -> None:
    assert read_json(strategy.json) == strategy
    assert read_toml(strategy.toml) == strategy
    assert read_json(strategy.json).json == strategy.json
    assert json.loads(strategy.json)["version"] == 1


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
    space = {f"hyperparameter_{number}": Uniform(0.123456789, 1.0) for number in range(16)}
    with pytest.raises(ConfigError, match="characters as text, 1024 is the most"):
        _ = PopulationBased(space=space, interval=10).json
    long = Custom(FUNCTION, {"a": "x" * (MAX_STRATEGY_CHARS - 140)})
    assert len(run_file(strategy=long.json).text) <= MAX_RUN_FILE_BYTES


def changed(strategy: Strategy, **changes: Any) -> str:
    return json.dumps({**json.loads(strategy.json), **changes})


def inside(strategy: Strategy, **changes: Any) -> str:
    """Return a strategy of model parallel peers with changes of the strategy inside of it."""
    return changed(strategy, training=json.loads(strategy.json)["training"] | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "strategy is not JSON"),
        ("[]", "strategy must be a JSON object"),
        ('{"version": 1, "version": 1, "kind": "local"}', "a key stands twice"),
        ("[" * 5000, "strategy must be JSON of at most|strategy is not JSON"),
        ('{"kind": "local"}', "strategy.version must be 1"),
        ('{"version": 2, "kind": "local"}', "strategy.version must be 1: this p2pavg reads no other"),
        ('{"version": true, "kind": "local"}', "strategy.version must be 1"),
        ('{"version": 1}', "strategy.kind must be text"),
        ('{"version": 1, "kind": "pipeline"}', "strategy.kind must be one of local, data_parallel"),
        ('{"version": 1, "kind": "model_parallel"}', r"strategy\.training is missing"),
        (changed(STRATEGIES[12], training="mean"), r"strategy\.training\.kind must be one of data_parallel"),
        (
            changed(STRATEGIES[12], training={"kind": "custom", "function": "os:system"}),
            r"training\.kind must be",
        ),
        (
            changed(STRATEGIES[12], training={"kind": "data_parallel"}),
            r"training\.target_batch_size is missing",
        ),
        (inside(STRATEGIES[12], version=1), r"strategy\.training\.version is unknown"),
        (
            inside(STRATEGIES[12], target_batch_size=0),
            r"strategy\.training\.target_batch_size must be a number",
        ),
        (inside(STRATEGIES[12], overlap=True), r"strategy\.training\.overlap must be False if ranks divide"),
        (inside(STRATEGIES[13], rule="gossip", options={}), r"strategy\.training\.rule must not be gossip"),
        (
            inside(STRATEGIES[13], delay=2),
            r"strategy\.training\.delay must be 0 if ranks divide the model, got 2",
        ),
        (inside(STRATEGIES[13], selection=0.5), r"strategy\.training\.selection must be 1\.0"),
        (inside(STRATEGIES[13], fragments=2), r"strategy\.training\.fragments must be 1"),
        (changed(STRATEGIES[12], stages=0), r"strategy\.stages must be a whole number from 1"),
        (changed(STRATEGIES[12], copies=True), r"strategy\.copies must be a whole number from 1"),
        (changed(STRATEGIES[12], stages=2**16, shards=2), r"stages \* copies \* shards \* tensor is 131072"),
        (
            changed(STRATEGIES[12], microbatches=1),
            r"strategy\.microbatches must be at least stages, 2, got 1",
        ),
        (
            changed(STRATEGIES[13], stages=2),
            r"strategy\.microbatches is missing: give 2 or more for 2 stages",
        ),
        (changed(STRATEGIES[12], schedule="zero"), r"strategy\.schedule must be one of 1f1b, gpipe"),
        ('{"version": 1, "kind": "local", "lr": 1}', "strategy.lr is unknown; local has no fields"),
        ('{"version": 1, "kind": "local", "a b": 1}', "the key 'a b', which is no name"),
        ('{"version": 1, "kind": "local", "x": NaN}', "strategy.x must be finite"),
        ('{"version": 1, "kind": "local", "x": null}', "strategy.x must be text, a number"),
        ('{"version": 1, "kind": "local", "x": {"x": {"x": {"x": {"x": 1}}}}}', "is nested too deeply"),
        (
            changed(STRATEGIES[1], target_batch_size=0),
            r"strategy\.target_batch_size must be a number above 0",
        ),
        (changed(STRATEGIES[1], target_batch_size="64"), r"strategy\.target_batch_size must be a number"),
        (
            changed(STRATEGIES[1], topology="ring"),
            r"strategy\.topology: a topology is 'butterfly', 'star', 'hierarchical', 'gossip' or .* got 'ring'",
        ),
        (
            changed(STRATEGIES[1], topology="gossip"),
            r"strategy\.topology cannot be 'gossip:1:grid': all peers",
        ),
        (
            changed(STRATEGIES[3], topology="gossip"),
            r"strategy\.topology cannot be 'gossip:1:grid' with fedavg",
        ),
        (
            changed(STRATEGIES[10], topology="gossip"),
            r"strategy\.options\.group_size is 4, and groups of the topology",
        ),
        (changed(STRATEGIES[1], cells=2), r"strategy\.cells must be a table, p2pavg\.optim\.Cells"),
        (changed(STRATEGIES[1], cells={"every": 2}), r"strategy\.cells\.count is missing"),
        (
            changed(STRATEGIES[1], cells={"count": 1}),
            r"strategy\.cells\.count must be a number of cells from 2",
        ),
        (
            changed(STRATEGIES[1], cells={"count": 2, "evry": 2}),
            r"strategy\.cells\.evry is unknown; cells has count",
        ),
        (
            changed(STRATEGIES[1], cells={"count": 2, "every": 2, "delay": 2}),
            r"strategy\.cells\.delay must be",
        ),
        (changed(STRATEGIES[1], cells={"count": 2, "timeout": "5"}), r"strategy\.cells\.timeout must be"),
        (changed(STRATEGIES[1], cells={"count": 2, "robust": "best"}), r"strategy\.cells\.robust: a rule is"),
        (
            changed(STRATEGIES[1], cells={"count": 2}, overlap=True),
            r"strategy\.overlap must be False with cells, got True",
        ),
        (
            changed(STRATEGIES[1], cells={"count": 2}, aggregation="median"),
            r"strategy\.aggregation must be 'mean' with cells",
        ),
        (
            inside(STRATEGIES[12], cells={"count": 2}),
            r"strategy\.training\.cells must be None if ranks divide the model",
        ),
        (changed(STRATEGIES[1], aggregation="best"), r"strategy\.aggregation: a rule is"),
        (changed(STRATEGIES[1], overlap=1), r"strategy\.overlap must be true or false"),
        ('{"version": 1, "kind": "data_parallel"}', r"strategy\.target_batch_size is missing"),
        (changed(STRATEGIES[3], rule="fedbest"), r"strategy\.rule must be one of diloco"),
        (changed(STRATEGIES[3], sync_every=2.5), r"strategy\.sync_every must be a whole number"),
        (
            changed(STRATEGIES[3], sync_every="often"),
            r"strategy\.sync_every must be a number of steps, or a time",
        ),
        (changed(STRATEGIES[3], fragments=3), r"strategy\.sync_every must be a multiple of fragments"),
        (changed(STRATEGIES[3], delay=-1), r"strategy\.delay must be a whole number from 0"),
        (changed(STRATEGIES[3], delay=5), r"strategy\.delay must be at most"),
        (changed(STRATEGIES[3], alpha=1.5), r"strategy\.alpha must be a number from 0"),
        (changed(STRATEGIES[3], grace=0), r"strategy\.grace must be"),
        (changed(STRATEGIES[3], rounds=0), r"strategy\.rounds must be a whole number"),
        (changed(STRATEGIES[3], selection=0), r"strategy\.selection: fraction must be above 0"),
        (changed(STRATEGIES[3], options={"lr": 1}), r"strategy\.options\.lr is unknown; fedavg has none"),
        (changed(STRATEGIES[4], options={"lr": -1}), r"strategy\.options\.lr must be a number from 0"),
        (changed(STRATEGIES[3], rule="fedprox"), r"strategy\.options\.mu is missing"),
        (changed(STRATEGIES[6], space=3), r"strategy\.space must be a table"),
        (
            changed(STRATEGIES[6], space={"lr": {"kind": "normal"}}),
            r"strategy\.space\.lr\.kind must be one of",
        ),
        (
            changed(STRATEGIES[6], space={"lr": {"kind": "uniform", "low": 1}}),
            r"strategy\.space\.lr must have high",
        ),
        (
            changed(STRATEGIES[6], space={"lr": {"kind": "uniform", "low": 2, "high": 1}}),
            r"strategy\.space\.lr\.low must be below high",
        ),
        (changed(STRATEGIES[6], quantile=0.9), r"strategy\.quantile must be"),
        (changed(STRATEGIES[7], function="os.system"), r"strategy\.function must be like 'module:function'"),
        (changed(STRATEGIES[7], options={"model": 1}), r"strategy\.options has the name 'model'"),
    ],
)
def test_a_text_that_is_wrong_names_its_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_json(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "it is not TOML"),
        ("a = 1", r"has one table, \[strategy\]"),
        ("[strategy]\nversion = 1\nkind = 'local'\nsince = 2026-01-01", r"strategy\.since must be text"),
        ("#" * 9000, "at most 8192 characters"),
    ],
)
def test_toml_that_is_wrong_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_toml(text)


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
    assert own.is_own
    for found in (read_json(own.json), read_toml(own.toml), strategy_of(run_file(strategy=own.json))):
        assert isinstance(found, Custom)
        assert not found.is_own
        assert found == own


def test_a_population_of_teams_has_the_strategy_inside_of_its_teams() -> None:
    strategy = STRATEGIES[-1]
    assert isinstance(strategy, PopulationBased)
    assert strategy.training is not None
    config = strategy.config(AveragingConfig(run_id="lab"))
    assert config.robust == "median"
    assert "[strategy.training]" in strategy.toml
    assert read_toml(strategy.toml) == strategy
    with pytest.raises(ConfigError, match=r"strategy\.training\.kind must be one of data_parallel"):
        read_json(inside(strategy, kind="federated"))
    with pytest.raises(ConfigError, match=r"strategy\.training\.overlap must be False"):
        read_json(inside(strategy, overlap=True))
    with pytest.raises(ConfigError, match=r"strategy\.training\.cells must be None in a team"):
        read_json(inside(strategy, cells={"count": 2}, aggregation="mean"))
    with pytest.raises(ConfigError, match=r"strategy\.training\.target_batch_size must be a number"):
        read_json(inside(strategy, target_batch_size=0))
    with pytest.raises(ConfigError, match="training must be DataParallel"):
        PopulationBased(space=strategy.space, interval=3, training="mean")  # type: ignore[arg-type]


def test_choices_keep_their_types() -> None:
    strategy = PopulationBased(space={"kind": Choice((1, 1.5, "one", True))}, interval=3)
    found = read_toml(strategy.toml)
    assert isinstance(found, PopulationBased)
    assert repr(found.space["kind"]) == repr(Choice((1, 1.5, "one", True)))


class TestRecords:
    """The strategy is part of what peers must share to meet."""

    def entry(self, strategy: Strategy | None, **changes: Any) -> RunEntry:
        config = AveragingConfig(run_id="lab", strategy="" if strategy is None else strategy.json)
        given: dict[str, Any] = {
            "schema_hash": bytes(32),
            "tensors": 1,
            "elements": 1,
            "codec": "fp32",
            "group_size": 4,
            "rule": config.rule,
            "aggregation": "",
        }
        return RunEntry(**(given | changes))

    def test_peers_of_other_strategies_hear_why_they_do_not_meet(self) -> None:
        one, other, none = self.entry(STRATEGIES[1]), self.entry(STRATEGIES[3]), self.entry(None)
        assert why_apart(one, [one]) == ""
        assert why_apart(one, [other]) == "1 peer of this run averages with another strategy than yours"
        assert why_apart(one, [none, none]) == "2 peers of this run average without your strategy"
        assert why_apart(none, [one]) == "1 peer of this run averages with a strategy, and you have none"

    def test_other_rules_of_participation_are_told_apart_from_strategies(self) -> None:
        one = self.entry(STRATEGIES[1])
        rule = f"fraction 0x1p-1 seed 0 {mark(STRATEGIES[1].json)}"
        assert mark_in(rule) == mark_in(one.rule) == mark(STRATEGIES[1].json)
        assert "another participation rule" in why_apart(one, [self.entry(STRATEGIES[1], rule=rule)])


def test_cells_have_one_text_however_they_are_given() -> None:
    cells = Cells(count=3, timeout=5, robust=Median())
    table = {"count": 3, "timeout": 5.0, "robust": "median"}
    strategies = [DataParallel(target_batch_size=8, cells=each) for each in (cells, table)]
    assert strategies[0] == strategies[1]
    assert len({each.json for each in strategies}) == 1
    assert hash(strategies[0]) == hash(strategies[1])
    assert '"cells":{"count":3,"delay":0,"every":50,' in strategies[0].json
    assert "[strategy.cells]\ncount = 3\n" in strategies[0].toml


def test_a_wrong_argument_is_named() -> None:
    with pytest.raises(ConfigError, match="topology: a topology is 'butterfly', 'star', "):
        DataParallel(target_batch_size=1, topology="ring")
