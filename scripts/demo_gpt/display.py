"""The run as a table in the terminal: one row per process, live and at the end."""

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
BAR_WIDTH = 10
STYLES = {
    State.STARTING: "dim",
    State.READY: "dim",
    State.TRAINING: "",
    State.RETRYING: "yellow",
    State.DONE: "green",
    State.FAILED: "bold red",
    State.STOPPED: "dim",
}


class Display:
    """Redraws at most every REDRAW_S. Without a terminal it shows nothing until the end."""

    def __init__(self, run: Run, console: Console) -> None:
        self._run = run
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn = 0.0

    def refresh(self) -> None:
        if time.monotonic() - self._drawn >= REDRAW_S:
            self._drawn = time.monotonic()
            self._live.update(render(self._run), refresh=self._console.is_terminal)

    def __enter__(self) -> "Display":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()


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
    last = process.rounds[-1] if process.rounds else None
    return [
        process.name,
        f"{process.step}/{run.settings.steps}",
        bar(process, run.settings.steps),
        f"{process.train[-1].loss:.3f}" if process.train else "",
        f"{process.held_out[-1].loss:.4f}" if process.held_out else "",
        group(len(last.peers), run.settings.peers) if last else "",
        f"{last.waited_seconds:.2f} s" if last else "",
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
    """Return the reasons for slow rounds and for a peer's retries."""
    notes = [
        Text(f"{process.name} tries again. {process.reason}", style="yellow")
        for process in run.peers
        if process.state is State.RETRYING
    ]
    training = any(peer.state is State.TRAINING for peer in run.peers)
    if training and any(peer.state is State.FAILED for peer in run.peers):
        wait = run.settings.match_timeout
        notes.append(Text(f"The others go on without it: each round waits {wait:g} s for a full group."))
    return list(notes)
