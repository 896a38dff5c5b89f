"""The commands ``p2pavg checkpoint …``: files with the state of a peer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from p2pavg.tools.cli.options import documented

app = typer.Typer(
    name="checkpoint",
    help="Checkpoint files: show one, look for damage, and take the model out of it.",
    no_args_is_help=True,
)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The checkpoint.")]


@app.command()
def show(file: FileArgument) -> None:
    """Print what a checkpoint holds. Only its header is read; `p2pavg checkpoint verify` looks for damage."""
    from p2pavg.tools.cli.checkpoint_files import describe

    for line in describe(file):
        typer.echo(line)


@app.command()
def verify(file: FileArgument) -> None:
    """Check every byte of a checkpoint. The exit code is 1 if the file is damaged."""
    from p2pavg.tools.cli.checkpoint_files import verify as check

    typer.echo(check(file))


@app.command()
@documented
def export(
    file: FileArgument,
    output: Path,
    form: Annotated[str | None, typer.Option("--format")] = None,
    force: Annotated[bool, typer.Option("--force")] = False,
    like: Path | None = None,
    dtype: str | None = None,
) -> None:
    """Write the trained parameters and averaged buffers of a checkpoint under the model's own names.

    Args:
        output (OUT): The file to write; with --like, the folder to make.
        form (FORMAT): safetensors, or torch for torch.load. Default: torch if OUT ends in .pt or .pth.
        force: Overwrite OUT.
        like (DIR): A folder of the same model as save_pretrained of transformers or peft writes it. OUT becomes such a
            folder, with its settings and its tokenizer.
        dtype (DTYPE): Of all floating point tensors: float32, bfloat16 or float16.
    """
    from p2pavg.base.errors import ConfigError
    from p2pavg.tools.cli.checkpoint_files import export as write
    from p2pavg.tools.cli.checkpoint_files import export_like

    if like is None:
        typer.echo(write(file, output, form=form, force=force, dtype=dtype))
        return
    if form is not None or force:
        raise ConfigError("--like makes a new folder with safetensors: leave out --format and --force")
    typer.echo(export_like(file, output, like, dtype=dtype))
