"""Modules that decide are apart from modules that act.

A module that says "no I/O" in its docstring, or whose package does, imports nothing that acts. A module that could say
so must, so that a new one is held to it.
"""

from __future__ import annotations

import ast

import pytest

from tests.unit.api.test_module_cycles import imports_in, modules

MARK = "no i/o"
ACTS = {"asyncio", "datetime", "libp2p", "random", "secrets", "socket", "subprocess", "time", "trio"}
MAY_ACT = ACTS | {
    *(
        "concurrent",
        "contextvars",
        "fcntl",
        "gc",
        "importlib",
        "logging",
        "mmap",
        "os",
        "pathlib",
        "psutil",
        "queue",
        "select",
        "shutil",
    ),
    *("signal", "tempfile", "threading"),
}
"""Imports of modules of which this test does not know whether they act."""
ALLOWED = {("p2pavg.runs.membership.certificate", "datetime")}
"""It writes a date."""
MODULES = modules()


def decides(name: str) -> bool:
    """Return whether a module, or a package that it is in, says that it does no I/O."""
    parts = name.split(".")
    return any(says(".".join(parts[:length])) for length in range(1, len(parts) + 1))


def says(name: str) -> bool:
    text = MODULES[name].read_text(encoding="utf-8")
    return MARK in " ".join((ast.get_docstring(ast.parse(text)) or "").lower().split())


DECIDING = sorted(name for name in MODULES if decides(name))


def test_much_decides() -> None:
    """Else the mark was not found, or modules have lost it: this number falls with deleted modules only."""
    assert len(DECIDING) > 150


@pytest.mark.parametrize("name", DECIDING)
def test_what_decides_imports_nothing_that_acts(name: str) -> None:
    imported = {module.partition(".")[0] for module, _ in imports_in(name, MODULES[name])}
    assert {each for each in imported & ACTS if (name, each) not in ALLOWED} == set()


def could_decide() -> set[str]:
    """Return the modules that import nothing that may act, by way of others included, and have no coroutine."""
    imports = {name: set(imports_in(name, file)) for name, file in MODULES.items()}
    ours = {
        name: {inner if (inner := f"{module}.{member}") in MODULES else module for module, member in found}
        & MODULES.keys()
        for name, found in imports.items()
    }
    found = {
        name
        for name in MODULES
        if decides(name) or not {module.partition(".")[0] for module, _ in imports[name]} & MAY_ACT
    }
    while acting := {name for name in found if not decides(name) and not ours[name] - {name} <= found}:
        found -= acting
    return {name for name in found if has_functions_only(name)}


def has_functions_only(name: str) -> bool:
    nodes = list(ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))))
    if any(isinstance(node, ast.AsyncFunctionDef) for node in nodes):
        return False
    return any(isinstance(node, ast.FunctionDef) for node in nodes)


def test_what_could_say_that_it_does_no_io_says_so() -> None:
    silent = sorted(name for name in could_decide() if not decides(name))
    assert silent == [], f'say "No I/O" in their docstrings: {silent}'
