"""Telling a shortage of the machine, which passes, from other failures of the system. No I/O, no clock."""

from __future__ import annotations

import errno

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


def is_shortage(error: OSError) -> bool:
    """Return whether the machine lacked something for the moment: a file to open, memory or buffers.

    Strangers can cause one, for example with many connections, so no task of a peer may end with it.
    """
    return error.errno in _SHORTAGES
