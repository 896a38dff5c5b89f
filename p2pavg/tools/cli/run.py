"""The commands ``p2pavg run …``: runs that have an authority, which decides who is a member."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from p2pavg.tools.cli.options import documented

# Each command imports its work when it runs: to import torch takes over a second, and most commands and all
# help texts need none of it.
app = typer.Typer(
    name="run",
    help="Runs with an authority: make one, admit and revoke members, and join one by a link.",
    no_args_is_help=True,
)

RunArgument = Annotated[Path, typer.Argument(metavar="NAME.run", help="The run file.")]
PeerArgument = Annotated[str, typer.Argument(metavar="PEER_ID", help="Id that `p2pavg identity` prints.")]
RoleOption = Annotated[
    list[str], typer.Option("--role", help="contributor, observer, auxiliary or source. Repeatable.")
]
# Without a default, like the days: the authority decides for each peer how far it is trusted.
WeightOption = Annotated[
    float, typer.Option(metavar="SAMPLES", help="Largest weight of one contribution, in samples.")
]
DaysOption = Annotated[float, typer.Option(metavar="DAYS", help="Days for which the certificate is valid.")]
KeyOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The authority's key. Default: NAME.key beside the run file."),
]
BootstrapOption = Annotated[
    list[str],
    typer.Option(
        metavar="ADDR", help="Address of a peer of the run, besides those in the run file. Repeatable."
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Certificate file. Default: PEER_ID.cert beside the key."
    ),
]


@app.command()
@documented
def create(
    name: str,
    # These settings go into the run file, so that all members have the same ones. The defaults are those of
    # `RunFile`.
    group_size: int = 4,
    min_group_size: int = 2,
    match_timeout: float = 30.0,
    exchange_timeout: float = 60.0,
    compression: str = "blockwise8",
    # What a contribution may count, and how the contributions are combined.
    max_weight: float | None = None,
    robust: str | None = None,
    max_norm: float | None = None,
    audit: str = "after",
    topology: str = "butterfly",
    # From here to `relay_mbps`, each member may have its own value instead. None means that no member is told
    # one.
    bandwidth: float | None = None,
    max_upload_mbps: float | None = None,
    max_download_mbps: float | None = None,
    relay_mbps: float | None = None,
    strategy: Path | None = None,
    job: Path | None = None,
    # Not needed with links: a link names the address of the peer that made it.
    bootstrap: list[str] = [],  # noqa: B006 - typer only reads it
    # This machine serves the links, so other machines must be able to dial it. The free port is kept for its
    # next start.
    address: str | None = None,
    count: int = 1,
    days: float = 7.0,
    output: Annotated[Path | None, typer.Option("--output", "-o")] = None,
) -> None:
    """Make a run in a folder, with this machine as its first peer, and print what to start on each machine.

    The folder holds NAME.key, the authority's key; NAME.run, which every member gets; and this peer's identity and
    certificate, with which it admits others by the links.

    Args:
        name (NAME): Name of the run and of its files.
        group_size: Members that a group aims at, 2 to 64.
        min_group_size: Members that are enough after the match timeout.
        match_timeout (SECONDS): Seconds that a peer looks for a full group.
        exchange_timeout (SECONDS): Seconds after which an exchange has failed.
        compression (CODEC): The codec on the wire.
        max_weight (SAMPLES): Most samples that a contribution counts.
        robust (RULE): Rule that combines contributions instead of their weighted mean, such as trimmed_mean:0.25.
        max_norm (MEDIANS): Longest contribution, in medians of the norms of its group, 1 to 1e6.
        audit (WHEN): Audits of averages: after:PROBABILITY, before:PROBABILITY or off.
        topology (NAME): Members that average: butterfly, where all do; star, where one does; hierarchical, where those
            of a site do before sites exchange sums, with --audit off; or gossip:DEGREE, where a peer averages with so
            many others, and with other ones in the next round.
        bandwidth (MBIT/S): Bandwidth that members announce, unless they say otherwise.
        max_upload_mbps (MBIT/S): Most that members send in rounds, unless they say otherwise.
        max_download_mbps (MBIT/S): Most that members receive in rounds, unless they say otherwise.
        relay_mbps (MBIT/S): What daemons carry for peers that cannot be dialled, unless they say otherwise.
        strategy (FILE): Strategy with which all members train, as .json or .toml: see docs/how-to/write-strategies.md.
        job (FILE): What the run trains: the file of a job, which `p2pavg job pack` makes.
        bootstrap (ADDR): Address of a peer that is usually online. Repeatable, 8 at most.
        address (ADDR): Where others reach this machine: HOST, HOST:PORT or /ip4/HOST/tcp/PORT. Default: the address of
            its own network, and a free port.
        count (N): Number of links. Each admits one peer.
        days (DAYS): Days for which the links can be used.
        output (DIR): Folder of the run. Default: its name.
    """
    from p2pavg.tools.cli.new_run import create_run as make
    from p2pavg.tools.cli.new_run import settings_with

    # The names are those of the fields of `RunFile`, which checks the values.
    settings = {
        "group_size": group_size,
        "min_group_size": min_group_size,
        "match_timeout": match_timeout,
        "exchange_timeout": exchange_timeout,
        "compression": compression,
        "max_weight": max_weight,
        "robust": robust,
        "max_norm": max_norm,
        "audit": audit,
        "topology": topology,
        "bandwidth": bandwidth,
        "max_upload_mbps": max_upload_mbps,
        "max_download_mbps": max_download_mbps,
        "relay_mbps": relay_mbps,
    }
    if strategy is not None:
        # A strategy may bring a rule and a topology of its own. They become settings of the run file, too.
        settings = settings_with(settings, strategy)
    # All files are made before the first line is printed. If one fails, none stays.
    _print(make(name, output, bootstrap, settings, address=address, count=count, days=days, job=job))


@app.command()
def invite(
    run_file: RunArgument,
    peer_id: PeerArgument,
    max_weight: WeightOption,
    days: DaysOption,
    role: RoleOption = ["contributor"],  # noqa: B006
    key: KeyOption = None,
    output: OutputOption = None,
) -> None:
    """Sign a certificate that admits one peer."""
    from p2pavg.tools.cli.authority import invite as sign
    from p2pavg.tools.cli.authority import open_authority

    # The key is read first: a key of another run fails here, before a certificate is signed or a file is
    # written.
    authority = open_authority(run_file, key)
    _print(sign(authority, peer_id, roles=role, max_weight=max_weight, days=days, output=output))


@app.command()
def delegate(
    run_file: RunArgument,
    peer_id: PeerArgument,
    max_weight: WeightOption,
    days: DaysOption,
    role: RoleOption = ["contributor"],  # noqa: B006
    key: KeyOption = None,
    output: OutputOption = None,
) -> None:
    """Sign a certificate of a peer that may admit others, with these roles, this weight and this time at most."""
    from p2pavg.tools.cli.authority import invite as sign
    from p2pavg.tools.cli.authority import open_authority

    authority = open_authority(run_file, key)
    _print(
        sign(authority, peer_id, roles=role, max_weight=max_weight, days=days, output=output, delegate=True)
    )


@app.command()
@documented
def revoke(
    run_file: RunArgument,
    what: list[str],
    key: KeyOption = None,
    # Members take a list only if its number is above that of the list that they have.
    number: int | None = None,
    bootstrap: BootstrapOption = [],  # noqa: B006
    offline: Annotated[bool, typer.Option("--offline")] = False,
) -> None:
    """Add certificates to the signed list NAME.revoked, and publish it. A delegate takes along all that it admitted.

    Args:
        what (WHAT...): Files of certificates, identifiers of `p2pavg run show`, or peer ids with certificates of this
            key.
        number (N): Number of the list, if the file of the last list was lost.
        offline: Sign the list, and publish it later with `p2pavg run publish`.
    """
    from p2pavg.tools.cli.authority import open_authority
    from p2pavg.tools.cli.authority import revoke as sign
    from p2pavg.tools.cli.publishing import publish as hand_over

    authority = open_authority(run_file, key)
    # The signed list is on disk before any peer is asked. If the run is down, `publish` hands it over later.
    _print(sign(authority, what, number))
    if offline:
        typer.echo(f"Publish the list later: p2pavg run publish {run_file}")
    else:
        _print(hand_over(authority, bootstrap))


@app.command()
def publish(
    run_file: RunArgument,
    key: KeyOption = None,
    bootstrap: BootstrapOption = [],  # noqa: B006
) -> None:
    """Publish the list NAME.revoked again, for example after the whole run was down."""
    from p2pavg.tools.cli.authority import open_authority
    from p2pavg.tools.cli.publishing import publish as hand_over

    # The key signs a certificate for this command: it joins the run for some minutes to hand the list over.
    _print(hand_over(open_authority(run_file, key), bootstrap))


@app.command()
@documented
def rotate(
    run_file: RunArgument,
    # Never the old file, which stays valid among the members that have not got the new one.
    output: Annotated[Path, typer.Option("--output", "-o")],
) -> None:
    """Write a run file with a new secret, so that former members can no longer read the run's records.

    Args:
        output (FILE): The new run file.
    """
    from p2pavg.tools.cli.authority import rotate as renew

    _print(renew(run_file, output))


@app.command()
@documented
def show(
    file: Path,
    # Hidden by default: the keys of the run's records follow from it.
    secret: Annotated[bool, typer.Option("--secret")] = False,
) -> None:
    """Print what a run file, a certificate, or a list of revoked certificates says.

    Args:
        file (FILE): Run file, certificate, or NAME.revoked.
        secret: Show the secret of a run file.
    """
    from p2pavg.tools.cli.authority import show as describe

    _print(describe(file, show_secret=secret))


@app.command()
@documented
def link(
    run_file: Path,
    certificate: Path | None = None,
    identity: Path | None = None,
    address: str | None = None,
    count: int = 1,
    days: float = 7.0,
    certificate_days: float | None = None,
    role: list[str] = [],  # noqa: B006
    max_weight: float | None = None,
) -> None:
    """Make invitation links, one a line. The delegate must be online when they are used.

    It is a program that opens p2pavg.join_run(FOLDER), or `p2pavg peer --delegate`.

    Args:
        run_file (RUN): The delegate's folder, or the run file NAME.run.
        certificate (FILE): The delegate's certificate, if it is not in the folder.
        identity (FILE): The delegate's key file, if it is not in the folder.
        address (ADDR): Where the delegate listens, ending in /p2p/PEER_ID. Default: the one of its folder.
        count (N): Number of links. Each admits one peer.
        days (DAYS): Days for which the links can be used.
        certificate_days (DAYS): Days for which the certificates are valid. Default: as long as the delegate's own.
        role: Role that the links grant. Default: all of the delegate's. Repeatable.
        max_weight (SAMPLES): Largest weight that the links grant. Default: the delegate's.
    """
    from p2pavg.tools.cli.new_run import delegate_of, make_links

    _print(
        make_links(
            delegate_of(run_file, certificate, identity),
            address=address,
            count=count,
            days=days,
            certificate_days=certificate_days,
            roles=role,
            max_weight=max_weight,
        )
    )


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)
