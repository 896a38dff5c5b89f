"""Measures the house: its size, its rooms, its names and its documents, and checks that no figure has become worse.

python -m scripts.house            prints the table; ends with 1 if a figure is worse than its ceiling
python -m scripts.house --where    prints which names stand twice, and the arrows, too

A figure's *ceiling* is what it was when it was last lowered. Lower it with each change that makes the house smaller.
The *bar* is where it is to end. The column of version 0.2 was measured by this script.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {"p2pavg": ROOT, "p2pavg_dht": ROOT / "dht", "p2pavg_compression": ROOT / "compression"}
"""The folder of each package of the product."""
DOCUMENTS = (ROOT / "docs", ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md")
HARDEST = 20
"""So many files, with the most code, are the ones that a reader fears."""
SHORT_LINES = 3
"""A function of so few lines says little by itself."""


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    name: str
    value: float
    first: float
    """In version 0.2."""
    ceiling: float
    bar: float
    more_is_better: bool = False

    @property
    def is_worse(self) -> bool:
        """True if the figure is on the wrong side of its ceiling."""
        return self.value < self.ceiling if self.more_is_better else self.value > self.ceiling


class SourceFile:
    """A Python file and what is counted in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self._text)

    @cached_property
    def _comments(self) -> set[int]:
        """Numbers of the lines that have a comment."""
        tokens = tokenize.generate_tokens(io.StringIO(self._text).readline)
        return {token.start[0] for token in tokens if token.type == tokenize.COMMENT}

    @property
    def comments(self) -> int:
        """Number of comments, those for tools left out."""
        lines = self._text.splitlines()
        return sum("# noqa" not in lines[n - 1] and "# type:" not in lines[n - 1] for n in self._comments)

    @cached_property
    def code(self) -> int:
        """Number of lines without blank lines, comments and docstrings."""
        lines = self._text.splitlines()
        left = {n for n, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#")}
        for node in ast.walk(self.tree):
            match node:
                case ast.Expr(value=ast.Constant(value=str())):  # a docstring, of whatever stands before it
                    left -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return len(left)

    @property
    def classes(self) -> Iterator[str]:
        """Names of the classes, of those at the module's level."""
        return (node.name for node in self.tree.body if isinstance(node, ast.ClassDef))

    @property
    def seconds(self) -> Iterator[str]:
        """Names of the constants of seconds."""
        for node in self.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                if isinstance(target, ast.Name) and target.id.endswith("SECONDS") and target.id.isupper():
                    yield target.id

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All functions and methods."""
        return [
            node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]

    @property
    def short_functions(self) -> int:
        """Number of functions whose body, without its docstring, has at most three lines."""
        return sum(_body_lines(function) <= SHORT_LINES for function in self.functions)

    @property
    def callables(self) -> int:
        """Number of parameters that are functions."""
        found = 0
        for function in self.functions:
            arguments = function.args
            for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                found += each.annotation is not None and "Callable[" in ast.unparse(each.annotation)
        return found


def _body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    return 0 if not body else (body[-1].end_lineno or 0) - body[0].lineno + 1


class House:
    """The product's files, its rooms and what they import.

    A *room* is what stands at the top of ``p2pavg``, a folder or a module, and the two other packages. An *arrow* leads
    from a room to another one that it imports. The *floors* are the rooms of the longest chain of arrows.
    """

    def __init__(self) -> None:
        self.files: dict[str, SourceFile] = {}
        """By the module's name."""
        for package, folder in SOURCES.items():
            for path in sorted((folder / package).rglob("*.py")):
                parts = path.relative_to(folder).with_suffix("").parts
                self.files[".".join(part for part in parts if part != "__init__")] = SourceFile(path)

    @cached_property
    def arrows(self) -> Mapping[str, set[str]]:
        """The rooms that each room imports."""
        found: dict[str, set[str]] = defaultdict(set)
        for name, file in self.files.items():
            if name == "p2pavg":  # the public names stand in front of the house
                continue
            room = room_of(name)
            found[room] |= {room_of(other) for other in self._imported(name, file)} - {room}
        return found

    def _imported(self, name: str, file: SourceFile) -> Iterator[str]:
        package = name if file.path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = resolve_name("." * node.level + (node.module or ""), package)
                inner = [f"{module}.{alias.name}" for alias in node.names]
                names = [each if each in self.files else module for each in inner]
            else:
                continue
            yield from (each for each in names if each in self.files and each != "p2pavg")

    @property
    def floors(self) -> int:
        """Number of rooms in the longest chain of arrows.

        Raises:
            graphlib.CycleError: rooms import each other.
        """
        height: dict[str, int] = {}
        for room in TopologicalSorter(self.arrows).static_order():
            height[room] = 1 + max((height[below] for below in self.arrows.get(room, ())), default=0)
        return max(height.values())

    def twice(self, names: str) -> dict[str, list[str]]:
        """Return the modules of each name, of a class or a constant, that stands in several of them."""
        places = defaultdict(list)
        for module, file in self.files.items():
            for name in set(getattr(file, names)):
                places[name].append(module)
        return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def room_of(module: str) -> str:
    """Return the room of a module."""
    package, _, rest = module.partition(".")
    return f"{package}.{rest.partition('.')[0]}" if package == "p2pavg" and rest else package


def figures(house: House) -> list[Figure]:
    """Measure the house."""
    files = list(house.files.values())
    code = sum(file.code for file in files)
    hardest = sorted(files, key=lambda file: file.code)[-HARDEST:]
    functions = sum(len(file.functions) for file in files)
    pages = [path.stat().st_size / 1000 for path in _pages()]
    return [
        Figure("code lines of p2pavg, dht, compression", code, 55_275, 55_890, 43_000),
        Figure("files", len(files), 560, 464, 380),
        Figure("code lines of tests", _code_in(ROOT / "tests"), 71_443, 73_895, 52_000),
        Figure("rooms", len(house.arrows), 46, 25, 24),
        Figure("floors", house.floors, 16, 13, 13),
        Figure("arrows between rooms", sum(map(len, house.arrows.values())), 318, 140, 140),
        Figure("largest number of files in one folder", _largest_folder(files), 67, 20, 25),
        Figure("class names that stand in several files", len(house.twice("classes")), 65, 0, 0),
        Figure("names of seconds that stand in several files", len(house.twice("seconds")), 54, 0, 0),
        Figure("constants of seconds", sum(len(list(file.seconds)) for file in files), 346, 134, 170),
        Figure("comments per 100 lines", _comments(files), 2.5, 6.8, 5, more_is_better=True),
        Figure(
            f"the same, of the longest {HARDEST} files", _comments(hardest), 2.4, 12, 8, more_is_better=True
        ),
        Figure(
            "callable parameters per 1,000 lines",
            1000 * sum(file.callables for file in files) / code,
            5.7,
            2.0,
            2,
        ),
        Figure(
            f"functions of at most {SHORT_LINES} lines, %",
            100 * sum(file.short_functions for file in files) / functions,
            47,
            44.6,
            35,
        ),
        Figure("longest page of the documents, kB", max(pages), 60, 12, 15),
        Figure("all pages, kB", sum(pages), 397, 306, 260),
    ]


def _pages() -> Iterable[Path]:
    for place in DOCUMENTS:
        yield from place.rglob("*.md") if place.is_dir() else [place] if place.exists() else []


def _code_in(folder: Path) -> int:
    return sum(SourceFile(path).code for path in folder.rglob("*.py"))


def _largest_folder(files: Iterable[SourceFile]) -> int:
    return max(Counter(file.path.parent for file in files).values())


def _comments(files: Iterable[SourceFile]) -> float:
    files = list(files)
    return 100 * sum(file.comments for file in files) / sum(file.code for file in files)


def main() -> int:
    """Print the table; return 1 if a figure is worse than its ceiling."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--where", action="store_true", help="print what some figures count")
    arguments = parser.parse_args()
    house = House()
    found = figures(house)
    print(f"{'':50}{'0.2':>9}{'ceiling':>9}{'now':>9}{'bar':>9}")
    for each in found:
        numbers = (f"{number:9,.{1 if each.value < 10 else 0}f}" for number in
                   (each.first, each.ceiling, each.value, each.bar))  # fmt: skip
        print(f"{each.name:50}{''.join(numbers)}{'  WORSE' if each.is_worse else ''}")
    if arguments.where:
        for names in ("classes", "seconds"):
            for name, modules in house.twice(names).items():
                print(f"{name}: {', '.join(modules)}")
        for room, below in sorted(house.arrows.items()):
            print(f"{room} -> {', '.join(sorted(below))}")
    return int(any(each.is_worse for each in found))


if __name__ == "__main__":
    sys.exit(main())
