"""The command ``p2pavg``, also ``python -m p2pavg``."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from p2pavg import __version__
from p2pavg.base.errors import (
    AddressError,
    BootstrapError,
    BusyError,
    ConfigError,
    ListenError,
    P2PAvgError,
    UnreachableError,
)
from p2pavg.base.formats import PeerText
from p2pavg.tools.cli.checkpoint import app as checkpoint_app
from p2pavg.tools.cli.config_file import ConfigOption, configurable, naming
from p2pavg.tools.cli.daemon_commands import files, join, status, stop
from p2pavg.tools.cli.history import app as history_app
from p2pavg.tools.cli.history import archive
from p2pavg.tools.cli.job import app as job_app
from p2pavg.tools.cli.launch import launch
from p2pavg.tools.cli.options import (
    FORMAT,
    LEVEL,
    AnnounceOption,
    BootstrapOption,
    DisplayOptions,
    FormatOption,
    HomeOption,
    LevelOption,
    LogFormat,
    LogLevel,
    NetworkOptions,
    ServiceOptions,
    VerboseOption,
    documented,
    grouped,
    log_all,
    log_to_stderr,
)
from p2pavg.tools.cli.run import app as run_app
from p2pavg.tools.daemon.words import ExitCode

app = typer.Typer(
    name="p2pavg",
    help="Peers average gradients and parameters over the open internet, with no server.",
    no_args_is_help=True,
    # ``main`` prints what goes wrong, with an exit code for each kind of error.
    pretty_exceptions_enable=False,
)
for command in (join, status, stop, files, archive):
    app.command()(command)
# What follows the program's name is the program's.
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(launch)
app.add_typer(run_app)
app.add_typer(checkpoint_app)
app.add_typer(job_app)
app.add_typer(history_app)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"p2pavg {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback does the work
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    log_format: Annotated[LogFormat | None, FORMAT] = None,
    log_level: Annotated[LogLevel | None, LEVEL] = None,
) -> None:
    """Options that every command has."""
    log_all(context, log_format, log_level)


@app.command()
@configurable()
@grouped
@documented
def peer(
    context: typer.Context,
    *,
    network: NetworkOptions,
    identity: Path | None = None,
    run_id: str | None = None,
    open_run: Annotated[bool, typer.Option("--open", "--open-run")] = False,
    run: Path | None = None,
    certificate: Path | None = None,
    service: ServiceOptions,
    home: HomeOption = None,
    config: ConfigOption = None,  # noqa: ARG001 - its callback uses it
    display: DisplayOptions,
) -> None:
    """Run a peer until Ctrl-C or SIGTERM: keep the network's records and, with --run-id, help a run's rounds.

    Prints its address on one line when it is ready; everything else goes to the log on stderr.

    Args:
        identity (FILE): Key file, made when missing. Without one, and without --home, the identity is new at every
            start.
        run_id (ID): Help the rounds of this run: reduce a share, contribute nothing.
        open_run: Let other machines reach a peer without a certificate. Any peer that knows the run's name can then
            read and change its averages.
        run (FILE.run): Take part in this run, which has an authority, with --certificate and --identity.
        certificate (FILE): This peer's certificate in the run of --run.
    """
    # Imported here, as in the commands below:
    # torch takes seconds, which ``--help`` and ``--version`` need not wait for.
    from p2pavg.peer.joining.home import Home
    from p2pavg.tools.cli.daemon import DaemonOptions, read_member, run_peer

    display.start_log()
    # An error over a value that came from a configuration file names the file.
    with naming(context):
        folder = None if home is None else Home(home)
        # With a folder, the identity is kept there, so that this is the same peer after a restart.
        if folder is not None:
            folder.make()
            identity = identity or folder.identity
        member = read_member(
            run, certificate=certificate, identity=identity, run_id=run_id, delegate=service.delegate
        )
        run_peer(
            DaemonOptions(
                network=network,
                # The run file may have values for some. The user's own have priority.
                service=service.with_defaults(context, None if member is None else member.run),
                display=display,
                identity=identity,
                run_id=run_id,
                open_run=open_run,
                member=member,
                home=folder,
            )
        )


@app.command()
# One file may serve several commands, so a key has one meaning. These two options mean something else in this command.
@configurable("listen", "name")  # of a peer, in other commands
@documented
def monitor(
    context: typer.Context,
    run: str,
    bootstrap: list[str] = [],  # noqa: B006
    port: int | None = None,
    listen: str | None = None,
    token_file: Path | None = None,
    name: list[str] = [],  # noqa: B006
    history: Path | None = None,
    terminal: Annotated[bool, typer.Option("--terminal")] = False,
    certificate: Path | None = None,
    identity: Path | None = None,
    peer_listen: list[str] = [],  # noqa: B006
    config: ConfigOption = None,  # noqa: ARG001 - its callback uses it
    log_format: FormatOption = LogFormat.TEXT,
    log_level: LevelOption = LogLevel.WARNING,
) -> None:
    """Show a run: its peers, rounds, metrics, lineages, transfers and exchanges, as a web page or in the terminal.

    Prints the address of the page on one line. The monitor joins the network, reads what the run's peers publish, and
    is no peer of the run itself.

    Args:
        run (RUN): Id of the run, or NAME.run of a run that has an authority.
        bootstrap (ADDR): Address of a peer of the run's network, ending in /p2p/PEER_ID. Repeatable.
        port (PORT): Port of the page on 127.0.0.1. Without it, a free one.
        listen (HOST:PORT): Serve the page to other machines, to those that have the token.
        token_file (FILE): File with the token. Without it, one is made and printed.
        name (HOST): Further name under which browsers ask for the page. Repeatable.
        history (DIR): Show the credits of this history at /credits, too.
        terminal: Show the run here instead.
        certificate (FILE): The monitor's certificate in the run of NAME.run.
        identity (FILE): The monitor's key file. Without one, the identity is not kept.
        peer_listen (ADDR): Address on which the monitor listens for peers. Repeatable. Default: all interfaces, or
            127.0.0.1 if all addresses of --bootstrap are of this machine.
    """
    from p2pavg.tools.cli.monitor import find_run, options_of, run_monitor

    log_to_stderr(log_format, log_level)
    with naming(context):
        found = find_run(run, bootstrap=bootstrap, certificate=certificate, identity=identity)
        if terminal and (port is not None or listen is not None or history is not None):
            raise typer.BadParameter("--terminal serves no page: leave out --port, --listen and --history")
        options = None if terminal else options_of(port, listen, token_file, name, history)
        run_monitor(found, options, identity=identity, listen=peer_listen)


@app.command()
@documented
def identity(file: Path) -> None:
    """Show the peer id of a key file; make the file, readable by its owner only, when it is missing.

    Args:
        file (FILE): Key file, made when missing.
    """
    from p2pavg.runs.records.identity import load_or_make_seed
    from p2pavg_dht import Ed25519Signer

    typer.echo(Ed25519Signer(load_or_make_seed(file)).peer_id)


@app.command()
@configurable()
@documented
def doctor(
    context: typer.Context,
    listen: list[str] = ["/ip4/0.0.0.0/tcp/0"],  # noqa: B006
    bootstrap: BootstrapOption = [],  # noqa: B006
    identity: Path | None = None,
    run_id: str | None = None,
    run: Path | None = None,
    certificate: Path | None = None,
    announce: AnnounceOption = [],  # noqa: B006
    port_mapping: Annotated[bool, typer.Option("--port-mapping/--no-port-mapping")] = True,
    config: ConfigOption = None,  # noqa: ARG001 - its callback uses it
    json: Annotated[bool, typer.Option("--json")] = False,
    verbose: VerboseOption = False,
    log_format: FormatOption = LogFormat.TEXT,
) -> None:
    """Find out why a peer does not meet others: check files, network and run, and name cause and remedy.

    It takes less than 30 s, and changes nothing that lasts. The exit code is 1 if a fault was found.

    Args:
        listen (ADDR): Address on which the peer would listen. Repeatable.
        identity (FILE): The peer's key file.
        run_id (ID): Look for the peers of this run.
        run (FILE.run): Look for the peers of this run, which has an authority.
        certificate (FILE): The peer's certificate in the run of --run.
        port_mapping: Ask the router to forward the port for a moment.
        json: Print the findings as JSON.
    """
    from p2pavg.tools.cli.doctor import check, report
    from p2pavg.tools.doctor.examination import ExaminedPeer

    options = ExaminedPeer(
        listen=listen,
        bootstrap=bootstrap,
        identity=identity,
        run_id=run_id,
        run=run,
        certificate=certificate,
        announce=announce,
        port_mapping=port_mapping,
    )
    # Mistakes in the options are errors of usage, and are found before this machine is examined.
    try:
        with naming(context):
            check(options)
    except (AddressError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from None
    if verbose:
        log_to_stderr(log_format, LogLevel.DEBUG)
    text, code = report(options, json=json, verbose=verbose)
    typer.echo(text)
    raise typer.Exit(code)


def main() -> None:
    """Run the command line.

    A user's mistake is reported on stderr, with what to do about it. :class:`~p2pavg.tools.daemon.words.ExitCode` has
    the exit codes.
    """
    try:
        app()
    except P2PAvgError as error:
        # It may quote another's file, with signs that a terminal obeys.
        typer.echo(f"p2pavg: {' '.join(map(PeerText, str(error).splitlines()))}", err=True)
        if error.remedy:
            typer.echo(f"p2pavg: what to do: {error.remedy}", err=True)
        # These come from the network, a port or another process.
        # All others need a person, and would be the same after a restart.
        is_temporary = isinstance(error, BootstrapError | BusyError | ListenError | UnreachableError)
        sys.exit(ExitCode.TRY_AGAIN if is_temporary else ExitCode.MISTAKE)
    except Exception:  # noqa: BLE001 - a bug has its own exit code, with which a daemon is started again
        traceback.print_exc()
        sys.exit(ExitCode.BUG)
