"""No module of the product imports itself by way of others, imports for types and in functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCE_ROOTS = {"p2pavg": ROOT, "p2pavg_dht": ROOT / "dht", "p2pavg_compression": ROOT / "compression"}


def modules() -> dict[str, Path]:
    """Return the file of every module."""
    found = {}
    for package, root in SOURCE_ROOTS.items():
        for file in (root / package).rglob("*.py"):
            parts = file.relative_to(root).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = file
    return found


def imports_in(name: str, file: Path) -> Iterator[tuple[str, str]]:
    """Yield each imported module with a name that is imported from it, which may be a module too."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            yield from ((module, alias.name) for alias in node.names)


def test_no_module_imports_itself_by_way_of_others() -> None:
    files = modules()
    assert len(files) > 100
    graph: dict[str, set[str]] = {}
    for importer, file in files.items():
        found = {
            name if (name := f"{module}.{member}") in files else module
            for module, member in imports_in(importer, file)
        }
        graph[importer] = found & files.keys()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"modules that import each other: {' <- '.join(error.args[1])}") from None
