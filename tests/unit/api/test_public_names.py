"""The public surface, word for word: a change of it needs a deliberate change of this file."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import p2pavg
from p2pavg import blocking, population, strategies

FROZEN = Path(__file__).with_name("public_names.txt")
"""Names, signatures, fields and members of what users import, one a line."""

MODULES = (p2pavg, population, strategies)
FUNCTIONS = (p2pavg.open_peer, blocking.open_averager)
AVERAGERS = (p2pavg.DecentralizedAverager, blocking.Averager)
METHODS = ("declare", "accumulate", "step", "clear", "aclose", "close", "averager")
"""Methods of which the signatures are frozen too."""
FIELDS = (
    p2pavg.AveragingConfig,
    *(p2pavg.RunPeer, p2pavg.Success, p2pavg.InProgress, p2pavg.NoPeers, p2pavg.Failed),
)
ERRORS = [getattr(p2pavg, name) for name in p2pavg.__all__ if name.endswith("Error")]


def section(title: str, lines: Iterable[str]) -> str:
    return "\n  ".join([title, *lines]) + "\n"


def members(of: type) -> Iterator[str]:
    """Yield the public members of a class."""
    for name, value in sorted(vars(of).items()):
        if name.startswith("_"):
            continue
        shown = inspect.signature(value) if name in METHODS else ""
        yield f"{name}: property" if isinstance(value, property) else f"{name}: method {shown}".strip()


def fields(of: Any) -> Iterator[str]:
    """Yield the fields of a dataclass with their types and defaults."""
    for field in dataclasses.fields(of):
        found = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = "" if found is dataclasses.MISSING else f" = {found!r}"
        yield f"{field.name}: {field.type}{default}"


def test_the_public_surface_is_frozen() -> None:
    """A change of it needs a deliberate change of the file."""
    sections = [section(f"names of {module.__name__}", module.__all__) for module in MODULES]
    sections += [section(each.__name__, [str(inspect.signature(each))]) for each in FUNCTIONS]
    sections += [section(each.__name__, members(each)) for each in (*AVERAGERS, p2pavg.Peer)]
    sections += [section(each.__name__, fields(each)) for each in FIELDS]
    families = {each: [base.__name__ for base in each.__mro__[1:-3]] for each in ERRORS}
    sections.append(section("errors", (f"{e.__name__}({', '.join(of)})" for e, of in families.items())))
    assert "\n".join(sections) == FROZEN.read_text(encoding="utf-8")


def test_each_public_name_has_a_docstring() -> None:
    for module in MODULES:
        for name in set(module.__all__) - {"RoundResult", "Tensors"}:
            assert getattr(module, name).__doc__, name


@pytest.mark.parametrize("of", FIELDS, ids=lambda value: value.__name__)
def test_results_and_settings_are_frozen_and_take_keywords_only(of: Any) -> None:
    parameters = inspect.signature(of).parameters.values()
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    assert of.__dataclass_params__.frozen
