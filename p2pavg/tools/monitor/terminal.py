"""The run in one screen of a terminal. :func:`screen` decides what is shown; :func:`show` shows it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import trio
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from p2pavg.base.formats import bars
from p2pavg.base.limits import LOOK_SECONDS
from p2pavg.state.progress import amount, span
from p2pavg.tools.monitor.watching import Watcher

FIRST_STATUS_SECONDS = 15.0
"""For the first status to come; then the screen is printed without any."""
PRINTED_LINES = 60
_STYLES = {
    "computing": "green",
    "waiting": "cyan",
    "following": "yellow",
    "gone": "red",
    "helping": "green",
    "idle": "dim",
}
_RESULTS = {"success": ("done", "green"), "failed": ("failed", "red"), "no_peers": ("no group", "dim")}

Shown = Mapping[str, Any]


async def show(watcher: Watcher) -> None:
    """Show the run in the terminal until cancelled; print it once if standard output is no terminal."""
    console = Console()
    # A file or a pipe gets one screen. It waits for statuses, since at the start there are none.
    if not console.is_terminal:
        with trio.move_on_after(FIRST_STATUS_SECONDS):
            await watcher.changed()
            await trio.sleep(2 * LOOK_SECONDS)  # the statuses of the other peers come after the first one
        console.print(screen(watcher.shown(), PRINTED_LINES))
        return
    # auto_refresh would draw from a thread of its own.
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(screen(watcher.shown(), console.height), refresh=True)
            # Drawn also without news: the times since peers were seen go on.
            with trio.move_on_after(LOOK_SECONDS):
                await watcher.changed()
                # Statuses of many peers come one after the other, and each one would be a new screen.
                await trio.sleep(LOOK_SECONDS / 2)


def screen(run: Shown, height: int) -> RenderableType:
    """Return one screen: the summary, peers, the newest rounds, the curve, parameters, transfers, exchanges, news.

    Args:
        run: :meth:`p2pavg.tools.monitor.overview.Overview.shown`.
        height: lines of the screen.
    """
    # The end of an id: most peer ids begin alike.
    names = {peer["id"]: peer["name"] or f"..{peer['id'][-8:]}" for peer in run["peers"]}
    left = max(height - 22, 3)
    # Peers and rounds share the lines that the other panels leave.
    peers = min(len(run["peers"]), max(left // 2, 3))
    return Group(
        _summary(run),
        _peers(run, peers),
        _rounds(run, names, min(max(left - peers, 3), 10)),
        Columns([_curve(run), _parameters(run, names)], expand=True),
        Columns([_moves(run, names), _news(run, names)], expand=True),
    )


def _summary(run: Shown) -> Text:
    summary = run["summary"]
    line = Text.assemble(
        (f" {run['run']} ", "bold reverse"),
        f"  {summary['peers']} peers   update {summary['epoch']}   ",
        f"{summary['samples_per_second']:.4g} samples/s   {amount(summary['sent'])} sent in rounds",
    )
    if summary["drifted"]:
        line.append(f"   {summary['drifted']} peers report drift", style="bold red")
    return line


def _peers(run: Shown, most: int) -> Table:
    table = _table(
        "Peers", "Peer", "State", ">Update", ">Samples/s", "Reach", ">Up/down", ">Rounds", "Version", "Seen"
    )
    for peer in run["peers"][:most]:
        gone = peer["gone"] is not None
        # An auxiliary trains nothing: "idle", update 0 and no samples would read as if it did not help.
        helps = peer["role"] == "auxiliary"
        activity = "gone" if gone else "helping" if helps else peer["activity"]
        rates = (f"{rate:.3g}" if rate else "-" for rate in (peer["upload_mbps"], peer["download_mbps"]))
        failures = f" ({peer['failures']} failed)" if peer["failures"] else ""
        drift = " drift" if peer["drift"] else ""
        table.add_row(
            # Everything that other peers have written goes into a Text: in a plain string, rich would obey
            # its markup.
            Text(peer["name"] or f"..{peer['id'][-8:]}", style="strike dim" if gone else "bold"),
            Text(activity + drift, style="red" if drift else _STYLES.get(activity, "")),
            "-" if helps else str(peer["epoch"]),
            "-" if helps else f"{peer['samples_per_second']:.4g}",
            Text(peer["reach"]),
            "/".join(rates),
            f"{peer['rounds']}{failures}",
            Text(peer["version"]),
            f"{span(max(run['now'] - peer['last_seen'], 0.0))} ago",
        )
    if len(run["peers"]) > most:
        table.add_row(Text(f"and {len(run['peers']) - most} more", style="dim"))
    return table


def _rounds(run: Shown, names: Mapping[str, str], most: int) -> Table:
    table = _table(
        "Rounds",
        "Ended",
        "Group",
        "Result",
        ">Duration",
        ">Exchange",
        ">Members",
        "Lost",
        ">Clipped",
        ">Sent",
    )
    for each in run["rounds"][:most]:
        result = Text()
        for kind, count in each["results"].items():
            # The members of a group may report different ends, such as one that was cut off.
            word, style = _RESULTS.get(kind, (kind, ""))
            result.append(f"{word} " if len(each["results"]) == 1 else f"{word} for {count} ", style=style)
        lost = ", ".join(names.get(one["peer"], one["key"][:6]) for one in each["lost"])
        table.add_row(
            _clock(each["at"]),
            each["group"][:8] or "-",
            result,
            f"{each['duration']:.2f} s",
            f"{each['exchange']:.2f} s",
            f"{each['members']:g}",
            Text(lost or "-"),
            f"{each['clipped']:g}",
            amount(each["bytes"]),
        )
    return table


def _curve(run: Shown) -> Panel:
    lines = []
    for series in run["series"][:3]:
        values = [value for _, value in series["median"]]
        lines.append(Text(f"{series['name'][:20]:20} {values[-1]:.5g}", style="bold"))
        lines.append(Text(bars(values, 40), style="cyan"))
    return _panel("Metrics", lines or [Text("no metric yet", style="dim")])


def _parameters(run: Shown, names: Mapping[str, str]) -> Panel:
    lines = [
        Text(f"update {each['epoch']}  {each['state'][:8]}  {_named(each['peers'], names)}")
        for each in run["lineages"][:4]
    ]
    lines += [
        Text(f"{_named([peer['id']], names)}: {peer['drift']}", style="red")
        for peer in run["peers"]
        if peer["drift"]
    ]
    lines += [Text(f"excluded: {_named([each['peer']], names)}", style="red") for each in run["excluded"][:3]]
    return _panel("Parameters", lines[:6] or [Text("no peer trains now", style="dim")])


def _moves(run: Shown, names: Mapping[str, str]) -> Panel:
    lines = [_transfer(each, names) for each in run["transfers"][:3]]
    ways: dict[str, int] = {}
    for each in run["exchanges"]:
        # Both ends report the way, each for what it has sent and received. The slower one counts for the
        # pair.
        way = max(each["said"].values(), key=("lane", "stream", "relayed").index)
        ways[way] = ways.get(way, 0) + 1
    told = ", ".join(f"{count} by {way}" for way, count in sorted(ways.items()))
    lines.append(Text(f"pairs that exchanged: {told or 'none yet'}"))
    return _panel("Transfers and exchanges", lines)


def _transfer(each: Shown, names: Mapping[str, str]) -> Text:
    verb = "sends" if each["upload"] else "fetches"
    total = f" of {amount(each['total'])}" if each["total"] else ""
    return Text(
        f"{names.get(each['peer'], '')} {verb} {amount(each['done'])}{total}, {amount(each['bytes_per_second'])}/s"
    )


def _news(run: Shown, names: Mapping[str, str]) -> Panel:
    lines = [
        Text(
            f"{_clock(each['at'])} {names.get(each['peer'], '..' + each['peer'][-8:])} {each['text']}",
            overflow="ellipsis",
            no_wrap=True,
        )
        for each in run["news"][:5]
    ]
    return _panel("News", lines or [Text("nothing yet", style="dim")])


def _named(peer_ids: Sequence[str], names: Mapping[str, str]) -> str:
    shown = ", ".join(names.get(peer_id, f"..{peer_id[-8:]}") for peer_id in peer_ids[:4])
    return f"{shown} and {len(peer_ids) - 4} more" if len(peer_ids) > 4 else shown


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _panel(title: str, lines: Sequence[Text]) -> Panel:
    return Panel(Group(*lines), title=title, title_align="left", border_style="dim")


def _table(title: str, *columns: str) -> Table:
    """Return an empty table. ``>`` before a column's name aligns it to the right."""
    table = Table(
        title=title, title_justify="left", title_style="bold", expand=True, box=None, header_style="dim"
    )
    for column in columns:
        table.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", no_wrap=True
        )
    return table
