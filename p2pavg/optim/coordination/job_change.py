"""The change from one version of a run's job to the next, as a program hears of it that `p2pavg join` has started."""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from p2pavg.optim.coordination.progress import PeerProgress
from p2pavg.runs.config import AveragingConfig

NOTE = "next"
"""Name of the file, in the folder that is handed to a job's program, with the next version and the update after which
it takes over. The process that has the network writes it when it has verified the authority's signature."""
_MAX_CHARS = 64


@dataclass(frozen=True, slots=True)
class JobNote:
    """The content of the file."""

    version: int
    since: int

    @property
    def text(self) -> str:
        """The file's text."""
        return f"{self.version} {self.since}\n"


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

    def reason(self, mine: PeerProgress, others: Collection[PeerProgress]) -> str:
        """Return the reason why the next version takes over now; empty if it does not, or not yet.

        Args:
            others: the words of the other peers, of all versions.
        """
        try:
            with self._note.open() as opened:
                text = opened.read(_MAX_CHARS).strip()
        except FileNotFoundError:
            return ""
        if not re.fullmatch("[0-9]+ [0-9]+", text, re.ASCII):
            return ""
        note = JobNote(*map(int, text.split()))
        epoch = mine.epoch
        # A peer that missed the update sees that the others have changed. One peer alone, which may lie, or has begun
        # too early, does not decide.
        changed = [word.epoch for word in others if word.version == note.version]
        if len(changed) > sum(word.version == mine.version for word in others):
            epoch = max(epoch, statistics.median_low(changed))
        return (
            f"the next version of the job takes over after update {note.since}" if epoch >= note.since else ""
        )
