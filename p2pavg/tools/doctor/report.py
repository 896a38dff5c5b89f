"""Reports: findings as a table for people, and as JSON for programs. No I/O, no clock, no random source."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from p2pavg.tools.doctor.findings import Finding, Level, faults_of

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
    """Return findings as lines: name, level and sentence, and below them cause and remedy.

    Args:
        width: characters of a line. Words that are longer, such as addresses, are not broken.
    """
    lines = [line for finding in findings for line in _rows(finding, max(width, _MIN_WIDTH))]
    return [*lines, "", summary(findings)]


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line of a table."""
    faults = faults_of(findings)
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    told = [
        f"{count} {word}{'s' if count > 1 else ''}"
        for count, word in ((faults, "fault"), (warnings, "warning"))
        if count
    ]
    return " and ".join(told) if told else "nothing wrong was found"


def _rows(finding: Finding, width: int) -> list[str]:
    level = finding.level.upper() if finding.level in (Level.WARNING, Level.FAULT) else finding.level
    head = f"{finding.name:<{_NAME_WIDTH}}{level:<{_LEVEL_WIDTH}}"
    rows = _wrapped(head, finding.what, width)
    for word, text in (("cause", finding.cause), ("remedy", finding.remedy)):
        if text:
            rows += _wrapped(f"{'':{_NAME_WIDTH + _LEVEL_WIDTH}}{word}: ", text, width)
    return rows


def _wrapped(head: str, text: str, width: int) -> list[str]:
    indent = " " * (_NAME_WIDTH + _LEVEL_WIDTH)
    printable = "".join(each if each.isprintable() else "?" for each in text)  # strangers wrote parts of it
    return textwrap.wrap(
        printable,
        width,
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
