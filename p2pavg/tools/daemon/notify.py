"""The service manager's socket (``sd_notify``): it tells systemd that a daemon is ready, ends, or starts again."""

from __future__ import annotations

import logging
import os
import socket
import time

logger = logging.getLogger(__name__)

VARIABLE = "NOTIFY_SOCKET"

READY = "READY=1"
STOPPING = "STOPPING=1"


def reloading() -> str:
    """Return the state of a daemon that starts again in the same process."""
    return f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}"


def notify(state: str, status: str = "") -> None:
    """Tell the service manager, if there is one. A manager that does not listen costs a line in the log.

    Args:
        state: one of the states of this module; empty for the status only.
        status: one line for people, which ``systemctl status`` shows.
    """
    address = os.environ.get(VARIABLE, "")
    if not address:
        return
    text = "\n".join(filter(None, [state, status and f"STATUS={status}"]))
    if address.startswith("@"):  # an abstract socket
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as told:
            told.setblocking(False)
            told.sendto(text.encode(), address)
    except OSError as error:
        logger.warning("cannot tell the service manager %r: %s", text, error.strerror)
