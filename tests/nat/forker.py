"""The program that starts the processes of a lab: it imports p2pavg once, and forks a process for each peer.

Importing torch and libp2p takes two seconds and 200 MB. Forked processes share both, so that forty peers start within
seconds on a small machine. Each enters a network namespace before it runs anything of p2pavg.

It reads one JSON object a line from its standard input, forks, and ends with all its children when the input ends.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

PRELOADED = (
    "torch",
    "p2pavg",
    "p2pavg.net.libp2p.transport",
    "p2pavg.tools.cli.main",
    "p2pavg.tools.cli.daemon",
)
_CLONE_NEWNET = 0x40000000
_PDEATHSIG = 1
_REAP_SECONDS = 0.2


def main() -> None:
    """Fork processes until the standard input ends."""
    for name in PRELOADED:
        importlib.import_module(name)
    print("ready", flush=True)
    children: set[int] = set()
    waiting = b""
    while True:
        readable, _, _ = select.select([0], [], [], _REAP_SECONDS)
        _reap(children)
        if not readable:
            continue
        read = os.read(0, 65536)
        if not read:
            break
        *lines, waiting = (waiting + read).split(b"\n")
        for line in lines:
            children.add(_fork(json.loads(line)))
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _reap(children: set[int]) -> None:
    for pid in list(children):
        if os.waitpid(pid, os.WNOHANG)[0]:
            children.remove(pid)


def _fork(order: dict[str, Any]) -> int:
    pid = os.fork()
    if not pid:
        _run(order)
    return pid


def _run(order: dict[str, Any]) -> None:
    """Run a child until it ends; never return."""
    status = 1
    try:
        _end_with_parent()
        _prepare(order)
        module, _, name = order["entry"].partition(":")
        getattr(importlib.import_module(module), name)()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 - the last frame of a process: all goes to its log
        traceback.print_exc()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _end_with_parent() -> None:
    """Let the kernel kill this process when the forker ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def _prepare(order: dict[str, Any]) -> None:
    """Enter the namespace, and connect the standard streams with the parent's."""
    os.setpgid(0, 0)
    line = socket.socket(socket.AF_UNIX)
    line.connect(order["socket"])
    os.dup2(line.fileno(), 0)
    os.dup2(line.fileno(), 1)
    line.close()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    os.close(log)
    sys.stdin, sys.stdout = open(0), open(1, "w", buffering=1)  # noqa: SIM115 - until the process ends
    _enter(order["namespace"])
    sys.argv = ["p2pavg", *order["arguments"]]


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


if __name__ == "__main__":
    main()
