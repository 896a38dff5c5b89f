"""The limit of open files, and the share of it that connections may use."""

from __future__ import annotations

import logging
import sys

if sys.platform != "win32":
    import resource

logger = logging.getLogger(__name__)

# Far above the needs of this library, and the value that servers such as nginx and etcd ask for. Some systems allow
# 2^20 or more. With such a limit, a program that closes all descriptors before it starts another program takes seconds.
WANTED_FILES = 65536

# Files left to the program: data sets, worker processes, log files. A DataLoader with 16 workers takes about 100.
RESERVED_FILES = 256


def raise_file_limit() -> int | None:
    """Raise the soft limit of open files as far as the system allows, WANTED_FILES at most, and return it.

    Return ``None`` if the system has no such limit. The limit is never lowered.
    """
    if sys.platform == "win32":
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if wanted <= soft:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # e.g. macOS, where kern.maxfilesperproc is lower still
        logger.debug("the limit of open files stays at %d: %s", soft, error)
        return soft
    logger.debug("the limit of open files was raised from %d to %d", soft, wanted)
    return wanted


def share_of_files(limit: int | None, wanted: int) -> float:
    """Return the share of ``wanted`` files that connections may use, above 0 and at most 1.

    The program keeps half of a low limit, and RESERVED_FILES of a high one.
    """
    if limit is None:
        return 1.0
    available = max(limit - RESERVED_FILES, limit // 2)
    return min(1.0, available / wanted)
