"""The page's script with figures that a hostile peer may report. It runs in Node.js, with a page that shows nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from typing import Any

import pytest

from p2pavg.base.limits import MAX_METRIC
from p2pavg.telemetry.status import MAX_EPOCH

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="Node.js is not installed (apt: nodejs)")

PAGE = """
const attributes = [];
globalThis.node = {
  options: [],
  append() {}, replaceChildren() {}, addEventListener() {},
  setAttribute(name, value) { attributes.push(`${name}=${value}`); },
};
globalThis.document = { getElementById: () => node, createElement: () => node, createElementNS: () => node };
globalThis.setInterval = () => 0;
globalThis.EventSource = class {};
const asked = JSON.parse(require("fs").readFileSync(0, "utf8"));
require("vm").runInThisContext(asked.script);
attributes.length = 0;
const answer = (0, eval)(asked.call);
console.log(JSON.stringify({ answer: answer === undefined ? null : answer, attributes }));
"""


def run(call: str) -> Any:
    """Call a function of the script. An endless loop that fills the memory is an error here, not a wait."""
    assert NODE is not None
    script = files("p2pavg.tools.monitor").joinpath("page", "monitor.js").read_text()
    done = subprocess.run(
        [NODE, "--max-old-space-size=64", "-e", PAGE],
        input=json.dumps({"script": script, "call": call}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def curve(*points: tuple[float, float]) -> list[str]:
    """Return the attributes of the elements that the curve is drawn with."""
    series = {"name": "loss", "median": points, "peers": {"one": points}}
    found: list[str] = run(f"showCurve({json.dumps({'series': [series]})})")["attributes"]
    return found


@pytest.mark.parametrize("gives", ["this machine gave <b>64</b> samples", ""])
def test_what_this_machine_gives_is_text(gives: str) -> None:
    shown = run(f"showGiven({json.dumps({'gives': gives})}), [node.hidden, node.textContent]")["answer"]
    assert shown == [not gives, gives]


def test_ticks_are_round_numbers_in_the_range() -> None:
    assert run("ticks(0, 10, 5)")["answer"] == [0, 2, 4, 6, 8, 10]
    assert run("ticks(-0.31, 0.42, 5)")["answer"] == [-0.2, 0, 0.2, 0.4]


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (MAX_EPOCH, MAX_EPOCH),
        (MAX_EPOCH - 1, MAX_EPOCH),
        (MAX_EPOCH, MAX_EPOCH + 2),
        (1e17, 1e17),
        (1e17, 1e17 + 64),
        (-MAX_METRIC, MAX_METRIC),
        (0, 5e-324),
    ],
)
def test_ticks_of_any_range_are_few(low: float, high: float) -> None:
    assert len(run(f"ticks({json.dumps(low)}, {json.dumps(high)}, 5)")["answer"]) <= 20


@pytest.mark.parametrize(
    "points",
    [
        [(MAX_EPOCH, 1.0)],
        [(MAX_EPOCH - 1, 1.0), (MAX_EPOCH, 1.0)],
        [(1, 1e17), (2, 1e17)],
        [(1, -MAX_METRIC), (2, MAX_METRIC)],
        [(0, MAX_METRIC)],
        [(0, 0.0)],
    ],
)
def test_curve_of_any_figures_is_drawn_at_numbers(points: list[tuple[float, float]]) -> None:
    drawn = curve(*points)
    assert any(each.startswith("d=M") for each in drawn)
    assert not [each for each in drawn if "NaN" in each or "Infinity" in each]
