"""Credits in words, numbers and a drawing. No I/O, no clock."""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from p2pavg.state.history.entries import Credit

SHOWN_PEERS = 8
"""Peers with a colour of their own in the drawing; the others are one."""
_COLOURS = ("#3366aa", "#dd8833", "#449955", "#bb4444", "#7755aa", "#886655", "#cc77aa", "#777777", "#bbbbbb")
_WIDTH, _HEIGHT = 960.0, 240.0


@dataclass(frozen=True, slots=True)
class CreditedPeer:
    """One contributor, under one identity or several."""

    peers: tuple[str, ...]
    days: Mapping[int, tuple[int, float]]
    """Updates and samples, by the day since 1970 in UTC."""
    struck_out: str = ""
    """The lie for which it is credited with nothing; empty for an honest one."""

    @property
    def updates(self) -> int:
        """Updates in which it contributed. Two identities of one contributor in one update count twice."""
        return sum(updates for updates, _ in self.days.values())

    @property
    def samples(self) -> float:
        """Samples that were counted."""
        return sum(samples for _, samples in self.days.values())


def contributors(
    found: Sequence[Credit], excluded: Mapping[str, str], same: Sequence[tuple[str, ...]]
) -> list[CreditedPeer]:
    """Return the contributors, the one with most samples first; those that lied come last.

    Args:
        excluded: reasons of the peers that lied.
        same: identities that are one contributor.
    """
    owner: dict[str, str] = {}
    for peers in same:
        # Statements may overlap: then all of their identities are one.
        joined = {owner.get(peer_id, peer_id) for peer_id in peers} | set(peers)
        first = min(joined)
        owner = {peer_id: first if at in joined else at for peer_id, at in owner.items()}
        owner |= dict.fromkeys(joined, first)
    grouped: dict[str, list[Credit]] = {}
    for credit in found:
        grouped.setdefault(owner.get(credit.peer_id, credit.peer_id), []).append(credit)
    listed = []
    for group in grouped.values():
        days: dict[int, tuple[int, float]] = {}
        for credit in group:
            for each in credit.days:
                updates, samples = days.get(each.day, (0, 0.0))
                days[each.day] = (updates + each.updates, samples + each.samples)
        lies = [excluded[credit.peer_id] for credit in group if credit.peer_id in excluded]
        peers = tuple(sorted(credit.peer_id for credit in group))
        listed.append(CreditedPeer(peers, dict(sorted(days.items())), "; ".join(lies)))
    return sorted(listed, key=lambda each: (bool(each.struck_out), -each.samples, each.peers))


def date_text(day: int) -> str:
    """Return a day since 1970 as a date."""
    return str(np.datetime64(day, "D"))


def as_table(found: Sequence[CreditedPeer]) -> str:
    """Return a table for a terminal."""
    total = sum(each.samples for each in found if not each.struck_out)
    rows = [("peer", "updates", "samples", "share", "first day", "last day")]
    for each in found:
        share = "struck out" if each.struck_out else f"{each.samples / total:.1%}" if total else ""
        days = list(each.days)
        for number, peer_id in enumerate(each.peers):
            if number:
                rows.append((f"  and {peer_id}", "", "", "", "", ""))
                continue
            first, last = date_text(days[0]), date_text(days[-1])
            rows.append((peer_id, f"{each.updates:,}", f"{each.samples:,.0f}", share, first, last))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = [
        "  ".join(
            text.ljust(width) if column in (0, 4, 5) else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines += [
        f"{each.peers[0]} is credited with nothing: {each.struck_out}" for each in found if each.struck_out
    ]
    return "\n".join(lines) + "\n"


def as_csv(found: Sequence[CreditedPeer]) -> str:
    """Return one line for each contributor and day."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("peer", "day", "updates", "samples", "struck_out"))
    for each in found:
        for day, (updates, samples) in each.days.items():
            writer.writerow((" ".join(each.peers), date_text(day), updates, repr(samples), each.struck_out))
    return text.getvalue()


def as_json(run_id: str, authority: bytes, first: int, last: int, found: Sequence[CreditedPeer]) -> str:
    """Return everything as JSON."""
    said = {
        "run_id": run_id,
        "authority": authority.hex(),
        "first_update": first,
        "last_update": last,
        "contributors": [
            {
                "peers": list(each.peers),
                "updates": each.updates,
                "samples": each.samples,
                "struck_out": each.struck_out,
                "days": [
                    {"day": date_text(day), "updates": updates, "samples": samples}
                    for day, (updates, samples) in each.days.items()
                ],
            }
            for each in found
        ],
    }
    return json.dumps(said, indent=1) + "\n"


_STYLE = (
    "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "svg{width:100%;height:auto}pre{overflow-x:auto}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}}</style>"
)


def as_html(run_id: str, found: Sequence[CreditedPeer], style: str = _STYLE) -> str:
    """Return a page of its own with a drawing of the samples of each day, and the table.

    Args:
        style: in the page's head. The monitor's pages have a sheet of their own, and allow no other one.
    """
    title = f"Contributions to {html.escape(run_id)}"
    honest = [each for each in found if not each.struck_out]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>{style}'
        f"<h1>{title}</h1><p>Samples of each day (UTC), from what the members of each round have signed.</p>"
        f"{_drawing(honest)}<pre>{html.escape(as_table(found))}</pre></html>\n"
    )


def _drawing(found: Sequence[CreditedPeer]) -> str:
    days = sorted({day for each in found for day in each.days})
    if not days:
        return ""
    # A long run has more days than the drawing has room for, so that a bar may be of several.
    span = days[-1] - days[0] + 1
    step = -(-span // 240)
    bars = -(-span // step)
    sums = [[0.0] * bars for _ in range(min(len(found), SHOWN_PEERS + 1))]
    for number, each in enumerate(found):
        for day, (_, samples) in each.days.items():
            sums[min(number, SHOWN_PEERS)][(day - days[0]) // step] += samples
    highest = max(map(sum, zip(*sums, strict=True)))
    width = _WIDTH / bars
    shapes = "".join(_bars(sums, highest, width))
    first, last = date_text(days[0]), date_text(days[-1])
    return (
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT + 24:g}" role="img"'
        f' aria-label="Samples of each day from {first} to {last}">{shapes}'
        f'<text x="0" y="{_HEIGHT + 18:g}" fill="currentColor">{first}</text>'
        f'<text x="{_WIDTH:g}" y="{_HEIGHT + 18:g}" text-anchor="end" fill="currentColor">{last}</text></svg>'
    )


def _bars(sums: Sequence[Sequence[float]], highest: float, width: float) -> Iterator[str]:
    for bar in range(len(sums[0])):
        top = _HEIGHT
        for number, of_peer in enumerate(sums):
            height = of_peer[bar] / highest * _HEIGHT if highest else 0.0
            if height:
                top -= height
                yield (
                    f'<rect x="{bar * width:.2f}" y="{top:.2f}" width="{max(width - 1, 0.5):.2f}"'
                    f' height="{height:.2f}" fill="{_COLOURS[number]}"/>'
                )
