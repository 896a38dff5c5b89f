"""The command ``p2pavg launch``: several processes of a program as the peers of one run on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p2pavg.tools.cli.options import documented


@documented
def launch(
    program: Annotated[list[str] | None, typer.Argument()] = None,
    count: Annotated[int, typer.Option("-n", "--peers", min=1)] = 2,
    job: Path | None = None,
    elastic: Annotated[bool, typer.Option("--elastic")] = False,
) -> None:
    """Start a program N times, as the peers of one run that stays on this machine, until all of them have ended.

    The program takes its part with `p2pavg.job()`. Each line that it prints has its peer's number before it. Ctrl-C
    ends all. The exit code is 1 if a peer failed.

    Args:
        program ([PROGRAM] [ARGS]...): The program, such as train.py, and its arguments.
        count (N): Number of peers.
        job (DIR): Start the program of this job's folder.
        elastic: Start a peer that fails again. Without it, all end when one fails.
    """
    from p2pavg.base.errors import ConfigError
    from p2pavg.tools.jobs.archive import some_of
    from p2pavg.tools.jobs.folder import read_folder
    from p2pavg.tools.jobs.manifest import MANIFEST, problems, read_manifest

    words = list(program or [])
    if job is not None:
        files = read_folder(job)
        if found := problems(files):
            raise ConfigError(f"{job} is no job: {some_of(found)}")
        words = [str(job / read_manifest(files[MANIFEST]).program), *words]
    if not words or not Path(words[0]).is_file():
        raise ConfigError(
            f"there is no program {words[0]!r}" if words else "name a program, or a job's folder with --job",
            remedy="p2pavg launch -n 3 train.py",
        )

    # Imported here: torch takes seconds, and a mistake is told at once.
    import trio

    from p2pavg.tools.cli.launching import launch_all

    ends = trio.run(launch_all, words, Path(words[0]).resolve().parent, count, elastic)
    for number, end in enumerate(ends):
        if end.is_error:
            typer.echo(f"[{number}] {end.why}", err=True)
    if any(end.is_error for end in ends):
        raise typer.Exit(1)
