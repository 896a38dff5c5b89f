"""The help of each command names all that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from p2pavg.tools.cli.main import app


def commands(command: Any) -> Iterator[Any]:
    """Return a command and those below it."""
    yield command
    for each in getattr(command, "commands", {}).values():
        yield from commands(each)


def test_every_option_and_argument_has_its_help() -> None:
    for command in commands(typer.main.get_command(app)):
        assert command.help, command.name
        assert "Args:" not in command.help, "it stands with the options"
        for parameter in command.params:
            assert parameter.help, (command.name, parameter.name)


def test_a_metavar_and_a_long_text_are_read_from_a_docstring() -> None:
    [join] = [each for each in commands(typer.main.get_command(app)) if each.name == "join"]
    found = {each.name: each for each in join.params}
    assert (found["home"].metavar, found["run"].metavar, found["yes"].metavar) == ("DIR", "RUN", None)
    assert found["home"].help == (
        "Folder for identity, certificate and the socket of `p2pavg status`, made when missing. "
        "Default: a folder of the run's name in ~/.local/share/p2pavg."
    )
