"""The command line of the demo."""

import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from .chart import save_chart
from .display import Display, render_end
from .launcher import Launcher
from .progress import Progress, Run, State
from .report import are_identical, to_json
from .settings import Settings

INTERRUPTED = 130  # the shell's code for a command that Ctrl-C ended
TERMINATED = 143

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    peers: Annotated[int, typer.Option(min=2, max=16, help="Peer processes on this machine.")] = 4,
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Optimizer steps.")] = 120,
    batch_size: Annotated[int, typer.Option(min=1, max=256, help="Windows of text a peer and step.")] = 16,
    compression: Annotated[
        str, typer.Option(help="How gradients travel, e.g. blockwise8 or fp32.")
    ] = "blockwise8",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights and the batches.")] = 0,
    calm: Annotated[bool, typer.Option("--calm", help="No peer comes late, and none is killed.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for the chart and the logs.")] = Path("demo-output"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Train a small GPT with peers that share only gradients, and compare with one process on the same batches.

    On the way the last peer starts late, and peer 1 is killed and started again. Both catch up.
    """
    signal.signal(signal.SIGTERM, exit_on_sigterm)
    output.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        peers=peers, steps=steps, batch_size=batch_size, compression=compression, seed=seed, calm=calm
    )
    run = Run.planned(settings)
    try:
        train(run, output.resolve(), Console(quiet=as_json))
    except KeyboardInterrupt:
        typer.echo("Interrupted: all processes of the demo are stopped.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    present(run, output.resolve(), as_json=as_json)
    if any(process.state is not State.DONE for process in run.processes) or not are_identical(run):
        raise typer.Exit(1)


def exit_on_sigterm(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(TERMINATED)


def train(run: Run, output: Path, console: Console) -> None:
    with Display(run, console) as display:
        Launcher(run, output, display.refresh).train()


def present(run: Run, output: Path, *, as_json: bool) -> None:
    chart = output / "loss.png" if has_curves(run.processes) else None
    if chart:
        save_chart(run, chart)
    if as_json:
        typer.echo(json.dumps(to_json(run, chart)))
        return
    console = Console()
    console.print(render_end(run))
    if chart:
        console.print(f"Loss curves: {chart}", soft_wrap=True, highlight=False)


def has_curves(processes: list[Progress]) -> bool:
    return any(process.held_out for process in processes)


if __name__ == "__main__":
    app()
