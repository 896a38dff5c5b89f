"""The connection of a training process to the launcher: events go out on stdout; the end of stdin means leave.

Stdin also ends when the launcher dies for any reason, so no training process outlives its launcher.
"""

import os
import signal
import threading

from .events import Done, Event, to_line

STDIN, STDOUT, STDERR = 0, 1, 2


class Channel:
    def __init__(self) -> None:
        # a copy of stdout for the events alone: other output goes to the log
        self._events = os.fdopen(os.dup(STDOUT), "w")
        os.dup2(STDERR, STDOUT)
        self._leave = threading.Event()
        self._done = False
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def send(self, event: Event) -> None:
        self._done = self._done or isinstance(event, Done)
        self._events.write(to_line(event))
        self._events.flush()

    def wait_for_leave(self) -> None:
        self._leave.wait()

    def _listen(self) -> None:
        # os.read, because a thread inside sys.stdin holds a lock that the interpreter's exit needs
        while os.read(STDIN, 4096):
            pass
        if not self._done:
            os.kill(os.getpid(), signal.SIGTERM)
        self._leave.set()
