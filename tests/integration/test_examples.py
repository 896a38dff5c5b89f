"""The examples as a user runs them, from a folder other than the clone, with fewer steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import run_python

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
PNG = b"\x89PNG\r\n\x1a\n"

SHORT = {
    "char_gpt": ["--peers", "2", "--first-steps", "1", "--steps", "2", "--sync-every", "2"],
    "pipeline_two_by_two": ["--steps", "5"],
    "digits": ["--peers", "2", "--rounds", "2", "--sync-every", "5"],
}
SAID = {"char_gpt": "with peers", "pipeline_two_by_two": "stages are identical", "digits": "with FedYogi"}


def test_every_example_is_tested() -> None:
    # The reader of a history trains nothing: tests/unit/history/test_reader.py runs it.
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SHORT, "read_history"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "char_gpt" else pytest.mark.long) for name in SHORT]
)
def test_the_example_runs_unchanged(name: str, tmp_path: Path) -> None:
    run = run_python(EXAMPLES / f"{name}.py", *SHORT[name], cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert SAID[name] in run.stdout
    (picture,) = (tmp_path / "examples-output").glob("*.png")
    assert picture.read_bytes().startswith(PNG)
