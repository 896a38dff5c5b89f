"""The kinds of blobs that peers fetch from each other. No I/O, no clock."""

from __future__ import annotations

import enum


class BlobKind(enum.IntEnum):
    """A kind of blob; its value is on the wire."""

    SNAPSHOT = 0
    """Named by its root, in pieces of 1 MiB. The manifest is the digests of the pieces."""
    AVERAGE = 1
    """Named by its group id, in pieces that are its encoded parts. See :mod:`p2pavg.state.average`."""
    JOB = 2
    """The file of a run's job, named by its root, in pieces of 1 MiB. The manifest is the digests of the pieces."""
