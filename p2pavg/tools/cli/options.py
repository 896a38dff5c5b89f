"""Options that several commands have."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

if TYPE_CHECKING:
    from p2pavg.runs.membership.run_file import RunFile

CommandT = TypeVar("CommandT", bound=Callable[..., None])
_ARGUMENT = re.compile(r"^    (\w+)(?: \((.+?)\))?: (.*(?:\n {5,}.*)*)", re.MULTILINE)

ListenOption = Annotated[
    list[str],
    typer.Option(
        metavar="ADDR",
        help="Address to listen on, such as /ip4/0.0.0.0/tcp/4001; port 0 takes a free one. Repeatable. "
        "Default: all interfaces with a certificate or --open, else 127.0.0.1.",
    ),
]
BootstrapOption = Annotated[
    list[str],
    typer.Option(
        metavar="ADDR",
        help="Address of a peer of the network to join, ending in /p2p/PEER_ID. Repeatable. "
        "Without any, this peer begins a new network.",
    ),
]
NameOption = Annotated[
    str,
    typer.Option(
        metavar="TEXT",
        help="Name of this peer for people, such as 'garage, 3090', which the monitor shows to all. It proves nothing.",
    ),
]
BandwidthOption = Annotated[
    float | None,
    typer.Option(
        metavar="MBIT/S",
        help="Bandwidth of this machine, from which its share follows. Without it, rounds are measured.",
    ),
]
UploadOption = Annotated[
    float | None,
    typer.Option(metavar="MBIT/S", help="Send no more than this in rounds. Without it, no limit."),
]
DownloadOption = Annotated[
    float | None,
    typer.Option(metavar="MBIT/S", help="Receive no more than this in rounds. Without it, no limit."),
]
AnnounceOption = Annotated[
    list[str],
    typer.Option(
        metavar="ADDR",
        help="Address at which others can dial this peer, such as /ip4/203.0.113.7/tcp/4001 for a forwarded port. "
        "Repeatable.",
    ),
]
MappingOption = Annotated[bool, typer.Option(help="Ask the router to forward the port, by UPnP or NAT-PMP.")]
RelayOption = Annotated[
    float,
    typer.Option(metavar="MBIT/S", help="Carry this much for peers that cannot be dialled; 0 for nothing."),
]
DelegateOption = Annotated[
    bool, typer.Option("--delegate", help="Serve the invitation links that `p2pavg run link` makes.")
]
MetricsOption = Annotated[
    int | None,
    typer.Option(
        "--metrics",
        metavar="PORT",
        min=0,
        max=65535,
        help="Serve metrics for Prometheus at http://127.0.0.1:PORT/metrics; port 0 takes a free one.",
    ),
]
MonitorOption = Annotated[
    int | None,
    typer.Option(
        "--monitor",
        metavar="PORT",
        min=0,
        max=65535,
        help="Show the run that this peer takes part in at http://127.0.0.1:PORT/; port 0 takes a free one.",
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


def with_defaults(context: typer.Context, run: RunFile | None, **values: Any) -> dict[str, Any]:
    """Return the values of options, with those of the run file where the user gave none.

    Args:
        values: the options' values, by the names that the run file has too.
    """
    for name in values:
        source = context.get_parameter_source(name)
        is_default = source is None or source.name == "DEFAULT"
        if is_default and run is not None and getattr(run, name) is not None:
            values[name] = getattr(run, name)
    return values


def documented(command: CommandT) -> CommandT:
    """Give the parameters of a command the help that stands below ``Args:`` in its docstring.

    A line there is ``name (METAVAR): help``. A parameter without a default is an argument, any other one an option, if
    its type does not say otherwise.
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
