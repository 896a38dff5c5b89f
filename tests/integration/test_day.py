"""The operator's day in its short form, and the page that shows its long form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.fault_search import day
from scripts.fault_search.day_stage import Stage

pytestmark = pytest.mark.processes

HEADINGS = [
    "Create a run",
    "Invite three",
    "Start",
    "Watch",
    "Revoke one",
    "Restart the bootstrap peer on another port",
    "Upgrade one peer",
    "Stop everything",
    "Start again from the checkpoints",
]


@pytest.mark.long
def test_nothing_is_lost_in_an_operators_day(tmp_path: Path) -> None:
    """The day itself compares epochs and digests, and raises DayError if they differ."""
    lines: list[str] = []
    stage = Stage(tmp_path, lines.append)
    try:
        day.Day(stage, updates=1).pass_by()
    finally:
        stage.close()
    assert [step.heading for step in stage.steps] == HEADINGS
    assert all(step.lines for step in stage.steps)
    assert not [line for line in lines if re.search("12D3KooW|/tmp/", line)], (
        "an id or a folder is in the page"
    )


def test_the_page_has_each_step_with_its_output() -> None:
    text = day.PAGE.read_text().partition(day.BEGIN)[2].partition(day.END)[0]
    assert re.findall(r"^\*\*\d\. (.*)\.\*\* ", text, re.MULTILINE) == HEADINGS
    assert text.count("```console\n$ p2pavg") >= 5
