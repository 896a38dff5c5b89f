"""Tries to get out of the fence in many ways, and says what stopped each: ``python -m p2pavg.tools.jobs.escapes``.

:func:`try_fence` runs this module inside the fence, with the names of what it is to reach on this machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from p2pavg.base.errors import ConfigError
from p2pavg.base.limits import STALL_SECONDS
from p2pavg.tools.jobs.fence import (
    HANDED,
    SCRATCH,
    FencedPlaces,
    fenced,
    limited,
    missing_fence,
    own_roots,
    python_places,
)
from p2pavg.tools.jobs.limited import DENIED

FAR = ("192.0.2.1", 9)  # of no machine (RFC 5737)
_SHARED_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Escape:
    """One way out that was tried."""

    what: str
    got_out: bool
    said: str
    """The error that stopped it, or the thing that it got."""

    @property
    def line(self) -> str:
        """The attempt as a line of text."""
        return f"{'GOT OUT' if self.got_out else 'stopped'}  {self.what}: {self.said}"


# ---------------------------------------------------------------------- inside


def read_home(places: dict[str, str]) -> str:
    return Path(places["secret"]).read_text()


def write_system(_places: dict[str, str]) -> str:
    Path("/usr/p2pavg-was-here").write_text("x")
    return "wrote into /usr"


def write_job(_places: dict[str, str]) -> str:
    (Path.cwd() / "was-here").write_text("x")
    return "wrote into the job's folder, which its next start would run"


def fill_memory(_places: dict[str, str]) -> str:
    for folder in ("/", "/dev", "/dev/shm"):
        try:
            with (Path(folder) / "filled").open("wb") as opened:
                opened.write(bytes(_SHARED_BYTES + 1))
                opened.flush()
        except OSError as error:
            stopped = error
        else:
            return f"wrote beyond the limit into {folder}, which is in memory"
    raise stopped


def signal_outside(places: dict[str, str]) -> str:
    os.kill(int(places["pid"]), 0)
    return f"may signal the process {places['pid']} outside"


def see_processes(_places: dict[str, str]) -> str:
    # Inside, the first process is bubblewrap's own. Its end is the end of the job, and of nothing else.
    found = [name for name in os.listdir("/proc") if name.isdigit()]
    if len(found) > 4:
        return f"sees {len(found)} processes"
    raise PermissionError(f"it sees {len(found)} processes, all of them of its own")


def connect_far(_places: dict[str, str]) -> str:
    with socket.socket() as opened:
        opened.settimeout(2.0)
        opened.connect(FAR)
    return "connected"


def connect_here(places: dict[str, str]) -> str:
    with socket.create_connection(("127.0.0.1", int(places["port"])), timeout=2.0):
        return "connected to a program of this machine"


def connect_abstract(places: dict[str, str]) -> str:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.connect("\0" + places["abstract"])
    return "connected to a socket of this machine's session"


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library; raise OSError if it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def mount(_places: dict[str, str]) -> str:
    call("mount", b"none", SCRATCH.encode(), b"tmpfs", 0, None)
    return "mounted a file system"


def make_namespace(_places: dict[str, str]) -> str:
    call("unshare", 0x10000000)  # CLONE_NEWUSER
    return "made a namespace in which it is root"


def trace(_places: dict[str, str]) -> str:
    # PTRACE_SEIZE of bubblewrap's first process, which could then be told not to end with its parent.
    call("ptrace", 0x4206, 1, None, None)
    return "traces the first process"


def read_keyring(_places: dict[str, str]) -> str:
    number = DENIED["keyctl"][0 if platform.machine() == "x86_64" else 1]
    call("syscall", number, 6, -3, None, 0)  # KEYCTL_DESCRIBE of the session's keyring
    return "reads the keyring of your session"


def hide_memory(_places: dict[str, str]) -> str:
    descriptor = os.memfd_create("hidden")
    return f"holds memory that no process has mapped, as file {descriptor}"


def make_device(_places: dict[str, str]) -> str:
    os.mknod(f"{SCRATCH}/disk", 0o600 | 0o060000, os.makedev(8, 0))
    return "made a device file of the first disk"


ESCAPES: dict[str, Callable[[dict[str, str]], str]] = {
    "read a file of your home folder": read_home,
    "write into the system's folders": write_system,
    "change the job's own program": write_job,
    "fill memory with files": fill_memory,
    "signal a process of yours": signal_outside,
    "see other processes": see_processes,
    "connect to another machine": connect_far,
    "connect to a program on this machine": connect_here,
    "connect to a socket of your session": connect_abstract,
    "mount a file system": mount,
    "trace another process": trace,
    "read the keyring of your session": read_keyring,
    "hold memory that is not counted": hide_memory,
    "make a device file": make_device,
    "become root in a namespace of its own": make_namespace,
}


def main() -> None:
    """Try all, and print the attempts as JSON."""
    places = json.loads(sys.argv[1])
    found = []
    for what, attempt in ESCAPES.items():
        try:
            found.append([what, True, attempt(places)])
        except OSError as error:
            found.append([what, False, error.strerror or str(error)])
    print(json.dumps(found))


# ---------------------------------------------------------------------- outside


def try_fence() -> list[Escape]:
    """Try to get out of the fence of this machine.

    Raises:
        ConfigError: this machine has no fence, or it does not start.
    """
    if why := missing_fence():
        raise ConfigError(f"this machine has no fence: {why}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=Path.home(), prefix=".p2pavg-")))
        job, scratch, handed = (folder / name for name in ("job", "scratch", "handed"))
        for each in (job, scratch, handed):
            each.mkdir()
        secret = folder / "secret"
        secret.write_text("it has read this")
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = f"p2pavg-{secrets.token_hex(8)}"
        session = stack.enter_context(socket.socket(socket.AF_UNIX))
        session.bind("\0" + abstract)
        session.listen()
        places = {
            "secret": str(secret),
            "pid": str(os.getpid()),
            "port": str(listening.getsockname()[1]),
            "abstract": abstract,
        }
        python = Path(sys.executable)
        command = fenced(
            [str(python), "-m", "p2pavg.tools.jobs.escapes", json.dumps(places)],
            FencedPlaces(job=job, scratch=scratch, handed=handed, python=python_places(python)),
            {"PYTHONPATH": os.pathsep.join(own_roots()), "HOME": HANDED},
            network=False,
            gpu=False,
            shared_bytes=_SHARED_BYTES,
        )
        done = subprocess.run(
            limited(command, _SHARED_BYTES),
            capture_output=True,
            timeout=STALL_SECONDS,
            check=False,
            start_new_session=True,
        )
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise ConfigError(f"the fence does not start: {said[-1] if said else done.returncode}")
        return [Escape(*each) for each in json.loads(done.stdout)]


if __name__ == "__main__":
    signal.alarm(int(STALL_SECONDS))  # whatever an attempt waits for
    main()
