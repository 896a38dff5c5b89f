"""The locked packages: whether what pyproject.toml asks for is what they were made from."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.lock import MADE_FROM, digest, requirements, what_is_wrong

ROOT = Path(__file__).parents[3]
PYPROJECT = """
[build-system]
requires = ["hatchling>=1.25"]
[project]
name = "p2pavg"
dependencies = ["numpy>=2"]
[project.optional-dependencies]
dev = ["Types_Psutil"]
[tool.uv]
override-dependencies = ["fastecdsa==4.0.0"]
"""
PINS = {"hatchling": "1.33.0", "numpy": "2.4.6", "types-psutil": "7.2", "fastecdsa": "4.0.0"}


def lock(**changed: str) -> str:
    """A lock that was made from PYPROJECT, and then changed by hand."""
    pins = {**PINS, **changed}
    head = f"{MADE_FROM}{digest(requirements(PYPROJECT))}"
    return "\n".join(
        [head, *(f"{name}=={version}" for name, version in pins.items()), "colorama==1 ; os_name == 'nt'"]
    )


def test_a_lock_of_the_same_requirements_fits() -> None:
    assert what_is_wrong(PYPROJECT, lock()) == []


@pytest.mark.parametrize(
    "changed",
    [
        PYPROJECT.replace("numpy>=2", "numpy>=2.1"),
        PYPROJECT.replace('"numpy>=2"', '"numpy>=2", "scipy"'),
        PYPROJECT.replace('"Types_Psutil"', ""),
        PYPROJECT.replace("4.0.0", "4.0.1"),
    ],
)
def test_a_requirement_that_was_changed_added_or_removed_is_found(changed: str) -> None:
    assert what_is_wrong(changed, lock()) == [
        "requirements.lock was made from other requirements than pyproject.toml has"
    ]


def test_a_pin_that_was_changed_by_hand_is_found() -> None:
    assert what_is_wrong(PYPROJECT, lock(numpy="1.26")) == ["requirements.lock has 1.26 for numpy>=2"]
    gone = lock().replace("types-psutil==7.2\n", "")
    assert what_is_wrong(PYPROJECT, gone) == ["requirements.lock has nothing for Types_Psutil"]


def test_the_extra_all_names_every_extra_of_the_library() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (everything,) = map(Requirement, extras["all"])
    assert everything.name == project["name"]
    assert everything.extras == extras.keys() - {"all", "demo", "examples", "dev"}


def test_an_extra_that_names_others_asks_for_nothing_more() -> None:
    changed = PYPROJECT.replace("dev = [", 'all = ["p2pavg[dev]"]\ndev = [')
    assert what_is_wrong(changed, lock()) == []


def test_the_lock_names_packages_and_versions_only() -> None:
    """No place to get them from, and nothing that only one build of torch needs."""
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()[1:]:
        name, _, rest = line.partition("==")
        assert rest, line
        assert not name.startswith(("nvidia", "cuda", "triton")), line
        assert "://" not in line, line
        assert "@" not in line, line
