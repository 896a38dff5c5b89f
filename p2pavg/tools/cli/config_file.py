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
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from p2pavg.base.errors import AddressError, ConfigError, IdentityError
from p2pavg.base.files import read_text

MAX_BYTES = 64 * 1024
CommandT = TypeVar("CommandT", bound=Callable[..., None])

_EXAMPLES: dict[type, tuple[str, str]] = {
    bool: ("true or false", "true"),
    int: ("a whole number", "4"),
    float: ("a number", "50.0"),
    str: ("text in quotation marks", '"text"'),
    Path: ("a path in quotation marks", '"peer.key"'),
}


@dataclass(frozen=True, slots=True)
class Key:
    """One option as a key of a configuration file."""

    kind: type
    """``bool``, ``int``, ``float``, ``str``, ``Path``, or an enumeration of words."""
    repeatable: bool

    @property
    def wanted(self) -> str:
        """The values that it takes, in words, with an example."""
        if issubclass(self.kind, Enum):
            words = [f'"{each.value}"' for each in self.kind]
            return f"one of {', '.join(words)}"
        what, example = _EXAMPLES[self.kind]
        return (
            f"a list, each of it {what}, such as [{example}]"
            if self.repeatable
            else f"{what}, such as {example}"
        )

    def value(self, found: object, folder: Path) -> Any:
        """Return the value for the command; raise ValueError if it has another type.

        Args:
            folder: relative paths are relative to it.
        """
        if not self.repeatable:
            return self._one(found, folder)
        if not isinstance(found, list):
            raise ValueError  # noqa: TRY004 - one error for all wrong types
        return [self._one(each, folder) for each in found]

    def _one(self, found: object, folder: Path) -> Any:
        if self.kind is float and type(found) is int:
            return float(found)
        if issubclass(self.kind, Enum):
            return self.kind(found).value
        if self.kind is Path and type(found) is str:
            return folder / Path(found).expanduser()
        if type(found) is not self.kind:
            raise ValueError
        return found


COMMANDS: dict[str, dict[str, Key]] = {}
"""The keys of each command that takes a configuration file, by the command's name."""


def configurable(command: CommandT) -> CommandT:
    """Let a command, which has a parameter ``config: ConfigOption``, take its options from a file as well."""
    return configurable_except()(command)


def configurable_except(*names: str) -> Callable[[CommandT], CommandT]:
    """Return what does the same as :func:`configurable`, except for some options.

    Args:
        names: options that mean something else in other commands. One file serves several commands, so each key has
            one meaning.
    """

    def let(command: CommandT) -> CommandT:
        hints = get_type_hints(command, include_extras=True)
        COMMANDS[command.__name__] = {
            name: key
            for name in inspect.signature(command).parameters
            if name not in ("config", *names) and (key := _key(hints[name])) is not None
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
    every = {name: key for keys in COMMANDS.values() for name, key in keys.items()}
    own = COMMANDS[command]
    values: dict[str, Any] = {}
    for written, value in found.items():
        name = written.replace("-", "_")
        if name in values:
            raise ConfigError(f"{written} is there twice, with a dash and with an underscore")
        if name not in every:
            raise ConfigError(f"unknown key {_shown(written)}; {_nearest(name, every)}")
        key = own.get(name, every[name])
        try:
            values[name] = key.value(value, folder)
        except ValueError:
            raise ConfigError(f"{written} must be {key.wanted}, got {_shown(value)}") from None
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


def _key(hint: Any) -> Key | None:
    """Return the key of a parameter with this type; ``None`` for arguments and for what is no option."""
    if get_origin(hint) is not Annotated:
        return None
    kind, *notes = get_args(hint)
    if not any(isinstance(note, OptionInfo) for note in notes):
        return None
    if get_origin(kind) in (Union, UnionType):
        [kind] = [each for each in get_args(kind) if each is not type(None)]
    repeatable = get_origin(kind) is list
    if repeatable:
        [kind] = get_args(kind)
    return Key(kind, repeatable)


def _nearest(name: str, every: Mapping[str, Key]) -> str:
    near = difflib.get_close_matches(name, every, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"the keys are {', '.join(sorted(every))}"


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "a table"
    return repr(value)[:80]
