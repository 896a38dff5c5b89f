"""tests/README.md names what keeps each guarantee, and its test: each of these names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = [ROOT / folder for folder in ("p2pavg", "dht", "compression", "scripts", "tests")]


def test_each_name_in_the_table_exists() -> None:
    """An ellipsis stands for the rest of a name."""
    files = [
        file for folder in SOURCES for file in folder.rglob("*.*") if file.suffix in (".py", ".js", ".txt")
    ]
    words = {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
    # Without what Python has compiled of files that are gone.
    words |= {path.stem for folder in SOURCES for path in folder.rglob("*") if path.suffix != ".pyc"}
    everything = "\n".join(words)
    rows = [
        row
        for row in (ROOT / "tests" / "README.md").read_text(encoding="utf-8").splitlines()
        if row[:1] == "|"
    ]
    named = {
        name
        for row in rows
        for quoted in re.findall(r"`([^`]+)`", row)
        for name in re.findall(r"\w{4,}", quoted)
    }
    assert len(named) > 500
    assert sorted(name for name in named if name not in words and name not in everything) == []
