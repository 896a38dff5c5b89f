"""The run as a table in the terminal, one row a process, live and at the end; without a terminal, as lines of text."""

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .progress import Progress, Run, State
from .report import mean_compression_ratio, sentences, when

REDRAW_S = 0.2
LINE_S = 5.0  # between two lines of progress where there is no terminal
BAR_WIDTH = 10
STYLES = {
    State.PLANNED: "dim",
    State.STARTING: "dim",
    State.READY: "dim",
    State.TRAINING: "",
    State.WAITING: "yellow",
    State.KILLED: "red",
    State.DONE: "green",
    State.FAILED: "bold red",
    State.STOPPED: "dim",
}


class Display:
    """Redraws a table at most every REDRAW_S; without a terminal it prints a line every LINE_S."""

    def __init__(self, run: Run, console: Console) -> None:
        self._run = run
        self._console = console
        self._live = (
            Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        )
        self._drawn = -LINE_S

    def refresh(self) -> None:
        now = time.monotonic()
        if now - self._drawn < (LINE_S if self._live is None else REDRAW_S):
            return
        self._drawn = now
        if self._live is not None:
            self._live.update(render(self._run), refresh=True)
        else:
            self._console.print(progress_line(self._run), soft_wrap=True, markup=False, highlight=False)
            self._console.file.flush()  # a file is written in blocks otherwise

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


def progress_line(run: Run) -> str:
    """Return the progress of the processes that have something to tell, in one line."""
    steps = run.settings.steps
    told = [
        f"{process.name}: {process.step}/{steps} {process.state.value}"
        + (f" ({process.reason})" if process.reason else "")
        for process in run.processes
        if process.state is not State.PLANNED
    ]
    return f"{run.seconds:.0f} s: " + "; ".join(told)


def render(run: Run) -> RenderableType:
    return Group(heading(run), table(run), *failures(run), *waiting_note(run))


def render_end(run: Run) -> RenderableType:
    return Group(render(run), Text(), Text(sentences(run)))


def heading(run: Run) -> Text:
    settings = run.settings
    text = Text(f"{settings.peers} peers", style="bold")
    if parameters := run.peers[0].parameters:
        text.append(f", {parameters / 1e6:.2f} M parameters", "not bold")
    text.append(f", {settings.compression}", "not bold")
    if (ratio := mean_compression_ratio(run)) is not None and ratio > 1.1:
        text.append(f": {ratio:.1f} times less than fp32", "not bold")
    return text.append(f", {run.seconds:.0f} s", "not bold")


def table(run: Run) -> Table:
    """Return the table, 78 columns wide at four peers and up to 999 steps."""
    grid = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    grid.add_column("", no_wrap=True)
    grid.add_column("step", justify="right", no_wrap=True)
    grid.add_column("", width=BAR_WIDTH)
    for name in ("loss", "held-out", "group", "round", "MB out/in"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("", no_wrap=True)
    for process in run.processes:
        grid.add_row(*row(process, run), style=STYLES[process.state])
    return grid


def row(process: Progress, run: Run) -> list[RenderableType]:
    last = process.updates[max(process.updates)] if process.updates else None
    return [
        process.name,
        f"{process.step}/{run.settings.steps}",
        bar(process, run.settings.steps),
        f"{process.train[-1].loss:.3f}" if process.train else "",
        f"{process.held_out[-1].loss:.4f}" if process.held_out else "",
        group(len(last.samples), run.settings.peers) if last else "",
        f"{last.seconds:.2f} s" if last else "",
        f"{process.bytes_sent / 1e6:.1f}/{process.bytes_received / 1e6:.1f}" if last else "",
        process.state.value,
    ]


def bar(process: Progress, steps: int) -> ProgressBar:
    style = "red" if process.state is State.FAILED else "cyan"
    return ProgressBar(
        total=steps, completed=process.step, width=BAR_WIDTH, complete_style=style, finished_style="green"
    )


def group(size: int, target: int) -> Text:
    return Text(f"{size}/{target}", style="yellow" if size < target else "")


def failures(run: Run) -> list[RenderableType]:
    return [failure(process) for process in run.processes if process.state is State.FAILED]


def failure(process: Progress) -> Panel:
    """Return the reason of a failure, and the last lines of the log unless the reason contains them."""
    lines = [f"[bold]{escape(process.reason)}[/] ({when(process)})"]
    lines += [f"[dim]{escape(line)}[/]" for line in process.log_tail.strip().splitlines()[-6:]]
    return Panel("\n".join(lines), title=f"{process.name} failed", title_align="left", border_style="red")


def waiting_note(run: Run) -> list[RenderableType]:
    """Return the reasons of the peers that wait."""
    return [
        Text(f"{process.name} waits: {process.reason}", style="yellow")
        for process in run.peers
        if process.state is State.WAITING and process.reason
    ]
