"""The releases of a run's job that a member's folder keeps: a run file has the first one only."""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Collection, Iterable

from p2pavg.base.errors import ConfigError
from p2pavg.base.files import PRIVATE, keep_file, read_text
from p2pavg.base.messages import decoded_all
from p2pavg.optim.coordination.progress import PeerProgress
from p2pavg.optim.coordination.view import TOPIC
from p2pavg.peer.joining.home import Home
from p2pavg.runs.membership.job_release import MAX_RELEASE_CHARS, JobRelease, SeenProgress, read_release
from p2pavg.runs.membership.run_file import RunFile
from p2pavg.runs.records.board import board_key
from p2pavg.runs.records.run_records import RunRecords

logger = logging.getLogger(__name__)

MOST_KEPT = 2
"""The version with which the run trains, and the one that it changes to."""
_FILE = "releases"


def kept_releases(home: Home, run: RunFile) -> list[JobRelease]:
    """Return the releases that are known here, each with a genuine signature, the newest last."""
    found = {} if run.release is None else {run.release.number: run.release}
    file = home.folder / _FILE
    if file.exists():
        for line in read_text(
            file, "file of releases", max_bytes=MOST_KEPT * (MAX_RELEASE_CHARS + 1)
        ).splitlines():
            try:
                release = read_release(line, run.authority, run.run_id)
            except ConfigError as error:
                # Members tell it again.
                logger.warning("a line of %s is left out: %s", file, error)
            else:
                found[release.number] = release
    return [found[number] for number in sorted(found)]


def keep_releases(home: Home, releases: Iterable[JobRelease]) -> None:
    """Keep the newest of some releases for the next start.

    Raises:
        ConfigError: the file cannot be written.
    """
    newest = sorted(releases, key=lambda release: release.number)[-MOST_KEPT:]
    text = "".join(f"{release.text}\n" for release in newest)
    keep_file(home.folder / _FILE, text.encode(), mode=PRIVATE)


# The progress of a run, read from its members' words by a peer that does not train.


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
