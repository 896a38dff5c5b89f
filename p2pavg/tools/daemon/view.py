"""A volunteer's view in the terminal: what this machine gives, with whom, and how far the run is."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

import trio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from p2pavg.base.formats import PeerText, bars, count, in_bytes, in_time
from p2pavg.base.limits import LOOK_SECONDS
from p2pavg.telemetry.status import PeerStatus
from p2pavg.tools.control.messages import DaemonStatus
from p2pavg.tools.daemon.life import DaemonProcess
from p2pavg.tools.daemon.words import in_words, progress_of

BARS = 32  # of the curve
LOG_LINES = 6
MAX_PARTNERS = 8
SHORT_CHARS = 10
"""Last characters of a peer's id, which tell peers apart. The first ones are the same for all."""


@asynccontextmanager
async def showing(console: Console, life: DaemonProcess) -> AsyncIterator[None]:
    """Show the daemon until the end of the block. Log lines are part of the view meanwhile."""
    log = LogLines(LOG_LINES)
    with log.in_place_of_others(), Live(console=console, auto_refresh=False, transient=False) as live:

        async def refresh() -> None:
            while True:
                live.update(view(life.status(), life.run_statuses(), tuple(log.lines)), refresh=True)
                await trio.sleep(LOOK_SECONDS)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(refresh)
            yield
            nursery.cancel_scope.cancel()


def view(status: DaemonStatus, statuses: Mapping[str, PeerStatus], log: Sequence[str]) -> RenderableType:
    """Return the view of a daemon.

    Args:
        statuses: of the run's peers by their ids, as they published them.
        log: the last log lines.
    """
    progress = progress_of(statuses.values())
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    gives = (
        f"{count(status.rounds, 'round')} in {in_time(status.uptime)}; {in_bytes(status.bytes_sent)} sent, "
        f"{in_bytes(status.bytes_received)} received; {status.elements:,} numbers averaged"
    )
    table.add_row("this machine gives", gives)
    if status.failed_rounds:
        table.add_row("", Text(f"{count(status.failed_rounds, 'round')} failed", style="yellow"))
    # What other peers have named goes into a Text: in a plain string, rich would obey its markup.
    table.add_row("with", _partners(status, statuses))
    table.add_row("the run", Text(in_words(progress)))
    if len(progress.history) > 1:
        name = Text(f"{progress.metric} over the run")
        table.add_row(name, Text(bars(progress.history, BARS), style="green"))
    table.add_row("others reach it", Text(status.reachability))
    network = f"{count(status.peers, 'other peer')} of the network, {status.run_peers} of the run"
    table.add_row("network", Text(network, style="" if status.is_connected else "yellow"))
    if status.refusal:
        table.add_row("refused", Text(status.refusal, style="bold red"))
    parts: list[RenderableType] = [table]
    if log:
        parts += [Text(), *(Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in log)]
    title = Text(f"p2pavg {status.version}" + (f" in the run {status.run_id}" if status.run_id else ""))
    hint = "Ctrl-C ends after the round"
    if status.leaving:
        hint = "finishing the last round; Ctrl-C again ends at once"
    return Panel(Group(*parts), title=title, subtitle=Text(hint, style="dim"), title_align="left")


def _partners(status: DaemonStatus, statuses: Mapping[str, PeerStatus]) -> Text:
    if not status.round_peers:
        return Text("no other peer yet: it waits for a round", style="dim")
    names = []
    for peer_id in status.round_peers[:MAX_PARTNERS]:
        known = statuses.get(peer_id)
        names.append((known.name if known is not None else "") or f"…{peer_id[-SHORT_CHARS:]}")
    more = len(status.round_peers) - len(names)
    return Text(", ".join(names) + (f" and {more} more" if more > 0 else "") + " in the last round")


class LogLines(logging.Handler):
    """Keeps the last log lines, while the terminal shows a view.

    Args:
        most: lines to keep.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
        self.lines: deque[str] = deque(maxlen=most)
        """The last lines, the oldest first."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the first line of a record, without what a terminal would obey."""
        self.lines.append(PeerText(self.format(record).splitlines()[0]))

    @contextmanager
    def in_place_of_others(self) -> Iterator[None]:
        """Take the place of the root's handlers until the end of the block."""
        root = logging.getLogger()
        before, root.handlers = root.handlers, [self]
        try:
            yield
        finally:
            root.handlers = before
