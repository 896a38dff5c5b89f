"""Output of figures: one line of JSON for each, and a table of all of them."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

DIGITS = 4


class Report:
    """Collects and prints figures as they are measured.

    Lines go to ``path`` or to the standard output. In the latter case the table goes to the standard error, so that a
    reader of the lines sees nothing else.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._file: TextIO | None = path.open("w") if path else None
        self._console = Console(stderr=path is None, width=150)
        self._rows: list[tuple[str, str, str, str, str]] = []
        self.errors = 0
        """Number of figures that are missing because of an error."""

    def figure(
        self,
        benchmark: str,
        name: str,
        unit: str,
        values: Sequence[float],
        *,
        system: str = "p2pavg",
        median: float | None = None,
        **conditions: Any,
    ) -> float:
        """Report one figure: the median of ``values`` with their range.

        Args:
            median: replaces the median of ``values``, for a figure that is derived from other medians.
            conditions: settings of the measurement, which go into the line.

        Returns:
            The median.
        """
        middle = statistics.median(values) if median is None else median
        self._line(
            benchmark=benchmark,
            system=system,
            figure=name,
            unit=unit,
            median=middle,
            min=min(values),
            max=max(values),
            repeats=len(values),
            **conditions,
        )
        spread = f"{_short(min(values))} to {_short(max(values))} ({len(values)})"
        self._rows.append(
            (benchmark, system, _describe(name, conditions), f"{_short(middle)} {unit}".strip(), spread)
        )
        return middle

    def skipped(self, benchmark: str, system: str, why: str) -> None:
        """Report that something is not measured here, which is not an error."""
        self._line(benchmark=benchmark, system=system, skipped=why)
        self._rows.append((benchmark, system, "skipped", why, ""))

    def error(self, benchmark: str, system: str, what: str) -> None:
        """Report that a measurement is implausible or did not end."""
        self.errors += 1
        self._line(benchmark=benchmark, system=system, error=what)
        self._rows.append((benchmark, system, "ERROR", what, ""))

    def note(self, text: str) -> None:
        """Print progress for the user."""
        print(text, file=sys.stderr, flush=True)

    def table(self) -> None:
        """Print all figures as a table."""
        table = Table("benchmark", "system", "figure", "median", "range (repeats)")
        for row in self._rows:
            table.add_row(*row)
        self._console.print(table)

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._file is not None:
            self._file.close()

    def _line(self, **fields: Any) -> None:
        print(json.dumps(fields), file=self._file or sys.stdout, flush=True)


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.{DIGITS}g}"


def _describe(name: str, conditions: dict[str, Any]) -> str:
    shown = ", ".join(f"{key} {value}" for key, value in conditions.items())
    return f"{name} ({shown})" if shown else name
