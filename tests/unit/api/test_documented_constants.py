"""The documents name constants that exist, with the values that these have."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [ROOT / "p2pavg", ROOT / "dht" / "p2pavg_dht", ROOT / "compression" / "p2pavg_compression"]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]

NAME = re.compile(r"`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)`")
AMOUNT = r"\d[\d,]*(?:\.\d+)?(?:[\^/]\d+)?(?: (?:KiB|MiB|GiB|KB))?\b"
FIGURE = re.compile(rf"{NAME.pattern}(?: |: | \()({AMOUNT}(?: and \d+ (?:KiB|MiB|GiB|KB)\b)?)")
UNITS = {"": 1, "KB": 1000, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
FOREIGN = {"PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "NUMBA_CACHE_DIR", "BLOCKWISE_8BIT"}
"""Names of other programs."""
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


def value_of(node: ast.expr | None, known: dict[str, set[float]]) -> float | None:
    """Return the number that an expression of a constant has; ``None`` if it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.Name) and len(known[node.id]) == 1:
        return next(iter(known[node.id]))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "Fraction" and len(node.args) == 2:
        over, under = (value_of(each, known) for each in node.args)
        return None if over is None or under is None else over / under
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = value_of(node.left, known), value_of(node.right, known)
        return None if left is None or right is None else OPERATORS[type(node.op)](left, right)
    return None


def constants() -> dict[str, set[float]]:
    """Return the values that constants of each name have in the product's modules and classes."""
    known: dict[str, set[float]] = defaultdict(set)
    trees = [
        ast.parse(path.read_text(encoding="utf-8")) for source in SOURCES for path in source.rglob("*.py")
    ]
    for _ in range(2):  # the second time, those made of others
        for node in (node for tree in trees for node in ast.walk(tree)):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                value = value_of(node.value, known)
                for target in targets:
                    if isinstance(target, ast.Name) and target.id.isupper() and value is not None:
                        known[target.id].add(value)
    return known


def number(text: str) -> float:
    """Read a number as the documents write it: ``4 MiB and 64 KiB``, ``2^10``, ``2/3``."""
    total = 0.0
    for part in text.replace(",", "").split(" and "):
        amount, _, unit = part.partition(" ")
        base, operation, operand = re.fullmatch(r"([\d.]+)([\^/]?)(\d*)", amount).groups()  # type: ignore[union-attr]
        value = float(base)
        if operation:
            value = math.pow(value, float(operand)) if operation == "^" else value / float(operand)
        total += value * UNITS[unit]
    return total


def figures() -> Iterator[tuple[str, str, float, str]]:
    """Yield each figure of the documents: its page, constant and value, and how it is written."""
    for page in PAGES:
        for found in FIGURE.finditer(page.read_text(encoding="utf-8")):
            yield page.name, found[1], number(found[2]), found[0]


def test_a_figure_beside_a_constant_is_its_value() -> None:
    known, found = constants(), list(figures())
    assert len(found) > 40
    wrong = [
        f"{page}: {text}, but it is {sorted(known[name])}"
        for page, name, value, text in found
        if value not in known[name]
    ]
    assert not wrong, "\n".join(wrong)


def test_each_name_of_a_constant_is_in_the_code() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for source in SOURCES for path in source.rglob("*.py"))
    words = set(re.findall(r"[A-Z][A-Z0-9_]+", code)) | FOREIGN
    gone = {
        f"{page.name}: {name}"
        for page in PAGES
        for name in NAME.findall(page.read_text(encoding="utf-8"))
        if name not in words
    }
    assert not gone


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("`A_B` 4,096 words", 4096.0),
        ("`A_B` (2^10)", 1024.0),
        ("`A_B` (2/4) of it", 0.5),
        ("`A_B`: 0.5 KiB", 512.0),
        ("`A_B` 1 MiB and 1 KiB, and 3", 2.0**20 + 2**10),
    ],
)
def test_figures_are_read_as_the_documents_write_them(text: str, value: float) -> None:
    found = FIGURE.search(text)
    assert found is not None
    assert number(found[2]) == value
