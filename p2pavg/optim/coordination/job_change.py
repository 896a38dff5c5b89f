"""The change from one version of a run's job to the next, as a program hears of it that `p2pavg join` has started."""

from __future__ import annotations

import re
from pathlib import Path

from p2pavg.runs.config import AveragingConfig

NOTE = "next"
"""Name of the file, in the folder that is handed to a job's program, with the update after which the next version takes
over. The process that has the network writes it when it has verified the authority's signature."""
_MAX_DIGITS = 20


class JobChange:
    """The note of a program's folder.

    Args:
        note: its file, which is there once the authority has released another version.
    """

    def __init__(self, note: Path) -> None:
        self._note = note

    @classmethod
    def of(cls, config: AveragingConfig) -> JobChange | None:
        """Return the change of a program behind a gate; ``None`` for any other, whose user starts the next version."""
        behind_gate = config.files is not None and config.files.gate is not None
        return cls(config.files.folder / NOTE) if behind_gate and config.files is not None else None

    def reason(self, epoch: int) -> str:
        """Return the reason why the next version takes over now; empty if it does not, or not yet.

        Args:
            epoch: the latest update that is known of the run.
        """
        try:
            with self._note.open() as opened:
                text = opened.read(_MAX_DIGITS).strip()
        except FileNotFoundError:
            return ""
        if not re.fullmatch("[0-9]+", text, re.ASCII) or epoch < int(text):
            return ""
        return f"the next version of the job takes over after update {text}"
