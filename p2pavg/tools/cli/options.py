"""Options that several commands have."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import typer

from p2pavg.base.logs import LOGGERS, level_number, make_handler
from p2pavg.net.nat.relay.limits import DEFAULT_RELAY_MBPS

if TYPE_CHECKING:
    from p2pavg.runs.membership.run_file import RunFile

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
_ARGUMENT = re.compile(r"^    (\w+)(?: \((.+?)\))?: (.*(?:\n {5,}.*)*)", re.MULTILINE)

BootstrapOption = Annotated[
    list[str],
    typer.Option(
        metavar="ADDR",
        help="Address of a peer of the network to join, ending in /p2p/PEER_ID. Repeatable. "
        "Without any, this peer begins a new network.",
    ),
]
AnnounceOption = Annotated[
    list[str],
    typer.Option(
        metavar="ADDR",
        help="Address at which others can dial this peer, such as /ip4/203.0.113.7/tcp/4001 for a forwarded port. "
        "Repeatable.",
    ),
]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Log every decision.")]
HomeOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder for the identity, the port and the socket of `p2pavg status`, made when missing.",
    ),
]

# The options of the log, for all commands.


class LogFormat(StrEnum):
    """The forms of the log."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The levels of the log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


FORMAT = typer.Option(
    "--log-format", envvar="P2PAVG_LOG_FORMAT", help="Log lines for people, or one JSON object a line."
)
LEVEL = typer.Option("--log-level", envvar="P2PAVG_LOG_LEVEL", help="Log this level and those above.")
FormatOption = Annotated[LogFormat, FORMAT]
LevelOption = Annotated[LogLevel, LEVEL]
COMMANDS_WITH_OPTIONS = ("peer", "join", "doctor", "monitor")
"""Commands that have these options themselves."""


def log_all(context: typer.Context, form: LogFormat | None, level: LogLevel | None) -> None:
    """Take the options that stand before the command's name; a command's own ones count more."""
    given = {"log_format": form, "log_level": level}
    named = {name: value.value for name, value in given.items() if value is not None}
    if not named:
        return
    context.default_map = dict.fromkeys(COMMANDS_WITH_OPTIONS, named)
    if context.invoked_subcommand not in COMMANDS_WITH_OPTIONS:
        log_to_stderr(form or LogFormat.TEXT, level or LogLevel.WARNING)


def log_to_stderr(form: LogFormat = LogFormat.TEXT, level: LogLevel = LogLevel.INFO) -> None:
    """Log to standard error: this library's lines from ``level`` on, and warnings of other libraries."""
    logging.basicConfig(handlers=[make_handler(form)], level=logging.WARNING)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(level_number(level))


def documented(command: CommandT) -> CommandT:
    """Give the parameters of a command or a group of options the help that stands below ``Args:`` in its docstring.

    A line there is ``name (METAVAR): help``. A parameter without a default is an argument, any other one an option, if
    its type does not say otherwise. Of a group of options, the docstring is that of its class.
    """
    command.__doc__, _, written = (inspect.getdoc(command) or "").partition("\n\nArgs:\n")
    hints, parameters = get_type_hints(command, include_extras=True), inspect.signature(command).parameters
    for name, metavar, text in _ARGUMENT.findall(written):
        kind, *infos = get_args(hints[name]) if get_origin(hints[name]) is Annotated else [hints[name]]
        is_argument = parameters[name].default is inspect.Parameter.empty
        # Several commands may share the type, and with it the object in it.
        info = copy(infos[0]) if infos else typer.Argument() if is_argument else typer.Option()
        info.help, info.metavar = " ".join(text.split()), metavar or None
        command.__annotations__[name] = Annotated[kind, info]
    return command


def grouped(command: CommandT) -> CommandT:
    """Let a command take groups of options: a parameter that is a dataclass stands for the fields of it, in its place.

    Its own parameters are keywords from the first group on, because the fields have defaults.
    """
    signature, hints = inspect.signature(command), get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        types = get_type_hints(groups[name], include_extras=True)
        for each in fields(groups[name]):
            default = each.default if each.default_factory is MISSING else each.default_factory()
            parameters.append(parameter.replace(name=each.name, default=default, annotation=types[each.name]))

    @wraps(command)
    def run(**values: Any) -> None:
        made = {
            name: kind(**{each.name: values.pop(each.name) for each in fields(kind)})
            for name, kind in groups.items()
        }
        command(**values, **made)

    # Typer and the configuration files read these.
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return cast(CommandT, run)


# The options of a daemon, for `p2pavg peer` and `p2pavg join`: see :func:`grouped`.


@documented
@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """A peer's place in the network.

    Args:
        listen (ADDR): Address to listen on, such as /ip4/0.0.0.0/tcp/4001; port 0 takes a free one. Repeatable.
            Default: all interfaces with a certificate or --open, else 127.0.0.1.
    """

    listen: list[str] = field(default_factory=list)
    bootstrap: BootstrapOption = field(default_factory=list)


@documented
@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """The things that a peer does for its run, over its link.

    Args:
        delegate: Serve the invitation links that `p2pavg run link` makes.
        name (TEXT): Name of this peer for people, such as 'garage, 3090', which the monitor shows to all. It proves
            nothing.
        bandwidth (MBIT/S): Bandwidth of this machine, from which its share follows. Without it, rounds are measured.
        max_upload_mbps (MBIT/S): Send no more than this in rounds. Without it, no limit.
        max_download_mbps (MBIT/S): Receive no more than this in rounds. Without it, no limit.
        port_mapping: Ask the router to forward the port, by UPnP or NAT-PMP.
        relay_mbps (MBIT/S): Carry this much for peers that cannot be dialled; 0 for nothing.
    """

    delegate: Annotated[bool, typer.Option("--delegate")] = False
    name: str = ""
    bandwidth: float | None = None
    max_upload_mbps: float | None = None
    max_download_mbps: float | None = None
    announce: AnnounceOption = field(default_factory=list)
    port_mapping: bool = True
    relay_mbps: float = DEFAULT_RELAY_MBPS

    def with_defaults(self, context: typer.Context, run: RunFile | None) -> ServiceOptions:
        """Return these options, with the run file's values where the user gave none."""
        found = {}
        for name in ("bandwidth", "max_upload_mbps", "max_download_mbps", "relay_mbps"):
            source = context.get_parameter_source(name)
            is_default = source is None or source.name == "DEFAULT"
            if is_default and run is not None and getattr(run, name) is not None:
                found[name] = getattr(run, name)
        return replace(self, **found)


@documented
@dataclass(frozen=True, kw_only=True)
class DisplayOptions:
    """The ways in which a daemon shows what it does.

    Args:
        metrics (PORT): Serve metrics for Prometheus at http://127.0.0.1:PORT/metrics; port 0 takes a free one.
        monitor (PORT): Show the run that this peer takes part in at http://127.0.0.1:PORT/; port 0 takes a free one.
    """

    verbose: VerboseOption = False
    metrics: Annotated[int | None, typer.Option(min=0, max=65535)] = None
    monitor: Annotated[int | None, typer.Option(min=0, max=65535)] = None
    log_format: FormatOption = LogFormat.TEXT
    log_level: LevelOption = LogLevel.INFO

    def start_log(self) -> None:
        """Log to standard error."""
        log_to_stderr(self.log_format, LogLevel.DEBUG if self.verbose else self.log_level)
