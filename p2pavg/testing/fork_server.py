"""A process that has imported torch and p2pavg, and forks one member of a swarm for each request.

Importing both costs a process seconds of processor time, and a fork costs milliseconds.
:mod:`p2pavg.testing.forking` starts this program and talks to it over a socket of whole messages, JSON each:

====================================  ==================================================================
to this program                       meaning
====================================  ==================================================================
``{"fork": {...}}`` with three files  fork a process with these files as standard input, output and error
``{"reap": pid}``                     the end of a process is known; its id may be used again from now on
====================================  ==================================================================

It answers a request with ``{"pid": pid}``, and says ``{"ended": pid, "code": code}`` when a process has ended. It ends
when the socket is closed; the processes that it has forked do not.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from p2pavg.testing.swarm_process import run_member

MAX_MESSAGE_BYTES = 1 << 20
FILES = 3  # standard input, output and error


@dataclass(frozen=True)
class ForkRequest:
    """A function for a new process to run, and the place where it runs."""

    work: str
    """The function, as ``"module:function"``."""
    path: list[str]
    """The folders in which it finds modules."""
    folder: str
    """Its working directory."""
    environment: dict[str, str]


def serve(control: socket.socket) -> ForkRequest | None:
    """Fork a process for each request. Return the request in the new process, and ``None`` here, at the end."""
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in selector.select():
                    if key.fileobj is not control:
                        selector.unregister(key.fileobj)
                        os.close(key.fd)
                        _say_ended(control, key.data)
                        continue
                    data, files, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, FILES)
                    if not data:
                        return None
                    if request := _carry_out(json.loads(data), control, selector, files):
                        return request
        except (BrokenPipeError, ConnectionResetError):  # the test was killed
            return None


def _carry_out(
    message: dict[str, Any], control: socket.socket, selector: selectors.BaseSelector, files: list[int]
) -> ForkRequest | None:
    """Do what a message asks for. Return its request in the new process, and ``None`` here."""
    if "reap" in message:
        os.waitpid(message["reap"], 0)
        return None
    request = ForkRequest(**message["fork"])
    pid = os.fork()
    if not pid:
        _become(request, control, selector, files)
        return request
    with suppress(ProcessLookupError, PermissionError):  # the process has done it itself, and may have ended
        os.setpgid(pid, pid)  # the test, which learns the id now, may signal the group at once
    for file in files:
        os.close(file)
    _send(control, {"pid": pid})
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, data=pid)
    return None


def _say_ended(control: socket.socket, pid: int) -> None:
    # It stays a zombie until the other side knows, so that no signal for it reaches another process.
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert found is not None
    code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
    _send(control, {"ended": pid, "code": code})


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.send(json.dumps(message).encode())


def _become(
    request: ForkRequest, control: socket.socket, selector: selectors.BaseSelector, files: list[int]
) -> None:
    """Take on, in the new process, what a new interpreter would have been started with."""
    os.setpgid(0, 0)
    # Files are closed without a word to the selector: the server's process goes on with what it has registered.
    for key in list(selector.get_map().values()):
        if key.fileobj is not control:
            os.close(key.fd)
    control.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    sys.path[0] = request.folder  # as for `python -m`
    importlib.invalidate_caches()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # Python's own generator does this by itself


def _main() -> None:
    for name in ("p2pavg.net.libp2p.transport", "p2pavg.optim"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a new process would copy what all of them share
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:  # in a new process
        _end_with(_run(request))


def _run(request: ForkRequest) -> int:
    """Run the function of a request to its end; return the exit code of the process, negative for a signal."""
    try:
        run_member(request.work, request.path)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT
    except BaseException:  # noqa: BLE001 - as in the main program, where the interpreter prints it
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end_with(code: int) -> NoReturn:
    """End this process as the interpreter does, but leave its memory to the system.

    Freeing each object of what it shares with the server would copy all of it first, which takes a second.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that are not daemons
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):  # its reader is gone, or it is closed
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    _main()
