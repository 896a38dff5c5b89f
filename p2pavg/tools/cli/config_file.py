"""Configuration files of commands: TOML whose keys are the names of the options.

A command takes part by :func:`configurable`. Its options are read from its signature, so that keys and options cannot
differ: an option that is added is a key at once.
"""

from __future__ import annotations

import difflib
import inspect
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
import typer
from typer.models import ArgumentInfo, OptionInfo

from p2pavg.base.errors import AddressError, ConfigError, IdentityError
from p2pavg.base.files import read_text
from p2pavg.tools.cli.options import CommandT

MAX_BYTES = 64 * 1024

_EXAMPLES: dict[type, tuple[str, str]] = {
    bool: ("true or false", "true"),
    int: ("a whole number", "4"),
    float: ("a number", "50.0"),
    str: ("text in quotation marks", '"text"'),
    Path: ("a path in quotation marks", '"peer.key"'),
}


COMMANDS: dict[str, dict[str, Any]] = {}
"""The types of the options of each command that takes a configuration file, by names of the command and the option.

Each is ``bool``, ``int``, ``float``, ``str``, ``Path``, an enumeration of words, or a list of one of them."""


def configurable(*others: str) -> Callable[[CommandT], CommandT]:
    """Let a command, which has a parameter ``config: ConfigOption``, take its options from a file as well.

    Args:
        others: options that mean something else in other commands. One file serves several commands, so each key has
            one meaning.
    """

    def let(command: CommandT) -> CommandT:
        hints = get_type_hints(command, include_extras=True)
        COMMANDS[command.__name__] = {
            name: _kind(hints[name])
            for name, parameter in inspect.signature(command).parameters.items()
            if name not in ("config", *others) and _is_option(hints[name], parameter)
        }
        return command

    return let


def parse(text: str, command: str, folder: Path) -> dict[str, Any]:
    """Return the values of a file for a command, by the names of its parameters.

    One file may serve several commands: keys that only others have are passed over.

    Raises:
        ConfigError: the message names the key, what is wrong with it, and the nearest right name.
    """
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"it is not TOML: {str(error) or 'too deeply nested'}") from None
    every = {name: kind for kinds in COMMANDS.values() for name, kind in kinds.items()}
    own = COMMANDS[command]
    values: dict[str, Any] = {}
    for written, value in found.items():
        name = written.replace("-", "_")
        if name in values:
            raise ConfigError(f"{written} is there twice, with a dash and with an underscore")
        if name not in every:
            near = difflib.get_close_matches(name, every, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(sorted(every))}"
            raise ConfigError(f"unknown key {_shown(written)}; {hint}")
        try:
            # Paths are the only type that msgspec does not know.
            values[name] = msgspec.convert(
                value, every[name], dec_hook=lambda _, path: folder / Path(path).expanduser()
            )
        except msgspec.ValidationError:
            raise ConfigError(f"{written} must be {_wanted(every[name])}, got {_shown(value)}") from None
    return {name: value for name, value in values.items() if name in own}


def read(file: Path, command: str) -> dict[str, Any]:
    """Return the values of a file for a command.

    Raises:
        ConfigError: as :func:`parse`, or the file cannot be read; the message names the file.
    """
    text = read_text(file, "configuration file", max_bytes=MAX_BYTES)
    try:
        return parse(text, command, file.absolute().parent)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _use(context: typer.Context, file: Path | None) -> Path | None:
    """Take the values of a file as defaults, which options on the command line replace."""
    if file is not None and not context.resilient_parsing:
        # Options before the command's name, such as --log-format, are in the map already.
        context.default_map = {**read(file, context.command.name or ""), **(context.default_map or {})}
    return file


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        is_eager=True,
        callback=_use,
        help="TOML file whose keys are the names of these options. Options on the command line win.",
    ),
]


@contextmanager
def naming(context: typer.Context) -> Iterator[None]:
    """Name the configuration file in errors over values that came from it."""
    file, values = context.params.get("config"), context.default_map
    try:
        yield
    except (AddressError, ConfigError, IdentityError) as error:
        if file is None or not _is_about(str(error), values or {}):
            raise
        raise type(error)(f"{file}: {error}") from None


def _is_about(text: str, values: Mapping[str, Any]) -> bool:
    """Return whether an error's text names one of the keys, or one of the values."""
    words = [
        str(each) for value in values.values() for each in (value if isinstance(value, list) else [value])
    ]
    return any(name in text or f"--{name.replace('_', '-')}" in text for name in values) or any(
        len(word) > 5 and word in text for word in words
    )


def _is_option(hint: Any, parameter: inspect.Parameter) -> bool:
    """Return whether a parameter is an option, as typer decides it: help is not there with ``python -OO``."""
    notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    named = [note for note in notes if isinstance(note, OptionInfo | ArgumentInfo)]
    return isinstance(named[0], OptionInfo) if named else parameter.default is not inspect.Parameter.empty


def _kind(hint: Any) -> Any:
    """Return the type of an option, without ``None``."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(kind) in (Union, UnionType):
        [kind] = [each for each in get_args(kind) if each is not type(None)]
    return kind


def _wanted(kind: Any) -> str:
    """Return the values that an option takes, in words, with an example."""
    if get_origin(kind) is list:
        what, example = _EXAMPLES[get_args(kind)[0]]
        return f"a list, each of it {what}, such as [{example}]"
    if issubclass(kind, Enum):
        words = [f'"{each.value}"' for each in kind]
        return f"one of {', '.join(words)}"
    what, example = _EXAMPLES[kind]
    return f"{what}, such as {example}"


def _shown(value: object) -> str:
    return "a table" if isinstance(value, dict) else repr(value)[:80]
