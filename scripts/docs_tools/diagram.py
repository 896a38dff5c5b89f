"""Write the table and the diagram of the agreement into docs/reference/transitions.md: scripts/docs diagram."""

from __future__ import annotations

from pathlib import Path

from p2pavg.consensus.agreement import TABLE, Row
from p2pavg.consensus.member import FINAL, LIVE, RoundPhase

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "transitions.md"
BEGIN, END = "<!-- generated: scripts/docs diagram -->\n", "<!-- end of what is generated -->\n"


def table_and_diagram() -> str:
    """Return the table and the diagram as Markdown."""
    return f"{diagram()}\n{table()}"


def diagram() -> str:
    """Return the changes of phase as a Mermaid state diagram, each once; the table has their reasons."""
    arrows = [
        (source, row.becomes.value)
        for row in TABLE
        if row.becomes is not None
        for source in (["live"] if row.phases == LIVE else sorted(phase.value for phase in row.phases))
    ]
    changes = [(source, to) for source, to in dict.fromkeys(arrows) if source != to]
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {RoundPhase.EXCHANGING.value}"]
    lines += [
        f"    {source} --> {to}" for source, to in changes if source == "live" or ("live", to) not in changes
    ]
    return "\n".join([*lines, "    live: any phase before the end", "```", ""])


def table() -> str:
    """Return a table of all rows."""
    lines = ["| in | when | what | then |", "|---|---|---|---|"]
    lines += [f"| {_phases(row)} | {_on(row)} | {row.text} | {_then(row)} |" for row in TABLE]
    return "\n".join([*lines, ""])


def _phases(row: Row) -> str:
    if row.phases == LIVE:
        return "any before the end"
    if row.phases == FINAL:
        return "any at the end"
    return ", ".join(phase.value for phase in RoundPhase if phase in row.phases)


def _on(row: Row) -> str:
    names = [kind.__name__ for kind in row.on if kind is not None]
    condition = "" if row.when is None else f"`{row.when.__name__.lstrip('_')}`"
    return ", ".join([*(f"**{name}**" for name in names), *([condition] if condition else [])])


def _then(row: Row) -> str:
    return "" if row.becomes is None else row.becomes.value


def in_docs(text: str) -> str:
    """Return the text between the marks in the document."""
    return text.split(BEGIN)[1].split(END)[0]


def main() -> None:
    """Replace the text between the marks."""
    text = DOCS.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    DOCS.write_text(before + BEGIN + table_and_diagram() + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
