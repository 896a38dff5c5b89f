"""A process that has imported torch and p2pavg, and forks one member of a swarm for each request.

Importing both costs a process seconds of processor time, and a fork costs milliseconds.
:mod:`p2pavg.testing.forking` starts this program, and sends it requests over a socket of whole messages: a
:class:`ForkRequest` as JSON, with the files that become standard input, output and error.

The new process is a child of the test's, not of this one: its parent ends at once, and the test has asked Linux for
the orphans below it. So the test sees the end of each process by itself. The answer to a request is the new process'
id, and one more message once its parent has ended. This program ends when the socket is closed.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

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
    with suppress(BrokenPipeError, ConnectionResetError):  # the test was killed
        while True:
            data, files, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, FILES)
            if not data:
                break
            parent = os.fork()
            if not parent:
                try:
                    pid = os.fork()
                except OSError as error:
                    print("p2pavg: no process was forked:", error, file=sys.stderr, flush=True)
                    os._exit(1)
                if pid:
                    with suppress(OSError):  # the process has done it itself, and may have ended
                        os.setpgid(pid, pid)
                    control.send(str(pid).encode())
                    os._exit(0)
                request = ForkRequest(**json.loads(data))
                _become(request, control, files)
                return request
            for file in files:
                os.close(file)
            os.waitpid(parent, 0)
            control.send(b"it is yours")
    return None


def _become(request: ForkRequest, control: socket.socket, files: list[int]) -> None:
    """Take on, in the new process, what a new interpreter would have been started with."""
    os.setpgid(0, 0)
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
