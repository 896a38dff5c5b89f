"""The command ``p2pavg``, also ``python -m p2pavg``."""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from p2pavg import __version__
from p2pavg.cli.checkpoint import app as checkpoint_app
from p2pavg.cli.run import app as run_app
from p2pavg.errors import AddressError, ConfigError, P2PAvgError
from p2pavg.net.relay.limits import DEFAULT_RELAY_MBPS

app = typer.Typer(
    name="p2pavg",
    help="Peers average gradients and parameters over the open internet, with no server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(run_app)
app.add_typer(checkpoint_app)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"p2pavg {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options that every command has."""


@app.command()
def peer(
    listen: Annotated[
        list[str],
        typer.Option(
            metavar="ADDR",
            help="Address to listen on, such as /ip4/0.0.0.0/tcp/4001; port 0 takes a free one. Repeatable.",
        ),
    ] = ["/ip4/0.0.0.0/tcp/0"],  # noqa: B006 - typer only reads it
    bootstrap: Annotated[
        list[str],
        typer.Option(
            metavar="ADDR",
            help="Address of a peer of the network to join, ending in /p2p/PEER_ID. Repeatable. "
            "Without any, this peer begins a new network.",
        ),
    ] = [],  # noqa: B006
    identity: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Key file, made when missing. Without one, the identity is new at every start.",
        ),
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Help the rounds of this run: reduce a share, contribute nothing."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.run",
            help="Take part in this run, which has an authority, with --certificate and --identity.",
        ),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="This peer's certificate in the run of --run.")
    ] = None,
    delegate: Annotated[
        bool, typer.Option("--delegate", help="Serve the invitation links that `p2pavg run link` makes.")
    ] = False,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            metavar="MBIT/S",
            help="Bandwidth of this machine, from which its share follows. Without it, rounds are measured.",
        ),
    ] = None,
    max_upload_mbps: Annotated[
        float | None,
        typer.Option(metavar="MBIT/S", help="Send no more than this in rounds. Without it, no limit."),
    ] = None,
    max_download_mbps: Annotated[
        float | None,
        typer.Option(metavar="MBIT/S", help="Receive no more than this in rounds. Without it, no limit."),
    ] = None,
    announce: Annotated[
        list[str],
        typer.Option(
            metavar="ADDR",
            help="Address at which others can dial this peer, such as /ip4/203.0.113.7/tcp/4001 for a forwarded port. "
            "Repeatable.",
        ),
    ] = [],  # noqa: B006
    port_mapping: Annotated[
        bool, typer.Option(help="Ask the router to forward the port, by UPnP or NAT-PMP.")
    ] = True,
    relay_mbps: Annotated[
        float,
        typer.Option(
            metavar="MBIT/S", help="Carry this much for peers that cannot be dialled; 0 for nothing."
        ),
    ] = DEFAULT_RELAY_MBPS,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every decision.")] = False,
) -> None:
    """Run a peer until Ctrl-C or SIGTERM: keep the network's records and, with --run-id, help a run's rounds.

    Prints its address on one line when it is ready; everything else goes to the log on stderr.
    """
    from p2pavg.cli.daemon import open_run, run_peer

    _log_to_stderr(verbose=verbose)
    member = open_run(run, certificate=certificate, identity=identity, run_id=run_id, delegate=delegate)
    run_peer(
        listen=listen,
        bootstrap=bootstrap,
        identity=identity,
        announce=announce,
        port_mapping=port_mapping,
        relay_mbps=relay_mbps,
        run_id=run_id,
        member=member,
        bandwidth=bandwidth,
        max_upload_mbps=max_upload_mbps,
        max_download_mbps=max_download_mbps,
    )


@app.command()
def identity(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Key file, made when missing.")],
) -> None:
    """Show the peer id of a key file; make the file, readable by its owner only, when it is missing."""
    from p2pavg.records.identity import load_or_make_seed
    from p2pavg_dht import Ed25519Signer

    typer.echo(Ed25519Signer(load_or_make_seed(file)).peer_id)


@app.command()
def doctor(
    listen: Annotated[
        list[str],
        typer.Option(metavar="ADDR", help="Address on which the peer shall listen. Repeatable."),
    ] = ["/ip4/0.0.0.0/tcp/0"],  # noqa: B006
    bootstrap: Annotated[
        list[str],
        typer.Option(
            metavar="ADDR", help="Address of a peer of the network, ending in /p2p/PEER_ID. Repeatable."
        ),
    ] = [],  # noqa: B006
    identity: Annotated[Path | None, typer.Option(metavar="FILE", help="The peer's key file.")] = None,
    run_id: Annotated[str | None, typer.Option(metavar="ID", help="Look for the peers of this run.")] = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="FILE.run", help="Look for the peers of this run, which has an authority."),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The peer's certificate in the run of --run.")
    ] = None,
    port_mapping: Annotated[
        bool,
        typer.Option(
            "--port-mapping/--no-port-mapping", help="Ask the router to forward the port for a moment."
        ),
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every decision.")] = False,
) -> None:
    """Find out why a peer does not meet others: check machine, files, network and run, and name cause and remedy.

    It takes less than 30 s, and changes nothing that lasts. The exit code is 1 if a fault was found.
    """
    from p2pavg.cli import doctor as work
    from p2pavg.doctor.examination import Options

    options = Options(
        listen=listen,
        bootstrap=bootstrap,
        identity=identity,
        run_id=run_id,
        run=run,
        certificate=certificate,
        port_mapping=port_mapping,
    )
    try:
        work.check(options)
    except (AddressError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from None
    if verbose:
        _log_to_stderr(verbose=True)
    with nullcontext() if verbose else work.quiet():
        text, code = work.report(options, json=json)
    typer.echo(text)
    raise typer.Exit(code)


def _log_to_stderr(*, verbose: bool) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    for name in ("p2pavg", "p2pavg_dht"):
        logging.getLogger(name).setLevel(logging.DEBUG if verbose else logging.INFO)


def main() -> None:
    """Run the command line; report a user's mistake in one line on stderr, with exit code 1."""
    try:
        app()
    except P2PAvgError as error:
        typer.echo(f"p2pavg: {error}", err=True)
        sys.exit(1)
