"""AveragingConfig refuses values out of range, by name, and is immutable."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest

import p2pavg
from p2pavg import AveragingConfig, ConfigError
from p2pavg.group.candidate import Candidate
from p2pavg.group.participation import ByCapability, Participation, RandomFraction

MBPS = ("bandwidth", "max_upload_mbps", "max_download_mbps")


class Rule(Participation):
    """A participation rule with any text."""

    def __init__(self, text: str) -> None:
        self._text = text

    @property
    def text(self) -> str:
        return self._text

    def contributors(self, members: Sequence[Candidate]) -> frozenset[str]:
        return frozenset(member.peer_id for member in members)


REFUSED: list[tuple[str, object]] = [
    ("run_id", ""),
    ("run_id", "r" * 129),
    ("run_id", None),
    ("run_id", b"run"),
    ("run_id", "half a \ud800 character"),
    ("run_id", "clears\x1b[2J"),
    ("run_id", "two\nlines"),
    ("run_id", "a C1 \x9b2J"),
    *[
        (name, value)
        for name in ("group_size", "min_group_size")
        for value in (-1, 0, 1, 65, 2.0, "4", None, True)
    ],
    *[
        (name, value)
        for name in ("match_timeout", "exchange_timeout", *MBPS)
        for value in (0, -1.0, math.nan, math.inf, -math.inf, 10**400, "30", True)
    ],
    ("match_timeout", None),
    ("exchange_timeout", None),
    ("match_timeout", 1800.1),
    ("exchange_timeout", 1800.1),
    *[(name, 1e6 + 1) for name in MBPS],
    ("bandwidth", 0.099),
    ("bandwidth", 100_001),
    *[("topology", value) for value in ("", "ring", None, 1, "Star")],
    *[("max_weight", value) for value in (0, -1.0, math.nan, math.inf, 1.1e15, "30", True)],
    *[("participation", value) for value in ("half", 0.5, RandomFraction, Rule("x" * 513), Rule("\x1b"))],
    *[("robust", value) for value in ("mean", "", "trimmed_mean:0.5", 0.25, p2pavg.Median)],
    *[("name", value) for value in (None, b"x", "x" * 41, "\x1b[2J", "a\nb", "half a \ud800 character", 5)],
    *[("tags", value) for value in ("gpu", ["gpu"], ("",), ("x" * 33,), ("a\nb",), (b"gpu",), (5,), None)],
    *[
        ("compression", value)
        for value in (
            "gzip",
            "",
            "int8:100",
            "topk:64:17",
            "int4:32",
            "blockwise8:0",
            "fp32:64",
            8,
            b"fp32",
            p2pavg.Fp32,
        )
    ],
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: repr(value)[:30])
def test_out_of_range_values_are_named(name: str, value: object) -> None:
    arguments: dict[str, Any] = {"run_id": "run", name: value}
    with pytest.raises(ConfigError, match=rf"^{name}\b"):
        AveragingConfig(**arguments)


def test_number_of_tags_is_limited() -> None:
    assert len(AveragingConfig(run_id="run", tags=("x",) * 16).tags) == 16
    with pytest.raises(ConfigError, match="tags can be 16 at most, got 17"):
        AveragingConfig(run_id="run", tags=("x",) * 17)


def test_gossip_says_the_size_of_groups() -> None:
    assert AveragingConfig(run_id="run", topology="gossip").group_size == 2
    assert AveragingConfig(run_id="run", topology=p2pavg.Gossip(degree=7), min_group_size=5).group_size == 8
    assert AveragingConfig(run_id="run", topology="gossip:7", group_size=8).group_size == 8
    assert AveragingConfig(run_id="run", group_size=8).group_size == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 3}, "group_size is 3, and groups of the topology 'gossip:1:grid' have 2 members"),
        ({"min_group_size": 3}, "min_group_size must be a whole number from 2 to 2, got 3"),
        ({"participation": p2pavg.RandomFraction(0.5, 0)}, "participation must be None with the topology"),
    ],
)
def test_settings_that_contradict_gossip_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AveragingConfig(**{"run_id": "run", "topology": "gossip", **changes})


def test_a_topology_is_part_of_the_aggregation() -> None:
    by_text, by_object = (AveragingConfig(run_id="run", topology=each) for each in ("star", p2pavg.Star()))
    assert by_text.aggregation == by_object.aggregation
    assert by_text.aggregation.text == "topology:star"
    assert AveragingConfig(run_id="run", topology=p2pavg.Butterfly()).aggregation.text == ""


def test_rule_has_its_text() -> None:
    assert AveragingConfig(run_id="run").rule == ""
    capable = ByCapability(tags=("gpu",))
    assert AveragingConfig(run_id="run", participation=capable).rule == capable.text


def test_aggregation_has_the_rules_text() -> None:
    assert AveragingConfig(run_id="run").aggregation.text == ""
    by_text = AveragingConfig(run_id="run", robust="trimmed_mean")
    by_object = AveragingConfig(run_id="run", robust=p2pavg.TrimmedMean(0.25))
    assert by_text.aggregation == by_object.aggregation
    assert by_text.aggregation.text == "trimmed_mean:0.25"


@pytest.mark.parametrize("robust", ["median", "trimmed_mean", "centered_clip"])
def test_robust_rules_are_refused_with_a_sparse_codec(robust: str) -> None:
    with pytest.raises(ConfigError, match=r"^robust cannot be combined with the codec topk:4096:64:2"):
        AveragingConfig(run_id="run", compression="topk", robust=robust)
    AveragingConfig(run_id="run", compression="topk", max_norm=2.0, audit="before")
    AveragingConfig(run_id="run", compression="int4", robust=robust)


def test_group_size_is_at_least_min_group_size() -> None:
    with pytest.raises(ConfigError, match=r"^min_group_size must be a whole number from 2 to 3, got 4"):
        AveragingConfig(run_id="run", group_size=3, min_group_size=4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run_id", "r" * 128),
        ("run_id", "übung 1"),
        ("group_size", 2),
        ("group_size", 64),
        ("min_group_size", 4),
        ("participation", RandomFraction(0.5)),
        ("participation", ByCapability(min_bandwidth=50.0)),
        *[("robust", value) for value in (None, "median", "trimmed_mean:0.499", p2pavg.CenteredClip(2.0))],
        ("tags", ("x" * 32,)),
        ("tags", ("gpu", "fp16", "Übung 1")),
        ("match_timeout", 1800),
        ("match_timeout", 1e-3),
        ("exchange_timeout", 1800.0),
        *[(name, value) for name in MBPS for value in (1, None)],
        *[(name, value) for name in ("max_upload_mbps", "max_download_mbps") for value in (1e6, 5e-324)],
        *[("bandwidth", value) for value in (0.1, 1e5)],
        *[("max_weight", value) for value in (5e-324, 1, 1e15, None)],
    ],
)
def test_the_ends_of_the_ranges_are_allowed(name: str, value: object) -> None:
    arguments: dict[str, Any] = {"run_id": "run", name: value}
    assert getattr(AveragingConfig(**arguments), name) == value


@pytest.mark.parametrize(
    ("compression", "codec"),
    [
        (None, p2pavg.Fp32()),
        ("fp32", p2pavg.Fp32()),
        ("fp16", p2pavg.Fp16()),
        ("bf16", p2pavg.Bf16()),
        ("int8", p2pavg.Int8()),
        ("int8:128", p2pavg.Int8(block_size=128)),
        ("blockwise8", p2pavg.Blockwise8(block_size=64)),
        ("blockwise8:256", p2pavg.Blockwise8(block_size=256)),
        (p2pavg.Blockwise8(block_size=128), p2pavg.Blockwise8(block_size=128)),
    ],
)
def test_a_codec_by_name_or_as_an_object(compression: str | p2pavg.Codec | None, codec: p2pavg.Codec) -> None:
    assert AveragingConfig(run_id="run", compression=compression).codec == codec


def test_unknown_codec_error_lists_known_codecs() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown codec 'zip'; known are fp32, fp16, bf16, int8.*blockwise8"
    ):
        AveragingConfig(run_id="run", compression="zip")


def test_config_is_immutable() -> None:
    config = AveragingConfig(run_id="run")
    for field in dataclasses.fields(config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, getattr(config, field.name))
    assert not hasattr(config, "__dict__")
    assert config == AveragingConfig(run_id="run")
    assert hash(config) == hash(AveragingConfig(run_id="run"))
