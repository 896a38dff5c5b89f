"""The documents say why each package is a dependency."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_each_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.split(r"[^A-Za-z0-9_.-]", each)[0] for each in wanted} - {project["name"]}
    page = (ROOT / "docs/reference/dependencies.md").read_text()
    assert sorted(name for name in names if not re.search(rf"\b{re.escape(name)}\b", page)) == []
