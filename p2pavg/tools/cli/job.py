"""The commands ``p2pavg job …``: what a run trains, as a folder and as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p2pavg.tools.cli.options import documented

app = typer.Typer(
    name="job",
    help="Jobs, which are what runs train: check a folder, make one file of it, release it, look into one.",
    no_args_is_help=True,
)

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The job's folder, with its job.toml.")]
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The job's file.")]


@app.command()
def check(folder: FolderArgument) -> None:
    """Say what a folder lacks to be a job. The exit code is 1 if it lacks anything."""
    from p2pavg.tools.jobs.folder import read_folder, wrong_copies
    from p2pavg.tools.jobs.manifest import problems

    found = problems(read_folder(folder)) + wrong_copies(folder)
    for sentence in found:
        typer.echo(sentence)
    if found:
        raise typer.Exit(1)
    typer.echo(f"{folder} is a job")


@app.command()
@documented
def pack(
    folder: FolderArgument, output: Annotated[Path | None, typer.Option("--output", "-o")] = None
) -> None:
    """Make the one file of a job, which its members pass on. The same folder gives the same bytes and the same root.

    Args:
        output (FILE): The file to write. Default: NAME.job, by the manifest.
    """
    from p2pavg.base.files import PUBLIC, keep_file
    from p2pavg.tools.jobs.archive import job_root, pack_job, unpack_job
    from p2pavg.tools.jobs.folder import read_folder

    data = pack_job(read_folder(folder))
    manifest, _ = unpack_job(data)
    file = output if output is not None else Path(f"{manifest.name}.job")
    keep_file(file, data, mode=PUBLIC)
    typer.echo(f"{file}: {len(data)} bytes, root {job_root(data).hex()}")


@app.command()
def show(file: FileArgument) -> None:
    """Print what a job's file holds, and its root. Nothing of it runs."""
    from p2pavg.tools.jobs.archive import describe
    from p2pavg.tools.jobs.folder import read_job

    for line in describe(read_job(file)[0]):
        typer.echo(line)


@app.command()
@documented
def unpack(file: FileArgument, folder: Path) -> None:
    """Write the files of a job into a new folder, to look at them. Nothing of it runs.

    Args:
        folder (DIR): The folder to make.
    """
    from p2pavg.tools.jobs.archive import unpack_job
    from p2pavg.tools.jobs.folder import read_job, write_folder

    _, files = unpack_job(read_job(file)[0])
    write_folder(folder, files)
    typer.echo(f"{folder}: {len(files)} files")


@app.command()
@documented
def publish(
    folder: Path,
    file: FileArgument,
    since: Annotated[int | None, typer.Option(min=0)] = None,
    bootstrap: list[str] = [],  # noqa: B006
) -> None:
    """Release a new version of a run's job. All members change to it after the same update.

    Those that train ask their users first. A program continues from the checkpoints in its scratch folder.

    Args:
        folder (RUN): The run's folder, which `p2pavg run create` has made.
        since (UPDATE): Update. Default: three minutes from now, at the run's pace.
        bootstrap (ADDR): Address of a peer of the run. Repeatable.
    """
    from p2pavg.tools.cli.publishing import publish_job

    for line in publish_job(folder, file, bootstrap, since):
        typer.echo(line)


@app.command()
@documented
def fence(test: Annotated[bool, typer.Option("--test")] = False) -> None:
    """Say whether this machine can fence jobs. The exit code is 1 if it cannot, or if an attempt got out.

    Args:
        test: Try to get out of it in many ways, and say what stopped each.
    """
    from p2pavg.tools.jobs.escapes import try_fence
    from p2pavg.tools.jobs.fence import missing_fence

    if not test:
        if why := missing_fence():
            typer.echo(f"this machine has no fence: {why}")
            raise typer.Exit(1)
        typer.echo("this machine fences jobs, with bubblewrap")
        return
    found = try_fence()
    for each in found:
        typer.echo(each.line)
    if any(each.got_out for each in found):
        raise typer.Exit(1)
