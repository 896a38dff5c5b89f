"""Findings: the results of the checks. No I/O, no clock, no random source."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from p2pavg.base.formats import PeerText, count

ORDER = (
    "key file",
    "run file",
    "certificate",
    "port",
    "bootstrap",
    "clock",
    "version",
    "outer address",
    "firewall",
    "router",
    "port mapping",
    "announced",
    "run",
    "peers",
    "bandwidth",
)
"""Names of the findings, in the order in which a report lists them."""

OPTIONAL = frozenset({"run file", "certificate", "announced", "peers"})
"""Names without a finding where the user named no such file or address, or where no run was found."""


class Level(StrEnum):
    """The severity of a finding, from nothing wrong to something that keeps this peer from others."""

    OK = "ok"
    NOTE = "note"
    """Something is as it may be, or could not be checked."""
    WARNING = "warning"
    """The peer works, and something makes it slower or less reachable."""
    FAULT = "fault"
    """The peer does not start, or does not meet the others."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Raises:
        ValueError: the name is not in :data:`ORDER`, or a warning or fault has no cause or no remedy.
    """

    name: str
    level: Level
    what: str
    """The observation, as a sentence without a full stop."""
    cause: str = ""
    """The reason for it; empty if nothing is wrong."""
    remedy: str = ""
    """The step that the user can take; empty if none is needed."""

    def __post_init__(self) -> None:
        if self.name not in ORDER:
            raise ValueError(f"no check has the name {self.name!r}")
        if self.level in (Level.WARNING, Level.FAULT) and not (self.cause and self.remedy):
            raise ValueError(f"a {self.level} needs a cause and a remedy: {self.what}")


def ok(name: str, what: str) -> Finding:
    """Return the finding of a check that found nothing wrong."""
    return Finding(name, Level.OK, what)


def note(name: str, what: str, cause: str = "", remedy: str = "") -> Finding:
    """Return a finding that the user may want to know, and that is not wrong."""
    return Finding(name, Level.NOTE, what, cause, remedy)


def warning(name: str, what: str, cause: str, remedy: str) -> Finding:
    """Return the finding of something that makes the peer slower or less reachable."""
    return Finding(name, Level.WARNING, what, cause, remedy)


def fault(name: str, what: str, cause: str, remedy: str) -> Finding:
    """Return the finding of something that keeps the peer from others."""
    return Finding(name, Level.FAULT, what, cause, remedy)


def not_known(name: str, cause: str) -> Finding:
    """Return the finding of a check that could not be made."""
    return note(name, "not known", cause)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings sorted by :data:`ORDER`; those of one check keep their order."""
    return sorted(findings, key=lambda finding: ORDER.index(finding.name))


def faults_of(findings: Sequence[Finding]) -> int:
    """Return the number of faults."""
    return sum(finding.level is Level.FAULT for finding in findings)


# Reports: findings as a table for people, and as JSON for programs.

VERSION = 1
"""Version of the JSON; a program that reads it compares this first."""
_NAME_WIDTH = 14
_LEVEL_WIDTH = 8
_MIN_WIDTH = 60


def as_json(findings: Sequence[Finding], seconds: float) -> str:
    """Return findings as JSON.

    Args:
        seconds: how long the examination took.
    """
    report = {
        "version": VERSION,
        "faults": faults_of(findings),
        "seconds": round(seconds, 2),
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(report, indent=2, ensure_ascii=False)


def as_table(findings: Sequence[Finding], width: int) -> list[str]:
    """Return findings as lines: name, level and sentence, and below them cause and remedy; then their number.

    Args:
        width: characters of a line. Words that are longer, such as addresses, are not broken.
    """
    indent = " " * (_NAME_WIDTH + _LEVEL_WIDTH)
    lines = []
    for finding in findings:
        is_bad = finding.level in (Level.WARNING, Level.FAULT)
        level = finding.level.upper() if is_bad else finding.level
        rows = [(f"{finding.name:<{_NAME_WIDTH}}{level:<{_LEVEL_WIDTH}}", finding.what)]
        rows += [(f"{indent}cause: ", finding.cause), (f"{indent}remedy: ", finding.remedy)]
        for head, text in rows:
            lines += textwrap.wrap(
                PeerText(text),  # strangers wrote parts of it
                max(width, _MIN_WIDTH),
                initial_indent=head,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
    levels = Counter(finding.level for finding in findings)
    told = [count(levels[level], level.value) for level in (Level.FAULT, Level.WARNING) if levels[level]]
    return [*lines, "", " and ".join(told) or "nothing wrong was found"]
