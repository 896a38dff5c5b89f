"""The commands of scripts/faults and scripts/bench: each is there, and gets the rest of the command line."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from scripts.benchmarks.main import PROGRAMS
from scripts.commands import Command, run_command
from scripts.fault_search.main import COMMANDS


@pytest.mark.parametrize(
    "command", [*COMMANDS.values(), *PROGRAMS.values()], ids=lambda command: command.module
)
def test_every_command_has_a_module(command: Command) -> None:
    assert importlib.util.find_spec(command.module) is not None


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (1, 1), (KeyboardInterrupt, 130)])
def test_a_command_reads_the_rest_of_the_line(
    monkeypatch: pytest.MonkeyPatch, returned: int | type[BaseException] | None, status: int
) -> None:
    read: list[str] = []

    def main() -> int | None:
        read.extend(sys.argv[1:])
        if isinstance(returned, type):
            raise returned
        return returned

    monkeypatch.setitem(sys.modules, "some.program", SimpleNamespace(main=main))
    monkeypatch.setattr(sys, "argv", ["scripts/faults", "some", "--seed", "3"])
    assert run_command({"some": Command("some.program", "does something", "a minute")}) == status
    assert read == ["--seed", "3"]


@pytest.mark.parametrize("line", [[], ["--help"], ["another"]])
def test_an_unknown_command_is_left_to_argparse(monkeypatch: pytest.MonkeyPatch, line: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/faults", *line])
    assert run_command({"some": Command("some.program", "does something", "a minute")}) is None
