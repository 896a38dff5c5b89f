"""The releases of a run's job that a member's folder keeps: a run file has the first one only."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from p2pavg.base.errors import ConfigError
from p2pavg.base.files import PRIVATE, keep_file, read_text
from p2pavg.peer.joining.home import Home
from p2pavg.runs.membership.job_release import MAX_RELEASE_CHARS, JobRelease, read_release
from p2pavg.runs.membership.run_file import RunFile

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
