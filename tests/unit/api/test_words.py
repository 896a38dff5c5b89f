"""One word for one thing: the glossary has the terms of the source, and words that were given up do not come back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [
    path
    for folder in ("p2pavg", "dht/p2pavg_dht", "compression/p2pavg_compression")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
GLOSSARY = ROOT / "docs" / "explanation" / "architecture.md"
BETTER = {
    "apply": {"take_alone"},
    "contribution": {"Values", "Coming", "Came", "Carry"},
    "level": {"rung", "rungs"},
    "listener": {"Hears"},
    "no group was formed": {"came_to_nothing"},
    "part tracker": {"Ledger"},
    "peer trust": {"Attendance"},
    "poll": {"look"},
    "printable": {"is_harmless"},
    "publish": {"say"},
    "receive": {"hear"},
    "round coordinator": {"Together"},
    "search place": {"Meeting"},
    "stream": {"Control", "Line", "Lobby"},
    "sync status": {"Stand"},
    "trust": {"told_by_user"},
}
"""Words that name one thing, and the ones that named it before, as classes, functions and modules."""


def terms() -> list[str]:
    """Return the terms of the glossary."""
    table = GLOSSARY.read_text(encoding="utf-8").split("## Terms", 1)[1]
    rows = re.findall(r"^\| (\*\*.+?) \|", table, re.MULTILINE)
    return [term for row in rows for term in re.findall(r"\*\*(.+?)\*\*", row)]


def names(path: Path) -> Iterator[str]:
    """Return the names that a module gives: its own, and those of its classes and functions."""
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ClassDef(name=name):
                yield name.lstrip("_")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name.lstrip("_")


@pytest.fixture(scope="module")
def text() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in SOURCES).lower()


def test_the_source_speaks_of_each_term(text: str) -> None:
    assert len(terms()) > 30
    for term in terms():
        # "inner and outer step" are two terms.
        for word in term.lower().replace(" and outer", "").split("/"):
            assert re.search(rf"\b{re.escape(word)}s?\b", text), (
                f"no module speaks of {term!r}: drop it, or use it"
            )


def test_no_word_that_was_given_up_is_a_name() -> None:
    given_up = {old: better for better, olds in BETTER.items() for old in olds}
    found = {
        f"{path.relative_to(ROOT)}: {name}: the word is {given_up[name]}"
        for path in SOURCES
        for name in names(path)
        if name in given_up
    }
    assert found == set()
