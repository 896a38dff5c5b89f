"""The benchmarks at a tiny size, without hivemind: they run, and print what they should. The figures mean nothing.

The benchmarks run in this process, and start the processes that they measure. Another process for the benchmark itself
would import torch once more for each test.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pavg.group.aggregation import read_aggregation
from scripts.benchmarks import netns
from scripts.benchmarks.attack import combine_shares, little_z
from scripts.benchmarks.crew import Crew, CrewError, Place
from scripts.benchmarks.figures import Report
from scripts.benchmarks.main import main
from scripts.benchmarks.systems import gloo, p2pavg
from scripts.benchmarks.vectors import vectors

pytestmark = pytest.mark.processes

Line = dict[str, Any]
Bench = Callable[..., list[Line]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Bench]:
    """A function that returns the lines that a small run prints."""
    at_sigterm = signal.getsignal(signal.SIGTERM)

    def run(name: str, *options: str) -> list[Line]:
        monkeypatch.setattr(sys, "argv", ["bench", name, "--small", *options])
        code = main()
        out, err = capsys.readouterr()
        assert code == 0, out + err
        return [json.loads(line) for line in out.splitlines()]

    yield run
    signal.signal(signal.SIGTERM, at_sigterm)


def medians(lines: list[Line]) -> dict[tuple[str, str], float]:
    """Parse the figures by system and name, and check that each range contains the median."""
    found = {}
    for line in lines:
        if "figure" in line:
            assert line["min"] <= line["median"] <= line["max"], line
            assert line["repeats"] >= 1, line
            found[line["system"], line["figure"]] = line["median"]
    return found


@pytest.mark.long
def test_allreduce_measures_all_systems_in_one_run(bench: Bench) -> None:
    lines = bench("allreduce", "--hivemind-python", "none", "--codecs", "blockwise8", "--rules", "median")
    found = medians(lines)
    ours = {figure for system, figure in found if system == "p2pavg blockwise8"}
    assert {"exchange", "step", "group", "error", "cpu", "resident", "memory above the round's start"} <= ours
    assert {figure for system, figure in found if system == "gloo"} >= {"step", "error", "cpu"}
    assert found["p2pavg blockwise8", "error"] < 0.05
    assert found["p2pavg blockwise8 median", "error"] < 0.05, "of two members, the median is the mean"
    assert found["gloo", "error"] < 1e-5
    assert 0 < found["floor blockwise8", "exchange"] <= found["floor blockwise8", "step"]
    assert ("p2pavg blockwise8 / floor blockwise8", "ratio of step") in found
    assert ("p2pavg blockwise8 / gloo", "ratio of step") in found
    assert ("p2pavg blockwise8 median / p2pavg blockwise8", "ratio of exchange") in found
    assert [line["skipped"] for line in lines if line["system"] == "hivemind"] == ["left out"]


@pytest.mark.long
def test_wan_reports_the_fraction_of_the_bound(bench: Bench) -> None:
    try:
        netns.check()
    except netns.NoNamespacesError as error:
        pytest.skip(str(error))
    found = medians(bench("wan", "--codecs", "fp32"))
    assert {system for system, figure in found if figure == "fraction of the bound"} == {
        "p2pavg fp32",
        "gloo",
    }
    names = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert netns.PREFIX not in names


def test_group(bench: Bench) -> None:
    found = medians(bench("group"))
    assert set(found) == {
        ("p2pavg", "last peer ready to commit"),
        ("p2pavg", "last peer ready to commit, 95th percentile"),
    }


@pytest.mark.long
def test_cold(bench: Bench) -> None:
    found = medians(bench("cold", "--hivemind-python", "none"))
    assert set(found) == {
        ("p2pavg", "processor: import p2pavg, after torch"),
        ("p2pavg", "processor: the first averager, after that"),
        ("p2pavg blockwise8", "start to first result on all"),
    }


def test_a_limit_is_a_part_of_a_systems_name() -> None:
    assert p2pavg("fp32", 2, max_upload_mbps=100.0).name == "p2pavg fp32 100.0"


@pytest.mark.long
def test_overlap(bench: Bench) -> None:
    lines = bench("overlap", "--mbps", "none")
    assert {line["figure"] for line in lines} == {
        "training without rounds",
        "training with rounds",
        "rounds in a window",
        "speed with rounds",
    }


@pytest.mark.long
def test_streaming_measures_training_alone_and_with_peers(bench: Bench) -> None:
    found = medians(bench("streaming"))
    kinds = {"alone", "diloco", "diloco in the background", "diloco in fragments"}
    assert {system for system, _ in found} == kinds
    assert found["alone", "speed"] == pytest.approx(1.0)
    assert all(found[kind, "updates"] > 0 for kind in kinds - {"alone"})


@pytest.mark.long
def test_streaming_measures_small_groups_beside_one_group(bench: Bench) -> None:
    found = medians(bench("streaming", "--mixing", "--peers", "3", "--codec", "bf16"))
    for name in ("diloco", "noloco", "gossip"):
        assert found[name, "samples per second of the others"] > 0
    assert found["diloco", "speed of the others"] == pytest.approx(1.0)


@pytest.mark.long
def test_streaming_measures_what_a_slow_peer_costs_the_others(bench: Bench) -> None:
    found = medians(bench("streaming", "--unequal", "--peers", "2"))
    names = {"all alike", "one ten times slower", "one with a tenth of the link"}
    assert {system for system, _ in found} == names
    assert all(found[name, "updates"] > 0 for name in names)


def test_codecs(bench: Bench) -> None:
    found = medians(bench("codecs"))
    names = {"fp32", "fp16", "bf16", "blockwise8", "int8"}
    if find_spec("numba"):
        names |= {"blockwise8 torch", "int8 torch"}
    figures = ("encode", "decode", "accumulate", "reduce", "error")
    assert set(found) == {(name, figure) for name in names for figure in figures}
    assert found["fp32", "error"] == 0.0
    assert 0.0 < found["blockwise8", "error"] < 0.05


def test_attack_compares_rules_with_the_clean_run(bench: Bench) -> None:
    lines = [line for line in bench("attack") if "figure" in line]
    clean = [line for line in lines if line["figure"] == "held-out loss"]
    assert [(line["system"], line["attackers"]) for line in clean] == [("mean", 0)]
    attacked = [line for line in lines if line["figure"] != "held-out loss"]
    assert {(line["system"], line["attack"]) for line in attacked} == {
        ("median", "none"),
        *((rule, attack) for rule in ("mean", "median") for attack in ("scale", "little")),
    }


def test_a_little_is_as_much_as_the_papers() -> None:
    """50 workers of which 24 attack: s = 2, Phi(z) < 24 / 26, and z = 1.43; without a majority to win over, 0."""
    assert little_z(50, 24) == pytest.approx(1.426, abs=1e-3)
    assert little_z(16, 1) == 0.0


def test_attacked_shares_are_combined_by_the_rule() -> None:
    rows = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(combine_shares(rows, read_aggregation("median")), rows.median(0).values)
    torch.testing.assert_close(combine_shares(rows, read_aggregation("")), rows.mean(0))


@pytest.mark.long
def test_state(bench: Bench) -> None:
    lines = [line for line in bench("state", "--hivemind-python", "none") if "figure" in line]
    assert {line["figure"] for line in lines} == {"fetch", "rate", "cpu"}
    assert {(line["donors"], line.get("Mbit/s each")) for line in lines} == {(2, None), (2, 400.0)}


@pytest.mark.long
def test_training_of_donors(bench: Bench) -> None:
    found = medians(bench("state", "--training"))
    assert found["p2pavg", "batches of a donor, no joiner"] > 0
    assert found["p2pavg", "batches of a donor, a joiner fetches"] > 0
    assert found["p2pavg", "fetched meanwhile"] > 0
    assert ("p2pavg", "training lost to a joiner") in found


def test_reduce(bench: Bench) -> None:
    found = medians(bench("reduce"))
    rules = {"trimmed_mean:0.25", "median", "centered_clip:1.0:1", "centered_clip:1.0:3"}
    assert set(found) == {("mean", "one part"), *itertools.product(rules, ["one part", "ratio to the mean"])}


def test_scale(bench: Bench) -> None:
    found = medians(bench("scale"))
    assert found["p2pavg", "group's members"] == 3
    assert found["p2pavg", "record calls per peer and round"] > 0
    assert found["p2pavg", "records held by a peer"] > 0


def test_a_wrong_result_is_reported_as_an_error() -> None:
    exact = replace(gloo(), tolerance=-1.0)  # no result is exact enough
    with vectors(2, 1_000) as folder:
        setup = {"elements": 1_000, "vectors": str(folder)}
        with Crew(exact, [Place()] * 2, setup) as crew:
            crew.ready()
            with pytest.raises(CrewError, match="the result is wrong"):
                crew.round()


def test_an_error_has_its_own_line(tmp_path: Path) -> None:
    report = Report(tmp_path / "lines")
    report.figure("some", "time", "s", [3.0, 1.0, 2.0], peers=4)
    report.error("some", "p2pavg", "the result is wrong")
    report.close()
    first, second = map(json.loads, (tmp_path / "lines").read_text().splitlines())
    assert (first["median"], first["min"], first["max"], first["repeats"], first["peers"]) == (2, 1, 3, 3, 4)
    assert second["error"] == "the result is wrong"
    assert report.errors == 1


@pytest.mark.long
def test_telemetry_measures_rounds_of_both_kinds(bench: Bench) -> None:
    found = medians(bench("telemetry"))
    figures = {figure for _, figure in found}
    assert {"round without telemetry", "round with telemetry", "cost of telemetry, round"} <= figures
    assert "cost of telemetry, processor time of a member and round" in figures
    assert all(value > 0 for (_, figure), value in found.items() if figure.startswith("round"))
