"""The commands ``p2pavg join``, ``status``, ``stop`` and ``files``: a daemon, and what a machine needs around it."""

from __future__ import annotations

import sys
from importlib.resources import files as resources
from pathlib import Path
from typing import Annotated

import typer

from p2pavg.base.errors import ConfigError
from p2pavg.tools.cli.config_file import ConfigOption, configurable, naming
from p2pavg.tools.cli.options import DisplayOptions, NetworkOptions, ServiceOptions, documented, grouped

RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]", help="Name of the run, or its run file. Without it: all daemons of this user."
    ),
]
DaemonHomeOption = Annotated[
    Path | None, typer.Option("--home", metavar="DIR", help="The daemon's folder, in place of RUN.")
]


@configurable()
@grouped
@documented
def join(
    context: typer.Context,
    run: str,
    *,
    link: str | None = None,
    home: Path | None = None,
    identity: Path | None = None,
    certificate: Path | None = None,
    network: NetworkOptions,
    only_help: Annotated[bool, typer.Option("--only-help")] = False,
    yes: Annotated[bool, typer.Option("--yes")] = False,
    job: list[str] = [],  # noqa: B006 - typer only reads it
    no_fence: Annotated[bool, typer.Option("--no-fence")] = False,
    files: Path | None = None,
    service: ServiceOptions,
    plain: Annotated[bool, typer.Option("--plain")] = False,
    config: ConfigOption = None,  # noqa: ARG001 - its callback uses it
    display: DisplayOptions,
) -> None:
    """Take part in a run until Ctrl-C or SIGTERM, with a run file or an invitation link and nothing else.

    If the run has a job, this machine trains: the command fetches the job, says what it is, asks, and runs it behind a
    fence. With --only-help, or in a run without a job, the peer helps the run's rounds as `p2pavg peer` does, if its
    certificate has the role auxiliary. Its identity is made at the first start. SIGHUP starts it again with all files
    read anew.

    Args:
        run (RUN): The run file NAME.run, or an invitation link p2pavg:...
        link (LINK): Invitation link that brings a certificate, if there is none yet.
        home (DIR): Folder for identity, certificate and the socket of `p2pavg status`, made when missing. Default: a
            folder of the run's name in ~/.local/share/p2pavg.
        identity (FILE): Key file. Default: identity.key in the folder.
        certificate (FILE): This peer's certificate. Default: NAME.cert in the folder, or beside the run file.
        only_help: Average and relay for the run; do not run its job, if it has one.
        yes: Run the job of --job without a question, on machines without a person.
        job (HASH): A job that --yes agrees to, and no other: its root, of `p2pavg job show`. Repeatable, for the next
            version.
        no_fence: With --yes: run the job also if this machine cannot fence it.
        files (DIR): A folder that has larger files of the job, such as its base model. Others are fetched from mirrors.
        plain: Write log lines, also on a terminal, in place of the live view.
    """
    display.start_log()
    with naming(context):
        _check_names(run, link)
        if yes != bool(job):
            raise ConfigError(
                "--yes and --job HASH need each other: without a person, a job is agreed to by name"
            )

        # Imported after the check: torch takes seconds, and a mistake in a name is told at once.
        from p2pavg.peer.joining.finding import join as find_files
        from p2pavg.peer.joining.home import Home
        from p2pavg.tools.cli.daemon import DaemonOptions, read_member, run_peer

        found = find_files(run, link=link, certificate=certificate, identity=identity, home=home)
        member = read_member(
            found.run_file,
            certificate=found.certificate,
            identity=found.identity,
            run_id=None,
            delegate=service.delegate,
            admits=True,
        )
        run_peer(
            DaemonOptions(
                network=network,
                service=service.with_defaults(context, None if member is None else member.run),
                display=display,
                identity=found.identity,
                run_id=None,
                member=member,
                home=Home(found.folder),
                only_help=only_help,
                agreed_jobs=tuple(each.lower() for each in job),
                without_fence=no_fence,
                files=files,
                live_view=not plain and sys.stdout.isatty() and sys.stderr.isatty(),
            )
        )


def _check_names(run: str, link: str | None) -> None:
    """Raise ConfigError if there is no such run file or folder, or a link is damaged."""
    from p2pavg.base.files import check_readable
    from p2pavg.runs.membership.tokens import SCHEME, parse_link

    if not run.startswith(SCHEME) and not Path(run).is_dir():
        check_readable(Path(run), "run file")
    for text in (run, link):
        if text is not None and text.startswith(SCHEME):
            parse_link(text)


@documented
def status(
    run: RunArgument = None,
    home: DaemonHomeOption = None,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Say what this user's daemons do: run, addresses, reachability, peers, rounds, bytes, certificate.

    The exit code is 0 if it runs and other peers answer it, 3 if no daemon runs, 4 if no other peer answers it, and 5
    if other members refuse it. Of several daemons, the highest counts.

    Args:
        json: Print a JSON array with one object a daemon.
    """
    from p2pavg.tools.cli import status as work

    text, code = work.status(work.homes_of(run, home), json=json)
    typer.echo(text)
    raise typer.Exit(code)


@documented
def stop(run: RunArgument = None, home: DaemonHomeOption = None, timeout: float = 70.0) -> None:
    """Tell a daemon to finish its round and to end, and wait for it.

    The exit code is 0 if it has ended, 3 if none runs, and 75 if it still finishes a round.

    Args:
        timeout (SECONDS): Wait so long for the daemon's end.
    """
    from p2pavg.tools.cli import status as work

    text, code = work.stop(work.homes_of(run, home), timeout=timeout)
    typer.echo(text)
    raise typer.Exit(code)


MACHINE_FILES = {
    "p2pavg@.service": "a unit for systemd, one instance for each run",
    "Containerfile": "a container of a peer, built in a clone or an unpacked sdist",
    "grafana.json": "a dashboard for Grafana, of the metrics of p2pavg",
}


@documented
def files(folder: Path) -> None:
    """Write a unit for systemd, a container file and a dashboard for Grafana into a folder.

    Args:
        folder (FOLDER): Made when missing.
    """
    packaged = resources("p2pavg.tools.cli") / "machine_files"
    # All are looked at before one is written: what a person has changed stays, and none is left half done.
    present = [name for name in MACHINE_FILES if (folder / name).exists()]
    if present:
        raise ConfigError(
            f"{folder} has {', '.join(present)} already; name another folder, or move them away"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, what in MACHINE_FILES.items():
        (folder / name).write_bytes((packaged / name).read_bytes())
        typer.echo(f"{folder / name}: {what}")
