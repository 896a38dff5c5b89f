"""The progress of a run, read from its members' words by a peer that does not train."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection

from p2pavg.base.messages import decoded_all
from p2pavg.optim.coordination.progress import PeerProgress
from p2pavg.optim.coordination.view import TOPIC
from p2pavg.runs.membership.job_release import SeenProgress
from p2pavg.runs.records.board import board_key
from p2pavg.runs.records.run_records import RunRecords


async def read_progress(records: RunRecords, run_id: str) -> SeenProgress:
    """Return the progress of a run, as its members' words on their board tell it."""
    found = await records.find(board_key(run_id, TOPIC))
    said = {record.publisher: record.value for record in found if not record.withdrawn}
    return seen_progress(decoded_all(said, PeerProgress).values())


def seen_progress(words: Collection[PeerProgress]) -> SeenProgress:
    """Return the version with which most peers train, and the median of their updates: a few may lie."""
    if not words:
        return SeenProgress(version=0, epoch=0)
    # Of two that are equal, the earlier one: a newcomer with it hears of the change, and an invented one keeps no
    # peer out of the other.
    most = Counter(word.version for word in words).items()
    version, _ = max(most, key=lambda each: (each[1], -each[0]))
    return SeenProgress(
        version, statistics.median_low(word.epoch for word in words if word.version == version)
    )
