"""The commands of an entry point that are programs of their own: scripts/faults, and some of scripts/bench."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A module whose ``main`` reads the command line.

    Args:
        module: its name.
        summary: what it does, in a line.
        takes: how long it takes with its defaults, on two cores.
    """

    module: str
    summary: str
    takes: str

    @property
    def line(self) -> str:
        """For the list of commands."""
        return f"{self.summary} ({self.takes})"


def list_commands(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], commands: Mapping[str, Command]
) -> None:
    """Let ``--help`` show them; their options are read by themselves."""
    for name, command in commands.items():
        subparsers.add_parser(name, help=command.line, add_help=False)


def run_command(commands: Mapping[str, Command]) -> int | None:
    """Run the one that the command line names, with the rest of it; ``None`` if it names none of them."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in commands:
        return None
    del sys.argv[1]
    try:
        status: int | None = importlib.import_module(commands[name].module).main()
    except KeyboardInterrupt:
        return 130
    return status or 0
