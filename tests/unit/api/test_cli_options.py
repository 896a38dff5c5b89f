"""The command line, option by option: scripts and unit files of others depend on it."""

from __future__ import annotations

from typing import Any

import typer

from p2pavg.cli.main import app

# (spellings, may be given several times, default)
OPTIONS: dict[str, dict[str, tuple[list[str], bool, object]]] = {
    "": {"version": (["--version"], False, False)},
    "peer": {
        "listen": (["--listen"], True, ["/ip4/0.0.0.0/tcp/0"]),
        "bootstrap": (["--bootstrap"], True, []),
        "identity": (["--identity"], False, None),
        "run_id": (["--run-id"], False, None),
        "bandwidth": (["--bandwidth"], False, 100.0),
        "verbose": (["--verbose", "-v"], False, False),
    },
    "identity": {"file": (["file"], False, None)},
}


def options_of(command: Any) -> dict[str, tuple[list[str], bool, object]]:
    return {
        parameter.name: (
            parameter.opts,
            parameter.multiple if parameter.param_type_name == "option" else False,
            parameter.default,
        )
        for parameter in command.params
    }


def test_commands_and_options_are_these_and_no_others() -> None:
    program: Any = typer.main.get_command(app)
    found = {"": options_of(program)} | {
        name: options_of(command) for name, command in program.commands.items()
    }
    assert found == OPTIONS


def test_only_the_key_file_of_identity_is_required() -> None:
    program: Any = typer.main.get_command(app)
    required = {
        (name, parameter.name)
        for name, command in program.commands.items()
        for parameter in command.params
        if parameter.required
    }
    assert required == {("identity", "file")}
