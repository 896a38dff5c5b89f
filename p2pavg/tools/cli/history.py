"""The commands ``p2pavg history …``: the record of a run that anyone can check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p2pavg.tools.cli.options import (
    FormatOption,
    HomeOption,
    LevelOption,
    LogFormat,
    LogLevel,
    documented,
    log_to_stderr,
)

app = typer.Typer(
    name="history",
    help="The history of a run: verify it, credit its peers, and merge what several archivists have kept.",
    no_args_is_help=True,
)

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the history.")]
RunOption = Annotated[
    Path | None,
    typer.Option(
        "--run", metavar="FILE.run", help="The run's file: the history must be of this run and its authority."
    ),
]


@documented
def archive(
    folder: FolderArgument,
    run: Annotated[str, typer.Option()],
    home: HomeOption = None,
    keep: int | None = None,
    log_format: FormatOption = LogFormat.TEXT,
    log_level: LevelOption = LogLevel.INFO,
) -> None:
    """Keep the history of a run: every update with its proof, and a snapshot now and then. It trains nothing.

    A peer that trains keeps one with RunState(history=DIR). `p2pavg history verify DIR` checks it.

    Args:
        run (RUN): Folder, run file or invitation link of the run, as for `p2pavg join`.
        keep (N): Keep the last N updates. Default: all of them.
    """
    from p2pavg.tools.history.archivist import run_archive

    log_to_stderr(log_format, log_level)
    run_archive(run, folder, home=home, keep=keep)


@app.command()
@documented
def verify(
    folder: FolderArgument,
    run: RunOption = None,
    model: Path | None = None,
    first: Annotated[int | None, typer.Option("--from", min=0)] = None,
    last: Annotated[int | None, typer.Option("--to", min=0)] = None,
    sample: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    again: Annotated[bool, typer.Option("--again")] = False,
    device: str = "cpu",
) -> None:
    """Check every byte of a history, and replay it to the last bit. The exit code is 1 if something is wrong.

    What was verified on this machine is not verified again, while its files do not change.

    Args:
        model (FILE): Compare the last parameters with a file of safetensors, also a checkpoint.
        first (N): Begin at the last snapshot before update N.
        last (N): End with update N.
        sample (P): Check this fraction of the updates, chosen at random, and replay nothing.
        again: Verify what this machine has verified before, too.
        device (DEVICE): Replay on this device, such as cuda.
    """
    from p2pavg.tools.history.commands import verify as check

    lines, is_good = check(
        folder, run=run, model=model, first=first, last=last, sample=sample, again=again, device=device
    )
    for line in lines:
        typer.echo(line)
    raise typer.Exit(0 if is_good else 1)


@app.command(name="credits")
@documented
def list_credits(
    folder: FolderArgument,
    run: RunOption = None,
    form: Annotated[str, typer.Option("--format")] = "table",
    output: Annotated[Path | None, typer.Option("--output", "-o")] = None,
    same: list[Path] = [],  # noqa: B006 - typer only reads it
    against: Path | None = None,
) -> None:
    """Count the samples and updates of each peer, by day, from what the members of each round have signed.

    A peer that evidence in the history proves to have lied is credited with nothing.

    Args:
        form (FORMAT): table, csv, json, or html for a page with a drawing.
        output (FILE): Write it to this file.
        same (FILE): A statement of `p2pavg history same`. Repeatable.
        against (FILE): Compare with credits in JSON. The exit code is 1 if they differ.
    """
    from p2pavg.tools.history.commands import compare_credits, write_credits

    if against is not None:
        differences = compare_credits(folder, against, run=run, same=same)
        for line in differences or [f"{against} has the credits of this history"]:
            typer.echo(line)
        raise typer.Exit(1 if differences else 0)
    text, faults = write_credits(folder, form, output, run=run, same=same)
    if text:
        typer.echo(text, nl=False)
    for line in faults:
        typer.echo(f"p2pavg: {line}", err=True)
    raise typer.Exit(1 if faults else 0)


@app.command()
@documented
def receipt(
    peer: str,
    folder: Annotated[Path | None, typer.Argument()] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o")] = None,
    check: Annotated[bool, typer.Option("--check")] = False,
) -> None:
    """Write a small file that proves one peer's contributions against the seals of an archivist, or check one.

    Args:
        peer (PEER): Id of the peer; with --check, the receipt's file.
        folder (DIR): Folder of the history; not with --check.
        output (FILE): The file to write. Default: PEER.receipt.
        check: Check a receipt, and print what it proves. No history is needed.
    """
    from p2pavg.tools.history.commands import check_receipt, write_receipt

    if check == (folder is not None):
        raise typer.BadParameter("name a peer and the folder of a history; or, with --check, a receipt alone")
    lines = check_receipt(Path(peer)) if folder is None else write_receipt(peer, folder, output)
    for line in lines:
        typer.echo(line)


@app.command()
@documented
def merge(output: Path, folders: list[Path]) -> None:
    """Copy into one folder what several archivists have of a run, so that one fills the holes of the other.

    Args:
        output (OUT): Folder to make, or a history to add to.
        folders (DIR...): Histories of one run.
    """
    from p2pavg.tools.history.commands import merge as join

    for line in join(output, folders):
        typer.echo(line)


@app.command()
@documented
def same(output: Path, identities: list[Path]) -> None:
    """Sign that several peers are one contributor. Each of their keys signs; `credits --same` counts them as one.

    Args:
        output (OUT): The statement to write.
        identities (KEY...): Key files of one person's peers, two at least.
    """
    from p2pavg.tools.history.commands import write_same

    typer.echo(write_same(output, identities))
