"""How many files this process may open, and what of that connections may take."""

from __future__ import annotations

import logging
import sys

if sys.platform != "win32":
    import resource

logger = logging.getLogger(__name__)

# Far above what this library uses, and what servers such as nginx and etcd ask for. Some systems allow 2^20 or more,
# and a program that closes all descriptors before it starts another one would then take seconds.
WANTED_FILES = 65536

# Left to the program: data sets, worker processes, log files, libraries. A DataLoader with 16 workers takes about 100.
RESERVED_FILES = 256


def raise_file_limit() -> int | None:
    """Raise the soft limit of open files as far as the system allows, WANTED_FILES at most; return what it is then.

    ``None`` where the system has no such limit. The limit is never lowered.
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
        logger.info("the limit of open files stays at %d: %s", soft, error)
        return soft
    logger.info("the limit of open files was raised from %d to %d", soft, wanted)
    return wanted


def share_of_files(limit: int | None, wanted: int) -> float:
    """Return what part of ``wanted`` files connections may use, above 0 and at most 1.

    Half of a low limit is the program's, and RESERVED_FILES of a high one.
    """
    if limit is None:
        return 1.0
    available = max(limit - RESERVED_FILES, limit // 2)
    return min(1.0, available / wanted)
